"""Fine-tuning: a new run that begins with the weights, the shape and the tokenizer of another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import random_gpt, run_here
from test_resume import assert_same_run, stop_at

from data.config import TokenizerConfig
from train import train
from training.checkpoint import load_checkpoint, open_checkpoint, save_checkpoint
from training.config import SettingsError, TrainConfig
from training.run import start_run

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def pretrained(train_config: TrainConfig, tmp_path: Path) -> str:
    """A run with a tokenizer of its own and a shape that is not the default."""
    tokenizer = TokenizerConfig(name="bpe", vocab_size=280)
    run_dir = str(tmp_path / "pretrained")
    train(replace(train_config, run_dir=run_dir, tokenizer=tokenizer, max_steps=10, sample_tokens=0))
    return run_dir


@pytest.fixture
def other_text(train_config: TrainConfig, tmp_path: Path) -> TrainConfig:
    """Settings of another run: other text, another shape, another tokenizer, dropout."""
    path = tmp_path / "other.txt"
    path.write_text("a quite different text, in which dogs speak.\n" * 200)
    train_config.data = replace(train_config.data, path=str(path))
    train_config.model = replace(train_config.model, n_layer=1, n_embd=64, dropout=0.1)
    return replace(train_config, sample_tokens=0)


def test_a_run_begins_with_the_weights_shape_and_tokenizer_it_is_given(pretrained, other_text):
    run = start_run(replace(other_text, init_from=pretrained))
    source = open_checkpoint(pretrained)
    assert run.model.config == replace(source.model.config, dropout=0.1)
    for name, weight in source.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], weight)
    text = "a quite different text"
    assert run.data.tokenizer.encode(text) == source.tokenizer.encode(text)
    assert run.progress.step == 0


def test_fine_tuning_leaves_its_source_as_it_was_and_can_be_resumed(pretrained, other_text, tmp_path, monkeypatch):
    before = {path: path.read_bytes() for path in Path(pretrained).rglob("*") if path.is_file()}
    whole = replace(other_text, init_from=pretrained)
    train(whole)
    assert {path: path.read_bytes() for path in Path(pretrained).rglob("*") if path.is_file()} == before

    stopped = replace(other_text, init_from=pretrained, run_dir=str(tmp_path / "stopped"))
    stop_at(monkeypatch, 13)
    with pytest.raises(SystemExit):
        train(stopped)
    monkeypatch.undo()
    train(replace(stopped, init_from=None, resume=stopped.run_dir))
    assert_same_run(whole.run_dir, stopped.run_dir)


def test_a_hugging_face_folder_is_a_beginning_too(tmp_path, other_text):
    from data.tokenizer import make_tokenizer
    from interop.huggingface import to_huggingface
    from interop.tokenizer import save_tokenizer_json

    encoding = make_tokenizer(TokenizerConfig(name="byte"), [])
    model = random_gpt(vocab_size=encoding.n_vocab)
    folder = tmp_path / "hf"
    folder.mkdir()
    to_huggingface(model, folder, encoding.eot_token)
    save_tokenizer_json(encoding, folder, model.config.block_size)
    run = start_run(replace(other_text, init_from=f"hf:{folder}"))
    torch.testing.assert_close(run.model.state_dict()["head.weight"], model.state_dict()["head.weight"])


def test_a_beginning_that_is_not_there_is_named(other_text):
    for where in ("/nowhere", "hf:/nowhere/at/all"):
        with pytest.raises(SettingsError, match=f"init_from={where}"):
            train(replace(other_text, init_from=where))
    with pytest.raises(ValueError, match="resume=a and init_from=b are both given"):
        replace(other_text, resume="a", init_from="b")


def test_a_tokenizer_whose_name_is_a_path_writes_nothing_there(pretrained, other_text, tmp_path):
    source = open_checkpoint(pretrained)
    source.tokenizer.name = "../../../escaped"
    config = replace(other_text, model=source.model.config)
    content = dict(model=source.model, tokenizer=source.tokenizer, config=config, step=1, metrics={}, state={})
    save_checkpoint(tmp_path / "forged", **content)
    start_run(replace(other_text, init_from=str(tmp_path / "forged")))
    assert not list(tmp_path.parent.glob("*escaped*")) and not list(tmp_path.glob("*escaped*"))


def test_a_dry_run_tells_of_the_model_that_it_begins_with(pretrained, other_text):
    from training.preflight import count_parameters, preflight

    source = open_checkpoint(pretrained).model
    report = preflight(replace(other_text, init_from=pretrained))
    assert report.startswith(f"parameters  {count_parameters(source).total():,}:")


def test_a_shape_that_is_asked_for_and_is_not_the_models_is_refused(pretrained, text_file, tmp_path):
    settings = [f"init_from={pretrained}", f"data.path={text_file}", f"data.cache_dir={tmp_path}/cache", "max_steps=2"]
    for typed, named in (
        (["model.n_layer=6", "model.n_head=2"], "model.n_layer=6 (it has 2)"),
        (["model=small"], "model.n_layer=8 (it has 2)"),
        (["attention=matmul"], "model.attention=matmul (it has sdpa)"),
    ):
        result = run_here("train.py", *settings, *typed, "sample_tokens=0", cwd=tmp_path)
        assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
        assert named in result.stderr and f"init_from={pretrained}" in result.stderr
        assert "n_head=2 (" not in result.stderr and not list(tmp_path.glob("outputs/*/*/checkpoints"))
    result = run_here("train.py", *settings, "model.dropout=0.2", "model.n_layer=2", "sample_tokens=0", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (run_dir,) = tmp_path.glob("outputs/*/*/checkpoints/last")
    assert load_checkpoint(run_dir).model.config.dropout == 0.2


def test_from_the_command_line(pretrained, text_file, tmp_path):
    settings = f"""init_from={pretrained} data.path={text_file} data.cache_dir={tmp_path}/cache max_steps=2
        sample_tokens=0 device=cpu"""
    result = run_here("train.py", *settings.split(), cwd=tmp_path)
    assert result.returncode == 0 and "2 blocks of 2 heads" in result.stdout, result.stderr

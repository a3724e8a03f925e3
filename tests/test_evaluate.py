"""python evaluate.py: how good a checkpoint is, which of two is better, and where it is surprised."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import data_of
from conftest import random_gpt
from hypothesis import given, settings
from hypothesis import strategies as st

import generation.scoring
from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer, train_bpe
from errors import DataError, SettingsError
from evaluate import EvaluateConfig, TextConfig, evaluate
from generation.scoring import Scores, compare, score
from runs.checkpoint import save_checkpoint
from runs.metrics import Evaluation
from settings import CONF
from train import train
from training.config import TrainConfig
from training.device import refuse_int8

BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])
PLAIN = torch.autocast("cpu", enabled=False)


def save(directory: Path, seed: int, tokenizer=BYTE, **sizes) -> Path:
    model = random_gpt(seed=seed, vocab_size=tokenizer.n_vocab, **sizes)
    config = TrainConfig(model=model.config, precision="fp32")
    save_checkpoint(directory, model=model, tokenizer=tokenizer, config=config, step=1, metrics={}, state={})
    return directory


@pytest.fixture
def text_settings(text_file, tmp_path):
    return {"checkpoint": str(save(tmp_path / "one", 1)), "data": TextConfig(path=str(text_file)), "device": "cpu"}


def test_figures_in_bf16_are_within_its_rounding_and_without_a_word_are_the_runs_own(text_settings):
    (own,), (exact,), (rounded,) = (
        evaluate(EvaluateConfig(**text_settings, precision=name)) for name in ("auto", "fp32", "bf16")
    )
    assert np.array_equal(own.nats, exact.nats) and not np.array_equal(own.nats, rounded.nats)
    assert rounded.total.loss == pytest.approx(exact.total.loss, rel=torch.finfo(torch.bfloat16).eps)
    with pytest.raises(SettingsError, match="precision=bf17"):
        EvaluateConfig(precision="bf17")


# The scores


@pytest.mark.parametrize("position", ["rope", "learned"])
@torch.inference_mode()
def test_with_stride_1_every_token_is_scored_after_all_the_context_there_is(position):
    model, tokens = random_gpt(position=position, vocab_size=257), np.random.default_rng(0).integers(256, size=45)
    scores = score(model, BYTE, tokens, stride=1, autocast=PLAIN)
    for place in range(1, 45):
        context = torch.from_numpy(tokens[max(0, place - 16) : place])[None]
        expected = -model(context)[0, -1].log_softmax(-1)[tokens[place]]
        assert scores.nats[place - 1] == pytest.approx(expected.item(), abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(2, 80), stride=st.integers(1, 16), batch=st.integers(1, 100))
def test_every_token_is_scored_once_after_at_least_the_context_that_the_stride_leaves(size, stride, batch):
    tokens = np.random.default_rng(size).integers(256, size=size)
    model = random_gpt(vocab_size=257)
    passes = list(generation.scoring.passes(size - 1, min(16, size - 1), stride, batch))
    seen, length = [], min(16, size - 1)
    for start, scored in [(start, scored) for starts, scored in passes for start in starts]:
        assert start == 0 or length - scored >= 16 - stride
        seen += range(start + length - scored, start + length)
    assert seen == list(range(size - 1)) and all(len(starts) <= batch for starts, _ in passes)
    scores = score(model, BYTE, tokens, stride=stride, autocast=PLAIN)
    assert np.isfinite(scores.nats).all() and len(scores.nats) == size - 1


def test_memory_that_does_not_suffice_is_met_with_smaller_batches(monkeypatch):
    model, tokens = random_gpt(vocab_size=257), np.random.default_rng(0).integers(256, size=200)
    expected = score(model, BYTE, tokens, stride=4, autocast=PLAIN)
    hidden = model.hidden

    def cramped(windows, starts=None):
        if len(windows) > 3:
            raise torch.OutOfMemoryError
        return hidden(windows)

    monkeypatch.setattr(model, "hidden", cramped)
    np.testing.assert_allclose(score(model, BYTE, tokens, stride=4, autocast=PLAIN).nats, expected.nats, atol=1e-4)


def test_the_figures_are_what_their_names_say():
    scores = Scores(np.array([1.0, 3.0], dtype=np.float32), np.array([1, 4]))
    assert (scores.total.loss, scores.total.perplexity) == (2.0, math.exp(2))
    assert scores.total.bpb == pytest.approx(4 / math.log(2) / 5)
    assert math.isfinite(Evaluation(nats=1e6, tokens=1, text_bytes=1).perplexity)


def test_the_standard_error_is_that_of_a_ratio_over_documents():
    # Documents of 2, 3 and 1 bytes; <|endoftext|> before the second and third.
    scores = Scores(np.array([1, 2, 0.5, 4, 2, 1, 9, 3], dtype=np.float32), np.array([1, 1, 0, 1, 1, 1, 0, 1]))
    nats, sizes = np.array([3, 7.5, 12]), np.array([2, 3, 1])
    rest = nats - nats.sum() / sizes.sum() * sizes
    assert scores.total.bpb_stderr == pytest.approx(math.sqrt(3 / 2 * (rest**2).sum()) / 6 / math.log(2))
    assert Scores(np.ones(3, dtype=np.float32), np.ones(3, dtype=int)).total.bpb_stderr is None


# Two models


def test_the_difference_and_its_standard_error_are_those_of_paired_blocks(monkeypatch):
    monkeypatch.setattr("generation.scoring.BLOCK_BYTES", 4)
    first = Scores(np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], dtype=np.float32), np.ones(12, dtype=int))
    second = Scores(np.array([7, 20, 8, 4, 40], dtype=np.float32), np.array([2, 3, 0, 4, 3]))  # bytes 0 2 5 5 9
    blocks = [7 + 20 - (1 + 2 + 3 + 4), 8 + 4 - (5 + 6 + 7 + 8), 40 - (9 + 10 + 11 + 12)]  # by each token's first byte
    bits = np.array(blocks) / math.log(2) / 4
    assert compare(first, second) == pytest.approx((bits.mean(), bits.std(ddof=1) / math.sqrt(3)))
    assert bits.mean() == pytest.approx(second.total.bpb - first.total.bpb) and compare(first, first) == (0, 0)


def test_two_tokenizers_are_compared_byte_by_byte(text_settings, tmp_path, text_file, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bpe = train_bpe([text_file.read_text()], 300)
    scores = evaluate(EvaluateConfig(**text_settings, against=str(save(tmp_path / "two", 2, bpe))))
    out = capsys.readouterr().out
    assert re.search(r"^checkpoint +one +two$", out, re.M)
    assert scores[0].bytes.sum() == scores[1].bytes.sum() == text_file.stat().st_size
    assert len(scores[1].nats) < len(scores[0].nats)
    difference = float(re.search(r"difference +([+-]\d+\.\d+) ± \d+\.\d+ bits/byte", out)[1])
    assert difference == pytest.approx(scores[1].total.bpb - scores[0].total.bpb, abs=1e-4)


def test_a_text_too_short_for_a_standard_error_is_compared_without_one(text_settings, tmp_path, text_file, capsys):
    text_file.write_text("a" * 1999)
    evaluate(EvaluateConfig(**text_settings, against=str(save(tmp_path / "two", 2, BYTE))))
    shown = r"^difference +[+-]\d\.\d+ bits/byte \(too short a text for a standard error: .* 2,000 bytes\)$"
    assert re.search(shown, capsys.readouterr().out, re.M)


# The command


def both_figures(config: TrainConfig) -> tuple[Evaluation, dict[str, float]]:
    """What evaluate.py measures of a run's best checkpoint with the trainer's windows, and what the trainer did."""
    out = evaluate(EvaluateConfig(checkpoint=config.run_dir, stride=16, device="cpu"))[0].total
    return out, json.loads((Path(config.run_dir) / "checkpoints/best/meta.json").read_text())["metrics"]


def test_with_the_trainers_windows_it_reports_the_trainers_figures(train_config, capsys):
    train(train_config)
    out, trained = both_figures(train_config)
    assert (out.loss, out.bpb) == pytest.approx((trained["val_loss"], trained["val_bpb"]), rel=1e-5)
    assert out.bpb_stderr is None  # a single document
    shown = capsys.readouterr().out
    assert f"nats/token  {out.loss:.4f}" in shown and f"bits/byte   {out.bpb:.4f}" in shown


def test_a_run_that_began_with_anothers_tokenizer_is_scored_in_its_tokens(train_config, text_file, tmp_path):
    origin = save(tmp_path / "origin", 1, train_bpe([text_file.read_text()], 280))
    model = replace(train_config.model, n_head=4)
    train(replace(train_config, model=model, init_from=str(origin), max_steps=1))
    out, trained = both_figures(train_config)
    assert out.loss == pytest.approx(trained["val_loss"], rel=0.01)  # its last window begins earlier


def test_a_checkpoint_that_no_run_wrote_has_no_validation_split(text_settings, capsys):
    with pytest.raises(DataError, match=r"one was not trained here and .*: give a text with data\.path="):
        evaluate(EvaluateConfig(checkpoint=text_settings["checkpoint"], device="cpu"))
    assert "Preparing" not in capsys.readouterr().out


def test_a_validation_split_that_is_gone_or_changed_is_refused_in_a_sentence(train_config, text_file):
    train_config.tokenizer.name, train_config.tokenizer.vocab_size = "bpe", 270
    train_config.max_steps = train_config.eval_interval = 1
    train(train_config)
    changes = {"no validation split to score": lambda: text_file.write_text("another text. " * 900)}
    for message, change in (changes | {r"does not exist.*give a text with data\.path": text_file.unlink}).items():
        change()
        with pytest.raises(DataError, match=message):
            evaluate(EvaluateConfig(checkpoint=train_config.run_dir))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"path": "/no/where"}}, "data.path=/no/where does not exist"),
        ({"data": {"path": "{tmp}/empty"}}, "nothing to score"),
        ({"data": {"path": "{tmp}/binary"}}, "binary file"),
        ({"stride": 0}, "stride=0"),
        ({"stride": 17}, "stride=17 would skip tokens"),
        ({"against": "/no/where"}, "checkpoint=/no/where does not exist"),
        (
            {"page": "/no/where.html"},
            "page=/no/where.html cannot be written (No such file or directory): name another file",
        ),
        ({"page": "text"}, "page=text is a page: give its name the ending .html."),
        ({"checkpoint": "{tmp}"}, "is not a checkpoint"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_refused_in_a_sentence(change, message, text_settings, tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    change = json.loads(json.dumps(change).replace("{tmp}", str(tmp_path)))
    if "data" in change:
        change["data"] = TextConfig(**change["data"])
    with pytest.raises((SettingsError, ValueError), match=re.escape(message)) as refused:
        evaluate(EvaluateConfig(**text_settings | change))
    assert "\n" not in str(refused.value)


def test_a_stride_that_is_too_long_for_the_second_model_is_refused_before_the_first_one_reads(
    text_settings, tmp_path, monkeypatch
):
    monkeypatch.setattr("generation.scoring.score", None)
    second = save(tmp_path / "two", 2, block_size=8)
    with pytest.raises(SettingsError, match=f"stride=12 would skip tokens: the model of {second} sees 8"):
        evaluate(EvaluateConfig(**text_settings, stride=12, against=str(second)))


# The page


def test_the_page_tints_a_token_by_its_own_surprise_and_says_what_it_leaves_out(text_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("generation.reading.LONGEST", 50)
    scores = evaluate(EvaluateConfig(**text_settings, page="t.html", against=str(save(tmp_path / "two", 2))))
    data = data_of(tmp_path / "t.html")
    assert [model["name"] for model in data["models"]] == ["one", "two"]  # as the terminal shows them
    for model, scored, other in zip(data["models"], scores, scores[::-1], strict=True):
        assert len(model["bits"]) == 50 and model["bits"][0] is None
        np.testing.assert_allclose(model["bits"][1:17], scored.nats[:16] / math.log(2), atol=1e-3)
        np.testing.assert_allclose(model["other"][1:17], other.nats[:16] / math.log(2), atol=2e-3)
    assert "Shown here are the first 50 tokens." in data["summary"]
    assert f"one: {scores[0].total.bpb:.3f} bits a byte" in data["summary"]


@pytest.mark.parametrize("installed", [True, False])
def test_whoever_imports_evaluate_in_the_root_gets_the_installed_package(installed, tmp_path):
    """As lm_eval's tasks do, in an environment that may have nothing that this project needs."""
    (tmp_path / "evaluate").mkdir()
    if installed:
        (tmp_path / "evaluate" / "__init__.py").write_text("from evaluate.loading import load")
        (tmp_path / "evaluate" / "loading.py").write_text("load = 'theirs'")
    code = "import sys, evaluate; print(getattr(evaluate, 'load', 'ours'), 'hydra' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CONF.parent, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["theirs" if installed else "ours", "False"], done.stderr


def test_int8_compares_a_checkpoint_with_itself_rounded(text_settings, capsys):
    exact, rounded = evaluate(EvaluateConfig(**text_settings, precision="int8"))
    assert np.array_equal(exact.nats, evaluate(EvaluateConfig(**text_settings, precision="fp32"))[0].nats)
    assert 0 < np.abs(exact.nats - rounded.nats).mean() < 0.1
    assert re.search(r"weights +fp32 +int8\n.*difference +[+-]0\.0", capsys.readouterr().out, re.DOTALL)
    with pytest.raises(SettingsError, match="against=outputs/other means nothing with precision=int8"):
        EvaluateConfig(precision="int8", against="outputs/other")
    with pytest.raises(SettingsError, match="precision=int8 is for CPUs, and this is meta"):
        refuse_int8("int8", torch.device("meta"))


def test_int8_wants_a_torch_that_multiplies_unsigned_numbers(monkeypatch):
    refuse_int8("int8", torch.device("cpu"))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    refuse_int8("fp32", torch.device("cpu"))
    with pytest.raises(SettingsError, match=r"precision=int8 needs torch 2.12 or later, and this is 2.11.0\+cpu: inst"):
        refuse_int8("int8", torch.device("cpu"))

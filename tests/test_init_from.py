"""Fine-tuning: a new run that begins with another's weights, shape and tokenizer."""

import hashlib
import json
import logging
import math
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from conftest import random_gpt, run_here, some
from hydra import compose
from sweeping import cells, tiny
from test_resume import assert_same_run, stopped

from cli.composition import (
    check_job,
    compose_settings,
    composing,
    register_inherited,
    register_schema,
    settings_of_new,
    with_beginning,
)
from cli.eval import score_checkpoints
from cli.export import write_export
from common.errors import SettingsError
from data.config import DataConfig, TokenizerConfig
from data.prepare import prepared
from data.tokenizer import make_tokenizer
from generation.config import EvalConfig, TextConfig
from interop.config import ExportConfig
from interop.huggingface import noted_training
from model.attention import FORMS
from model.attention.contract import from_weights
from model.config import GPTConfig
from model.rope import Rope
from model.size import count_parameters
from runs.checkpoint import Meta, Progress, load_checkpoint, open_checkpoint, read_meta, save_checkpoint
from runs.directory import written_settings
from runs.resume import check_settings
from runs.summary import read_summary
from sweeps.grid import result_key
from sweeps.leaderboard import markdown, read_jobs
from train import train, train_step
from training.config import OptimizerConfig, TrainConfig
from training.plan import plan_run
from training.pretrained import copy_weights, has_plain_weights, inherit, pretrained_config
from training.start import open_data, open_run, tell_left_out, tell_same_windows

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def pretrained(tmp_path: Path, text_file: Path) -> str:
    """A checkpoint with a tokenizer of its own and a shape that is not the default."""
    tokenizer = make_tokenizer(TokenizerConfig(name="bpe", vocab_size=280), [text_file.read_text(encoding="utf-8")])
    model = random_gpt(n_head=2, vocab_size=280)
    config = TrainConfig(model=model.config, tokenizer=TokenizerConfig(vocab_size=280))
    save_checkpoint(tmp_path / "pretrained", model=model, tokenizer=tokenizer, config=config)
    return str(tmp_path / "pretrained")


@pytest.fixture
def other_text(train_config: TrainConfig, tmp_path: Path) -> TrainConfig:
    """Settings of another run: other text, another tokenizer, dropout."""
    path = tmp_path / "other.txt"
    path.write_text("a quite different text, in which dogs speak.\n" * 200)
    train_config.data = replace(train_config.data, path=str(path))
    train_config.model = replace(train_config.model, dropout=0.1)
    return replace(train_config, sample_tokens=0)


@pytest.mark.slow
def test_a_run_has_a_hash_of_the_weights_that_it_began_with_also_when_it_goes_on(pretrained, other_text, tmp_path):
    def begun_with(name: str, **changes) -> str | None:
        train(replace(other_text, run_dir=str(tmp_path / name), **changes))
        return read_summary(tmp_path / name).weights_hash

    model = load_checkpoint(Path(pretrained)).model
    digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in model.parameters()))
    expected = digest.hexdigest()[:16]
    assert begun_with("run", init_from=pretrained, max_steps=1) == expected
    kept = replace(model.config, dropout=0.1)
    assert begun_with("run", resume=str(tmp_path / "run"), max_steps=2, model=kept) == expected
    assert begun_with("new", max_steps=1) is None


@pytest.mark.slow
def test_a_run_begins_with_the_weights_shape_and_tokenizer_it_is_given(pretrained, other_text):
    source = open_checkpoint(pretrained)
    with open_run(replace(other_text, init_from=pretrained)) as run:
        pass
    assert run.model.config == replace(source.model.config, dropout=0.1)
    for name, weight in source.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], weight)
    text = "a quite different text"
    assert run.data.tokenizer.encode(text) == source.tokenizer.encode(text)
    assert run.progress.step == 0
    planned = plan_run(train_step, replace(other_text, init_from=pretrained))
    assert f"\nmodel     {count_parameters(source.model).total():,} parameters" in planned


@pytest.mark.slow
def test_fine_tuning_leaves_its_source_as_it_was_and_can_be_resumed(pretrained, other_text, tmp_path, monkeypatch):
    before = {path: path.read_bytes() for path in Path(pretrained).rglob("*") if path.is_file()}
    whole = replace(other_text, init_from=pretrained)
    train(whole)
    assert {path: path.read_bytes() for path in Path(pretrained).rglob("*") if path.is_file()} == before

    again = replace(other_text, run_dir=str(tmp_path / "stopped"))
    stopped(replace(again, init_from=pretrained), 13)
    train(replace(again, resume=again.run_dir))
    assert_same_run(whole.run_dir, again.run_dir)

    # Its settings, in both files, are those of a run that begins with the same weights.
    resumed = open_checkpoint(again.run_dir).meta.config
    written = written_settings(Path(again.run_dir))
    assert (written["init_from"], written["resume"]) == (resumed["init_from"], resumed["resume"]) == (pretrained, None)
    with open_run(TrainConfig(**resumed | {"run_dir": str(tmp_path / "anew")})) as run:
        for name, weight in open_checkpoint(pretrained).model.state_dict().items():
            assert torch.equal(run.model.state_dict()[name], weight)


@pytest.mark.slow
def test_a_run_says_whose_weights_it_begins_with_and_one_that_resumes_does_not(
    pretrained, other_text, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    source = open_checkpoint(pretrained)
    step = tmp_path / "step"
    save_checkpoint(
        step, model=source.model, tokenizer=source.tokenizer, config=source.meta.config, progress=Progress(step=1234)
    )
    for where, said in ((pretrained, ""), (str(step), ", step 1,234")):
        caplog.clear()
        with open_run(replace(other_text, init_from=where, run_dir=str(tmp_path / f"run{said}"))):
            pass
        assert f"weights   begin as those of {where}{said}, with model.dropout=0.1 (it has 0)" in caplog.messages
    caplog.clear()
    changed = replace(source.model.config, rope_theta=50, block_size=source.model.config.block_size * 2)
    with open_run(replace(other_text, init_from=pretrained, model=changed, run_dir=str(tmp_path / "changed"))):
        pass
    assert f"model.block_size={changed.block_size} (it has {source.model.config.block_size})" in caplog.text
    assert "model.rope_theta=50 (it has 10000)" in caplog.text
    again = replace(other_text, run_dir=str(tmp_path / "again"))
    stopped(replace(again, init_from=pretrained), 3)
    caplog.clear()
    with open_run(replace(again, resume=again.run_dir)):
        pass
    assert "weights   " not in caplog.text


def test_a_hugging_face_folder_is_a_beginning_too(tmp_path, other_text):
    from interop.huggingface import to_huggingface
    from interop.tokenizer import save_tokenizer_json

    encoding = make_tokenizer(TokenizerConfig(name="byte"), [])
    model = random_gpt(vocab_size=encoding.n_vocab, n_head=2)
    folder = tmp_path / "hf"
    folder.mkdir()
    to_huggingface(model, folder, encoding.eot_token)
    save_tokenizer_json(encoding, folder, model.config.block_size)
    with open_run(replace(other_text, init_from=f"hf:{folder}")) as run:
        pass
    torch.testing.assert_close(run.model.state_dict()["lm_head.weight"], model.state_dict()["lm_head.weight"])


@pytest.mark.slow
def test_a_command_names_the_tokenizer_of_the_weights_in_its_settings(pretrained):
    typed = {"init_from": pretrained, "data": "tales"}  # whose tokenizer is for new weights
    assert compose_settings(register_inherited(typed)).tokenizer == TokenizerConfig(vocab_size=280)
    for named in ("tokenizer.vocab_size=300", "tokenizer=gpt2"):
        with pytest.raises(SettingsError, match=f"has its own tokenizer: leave out {named}"):
            compose_settings(typed | dict([named.split("=")]))


def test_settings_that_python_leaves_out_are_answered_with_the_page_that_takes_those_of_the_run(pretrained, other_text):
    asked = replace(other_text, init_from=pretrained, model=GPTConfig())
    with pytest.raises(SettingsError, match=r"n_layer=4 \(it has 2\).*; in Python, where"):
        train(asked)
    with pytest.raises(SettingsError) as typed:
        train(replace(asked, model=replace(open_checkpoint(pretrained).model.config, n_layer=3)))
    assert str(typed.value).endswith("or leave out init_from.")


@pytest.mark.parametrize("named", [None, [], {"name": "new"}, {"name": "byte", "other": 1}])
def test_a_tokenizer_without_a_name_here_leaves_the_weights_readable(pretrained, tmp_path, named):
    source = open_checkpoint(pretrained)
    config = source.meta.config | {"tokenizer": named}
    save_checkpoint(tmp_path / "foreign", model=source.model, tokenizer=source.tokenizer, config=config)
    settings = compose_settings(register_inherited({"init_from": str(tmp_path / "foreign"), "data.path": "a.txt"}))
    assert settings.model == source.model.config and settings.tokenizer == TokenizerConfig()


@pytest.mark.parametrize("settings", [None, {"max_steps": 3}, "config.yaml"])
def test_train_takes_settings_and_nothing_else(settings):
    with pytest.raises(SettingsError, match=f"are a TrainConfig, not {type(settings).__name__}: make one, as in"):
        train(settings)


def test_a_beginning_that_is_not_there_is_named(other_text):
    for where in ("/nowhere", "hf:/nowhere/at/all"):
        with pytest.raises(SettingsError, match=f"init_from={where}"):
            train(replace(other_text, init_from=where))
    with pytest.raises(SettingsError, match="resume=a and init_from=b are both given"):
        replace(other_text, resume="a", init_from="b")


@pytest.mark.slow
def test_a_tokenizer_whose_name_is_a_path_writes_nothing_there(pretrained, other_text, tmp_path):
    source = open_checkpoint(pretrained)
    source.tokenizer.name = "../../../escaped"
    config = replace(other_text, model=source.model.config)
    save_checkpoint(tmp_path / "forged", model=source.model, tokenizer=source.tokenizer, config=config)
    with open_run(replace(other_text, init_from=str(tmp_path / "forged"))):
        pass
    assert not list(tmp_path.parent.glob("*escaped*")) and not list(tmp_path.glob("*escaped*"))


@pytest.mark.slow
def test_a_model_that_the_weights_are_not_is_refused(pretrained, text_file, tmp_path):
    refusals = {
        "model.n_layer=6 model.n_head=2": "model.n_layer=6 (it has 2)",
        "model=small": "model.n_layer=8 (it has 2)",
        "attention=single_head": "model.attention=single_head (it has sdpa)",
        "model.position=none": "model.position=none (it has rope)",
        "+experiment=shakespeare": "model.n_head=6 (it has 2)",
        "tokenizer=gpt2": "has its own tokenizer: leave out tokenizer=gpt2.",
        "tokenizer.vocab_size=300": "leave out tokenizer.vocab_size=300.",
    }
    for typed, named in refusals.items():
        settings = [f"init_from={pretrained}", f"data.path={text_file}", *typed.split()]
        result = run_here("train.py", *settings, cwd=tmp_path)
        assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
        assert named in result.stderr and f"init_from={pretrained}" in result.stderr
        assert "n_head=2 (" not in result.stderr and not list(tmp_path.glob("outputs/*/*/checkpoints"))


@pytest.mark.slow
def test_settings_composed_in_python_have_the_shape_of_the_pretrained_model(pretrained):
    settings = compose_settings(register_inherited({"init_from": pretrained, "model.block_size": "24"}))
    assert settings.model == replace(open_checkpoint(pretrained).model.config, block_size=24)
    assert compose_settings(register_inherited({})).model.n_head == 4


@pytest.mark.parametrize(
    ("job", "changed"),
    some(
        [
            ("init_from=RUN", {}),
            ("init_from=RUN model.rope_theta=900", {"rope_theta": 900.0}),
            ("init_from=RUN attention=sdpa", {"attention": "sdpa"}),
            ("init_from=RUN data=tales", {}),  # whose sizes are for new weights
            (
                "init_from=RUN data=recall model.block_size=64 model.vocab_size=1024",
                {"block_size": 64, "vocab_size": 1024},
            ),
            ("init_from=0", {}),  # a job's folder, whose name is a number to Hydra
            ("experiment=mine", {"rope_theta": 700.0}),
            ("experiment=mine model.rope_theta=800", {"rope_theta": 800.0}),
            ("init_from=null", None),
        ],
        3,
    ),
)
def test_each_job_of_a_sweep_inherits_the_model_of_its_own_beginning(pretrained, tmp_path, job, changed, monkeypatch):
    """A model of a variant, or of an experiment, had the default RoPE base, cap and attention without a word."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "0"
    source = open_checkpoint(pretrained)
    found = replace(source.model.config, attention="softmax1", rope_theta=500.0, logit_softcap=20.0)
    config = TrainConfig(model=found, tokenizer=TokenizerConfig(vocab_size=280))
    save_checkpoint(own, model=random_gpt(**asdict(found)), tokenizer=source.tokenizer, config=config)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        f"# @package _global_\ninit_from: {own}\nmodel:\n  rope_theta: 700\n"
    )
    register_schema({})
    overrides = [f"hydra.searchpath=[{tmp_path}]", *job.replace("RUN", str(own)).split()]
    with composing():
        settings = check_job(overrides[1:], lambda: compose("train", overrides, return_hydra_config=True))
    if changed is None:
        assert settings.model == GPTConfig() and settings.tokenizer == TokenizerConfig()
    else:
        assert settings.model == replace(found, **changed) and settings.tokenizer.vocab_size == 280


@pytest.mark.slow
def test_auto_looks_for_the_beginning_that_an_experiment_brings(pretrained, tmp_path):
    (tmp_path / "mine/experiment").mkdir(parents=True)
    file = tmp_path / "mine/experiment/tune.yaml"
    given = {"resume": "auto", "experiment": "tune", "max_steps": "3"}
    searched = [f"hydra.searchpath=[{tmp_path}/mine]"]
    for text, begins in ((f"init_from: {pretrained}", {"init_from": pretrained}), ("max_steps: 5", {})):
        file.write_text(f"# @package _global_\n{text}\n")
        assert with_beginning(given, settings_of_new(given, searched)) == given | begins
    for typed in ({"init_from": "other"}, {"experiment": "nothing"}):
        given |= typed
        assert with_beginning(given, settings_of_new(given, searched)) == given


@pytest.mark.long
def test_jobs_that_begin_with_other_models_go_on_as_such_and_share_rows_with_their_seeds(tmp_path):
    shared = tiny(tmp_path, max_steps=1)
    for name, theta in {"a": 500, "b": 700}.items():
        made = run_here("train.py", *shared, f"run_dir={name}", f"model.rope_theta={theta}", cwd=tmp_path)
        assert made.returncode == 0, made.stderr
    shared = [word for word in shared if not word.startswith(("model.", "tokenizer"))]
    asked = ["train.py", "-m", *shared, "seed=1,2", "hydra.sweep.dir=s"]
    first = run_here(*asked, "init_from=a,b", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    (tmp_path / "s/1/summary.json").unlink()  # as if that job had been killed before its end
    again = run_here(*asked, "init_from=a,b", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    jobs = read_jobs(tmp_path / "s")
    assert [(job.settings["init_from"], job.resolved["model.rope_theta"]) for job in jobs] == [
        ("a", 500.0),
        ("b", 700.0),
    ] * 2
    assert len(cells(markdown(jobs))) == 3 and "weights_hash" not in markdown(jobs)
    # What its weights are not is known before any job has begun.
    asked[-1] = "hydra.sweep.dir=other"
    refused = run_here(*asked, "init_from=a,b", "model.n_layer=7", cwd=tmp_path)
    assert refused.returncode == 1 and "init_from=a: its model is not the one asked for" in refused.stderr
    assert not list((tmp_path / "other").glob("*/config.yaml"))


@pytest.mark.slow
def test_what_is_asked_for_is_new_and_all_else_the_pretrained_models(pretrained, text_file, tmp_path):
    asked = dict(attention="matmul", attention_window=9, rope_theta=5e4, rope_scaling="linear", rope_scaling_factor=2.0)
    asked |= dict(block_size=24, vocab_size=320, dropout=0.2, attention_dropout=0.1, n_layer=2)
    typed = [f"{'' if name == 'attention' else 'model.'}{name}={value}" for name, value in asked.items()]
    settings = (
        f"init_from={pretrained} data.path={text_file} data.cache_dir={tmp_path}/cache max_steps=2 sample_tokens=0"
        " checkpoint_interval=1"
    )
    result = run_here("train.py", *settings.split(), *typed, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "2 blocks of 2 heads" in result.stdout
    (last,) = tmp_path.glob("outputs/*/*/checkpoints/last")
    assert load_checkpoint(last).model.config == replace(open_checkpoint(pretrained).model.config, **asked)
    shutil.rmtree(last.resolve())  # as where the run was killed before its end
    again = run_here("train.py", *settings.split(), *typed, "resume=auto", cwd=tmp_path)
    assert again.returncode == 0 and "resuming at step 1 of" in again.stdout, again.stderr


def test_a_window_can_be_taken_away_and_a_vocabulary_cut_below_the_tokenizers_is_refused(pretrained, other_text):
    found = pretrained_config(pretrained)
    assert inherit(replace(found, attention_window=4), found).attention_window is None
    small = replace(other_text, init_from=pretrained, model=replace(other_text.model, vocab_size=100))
    with pytest.raises(SettingsError, match=r"model.vocab_size=100 is less than the tokenizer's 280"):
        train(small)


@from_weights
def of_ones_own(scores):
    return scores.softmax(-1) / 2


@pytest.mark.parametrize("form", [*FORMS, "of_ones_own"])
def test_another_weighting_of_the_same_scores_takes_the_weights(form, monkeypatch):
    monkeypatch.setitem(FORMS, "of_ones_own", of_ones_own)
    others = ("average", "simple", "single_head", "mla", "gta", "linear", "retention", "delta", "kda", "index")
    others += ("parallax", "wall", "k_eq_v", "dsa", "gdn2", "short_conv")
    assert has_plain_weights(form) == (form not in others)
    if form in others:
        with pytest.raises(SettingsError, match=r"model.attention=.*\(it has"):
            inherit(random_gpt().config, random_gpt(attention=form).config)
        return
    model, other = random_gpt(), random_gpt(seed=1, attention=form)
    assert inherit(model.config, other.config) == other.config
    copy_weights(model.get_parameter, other)
    assert all(torch.equal(weight, model.get_parameter(name)) for name, weight in other.named_parameters())
    with pytest.raises(SettingsError, match=r"model.attention=.*\(it has"):
        inherit(model.config, replace(other.config, attention=f"{form}/delta"))


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_cropped_or_extended_block_gives_the_same_logits_where_both_reach(position):
    model, tokens = random_gpt(position=position), torch.randint(61, (2, 8))
    for block_size in (8, 16, 40):
        resized = random_gpt(seed=1, position=position, block_size=block_size)
        copy_weights(model.get_parameter, resized)
        assert torch.equal(resized(tokens), model(tokens))
        assert resized(torch.randint(61, (1, block_size))).isfinite().all()


@pytest.mark.parametrize("tied", [False, True])
def test_a_resized_vocabulary_gives_the_known_tokens_the_same_logits(tied):
    model, tokens = random_gpt(tie_embeddings=tied), torch.randint(50, (2, 8))
    for vocab_size in (50, 61, 70):
        resized, both = random_gpt(seed=1, tie_embeddings=tied, vocab_size=vocab_size), min(61, vocab_size)
        copy_weights(model.get_parameter, resized)
        logits = resized(tokens)
        torch.testing.assert_close(logits[..., :both], model(tokens)[..., :both])
        if vocab_size == 70:
            new = model(tokens).mean(-1, keepdim=True).expand(2, 8, 9)
            torch.testing.assert_close(logits[..., 61:], new, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "settings", [{}, {"n_kv_head": 4, "attention": "stacked/sdpa+window"}, {"qkv_bias": True}], ids=str
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_key_heads_are_the_means_of_those_they_replace(kv_heads, settings):
    """Head by head; and where the replaced ones were equal the logits are the same."""
    model = random_gpt(attention_window=5, **settings)
    fewer = random_gpt(seed=1, attention_window=5, **settings | {"n_kv_head": kv_heads})
    assert inherit(model.config, fewer.config) == fewer.config
    copy_weights(model.get_parameter, fewer)
    D, group = 8, 4 // kv_heads
    for old, new in zip(model.attentions, fewer.attentions, strict=True):
        for name, weight in old.qkv_proj.named_parameters():
            heads, found = weight.view(12, D, -1), new.qkv_proj.get_parameter(name).view(4 + 2 * kv_heads, D, -1)
            assert torch.equal(found[:4], heads[:4])
            for first in (4, 8):  # keys, values
                for head in range(kv_heads):
                    mean = sum(heads[first + head * group + i] for i in range(group)) / group
                    torch.testing.assert_close(found[4 + (first - 4) // 4 * kv_heads + head], mean)
                    for i in range(group):
                        heads.data[first + head * group + i] = mean
    tokens = torch.randint(61, (2, 8))
    torch.testing.assert_close(fewer(tokens), model(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "found, asked",
    [
        ({"n_kv_head": 2}, {"n_kv_head": 4}),
        ({"n_head": 6, "n_embd": 48}, {"n_head": 6, "n_embd": 48, "n_kv_head": 3, "attention": "sdpa+gate"}),
        ({"attention": "mla"}, {"attention": "mla", "n_kv_head": 2}),
        ({"position": "pope"}, {"position": "pope", "n_kv_head": 2}),
        ({"attention": "sdpa+value_embedding"}, {"attention": "sdpa+value_embedding", "n_kv_head": 2}),
    ],
    ids=str,
)
def test_key_heads_that_cannot_be_averaged_are_refused_with_their_number(found, asked):
    with pytest.raises(SettingsError, match=r"it has (2|4|6|sdpa)\)"):
        inherit(random_gpt(**found).config, random_gpt(**asked).config)


RATES = {
    (
        2e-5,
        0.1,
        0.008,
    ): "optimizer.embedding_lr=0.1 (embeddings, norms and biases) and optimizer.lm_head_lr=0.008 (lm_head)",
    (2e-3, 0.1, None): "optimizer.embedding_lr=0.1 (embeddings, norms and biases)",
    (2e-5, None, None): "",
    (0.0021, 0.1, 0.008): "",
    (0.02, 0.1, 0.008): "",
}


@pytest.mark.parametrize("rates", RATES)
def test_a_low_rate_of_the_matrices_alone_is_told_with_the_others_which_null_makes_equal(rates, other_text, caplog):
    names = ("lr", "embedding_lr", "lm_head_lr")
    config = replace(other_text, optimizer=replace(other_text.optimizer, **dict(zip(names, rates, strict=True))))
    with open_run(config) as run:
        groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    assert {group["peak_lr"] for group in groups if group["params"]} == {rate or rates[0] for rate in rates}
    said = [message for message in caplog.messages if "leaves" in message]
    wanted = f"optimizer.lr={rates[0]:g} leaves {RATES[rates]}: for one rate of all set optimizer.embedding_lr=null "
    assert [message[: len(wanted)] for message in said] == [wanted] * bool(RATES[rates])
    assert all(message.endswith("was tuned for AdamW, type optimizer=adamw too.") for message in said)


@pytest.mark.parametrize("attention", some(["matmul+gate+sink", "sdpa", "delta", "mla"], 4))
@pytest.mark.parametrize("parts", [["token_embedding", "blocks.0"], ["lm_head"], ["blocks.0.mlp", "final_norm"]])
def test_frozen_parts_stay_to_the_bit_and_the_others_get_the_gradients_that_they_had(other_text, attention, parts):
    config = replace(other_text, model=replace(other_text.model, attention=attention, n_layer=2, dropout=0.0))
    config = replace(config, optimizer=replace(config.optimizer, weight_decay=0.5), max_steps=1)
    gradients, weights = [], []
    for frozen in (None, parts):
        with open_run(replace(config, freeze=frozen, run_dir=f"{config.run_dir}{frozen is None}")) as run:
            before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
            with torch.random.fork_rng():
                batch = run.data.train_batch(0, 0, run.micro_batch_size)
                run.model.loss(*(torch.from_numpy(ids) for ids in batch[:2])).backward()
            gradients.append({name: weight.grad for name, weight in run.model.named_parameters()})
            run.model.zero_grad()
            train_step(run, 0)
            weights.append({name: torch.equal(before[name], weight) for name, weight in run.model.named_parameters()})
    is_frozen = {name: any(f"{name}.".startswith(f"{part}.") for part in parts) for name in before}
    assert any(is_frozen.values()) and not all(is_frozen.values())
    for name, gradient in gradients[1].items():
        assert (gradient is None) == is_frozen[name]
        assert gradient is None or torch.allclose(gradient, gradients[0][name], rtol=1e-4, atol=1e-6)
        assert weights[1][name] or not is_frozen[name]
        assert weights[1][name] == weights[0][name] or is_frozen[name]


@pytest.mark.parametrize("bias", [False, True])
def test_frozen_mlps_of_a_new_model_leave_attention_alone(train_config, bias):
    train_config.model.bias = bias
    with open_run(replace(train_config, freeze=["blocks.0.mlp", "blocks.1.mlp"])) as run:
        for step in range(3):
            train_step(run, step)
        model, tokens = run.model.eval(), torch.randint(257, (2, 16))
    with torch.no_grad():
        x = model.token_embedding(tokens)
        for block in model.blocks:
            x = x + block.attention(block.attention_norm(x))
        torch.testing.assert_close(model(tokens), model.lm_head(model.final_norm(x)))
        assert model(tokens).std() > 0.01
        assert all(block.attention.o_proj.weight.any() for block in model.blocks)


@pytest.mark.slow
def test_a_frozen_run_resumes_to_its_bits_and_with_other_parts_only_if_that_is_allowed(other_text, tmp_path):
    config = replace(other_text, freeze=["blocks.0", "token_embedding"], max_steps=6, eval_interval=6)
    train(replace(config, run_dir=str(tmp_path / "whole")))
    stopped_run = stopped(replace(config, run_dir=str(tmp_path / "stopped")), 3)
    with pytest.raises(SettingsError, match=r"freeze=null \(was \[blocks\.0,token_embedding\]\)"):
        train(replace(stopped_run, freeze=None))
    train(stopped_run)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_frozen_parts_are_the_same_in_any_order():
    """A sweep trained both orders, and a run that was resumed with the other one "would not be the same"."""
    one, other, fewer = (
        TrainConfig(freeze=parts)
        for parts in (["blocks.0", "token_embedding"], ["token_embedding", "blocks.0", "blocks.0"], ["blocks.0"])
    )
    assert result_key(one) == result_key(other) != result_key(fewer)
    saved, defaults = Meta(asdict(one)), asdict(TrainConfig())
    check_settings(asdict(other), saved, defaults)
    with pytest.raises(SettingsError, match=r"freeze=\[blocks.0\] \(was \[blocks.0,token_embedding\]\)"):
        check_settings(asdict(fewer), saved, defaults)


@pytest.mark.parametrize("part", ["token_embedding", "lm_head"])
def test_a_tied_weight_is_frozen_by_either_name_and_the_other_is_told(train_config, caplog, part):
    """freeze=[lm_head] was a part "which the model does not have", and of token_embedding not a word on lm_head."""
    caplog.set_level(logging.INFO, "tinygpt")
    config = replace(train_config, model=replace(train_config.model, tie_embeddings=True), freeze=[part])
    with open_run(config) as run:
        before = run.model.token_embedding.weight.detach().clone()
        for step in range(2):
            train_step(run, step)
        assert torch.equal(run.model.lm_head.weight, before)
        assert run.model.final_norm.weight.grad is None and run.model.blocks[0].mlp.down_proj.weight.requires_grad
    count = before.numel()
    said = f"freeze    {count:,} parameters stay as they are: {part}; token_embedding and lm_head are one weight"
    assert said in caplog.messages


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["token_embedding", "blocks", "final_norm", "lm_head"], "leaves no weight to train: leave a part out"),
        (["block"], "has block, which the model does not have: choose of token_embedding, blocks.0, blocks.1, "),
        (["lm_head", "blocks.9"], "has blocks.9, which the model does not have"),
        (
            ["lm_head,blocks.0"],
            "has lm_head,blocks.0, which the model does not have: write freeze='[lm_head,blocks.0]'.",
        ),
    ],
)
def test_parts_that_cannot_be_frozen_are_refused_with_those_that_can(other_text, parts, message):
    wanted = re.escape(f"freeze=[{','.join(parts)}] {message}")
    with pytest.raises(SettingsError, match=wanted), open_run(replace(other_text, freeze=parts)):
        pass


@pytest.mark.long
def test_a_text_that_grew_and_holds_out_what_was_learned_before_is_told(train_config, tmp_path, caplog):
    file = tmp_path / "grows.jsonl"
    texts = [json.dumps({"text": f"{number} " + "words " * (number * 7 % 37)}) for number in range(400)]
    file.write_text("\n".join(texts[:300]))
    config = replace(train_config, data=replace(train_config.data, path=str(file)), max_steps=2, sample_tokens=0)
    train(config)
    # Not if the text is the same.
    train(replace(config, resume=config.run_dir, max_steps=3))
    assert "learned before" not in caplog.text
    file.write_text("\n".join(texts))
    said = r"\d\d% of what is held out is in the text that the model has learned before: data.val_path= holds out"
    for again in (dict(init_from=config.run_dir, run_dir=str(tmp_path / "other")), dict(resume=config.run_dir)):
        caplog.clear()
        train(replace(config, **again, max_steps=4, allow_changes=True))
        assert re.search(said, caplog.text), again
    # It stays true when the run goes on.
    caplog.clear()
    train(replace(config, resume=config.run_dir, max_steps=5))
    assert re.search(said, caplog.text)


@pytest.mark.long
def test_what_the_runs_before_learned_is_told_of_held_out_and_scored_texts(train_config, tmp_path, caplog, capsys):
    """By init_from, also of a run that began so, and by a resume with another text.

    The share is that of the documents as they were written: each is shorter than a passage.
    """
    for name in "ab":
        texts = ["".join(f"{name}{number}.{word} " for word in range(3 + number * 7 % 17)) for number in range(300)]
        (tmp_path / f"{name}.txt").write_text("<|endoftext|>".join(texts))
    train_config = replace(train_config, max_steps=1, eval_interval=1, sample_tokens=0)

    def learn(name: str, text: str, val_fraction: float = 0.1, **changes) -> str:
        data = replace(train_config.data, path=str(tmp_path / text), val_fraction=val_fraction)
        config = replace(train_config, data=data, run_dir=str(tmp_path / name), **changes)
        train(config)
        return config.run_dir

    def documents(run: str, split: str) -> list[str]:
        checkpoint = open_checkpoint(run)
        data = prepared(TrainConfig(**checkpoint.meta.config).data, checkpoint.meta.data)
        return [*filter(None, data.tokenizer.decode(getattr(data, split)[:].tolist()).split("<|endoftext|>"))]

    def note(run: str, **asked) -> list[str]:
        capsys.readouterr()
        score_checkpoints(EvalConfig(checkpoint=run, **asked))
        return re.findall(
            r"(?m)^note +(\d+)% of this text is in the text that .* has learned$", capsys.readouterr().out
        )

    # Another part of the first text is held out two runs later.
    first = learn("first", "a.txt")
    second = learn("second", "b.txt", init_from=first)
    assert "learned before" not in caplog.text
    third = learn("third", "a.txt", 0.3, init_from=second)
    learned, held = documents(first, "train"), documents(third, "val")
    share = sum(map(len, {*held} & {*learned})) / sum(map(len, held))
    assert 0.3 < share < 0.9, "the case"
    assert f"{share:.0%} of what is held out is in the text that the model has learned before" in caplog.text
    assert (
        read_summary(Path(third)).learned == pytest.approx(share, abs=0.005) and not read_summary(Path(second)).learned
    )
    assert note(third) == [f"{100 * share:.0f}"]
    # A text that is given was learned by the run before, and a run's own split never.
    whole = TextConfig(path=str(tmp_path / "a.txt"))  # a passage may end in the beginning of a document held out
    of_all = 100 * sum(map(len, learned)) / sum(map(len, learned + documents(first, "val")))
    assert [*map(float, note(second, data=whole))] == pytest.approx([of_all], abs=2)
    assert note(first) == note(second) == []
    # A run that goes on with another text has learned both.
    learn("first", "b.txt", resume=first, max_steps=2, allow_changes=True)
    assert [*map(float, note(first, data=whole))] == pytest.approx([of_all], abs=2)


@pytest.mark.slow
def test_an_exported_folder_tells_what_its_weights_have_learned(train_config, tmp_path, caplog):
    """Also one that was imported, or whose config.json transformers has written anew."""
    texts = ["".join(f"{number}.{word} " for word in range(3 + number * 7 % 17)) for number in range(300)]
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(texts))
    data = replace(train_config.data, path=str(tmp_path / "a.txt"))
    small = replace(train_config, data=data, max_steps=1, eval_interval=1, sample_tokens=0)
    train(replace(small, run_dir=str(tmp_path / "first")))
    write_export(ExportConfig(checkpoint=str(tmp_path / "first"), to=str(tmp_path / "folder")))
    write_export(ExportConfig(import_from=str(tmp_path / "folder"), to=str(tmp_path / "imported")))
    said = set()
    for start in ("first", "imported", "hf:folder"):
        kind, _, name = start.rpartition(":")
        where = f"{'hf:' * bool(kind)}{tmp_path / name}"
        caplog.clear()
        settings = compose_settings(register_inherited({"init_from": where, "max_steps": "1", "sample_tokens": "0"}))
        config = replace(settings, data=replace(data, val_fraction=0.3), run_dir=str(tmp_path / f"after_{name}"))
        train(config)
        said |= {message for message in caplog.messages if "learned before" in message}
        assert read_meta(tmp_path / f"after_{name}/checkpoints/last").texts[1:] == [
            read_meta(tmp_path / "first/checkpoints/last").data
        ]
    (note,) = said  # of all three
    assert re.match(r"\d\d% of what is held out is in the text that the model has learned before", note)
    # What somebody else has written there is no text of ours.
    file = tmp_path / "folder/config.json"
    for odd in (None, "text-0123456789abcdef", [1, "../text-0123456789abcdef", "text-0\0", "recall-4"]):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tinygpt_texts": odd}))
        assert noted_training(str(tmp_path / "folder"))[0] == []


@pytest.mark.parametrize(
    "odd", [None, [1], {"document_mask": "yes"}, {"separator": 3}, {"path": "/etc/passwd"}], ids=str
)
def test_settings_that_a_strangers_folder_notes_are_those_of_reading_or_none(tmp_path, odd):
    (tmp_path / "config.json").write_text(json.dumps({"tinygpt_data": odd}))
    assert noted_training(str(tmp_path)) == ([], {})


def test_settings_that_init_from_leaves_are_told_where_they_were_others(caplog):
    def told(its: TrainConfig, ours: TrainConfig) -> list[str]:
        caplog.clear()
        tell_left_out(replace(ours, init_from="runs/a"), Meta(asdict(its)))
        return caplog.messages

    def run(optimizer: str = "muon", **data) -> TrainConfig:
        return TrainConfig(data=DataConfig(**data), optimizer=OptimizerConfig(name=optimizer))

    begins = "init_from=runs/a brings its model and tokenizer alone: it was trained with "
    assert told(run("adamw", path="my notes.txt"), run()) == [
        f"{begins}'data.path=my notes.txt' optimizer=adamw, and this run has data=stdlib optimizer=muon."
    ]
    assert told(run(source="tales", document_mask=True), run(path="more.txt")) == [
        f"{begins}data.document_mask=true, and this run has data.document_mask=false."
    ]
    names = run(path="names.txt", separator=r"\n")
    assert told(names, run(path="more.txt")) == [
        rf"{begins}'data.separator=\n', and this run has 'data.separator=<|endoftext|>'."
    ]
    # What was given is meant, and a text that is never divided has no separator.
    assert told(names, run(path="more.txt", separator="---")) == []
    assert told(run(), run("adamw", path="more.txt", separator=r"\n")) == []
    assert told(names, run(source="shakespeare")) == []


@pytest.mark.parametrize("task", [False, True])
def test_windows_that_the_run_before_has_learned_are_told_if_they_come_again(train_config, text_file, caplog, task):
    """The seed draws them. A run that has read the whole text has learned all."""
    if task:
        train_config.data = DataConfig(source="copy")
    config = replace(train_config, init_from="runs/a")
    first = open_data(train_config, None)
    again = open_data(config, make_tokenizer(config.tokenizer, []))
    assert task or first.fingerprint != again.fingerprint, "the tokens are prepared once more"

    def windows(data, steps: int) -> list[bytes]:
        return [window.tobytes() for step in range(steps) for window in data.train_batch(step, 0, 8).inputs]

    def told(steps: int = 3, **changes) -> bool:
        caplog.clear()
        before = Meta(asdict(config) | changes, Progress(step=steps), data=first.fingerprint)
        tell_same_windows(config, again, before)
        return caplog.messages == [
            "seed=1 draws the windows that runs/a has learned, once more: "
            "resume= with a later end goes on to others, and another seed draws anew."
        ]

    assert windows(first, 3) == windows(again, 3)
    assert told()
    assert not told(steps=0)
    assert windows(replace(first, seed=2), 3) != windows(again, 3)
    assert not told(seed=2)
    assert not told(model=asdict(config.model) | {"block_size": 8})
    if task:  # a step's are drawn together
        assert windows(replace(first, batch_size=4), 3)[:8] != windows(again, 3)[:8]
    assert told(batch_size=4) is not task
    if not task:
        epoch = len(first.train) // 16 - 1
        assert told(steps=(epoch - 1) // 8) and not told(steps=epoch // 8 + 1)


def test_a_context_that_is_stretched_again_is_scaled_from_the_length_that_was_trained():
    """YaRN's and Llama 3's formulas, of 64 texts' length; a longer block_size or factor says nothing of it."""

    def slow_share(scaling: str, trained: int, channels: int = 32, theta: float = 10_000.0) -> list[float]:
        turns = [trained * theta ** (-2 * i / channels) / (2 * math.pi) for i in range(channels // 2)]
        if scaling == "llama3":
            return [min(max((4 - turn) / 3, 0), 1) for turn in turns]
        low, high = (channels * math.log(trained / (2 * math.pi * n)) / (2 * math.log(theta)) for n in (32, 1))
        low, high = max(math.floor(low), 0), math.ceil(high)
        return [min(max((i - low) / (high - low), 0), 1) for i in range(channels // 2)]

    trained = GPTConfig(n_head=1, n_embd=32, block_size=64)
    for scaling in ("yarn", "llama3"):
        asked = dict(rope_scaling=scaling, block_size=128)
        once = inherit(trained, replace(trained, **asked, rope_scaling_factor=8))
        twice = inherit(once, replace(once, block_size=512))
        lower = inherit(trained, replace(trained, **asked, rope_scaling_factor=2))
        assert lower.rope_trained_length is None, "as it was written"
        again = inherit(lower, replace(lower, block_size=1024, rope_scaling_factor=16))
        for config in (once, twice, lower, again):
            frequencies, _ = Rope.of(config, 32).frequencies()
            plain = 10_000.0 ** (-torch.arange(0, 32, 2) / 32)
            slow = torch.tensor(slow_share(scaling, 64))
            assert torch.allclose(frequencies, plain * (1 - slow + slow / config.rope_scaling_factor), rtol=1e-5)
        assert slow_share(scaling, 16) != slow_share(scaling, 64), "the case"


def test_a_folder_of_hugging_faces_is_answered_with_what_begins_with_it(tmp_path):
    """It was said to be no checkpoint, and to be converted first."""
    (tmp_path / "of theirs").mkdir()
    (tmp_path / "of theirs/config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r": 'init_from=hf:.*/of theirs' begins with it\.$"):
        pretrained_config(str(tmp_path / "of theirs"))

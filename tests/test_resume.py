"""A stopped run is resumed to the same bits: weights, losses, metrics; and only as itself."""

import errno
import json
import logging
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from conftest import first_of, random_gpt, run_here, some, started
from test_checkpoint import forge, forge_file

import train as train_module
import training.start
from cli.composition import compose_settings, register_inherited, settings_of_new, tell_found
from cli.with_torch import inherited_settings
from common.console import Signals, ending_signals, exit_on_signal
from common.errors import CheckpointError, SettingsError
from common.files import is_locked
from data.batches import TokenDataset
from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from data.tokenizer import same_tokens, train_bpe
from generation.score import ScoringParams, score, validation_split
from model.config import GPTConfig
from model.size import flops_per_token, without_weights
from runs.checkpoint import (
    Meta,
    Progress,
    as_json,
    find_checkpoints,
    load_checkpoint,
    open_checkpoint,
    read_meta,
    save_checkpoint,
    write_checkpoint,
)
from runs.directory import LOGS, lock_run, settings_text, written_comments, written_settings
from runs.metrics import read_metrics
from runs.origin import PROJECT_HASH
from runs.resume import (
    Saved,
    check_settings,
    earlier_settings,
    find_run,
    newest,
    newest_intact,
    refuse_used,
    remove_leftovers,
)
from runs.summary import Summary, read_summary, write_summary
from train import train
from training.config import OptimizerConfig, TrainConfig
from training.plan import plan_run, trial_run
from training.run import Run
from training.start import checkpoint_to_resume

pytestmark = pytest.mark.usefixtures("no_pictures")
ROOT = Path(train_module.__file__).parent
WALL_CLOCK = ("seconds", "tokens_per_s")


def rows(run_dir: str | Path) -> list[dict]:
    """metrics.jsonl without what the clock says."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in WALL_CLOCK} for line in lines]


def steps_of(run_dir: str | Path) -> list[int]:
    return [row["step"] for row in rows(run_dir) if "loss" in row]


def assert_same_run(first: str | Path, second: str | Path) -> None:
    assert rows(first) == rows(second)
    one, other = (Path(run) / "checkpoints" / "last" for run in (first, second))
    for name in ("model.safetensors", "optimizer.safetensors", "tokenizer.json"):
        if (one / name).exists() or (other / name).exists():
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
    left, right = read_meta(one), read_meta(other)
    assert replace(left.progress, seconds=0) == replace(right.progress, seconds=0) and left.scaler == right.scaler


def before_step(monkeypatch, step: int, act: Callable[[Run], object]) -> None:
    """Let something happen before a run takes a step."""
    original = train_module.train_step

    def train_step(run: Run, number: int):
        if number == step:
            act(run)
        return original(run, number)

    monkeypatch.setattr("train.train_step", train_step)


def stop_at(monkeypatch, step: int) -> None:
    """Send this process a SIGTERM while it takes a step."""
    before_step(monkeypatch, step, lambda run: os.kill(os.getpid(), signal.SIGTERM))


def crash(run: Run) -> NoReturn:
    raise RuntimeError("crash")


def stopped(config: TrainConfig, step: int) -> TrainConfig:
    """Train until a signal comes in a step, and return what goes on with that run."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        stop_at(patch, step)
        train(config)
    assert ended.value.code == 128 + signal.SIGTERM
    return replace(config, init_from=None, resume=config.run_dir)


def tiny(text_file: Path) -> list[str]:
    """Overrides for a run of milliseconds a step."""
    return f"""data.path={text_file} data.cache_dir={text_file.parent}/cache tokenizer=byte model.n_layer=1
        model.n_embd=32 model.block_size=16 sample_tokens=0 device=cpu log_interval=1""".split()


def wait_for(file: Path, seconds: float = 60) -> None:
    """Until a file has content."""
    until = time.monotonic() + seconds
    while not (file.is_file() and file.stat().st_size):
        assert time.monotonic() < until, f"{file} did not appear"
        time.sleep(0.05)


@pytest.fixture
def config(train_config: TrainConfig) -> TrainConfig:
    """Dropout everywhere and three micro-batches a step: all that could make a difference."""
    train_config.model = replace(train_config.model, dropout=0.1, attention_dropout=0.1, zero_init=False)
    sizes = dict(batch_size=6, micro_batch_size=2, eval_interval=5, checkpoint_interval=7, sample_tokens=0)
    return replace(train_config, **sizes)


# The same bits


@pytest.mark.parametrize("precision", some(["fp32", "fp16"], 2))  # test_faults.py kills runs of more settings
def test_a_stopped_and_crashed_run_ends_as_the_uninterrupted_one_to_the_bit(config, tmp_path, monkeypatch, precision):
    config = replace(config, precision=precision, optimizer=OptimizerConfig(lr=0.01, weight_decay=0.1))
    best = train(config)
    again = stopped(replace(config, run_dir=str(tmp_path / "stopped")), 0)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        before_step(patch, 13, crash)
        train(again)
    assert steps_of(again.run_dir)[-1] == 13 and read_summary(Path(again.run_dir)).status == "failed"
    with (Path(again.run_dir) / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 14, "lo')  # the line that was being written
    torch.manual_seed(99)  # nothing of the process it resumes in matters
    again.model = replace(again.model, vocab_size=None)  # as a new process has it, before it knows the tokenizer
    stopped(again, 15)
    assert read_summary(Path(again.run_dir)).status == "stopped"
    assert train(again) == best
    assert_same_run(config.run_dir, again.run_dir)
    assert read_summary(Path(again.run_dir)).status == "finished"


@pytest.mark.long
def test_a_checkpoint_within_a_run_is_answered_with_the_way_back_to_it(config, tmp_path):
    """Which ends in the bits of the run that was not interrupted."""
    config = replace(config, run_dir=str(tmp_path / "a run"), checkpoint_interval=5, keep_checkpoints=9, log_interval=1)
    train(config)
    shutil.copytree(config.run_dir, tmp_path / "whole", symlinks=True)
    checkpoints = Path(config.run_dir, "checkpoints")
    go_on = f"'resume={config.run_dir}' goes on from its latest checkpoint"
    for within in ("last", "", "step_20", "step_20/model.safetensors"):
        with pytest.raises(SettingsError, match=rf"holds no run .*: {re.escape(go_on)}\.$"):
            find_run(str(checkpoints / within), None)
    with pytest.raises(SettingsError, match=rf"{re.escape(go_on)}, and from step_10 after \(.*\)\.$") as caught:
        find_run(str(checkpoints / "step_10"), None)
    command = re.search(r"after (\(.*\))", caught.value.remedy)[1]
    subprocess.run(["bash", "-c", command], check=True)
    assert {path.name for path in checkpoints.glob("step_*")} == {"step_5", "step_10"}
    train(replace(config, resume=config.run_dir))
    assert_same_run(tmp_path / "whole", config.run_dir)
    with pytest.raises(SettingsError, match="holds no run .*: give a run's directory, or auto"):
        find_run(str(tmp_path), None)
    (tmp_path / "leaderboard.csv").touch()
    with pytest.raises(SettingsError, match=rf": hydra.sweep.dir={tmp_path} beside the command of this sweep goes on"):
        find_run(str(tmp_path), None)


@pytest.mark.long
def test_a_checkpoint_taken_out_of_its_run_is_answered_with_a_run_that_goes_on(config, tmp_path):
    config = replace(config, run_dir=str(tmp_path / "run"), checkpoint_interval=5, keep_checkpoints=9)
    train(config)
    taken = tmp_path / "of step 10"
    shutil.move(tmp_path / "run/checkpoints/step_10", taken)
    with pytest.raises(SettingsError, match=r"'resume=.*of step 10-run' data.path=TEXT goes on from it") as caught:
        find_run(str(taken), None)
    subprocess.run(["bash", "-c", caught.value.remedy.partition(" after ")[2]], check=True)
    run = f"{taken}-run"
    assert train(replace(config, run_dir=run, resume=run)) > 0
    weights, others = (Path(folder, "checkpoints/last/model.safetensors") for folder in (run, config.run_dir))
    assert weights.read_bytes() == others.read_bytes()

    (Path(run) / "checkpoints/step_10/optimizer.safetensors").unlink()
    taken = shutil.move(Path(run) / "checkpoints/step_10", tmp_path / "weights")
    with pytest.raises(SettingsError, match=r"init_from=.*weights begins a new run with its weights\.$"):
        find_run(str(taken), None)


@pytest.mark.long
def test_a_run_stopped_at_its_last_step_is_finished_when_it_was_evaluated(config, tmp_path):
    config.run_dir = str(tmp_path / "outputs/run")
    again = stopped(config, config.max_steps - 1)
    last = Path(config.run_dir) / "checkpoints/last"
    before = read_meta(last)
    assert before.progress.step == 20 and not before.progress.finished
    best = train(again)
    after = read_meta(last)
    assert after.progress.finished and after.progress.metrics["val_loss"] == best
    assert after.files == before.files and after.home == str(Path(config.run_dir).resolve())
    assert last.with_name("best").readlink() == Path("step_20")
    assert find_run("auto", str(tmp_path / "outputs")) is None


@pytest.mark.slow
def test_a_larger_budget_goes_on_where_a_finished_run_ended(config):
    a_step = flops_per_token(without_weights(replace(config.model, vocab_size=257))) * 6 * 16
    budgets = [(7, {"max_steps": 7}), (9, {"max_steps": None, "max_flops": 9 * a_step}), (9, {"max_steps": 9})]
    for steps, budget in budgets:  # the last time nothing is left to do
        train(replace(config, **budget, resume=config.run_dir if Path(config.run_dir).exists() else None))
        assert steps_of(config.run_dir) == list(range(1, steps + 1))
    assert written_settings(Path(config.run_dir))["max_steps"] == 9


@pytest.mark.long
def test_with_another_batch_size_a_run_goes_on_where_it_is_in_the_text_and_counts_what_it_has_read(config, monkeypatch):
    """The steps before were counted with the new size, and as many sequences were passed over, or read again."""
    read = []
    first_token = TokenDataset.first_token
    monkeypatch.setattr(TokenDataset, "first_token", lambda *args: read.append(args[1]) or first_token(*args))
    sequences = 0
    counted = []
    for batch_size, steps, resume in ((6, 4, None), (2, 3, config.run_dir), (10, 2, config.run_dir)):
        counted += [sequences + batch_size * step for step in range(1, steps + 1)]
        sequences += batch_size * steps
        sizes = dict(batch_size=batch_size, max_steps=len(counted), log_interval=1, resume=resume, allow_changes=True)
        train(replace(config, **sizes))
    assert read == [*range(sequences)] == [*range(4 * 6 + 3 * 2 + 2 * 10)]
    a_token = flops_per_token(without_weights(replace(config.model, vocab_size=257)))
    tokens = [16 * count for count in counted]
    found = [(row["tokens"], row["flops"]) for row in rows(config.run_dir) if "loss" in row]
    assert found == [(count, a_token * count) for count in tokens]
    summary = read_summary(Path(config.run_dir))
    assert (summary.tokens, summary.flops) == (tokens[-1], a_token * tokens[-1])

    # A limit of arithmetic counts the steps before as they were.
    limit = dict(max_steps=None, max_flops=16 * (sequences + 3 * 4) * a_token, batch_size=4, log_interval=1)
    train(replace(config, **limit, resume=config.run_dir, allow_changes=True))
    assert steps_of(config.run_dir)[-1] == len(counted) + 3 and read == [*range(sequences + 3 * 4)]


@pytest.mark.slow
def test_of_another_batch_size_the_micro_batch_is_no_further_change(train_config, caplog):
    caplog.set_level(logging.INFO, "tinygpt")
    with training.start.open_run(train_config) as run:
        run.save()
    resumed = replace(train_config, resume=train_config.run_dir, allow_changes=True)
    said = f"with micro_batch_size 1 (was {train_config.batch_size}): the same batches in the same order"
    for change, told in ((dict(batch_size=2 * train_config.batch_size), False), (dict(micro_batch_size=1), True)):
        caplog.clear()
        with training.start.open_run(replace(resumed, **change)):
            assert (said in caplog.text) == ("micro_batch_size" in caplog.text) == told


def test_counts_and_seconds_go_on_after_a_save_and_where_a_stopped_run_left_them(train_config):
    with training.start.open_run(train_config) as run:
        run.progress.step = 5
        run.started -= 100  # as after 100 seconds
        run.skipped += torch.tensor([3, 0])
        run.save()
        assert 100 < run.seconds < 110
    with training.start.open_run(replace(train_config, resume=train_config.run_dir)) as run:
        run.check_skipped_steps()
        assert (run.progress.skipped, run.progress.skipped_in_a_row) == (3, 0) and 100 < run.seconds < 110


# Only as the same run


@pytest.mark.slow
def test_settings_that_change_the_result_are_named_and_refused_and_others_may_change(config, text_file, caplog):
    train(replace(config, max_steps=7))
    again = replace(config, resume=config.run_dir, max_steps=8)
    changed = dict(seed=2, batch_size=12, optimizer=OptimizerConfig(lr=0.5, embedding_lr=None))
    changed["model"] = replace(config.model, dropout=0.3)  # no weight depends on it
    named = r"batch_size=12 \(was 6\), model.dropout=0.3 \(was 0.1\), optimizer.embedding_lr=null \(was 0.1\), "
    with pytest.raises(SettingsError, match=named + r".*seed=2 \(was 1\): restore these, or set allow_changes=true"):
        train(replace(again, **changed))
    train(replace(again, **changed, allow_changes=True))
    (said,) = [message for message in caplog.messages if "would not be the same run" in message]
    assert said.endswith("seed=2 (was 1).")
    for shaping in (dict(optimizer=OptimizerConfig(name="adamw")), dict(model=replace(config.model, n_layer=1))):
        with pytest.raises(SettingsError, match="cannot change: leave these out, or begin a new run"):
            train(replace(again, **changed | shaping, allow_changes=True))
    with pytest.raises(SettingsError, match=r"n_layer.* cannot change: leave these out, .*; in Python, where"):
        train(TrainConfig(resume=config.run_dir))
    others = replace(again, **changed, max_steps=9, eval_interval=2, log_interval=3, keep_checkpoints=1)
    train(replace(others, data=replace(config.data, cache_dir=f"{text_file.parent}/other"), recompute="block"))
    text_file.write_text(text_file.read_text() + "one more sentence.\n")
    with pytest.raises(
        SettingsError, match="the text or its modification time has changed: restore these, or set allow_changes=true"
    ):
        train(replace(others, max_steps=10))

    # On the changed text the run keeps the tokens that its weights know, and begins to compare losses anew.
    text_file.write_text("Quite another text, of other words. " * 2000)
    before = open_checkpoint(config.run_dir)
    train(replace(others, max_steps=10, allow_changes=True))
    after = open_checkpoint(config.run_dir)
    assert after.meta.progress.step == 10 and after.meta.data != before.meta.data
    assert after.tokenizer._mergeable_ranks == before.tokenizer._mergeable_ranks


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_text_describes_it(train_config, tmp_path, caplog):
    """Nothing told that the new text had a part of what is held out."""
    own = [" ".join(f"{word}{number}" for word in range(40)) for number in range(10, 30)]
    others = [text[::-1] for text in own]
    (tmp_path / "held.txt").write_text("<|endoftext|>".join(own))
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(others))
    data = replace(train_config.data, path=f"{tmp_path}/text.txt", val_path=f"{tmp_path}/held.txt")
    config = replace(train_config, data=data, max_steps=1, eval_interval=1, sample_tokens=0)
    train(config)
    assert "20 documents" in caplog.text
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(others + own[:5]))
    caplog.clear()
    train(replace(config, resume=config.run_dir, max_steps=2, allow_changes=True))
    assert "resuming at step 1" in caplog.text
    described = re.search(r"(?m)text      .*: 1 file, 25 documents, .*, ([\d.]+)% of it also in", caplog.text)
    share = 100 * sum(map(len, own[:5])) / sum(map(len, own))
    assert described and float(described[1]) == pytest.approx(share, abs=0.5)
    caplog.clear()
    train(replace(config, resume=config.run_dir, max_steps=3))
    assert "documents, " not in caplog.text, "of the same text nothing is told again"


@pytest.mark.slow
def test_a_text_that_was_only_copied_or_touched_is_the_same(train_config, text_file):
    """Its modification time is another one, as after `cp`, `git checkout` or a clone elsewhere."""
    with training.start.open_run(train_config) as run:
        run.progress.step = 5
        run.save()
    os.utime(text_file, ns=(0, 0))
    again = replace(train_config, resume=train_config.run_dir)
    with training.start.open_run(again) as touched:
        assert touched.data.fingerprint != run.data.fingerprint
        assert touched.progress.earlier_settings is None and touched.progress.learned == []
    # One letter more is another text.
    text_file.write_text(text_file.read_text() + "a")
    said = "the text or its modification time has changed: restore these, or"
    with pytest.raises(SettingsError, match=said), training.start.open_run(again):
        pass


@pytest.mark.slow
def test_a_run_of_a_small_vocabulary_goes_on_with_a_text_that_has_more_tokens(train_config, text_file):
    """The vocabulary that it inherits was refused: a tokenizer of the new text, which it never takes, had more ids."""
    config = replace(train_config, tokenizer=TokenizerConfig(name="bpe", vocab_size=2048), max_steps=1)
    train(config)
    before = open_checkpoint(config.run_dir)
    ids = before.tokenizer.n_vocab
    words = (f"{first}{second}{third}" for first in "bdfgk" for second in "aeiou" for third in "lmnrst")
    text_file.write_text(text_file.read_text() + " ".join(words) * 40)
    model = replace(config.model, vocab_size=before.model.config.vocab_size)  # as the command inherits it
    again = replace(config, model=model, resume=config.run_dir, max_steps=2)
    assert prepare(config.data, config.tokenizer).vocab_size > model.vocab_size == ids
    told = "the text or its modification time has changed: restore these, .*; in place of resume=, init_from= begins"
    with pytest.raises(SettingsError, match=told):
        train(again)
    assert f"embedding {ids * 32:,}" in plan_run(train_module.train_step, replace(again, allow_changes=True))
    train(replace(again, allow_changes=True))
    after = open_checkpoint(f"{config.run_dir}/checkpoints/last")
    assert after.meta.progress.step == 2 and after.tokenizer._mergeable_ranks == before.tokenizer._mergeable_ranks


def test_the_settings_of_earlier_steps_are_those_that_shape_the_weights_and_add_up():
    defaults = {"max_steps": None, "grad_clip": 1.0, "eval_interval": 150, "seed": 1}
    saved = Meta({"max_steps": 6, "seed": 1}, Progress(step=6), computed_on={"project_hash": PROJECT_HASH})
    assert earlier_settings(defaults | {"max_steps": 6, "eval_interval": 5}, saved, defaults, None, "float32") is None
    found = earlier_settings(defaults | {"max_steps": 9, "grad_clip": 0.5}, saved, defaults, "text", "float32")
    assert found == "grad_clip=1 max_steps=6 another version of the text until step 6"
    saved.progress.earlier_settings = "seed=7 until step 3"
    found = earlier_settings(defaults | {"max_steps": 9}, saved, defaults, None, "float32")
    assert found == "seed=7 until step 3, max_steps=6 until step 6"
    # So is the type that precision=auto chose on an earlier machine, whose mean with others a table had.
    saved = Meta({}, Progress(step=6), computed_on={"project_hash": PROJECT_HASH, "precision": "bfloat16"})
    assert earlier_settings(defaults, saved, defaults, None, "bfloat16") is None
    assert earlier_settings(defaults, saved, defaults, None, "float16") == "computed_in=bfloat16 until step 6"
    # The code of the earlier steps is one of these.
    saved = Meta({"code_hash": "aa"}, Progress(step=6), computed_on={"project_hash": PROJECT_HASH, "torch": "2.10"})
    assert earlier_settings(defaults | {"code_hash": "aa"}, saved, defaults, None, "float32") is None
    saved.computed_on["project_hash"] = "bb"
    found = earlier_settings(defaults | {"code_hash": "cc"}, saved, defaults, None, "float32")
    assert found == "code_hash=aa project_hash=bb until step 6"
    for computed_on, code in (({"project_hash": "aa"}, "aa"), ({}, "null")):  # older runs do not say their code
        saved = Meta({"max_steps": 6}, Progress(step=6), computed_on=computed_on)
        found = earlier_settings(defaults | {"max_steps": 6}, saved, defaults, None, "float32")
        assert found == f"project_hash={code} until step 6"


@pytest.mark.slow
def test_a_run_notes_the_settings_that_its_earlier_steps_had(config):
    """A table had the mean of it and of runs with its last settings, or took it for a copy of one of them."""

    def noted(**changes) -> str | None:
        train(replace(config, **changes))
        return read_summary(Path(config.run_dir)).earlier_settings

    assert noted(max_steps=1) is None
    again = dict(resume=config.run_dir, allow_changes=True)
    assert noted(max_steps=1, eval_interval=1, keep_checkpoints=1, **again) is None
    assert noted(max_steps=2, **again) == "max_steps=1 until step 1"
    changed = dict(optimizer=OptimizerConfig(lr=0.5), max_steps=3, **again)
    assert noted(**changed) == "max_steps=1 until step 1, max_steps=2 optimizer.lr=0.02 until step 2"


def test_a_copy_by_hard_links_keeps_its_measurements(tmp_path):
    """As by cp -al or rsync --link-dest: the run wrote into the copy, and a resumed copy cut the run's files."""
    for name in LOGS:
        (tmp_path / name).write_text("one\ntwo\n")
        os.link(tmp_path / name, tmp_path / f"copy of {name}")
    meta = Meta({}, Progress(step=1), logs=dict.fromkeys(LOGS, 4))
    remove_leftovers(tmp_path, Saved(tmp_path, meta))
    for name in LOGS:
        with (tmp_path / name).open("a") as file:
            file.write("three\n")
        assert (tmp_path / name).read_text() == "one\nthree\n"
        assert (tmp_path / f"copy of {name}").read_text() == "one\ntwo\n"


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda rows: [{name: row.get(name) for name in rows[0] | rows[3]} for row in rows],  # as pandas does
        lambda rows: rows * 2,  # a merge by git that keeps both sides
        lambda rows: [row | {"step": float(row["step"])} for row in reversed(rows)],
    ],
    ids=["as a table", "twice", "turned round"],
)
@pytest.mark.parametrize("separators", [None, (",", ":")], ids=["spaces", "compact"])
def test_measurements_that_a_program_has_written_anew_are_cut_by_their_steps(tmp_path, caplog, rewrite, separators):
    """They were cut at the size that they had at the checkpoint, within a row of an earlier or a later step."""
    of_step = [{"step": step, "loss": 1 / step, "lr": 0.1} for step in (1, 2, 3, 4, 5)]
    of_step[1]["loss"] = None  # not finite
    evaluation = {"step": 3, "val_loss": 2.0, "val_tokens": 5}
    rows = [of_step[0], *of_step[1:3], evaluation, *of_step[3:]]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for evaluated in (3, 0):
        saved = Saved(tmp_path, Meta({}, Progress(step=3, evaluated=evaluated)))
        kept = rows[: 4 if evaluated else 3]
        saved.meta.logs["metrics.jsonl"] = sum(len(json.dumps(row)) + 1 for row in kept)
        written = "".join(json.dumps(row, separators=separators) + "\n" for row in rewrite(rows))
        file.write_text(written)
        remove_leftovers(tmp_path, saved)
        found = read_metrics(file)
        assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, kept))
        said = f"metrics.jsonl is not as this run wrote it: {len(kept)} rows up to step 3 remain."
        assert said in caplog.text
        for lose in (lambda: file.write_text(""), file.unlink):  # a disk that failed, a file that is gone
            lose()
            caplog.clear()
            remove_leftovers(tmp_path, saved)
            assert "metrics.jsonl is not as this run wrote it: 0 rows up to step 3 remain." in caplog.text


def test_a_copy_of_a_checkpoint_by_another_number_is_neither_gone_on_from_nor_written_over(tmp_path):
    """A copy step_99 of step 2 was the latest: the run went on from it, and called step_4 damaged."""
    folder = tmp_path / "checkpoints"

    def write(step: int) -> None:
        meta = Meta({}, Progress(step=step))
        weights = {"weight": torch.full((1,), float(step))}
        write_checkpoint(folder / f"step_{step}", weights, {"moment": torch.zeros(1)}, meta, None)

    def weight(name: str) -> float:
        return safetensors.torch.load_file(folder / name / "model.safetensors")["weight"].item()

    for step in (2, 4):
        write(step)
    for name in ("step_99", "step_7", "step_002_kept"):
        shutil.copytree(folder / "step_2", folder / name)
    saved = newest_intact(tmp_path)
    assert saved.path.name == "step_4" and find_checkpoints(str(tmp_path))[0].name == "step_4"
    write(7)  # by a run that went on while somebody made the copy
    assert weight("step_7") == 7.0 and read_meta(folder / "step_7").progress.step == 7
    shutil.rmtree(folder / "step_7")
    remove_leftovers(tmp_path, saved)
    names = sorted(re.sub("_[0-9a-f]{4}$", "", path.name) for path in folder.iterdir())
    assert names == ["misnamed_step_7", "misnamed_step_99", "step_002_kept", "step_2", "step_4"]


@pytest.mark.slow
def test_a_run_goes_on_with_its_tokenizer_where_the_cache_has_that_of_another_version(config, tmp_path, monkeypatch):
    """Its folder was removed and made again by a version whose bpe learns other tokens: the weights got their ids."""
    config = replace(
        config,
        tokenizer=TokenizerConfig(name="bpe", vocab_size=280),
        max_steps=4,
        eval_interval=2,
        checkpoint_interval=2,
    )
    train(config)
    tokens = validation_split(open_checkpoint(config.run_dir))[1]
    again = shutil.copytree(config.run_dir, tmp_path / "again", symlinks=True)
    shutil.rmtree(again / "checkpoints/step_4")
    shutil.rmtree(Path(config.data.cache_dir) / "tokens")
    monkeypatch.setattr("data.tokenizer.train_bpe", partial(train_bpe, pattern=r"\w|\W+"))
    others = prepare(config.data, config.tokenizer, log=Mock()).tokenizer
    train(replace(config, resume=str(again)))
    assert_same_run(config.run_dir, again)
    saved = open_checkpoint(str(again))
    assert not same_tokens(others, saved.tokenizer)
    for checkpoint in (open_checkpoint(config.run_dir), saved):
        _, found, notes = validation_split(checkpoint)
        assert np.array_equal(found, tokens) and notes == []


def test_a_run_had_the_default_of_a_setting_that_is_younger():
    saved = Meta({"model": {"n_embd": 32}, "seed": 1}, data="text")
    now = {"model": {"n_embd": 32}, "grad_clip": 5, "seed": 1, "resume": "run", "allow_changes": False}
    check_settings(now, saved, {"grad_clip": 5}, data="text")
    with pytest.raises(SettingsError, match=r"grad_clip=5 \(was 1\), seed=2 \(was 1\)"):
        check_settings(now | {"seed": 2}, saved, {"grad_clip": 1}, data="text")


@pytest.mark.slow
def test_from_the_command_line_a_run_has_its_own_settings_but_for_what_is_typed(text_file, tmp_path):
    begin = [*tiny(text_file), "seed=5", "optimizer=adamw", "sample_prompt=${x}", "schedule.warmup_steps=1"]
    assert run_here("train.py", *begin, "max_steps=2", cwd=tmp_path).returncode == 0
    (run_dir,) = (path.relative_to(tmp_path) for path in tmp_path.glob("outputs/*/*"))
    before = open_checkpoint(str(tmp_path / run_dir)).meta.config
    assert before["sample_prompt"] == "${x}" and before["seed"] == 5
    resumed = run_here("train.py", f"resume={run_dir}", "max_steps=4", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    after = open_checkpoint(str(tmp_path / run_dir)).meta.config
    assert after == before | {"max_steps": 4, "resume": str(run_dir), "run_dir": str(run_dir)}
    assert steps_of(tmp_path / run_dir) == [1, 2, 3, 4] and [*tmp_path.glob("outputs/*/*")] == [tmp_path / run_dir]
    refusals = {
        f"resume={run_dir} optimizer.lr=0.3": "optimizer.lr=0.3 (was 0.001)",
        f"resume={run_dir} schedule=cosine": "schedule.name=cosine (was warmup_stable_decay), ",  # a whole group
        f"resume={run_dir} tokenizer=bpe": "tokenizer.name=bpe (was byte)",
        f"resume={run_dir} run_dir=b": f"resume={run_dir} and run_dir=b are two folders: leave out run_dir",
    }
    for typed, said in refusals.items():
        refused = run_here("train.py", *typed.split(), cwd=tmp_path)
        assert refused.returncode == 1 and said in refused.stderr and len(refused.stderr.splitlines()) == 1
    # The same command after its end, as of a job that is queued again: it has nothing to do, or more steps to take.
    again = ["train.py", "resume=auto", f"run_dir={run_dir}"]
    done = run_here(*again, cwd=tmp_path)
    assert done.returncode == 0 and ": to train on, raise max_steps" in done.stdout + done.stderr
    assert "for a new run" not in done.stdout + done.stderr and steps_of(tmp_path / run_dir) == [1, 2, 3, 4]
    more = run_here(*again, "max_steps=5", cwd=tmp_path)
    assert more.returncode == 0 and steps_of(tmp_path / run_dir) == [1, 2, 3, 4, 5], more.stderr


def test_a_run_that_may_not_be_written_to_is_resumed_as_a_copy(tmp_path, monkeypatch):
    """It told to choose a folder, and resume= takes no other one."""

    def closed(run: Path, *_) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(run / "train.log"))

    monkeypatch.setattr("training.start.lock_run", closed)
    (tmp_path / "checkpoints/step_1").mkdir(parents=True)
    said = (
        r"resume=\S+ cannot be written \(Permission denied.*\): copy the run to a folder with room .*, and resume the"
    )
    with pytest.raises(SettingsError, match=said), ExitStack() as stack:
        training.start.checkpoint_to_resume(TrainConfig(resume=str(tmp_path)), stack)


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True])
def test_a_checkpoint_of_another_place_chooses_no_places_and_no_services(config, tmp_path, moved):
    train(replace(config, max_steps=7))
    run = Path(config.run_dir)
    if moved:
        run = run.rename(tmp_path / "moved")
    for step in run.glob("checkpoints/step_*"):
        forge(step, config={"wandb": {"mode": "online"}, "data": read_meta(step).config["data"] | {"path": "/etc"}})
    again = run_here("train.py", f"resume={run}", "max_steps=8", "dry_run=true", cwd=tmp_path)
    if moved:  # the text's path is to be typed
        assert "data=files has nothing to read: give data.path=" in again.stderr
        typed = [f"data.path={config.data.path}", f"data.cache_dir={config.data.cache_dir}", "data=text"]
        assert run_here("train.py", f"resume={run}", "max_steps=8", *typed, cwd=tmp_path).returncode == 0
        assert steps_of(run) == list(range(1, 9))
    else:
        assert "wandb.mode=online finds no API key" in again.stderr


@pytest.mark.slow
def test_a_moved_run_asks_for_the_place_of_its_text(config, tmp_path):
    stopped(replace(config, run_dir=str(tmp_path / "old/outputs/run")), 3)
    (tmp_path / "old").rename(tmp_path / "new")
    Path(config.data.path).unlink()
    done = run_here("train.py", "resume=auto", cwd=tmp_path / "new")
    assert "data=files has nothing to read: give data.path=" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("shorter", [{"max_steps": 2}, {"max_steps": None, "max_flops": 1.0}])
def test_a_run_is_not_finished_by_an_end_that_it_has_passed(config, shorter):
    stopped(config, 4)
    last = Path(config.run_dir) / "checkpoints/last/meta.json"
    before = last.read_bytes()
    with pytest.raises(SettingsError, match=r"max_(steps=2|flops=1) ends before step 5, where resume=.* is: raise it"):
        train(replace(config, resume=config.run_dir, **shorter))
    assert last.read_bytes() == before


ENDS = {
    "max_steps=2: to train on, raise max_steps": {"max_steps": 2},
    "max_minutes=1e-09: to train on, raise max_minutes": {"max_steps": None, "max_minutes": 1e-9},
    "max_flops=1: to train on, raise max_flops": {"max_steps": None, "max_flops": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_finished_run_says_what_to_raise_until_it_is_raised(config, end, caplog):
    """A larger max_steps= beside an earlier max_flops was answered with: raise max_steps."""
    caplog.set_level(logging.INFO, "tinygpt")
    config = replace(config, **ENDS[end])
    train(config)
    again = replace(config, resume=config.run_dir)
    train(again)
    said = f"resume={config.run_dir} has finished, by {end}"
    assert caplog.messages.count(f"{said}.") == 1
    name = end.partition("=")[0]
    if name != "max_steps":
        train(replace(again, max_steps=3))
        assert caplog.messages.count(f"{said}, or set {name}=null.") == 1
    train(replace(again, max_steps=3, max_minutes=None, max_flops=None))
    assert "".join(caplog.messages).count(said) == 2 - (name == "max_steps") and steps_of(config.run_dir)[-1] == 3


@pytest.mark.long
def test_a_finished_run_that_goes_on_with_another_text_is_scored_on_that_text(config, text_file):
    """Its loss was infinite, and its summary had the figures of the text before."""
    train(replace(config, max_steps=1))
    text_file.write_text("Quite another text, of other words. " * 2000)
    loss = train(replace(config, max_steps=1, resume=config.run_dir, allow_changes=True))
    saved = open_checkpoint(config.run_dir)
    tokens = prepare(config.data, config.tokenizer, encoding=saved.tokenizer).val
    params = ScoringParams(torch.autocast("cpu", enabled=False), stride=config.model.block_size)
    nats = score(saved.model, saved.tokenizer, tokens, params).nats
    assert loss == pytest.approx(nats.mean(), abs=1e-5) == read_summary(Path(config.run_dir)).val_loss


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_says_what_differs_and_elsewhere_only(config, caplog):
    caplog.set_level(logging.INFO, "tinygpt")
    train(replace(config, max_steps=2))
    again = replace(config, resume=config.run_dir)
    train(replace(again, max_steps=3))
    assert "by rounding" not in caplog.text
    meta = read_meta(Path(config.run_dir) / "checkpoints/last")
    forge(Path(config.run_dir) / "checkpoints/last", computed_on=meta.computed_on | {"threads": 64})
    train(replace(again, max_steps=4))
    assert f"with threads {torch.get_num_threads()} (was 64): the same batches in the same order" in caplog.text


def test_what_a_person_has_edited_in_config_yaml_is_told_with_the_way_to_change_it(tmp_path, caplog):
    before = {"seed": 1, "max_steps": 20, "optimizer.lr": 0.02, "model.ngrams": [2, 3], "max_flops": 1e16}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before))
    training.start.tell_edited(tmp_path, before, before | {"max_steps": 30})
    assert not caplog.text
    edited = "seed: 1\nmax_steps: 40\noptimizer: {lr: 0.5}\nmodel: {ngrams: [2]}\nnew: 1\n"
    (tmp_path / "config.yaml").write_text(edited)
    training.start.tell_edited(tmp_path, before, before | {"max_steps": 40})  # typed as well
    said = "config.yaml has optimizer.lr=0.5 'model.ngrams=[2]', which changes nothing"
    assert caplog.messages == [f"{said}: the run keeps its model.ngrams, and a new one may have others."]
    for text, typed, allowed in (
        ("max_steps: 40\nsample_prompt: Once upon", "'sample_prompt=Once upon'", ""),
        ("optimizer: {lr: 0.5}", "optimizer.lr=0.5", " allow_changes=true"),
    ):
        caplog.clear()
        (tmp_path / "config.yaml").write_text(text)
        training.start.tell_edited(
            tmp_path, before | {"sample_prompt": ""}, before | {"sample_prompt": "", "max_steps": 40}
        )
        said = f"config.yaml has {typed}, which changes nothing: type that after resume={tmp_path}{allowed}."
        assert caplog.messages == [said]


def test_what_is_said_of_the_batches_of_a_resumed_run_is_true_of_another_text_too(caplog):
    """A run that went on with another text, or seed, was told to have the same text in the same order."""
    caplog.set_level(logging.INFO, "tinygpt")
    for same in (True, False):
        training.start.tell_changes({"threads": 4}, {"threads": 2}, same)
    assert ["same batches in the same order" in said for said in caplog.messages] == [True, False]


def test_a_run_that_goes_on_on_another_processor_says_so(train_config, caplog):
    """Losses differed in the fourth digit between processors with AVX2 and AVX-512, without a word."""
    caplog.set_level(logging.INFO, "tinygpt")
    with training.start.open_run(train_config) as run:
        facts = run.computed_on()
    caplog.clear()
    training.start.tell_changes(facts | {"processor": "Xeon (AVX2)"}, facts)
    said = f"with processor {facts['processor']} (was Xeon (AVX2)): the same batches in the same order"
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(said)
    caplog.clear()
    training.start.tell_changes({name: value for name, value in facts.items() if name != "processor"}, facts)
    assert not caplog.messages  # an earlier version kept no name


@pytest.mark.parametrize(
    ("limits", "step", "said"),
    [
        ({"max_steps": 4}, 4, "has finished, by max_steps=4: to train on, raise max_steps."),
        (
            {"max_steps": 4, "patience": 1},
            4,
            "by max_steps=4 and patience=1: to train on, raise max_steps and patience.",
        ),
        ({"max_steps": 9, "patience": 1}, 4, "by patience=1: to train on, raise patience, or set patience=null."),
        ({"max_steps": 4}, 5, "max_steps=4 ends before step 5, where resume=RUN is: raise it, or leave it out."),
        ({"max_flops": 1e3}, 5, "max_flops=1000 ends before step 5, where resume=RUN is: raise it, or leave it out."),
        ({}, 451, "max_steps=450, the default, ends before step 451, where resume=RUN is: raise it."),
    ],
)
def test_the_end_of_a_resumed_run_is_told_by_the_limits_that_it_has(limits, step, said, caplog):
    """A run at the end of its steps and its patience was told of the one, and after that of the other."""
    caplog.set_level(logging.INFO, "tinygpt")
    config = TrainConfig(model=GPTConfig(n_layer=1, n_embd=32, vocab_size=257), resume="RUN", **limits)
    run = trial_run(config, torch.device("cpu"), torch.float32)
    run.progress.step, run.progress.without_gain = step, 1
    try:
        training.start.check_end(run)
    except SettingsError as error:
        caplog.clear()
        assert str(error) == said
    else:
        assert caplog.messages == [f"resume=RUN has finished, {said.removeprefix('has finished, ')}"]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("files", "stdlib", "the text or its modification time has changed"),
        ("files", "copy", r"data=copy \(was files\)"),
        ("copy", "copy", "the task has changed"),
    ],
)
def test_other_data_of_a_resumed_run_is_named_as_text_or_task(before, now, said):
    """A run on a text was told that the text had changed where a task was typed."""
    settings = asdict(TrainConfig(resume="RUN"))
    saved = Meta(settings | {"data": settings["data"] | {"source": before}}, data="a")
    with pytest.raises(SettingsError, match=rf"would not be the same run: {said}: restore these, .* the new data"):
        check_settings(settings | {"data": settings["data"] | {"source": now}}, saved, settings, "b")


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("held.txt", None, r"data.val_path=null \(was held.txt\)"),
        (None, "held.txt", r"data.val_path=held.txt \(was null\)"),
        ("held.txt", "held/", "the text or its modification time has changed"),
    ],
)
def test_a_text_for_validation_that_a_resumed_run_lacks_is_named(before, now, said):
    """A moved run, which leaves its paths behind, was told that its text had changed."""
    settings = asdict(TrainConfig(resume="RUN", data=DataConfig(path="a.txt", val_path=now)))
    saved = Meta(settings | {"data": settings["data"] | {"val_path": before}}, data="a")
    with pytest.raises(SettingsError, match=rf"would not be the same run: {said}: restore these, or"):
        check_settings(settings, saved, settings, "b")


def test_a_run_that_has_learned_a_task_is_not_gone_on_with_on_a_text():
    """Its tokenizer, which it never had, was told to be missing."""
    saved = Meta(asdict(TrainConfig(data=DataConfig(source="copy"))), files={"model.safetensors": {}})
    with pytest.raises(SettingsError, match="^resume=RUN has learned data=copy, which has no tokenizer, .*=stdlib"):
        training.start.refuse_text_after_task(TrainConfig(resume="RUN"), saved)
    saved.files["tokenizer.json"] = {}
    training.start.refuse_text_after_task(TrainConfig(resume="RUN"), saved)


def test_the_way_to_go_on_with_a_run_has_its_code(tmp_path):
    """Typed without it, the next error asked for the file."""
    run = tmp_path / "a run"
    (run / "checkpoints/step_4").mkdir(parents=True)
    (run / "checkpoints/step_4/meta.json").write_text(as_json(Meta({"code": "my forms.py"}, Progress(step=4))))
    again = rf"'resume={run}' 'code=my forms.py'"
    with pytest.raises(SettingsError, match=f"continue it by {again}"):
        refuse_used(run)
    with pytest.raises(SettingsError, match=f": {again} goes on from its latest checkpoint"):
        find_run(str(run / "checkpoints"), None)


@pytest.mark.parametrize(("data", "typed"), [({"source": "copy"}, ""), ({"path": "x"}, " data.path=TEXT")])
def test_a_checkpoint_taken_out_of_its_run_asks_for_a_text_if_that_had_a_path(tmp_path, data, typed):
    """data.path=TEXT was advised to a run of a task, which refuses it."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "optimizer.safetensors").touch()
    (tmp_path / "taken" / "meta.json").write_text(as_json(Meta({"data": data}, Progress(step=4))))
    with pytest.raises(SettingsError, match=rf": resume=\S*taken-run{typed} goes on from it after mkdir"):
        find_run(str(tmp_path / "taken"), None)


def test_a_checkpoint_that_was_saved_without_optimizers_begins_a_run_and_continues_none(tmp_path):
    """A mean of weights was said to go on, then to have another text, then to be damaged."""
    model = random_gpt(vocab_size=257)
    save_checkpoint(tmp_path / "mean", model=model, tokenizer=None, config=TrainConfig(model=model.config))
    assert not (tmp_path / "mean/optimizer.safetensors").exists()
    with pytest.raises(SettingsError, match=r"holds no run .*: init_from=\S*mean begins a new run with its weights\.$"):
        find_run(str(tmp_path / "mean"), None)
    step = tmp_path / "run/checkpoints/step_0"
    shutil.copytree(tmp_path / "mean", step)
    with pytest.raises(SettingsError, match=rf"{step} has no optimizer's state: init_from={step} begins a new run"):
        newest_intact(tmp_path / "run")
    assert load_checkpoint(step).model.config == model.config


def test_comments_that_a_person_wrote_into_config_yaml_are_kept_once_and_texts_with_a_hash_are_none(tmp_path):
    settings = {
        "seed": 1,
        "sample_prompt": "# é",
        "stop": "a # b",
        "wandb": {"notes": "one # two " * 20, "tags": ["#c"]},
    }
    plain = settings_text(settings)
    (tmp_path / "config.yaml").write_text(plain)
    assert written_comments(tmp_path) == ""
    edited = plain.replace("seed: 1", "seed: 7  # by hand\n  # too large")
    (tmp_path / "config.yaml").write_text(f"# of Monday\n\n{edited}")
    kept = "# of Monday\n# seed: 7  # by hand\n# too large\n"
    assert written_comments(tmp_path) == kept
    for seed in (1, 2):
        (tmp_path / "config.yaml").write_text(written_comments(tmp_path) + settings_text(settings | {"seed": seed}))
        assert written_comments(tmp_path) == kept and written_settings(tmp_path)["seed"] == seed
    for broken in ("a: [", "- #", "", "\x00#"):
        (tmp_path / "config.yaml").write_text(broken)
        written_comments(tmp_path)
    (tmp_path / "config.yaml").unlink()
    assert written_comments(tmp_path) == ""


@pytest.mark.slow
def test_auto_takes_the_newest_run_that_is_neither_finished_nor_going_on(config, tmp_path, monkeypatch):
    outputs = tmp_path / "outputs"
    for age, (name, stops) in enumerate({"first": 3, "second": 4, "complete": None}.items()):
        one = replace(config, run_dir=str(outputs / name))
        stopped(one, stops) if stops else train(one)
        os.utime(outputs / name / "checkpoints", (age, age))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_run("auto", "~/outputs") == find_run("~/outputs/second", None) == outputs / "second"
    with ExitStack() as stack:
        lock_run(outputs / "second", stack)
        assert find_run("auto", str(outputs)) == outputs / "first"
        with pytest.raises(SettingsError, match="still going on, or that Ctrl-Z halted .*: stop that one first"):
            train(replace(config, resume=str(outputs / "second")))
    assert find_run("auto", str(tmp_path / "nothing")) is None
    (outputs / "second/checkpoints/last").resolve().joinpath("meta.json").write_text("{}")
    assert find_run("auto", str(outputs)) == outputs / "first"


def test_auto_beside_init_from_takes_a_run_that_began_with_it(tmp_path, monkeypatch):
    """The unfinished run whose weights were asked for went on itself, and so did one with another beginning."""
    monkeypatch.chdir(tmp_path)
    begun = {  # the newest first
        "base": Meta({"init_from": "outputs/oldest"}, Progress(begun_with="00")),
        "of_other": Meta({"init_from": "outputs/other"}, Progress(begun_with="11")),
        "of_base": Meta({"init_from": "outputs/base"}, Progress(begun_with="22")),
        "anew": Meta({}),
        "unresumed": Meta({"init_from": "~/third"}, Progress(begun_with="33")),  # of an earlier version, as the next
        "resumed": Meta({"init_from": None}, Progress(begun_with="44")),
    }
    monkeypatch.setattr("runs.resume.runs_by_age", lambda: [Path("outputs", name) for name in begun])
    monkeypatch.setattr("runs.resume.newest", lambda run, read: begun[run.name])
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted = {
        "outputs/base": "of_base",
        f"{tmp_path}/outputs/./base": "of_base",
        "outputs/other": "of_other",
        "third": "unresumed",
        "outputs/fourth": "resumed",
        "hf:gpt2": "resumed",
    }
    assert {typed: find_run("auto", None, print, typed).name for typed in wanted} == wanted
    assert find_run("auto", None) == Path("outputs/base")
    del begun["unresumed"]
    assert find_run("auto", None, print, "outputs/resumed/checkpoints/last") is None  # its own weights


# What is damaged, forged or somebody else's


@pytest.mark.slow
@pytest.mark.parametrize("member", ["model.safetensors", "optimizer.safetensors", "tokenizer.json", "meta.json"])
def test_a_damaged_checkpoint_is_passed_over_saying_so_and_set_aside(config, tmp_path, caplog, member):
    config = replace(config, max_steps=8, checkpoint_interval=3, eval_interval=100)
    train(config)
    shutil.copytree(config.run_dir, tmp_path / "whole")
    caplog.set_level("INFO", "tinygpt")
    last = (Path(config.run_dir) / "checkpoints" / "last").resolve()
    content = bytearray((last / member).read_bytes())
    content[len(content) // 2] ^= 4
    (last / member).write_bytes(content)
    (last.parent / ".step_4.1234.unfinished").mkdir()  # of a killed save
    with training.start.open_run(replace(config, resume=config.run_dir)):
        assert (last.parent / "last").readlink() == Path("step_6"), "killed now it would go on from there"
    train(replace(config, resume=config.run_dir))
    assert "; trying step_6." in caplog.text and "resuming at step 6" in caplog.text
    assert_same_run(tmp_path / "whole", config.run_dir)
    assert len([*last.parent.glob("damaged_step_8_*")]) == 1 and not [*last.parent.glob(".*")]


@pytest.mark.long
def test_a_copy_of_a_run_whose_links_have_become_folders_goes_on(config, tmp_path):
    train(replace(config, max_steps=8))
    shutil.copytree(config.run_dir, copy := tmp_path / "copy")  # follows the links
    assert not (copy / "checkpoints" / "last").is_symlink()
    for run in (config.run_dir, str(copy)):
        train(replace(config, max_steps=12, resume=run))
        assert (Path(run) / "checkpoints" / "last").readlink() == Path("step_12")
    assert_same_run(config.run_dir, copy)


@pytest.mark.slow
def test_a_run_without_its_optimizers_states_is_refused_with_the_way_to_use_its_weights(config, tmp_path):
    train(replace(config, max_steps=4, checkpoint_interval=2))
    for state in Path(config.run_dir).glob("checkpoints/step_*/optimizer.safetensors"):
        state.unlink()
    with pytest.raises(SettingsError, match=r"optimizer\.safetensors is missing.*: init_from=") as caught:
        train(replace(config, max_steps=6, resume=config.run_dir))
    setting, path = re.match(r"(init_from)=(\S+) begins a new run with its weights", caught.value.remedy).groups()
    begun = replace(config, max_steps=1, run_dir=str(tmp_path / "begun"))
    with training.start.open_run(replace(begun, **{setting: path})) as run:
        weights = safetensors.torch.load_file(Path(path) / "model.safetensors")
        assert all(torch.equal(weight, weights[name]) for name, weight in run.model.state_dict().items())


FORGED = {
    "data": {"config": {"data": []}, "home": "elsewhere"},
    "unknown": {"config": {"data": {"nothing": 3}}},
    "n_layer": {"config": {"model": {"n_layer": 3}}},
    "n_layer x": {"config": {"model": {"n_layer": [2]}}},
    "newer": {"format_version": 99},
}


@pytest.mark.long
def test_a_run_whose_only_checkpoint_is_unusable_is_refused_in_a_sentence_and_stays_as_it_is(train_config, tmp_path):
    train(replace(train_config, max_steps=1, sample_tokens=0))
    states = {"another state": safetensors.torch.save({"x": torch.zeros(2)}), "pickle": pickle.dumps(Path("x"))}
    for forgery in [*FORGED, *states, "emptied"]:
        shutil.copytree(train_config.run_dir, run := tmp_path / forgery)
        last, state = run / "checkpoints/step_1", run / "checkpoints/step_1/optimizer.safetensors"
        if changes := FORGED.get(forgery):
            now = read_meta(last).config
            parts = {name: now[name] | v if v else v for name, v in changes.get("config", {}).items()}
            forge(last, **changes | {"config": parts, "home": changes.get("home", str(run))})
        else:
            state.write_bytes(states.get(forgery, b""))
            forge_file(last, state.name) if forgery in states else None
        before = {path: path.stat().st_size for path in run.rglob("*")}
        typed = [f"resume={run}", "max_steps=2", f"data.path={train_config.data.path}"]
        refused = run_here("train.py", *typed, cwd=tmp_path)
        assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1, (forgery, refused.stderr)
        named = f"resume={run}: {run}/checkpoints/step_1 " if forgery in ("newer", "emptied") else ""
        assert refused.stderr.startswith(f"error: {named}"), refused.stderr
        assert {path: path.stat().st_size for path in run.rglob("*")} == before


@pytest.mark.slow
def test_a_strangers_run_with_a_link_or_a_fifo_for_a_log_cuts_and_writes_nothing(train_config, tmp_path):
    train(replace(train_config, max_steps=1, sample_tokens=0))
    outside = tmp_path / "outside.txt"
    outside.write_text("x" * 100_000)
    make = {"link": lambda log: log.symlink_to(outside), "fifo": os.mkfifo, "folder": Path.mkdir}
    kinds = {"metrics.jsonl": "link", "train.log": "fifo", "report.jsonl": "folder", ".lock": "link"}
    for name, kind in kinds.items():
        shutil.copytree(train_config.run_dir, run := tmp_path / name)
        (run / name).unlink()
        make[kind](run / name)
        with pytest.raises(SettingsError, match=f"{name} is no plain file: remove it"):
            train(replace(train_config, max_steps=2, resume=str(run)))
    assert outside.stat().st_size == 100_000


# Two at once


def test_the_page_of_a_finished_run_without_its_checkpoints_is_not_overwritten(tmp_path):
    """One that was killed before its first checkpoint is begun anew."""
    (tmp_path / "checkpoints").mkdir()
    for status in ("running", "stopped", "failed"):
        write_summary(tmp_path, Summary(status=status))
        refuse_used(tmp_path)
    write_summary(tmp_path, Summary(status="finished"))
    with pytest.raises(SettingsError, match="whose checkpoints were removed: choose another, or remove it first"):
        refuse_used(tmp_path)
    with pytest.raises(SettingsError, match="holds no run .*: give a run's directory, or auto"):
        find_run(str(tmp_path / "checkpoints/last"), None)


def test_a_folder_with_files_of_no_run_is_refused_for_it_would_replace_them(tmp_path):
    """A config.yaml and a report.html of one's own were lost by run_dir=. in their folder."""
    for name in ("train.py", "notes.yaml", "checkpoints"):
        (tmp_path / name).mkdir()
    refuse_used(tmp_path)
    for name in ("config.yaml", "report.html"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(SettingsError, match="has a config.yaml and a report.html of no run, .*: choose another folder"):
        refuse_used(tmp_path)
    (tmp_path / ".lock").touch()
    refuse_used(tmp_path)


@pytest.mark.slow
def test_a_run_directory_that_was_used_while_this_process_prepared_is_refused(config, monkeypatch):
    open_data = training.start.open_data

    def open_late(*arguments, **settings):
        monkeypatch.undo()
        with mock.patch.dict("training.guest.OPEN", clear=True):  # as a run of another process
            train(replace(config, max_steps=2))  # begins and ends meanwhile
        return open_data(*arguments, **settings)

    monkeypatch.setattr("training.start.open_data", open_late)
    with pytest.raises(SettingsError, match="already holds a run"):
        train(config)
    assert steps_of(config.run_dir) == [1, 2] and not is_locked(Path(config.run_dir) / ".lock")


# Signals


def test_a_signal_is_remembered_and_a_second_ctrl_c_ends_at_once(monkeypatch, capsys):
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    with pytest.raises(SystemExit) as left, Signals() as signals:
        assert not signals.received
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT and "Ctrl-C again leaves at once" in capsys.readouterr().err
        assert not ended
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [128 + signal.SIGINT]
    assert left.value.code == 128 + signal.SIGINT  # too late for the run, but a sweep ends here
    assert {number: signal.getsignal(number) for number in numbers} == before
    with pytest.raises(SystemExit), Signals() as signals:  # a closed terminal: from the system, the shell, and a TERM
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
    assert len(ended) == 1 and signals.received == signal.SIGTERM
    with pytest.raises(SystemExit), Signals(passed_on=True):  # by torchrun
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
    assert len(ended) == 1
    with pytest.raises(RuntimeError), Signals():  # its own error is what ends it
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError
    try:
        with pytest.raises(RuntimeError), Signals(passed_on=True) as signals:
            raise RuntimeError
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun's, while the error is being told
        assert signals.received == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])


def test_a_second_stop_in_a_notebook_interrupts_the_cell_and_keeps_the_kernel(monkeypatch):
    monkeypatch.setattr("os._exit", lambda status: pytest.fail("the kernel is gone"))
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with pytest.raises(KeyboardInterrupt), Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


def test_only_signals_that_the_system_has_ask_for_an_end(monkeypatch):
    for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
        number = getattr(signal, name)
        monkeypatch.delattr(signal, name)
    assert ending_signals() == [signal.SIGINT, signal.SIGTERM]
    monkeypatch.setattr(signal, "SIGBREAK", number, raising=False)  # of a window that is closed on Windows
    assert ending_signals() == [signal.SIGINT, signal.SIGTERM, number]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_the_warning_of_a_scheduler_asks_for_an_end_unless_somebody_else_handles_it(number):
    with pytest.raises(SystemExit) as left, Signals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received == number
    assert left.value.code == 128 + number and signal.getsignal(number) == signal.SIG_DFL
    heard: list[int] = []
    before = signal.signal(number, lambda number, frame: heard.append(number))  # as a program around it may
    try:
        with Signals() as signals:
            os.kill(os.getpid(), number)
            assert heard == [number] and not signals.received
        signal.signal(number, exit_on_signal)  # of a sweep, whose jobs save first
        with pytest.raises(SystemExit), Signals() as signals:
            os.kill(os.getpid(), number)
            assert signals.received == number
        assert signal.getsignal(number) == exit_on_signal
    finally:
        signal.signal(number, before)


def test_submitit_queues_its_job_again_once_the_run_is_saved():
    """Its handler ended the run within a step: all steps after the last checkpoint were lost at each preemption."""
    events: list[str] = []

    def requeue(number: int, frame: object) -> None:
        events.append("queued")
        raise SystemExit(-1)

    requeue.__module__ = "submitit.core.job_environment"
    before = signal.signal(signal.SIGUSR2, requeue)
    try:
        with pytest.raises(SystemExit) as left, Signals() as signals:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.received == signal.SIGUSR2
            events.append("saved")
            raise SystemExit(128 + signal.SIGUSR2)
        assert events == ["saved", "queued"] and left.value.code == -1
        with pytest.raises(SystemExit), Signals():  # a run that ends is one that submitit finds finished
            os.kill(os.getpid(), signal.SIGUSR2)
        with pytest.raises(SettingsError), Signals():  # a run that fails would fail again
            os.kill(os.getpid(), signal.SIGUSR2)
            raise SettingsError("a", "b")
        assert events == ["saved", "queued", "queued"] and signal.getsignal(signal.SIGUSR2) == requeue
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_nohup_is_kept_and_other_threads_set_no_handlers(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.received and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    entered: list[Signals] = []
    thread = threading.Thread(target=lambda: entered.append(Signals().__enter__()))
    thread.start()
    thread.join()
    assert entered[0].earlier == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    first_of((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)),
)
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(text_file, tmp_path, number, status):
    endless = ["max_steps=1000000", "compile=off", "eval_interval=100000", "run_dir=the_run"]
    command = [sys.executable, ROOT / "train.py", *tiny(text_file), *endless]
    with started(command, cwd=tmp_path) as process:
        wait_for(tmp_path / "the_run/metrics.jsonl")
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == status
    line = output.decode().strip().splitlines()[-1]
    steps = int(line.split("stopped after step ")[1].split(";")[0])
    assert re.search(r"python \S*train\.py resume=the_run$", line)  # with the path from here
    resumed = run_here("train.py", "resume=auto", f"max_steps={steps + 2}", "run_dir=the_run", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert steps_of(tmp_path / "the_run") == list(range(1, steps + 3))


def test_auto_tells_what_the_run_that_it_finds_has_unlike_the_command(caplog):
    """Two scripts without run_dir that were killed find the newest run of both."""
    typed = {"tokenizer": "byte", "optimizer": "adamw", "resume": "null"}
    mine = compose_settings(register_inherited(typed))
    model = replace(mine.model, attention="linear", vocab_size=257)
    new = settings_of_new(typed, [])
    tell_found(replace(mine, resume="outputs/a", sample_tokens=7, max_steps=9, model=model), new)
    has = "resume=auto goes on with outputs/a, which has model.attention=linear max_steps=9, unlike a new run"
    assert [message.partition(" of this")[0] for message in caplog.messages] == [has]


@pytest.mark.slow
def test_auto_takes_the_newest_run_that_has_what_the_command_asks_for(tmp_path, monkeypatch):
    """Of scripts that were killed and start again in another order each finds its own run."""
    monkeypatch.chdir(tmp_path)
    runs = {"plain": {}, "frozen": {"freeze": "[lm_head,blocks.0]"}, "linear": {"model.attention": "linear"}}
    runs |= {"long": {"max_steps": "900"}, "newest": {"seed": "7"}}
    metas = {}
    for age, (name, typed) in enumerate(reversed(runs.items())):
        folder = tmp_path / "outputs" / name / "checkpoints"
        folder.mkdir(parents=True)
        os.utime(folder, (10**9 - age, 10**9 - age))
        config = asdict(compose_settings(register_inherited({"tokenizer": "byte", **typed})))
        metas[name] = Mock(config=config, **{"progress.finished": False})
    monkeypatch.setattr("runs.resume.newest", lambda run, read: metas[run.name])

    def found(**typed: str) -> str:
        new = settings_of_new(typed, [])
        monkeypatch.setattr("cli.with_torch.settings_to_go_on", lambda run, *others: {"run": run.name})
        inherited, _ = inherited_settings({"resume": "auto", **typed}, new)
        return inherited["run"]

    assert found() == "newest"  # as ever: what is not typed asks for nothing
    assert found(seed="1") == "long"  # a typed default does
    assert found(attention="linear") == found(**{"model.attention": "linear", "eval_interval": "3"}) == "linear"
    assert found(max_steps="900", tokenizer="byte") == "long"
    assert found(freeze="[blocks.0,lm_head]") == "frozen"  # in any order
    assert found(seed="8") == "newest"  # which is refused then by that name


def test_auto_begins_a_new_run_if_none_has_a_checkpoint(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "tinygpt")
    assert inherited_settings({"resume": "auto"}) == ({}, {"resume": "null"})
    Path("outputs/day/hour/checkpoints").mkdir(parents=True)
    assert find_run("auto", None) is None
    places = "outputs/ and multirun/"
    said = f"resume=auto finds no unfinished run with a checkpoint in {places}: the settings are for a new run."
    assert caplog.messages == [said, said]


def test_a_run_whose_checkpoints_a_power_cut_has_emptied_is_named_and_not_recommended(tmp_path, monkeypatch, caplog):
    """resume=auto found no run with a checkpoint, and the refusal of its folder advised resume=, which was refused."""
    caplog.set_level(logging.INFO, "tinygpt")
    monkeypatch.chdir(tmp_path)
    run = Path("outputs/day/hour")
    step = run / "checkpoints/step_3"
    step.mkdir(parents=True)
    (step / "meta.json").touch()
    assert find_run("auto", None) is find_run("auto", str(run)) is None
    (said,) = caplog.messages
    assert f"outputs/ and multirun/ but {run}, whose checkpoints cannot be read: the settings are for" in said
    with pytest.raises(SettingsError, match="a run, whose checkpoints cannot be read: choose another, or remove it"):
        refuse_used(run)
    with pytest.raises(CheckpointError, match=rf"^resume={run}: .*: no checkpoint of its run is whole, so remove"):
        newest(run, read_meta)
    older = Path("outputs/day/earlier")
    (older / "checkpoints/step_1").mkdir(parents=True)
    (older / "checkpoints/step_1/meta.json").write_text(as_json(Meta({}, Progress(step=1))))
    os.utime(older / "checkpoints", (1, 1))
    assert find_run("auto", None) == older
    assert caplog.messages[1:] == [f"resume=auto passes over {run}, whose checkpoints cannot be read."]


def test_a_run_that_is_in_use_perhaps_halted_by_ctrl_z_is_named(tmp_path, monkeypatch, caplog):
    """resume=auto began a new run as if there were none, and run_dir= said to remove the run that goes on."""
    caplog.set_level(logging.INFO, "tinygpt")
    monkeypatch.chdir(tmp_path)
    run = Path("outputs/day/hour")
    (run / "checkpoints/step_3").mkdir(parents=True)
    monkeypatch.setattr(
        "runs.resume.newest", Mock(**{"return_value.progress.finished": False, "return_value.config": {}})
    )
    assert find_run("auto", None) == run
    with ExitStack() as stack:
        lock_run(run, stack)
        assert find_run("auto", None) is find_run("auto", str(run)) is None
        (said,) = caplog.messages
        assert f"in outputs/ and multirun/ but {run}, which is in use (if Ctrl-Z halted it, fg lets it go on): " in said
        holder = f"process {os.getpid()} on .*"
        used = f"run_dir={run} is in use by a run that is still going on, or that Ctrl-Z halted .{holder}: stop that"
        for resume in (None, "auto"):
            with pytest.raises(SettingsError, match=f"^{used} one first, a halted one by fg and Ctrl-C"):
                checkpoint_to_resume(TrainConfig(run_dir=str(run), resume=resume), stack)
    with pytest.raises(SettingsError, match="already holds a run: choose another, remove it first, or continue"):
        checkpoint_to_resume(TrainConfig(run_dir=str(run)), stack)

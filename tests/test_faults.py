"""What survives when a run is killed, the disk fails, or the numbers are no longer numbers."""

import errno
import json
import logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from conftest import first_of, run_here, some
from safetensors.torch import load_file
from test_resume import ROOT, assert_same_run, before_step, rows, steps_of, stop_at

import common.files
import train as train_module
from common.errors import CheckpointError, SettingsError
from runs import checkpoint as checkpoints
from runs.checkpoint import Progress, load_checkpoint, open_checkpoint, verify_checkpoint
from runs.directory import make_run_directory
from runs.summary import read_summary
from train import train
from training.config import OptimizerConfig, TrainConfig
from training.log import Loggers
from training.run import Run

pytestmark = pytest.mark.usefixtures("no_pictures")

# Starts a child by fork, which needs no second import of torch, kills it while it starts, after a step that it has
# saved, or inside a save, and starts the next, until one gets to the end.
KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
from dataclasses import replace
import sympy, torch, training.log, pages.report, training.terminal, training.start  # what a child would import
from data.config import DataConfig, TokenizerConfig
from model.config import GPTConfig
from train import train
from training.config import OptimizerConfig, TrainConfig

folder, kills, settings = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
config = TrainConfig(
    model=GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, dropout=0.1, attention_dropout=0.1),
    data=DataConfig(path=str(folder / "text.txt"), cache_dir=str(folder / "cache")),
    tokenizer=TokenizerConfig(name="byte"), optimizer=OptimizerConfig(lr=0.01), device="cpu", precision="fp32",
    batch_size=6, micro_batch_size=2, max_steps=60, eval_interval=25, checkpoint_interval=3, log_interval=1,
    sample_tokens=0,
)
parts = {name: replace(getattr(config, name), **v) if isinstance(v, dict) else v for name, v in settings.items()}
config = replace(config, **parts)

def start(run_dir, resume=None):
    pid = os.fork()
    if pid == 0:
        train(replace(config, run_dir=str(run_dir), resume=resume))
        os._exit(0)
    return pid

assert os.waitpid(start(folder / "whole"), 0)[1] == 0
rng, killed, inside = random.Random(0), 0, 0
checkpoints = folder / "killed" / "checkpoints"

def wait_for(pattern, other_than=()):
    until = time.monotonic() + 20
    while not set(checkpoints.glob(pattern)) - set(other_than) and time.monotonic() < until:
        time.sleep(0.0005)

while True:
    begun = list(checkpoints.glob("*step_*"))
    pid = start(folder / "killed", str(folder / "killed") if list(checkpoints.glob("step_*")) else None)
    if killed == kills:
        assert os.waitpid(pid, 0)[1] == 0
        break
    if killed % 5:
        wait_for("step_*", begun)
        if killed % 2:
            wait_for(".step_*", begun)
    time.sleep(rng.uniform(0, 0.004 if killed % 2 else 0.1))
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "it ended before"
    killed += 1
    inside += bool(list(checkpoints.glob(".step_*")))
print(killed, inside)
"""


CONFIGURATIONS = {
    "documents": {
        "data": dict(document_mask=True, source="jsonl", val_fraction=0.2),
        "model": dict(position="learned", tie_embeddings=True, norm="layernorm", bias=True),
    },
    "fp16": {"precision": "fp16", "schedule": dict(name="cosine"), "optimizer": dict(lr=0.01, weight_decay=0.1)},
    "recomputed": {
        "recompute": "block",
        "micro_batch_size": 3,
        "model": dict(n_layer=2, attention="delta/sdpa+gate+forget"),
        "optimizer": dict(name="adamw", weight_decay=0.1),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(*CONFIGURATIONS))
def test_a_run_killed_at_random_moments_ends_in_the_same_bits(text_file, tmp_path, name):
    settings = dict(CONFIGURATIONS[name])
    if name == "documents":
        (tmp_path / "t.jsonl").write_text("".join(f'{{"text": "the {"cat sat. " * (n % 7)}"}}\n' for n in range(300)))
        settings["data"] = settings["data"] | {"path": str(tmp_path / "t.jsonl")}
    command = [sys.executable, "-c", KILLER, str(tmp_path), "4", json.dumps(settings)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment)
    assert killer.returncode == 0, killer.stderr[-2000:]
    killed, inside_a_save = map(int, killer.stdout.splitlines()[-1].split())
    assert killed == 4 and inside_a_save
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed/checkpoints").glob(".*"))  # no leftovers


# The disk

OPERATIONS = {"save_file": checkpoints, "save_tokenizer": checkpoints, "flush_to_disk": common.files}
OPERATIONS |= dict.fromkeys(("mkdir", "write_text", "replace", "symlink_to", "unlink"), Path)


@contextmanager
def failing(number: int, last: int, code: int = errno.ENOSPC):
    """Let the saver's file operations from `number` to `last` fail; yields their names."""
    done: list[str] = []

    def watched(name: str, original: Callable) -> Callable:
        def operate(*arguments, **options):
            if threading.current_thread().name == "saver":
                done.append(name)
                if number < len(done) <= last + 1:
                    raise OSError(code, os.strerror(code))
            return original(*arguments, **options)

        return operate

    with pytest.MonkeyPatch.context() as patch:
        for name, owner in OPERATIONS.items():
            patch.setattr(owner, name, watched(name, getattr(owner, name)))
        yield done


@pytest.fixture
def short(train_config: TrainConfig) -> TrainConfig:
    """Three saves, in steps 2, 4 and 6."""
    return replace(train_config, max_steps=6, checkpoint_interval=2, eval_interval=100, sample_tokens=0)


MOMENTS = [3, 22, 45, 70]  # of three saves' 96 operations: in the first, at its link, in the second, in the last
SLOW = [
    pytest.param(n, marks=pytest.mark.long if n % 10 else pytest.mark.slow) for n in range(0, 95, 5) if n not in MOMENTS
]  # the 96th flushes a folder whose link is in place, which may fail


@pytest.mark.slow
@pytest.mark.parametrize("code", first_of(errno.ENOSPC, errno.EROFS), ids=errno.errorcode.get)
@pytest.mark.parametrize("moment", [*some(MOMENTS, 2), *SLOW])
def test_a_disk_that_fails_for_good_is_told_and_leaves_whole_checkpoints(short, caplog, moment, code):
    with failing(moment, 10**6, code) as done, pytest.raises(CheckpointError, match=os.strerror(code)) as ended:
        train(short)
    if moment >= len(done):
        pytest.skip("a save has fewer operations")
    run, summary = Path(short.run_dir), read_summary(Path(short.run_dir))
    assert summary.status == "failed" and os.strerror(code) in summary.reason
    assert "step 6" in str(ended.value)
    told = [one for one in caplog.messages if "could not be saved in" in one]
    assert "step 6" in told[-1] and "training goes on" not in told[-1]
    room = "make room" if code == errno.ENOSPC else "mend that"
    assert f": {room}, then " in str(ended.value)
    for saved in run.glob("checkpoints/step_*"):
        verify_checkpoint(saved)
    if (last := run / "checkpoints/last").is_symlink():
        assert f"continue from {run / 'checkpoints' / last.readlink()} with resume={run}" in str(ended.value)
        train(replace(short, resume=short.run_dir))
        assert steps_of(run) == [1, 2, 3, 4, 5, 6] and not list(run.glob("checkpoints/.*"))
    else:
        assert "there is no checkpoint yet." in told[-1] and "start a new run" in str(ended.value)


@pytest.mark.slow
def test_a_log_that_cannot_be_written_hides_neither_the_result_nor_the_reason(short, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
    monkeypatch.setattr(logging.FileHandler, "flush", full)  # of train.log, also when it is closed
    with pytest.raises(CheckpointError, match="step 6 could not be saved"), failing(45, 10**6, errno.EDQUOT):
        train(short)
    assert math.isfinite(train(replace(short, resume=short.run_dir))) and full.called


@pytest.mark.slow
def test_a_disk_without_room_for_a_checkpoint_is_known_before_the_first_step(short, monkeypatch, caplog):
    train(replace(short, run_dir=f"{short.run_dir}-before", keep_checkpoints=1))
    files = Path(f"{short.run_dir}-before").glob("checkpoints/step_6/*.safetensors")
    size = sum(tensor.nbytes for file in files for tensor in load_file(file).values())  # as written
    asked = []

    def usage(free: int, total: int = 10**12) -> None:
        used = SimpleNamespace(total=total, used=total - free, free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: asked.append(place) or used)

    usage(size - 1)
    with pytest.raises(
        SettingsError, match=r"^run_dir=.* free, and a checkpoint takes .*: make room, or name a folder"
    ):
        train(short)
    assert not Path(short.run_dir).exists() and asked == [Path(short.run_dir).parent]

    # Three saves: two latest, which are kept, and one that is written before the oldest goes.
    usage(3 * size)
    train(short)
    assert not [said for said in caplog.messages if "make room" in said]
    usage(3 * size - 1)
    train(replace(short, run_dir=f"{short.run_dir}-narrow"))
    assert [said for said in caplog.messages if "of which up to 3 are there at a time: make room." in said]

    # A resumed run needs room too; a disk that does not count its bytes is none that is full.
    usage(size - 1)
    with pytest.raises(SettingsError, match=r"^resume=.* make room"):
        train(replace(short, max_steps=8, resume=short.run_dir))
    usage(0, total=0)
    train(replace(short, run_dir=f"{short.run_dir}-uncounted"))


@pytest.mark.slow
def test_a_limit_of_a_files_size_is_known_before_the_first_step(short, monkeypatch):
    resource = pytest.importorskip("resource")
    train(replace(short, run_dir=f"{short.run_dir}-before"))
    files = Path(f"{short.run_dir}-before").glob("checkpoints/step_6/*.safetensors")
    size = max(sum(tensor.nbytes for tensor in load_file(file).values()) for file in files)
    for limit in (resource.RLIM_INFINITY, size, size - 1):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, resource.RLIM_INFINITY))
        if limit == size - 1:
            with pytest.raises(SettingsError, match=r"^a checkpoint has a file of .*B, and ulimit -f allows .*: raise"):
                train(replace(short, run_dir=f"{short.run_dir}-{limit}"))
        else:
            train(replace(short, run_dir=f"{short.run_dir}-{limit}"))


@pytest.mark.slow
def test_a_runs_log_ends_with_the_reason_of_its_failure(short, monkeypatch):
    for number, (error, shown) in enumerate({ZeroDivisionError("by 0"): True, SettingsError("a", "b"): False}.items()):
        run_dir = Path(f"{short.run_dir}-{number}")
        with monkeypatch.context() as patched, pytest.raises(type(error)):
            patched.setattr(train_module, "train_step", mock.Mock(side_effect=error))
            train(replace(short, run_dir=str(run_dir)))
        last = (run_dir / "train.log").read_text().split("\n[")[-1]
        assert f"] failed: {error}" in last and ("Traceback (most recent call last)" in last) == shown
        assert ("ZeroDivisionError: by 0" in last) == shown
    stop_at(monkeypatch, 3)
    with pytest.raises(SystemExit):
        train(short)
    assert "failed" not in (Path(short.run_dir) / "train.log").read_text()


def test_a_stop_that_cannot_be_saved_is_an_error_and_not_a_stop(short, monkeypatch):
    stop_at(monkeypatch, 3)
    with failing(0, 10**6), pytest.raises(CheckpointError, match=r"step 4 .*start a new run"):
        train(short)
    assert read_summary(Path(short.run_dir)).status == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_operation_that_fails_once_keeps_the_old_checkpoint_and_training_goes_on(short, tmp_path, caplog, moment):
    train(short)
    again = replace(short, run_dir=str(tmp_path / "failing"))
    with failing(moment, moment):
        try:
            train(again)
        except CheckpointError as error:
            assert "step 6" in str(error)
            train(replace(again, resume=again.run_dir))
    told = [one for one in caplog.messages if os.strerror(errno.ENOSPC) in one]
    assert len(told) == 1
    assert_same_run(short.run_dir, again.run_dir)
    assert not list((tmp_path / "failing/checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_copy_that_does_not_fit_the_memory_is_a_save_that_failed(short, monkeypatch, caplog):
    def fail(tensor, *where, copy=False, **how):
        if copy and not failed:
            failed.append(True)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return original(tensor, *where, copy=copy, **how)

    failed, original = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", fail)
    train(short)
    assert "step 2 could not be saved" in caplog.text and "can't allocate memory" in caplog.text
    assert open_checkpoint(short.run_dir).meta.progress.step == 6


@pytest.mark.slow
def test_a_limit_on_file_size_is_a_failed_write_not_the_end(text_file, tmp_path, monkeypatch):
    # The system itself refuses: no file of this process may pass 60,000 bytes, and the weights do. A disk, such as one
    # in FAT, has a limit that no look before the run finds.
    monkeypatch.setattr("training.start.largest_file", lambda: math.inf)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    settings = f"""data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer=byte model.n_layer=1
        model.n_embd=64 model.block_size=16 sample_tokens=0 device=cpu max_steps=4 checkpoint_interval=2"""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        result = run_here("train.py", *settings.split(), cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.returncode == 1 and "step 4 could not be saved" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and "step 2 could not be saved" in result.stdout


@pytest.mark.slow
def test_every_checkpoint_holds_the_state_of_its_step_while_training_goes_on(short, monkeypatch):
    """A save copies before it returns; the next one waits for a slow write."""
    original, taken = checkpoints.save_file, {}

    def take(run: Run) -> None:
        taken[run.progress.step] = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}

    monkeypatch.setattr(checkpoints, "save_file", lambda *arguments: (time.sleep(0.1), original(*arguments)))
    for number in range(1, 4):
        before_step(monkeypatch, number, take)
    train(replace(short, checkpoint_interval=1, max_steps=4, keep_checkpoints=4))
    assert len(taken) == 3
    for step, weights in taken.items():
        saved = load_file(Path(short.run_dir) / f"checkpoints/step_{step}/model.safetensors")
        assert all(torch.equal(saved[name], weights[name]) for name in saved)


def test_two_runs_started_in_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_run_directory(None) != make_run_directory(None)


# Numbers that are no numbers


def plant_nan(monkeypatch, steps: range, where: str) -> None:
    """Make the loss of these steps infinite, or one of their gradients not a number."""
    original = train_module.train_step

    def train_step(run: Run, step: int):
        if step not in steps:
            return original(run, step)
        if where == "loss":
            forward = run.training_loss
            with monkeypatch.context() as patched:
                patched.setattr(run, "training_loss", lambda *batch, **more: forward(*batch, **more) + math.inf)
                return original(run, step)
        handle = run.model.blocks[0].mlp.down_proj.weight.register_hook(lambda g: g * math.nan)
        result = original(run, step)
        handle.remove()
        return result

    monkeypatch.setattr("train.train_step", train_step)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "optimizer"), [("loss", "muon"), ("gradient", "muon"), ("gradient", "adamw")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(train_config, monkeypatch, where, optimizer, caplog):
    config = replace(train_config, optimizer=OptimizerConfig(name=optimizer, weight_decay=0.1), sample_tokens=0)
    snapshots = {}

    def look(run: Run) -> None:
        state = [value for o in run.optimizers for of_one in o.state.values() for value in of_one.values()]
        snapshots[run.progress.step] = [tensor.detach().clone() for tensor in [*run.model.parameters(), *state]]

    plant_nan(monkeypatch, range(7, 9), where)
    for step in (7, 9, 10):
        before_step(monkeypatch, step, look)
    assert math.isfinite(train(config))
    assert all(torch.equal(a, b) for a, b in zip(snapshots[7], snapshots[9], strict=True))
    assert not torch.equal(snapshots[9][0], snapshots[10][0])
    found = rows(config.run_dir)
    assert found[-1]["skipped"] == 2 and "skipped" not in found[6]
    assert "step 9: 1 step changed nothing, because loss or gradient was not finite" in caplog.messages
    assert (next(row for row in found if row["step"] == 8)["loss"] is None) == (where == "loss")


# With 1000, found where step 8 would be saved, or, where nothing else is due, at a multiple of max_skipped_steps.
@pytest.mark.parametrize(("log_interval", "checkpoint_interval"), [(1, 4), (1000, 4), (1000, 1000)])
def test_too_many_steps_in_a_row_end_the_run_and_nothing_is_saved_meanwhile(
    train_config, monkeypatch, log_interval, checkpoint_interval
):
    config = replace(train_config, max_skipped_steps=3, sample_tokens=0, log_interval=log_interval, eval_interval=1000)
    plant_nan(monkeypatch, range(5, 100), "gradient")
    in_a_row = 3 if checkpoint_interval == 4 else 4
    kept = r"; the latest weights are in .*checkpoints/step_4" if checkpoint_interval == 4 else ""
    remedies = rf"lower optimizer\.lr=0\.02{kept}"  # grad_clip is 1, and precision fp32
    named = rf"in {in_a_row} steps in a row, first in step 6: {remedies}\.$"
    with pytest.raises(SettingsError, match=named):
        train(replace(config, checkpoint_interval=checkpoint_interval))
    saved = [path.name for path in Path(config.run_dir).glob("checkpoints/step_*")]
    assert saved == ["step_4"] * (checkpoint_interval == 4)


@pytest.mark.slow
def test_a_run_that_diverged_names_the_best_weights_beside_the_latest(train_config, monkeypatch):
    """The weights of step 8 are the worse ones: their head was turned round."""
    before_step(monkeypatch, 6, lambda run: run.model.lm_head.weight.data.mul_(-50))
    plant_nan(monkeypatch, range(8, 100), "loss")
    config = replace(train_config, max_skipped_steps=3, sample_tokens=0, eval_interval=4, checkpoint_interval=4)
    with pytest.raises(SettingsError, match=r"; the latest weights are in .*checkpoints/step_8, the best in step_4\.$"):
        train(config)
    best = load_checkpoint(Path(config.run_dir) / "checkpoints/step_4").meta.progress
    later = load_checkpoint(Path(config.run_dir) / "checkpoints/step_8").meta.progress
    assert best.metrics["val_loss"] < later.metrics["val_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "remedies"),
    [
        ({"optimizer": OptimizerConfig(embedding_lr=3.0)}, "lower optimizer.embedding_lr=3"),
        ({"optimizer": OptimizerConfig(lr=1.0, lm_head_lr=9.0)}, "lower optimizer.lr=1 and optimizer.lm_head_lr=9"),
        ({"optimizer": OptimizerConfig(name="adamw", lr=0.001, embedding_lr=None)}, "lower optimizer.lr=0.001"),
        ({"grad_clip": 0.0}, "lower optimizer.lr=0.02, or set grad_clip=1"),
        ({"grad_clip": 5.0, "precision": "bf16"}, "lower optimizer.lr=0.02, or set grad_clip=1 or precision=fp32"),
        ({"grad_clip": 0.5}, "lower optimizer.lr=0.02"),
    ],
)
def test_a_run_that_diverged_names_the_remedies_that_would_change_it(train_config, monkeypatch, changed, remedies):
    plant_nan(monkeypatch, range(1, 100), "loss")
    with pytest.raises(SettingsError) as raised:
        train(replace(train_config, max_skipped_steps=2, sample_tokens=0, **changed))
    assert raised.value.remedy == remedies


@pytest.mark.parametrize(
    ("changed", "steps", "remedies"),
    [
        ({"code": "own.py", "grad_clip": 5.0}, 10, "look at the gradients of code=own.py, or set precision=fp32"),
        ({"init_from": "run"}, 10, "begin with other weights than init_from=run, or set precision=fp32"),
        ({}, 10, "choose another attention than sdpa, or set precision=fp32"),
        ({"code": "own.py", "grad_clip": 5.0}, 11, "lower optimizer.lr=0.02, or set grad_clip=1 or precision=fp32"),
    ],
)
def test_before_the_first_update_no_rate_is_at_fault(changed, steps, remedies):
    """A form of one's own whose gradient was NaN got the remedy of lower rates, under which nothing changed."""
    run = Mock(config=TrainConfig(**changed), progress=Progress(step=steps), dtype=torch.bfloat16, scale_can_fall=False)
    run.skipped = torch.tensor([10, 10])
    run.suspects_at_first = partial(Run.suspects_at_first, run)
    run.checkpointer.last.return_value = None
    with pytest.raises(SettingsError, match=f"first in step {steps - 9}: ") as raised:
        Run.check_skipped_steps(run)
    assert raised.value.remedy == remedies


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "saved"), [(2.0**16, [4, 8, 12]), (2.0**3, [4, 12])])
def test_a_step_that_is_skipped_in_fp16_is_saved_unless_the_scale_cannot_fall_further(
    train_config, monkeypatch, caplog, scale, saved
):
    """Steps 5 to 8 overflow; the weights are those of step 4, and the scale is halved each time."""
    plant_nan(monkeypatch, range(4, 8), "gradient")
    before_step(monkeypatch, 4, lambda run: run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": scale}))
    config = replace(train_config, precision="fp16", max_steps=12, eval_interval=100, sample_tokens=0)
    train(replace(config, checkpoint_interval=4, keep_checkpoints=9))
    assert sorted(int(one.name[5:]) for one in Path(config.run_dir).glob("checkpoints/step_*")) == saved
    assert ("step 8 was skipped, so it is not saved" in caplog.text) == (8 not in saved)


@pytest.mark.slow
def test_a_loss_that_stays_infinite_in_fp16_ends_the_run_though_no_gradient_overflows(train_config, monkeypatch):
    """The scale stays at 65,536: 16 steps more are allowed than in other types."""
    plant_nan(monkeypatch, range(4, 100), "loss")
    config = replace(train_config, precision="fp16", max_steps=40, max_skipped_steps=3, log_interval=1)
    with pytest.raises(SettingsError, match="not finite in 19 steps in a row, first in step 5: lower"):
        train(replace(config, eval_interval=100, checkpoint_interval=100, sample_tokens=0))


@pytest.mark.slow
def test_a_signal_after_a_skipped_step_loses_no_step_before_it(train_config, monkeypatch):
    plant_nan(monkeypatch, range(6, 8), "gradient")
    before_step(monkeypatch, 7, lambda run: os.kill(os.getpid(), signal.SIGTERM))
    config = replace(train_config, eval_interval=100, checkpoint_interval=6, sample_tokens=0)
    with pytest.raises(SystemExit):
        train(config)
    before, after = (load_file(Path(config.run_dir) / f"checkpoints/step_{n}/model.safetensors") for n in (6, 8))
    assert all(weight.equal(after[name]) for name, weight in before.items())
    train(replace(config, resume=config.run_dir, run_dir=None))
    assert load_checkpoint(Path(config.run_dir) / "checkpoints/last").meta.progress.step == 20


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0**16, 2.0**4])
def test_a_run_in_fp16_goes_on_while_its_scale_can_fall(train_config, monkeypatch, scale):
    """Steps 5 to 10 overflow, more in a row than max_skipped_steps."""
    plant_nan(monkeypatch, range(4, 10), "gradient")
    config = replace(train_config, precision="fp16", max_steps=12, max_skipped_steps=3, log_interval=1)
    config = replace(config, eval_interval=100, checkpoint_interval=100, sample_tokens=0)
    before_step(monkeypatch, 4, lambda run: run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": scale}))
    if scale > 2**6:
        train(config)
        assert load_checkpoint(Path(config.run_dir) / "checkpoints/last").meta.progress.skipped == 6
        return
    with pytest.raises(SettingsError, match="not finite in 4 steps in a row, first in step 5: lower"):
        train(config)


@pytest.mark.slow
def test_weights_that_are_not_finite_replace_no_checkpoint(train_config, monkeypatch, caplog):
    """The loss is finite all the same."""

    def spoil(run: Run) -> None:
        run.model.token_embedding.weight.data[200, 0] = math.inf  # of a byte that the text does not have

    before_step(monkeypatch, 13, spoil)
    config = replace(train_config, eval_interval=100, checkpoint_interval=1, keep_checkpoints=1, sample_tokens=0)
    with pytest.raises(SettingsError, match="a weight is not finite at the end: lower optimizer"):
        train(config)
    assert "step 14 is not finite, so it is not saved: the checkpoints stay" in caplog.text
    assert load_checkpoint(Path(config.run_dir) / "checkpoints/last").meta.progress.step == 13


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", [1, 2, 4])
def test_an_evaluation_that_is_not_finite_is_no_best_one_and_fails_a_run_only_at_its_end(
    train_config, monkeypatch, caplog, evaluation
):
    evaluate_run, weights = train_module.evaluate_run, []

    def broken(run: Run, targets: int):
        weight = run.model.blocks[0].mlp.down_proj.weight
        weights.append((weight, weight.detach().clone()))
        if run.progress.step == 5 * evaluation:
            weight.data[0, 0] = math.nan
        return evaluate_run(run, targets)

    def mended(loggers: Loggers, *measured: object, original=Loggers.on_evaluation):
        for weight, kept in weights:
            weight.data.copy_(kept)
        weights.clear()
        original(loggers, *measured)

    monkeypatch.setattr(train_module, "evaluate_run", broken)
    monkeypatch.setattr(Loggers, "on_evaluation", mended)
    config = replace(train_config, eval_interval=5, checkpoint_interval=100)
    if evaluation == 4:
        with pytest.raises(SettingsError, match=r"the validation loss is nan at the end: lower optimizer\.lr=0\.02"):
            train(config)
        assert "validation loss is nan" in read_summary(Path(config.run_dir)).reason
        assert open_checkpoint(config.run_dir).meta.progress.step == 15
        return
    best = train(config)
    found = [row["val_loss"] for row in rows(config.run_dir) if "val_loss" in row]
    assert found[evaluation - 1] is None and best == min(loss for loss in found if loss is not None)
    assert "there is no sample" in caplog.text
    progress = open_checkpoint(config.run_dir).meta.progress
    assert progress.best_loss == best and progress.best_step == 20

"""What survives when a run is killed, the disk is full, or the numbers are no longer numbers."""

import errno
import math
import os
import re
import resource
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import run_here
from safetensors.torch import load_file
from test_resume import ROOT, assert_same_run, before_step, rows, stop_at

import data.files
import runs.saver
import train as train_module
import training.step
from errors import CheckpointError, SettingsError
from runs import checkpoint as checkpoints
from runs.checkpoint import open_checkpoint, read_meta
from runs.directory import make_run_directory
from runs.summary import read_summary
from train import train
from training.config import OptimizerConfig
from training.run import Run
from training.start import start_run

pytestmark = pytest.mark.usefixtures("no_pictures")

# Starts a child by fork, which needs no second import of torch, kills it after a random time or as soon as it is
# inside a save, and starts the next, until one gets to the end.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from dataclasses import replace
import torch, training.watch.watchers, training.run
from data.config import DataConfig, TokenizerConfig
from model.config import GPTConfig
from train import train
from training.config import OptimizerConfig, TrainConfig

folder, kills, optimizer = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
config = TrainConfig(
    model=GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, dropout=0.1, attention_dropout=0.1),
    data=DataConfig(path=str(folder / "text.txt"), cache_dir=str(folder / "cache")),
    tokenizer=TokenizerConfig(name="byte"), optimizer=OptimizerConfig(name=optimizer, lr=0.01),
    device="cpu", batch_size=6, micro_batch_size=2, max_steps=150, eval_interval=25,
    checkpoint_interval=3, log_interval=1, sample_tokens=0,
)

def start(run_dir, resume=None):
    pid = os.fork()
    if pid == 0:
        train(replace(config, run_dir=str(run_dir), resume=resume))
        os._exit(0)
    return pid

assert os.waitpid(start(folder / "whole"), 0)[1] == 0
rng, killed, inside = random.Random(0), 0, 0
checkpoints = folder / "killed" / "checkpoints"
while True:
    pid = start(folder / "killed", str(folder / "killed") if list(checkpoints.glob("step_*")) else None)
    if killed < kills:
        if killed % 2:
            time.sleep(rng.uniform(0, 0.25))
        else:  # wait for a save, and kill somewhere inside it
            until = time.monotonic() + 5
            while not list(checkpoints.glob(".step_*")) and time.monotonic() < until:
                pass
            time.sleep(rng.uniform(0, 0.004))
        os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        inside += bool(list(checkpoints.glob(".step_*")))
    else:
        assert os.waitpid(pid, 0)[1] == 0
        break
print(killed, inside)
"""


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_run_killed_at_30_random_moments_ends_in_the_same_bits(text_file, tmp_path, optimizer):
    command = [sys.executable, "-c", KILLER, str(tmp_path), "30", optimizer]
    killer = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert killer.returncode == 0, killer.stderr[-2000:]
    killed, inside_a_save = map(int, killer.stdout.splitlines()[-1].split())
    assert killed == 30 and inside_a_save >= 5
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed/checkpoints").glob(".*"))  # no leftovers


WRITES = {
    "save_file": checkpoints,
    "save_tokenizer": checkpoints,
    "flush_to_disk": data.files,
    "link_checkpoint": runs.saver,
    "save": torch,
    "replace": Path,
    "mkdir": Path,
}


@pytest.mark.parametrize(
    ("write", "number"),
    [*((write, errno.ENOSPC) for write in WRITES), *(("save_file", n) for n in (errno.EIO, errno.EACCES, errno.EROFS))],
)
def test_a_failing_write_keeps_the_old_checkpoint_and_training_goes_on(
    train_config, tmp_path, monkeypatch, caplog, write, number
):
    config = replace(train_config, max_steps=6, checkpoint_interval=2, eval_interval=100, sample_tokens=0)
    train(config)
    failing = replace(config, run_dir=str(tmp_path / "failing"))
    original = getattr(WRITES[write], write)

    def fail(*arguments, **options):
        # Fails for step 4, of steps 2, 4 and 6.
        if any("step_4" in str(argument) for argument in arguments):
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    monkeypatch.setattr(WRITES[write], write, fail)
    train(failing)
    assert_same_run(config.run_dir, failing.run_dir)
    (message,) = {record.message for record in caplog.records if "could not be written" in record.message}
    assert os.strerror(number) in message and "step_4" in message and "bytes" in message
    assert "the last good checkpoint is" in message and "training goes on" in message
    assert not list((tmp_path / "failing/checkpoints").glob(".*"))


def test_a_copy_that_does_not_fit_the_memory_is_a_failed_write_and_holds_nothing_up(train_config, monkeypatch, caplog):
    def fail(*arguments, **options):
        if threading.current_thread().name == "saver" and not failed:
            failed.append(True)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return original(*arguments, **options)

    failed, original = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", fail)
    train(replace(train_config, max_steps=6, checkpoint_interval=2, eval_interval=100, sample_tokens=0))
    assert "step 2 could not be written" in caplog.text and "can't allocate memory" in caplog.text
    assert open_checkpoint(train_config.run_dir).meta["step"] == 6


def test_a_final_checkpoint_that_cannot_be_written_ends_in_one_sentence(train_config, monkeypatch):
    config = replace(train_config, max_steps=6, checkpoint_interval=4, eval_interval=100, sample_tokens=0)

    def fail(weights, path):
        if "step_6" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(weights, path)

    original = checkpoints.save_file
    monkeypatch.setattr(checkpoints, "save_file", fail)
    with pytest.raises(CheckpointError, match=r"step 6 could not be written .*No space left.*go on from .*step_4"):
        train(config)
    assert open_checkpoint(config.run_dir).meta["step"] == 4
    monkeypatch.undo()
    train(replace(config, resume=config.run_dir))
    assert [row["step"] for row in rows(config.run_dir) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_a_limit_on_file_size_is_a_failed_write_not_the_end(text_file, tmp_path):
    # The system itself refuses: no file of this process may pass 60,000 bytes, and the weights do.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    settings = f"""data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer=byte model.n_layer=1
        model.n_embd=64 model.block_size=16 sample_tokens=0 device=cpu max_steps=4 checkpoint_interval=2"""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        result = run_here("train.py", *settings.split(), cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.returncode == 1 and "step 4 could not be written" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and "step 2 could not be written" in result.stdout
    assert len(list(tmp_path.glob("outputs/*/*/metrics.jsonl"))) == 1


def plant_nan(monkeypatch, steps: range, where: str) -> None:
    """Make the loss of these steps infinite, with finite gradients, or one gradient in them not a number."""
    original = training.step.take_step

    def take_step(run: Run, step: int):
        if step not in steps:
            return original(run, step)
        if where == "loss":
            forward = run.forward
            with monkeypatch.context() as patched:
                patched.setattr(run, "forward", lambda *batch: forward(*batch) + math.inf)
                return original(run, step)
        handle = run.model.blocks[0].mlp.down_proj.weight.register_hook(lambda g: g * math.nan)
        result = original(run, step)
        handle.remove()
        return result

    monkeypatch.setattr("training.step.take_step", take_step)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
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
    before, during = snapshots[7], snapshots[9]
    same = [torch.equal(a, b) for a, b in zip(before, during, strict=True)]
    assert all(same) and not torch.equal(during[0], snapshots[10][0])
    found = rows(config.run_dir)
    assert found[-1]["skipped"] == 2 and "skipped" not in found[6]
    assert "1 of the last 1 steps changed nothing" in caplog.text
    if where == "loss":
        assert next(row for row in found if row["step"] == 8)["loss"] is None


# With 1000, found where step 8 would be saved, or, where nothing else is due, at a multiple of max_skipped_steps.
@pytest.mark.parametrize(("log_interval", "checkpoint_interval"), [(1, 4), (1000, 4), (1000, 1000)])
def test_too_many_steps_in_a_row_end_the_run_naming_step_and_settings(
    train_config, monkeypatch, log_interval, checkpoint_interval
):
    config = replace(train_config, max_skipped_steps=3, sample_tokens=0, log_interval=log_interval, eval_interval=1000)
    plant_nan(monkeypatch, range(5, 100), "gradient")
    in_a_row = 3 if checkpoint_interval == 4 else 4
    named = rf"{in_a_row} steps in a row, first in step 6: lower optimizer\.lr=0\.02"
    with pytest.raises(SettingsError, match=named) as ended:
        train(replace(config, checkpoint_interval=checkpoint_interval))
    if checkpoint_interval == 1000:
        return
    assert all(name in str(ended.value) for name in ("grad_clip", "precision", "checkpoints"))
    loaded = open_checkpoint(config.run_dir)
    assert loaded.meta["step"] == 4 and all(p.isfinite().all() for p in loaded.model.parameters())


def plant_nan_in_evaluation(monkeypatch, step: int) -> None:
    """Let the weights be of no use while they are evaluated at `step`."""
    original = train_module.evaluate_run

    def evaluate_run(run: Run):
        weight = run.model.blocks[0].mlp.down_proj.weight
        with torch.no_grad():
            kept = weight.clone()
            if run.progress.step == step:
                weight[0, 0] = math.nan
            result = original(run)
            weight.copy_(kept)
        return result

    monkeypatch.setattr(train_module, "evaluate_run", evaluate_run)


@pytest.mark.parametrize("evaluation", [1, 2])
def test_an_evaluation_that_is_not_finite_is_no_best_one_and_ends_nothing(
    train_config, monkeypatch, caplog, evaluation
):
    config = replace(train_config, eval_interval=5, checkpoint_interval=100)
    plant_nan_in_evaluation(monkeypatch, 5 * evaluation)
    best = train(config)
    found = [row["val_loss"] for row in rows(config.run_dir) if "val_loss" in row]
    assert found[evaluation - 1] is None and best == min(loss for loss in found if loss is not None)
    assert "there is no sample" in caplog.text
    progress = read_meta(Path(config.run_dir) / "checkpoints/best")["progress"]
    assert progress["best_loss"] == best and progress["best_step"] == 20


def test_a_run_that_ends_in_an_evaluation_that_is_not_finite_has_failed(train_config, monkeypatch):
    plant_nan_in_evaluation(monkeypatch, 20)
    with pytest.raises(SettingsError, match=r"the validation loss is nan at the end: lower optimizer\.lr=0\.02"):
        train(train_config)
    summary = read_summary(Path(train_config.run_dir))
    assert summary["status"] == "failed" and "validation loss is nan" in summary["reason"]
    assert open_checkpoint(train_config.run_dir).meta["step"] == 10


def test_an_fp16_run_learns_with_a_scaled_loss_and_scales_it_as_before_when_resumed(
    train_config, tmp_path, monkeypatch
):
    config = replace(train_config, precision="fp16", sample_tokens=0)
    train(config)
    losses = [row["loss"] for row in rows(config.run_dir) if row.get("loss") is not None]
    assert losses[-1] < losses[0] - 1
    stopped = replace(config, run_dir=str(tmp_path / "stopped"))
    stop_at(monkeypatch, 13)
    with pytest.raises(SystemExit):
        train(stopped)
    monkeypatch.undo()
    train(replace(stopped, resume=stopped.run_dir))
    first, second = (read_meta(Path(run.run_dir) / "checkpoints/last")["scaler"] for run in (config, stopped))
    assert first == second and first["scale"] > 1 and first["_growth_tracker"] > 14  # finite steps


def test_counts_and_seconds_go_on_after_a_save_and_where_a_stopped_run_left_them(train_config):
    with start_run(train_config) as run:
        run.progress.step = 5
        run.started -= 100  # as after 100 seconds
        run.skipped += torch.tensor([3, 0])
        run.save()
        assert 100 < run.seconds < 110
    with start_run(replace(train_config, resume=train_config.run_dir)) as run:
        run.check_numbers()
        assert (run.progress.skipped, run.progress.skipped_in_a_row) == (3, 0) and 100 < run.seconds < 110


def test_two_runs_started_in_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len({make_run_directory(None) for _ in range(20)}) == 20


@pytest.mark.parametrize("slow", ["copy_", "save_file"])
def test_every_checkpoint_holds_the_state_of_its_step_while_training_goes_on(train_config, monkeypatch, slow):
    """The next update waits for a slow copy, the next copy for a slow write."""

    def slowly(*arguments, **options):
        if threading.current_thread().name == "saver":
            time.sleep(0.02 if slow == "copy_" else 0.2)
        return original(*arguments, **options)

    owner = torch.Tensor if slow == "copy_" else checkpoints
    original = getattr(owner, slow)
    monkeypatch.setattr(owner, slow, slowly)
    taken = {}
    for number in range(1, 4):
        before_step(monkeypatch, number, lambda run: taken.update({run.progress.step: weights_of(run)}))
    config = replace(train_config, checkpoint_interval=1, max_steps=4, eval_interval=100, sample_tokens=0)
    train(replace(config, keep_checkpoints=4))
    for step, weights in taken.items():
        saved = load_file(Path(config.run_dir) / f"checkpoints/step_{step}/model.safetensors")
        assert all(torch.equal(saved[name], weights[name]) for name in saved)


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def sick_disk(monkeypatch, healthy: int, number: int) -> list[str]:
    """From a saver's operation number `healthy` on every change to the disk fails; return the operations there were."""
    seen: list[str] = []

    def sicken(owner, name):
        original = getattr(owner, name)

        def operation(*arguments, **options):
            if threading.current_thread().name == "saver":
                seen.append(name)
                if len(seen) > healthy:
                    raise OSError(number, os.strerror(number))
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, operation)

    for name in ("mkdir", "write_text", "touch", "rename", "replace", "symlink_to", "unlink"):
        sicken(Path, name)
    sicken(torch, "save"), sicken(safetensors.torch, "save_file"), sicken(os, "fsync"), sicken(os, "rmdir")
    return seen


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_disk_that_fails_for_good_fails_the_run_whenever_it_begins(train_config, tmp_path, monkeypatch, number):
    config = replace(train_config, max_steps=4, checkpoint_interval=2, eval_interval=100, sample_tokens=0)
    with monkeypatch.context() as patched:
        operations = sick_disk(patched, 10**9, number)
        train(config)
    linked = [at for at, name in enumerate(operations) if name == "replace"][-1]  # of the last save, by which it counts
    for healthy in range(0, len(operations), 3):
        failing = replace(config, run_dir=str(tmp_path / f"failing_{healthy}"))
        with monkeypatch.context() as patched:
            sick_disk(patched, healthy, number)
            if healthy > linked:
                train(failing)  # what was left is clearing up
                continue
            with pytest.raises(CheckpointError, match=f"step 4 could not be written.*{os.strerror(number)}"):
                train(failing)
        summary = read_summary(Path(failing.run_dir))
        assert summary["status"] == "failed" and "step 4 could not be written" in summary["reason"]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_nothing_is_saved_while_steps_are_skipped(train_config, monkeypatch, caplog, optimizer):
    config = replace(train_config, optimizer=OptimizerConfig(name=optimizer, lr=0.01), max_steps=4, sample_tokens=0)
    train(replace(config, eval_interval=100))
    wild = replace(config, resume=config.run_dir, max_steps=20, checkpoint_interval=1, allow_changes=True)
    wild.optimizer = OptimizerConfig(name=optimizer, lr=1e38, embedding_lr=1e38, lm_head_lr=1e38)
    with pytest.raises(SettingsError, match="steps in a row, first in step"):
        train(wild)
    assert "is skipped, so it is not saved" in caplog.text
    steps = sorted(int(path.name[5:]) for path in (Path(config.run_dir) / "checkpoints").glob("step_*"))
    first = int(re.search(r"step (\d+) is skipped", caplog.text)[1])
    assert 4 in steps and all(step < first for step in steps)


def test_weights_that_are_not_finite_replace_no_checkpoint_and_end_no_run_well(train_config, monkeypatch, caplog):
    config = replace(train_config, checkpoint_interval=2, keep_checkpoints=1, eval_interval=100, sample_tokens=0)

    def spoil(run: Run) -> None:  # an id that the text does not have: no loss shows it
        with torch.no_grad():
            run.model.token_embedding.weight[1] = math.inf

    before_step(monkeypatch, 5, spoil)
    with pytest.raises(SettingsError, match="a weight is not finite at the end"):
        train(config)
    assert "step 6 has weights that are not finite, so it is not saved" in caplog.text
    assert open_checkpoint(config.run_dir).meta["step"] == 4

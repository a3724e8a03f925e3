"""A run that was stopped goes on to the same bits: weights, losses, metrics; and only as the same run."""

import fcntl
import json
import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from conftest import run_here
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors.torch import load_file
from test_checkpoint import rewrite_meta, write_meta

import train as train_module
import training
import training.start
import training.step
from errors import CheckpointError, SettingsError
from model.size import flops_per_token, without_weights
from runs.checkpoint import describe_file, load_checkpoint, open_checkpoint, read_meta, verify_checkpoint
from runs.directory import check_settings, find_run, is_locked, lock_run, saved_settings
from runs.formatting import hydra_quoted
from train import train
from training.config import OptimizerConfig, TrainConfig
from training.run import Run

pytestmark = pytest.mark.usefixtures("no_pictures")
ROOT = Path(train_module.__file__).parent
WALL_CLOCK = ("seconds", "tokens_per_s")


def rows(run_dir: str | Path) -> list[dict]:
    """metrics.jsonl without what the clock says."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in WALL_CLOCK} for line in lines]


def final_files(run_dir: str | Path) -> tuple[bytes, dict[str, torch.Tensor]]:
    """The last checkpoint's weights, byte for byte, and its optimizer state."""
    last = Path(run_dir) / "checkpoints" / "last"
    return (last / "model.safetensors").read_bytes(), torch.load(last / "state.pt", weights_only=True)["optimizers"]


def assert_same_run(first: str | Path, second: str | Path) -> None:
    assert rows(first) == rows(second)
    (weights, state), (weights2, state2) = final_files(first), final_files(second)
    assert weights == weights2 and state.keys() == state2.keys()
    assert all(torch.equal(state[key], state2[key]) for key in state)


def before_step(monkeypatch, step: int, act: Callable[[Run], object]) -> None:
    """Let something happen before a run takes a step."""
    original = training.step.take_step

    def take_step(run: Run, number: int):
        if number == step:
            act(run)
        return original(run, number)

    monkeypatch.setattr("training.step.take_step", take_step)


def stop_at(monkeypatch, step: int) -> None:
    """Send this process a SIGTERM while it takes a step."""
    before_step(monkeypatch, step, lambda run: os.kill(os.getpid(), signal.SIGTERM))


def crash(run: Run) -> NoReturn:
    raise RuntimeError("crash")


def tiny(text_file: Path) -> list[str]:
    """Overrides for a run of milliseconds a step."""
    return f"""data.path={text_file} data.cache_dir={text_file.parent}/cache tokenizer=byte model.n_layer=1
        model.n_embd=32 model.block_size=16 sample_tokens=0 device=cpu log_interval=1""".split()


@pytest.fixture
def config(train_config: TrainConfig) -> TrainConfig:
    """Dropout everywhere and three micro-batches a step: all that could make a difference."""
    train_config.model = replace(train_config.model, dropout=0.1, attention_dropout=0.1, zero_init=False)
    return replace(
        train_config, batch_size=6, micro_batch_size=2, eval_interval=5, checkpoint_interval=7, sample_tokens=0
    )


@pytest.mark.parametrize(
    ("step", "optimizer"), [(0, "muon"), (5, "muon"), (7, "muon"), (12, "muon"), (4, "adamw"), (12, "adamw")]
)
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one_to_the_bit(config, tmp_path, monkeypatch, optimizer, step):
    config.optimizer = OptimizerConfig(name=optimizer, lr=0.01, weight_decay=0.1)
    best = train(config)
    stopped = replace(config, run_dir=str(tmp_path / "stopped"))
    stop_at(monkeypatch, step)
    with pytest.raises(SystemExit) as ended:
        train(stopped)
    assert ended.value.code == 128 + signal.SIGTERM
    monkeypatch.undo()
    torch.manual_seed(99)  # nothing of the process it resumes in matters
    assert train(replace(stopped, resume=stopped.run_dir)) == best
    assert_same_run(config.run_dir, stopped.run_dir)


def test_a_run_stopped_at_its_last_step_is_finished_when_it_was_evaluated(config, tmp_path, monkeypatch):
    config.run_dir = str(tmp_path / "outputs/run")
    stop_at(monkeypatch, config.max_steps - 1)
    with pytest.raises(SystemExit):
        train(config)
    monkeypatch.undo()
    last = Path(config.run_dir) / "checkpoints/last"
    weights, stopped = final_files(config.run_dir)[0], read_meta(last)
    assert stopped["metrics"] == {} and not stopped["progress"]["finished"]
    best = train(replace(config, resume=config.run_dir))
    meta = verify_checkpoint(last)
    assert meta["progress"]["finished"] and meta["metrics"]["val_loss"] == best
    assert meta["computed_on"]["tinygpt"] == training.__version__
    assert last.with_name("best").readlink() == Path(f"step_{config.max_steps}")
    assert final_files(config.run_dir)[0] == weights
    assert find_run("auto", str(tmp_path / "outputs")) is None


def test_a_run_without_warning_goes_on_from_its_checkpoint_without_gaps_or_repeats(config, tmp_path, monkeypatch):
    train(config)
    crashed = replace(config, run_dir=str(tmp_path / "crashed"))
    before_step(monkeypatch, 13, crash)
    with pytest.raises(RuntimeError):
        train(crashed)
    assert rows(crashed.run_dir)[-1]["step"] == 13
    with (Path(crashed.run_dir) / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 14, "lo')  # the line that was being written
    monkeypatch.undo()
    train(replace(crashed, resume=crashed.run_dir))
    assert_same_run(config.run_dir, crashed.run_dir)


@pytest.mark.parametrize("budget", ["max_steps", "max_flops"])
def test_a_larger_budget_goes_on_where_a_finished_run_ended(config, budget):
    a_step = flops_per_token(without_weights(replace(config.model, vocab_size=257))) * 6 * 16
    config = replace(config, max_steps=None)
    for steps in (10, 14, 14):  # the last time nothing is left to do
        resume = config.run_dir if Path(config.run_dir).exists() else None
        train(replace(config, **{budget: steps if budget == "max_steps" else steps * a_step}, resume=resume))
        assert [row["step"] for row in rows(config.run_dir) if "loss" in row] == list(range(1, steps + 1))
    assert saved_settings(Path(config.run_dir))["max_steps"] == (14 if budget == "max_steps" else None)


def test_evaluating_differently_does_not_change_training(config, tmp_path):
    train(config)
    other = replace(config, run_dir=str(tmp_path / "other"), eval_interval=3, eval_batch_size=5, log_interval=4)
    train(other)
    assert final_files(config.run_dir)[0] == final_files(other.run_dir)[0]


def test_settings_that_change_the_result_are_named_and_refused_and_others_may_change(config, text_file):
    train(replace(config, max_steps=7))
    changed = dict(seed=2, batch_size=12, grad_clip=2.0, optimizer=OptimizerConfig(lr=0.5))
    named = r"batch_size=12 \(was 6\), grad_clip=2.0 \(was 1.0\), optimizer.lr=0.5 \(was 0.02\), seed=2 \(was 1\)"
    with pytest.raises(SettingsError, match=named):
        train(replace(config, **changed, resume=config.run_dir))
    train(replace(config, **changed, max_steps=8, resume=config.run_dir, allow_changes=True))
    adamw = dict(optimizer=OptimizerConfig(name="adamw"), allow_changes=True)
    with pytest.raises(SettingsError, match="fits no other: leave it out, or begin anew with init_from="):
        train(replace(config, **adamw, resume=config.run_dir))
    others = replace(config, **changed, max_steps=9, eval_interval=2, log_interval=3, keep_checkpoints=1)
    train(replace(others, resume=config.run_dir))
    text_file.write_text(text_file.read_text() + "one more sentence.\n")
    with pytest.raises(SettingsError, match="the text has changed: restore the text, or set allow_changes=true"):
        train(replace(others, resume=config.run_dir))


def test_settings_that_a_run_of_an_older_tinygpt_did_not_have_do_not_differ_from_it():
    saved = {"config": {"model": {"n_embd": 32}, "seed": 1}, "data": "text"}
    now = {"model": {"n_embd": 32, "younger": 5}, "seed": 1, "resume": "run", "allow_changes": False}
    check_settings(now, saved, data="text")
    with pytest.raises(SettingsError, match=r"seed=2 \(was 1\)"):
        check_settings(now | {"seed": 2}, saved, data="text")


def test_a_run_directory_that_was_moved_resumes(config, tmp_path):
    train(replace(config, max_steps=7))
    Path(config.run_dir).rename(tmp_path / "moved")
    train(replace(config, resume=str(tmp_path / "moved")))
    assert rows(tmp_path / "moved")[-1]["step"] == 20 and not Path(config.run_dir).exists()


@pytest.mark.parametrize("member", ["model.safetensors", "state.pt", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "missing"])
def test_a_damaged_checkpoint_is_passed_over_saying_so(config, tmp_path, caplog, member, damage):
    config = replace(config, max_steps=8, checkpoint_interval=3, eval_interval=100)
    train(config)
    shutil.copytree(config.run_dir, tmp_path / "whole")
    caplog.set_level("INFO", "tinygpt")
    last = (Path(config.run_dir) / "checkpoints" / "last").resolve()
    content = bytearray((last / member).read_bytes())
    if damage == "missing":
        (last / member).unlink()
    else:
        content[len(content) // 2] ^= 4
        (last / member).write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    train(replace(config, resume=config.run_dir))
    assert any("; trying step_6." in record.message for record in caplog.records)
    assert any("resuming at step 6" in record.message for record in caplog.records)
    assert_same_run(tmp_path / "whole", config.run_dir)


def test_a_checkpoint_that_a_kill_caught_while_it_was_replaced_is_found_again(config, tmp_path):
    config.run_dir = str(tmp_path / "outputs/run")
    train(replace(config, max_steps=3))
    step_3 = Path(config.run_dir) / "checkpoints/step_3"
    if (child := os.fork()) == 0:  # more steps: step 3 is written again, as that of an unfinished run
        replace_file = Path.replace
        Path.replace = lambda path, target: os._exit(9) if "step_3" in str(path) else replace_file(path, target)
        try:
            train(replace(config, max_steps=8, resume=config.run_dir))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not step_3.exists() and open_checkpoint(config.run_dir).meta["step"] == 3
    assert saved_settings(Path(config.run_dir)) and not step_3.exists()  # only who has the lock moves anything
    train(replace(config, max_steps=8, resume=config.run_dir))
    assert sorted(path.name for path in step_3.parent.iterdir()) == ["best", "last", "step_5", "step_7", "step_8"]


def test_a_copy_of_a_run_whose_links_have_become_folders_goes_on(config, tmp_path):
    train(replace(config, max_steps=8))
    copy = tmp_path / "copy"
    shutil.copytree(config.run_dir, copy)  # follows the links
    assert not (copy / "checkpoints" / "last").is_symlink()
    for run in (config.run_dir, str(copy)):
        train(replace(config, max_steps=12, resume=run))
        assert (Path(run) / "checkpoints" / "last").readlink() == Path("step_12")
    assert_same_run(config.run_dir, copy)


def test_when_no_checkpoint_can_be_read_the_run_is_left_as_it_is(config):
    train(replace(config, max_steps=3))
    for member in Path(config.run_dir).glob("checkpoints/step_*/model.safetensors"):
        member.write_bytes(b"")
    before = sorted(Path(config.run_dir).rglob("*"))
    with pytest.raises(CheckpointError, match="no checkpoint that can be read"):
        train(replace(config, resume=config.run_dir))
    assert sorted(Path(config.run_dir).rglob("*")) == before


def test_auto_takes_the_newest_run_that_is_neither_finished_nor_going_on(config, tmp_path, monkeypatch):
    outputs = tmp_path / "outputs"
    for age, (name, stops) in enumerate({"first": 3, "second": 4, "complete": None}.items()):
        if stops:
            stop_at(monkeypatch, stops)
            with pytest.raises(SystemExit):
                train(replace(config, run_dir=str(outputs / name)))
            monkeypatch.undo()
        else:
            train(replace(config, run_dir=str(outputs / name)))
        os.utime(outputs / name / "checkpoints", (age, age))
    assert find_run("auto", str(outputs)) == outputs / "second"
    with lock_run(outputs / "second"):
        assert find_run("auto", str(outputs)) == outputs / "first"
        with pytest.raises(SettingsError, match="still going on"):
            train(replace(config, resume=str(outputs / "second")))
    assert find_run("auto", str(tmp_path / "nothing")) is None


def test_of_two_processes_that_resume_a_run_the_second_touches_nothing(config, tmp_path, monkeypatch):
    stop_at(monkeypatch, 8)
    with pytest.raises(SystemExit):
        train(config)
    monkeypatch.undo()
    chosen, ended = tmp_path / "chosen", tmp_path / "ended"
    if (child := os.fork()) == 0:  # chooses, and waits before it goes on
        original = training.start.newest_intact

        def choose(run: Path):
            found = original(run)
            chosen.write_text("x")
            wait_for(ended)
            return found

        training.start.newest_intact = choose
        try:
            train(replace(config, resume=config.run_dir))
            os._exit(0)
        finally:
            os._exit(1)
    wait_for(chosen)
    with pytest.raises(SettingsError, match="still going on"):
        train(replace(config, resume=config.run_dir))
    ended.write_text("x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [row["step"] for row in rows(config.run_dir) if "loss" in row] == list(range(1, 21))
    assert not list(Path(config.run_dir).glob("checkpoints/damaged_*"))


def test_a_run_directory_that_was_used_while_this_process_prepared_is_refused(config, monkeypatch):
    prepare = training.start.prepare

    def prepare_late(*arguments, **options):
        monkeypatch.undo()
        train(replace(config, max_steps=2))  # begins and ends meanwhile
        return prepare(*arguments, **options)

    monkeypatch.setattr("training.start.prepare", prepare_late)
    with pytest.raises(SettingsError, match="already holds a run"):
        train(config)
    assert [row["step"] for row in rows(config.run_dir) if "loss" in row] == [1, 2]
    assert not is_locked(Path(config.run_dir))


def test_a_run_of_a_newer_tinygpt_is_neither_resumed_nor_changed(config):
    train(replace(config, max_steps=8, checkpoint_interval=3))
    rewrite_meta(Path(config.run_dir) / "checkpoints/step_8", format_version=4)
    before = sorted(Path(config.run_dir).rglob("*"))
    with pytest.raises(CheckpointError, match=r"format 4, of a newer tinygpt \(this one reads 3\): update tinygpt"):
        train(replace(config, resume=config.run_dir))
    assert sorted(Path(config.run_dir).rglob("*")) == before


@pytest.mark.parametrize("place", ["text.txt", "text.txt/run"])
def test_a_run_directory_that_is_a_file_is_refused_before_the_data(config, tmp_path, monkeypatch, place):
    monkeypatch.setattr("training.start.prepare", crash)
    with pytest.raises(SettingsError, match=rf"run_dir=.*{place} cannot be made, for .*text\.txt is a file"):
        train(replace(config, run_dir=str(tmp_path / place)))


def without(name: str) -> Callable[[dict], None]:
    return lambda saved: saved.pop(name)


STATE_FORGERIES = {
    "missing": without("lm_head.weight.exp_avg"),
    "short": lambda state: state.update({"lm_head.weight.exp_avg": torch.zeros(3)}),
    "one for all": lambda state: state.update({"blocks.0.mlp.up_proj.weight.momentum_buffer": torch.zeros(())}),
    "huge": lambda state: state.update({"lm_head.weight.exp_avg": torch.zeros(1).expand(10**12)}),
    "integers": lambda state: state.update({"lm_head.weight.exp_avg": torch.zeros(257, 32, dtype=torch.int64)}),
    "no tensor": lambda state: state.update({"lm_head.weight.exp_avg": "x"}),
}
META_FORGERIES = {
    "step -5": {"step": -5},
    "step 1e400": {"step": 10**400},
    "step x": {"step": "x"},
    "seconds nan": {"progress": {"seconds": float("nan")}},
    "progress step": {"progress": {"step": -5}},
    "progress list": {"progress": [1]},
    "progress other": {"progress": {"nothing": 1}},
    "logs": {"logs": {"metrics.jsonl": "x"}},
    "logs list": {"logs": [3]},
    "scaler": {"scaler": {"scale": []}},
    "config": {"config": []},
    "model": {"config": {"model": None}},
    "n_layer": {"config": {"model": {"n_layer": 3}}},
    "n_layer many": {"config": {"model": {"n_layer": 10**9}}},
    "n_layer x": {"config": {"model": {"n_layer": [2]}}},
    "n_embd": {"config": {"model": {"n_embd": 10**7}}},
    "n_embd huge": {"config": {"model": {"n_embd": 10**30}}},
    "vocab_size": {"config": {"model": {"vocab_size": 10**9}}},
    "dropout": {"config": {"model": {"dropout": float("nan")}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("forgery", [*META_FORGERIES, *STATE_FORGERIES, "no progress", "more than data"])
def test_a_forged_checkpoint_is_refused_in_a_sentence_and_the_run_stays_as_it_is(text_file, tmp_path, forgery):
    # As by the command line, which takes its settings from the checkpoint.
    settings = [*tiny(text_file), "max_steps=2", "run_dir=the_run", "precision=fp16"]
    assert run_here("train.py", *settings, cwd=tmp_path).returncode == 0
    last = (tmp_path / "the_run/checkpoints/last").resolve()
    meta = read_meta(last)
    if changes := META_FORGERIES.get(forgery):
        meta = merged(meta, changes)
    elif forgery == "no progress":
        del meta["progress"]
    else:
        state = torch.load(last / "state.pt")
        STATE_FORGERIES.get(forgery, lambda state: state.update(x=Path("x")))(state["optimizers"])
        torch.save(state, last / "state.pt")
        meta["files"]["state.pt"] = describe_file(last / "state.pt")
    rewrite_meta(last, **meta) if "progress" in meta else write_meta(last, meta)
    before = {path: path.stat().st_size for path in (tmp_path / "the_run").rglob("*")}
    begun = time.monotonic()
    refused = run_here("train.py", "resume=the_run", "max_steps=3", cwd=tmp_path)
    assert time.monotonic() - begun < 10 and refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: ") and "weights_only" not in line, line
    assert {path: path.stat().st_size for path in (tmp_path / "the_run").rglob("*")} == before


def merged(one: dict, other: dict) -> dict:
    both = {name: merged(one[name], v) if isinstance(v, dict) and name in one else v for name, v in other.items()}
    return one | both


def test_processes_that_ask_at_once_whether_a_run_is_locked_do_not_lock_it_for_each_other(tmp_path):
    (tmp_path / ".lock").touch()
    with ThreadPoolExecutor(16) as ranks:
        assert not any(ranks.map(is_locked, [tmp_path] * 400))
    with lock_run(tmp_path):
        assert is_locked(tmp_path)


def test_all_weights_are_in_the_file_under_plain_names(config):
    train(replace(config, max_steps=1))
    weights = load_file(Path(config.run_dir) / "checkpoints/last/model.safetensors")
    assert "blocks.0.attention.q_proj.weight" in weights and not [name for name in weights if "module" in name]


def test_from_the_command_line_a_run_remembers_its_settings_and_goes_on_in_its_directory(text_file, tmp_path):
    settings = [*tiny(text_file), *["seed=5", "optimizer=adamw", "eval_interval=4", "model.dropout=0.1"]]
    assert run_here("train.py", *settings, "max_steps=9", "run_dir=whole", cwd=tmp_path).returncode == 0
    assert run_here("train.py", *settings, "max_steps=4", cwd=tmp_path).returncode == 0
    (run_dir,) = tmp_path.glob("outputs/*/*")
    before = sorted(path.name for path in run_dir.rglob("*.yaml"))

    refused = run_here("train.py", f"resume={run_dir}", "optimizer=muon", "optimizer.lr=0.3", cwd=tmp_path)
    assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1
    assert "optimizer.name=muon (was adamw)" in refused.stderr and "optimizer.lr=0.3 (was 0.001)" in refused.stderr

    resumed = run_here("train.py", f"resume={run_dir}", "max_steps=9", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in rows(run_dir) if "loss" in row] == list(range(1, 10))
    assert list(tmp_path.glob("outputs/*/*")) == [run_dir]  # no second directory
    assert sorted(path.name for path in run_dir.rglob("*.yaml")) == before
    log = (run_dir / "train.log").read_text()
    assert log.count("step 4: validation") == log.count("step 8: validation") == 1
    # max_steps=4 was decayed to its end at step 4, so the whole run differs; its settings do not.
    assert [row["step"] for row in rows(run_dir)] == [row["step"] for row in rows(tmp_path / "whole")]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(text_file, tmp_path, number, status):
    endless = ["max_steps=1000000", "eval_interval=100000", "run_dir=the_run"]
    command = [sys.executable, ROOT / "train.py", *tiny(text_file), *endless]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen(command, cwd=tmp_path, preexec_fn=lambda: hear_hangups(signal.SIG_DFL), **pipes)
    wait_for(tmp_path / "the_run/metrics.jsonl")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status
    line = output.decode().strip().splitlines()[-1]
    steps = int(line.split("stopped after step ")[1].split(";")[0])
    assert line.endswith("python train.py resume=the_run")
    resumed = run_here("train.py", "resume=auto", f"max_steps={steps + 2}", "run_dir=the_run", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in rows(tmp_path / "the_run") if "loss" in row] == list(range(1, steps + 3))


def hear_hangups(action) -> None:
    signal.signal(signal.SIGHUP, action)


def test_a_closed_terminal_saves_the_run(text_file, tmp_path):
    def own_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        hear_hangups(signal.SIG_DFL)

    terminal, inner = pty.openpty()
    command = [sys.executable, ROOT / "train.py", *tiny(text_file), "max_steps=1000000", "run_dir=the_run"]
    streams = dict(stdin=inner, stdout=inner, stderr=inner)
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, preexec_fn=own_terminal, **streams)
    os.close(inner)
    until = time.monotonic() + 60
    while not ((log := tmp_path / "the_run/metrics.jsonl").is_file() and log.stat().st_size):
        assert time.monotonic() < until
        while select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 4096)
    os.close(terminal)
    process.send_signal(signal.SIGHUP)  # as the shell does, after the system
    assert process.wait(60) == 129
    step = int((tmp_path / "the_run/train.log").read_text().split("stopped after step ")[1].split(";")[0])
    assert read_meta(tmp_path / "the_run/checkpoints/last")["step"] == step


@pytest.mark.slow
def test_under_nohup_a_run_outlives_its_terminal(text_file, tmp_path):
    command = [sys.executable, ROOT / "train.py", *tiny(text_file), "max_steps=60", "run_dir=the_run"]
    process = subprocess.Popen(command, cwd=tmp_path, preexec_fn=lambda: hear_hangups(signal.SIG_IGN))
    wait_for(tmp_path / "the_run/metrics.jsonl")
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    assert read_meta(tmp_path / "the_run/checkpoints/last")["progress"]["finished"]


@pytest.mark.parametrize("name", ["outputs/run-1", "a b", "a=b,c", "it's", '"', "$HOME", "run (1)", "1e3", "é"])
def test_an_override_to_be_pasted_is_what_the_shell_and_hydra_read(name):
    (word,) = shlex.split(hydra_quoted("resume", name))
    assert OverridesParser.create().parse_override(word).value() == name
    assert ("'" in hydra_quoted("resume", name)) == (name != "outputs/run-1")


@pytest.mark.slow
def test_what_a_run_prints_to_be_typed_next_can_be_pasted(text_file, tmp_path):
    name = "it's lr=0.1, (é) $HOME"
    begun = run_here("train.py", *tiny(text_file), "max_steps=1", f'run_dir="{name}"', cwd=tmp_path)
    assert begun.returncode == 0, begun.stderr
    command = next(line for line in begun.stdout.splitlines() if line.startswith("sample "))[10:]
    again = f"python train.py {hydra_quoted('resume', name)} max_steps=2"
    for line in (f"{command} num_samples=1 max_new_tokens=2", again):
        line = line.replace("python ", f"{shlex.quote(sys.executable)} {ROOT}/")
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert read_meta(tmp_path / name / "checkpoints/last")["step"] == 2


# Saving takes so long that one can interrupt it; but not that of step 2, which the run goes on from.
SLOW_SAVES = """
import time, train
from pathlib import Path
from runs import checkpoint
original = checkpoint.save_file
def slow(weights, path):
    original(weights, path)
    if ".step_2." not in str(path):
        Path("saving").write_text("x")
        time.sleep(60)
checkpoint.save_file = slow
train.main()
"""


@pytest.mark.parametrize(
    ("first", "second", "status"), [("INT", "INT", 130), ("TERM", "TERM", 143), ("INT", "TERM", 143)]
)
@pytest.mark.slow
def test_a_second_signal_leaves_at_once_and_the_last_checkpoint_is_whole(text_file, tmp_path, first, second, status):
    assert run_here("train.py", *tiny(text_file), "run_dir=the_run", "max_steps=2", cwd=tmp_path).returncode == 0
    longer = ["resume=the_run", "max_steps=1000000", "eval_interval=1000000", "checkpoint_interval=1000000"]
    command = [sys.executable, "-c", SLOW_SAVES, *longer]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    while len(rows(tmp_path / "the_run")) < 5:
        time.sleep(0.05)
    process.send_signal(getattr(signal, f"SIG{first}"))
    wait_for(tmp_path / "saving")
    started = time.monotonic()
    process.send_signal(getattr(signal, f"SIG{second}"))
    process.communicate(timeout=60)
    assert process.returncode == status and time.monotonic() - started < 5
    checkpoints = tmp_path / "the_run/checkpoints"
    assert [path.name for path in checkpoints.glob("step_*")] == ["step_2"]
    assert load_checkpoint(checkpoints / "last").meta["step"] == 2
    assert list(checkpoints.glob(".step_*"))  # the save was under way
    resumed = run_here("train.py", "resume=the_run", "max_steps=4", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert load_checkpoint(checkpoints / "last").meta["step"] == 4 and not list(checkpoints.glob(".step_*"))


def wait_for(file: Path, seconds: float = 60) -> None:
    """Until a file has content."""
    until = time.monotonic() + seconds
    while not (file.is_file() and file.stat().st_size):
        assert time.monotonic() < until, f"{file} did not appear"
        time.sleep(0.05)


def test_resume_with_nothing_to_go_on_with(tmp_path):
    missing = run_here("train.py", "resume=/nowhere", cwd=tmp_path)
    assert missing.returncode == 1 and missing.stderr.startswith("error: resume=/nowhere holds no run")
    sweep = run_here("train.py", "resume=x", "-m", "seed=1,2", cwd=tmp_path)
    assert sweep.returncode == 1 and "resume=x is for a single run" in sweep.stderr
    assert list(tmp_path.iterdir()) == []

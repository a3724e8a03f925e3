"""wandb beside a run: one run for each run whatever happens, and no error of its own ends the training."""

import json
import logging
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import wandb
from conftest import run_here
from test_resume import before_step, crash
from wandb.proto import wandb_internal_pb2

import train as train_module
from errors import SettingsError
from train import train
from training.config import WandbConfig
from training.watch.wandb import check_wandb_key


@pytest.fixture
def config(train_config):
    train_config.wandb.mode = "offline"
    return replace(train_config, eval_interval=5, checkpoint_interval=5, max_steps=10)


def records(content: bytes) -> Iterator[wandb_internal_pb2.Record]:
    """The whole records of a file that wandb is perhaps writing still: LevelDB's log format, after 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        if (left := 32_768 - at % 32_768) < 7:  # the end of a block is left empty
            at += left
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        if at + 7 + size > len(content):
            return
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a record in one piece, or its last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def kinds(run_dir: str | Path, kind: str) -> list:
    """The records of a kind in a run's directory, in order, once wandb's own process has written the last one."""
    found = []
    for path in sorted(Path(run_dir).glob("wandb/offline-run-*/*.wandb")):
        deadline = time.monotonic() + 30
        while not any(record.HasField("exit") for record in records(path.read_bytes())):
            assert time.monotonic() < deadline, f"{path} was never finished"
            time.sleep(0.05)
        found += [getattr(record, kind) for record in records(path.read_bytes()) if record.HasField(kind)]
    return found


def test_of_a_file_that_is_being_written_only_whole_records_are_read():
    record = wandb_internal_pb2.Record(num=7, uuid="x" * 40).SerializeToString()
    half = len(record) // 2
    pieces = [(2, record[:half]), (4, record[half:]), (1, record)]
    content = b"header." + b"".join(struct.pack("<IHB", 0, len(piece), kind) + piece for kind, piece in pieces)
    found = [[each.num for each in records(content[:end])] for end in range(len(content) + 1)]
    first = 7 + 7 + half + 7 + len(record) - half
    assert found == [[]] * first + [[7]] * (len(content) - first) + [[7, 7]]


def history(run_dir: str | Path) -> list[dict]:
    rows = kinds(run_dir, "history")
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]


def test_offline_everything_is_in_the_runs_directory_and_the_way_to_upload_it_is_said(config, caplog):
    caplog.set_level(logging.INFO)
    config.wandb.group, config.sample_prompt = "g" * 200, "the"
    train(config)
    (run,) = kinds(config.run_dir, "run")
    assert (run.project, run.display_name, run.job_type) == ("tinygpt", "run", "train")
    assert run.run_group == "g" * 128
    settings = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert settings["model"]["n_layer"] == 2 and settings["wandb"]["mode"] == "offline"
    rows = history(config.run_dir)
    assert [row["_step"] for row in rows] == list(range(1, 11))
    assert "loss" in rows[4] and "val_loss" in rows[4] and "head_similarity/layer_1" in rows[4]
    assert isinstance(rows[4]["attention_entropy/layer_1_head_0"], float)
    assert {"pictures/loss/path", "pictures/heads/path", "samples/path"} <= rows[-1].keys()
    tables = Path(config.run_dir).glob("wandb/offline-*/files/media/table/*.json")
    samples = [sample for table in tables for sample in json.loads(table.read_text())["data"]]
    assert sorted((step, prompt) for step, prompt, _ in samples) == [(5, "the"), (10, "the")]
    (exit_record,) = kinds(config.run_dir, "exit")
    assert exit_record.exit_code == 0
    pattern = f"{config.run_dir}/wandb/offline-run-*-{run.run_id}*"
    assert f"wandb sync {pattern}" in caplog.text and len(list(Path("/").glob(pattern[1:]))) == 1


def test_a_crash_ends_the_run_as_failed_and_a_resume_goes_on_with_the_same_one(config, monkeypatch):
    before_step(monkeypatch, 7, crash)
    with pytest.raises(RuntimeError):
        train(config)
    monkeypatch.undo()
    assert [record.exit_code for record in kinds(config.run_dir, "exit")] == [1]
    train(replace(config, resume=config.run_dir))
    first, second = kinds(config.run_dir, "run")
    assert first.run_id == second.run_id
    steps = [row["_step"] for row in history(config.run_dir)]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10]  # from the checkpoint of step 5 on
    assert len(list(Path(config.run_dir).glob(f"wandb/offline-run-*-{first.run_id}*"))) == 2  # what is to be synced


def test_two_runs_of_one_process_are_two_runs_even_after_a_crash(config, tmp_path, monkeypatch):
    before_step(monkeypatch, 2, crash)
    with pytest.raises(RuntimeError):
        train(config)
    monkeypatch.undo()
    other = replace(config, run_dir=str(tmp_path / "other"), max_steps=3)
    train(other)
    (first,), (second,) = kinds(config.run_dir, "run"), kinds(other.run_dir, "run")
    assert first.run_id != second.run_id
    assert [row["_step"] for row in history(config.run_dir)] == [1, 2]
    assert [row["_step"] for row in history(other.run_dir)] == [1, 2, 3]
    assert wandb.run is None


@pytest.mark.parametrize("broken", ["log", "finish", "define"])
def test_an_error_of_wandb_is_said_once_and_the_training_goes_on(config, monkeypatch, caplog, broken):
    def fail(*args, **kwargs):
        raise wandb.Error("the server is on fire\nwith a long story")

    if broken == "define":
        monkeypatch.setattr(wandb, "init", fail)
    else:
        monkeypatch.setattr(wandb.Run, broken, fail)
    train(config)
    said = [record.getMessage() for record in caplog.records if "wandb failed" in record.getMessage()]
    assert said == ["wandb failed (the server is on fire); training goes on without it."]
    assert (Path(config.run_dir) / "checkpoints/step_10").exists()


def test_without_a_key_online_mode_is_refused_before_any_work(train_config, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    train_config.wandb.mode = "online"
    with pytest.raises(SettingsError, match=r"wandb\.mode=online finds no API key: run `wandb login`.*WANDB_API_KEY"):
        train(train_config)
    assert not Path(train_config.run_dir).exists() and not Path(train_config.data.cache_dir).exists()


def test_a_key_that_cannot_be_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(SettingsError, match=r"wandb\.mode=online cannot log in .*choose wandb\.mode=offline"):
        check_wandb_key()


@pytest.mark.parametrize(
    "given",
    [*({"project": name} for name in ("", "a/b", "what?", "x" * 129)), {"tags": ["a", ""]}, {"tags": ["x" * 65]}],
)
def test_a_project_or_tag_that_wandb_would_not_take_is_named(given):
    with pytest.raises(SettingsError, match=rf"wandb\.{next(iter(given))}="):
        WandbConfig(**given)


SWEEP = {"WANDB_SWEEP_ID": "sweep1", "WANDB_RUN_ID": "run1"}  # as wandb's agent calls
NAMED = {"WANDB_PROJECT": "p", "WANDB_ENTITY": "e", "WANDB_NAME": "n", "WANDB_TAGS": "a,b"}
TYPED = ["wandb.mode=offline", "wandb.project=q", "wandb.entity=f", "wandb.name=m", "wandb.tags=[c,d e]"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "typed", "expected"),
    [
        (NAMED | {"WANDB_MODE": "offline"}, [], ("p", "e", "n", ["a", "b"], "")),
        (NAMED | {"WANDB_MODE": "disabled"}, TYPED, ("q", "f", "m", ["c", "d e"], "")),
        (SWEEP | {"WANDB_MODE": "offline", "WANDB_PROJECT": "p"}, [], ("p", "", "run", [], "sweep1")),
        (SWEEP | {"WANDB_MODE": "offline"}, [], ("uncategorized", "", "run", [], "sweep1")),  # what wandb makes of none
        ({}, ["wandb.mode=offline"], ("tinygpt", "", "run", [], "")),
    ],
)
def test_the_environment_says_what_the_settings_leave_open(environment, typed, expected, tmp_path, text_file):
    command = f"""data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer=byte max_steps=1 sample_tokens=0
        model.n_layer=1 model.n_embd=8 model.block_size=16 device=cpu run_dir=run optimizer.lr=0.01""".split()
    script = [sys.executable, str(Path(train_module.__file__)), *command, *typed]  # wandb reads it once a process
    subprocess.run(script, cwd=tmp_path, env=clean() | environment, check=True, timeout=120, capture_output=True)
    (run,) = kinds(tmp_path / "run", "run")
    assert (run.project, run.entity, run.display_name, list(run.tags), run.sweep_id) == expected
    assert (run.run_id == "run1") == ("WANDB_RUN_ID" in environment)


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}


@pytest.mark.parametrize(
    ("environment", "mistake"),
    [
        ({"WANDB_MODE": "on"}, "WANDB_MODE=on is not known: choose one of"),
        (SWEEP, "wandb.mode=online finds no API key"),
    ],
)
def test_a_mistake_in_the_environment_is_said_before_any_work(environment, mistake, tmp_path):
    command = [sys.executable, str(Path(train_module.__file__)), "device=cpu"]
    nobody = clean() | {"NETRC": str(tmp_path / "netrc")} | environment
    done = subprocess.run(command, cwd=tmp_path, env=nobody, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {mistake}") and not list(tmp_path.iterdir())


def test_the_runs_of_a_sweep_are_a_group_named_by_what_varies(tmp_path, text_file):
    command = f"""-m model.n_head=1,2 model.n_layer=1 model.n_embd=8 model.block_size=16 data.path={text_file}
        data.cache_dir={tmp_path}/cache tokenizer=byte max_steps=1 sample_tokens=0 wandb.mode=offline device=cpu
        hydra.sweep.dir={tmp_path}/mysweep"""
    root = Path(train_module.__file__).parent
    assert run_here("train.py", *command.split(), cwd=root).returncode == 0
    runs = [run for job in (0, 1) for run in kinds(tmp_path / "mysweep" / str(job), "run")]
    assert [run.run_group for run in runs] == ["mysweep", "mysweep"]
    assert [run.display_name for run in runs] == ["0 model.n_head=1", "1 model.n_head=2"]
    assert runs[0].run_id != runs[1].run_id

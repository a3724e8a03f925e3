"""wandb has one run for each run, and none of its errors ends the training."""

import logging
import math
import os
import re
import shutil
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from conftest import run_here
from test_resume import ROOT, before_step, crash

from common.errors import SettingsError
from common.settings import setting_hints
from runs.checkpoint import Meta, Progress
from runs.metrics import Evaluation
from runs.resume import Saved, settings_to_go_on
from runs.summary import Summary, write_summary
from train import train
from training.config import TrainConfig, WandbConfig
from training.start import tell_first_values, tell_lost_rows
from training.wandb import Wandb, keep_messages

pytestmark = pytest.mark.usefixtures("no_pictures")


class Session:
    """What wandb.init returns, as far as we use it."""

    offline, url = True, "https://wandb.ai/e/p/runs/1"

    def __init__(self, number: int, **given) -> None:
        self.given, self.id = given, given["id"] or f"id{number}"
        self.logged: list[tuple[dict, int]] = []
        self.summary: dict = {}
        self.code = None

    def log(self, values: dict, step: int) -> None:
        assert not self.logged or step >= self.logged[-1][1]  # wandb drops what comes later
        self.logged.append((values, step))

    def finish(self, exit_code: int) -> None:
        self.code = exit_code

    def steps(self) -> list[int]:
        return [step for values, step in self.logged if "loss" in values]


@pytest.fixture
def config(train_config):
    train_config.wandb.mode = "offline"
    return replace(train_config, eval_interval=5, checkpoint_interval=5, max_steps=10)


@pytest.fixture
def sessions(monkeypatch) -> list[Session]:
    """The runs that wandb is asked for."""
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    found, numbers = [], count(1)
    monkeypatch.setattr(wandb, "init", lambda **given: found.append(Session(next(numbers), **given)) or found[-1])
    return found


def test_the_messages_of_wandbs_server_are_kept_where_there_is_no_home(tmp_path, monkeypatch):
    for home, given, kept in (("", None, None), ("absent", None, tmp_path), ("absent", "/own", "/own")):
        monkeypatch.setenv("HOME", str(tmp_path / home))
        monkeypatch.setenv("WANDB_CACHE_DIR", given or "")
        if given is None:
            monkeypatch.delenv("WANDB_CACHE_DIR")
        keep_messages(tmp_path)
        assert os.environ.get("WANDB_CACHE_DIR") == (kept and str(kept))


@pytest.mark.slow
def test_offline_all_is_in_the_runs_directory_and_the_way_to_upload_it_is_said(config, caplog):
    caplog.set_level(logging.INFO)
    train(config)
    (folder,) = Path(config.run_dir).glob("wandb/offline-run-*")
    pattern = f"{config.run_dir}/wandb/offline-run-*-{folder.name.split('-')[-1]}*"
    assert f"wandb sync {pattern}" in caplog.text and [*Path("/").glob(pattern[1:])] == [folder]
    assert list(folder.glob("files/media/table/*.json")) and wandb.run is None


@pytest.mark.slow
def test_wandb_has_the_settings_every_row_the_samples_and_the_page(config, sessions, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    config.wandb.group, config.sample_prompt = "g" * 200, "the"
    page = Path(config.run_dir) / "report.html"
    monkeypatch.setattr("pages.report.Report.draw", lambda report: page.write_text("<p>"))
    monkeypatch.setattr(Session, "offline", False)
    train(config)
    (session,) = sessions
    given = session.given
    assert (given["project"], given["name"], given["group"], given["mode"]) == ("tinygpt", "run", "g" * 128, "offline")
    assert given["config"]["model"]["n_layer"] == 2 and given["dir"] == config.run_dir and given["id"] is None
    assert (given["resume"], given["reinit"]) == ("allow", "create_new")
    assert session.steps() == list(range(1, 11)) and "step" not in session.logged[0][0]
    (scalars,) = [values for values, step in session.logged if "val_loss" in values and step == 5]
    entropy = scalars["attention_entropy/layer_1_head_0"]
    assert entropy == round(entropy, 4) != round(entropy, 1) and "head_similarity/layer_1" in scalars
    (values,) = [values for values, step in session.logged if "samples" in values and step == 10]
    assert [row[:2] for row in values["samples"].data] == [[5, "the"], [10, "the"]]
    assert session.logged[-1][0].keys() == {"report"} and session.logged[-1][1] == 10 and session.code == 0
    assert f"wandb     {Session.url}" in caplog.messages


@pytest.mark.slow
def test_a_crash_ends_the_run_as_failed_and_a_resume_goes_on_with_the_same_one(config, sessions, monkeypatch):
    with monkeypatch.context() as patch:
        before_step(patch, 7, crash)
        with pytest.raises(RuntimeError):
            train(config)
    train(replace(config, resume=config.run_dir))
    first, second = sessions
    assert first.id == second.given["id"] and [first.code, second.code] == [1, 0]
    assert first.steps() + second.steps() == [1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10]  # from the checkpoint of step 5 on


@pytest.mark.parametrize("steps", [[1, 5], [1, 5, 6, 20, 20], []])
def test_steps_of_which_wandb_keeps_the_values_of_another_path_are_told(tmp_path, caplog, steps):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    tell_first_values(Saved(tmp_path / "checkpoints/step_5", Meta({}, Progress(step=5))))
    said = "wandb keeps the first values of a step, and steps 6 to 20 are trained anew otherwise: a copy of the run, "
    assert [message.startswith(said) for message in caplog.messages] == [True] * (20 in steps)


@pytest.mark.parametrize("status", ["running", "stopped", "failed", "finished", None])
def test_rows_that_wandb_may_lack_after_a_kill_are_told(tmp_path, caplog, status):
    """wandb keeps up to 15 s of rows in memory: those before the checkpoint were lost there without a word."""
    if status:
        write_summary(tmp_path, Summary(status=status))
    tell_lost_rows(Saved(tmp_path / "checkpoints/step_5", Meta({}, Progress(step=5))))
    said = "this run was killed: wandb may lack its last rows before that, which metrics.jsonl has."
    assert caplog.messages == [said] * (status == "running")


@pytest.mark.long
def test_a_copy_of_a_run_is_a_new_run_of_wandb_and_a_moved_one_the_same(config, sessions, tmp_path, caplog):
    """Both went on as one run of wandb, whose curves were of two."""
    train(replace(config, max_steps=1))
    run = Path(config.run_dir)
    copies = [shutil.copytree(run, tmp_path / name, symlinks=True) for name in ("copy", "other")]
    for place in (copies[0], copies[0], run):
        train(replace(config, resume=str(place), max_steps=10))
    train(replace(config, resume=str(run.rename(tmp_path / "moved")), max_steps=11))
    first, copied, again, own, moved = sessions
    assert copied.given["id"] is None and again.given["id"] == copied.id != first.id
    assert own.given["id"] == moved.given["id"] == first.id
    assert sum("this run was copied from" in message for message in caplog.messages) == 1

    # What a moved run leaves behind is said, unless it is typed.
    for typed, times in ((["wandb.mode"], 0), ([], 1)):
        caplog.clear()
        settings_to_go_on(copies[1], setting_hints(TrainConfig), typed)
        assert caplog.text.count("goes on without wandb: add wandb.mode=offline to go on with it") == times


@pytest.mark.slow
def test_the_summary_has_the_best_evaluation_beside_the_last(config, sessions, monkeypatch):
    losses = {3: 5.0, 6: 3.0, 9: 4.0, 10: 3.5}
    monkeypatch.setattr(
        "train.evaluate_run", lambda run, *_: Evaluation(64 * losses[run.progress.step], 64, text_bytes=64)
    )
    train(replace(config, eval_interval=3))
    (session,) = sessions
    assert [values["val_loss"] for values, _ in session.logged if "val_loss" in values] == [5.0, 3.0, 4.0, 3.5]
    summary = session.summary
    assert summary == {"best_step": 6, "best_val_loss": 3.0, "best_val_bpb": 3 / math.log(2), "best_val_tokens": 64}


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["log", "finish", "init"])
def test_an_error_of_wandb_is_said_once_and_the_training_goes_on(config, sessions, monkeypatch, caplog, broken):
    def fail(*args, **kwargs):
        raise wandb.Error("the server is on fire\nwith a long story")

    monkeypatch.setattr(wandb if broken == "init" else Session, broken, fail)
    train(config)
    said = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    goes_on = "" if broken == "finish" else "; training goes on without it"
    assert said == [f"wandb failed (the server is on fire){goes_on}."]
    assert (Path(config.run_dir) / "checkpoints/step_10").exists()


def test_a_run_waits_at_its_end_for_wandbs_server_no_longer_than_two_minutes(sessions, tmp_path, monkeypatch):
    """wandb itself waits for ever, and without a word, as after the network is gone."""
    config = TrainConfig(run_dir=str(tmp_path), wandb=WandbConfig(mode="online"))
    progress = Progress()
    run = SimpleNamespace(config=config, directory=tmp_path, progress=progress, settings={})
    hook = sys.excepthook
    logger = Wandb(run)
    settings = sessions[0].given["settings"]
    assert settings.finish_timeout == 120 and settings.finish_timeout_raises
    monkeypatch.setattr(Session, "finish", lambda *_, **__: (_ for _ in ()).throw(TimeoutError()))
    uploads = re.escape(f"wandb sync --include-online {tmp_path}/wandb/run-*-id1* uploads it later")
    with pytest.raises(TimeoutError, match=f"within 120 s: {uploads}"):
        logger.on_end(None)
    assert sys.excepthook is hook


@pytest.mark.parametrize(
    ("key", "mistake"),
    [
        ("", r"finds no API key: run `wandb login`.*WANDB_API_KEY"),
        ("short", r"cannot log in .*choose wandb\.mode=offline"),
    ],
)
def test_online_mode_without_a_key_is_refused_before_any_work(train_config, tmp_path, monkeypatch, key, mistake):
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    train_config.wandb.mode = "online"
    with pytest.raises(SettingsError, match=rf"wandb\.mode=online {mistake}"):
        train(train_config)
    assert not Path(train_config.run_dir).exists() and not Path(train_config.data.cache_dir).exists()


NAMED = {"WANDB_PROJECT": "p", "WANDB_NAME": "n", "WANDB_JOB_TYPE": "probe"}
TYPED = dict(project="q", entity="f", name="m", tags=["c", "d e"], notes="why")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "in_sweep", "typed", "expected"),
    [
        (NAMED, False, {}, ("p", None, "n", None, None)),  # wandb takes the others from the environment by itself
        (NAMED, True, TYPED, ("q", "f", "m", ["c", "d e"], "why")),
        ({}, True, {}, (None, None, "run", None, None)),  # and the project of its own sweep
    ],
)
def test_the_environment_says_what_the_settings_leave_open(
    config, sessions, monkeypatch, environment, in_sweep, typed, expected
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("training.wandb.WANDB_SWEEP", in_sweep)
    train(replace(config, max_steps=1, wandb=WandbConfig(mode="offline", **typed)))
    assert tuple(sessions[0].given[name] for name in ("project", "entity", "name", "tags", "notes")) == expected
    assert sessions[0].given["job_type"] == ("probe" if environment else "train")


@pytest.mark.parametrize("name", [*(f"a{sign}b" for sign in "/\\#?%:"), "p" * 129, "a b.c-ü", "p" * 128, ""])
def test_a_project_is_refused_where_wandb_refuses_it(name):
    try:
        wandb.Settings(project=name)
    except wandb.errors.UsageError:
        with pytest.raises(SettingsError, match=r"^wandb\.project=.* has .*: (leave|shorten) "):
            WandbConfig(project=name)
    else:
        assert WandbConfig(project=name).project == name


@pytest.mark.parametrize("tags", [["a", "b" * 65], [""], ["b" * 64, "ü c"], []])
def test_tags_are_refused_where_wandb_refuses_them(tags):
    try:
        wandb.Settings(run_tags=tags)
    except ValueError:
        with pytest.raises(SettingsError, match="a tag has 1 to 64 characters: change it"):
            WandbConfig(tags=tags)
    else:
        assert WandbConfig(tags=tags).tags == tags


@pytest.mark.slow
def test_names_of_the_environment_are_checked_before_the_run(config, sessions, monkeypatch):
    for name, value in {"WANDB_TAGS": f"a,{'b' * 65}", "WANDB_PROJECT": "a/b"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(SettingsError, match=name):
                train(config)
            train(replace(config, max_steps=1, wandb=WandbConfig(mode="disabled"), run_dir=f"{config.run_dir}-{name}"))
    assert not sessions and not Path(config.run_dir).exists()


@pytest.mark.parametrize("value", ["true", "1", "ON", "false", ""])
def test_wandb_disabled_goes_before_the_mode_of_the_environment_but_not_before_a_typed_one(value, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DISABLED", value)
    assert WandbConfig().active_mode == ("offline" if value in ("false", "") else "disabled")
    assert WandbConfig(mode="online").active_mode == "online"


@pytest.mark.parametrize("name", ["WANDB_MODE", "WANDB_DISABLED", "WANDB_TAGS", "WANDB_API_KEY"])
def test_quotes_that_a_file_of_variables_keeps_are_told_without_the_value(name, monkeypatch):
    for value in ('"secret"', "'secret'", '""'):
        monkeypatch.setenv(name, value)
        said = f"^the quotes around {name} belong to it, as docker's --env-file keeps them: write it without them.$"
        with pytest.raises(SettingsError, match=said):
            (config := WandbConfig()).active_mode  # noqa: B018
            config.check_environment()
    monkeypatch.setenv("WANDB_NOTES", '"a" and "b"')
    monkeypatch.setenv(name, "disabled")
    WandbConfig().check_environment()


def test_an_empty_variable_is_none_for_wandb_too(monkeypatch):
    for name in ("WANDB_TAGS", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_BASE_URL"):
        monkeypatch.setenv(name, "")
    with pytest.raises(ValueError):
        wandb.Settings(run_tags=[""])
    WandbConfig().check_environment()
    assert not [name for name in os.environ if name.startswith("WANDB_") and not os.environ[name]]


@pytest.mark.parametrize(("earlier", "mode"), [("dryrun", "offline"), ("run", "online")])
def test_wandbs_earlier_names_of_the_modes_are_known(monkeypatch, earlier, mode):
    monkeypatch.setenv("WANDB_MODE", earlier)
    assert WandbConfig().active_mode == mode and WandbConfig(mode="disabled").active_mode == "disabled"


@pytest.mark.parametrize(("mode", "in_sweep"), [("disabled", False), ("offline", False), ("online", True)])
def test_the_mode_is_the_environments_where_none_is_set(monkeypatch, mode, in_sweep):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("training.config.WANDB_SWEEP", in_sweep)
    if mode == "offline":
        monkeypatch.setenv("WANDB_MODE", mode)
    assert (WandbConfig().active_mode, WandbConfig(mode="offline").active_mode) == (mode, "offline")
    monkeypatch.setenv("WANDB_MODE", "on")
    with pytest.raises(SettingsError, match="WANDB_MODE=on is not known: choose one of"):
        _ = WandbConfig().active_mode


@pytest.mark.long
def test_the_runs_of_a_sweep_are_a_group_named_by_what_varies(tmp_path, text_file, sessions):
    command = f"""-m model.n_head=1,2 model.n_layer=1 model.n_embd=8 model.block_size=16 data.path={text_file}
        data.cache_dir={tmp_path}/cache tokenizer=byte max_steps=1 sample_tokens=0 wandb.mode=offline device=cpu
        hydra.sweep.dir={tmp_path}/mysweep"""
    assert run_here("train.py", *command.split(), cwd=ROOT).returncode == 0
    assert [session.given["group"] for session in sessions] == ["mysweep", "mysweep"]
    assert [session.given["name"] for session in sessions] == ["0 model.n_head=1", "1 model.n_head=2"]


@pytest.mark.long
def test_a_run_id_of_the_environment_is_that_of_one_run(config, sessions, monkeypatch, tmp_path, text_file, caplog):
    """A second run with it would overwrite the first."""
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    command = f"-m seed=1,2 data.path={text_file} max_steps=1 hydra.sweep.dir={tmp_path}/sweep wandb.mode=offline"
    refused = run_here("train.py", *command.split(), cwd=ROOT)
    said = "error: WANDB_RUN_ID=mine is one run of wandb, and a sweep has many: unset WANDB_RUN_ID.\n"
    assert refused.stderr == said and not (tmp_path / "sweep").exists()
    # In one process, as a notebook is: the run, the same run once more, and another one.
    monkeypatch.setattr("training.wandb.TAKEN", set())
    train(replace(config, max_steps=5))
    train(replace(config, max_steps=10, resume=config.run_dir))
    assert [session.given["id"] for session in sessions] == [None, "id1"] and "failed" not in caplog.text
    train(replace(config, max_steps=5, run_dir=str(tmp_path / "other")))
    assert "wandb failed (WANDB_RUN_ID=mine is an earlier run of this process: unset" in caplog.text
    assert len(sessions) == 2 and (tmp_path / "other/checkpoints/step_5").exists()


@pytest.mark.long
def test_wandbs_files_are_where_the_environment_says(config, sessions, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    elsewhere = tmp_path / "not yet/there"
    monkeypatch.setenv("WANDB_DIR", str(elsewhere))
    run_dir = tmp_path / "run"
    train(replace(config, max_steps=1, run_dir=str(run_dir)))
    assert sessions[0].given["dir"] == str(elsewhere) and elsewhere.is_dir()  # wandb wants it to be there
    assert f"wandb sync '{elsewhere}/wandb'/offline-run-*-id1*" in caplog.text
    assert not (run_dir / "wandb").exists()
    monkeypatch.setenv("HOME", str(tmp_path))  # as in a file of variables, where no shell expands ~
    monkeypatch.setenv("WANDB_DIR", "~/in the home")
    train(replace(config, max_steps=1, run_dir=str(tmp_path / "third")))
    assert sessions.pop().given["dir"] == str(tmp_path / "in the home") and (tmp_path / "in the home").is_dir()
    with monkeypatch.context() as closed:
        closed.setattr(os, "access", lambda *asked: False)
        train(replace(config, max_steps=1, run_dir=str(tmp_path / "fourth")))
    assert f"wandb failed (WANDB_DIR={tmp_path}/in the home may not be written to: name another" in caplog.text
    monkeypatch.setenv("WANDB_DIR", "")
    train(replace(config, max_steps=1, run_dir=str(tmp_path / "second")))
    assert sessions[1].given["dir"] == str(tmp_path / "second")

"""Sweeps in parallel and elsewhere: jobs share the data's cache alone, and fail one by one."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import yaml
from conftest import first_of, started
from omegaconf import OmegaConf
from sweeping import ROOT, command, put_job, run, run_here, tiny, wait_for

from cli import composition
from cli.with_torch import device_of_job
from common.errors import SettingsError
from model.attention.code import digest
from runs.summary import read_job, read_summary
from sweeps.grid import Grid, reason_of
from sweeps.sweep import check_launcher, jobs_at_once

has_joblib, has_submitit = (bool(find_spec(f"hydra_plugins.hydra_{name}_launcher")) for name in ("joblib", "submitit"))
needs_joblib = pytest.mark.skipif(not has_joblib, reason='needs pip install -e ".[parallel]"')
needs_submitit = pytest.mark.skipif(not has_submitit, reason='needs pip install -e ".[slurm]"')

OWN = """
from model.attention.contract import from_weights
from model.attention.registry import form

@form("own")
@from_weights
def own(scores):
    return scores.softmax(-1)
"""


def of_own_code(folder: Path) -> list[str]:
    """Overrides for an attention of one's own, and its file."""
    (folder / "own.py").write_text(OWN)
    return ["code=own.py", "attention=own"]


@pytest.mark.long
@pytest.mark.slow
@needs_joblib
def test_jobs_side_by_side_share_the_cache_and_nothing_else_and_fail_one_by_one(tmp_path):
    # The default folder's name is made up anew wherever it is resolved: workers must not make up their own.
    text = [*tiny(tmp_path, max_steps=20, eval_interval=10), *of_own_code(tmp_path)]
    result = run(
        "-m",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "model.vocab_size=300,100",
        "seed=1,2",
        *text,
        cwd=tmp_path,
    )
    assert result.returncode == 1 and not re.search("Traceback|Warning", result.stderr), result.stderr
    (sweep,) = tmp_path.glob("multirun/*/*")
    for job in (0, 1):
        assert f"seed={job + 1}" in read_job(sweep / str(job)).overrides
        meta = json.loads((sweep / str(job) / "checkpoints/last/meta.json").read_text())
        assert meta["config"]["seed"] == job + 1 and f"/{job}\n" in (sweep / str(job) / "train.log").read_text()
    for job in (2, 3):
        assert f"job {job} failed: model.vocab_size=100 is less than the tokenizer's 257" in result.stdout
        assert not (sweep / str(job) / "checkpoints").exists()
    assert result.stdout.count("Preparing ") == 1
    # Each line of a job has its number, those of the sweep none.
    told = [read_summary(sweep / str(job)).val_loss for job in (0, 1)]
    for job, loss in enumerate(told):
        assert re.search(rf"^{job} \| step 20: validation loss {loss:.4f} ", result.stdout, re.MULTILINE)
        assert f"\n{job} | curves    {sweep.relative_to(tmp_path)}/{job}/report.html\n" in result.stdout
    assert f"\ncurves    {sweep.relative_to(tmp_path)}/report.html\n" in result.stdout
    assert not re.search(r"^(\d \| $|step |text )", result.stdout, re.MULTILINE)
    alone = run("seed=2", "model.vocab_size=300", "run_dir=alone", *text, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    first, second = (read_summary(folder) for folder in (tmp_path / "alone", sweep / "1"))
    assert first.val_bpb == pytest.approx(second.val_bpb) and first.code_hash == second.code_hash
    assert first.code_hash == digest([tmp_path / "own.py"])


@pytest.mark.long
def test_a_stopped_sweep_saves_its_job_and_goes_on_with_it(tmp_path):
    asked = ["-m", "seed=1,2,3", "hydra.sweep.dir=here", "log_interval=1"]
    asked += tiny(tmp_path, max_steps=10**6, compile="off", checkpoint_interval=10**6, eval_interval=10**6)
    stopped_at = 0
    for number in (signal.SIGINT, signal.SIGHUP):
        with started(command(*asked), cwd=tmp_path, text=True, process_group=0) as process:
            wait_for(tmp_path / "here/0/metrics.jsonl", f'"step": {stopped_at + 20},')
            # A terminal sends Ctrl-C to all processes; the others come from whoever knows this one.
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            output, errors = process.communicate(timeout=120)
        assert process.returncode == 128 + number and "to go on:" in output, output + errors
        assert not errors.replace("finishing this step, then saving; Ctrl-C again leaves at once", "").strip()
        assert output.count("(stopped, step ") == 1 and "(running" not in output
        assert ("resuming at step" in output) == (number != signal.SIGINT)
        summary = read_summary(tmp_path / "here/0")
        saved = json.loads((tmp_path / "here/0/checkpoints/last/meta.json").read_text())
        assert summary.status == "stopped" and saved["progress"]["step"] == summary.step > stopped_at
        stopped_at = int(summary.step)
        assert not list(tmp_path.rglob("*.unfinished")) and not (tmp_path / "here/1").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no new parent for a process")
def test_a_worker_ends_with_the_sweep_that_was_killed():
    worker = (
        "import time; from common.console import end_with_parent as end; end(); print(1, flush=True); time.sleep(90)"
    )
    sweep = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    with started([sys.executable, "-c", sweep], cwd=ROOT) as process:  # both write into one pipe
        assert process.stdout.readline() == b"1\n" and process.poll() is None
        process.kill()
        began = time.monotonic()
        assert process.stdout.read() == b"" and time.monotonic() - began < 30  # the worker has closed the pipe too


@pytest.mark.long
@needs_joblib
def test_a_stopped_sweep_of_parallel_jobs_goes_on_with_their_last_checkpoints(tmp_path):
    asked = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2,3,4", "hydra.sweep.dir=here"]
    long = dict(max_steps=10**6, compile="off", checkpoint_interval=10, eval_interval=10**6, log_interval=1)
    asked += tiny(tmp_path, **long)
    for number in (signal.SIGINT, signal.SIGTERM):
        with started(command(*asked), cwd=tmp_path, text=True, process_group=0) as process:
            for job in range(2):
                lines = tmp_path / f"here/{job}/metrics.jsonl"
                wait_for(lines, '"step": 30,' if number == signal.SIGINT else '"step": 60,')
                wait_for(tmp_path / f"here/{job}/checkpoints/last/meta.json", '"step": ')  # a thread writes them
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            output, errors = process.communicate(timeout=120)
        assert process.returncode == 128 + number and "to go on:" in output, output + errors
        assert "Traceback" not in errors and output.count("(stopped, step ") == 2
        assert output.count("resuming at step") == 2 * (number == signal.SIGTERM)


@pytest.mark.long
@needs_submitit
def test_a_failing_job_does_not_end_the_others(tmp_path):
    sweep = [
        "-m",
        "hydra/launcher=submitit_local",
        "model.vocab_size=100,300",
        "hydra.sweep.dir=here",
        *tiny(tmp_path, max_steps=2),
        *of_own_code(tmp_path),
    ]
    result = run(*sweep, cwd=tmp_path)
    assert result.returncode == 1 and "model.vocab_size=100 is less than the tokenizer's 257" in result.stdout
    assert result.stderr.count("Traceback") == 0
    assert len(list(tmp_path.glob("here/*/checkpoints/best"))) == 1
    assert read_summary(tmp_path / "here/1").code_hash == digest([tmp_path / "own.py"])


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "submitit_slurm"])
def test_every_launcher_has_settings_that_can_be_read_and_changed(tmp_path, launcher):
    given = ["partition=gpu", "account=me", "timeout_min=90", "gpus_per_node=2", "setup=[module load cuda]"]
    asked = [f"hydra.launcher.{setting}" for setting in given if launcher == "submitit_slurm"]
    shown = run_here("--cfg", "hydra", f"hydra/launcher={launcher}", *asked, cwd=tmp_path)
    settings = yaml.safe_load(shown.stdout)["hydra"]["launcher"]
    assert shown.returncode == 0 and settings["_target_"].startswith("hydra_plugins.")
    if asked:
        assert (settings["partition"], settings["timeout_min"], settings["setup"]) == ("gpu", 90, ["module load cuda"])


def test_every_launchers_file_has_each_setting_of_its_plugin():
    # hydra-core 1.4 joins no file with the settings of a plugin that it has in place of.
    made = {
        "joblib": has_joblib and "hydra_joblib_launcher.config:JobLibLauncherConf",
        "submitit_local": has_submitit and "hydra_submitit_launcher.config:LocalQueueConf",
        "submitit_slurm": has_submitit and "hydra_submitit_launcher.config:SlurmQueueConf",
    }
    for launcher, place in made.items():
        if place:
            module, _, name = place.partition(":")
            fields = OmegaConf.structured(getattr(import_module(f"hydra_plugins.{module}"), name))
            lines = OmegaConf.load(ROOT / f"conf/hydra/launcher/{launcher}.yaml")
            assert {*fields} == {*lines}
            # After the first of those that a person rarely changes all have the plugin's defaults.
            names = [*map(str, lines)]
            others = names[names.index("backend" if launcher == "joblib" else "stderr_to_stdout") :]
            assert {name: lines[name] for name in others} == {name: fields[name] for name in others}


@pytest.mark.long
@needs_joblib
def test_workers_end_without_a_traceback_whose_output_nobody_reads_or_no_letter_fits(tmp_path):
    asked = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2", *tiny(tmp_path, max_steps=1)]
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for folder, reader, environment in (("gone", "head -1", os.environ), ("ö", "cat", plain)):
        typed = f"{shlex.join(command(*asked, f'hydra.sweep.dir={folder}'))} | {reader}"
        done = subprocess.run(typed, shell=True, cwd=tmp_path, env=environment, capture_output=True, timeout=240)
        assert done.stderr == b"" and len([*tmp_path.glob(f"{folder}/*/checkpoints/best")]) == 2


@pytest.mark.long
@pytest.mark.slow
@needs_joblib
def test_a_sweep_whose_jobs_are_in_its_own_process_does_not_end_with_the_shell(tmp_path, monkeypatch):
    watched = []
    monkeypatch.setattr(composition, "end_with_parent", watched.append)
    asked = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "seed=1,2", *tiny(tmp_path, max_steps=1)]
    assert run_here("-m", *asked, cwd=tmp_path).returncode == 0
    assert not watched


def test_jobs_take_turns_on_the_cuda_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [device_of_job("auto", job) for job in range(5)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert device_of_job("cpu", 1) == "cpu" and device_of_job("cuda:2", 0) == "cuda:2"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of_job("auto", 1) == "auto"


@needs_joblib
def test_each_cuda_device_has_a_job_or_else_each_core(monkeypatch):
    for devices in (3, 0):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda count=devices: count)
        assert jobs_at_once() == devices or (devices == 0 < jobs_at_once())


@needs_joblib
def test_joblibs_variable_that_is_no_number_is_told(monkeypatch):
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "two")
    with pytest.raises(SettingsError, match=r"^LOKY_MAX_CPU_COUNT=two is no number of cores: unset it, or set one\.$"):
        jobs_at_once()


MISTAKES = {
    "hydra.launcher.n_jobs=0": r"hydra/launcher=joblib gave up \(n_jobs == 0",
    # Only the launcher for Hydra 1.3 has a schema.
    "hydra.launcher.n_jobs=two": "n_jobs cannot be read \\(Value 'two'|gave up \\(n_jobs could not be converted",
    "hydra.launcher.jobs=2": "there is no setting hydra.launcher.jobs",
}


@pytest.mark.slow
@needs_joblib
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_sentence_and_status_1(mistake, tmp_path):
    result = run_here("-m", "hydra/launcher=joblib", mistake, "seed=1,2", cwd=tmp_path)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert re.search(MISTAKES[mistake], result.stderr), result.stderr


@needs_submitit
@pytest.mark.parametrize(
    ("asked", "remedy"),
    first_of(
        ("local timeout_min=0", "name more than 0."),
        ("slurm timeout_min=2", "name more than 2, at most the limit of the partition."),
        ("slurm timeout_min=5 signal_delay_s=330", "name more than 5.5, at most the limit of the partition."),
    ),
)
def test_a_job_that_would_be_stopped_as_it_begins_is_refused(asked, remedy, tmp_path):
    launcher, *settings = asked.split()
    typed = [f"hydra.launcher.{setting}" for setting in settings]
    refused = run_here("-m", f"hydra/launcher=submitit_{launcher}", *typed, "seed=1,2", cwd=tmp_path)
    assert refused.stderr == f"error: {typed[0]} leaves a job no time: {remedy}\n" and not [*tmp_path.iterdir()]


@pytest.mark.long
@pytest.mark.skipif(bool(shutil.which("srun")), reason="there is a Slurm here")
@needs_submitit
def test_without_slurm_or_without_the_plugin_one_sentence_says_so(tmp_path):
    result = run("-m", "hydra/launcher=submitit_slurm", "seed=1,2", cwd=tmp_path)
    assert result.returncode == 1 and "are you indeed on a slurm cluster" in result.stderr.strip().splitlines()[-1]
    hidden = [f"hydra_plugins.hydra_{name}_launcher" for name in ("joblib", "submitit")]
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({hidden})\n")
    for launcher, extra in (("joblib", "parallel"), ("submitit_slurm", "slurm")):
        result = run("-m", f"hydra/launcher={launcher}", "seed=1,2", cwd=tmp_path, PYTHONPATH=str(tmp_path))
        sentence = f'error: hydra/launcher={launcher} is not installed: pip install -e ".[{extra}]".\n'
        assert (result.returncode, result.stderr) == (1, sentence)


THEIRS = "from pathlib import Path\nPath('{}').open('a').write(__file__ + '\\n')\nraise RuntimeError('theirs')\n"
MODULES = ("train", "model", "sweeps", "pages", "utils", "json", "yaml", "numpy")
FOLDERS = ("data", "common", "cli", "runs", "training", "hydra_plugins", "torch")


def put_theirs(folder: Path, imported: Path, names: tuple[str, ...] = (*MODULES, *FOLDERS)) -> Path:
    """A folder of somebody's own modules and packages, which note that they were imported, and fail."""
    folder.mkdir(exist_ok=True)
    for name in names:
        file = folder / name / "__init__.py" if name in FOLDERS else folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(THEIRS.format(imported))
    return folder


LAUNCHERS = {"basic": [], "joblib": ["hydra.launcher.n_jobs=2"], "submitit_local": []}


@pytest.mark.long
@needs_joblib
@needs_submitit
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_jobs_import_nothing_of_somebody_elses_from_here_or_from_the_path(launcher, tmp_path):
    imported = tmp_path / "imported"
    here = put_theirs(tmp_path / "here", imported)
    ours = tuple({*MODULES, *FOLDERS} - {"json", "yaml", "numpy", "torch"})  # PYTHONPATH may replace libraries
    path = put_theirs(tmp_path / "path", imported, ours)
    asked = [f"hydra/launcher={launcher}", *LAUNCHERS[launcher], "seed=1,2", *tiny(tmp_path, max_steps=1)]
    result = run("-m", *asked, *of_own_code(here), cwd=here, PYTHONPATH=str(path))
    assert result.returncode == 0, result.stderr[-2000:]
    assert not imported.exists(), imported.read_text()
    assert len(list(here.glob("multirun/*/*/*/checkpoints/best"))) == 2


CHILD = (
    OWN
    + """
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
Path("beside.py").write_text("NAME = 'theirs'")
Path("child.py").write_text("import beside, os; print(beside.NAME, os.environ.get('PYTHONPATH'))")
said = subprocess.run([sys.executable, "child.py"], capture_output=True, text=True)
Path(f"said{os.getpid()}").write_text(said.stdout + said.stderr)
"""
)


@pytest.mark.long
@needs_submitit
def test_a_program_that_a_job_starts_has_its_own_paths(tmp_path):
    (tmp_path / "own.py").write_text(CHILD)
    asked = ["hydra/launcher=submitit_local", "code=own.py", "attention=own", *tiny(tmp_path, max_steps=1)]
    result = run("-m", *asked, cwd=tmp_path, PYTHONPATH="/their/path")
    said = [file.read_text() for file in tmp_path.glob("said*")]
    assert result.returncode == 0, result.stderr
    assert len(said) == 2  # of the check of the jobs, which belongs to the sweep, and of the job
    assert "theirs /their/path\n" in said


DEADLY = (
    OWN
    + """
import os
import signal
from multiprocessing import parent_process

@form("deadly")
@from_weights
def deadly(scores):
    if parent_process() and not os.path.exists("harmless"):
        os.kill(os.getpid(), signal.SIGKILL)  # as a system without memory does
    return scores.softmax(-1)
"""
)


@pytest.mark.long
@needs_joblib
def test_a_worker_that_is_killed_fails_its_own_job_alone(tmp_path):
    (tmp_path / "deadly.py").write_text(DEADLY)
    variants = '["attention=sdpa","attention=deadly code=deadly.py","attention=sdpa model.vocab_size=100"]'
    asked = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", f"hydra.sweeper.variants={variants}"]
    asked += [*tiny(tmp_path, max_steps=5), "hydra.sweep.dir=here"]
    result = run(*asked, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, "error: 2 of 3 jobs failed: the reasons are above.\n")
    reasons = [read_job(tmp_path / f"here/{job}").reason for job in range(3)]
    killed = "its process was killed, perhaps for a lack of memory: lower hydra.launcher.n_jobs, or choose a smaller "
    assert [reason and reason[: len(killed)] for reason in reasons[:2]] == [None, killed]
    assert "model.vocab_size=100 is less than" in reasons[2]
    assert (summary := read_summary(tmp_path / "here/0")) and summary.status == "finished"
    assert " failed: its process was killed" in result.stdout
    (tmp_path / "harmless").touch()
    again = run(*asked, cwd=tmp_path)
    assert again.stderr == "error: 1 of 3 jobs failed: the reasons are above.\n", again.stdout


@pytest.mark.long
@needs_joblib
def test_a_worker_that_somebody_kills_costs_no_job(tmp_path):
    asked = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2,3", "hydra.sweep.dir=here"]
    asked += tiny(tmp_path, max_steps=300, checkpoint_interval=10, eval_interval=10**6, log_interval=1)
    with started(command(*asked), cwd=tmp_path, text=True) as process:
        wait_for(tmp_path / "here/0/metrics.jsonl", '"step": 30,')
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in children if "LokyProcess" in " ".join(child.cmdline())]
        workers[0].kill()
        output, errors = process.communicate(timeout=200)
    assert process.returncode == 0 and not errors, output + errors
    assert "the jobs that were under way go on one at a time" in output and "resuming at step" in output
    assert [read_summary(tmp_path / f"here/{job}").step for job in range(3)] == [300] * 3


@pytest.mark.long
@needs_submitit
def test_a_job_of_submitit_that_cannot_begin_tells_its_reason(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'submitit.core._submit' in ' '.join(sys.orig_argv): sys.modules['hydra'] = None\n"
    )
    asked = ["hydra/launcher=submitit_local", "hydra.sweep.dir=here", *tiny(tmp_path, max_steps=1)]
    result = run("-m", *asked, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    said = "error: hydra/launcher=submitit_local gave up (Job (task=0) failed during processing: ModuleNotFoundError: "
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(said) and "hydra" in result.stderr and "goes on." in result.stderr


REASONS = {
    """Job (task=0) failed during processing with trace:
----------------------
Traceback (most recent call last):
  File "x", line 1
KeyError: 'a'

----------------------
You can check full logs with 'job.stderr(0)' and 'job.stdout(0)'or at paths:
""": "Job (task=0) failed during processing: KeyError: 'a'",
    """Job 7 (task: 0) with path /x.pkl
has not produced any output (state: FAILED)
Error stream produced:
----------------------------------------
slurmstepd: error: Detected 1 oom_kill event.
""": "Job 7 (task: 0) with path /x.pkl: slurmstepd: error: Detected 1 oom_kill event",
    "n_jobs == 0 in Parallel has no meaning": "n_jobs == 0 in Parallel has no meaning",
    "": "ValueError",
}


@pytest.mark.parametrize("said", REASONS)
def test_a_launchers_error_is_told_with_its_reason_in_one_line(said):
    assert reason_of(ValueError(said)) == REASONS[said]


def test_joblib_without_room_for_what_its_processes_share_is_told_where(tmp_path):
    sweeper = Grid()
    sweeper.folder = tmp_path
    sweeper.config = OmegaConf.create({"hydra": {"runtime": {"choices": {"hydra/launcher": "joblib"}}}})
    sweeper.go_on = "hydra.sweep.dir=here"
    sweeper.launcher = mock.Mock(**{"launch.side_effect": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))})
    with pytest.raises(
        SettingsError, match=r"gave up \(.*: make room in /dev/shm, .*, or leave out hydra/launcher=jobl"
    ):
        sweeper.launch_all([["seed=1"]], 0)
    sweeper.launcher.launch.side_effect = OSError(errno.EACCES, os.strerror(errno.EACCES))
    with pytest.raises(SettingsError, match="change the settings of hydra.launcher; the same command with hydra.sweep"):
        sweeper.launch_all([["seed=1"]], 0)


@pytest.mark.parametrize("status", ["stopped", "running", "finished"])
def test_a_launcher_that_gives_up_has_a_remedy_for_its_jobs_and_its_machine(status, tmp_path):
    """A job that a signal had stopped and saved, and a cluster's launcher elsewhere, were laid to typed settings."""
    sweeper = Grid()
    sweeper.config = OmegaConf.create({"hydra": {"runtime": {"choices": {"hydra/launcher": "submitit_slurm"}}}})
    sweeper.go_on, sweeper.folder = "hydra.sweep.dir=here", tmp_path
    put_job(tmp_path, 0, "seed=1", status=status)
    for words, remedy in {
        "Job not requeued because: Bypassing signal SIGCONT": "the same command with hydra.sweep.dir=here goes on.",
        'Could not detect "srun", are you indeed on a slurm cluster?': "or type hydra/launcher=submitit_local.",
    }.items():
        sweeper.launcher = mock.Mock(**{"launch.side_effect": RuntimeError(words)})
        with pytest.raises(SettingsError, match=re.escape(remedy)) as raised:
            sweeper.launch_all([["seed=1"]], 0)
        is_asked = "change the settings of hydra.launcher" in str(raised.value)
        assert is_asked == (status != "stopped" and "srun" not in words)


def test_a_launcher_that_begins_fewer_jobs_than_there_are_is_told(tmp_path):
    """A sweep by joblib with pre_dispatch=0, which hands out none, ended with status 0 and without a word."""
    sweeper = Grid()
    sweeper.folder = tmp_path
    sweeper.config = OmegaConf.create({"hydra": {"runtime": {"choices": {"hydra/launcher": "joblib"}}}})
    sweeper.go_on = "hydra.sweep.dir=here"
    sweeper.launcher = mock.Mock(**{"launch.return_value": []})
    with pytest.raises(SettingsError, match=r"joblib began 0 of 2 jobs: change the settings of hydra\.launcher"):
        sweeper.launch_all([["seed=1"], ["seed=2"]], 0)


def test_a_launchers_error_names_what_was_typed_for_it(tmp_path):
    """A file at hydra.launcher.submitit_folder was told as one at a job's folder, which no other sweep.dir mends."""
    sweeper = Grid()
    typed = ["hydra.sweep.dir=x", "hydra.launcher.submitit_folder=a/${hydra.job.num}", "+hydra.launcher.nodes=1"]
    hydra = {"runtime": {"choices": {"hydra/launcher": "submitit_local"}}, "overrides": {"hydra": typed}}
    sweeper.config = OmegaConf.create({"hydra": hydra})
    sweeper.go_on, sweeper.folder = "hydra.sweep.dir=x", tmp_path / "x"
    sweeper.launcher = mock.Mock(**{"launch.side_effect": FileExistsError(17, "File exists", str(tmp_path / "a"))})
    named = "change hydra.launcher.submitit_folder=a/${hydra.job.num}, +hydra.launcher.nodes=1; the same command"
    with pytest.raises(SettingsError, match=f"submitit_local gave up .*File exists.*: {re.escape(named)}"):
        sweeper.launch_all([["seed=1"]], 0)
    sweeper.launcher.launch.side_effect = FileExistsError(17, "File exists", str(tmp_path / "x/0"))
    with pytest.raises(SettingsError, match=r"a job needs the folder .*x/0, which is a file"):
        sweeper.launch_all([["seed=1"]], 0)


@pytest.mark.parametrize(
    ("launcher", "name", "value"),
    [
        pytest.param("joblib", "backend", "threading", marks=needs_joblib),  # the plugin passes over it
        pytest.param("joblib", "prefer", "threads", marks=needs_joblib),
        pytest.param("submitit_local", "tasks_per_node", 2, marks=needs_submitit),  # the second one fails the first
        pytest.param("submitit_local", "tasks_per_node", 0, marks=needs_submitit),  # was a traceback
        pytest.param("submitit_slurm", "nodes", 2, marks=needs_submitit),
    ],
)
def test_a_job_of_a_sweep_is_one_process(launcher, name, value):
    settings = yaml.safe_load((ROOT / f"conf/hydra/launcher/{launcher}.yaml").read_text())
    hydra = {"runtime": {"choices": {"hydra/launcher": launcher}}, "launcher": settings}
    config = OmegaConf.create({"hydra": hydra})
    check_launcher(config)
    config.hydra.launcher[name] = value
    said = f"hydra.launcher.{name}={value}, and each job of a sweep is one process: leave it out"
    with pytest.raises(SettingsError, match=said):
        check_launcher(config)


@pytest.mark.slow
def test_a_file_in_the_place_of_a_jobs_folder_is_told(tmp_path):
    """It was a traceback of pathlib.py."""
    (tmp_path / "0").touch()
    result = run_here("-m", *tiny(tmp_path, max_steps=1), "seed=1,2", f"hydra.sweep.dir={tmp_path}", cwd=tmp_path)
    said = f"error: a job needs the folder {tmp_path}/0, which is a file: remove it, or give another hydra.sweep.dir.\n"
    assert result.stderr.endswith(said) and result.returncode == 1


def test_a_launcher_whose_library_cannot_be_imported_is_told_with_it(tmp_path, monkeypatch):
    sweeper = Grid()
    sweeper.config = OmegaConf.create({"hydra": {"runtime": {"choices": {"hydra/launcher": "submitit_local"}}}})
    sweeper.go_on = "hydra.sweep.dir=here"
    sweeper.launcher = mock.Mock(**{"launch.side_effect": ImportError("cannot import name 'gone' from 'numpy'")})
    with pytest.raises(SettingsError, match=r"gave up \(cannot import name 'gone' .*: mend .* -U submitit\.$"):
        sweeper.launch_all([["seed=1"]], 0)
    (tmp_path / "joblib.py").write_text("from json import gone")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "joblib", raising=False)
    with pytest.raises(SettingsError, match=r"needs joblib, whose import fails \(.*gone.*: mend .* -U joblib\.$"):
        jobs_at_once()

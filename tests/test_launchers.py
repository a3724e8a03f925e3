"""Sweeps side by side and elsewhere: jobs share the data's cache and nothing else, and fail one by one."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from conftest import run_here

import train
from runs.summary import device_of_job, read_job

pytestmark = pytest.mark.usefixtures("no_pictures")
ROOT = Path(train.__file__).parent
has_joblib, has_submitit = (bool(find_spec(f"hydra_plugins.hydra_{name}_launcher")) for name in ("joblib", "submitit"))
needs_joblib = pytest.mark.skipif(not has_joblib, reason='needs pip install -e ".[parallel]"')
needs_submitit = pytest.mark.skipif(not has_submitit, reason='needs pip install -e ".[slurm]"')


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *arguments]


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """The command in a process of its own, whose workers end with it."""
    env = os.environ | environment
    return subprocess.run(command(*arguments), cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


@pytest.fixture
def tiny(tmp_path: Path, text_file: Path) -> list[str]:
    """Overrides for a run of a second."""
    settings = f"""data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer=byte device=cpu sample_tokens=0
        model.n_layer=1 model.n_embd=32 model.block_size=32 batch_size=4 eval_interval=10"""
    return settings.split()


def final_losses(run_dir: Path, name: str = "val_loss") -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row[name]) for row in rows if name in row]


@pytest.mark.slow
@needs_joblib
def test_jobs_side_by_side_share_the_cache_and_nothing_else_and_fail_one_by_one(tiny, tmp_path):
    # The default folder's name is made up anew wherever it is resolved: workers must not make up their own.
    together = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "model.n_head=2,3", "seed=1,2"]
    result = run(*together, "max_steps=20", *tiny, cwd=tmp_path)
    assert result.returncode == 1 and result.stderr.count("Traceback") == 0, result.stderr
    (sweep,) = tmp_path.glob("multirun/*/*")
    for job in (0, 1):
        overrides = read_job(sweep / str(job)).overrides
        meta = json.loads((sweep / str(job) / "checkpoints" / "last" / "meta.json").read_text())
        assert f"seed={job + 1}" in overrides and meta["config"]["seed"] == job + 1
        log = (sweep / str(job) / "train.log").read_text()
        assert log.count("validation loss") == 3 and f"/{job}\n" in log
    for job in (2, 3):
        assert f"job {job} failed: model.n_head=3 does not divide model.n_embd=32" in result.stdout
        assert not (sweep / str(job) / "checkpoints").exists()
    assert result.stdout.count("Preparing text") == 1
    assert sum(path.is_dir() for path in (tmp_path / "cache").iterdir()) == 1

    alone = run_here("train.py", "seed=2", "max_steps=20", "model.n_head=2", "run_dir=alone", *tiny, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    for (step, loss), (step2, loss2) in zip(final_losses(tmp_path / "alone"), final_losses(sweep / "1"), strict=True):
        assert step == step2 and loss == pytest.approx(loss2)


@pytest.mark.slow
@needs_submitit
def test_a_failing_job_does_not_end_the_others(tiny, tmp_path):
    sweep = ["-m", "hydra/launcher=submitit_local", "model.n_head=3,2", "max_steps=2", "hydra.sweep.dir=here"]
    result = run(*sweep, *tiny, cwd=tmp_path)
    assert result.returncode == 1 and "model.n_head=3 does not divide model.n_embd=32" in result.stdout
    assert result.stderr.count("Traceback") == 0
    assert len(list(tmp_path.glob("here/*/checkpoints/best"))) == 1


FOR_A_CLUSTER = ["partition=gpu", "account=me", "timeout_min=90", "gpus_per_node=2", "setup=[module load cuda]"]


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "submitit_slurm"])
def test_every_launcher_has_settings_that_can_be_read_and_changed(tmp_path, launcher):
    asked = [f"hydra.launcher.{setting}" for setting in FOR_A_CLUSTER if launcher == "submitit_slurm"]
    shown = run("--cfg", "hydra", "--package", "hydra.launcher", f"hydra/launcher={launcher}", *asked, cwd=tmp_path)
    assert shown.returncode == 0 and "UserWarning" not in shown.stderr
    settings = yaml.safe_load(shown.stdout)
    assert settings["_target_"].startswith("hydra_plugins.")
    if asked:
        assert (settings["partition"], settings["timeout_min"], settings["setup"]) == ("gpu", 90, ["module load cuda"])


def test_jobs_take_turns_on_the_cuda_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [device_of_job("auto", job) for job in range(5)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert device_of_job("cpu", 1) == "cpu" and device_of_job("cuda:2", 0) == "cuda:2"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of_job("auto", 1) == "auto"


MISTAKES = {
    "-m hydra/launcher=jobs seed=1,2": "hydra/launcher=jobs does not exist: choose hydra/launcher from basic, joblib",
    "-m seed=interval(1,2)": "seed=interval(1,2) needs hydra/sweeper=optuna",
    "-m hydra.launcher.n_jobs=2 seed=1,2": "there is no setting hydra.launcher.n_jobs",
}
MISTAKES_OF_JOBLIB = {
    "-m hydra/launcher=joblib hydra.launcher.n_jobs=0 seed=1,2": "gave up (n_jobs == 0",
    "-m hydra/launcher=joblib hydra.launcher.n_jobs=two seed=1,2": "hydra.launcher.n_jobs: Value 'two'",
    "-m hydra/launcher=joblib hydra.launcher.jobs=2 seed=1,2": "there is no setting hydra.launcher.jobs",
}


@pytest.mark.parametrize("command", [*MISTAKES, *(pytest.param(c, marks=needs_joblib) for c in MISTAKES_OF_JOBLIB)])
def test_a_mistake_ends_in_one_sentence_and_status_1(command, tmp_path):
    result = run_here("train.py", *command.split(), cwd=tmp_path)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 1 and len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert (MISTAKES | MISTAKES_OF_JOBLIB)[command] in lines[0]


@pytest.mark.skipif(bool(shutil.which("srun")), reason="there is a Slurm here")
@needs_submitit
def test_without_slurm_one_sentence_says_so(tmp_path):
    result = run("-m", "hydra/launcher=submitit_slurm", "seed=1,2", cwd=tmp_path)
    assert result.returncode == 1 and "are you indeed on a slurm cluster" in result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(("launcher", "extra"), [("joblib", "parallel"), ("submitit_slurm", "slurm")])
def test_without_the_plugin_one_sentence_says_how_to_install_it(tmp_path, launcher, extra):
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "__init__.py").touch()  # hides those that are installed
    result = run("-m", f"hydra/launcher={launcher}", "seed=1,2", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == f'error: hydra/launcher={launcher} is not installed: pip install -e ".[{extra}]".\n'

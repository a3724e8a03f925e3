"""Sweeps in parallel and elsewhere: jobs share the data's cache alone, and fail one by one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from subprocess import PIPE

import pytest
import torch
import yaml
from sweeping import ROOT, command, run, run_here, tiny, wait_for

from cli.with_torch import device_of_job
from common.console import ending_signals
from runs.summary import read_job, read_summary
from sweeps.grid import jobs_at_once

has_joblib, has_submitit = (bool(find_spec(f"hydra_plugins.hydra_{name}_launcher")) for name in ("joblib", "submitit"))
needs_joblib = pytest.mark.skipif(not has_joblib, reason='needs pip install -e ".[parallel]"')
needs_submitit = pytest.mark.skipif(not has_submitit, reason='needs pip install -e ".[slurm]"')


@pytest.mark.slow
@needs_joblib
def test_jobs_side_by_side_share_the_cache_and_nothing_else_and_fail_one_by_one(tmp_path):
    # The default folder's name is made up anew wherever it is resolved: workers must not make up their own.
    text = tiny(tmp_path, max_steps=20, eval_interval=10)
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
    alone = run("seed=2", "model.vocab_size=300", "run_dir=alone", *text, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    both = [read_summary(folder).val_bpb for folder in (tmp_path / "alone", sweep / "1")]
    assert both[0] == pytest.approx(both[1])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [pytest.param("joblib", marks=needs_joblib), "basic"])
def test_a_stopped_sweep_saves_its_jobs_and_goes_on_with_them(tmp_path, launcher):
    jobs = {"joblib": 2, "basic": 1}[launcher]
    asked = ["-m", f"hydra/launcher={launcher}", "seed=1,2,3,4,5,6,7", "hydra.sweep.dir=here", "log_interval=1"]
    asked += ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    asked += tiny(tmp_path, max_steps=10**6, checkpoint_interval=10**6, eval_interval=10**6)
    stopped_at = [0] * jobs
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process = subprocess.Popen(command(*asked), cwd=tmp_path, stdout=PIPE, stderr=PIPE, text=True, process_group=0)
        for job in range(jobs):
            wait_for(tmp_path / f"here/{job}/metrics.jsonl", f'"step": {stopped_at[job] + 20},')
        # A terminal sends Ctrl-C to all processes; the others come from whoever knows this one.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 128 + number and "to go on:" in output, output + errors
        assert not errors.replace("finishing this step, then saving; Ctrl-C again leaves at once", "").strip()
        assert output.count("(stopped, step ") == jobs and "(running" not in output
        for job in range(jobs):
            assert ("resuming at step" in output) == (number != signal.SIGINT)
            summary = read_summary(tmp_path / f"here/{job}")
            saved = json.loads((tmp_path / f"here/{job}/checkpoints/last/meta.json").read_text())
            assert summary.status == "stopped" and saved["progress"]["step"] == summary.step > stopped_at[job]
            stopped_at[job] = int(summary.step)
        assert not list(tmp_path.rglob("*.unfinished")) and not (tmp_path / f"here/{jobs}").exists()


@needs_joblib
def test_a_worker_returns_from_a_job_that_a_signal_ends_and_begins_no_other():
    code = """if True:
        import os, signal
        from sweeps.stop import run_stoppable
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
        assert run_stoppable(abs, -3) == 3
        print(run_stoppable(lambda number: [os.kill(os.getpid(), number), print("went on")], signal.SIGTERM))
        os.kill(os.getpid(), signal.SIGINT)  # between two jobs
        print(run_stoppable(print, "begun"))
    """
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("None\n" * 2, "")


@needs_joblib
def test_a_signal_waits_in_a_worker_until_its_first_job():
    code = """if True:
        import signal
        import joblib
        from sweeps.stop import launch_stoppable
        def launch(jobs, initial_job_idx):
            return joblib.Parallel(n_jobs=2)(joblib.delayed(signal.pthread_sigmask)(*job) for job in jobs)
        masks = launch_stoppable(launch, [(signal.SIG_BLOCK, [])] * 2, 0)
        print(*sorted(set.union(*masks)), len(masks), signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    signals = sorted(map(int, ending_signals()))  # nohup leaves out SIGHUP
    assert (ended.stdout, ended.stderr) == (f"{' '.join(map(str, signals))} 2 set()\n", "")


@pytest.mark.slow
@needs_submitit
def test_a_failing_job_does_not_end_the_others(tmp_path):
    sweep = [
        "-m",
        "hydra/launcher=submitit_local",
        "model.vocab_size=100,300",
        "hydra.sweep.dir=here",
        *tiny(tmp_path, max_steps=2),
    ]
    result = run(*sweep, cwd=tmp_path)
    assert result.returncode == 1 and "model.vocab_size=100 is less than the tokenizer's 257" in result.stdout
    assert result.stderr.count("Traceback") == 0
    assert len(list(tmp_path.glob("here/*/checkpoints/best"))) == 1


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "submitit_slurm"])
def test_every_launcher_has_settings_that_can_be_read_and_changed(tmp_path, launcher):
    given = ["partition=gpu", "account=me", "timeout_min=90", "gpus_per_node=2", "setup=[module load cuda]"]
    asked = [f"hydra.launcher.{setting}" for setting in given if launcher == "submitit_slurm"]
    shown = run_here("--cfg", "hydra", f"hydra/launcher={launcher}", *asked, cwd=tmp_path)
    settings = yaml.safe_load(shown.stdout)["hydra"]["launcher"]
    assert shown.returncode == 0 and settings["_target_"].startswith("hydra_plugins.")
    if asked:
        assert (settings["partition"], settings["timeout_min"], settings["setup"]) == ("gpu", 90, ["module load cuda"])


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


MISTAKES = {
    "hydra.launcher.n_jobs=0": "hydra/launcher=joblib gave up (n_jobs == 0",
    "hydra.launcher.n_jobs=two": "hydra.launcher.n_jobs cannot be read (Value 'two'",
    "hydra.launcher.jobs=2": "there is no setting hydra.launcher.jobs",
}


@needs_joblib
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_sentence_and_status_1(mistake, tmp_path):
    result = run_here("-m", "hydra/launcher=joblib", mistake, "seed=1,2", cwd=tmp_path)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert MISTAKES[mistake] in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(shutil.which("srun")), reason="there is a Slurm here")
@needs_submitit
def test_without_slurm_or_without_the_plugin_one_sentence_says_so(tmp_path):
    result = run("-m", "hydra/launcher=submitit_slurm", "seed=1,2", cwd=tmp_path)
    assert result.returncode == 1 and "are you indeed on a slurm cluster" in result.stderr.strip().splitlines()[-1]
    (tmp_path / "hydra_plugins").mkdir()  # hides those that are installed, but not ours
    (tmp_path / "hydra_plugins" / "__init__.py").write_text(f"__path__ = [{str(ROOT / 'hydra_plugins')!r}]")
    for launcher, extra in (("joblib", "parallel"), ("submitit_slurm", "slurm")):
        result = run("-m", f"hydra/launcher={launcher}", "seed=1,2", cwd=tmp_path, PYTHONPATH=str(tmp_path))
        sentence = f'error: hydra/launcher={launcher} is not installed: pip install -e ".[{extra}]".\n'
        assert (result.returncode, result.stderr) == (1, sentence)

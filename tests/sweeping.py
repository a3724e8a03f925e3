"""Shared by the tests of sweeps: jobs as files and in memory, and ways to call train.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import conftest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from runs.summary import Summary, begin_job, fail_job
from sweeps.grid import Grid

ROOT = Path(__file__).parent.parent
Result = Callable[[dict[str, str]], float]


def put_job(sweep: Path, number: int, *overrides: str, reason: str | None = None, **figures) -> Path:
    """A job's folder as a run leaves it, without its checkpoints."""
    job = sweep / str(number)
    job.mkdir(parents=True, exist_ok=True)
    (job / "job.json").write_text(json.dumps({"number": number, "overrides": overrides, "reason": reason}))
    put_summary(job, **figures)
    return job


def put_summary(job: Path, **figures) -> None:
    known = dict(status="finished", device="cpu", step=10, seed=1, tokens=1000.0, flops=1e9, val_loss=2.0, val_bpb=1.0)
    (job / "summary.json").write_text(json.dumps(asdict(Summary(**known | figures))))


def cells(text: str) -> list[list[str]]:
    """The cells of a Markdown table, its head first."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def in_memory(sweeper: Grid, folder: Path, result: Result) -> list[dict[str, str]]:
    """Let a sweeper run jobs that return or raise `result` of their settings; return its jobs."""
    launched: list[dict[str, str]] = []

    def launch(jobs, initial_job_idx):
        returns = []
        for number, overrides in enumerate(jobs, initial_job_idx):
            settings = dict(override.split("=", 1) for override in overrides)
            job = folder / settings.pop("hydra.sweep.subdir", str(number)).strip('"')
            job.mkdir(parents=True, exist_ok=True)
            try:
                if begin_job(job, number, [f"{name}={value}" for name, value in settings.items()]) is None:
                    launched.append(settings)
                    put_summary(job, val_bpb=result(settings))
                returns.append(JobReturn(_return_value=0.0, status=JobStatus.COMPLETED))
            except Exception as error:
                fail_job(job, error)
                returns.append(JobReturn(_return_value=error, status=JobStatus.FAILED))
        return returns

    choices = {"hydra/launcher": "basic", "hydra/sweeper": "grid"}
    hydra = {"runtime": {"choices": choices}, "sweep": {"dir": str(folder)}, "overrides": {"hydra": []}}
    hydra["sweeper"] = {"params": sweeper.params, "variants": sweeper.variants}
    config = OmegaConf.create({"dry_run": False, "optimizer": {"lr": 0.1}, "max_steps": 5, "hydra": hydra})
    with mock.patch("hydra.core.plugins.Plugins.instance"):
        loader = SimpleNamespace(repository=None)
        sweeper.setup(config=config, hydra_context=SimpleNamespace(config_loader=loader), task_function=mock.Mock())
    sweeper.launcher.launch = launch
    sweeper.check_job = lambda job: None
    sweeper.fingerprint = lambda settings: "a text"  # of hydra/sweeper=decide
    return launched


def swept(sweeper: Grid, folder: Path, result: Result, arguments: Sequence[str] = ()) -> list:
    """Let a sweeper run such jobs to the end; return them."""
    jobs = in_memory(sweeper, folder, result)
    sweeper.sweep([*arguments])
    return jobs


def tiny(folder: Path, **settings: object) -> list[str]:
    """Overrides for a run of half a second, and its text."""
    words = ["the cat sat on the mat.\n", "the café is öpen.\n", "a dog ran far away → home.\n"]
    (folder / "text.txt").write_text("".join(words[i * i % 3] for i in range(600)), encoding="utf-8")
    given = f"""data.path={folder}/text.txt data.cache_dir={folder}/cache tokenizer=byte device=cpu precision=fp32
        sample_tokens=0 model.n_layer=1 model.n_embd=32 model.block_size=16 batch_size=4"""
    return [*given.split(), *(f"{name}={value}" for name, value in settings.items())]


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *arguments]


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """train.py in a process of its own, whose workers end with it."""
    env = os.environ | environment
    return subprocess.run(command(*arguments), cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


def run_here(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """train.py in this process, which has imported torch."""
    return conftest.run_here("train.py", *arguments, cwd=cwd)


def refusal(*arguments: str, cwd: Path) -> str:
    """The sentence in which `train.py -m` refuses these arguments before it writes anything."""
    before, result = list(cwd.iterdir()), run_here("-m", *arguments, cwd=cwd)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert list(cwd.iterdir()) == before
    return result.stderr


def wait_for(file: Path, text: str) -> None:
    until = time.monotonic() + 120
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < until, f"{file} did not appear"
        time.sleep(0.01)

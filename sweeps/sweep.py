"""The parts of a sweep that no sweeper chooses: its launcher, its folder, its table."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir
from typing import Any
from uuid import uuid4

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf

from common.console import ending_signals, exit_on_signal
from common.errors import SettingsError, library_fault
from common.files import os_errors_named, user_path
from common.machine import processors
from common.text import flat, literal, quote, visible
from runs.directory import lock_run
from runs.summary import NAME as SUMMARY
from sweeps.hydra_versions import register_resolver

EXTRAS = {"joblib": "parallel", "submitit_local": "slurm", "submitit_slurm": "slurm"}  # that launchers need
OF_ONE_PROCESS = {"backend": "loky", "prefer": "processes", "tasks_per_node": 1, "nodes": 1}
"""The settings of launchers that make a job several processes, or a thread, with the values that they must have."""
PLACES = {
    "hydra.sweep.subdir": "a folder in it, as in 'hydra.sweep.subdir=NAME/${hydra.job.num}'",
    "hydra.output_subdir": "the name of a folder in each job's, as in hydra.output_subdir=.hydra",
}
"""The settings that name folders of jobs, each with an example."""
FILES = ("report.html", "leaderboard.csv", "leaderboard.md", "decide.md", "decide.json")
"""The files that a sweep writes."""


def jobs_at_once() -> int:
    """Return the number of jobs at a time: one for each accelerator, else for each core."""
    import torch

    try:
        import joblib  # type: ignore[import-untyped]  # optional
    except Exception as error:  # an import may fail by any
        install = f'pip install -e ".[{EXTRAS["joblib"]}]"'
        raise SettingsError(*library_fault("hydra/launcher=joblib needs joblib", "joblib", install, error)) from error

    try:
        cores = joblib.cpu_count()
    except ValueError as error:  # joblib reads its variable as a number
        count = os.environ.get("LOKY_MAX_CPU_COUNT")
        raise SettingsError(f"LOKY_MAX_CPU_COUNT={count} is no number of cores", "unset it, or set one") from error
    return torch.accelerator.device_count() or min(cores, processors())


register_resolver("jobs_at_once", jobs_at_once, use_cache=True)


def check_launcher(config: DictConfig) -> None:
    """Raise SettingsError for a launcher that is missing, or whose settings suit no sweep."""
    launcher = config.hydra.runtime.choices["hydra/launcher"]
    installed = [f"{plugin.__module__}.{plugin.__name__}" for plugin in Plugins.instance().discover(Launcher)]
    if launcher in EXTRAS and config.hydra.launcher._target_ not in installed:
        remedy = f'pip install -e ".[{EXTRAS[launcher]}]"'
        raise SettingsError(f"hydra/launcher={launcher} is not installed", remedy)
    if launcher == "joblib":
        jobs_at_once()  # OmegaConf would put its own words round an error of importing joblib
    for name, served in OF_ONE_PROCESS.items():
        value = OmegaConf.select(config, f"hydra.launcher.{name}")
        if value not in (None, served):
            remedy = "leave it out; docs/scaling.md has runs of several processes, by torchrun"
            raise SettingsError(f"hydra.launcher.{name}={value}, and each job of a sweep is one process", remedy)
    minutes = OmegaConf.select(config, "hydra.launcher.timeout_min")
    delay = (OmegaConf.select(config, "hydra.launcher.signal_delay_s") or 0) / 60
    if minutes is not None and minutes <= delay:
        remedy = f"name more than {delay:g}{', at most the limit of the partition' if delay else ''}"
        raise SettingsError(f"hydra.launcher.timeout_min={minutes} leaves a job no time", remedy)
    if OmegaConf.select(config, "hydra.job.chdir"):
        problem = "hydra.job.chdir=true moves jobs away from the folder in which their paths were typed"
        raise SettingsError(problem, "leave it out: a job's files are in its folder without it")
    folder = OmegaConf.select(config, "hydra.run.dir") or "."
    if folder != ".":  # as in conf/train.yaml
        raise SettingsError(f"hydra.run.dir={folder} is no folder of a sweep", f"type hydra.sweep.dir={folder}")
    check_places(flat({"hydra": OmegaConf.to_container(config.hydra)}))  # as written: the job's number is not known yet


def fix_folder(config: DictConfig) -> Path:
    """Return the sweep's folder, and write it into the settings of its jobs.

    Each parallel job composes its settings anew, and the default has the time in it. A plan has an empty folder,
    whatever runs are in the sweep's.
    """
    if config.dry_run:
        config.hydra.sweep.dir = f"{gettempdir()}/tinygpt-{uuid4().hex}"
    folder = user_path("hydra.sweep.dir", config.hydra.sweep.dir)
    if (folder / "checkpoints").is_dir() or (folder / SUMMARY).exists():
        raise SettingsError(f"hydra.sweep.dir={folder} is a run's folder", "name a sweep's, or a new one")
    # A sweep's folder has a .lock before its first file, and one of which `python -m sweeps` made a table has runs.
    of_others = [name for name in FILES if (folder / name).exists()]
    if of_others and not (folder / ".lock").exists() and not any(folder.glob(f"*/**/{SUMMARY}")):
        problem = (
            f"hydra.sweep.dir={folder} has a {' and a '.join(of_others)} of no sweep, which this one would replace"
        )
        raise SettingsError(problem, "name another folder, or move them away")
    config.hydra.sweep.dir = literal(str(folder))
    config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quote(folder)}")
    return folder


@contextmanager
def kept_folder(config: DictConfig, folder: Path, report: Callable[[], str], go_on: str = "") -> Iterator[None]:
    """Lock a sweep's folder, and print its report at the end; remove the folder of a plan.

    go_on: the override with which the same command goes on after a signal, which is printed too.
    """
    if config.dry_run:
        try:
            yield
        finally:
            rmtree(folder, ignore_errors=True)
        return
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    with ExitStack() as stack:
        with os_errors_named("hydra.sweep.dir", folder, "used", "name another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            lock_run(folder, stack, "hydra.sweep.dir")
        # Let a signal raise SystemExit, as Ctrl-C raises KeyboardInterrupt; the stack restores its handler.
        for kind in set(ending_signals()) - {signal.SIGINT}:
            stack.callback(signal.signal, kind, signal.signal(kind, exit_on_signal))
        end = ""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            if go_on:
                typed = [argument for argument in sys.argv if not argument.startswith("hydra.sweep.dir=")]
                end = f"\nsweep     stopped; to go on:  {shlex.join(['python', *typed])} {go_on}"
            raise
        finally:
            stack.close()
            text = f"{report()}{end}"
            if text:  # nothing, if no job has begun
                with suppress(OSError):  # of a pipe that nobody reads
                    print(visible(f"\n{text}"), flush=True)


def check_places(settings: Mapping[str, Any]) -> None:
    """Raise SettingsError for a folder of a job outside of the sweep's, where nobody would look."""
    for name, example in PLACES.items():
        place = Path(settings.get(name) or "")
        if place.is_absolute() or ".." in place.parts:
            raise SettingsError(f"{name}={place} is outside of the sweep's folder", f"write {example}")


def shared_folder(place: str) -> SettingsError:
    """Return the error for a folder that several jobs would have."""
    problem = f"hydra.sweep.subdir={place} is the folder of several jobs"
    return SettingsError(problem, "end it in /${hydra.job.num}, and quote it for the shell")


def settings_asked(config: DictConfig, node: str) -> str:
    """Return the overrides typed for a node, such as hydra.launcher; without any its name."""
    hydra: Any = OmegaConf.to_container(config.hydra)  # as written
    typed = hydra.get("overrides", {}).get("hydra", [])
    asked = [override for override in typed if override.lstrip("+").startswith(f"{node}.")]
    return ", ".join(asked) or f"the settings of {node}"


def in_the_way(error: FileExistsError) -> SettingsError:
    """Return the error for a file in the place of a job's folder."""
    problem = f"a job needs the folder {error.filename}, which is a file"
    return SettingsError(problem, "remove it, or give another hydra.sweep.dir")

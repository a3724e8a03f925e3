"""Sweeps: every combination of the values given is a job; the jobs share a folder, which ends in a leaderboard."""

import itertools
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from console import ending_signals
from errors import SettingsError, first_line
from runs.directory import lock_run
from runs.formatting import hydra_quoted, quote, visible
from sweeps.leaderboard import write_leaderboard

EXTRAS = {"joblib": "parallel", "submitit_local": "slurm", "submitit_slurm": "slurm"}  # that launchers need


def jobs_at_once() -> int:
    """Return how many jobs this machine trains at a time: one for each accelerator, or else for each core."""
    import joblib  # type: ignore[import-untyped]  # optional
    import torch

    return torch.cuda.device_count() or int(torch.backends.mps.is_available()) or joblib.cpu_count()


OmegaConf.register_new_resolver("jobs_at_once", jobs_at_once, use_cache=True, replace=True)


class Grid(Sweeper):
    """Runs every combination of the values given, with every variant; a job that fails does not end the others."""

    config: DictConfig
    hydra_context: HydraContext
    launcher: Launcher

    def __init__(self, params: dict[str, str] | None = None, variants: list[str] | None = None) -> None:
        self.params = [f"{name}={values}" for name, values in (params or {}).items()]
        self.variants = [variant.split() for variant in variants or [""]]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        launcher = self.launcher_name = config.hydra.runtime.choices["hydra/launcher"]
        if launcher in EXTRAS and config.hydra.launcher._target_ not in Plugins.instance().class_name_to_class:
            raise SettingsError(f'hydra/launcher={launcher} is not installed: pip install -e ".[{EXTRAS[launcher]}]".')
        if config.dry_run:  # it leaves nothing behind
            config.hydra.sweep.dir = "."
            config.hydra.overrides.hydra.append("hydra.sweep.subdir=.")
        self.folder = Path(config.hydra.sweep.dir)
        # Each parallel job composes its settings anew, and would make up another default folder.
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quote(self.folder)}")
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Run the jobs that are not finished, once all can be composed; SettingsError when some failed."""
        overrides = self.parse([*self.params, *arguments])
        values = {o.get_key_element(): assignments(o) for o in overrides}  # what is typed replaces an experiment's
        own = {name for override in self.parse(self.variants[0]) if (name := override.get_key_element())}
        if typed := own & {o.get_key_element() for o in self.parse(arguments)}:
            remedy = """leave it out, or type 'hydra.sweeper.variants=["NAME=VALUE",…]'"""
            raise SettingsError(f"{min(typed)} is what hydra.sweeper.variants compares: {remedy}.")
        jobs = [[*job, *variant] for job in itertools.product(*values.values()) for variant in self.variants]
        self.validate_batch_is_legal(jobs)
        with self.keeping_folder():
            results = self.launch(jobs, 0)
        if failed := sum(result.status == JobStatus.FAILED for result in results):
            reasons = f"the reasons are above and at the end of {self.folder / 'leaderboard.md'}"
            raise SettingsError(f"{failed} of {len(jobs)} jobs failed: {reasons}.")

    def parse(self, arguments: list[str]) -> list[Override]:
        return OverridesParser.create(config_loader=self.hydra_context.config_loader).parse_overrides(arguments)

    def launch(self, jobs: Sequence[Sequence[str]], number: int) -> Sequence[JobReturn]:
        """Run jobs, the first of which is job `number`; SettingsError when a parallel launcher gives up."""
        try:
            return self.launcher.launch(jobs, initial_job_idx=number)
        except Exception as error:
            if self.launcher_name == "basic":
                raise
            problem = f"hydra/launcher={self.launcher_name} gave up ({first_line(error)})"
            again = f"the same command with {hydra_quoted('hydra.sweep.dir', self.folder)} goes on"
            raise SettingsError(f"{problem}: change the settings of hydra.launcher; {again}.") from error

    @contextmanager
    def keeping_folder(self) -> Iterator[None]:
        """Lock the sweep's folder; whatever ends the sweep, print its leaderboard, and after a signal how to go on."""
        if self.config.dry_run or os.environ.get("RANK", "0") != "0":
            yield
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = lock_run(self.folder)
        except (OSError, SettingsError) as error:
            why = f"cannot be written ({error})" if isinstance(error, OSError) else "is in use by another sweep"
            raise SettingsError(f"hydra.sweep.dir={self.folder} {why}: name another folder.") from error
        kinds = [kind for kind in ending_signals() if kind != signal.SIGINT]
        earlier = [signal.signal(kind, lambda number, _: sys.exit(128 + number)) for kind in kinds]
        end = ""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            typed = [argument for argument in sys.argv if not argument.startswith("hydra.sweep.dir=")]
            again = f"{shlex.join(['python', *typed])} {hydra_quoted('hydra.sweep.dir', self.folder)}"
            end = f"\nsweep     stopped; to go on:  {again}"
            raise
        finally:
            for kind, handler in zip(kinds, earlier, strict=True):
                signal.signal(kind, handler)
            lock.release()
            with suppress(OSError):  # nobody reads it
                print(visible(f"\n{write_leaderboard(self.folder)}{end}"), flush=True)


def assignments(override: Override) -> list[str]:
    """Return an override once for each of its values; SettingsError for an interval."""
    if not override.is_sweep_override():
        return [f"{override.get_key_element()}={override.get_value_element_as_str()}"]
    if not override.is_discrete_sweep():
        raise SettingsError(f"{override.input_line} needs hydra/sweeper=optuna; else list values, as in 1,2,3.")
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]

"""Search with Optuna: Hydra finds this sweeper here by its folder's name.

    python train.py -m hydra/sweeper=optuna 'optimizer.lr=tag(log,interval(0.005,0.05))' model.n_head=2,4,8

The official hydra-optuna-sweeper (1.3.0) works with this Hydra, but wants Optuna below 3, of 2022; it hears of a
run's losses only at its end, so it prunes none, and a search or run that was stopped begins anew.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, IntegerNode, OmegaConf

from errors import DataError, SettingsError
from runs.quoting import is_dry_run, quote
from sweeps.launch import RANGES
from sweeps.trial import JOURNAL, open_study

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

log = logging.getLogger("tinygpt")

FAILED = "failed"
"""Where a trial keeps the sentence that it failed with."""
AGAIN = "again"
"""Where a trial keeps the number of an earlier one with the same settings, which it was left out for."""


class OptunaSearch(Sweeper):
    """Runs n_trials trials, n_jobs at a time, to find the settings with the lowest validation bits per byte."""

    def __init__(self, n_trials: int, n_jobs: int, seed: int, prune: bool) -> None:
        self.n_trials, self.n_jobs, self.seed, self.prune = n_trials, n_jobs, seed, prune

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config
        self.folder = Path(config.hydra.sweep.dir)
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        arguments = [argument for argument in arguments if not argument.startswith("sweep.resume=")]
        self.check(arguments)
        space, fixed = self.read_space(arguments)
        self.check_space(space, fixed)
        study = self.open_study(arguments)
        OmegaConf.save(self.config, self.folder / "multirun.yaml")
        here = f"hydra.sweep.dir={quote(self.folder)}"  # each job would make up a name of its own
        for trials in self.batches(study, space):
            overrides = [[*fixed, *settings_of(trial), here] for trial in trials]
            results = self.launcher.launch(overrides, initial_job_idx=trials[0].number)
            for trial, result in zip(trials, results, strict=True):
                tell(study, trial.number, result)
        self.conclude(study, fixed)

    def check(self, arguments: list[str]) -> None:
        """Raise SettingsError for what the search itself cannot do."""
        try:
            import optuna  # noqa: F401
        except ImportError:
            raise SettingsError('hydra/sweeper=optuna is not installed: pip install -e ".[search]".') from None
        for name, least in (("n_trials", 1), ("n_jobs", 1), ("seed", 0)):
            value = getattr(self, name)
            if name == "n_jobs" and value == -1:
                import joblib

                self.n_jobs = joblib.cpu_count()
            elif not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SettingsError(f"hydra.sweeper.{name}={value} must be a whole number from {least}.")
        if not isinstance(self.prune, bool):
            raise SettingsError(f"hydra.sweeper.prune={self.prune} must be true or false.")
        if is_dry_run(arguments):
            raise SettingsError(
                "dry_run=true trains nothing that a search could compare: leave out hydra/sweeper=optuna."
            )
        if "RANK" in os.environ:
            raise SettingsError("hydra/sweeper=optuna starts runs of one process each: leave out torchrun.")

    def read_space(self, arguments: list[str]) -> tuple[dict[str, BaseDistribution], list[str]]:
        """What the overrides leave open, with its range, and those that are the same for every run."""
        overrides = OverridesParser.create(config_loader=self.context.config_loader).parse_overrides(arguments)
        space, fixed = {}, {}
        for override in overrides:
            key = override.get_key_element()
            if key in space or key in fixed:
                raise SettingsError(f"{key} is given twice: leave out one of them.")
            if override.is_sweep_override():
                space[key] = self.distribution(override)
            else:
                fixed[key] = override.input_line
        if not space:
            raise SettingsError(f"hydra/sweeper=optuna has nothing to search: ranges are {RANGES}.")
        return space, list(fixed.values())

    def distribution(self, override: Override) -> BaseDistribution:
        """The values that a setting may take; a setting of whole numbers takes those of an interval only."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        sweep: Any = override.value()
        if override.is_interval_sweep():
            low, high, is_log = sweep.start, sweep.end, "log" in sweep.tags
            if not low < high:
                raise SettingsError(f"{override.input_line} is empty: write the smaller number first.")
            if is_log and low <= 0:
                raise SettingsError(
                    f"{override.input_line} must begin above 0, because it is searched by its logarithm."
                )
            if self.is_whole(override.key_or_group) or isinstance(low, int):
                return IntDistribution(int(low), int(high), log=is_log)
            return FloatDistribution(low, high, log=is_log)
        if override.is_range_sweep() and all(isinstance(x, int) for x in (sweep.start, sweep.stop, sweep.step)):
            values = range(sweep.start, sweep.stop, sweep.step)
            if values:
                return IntDistribution(min(values), max(values), step=abs(sweep.step))
        values = list(override.sweep_string_iterator())
        if not values:
            raise SettingsError(f"{override.input_line} holds no value.")
        return CategoricalDistribution(list(dict.fromkeys(values)))

    def is_whole(self, key: str) -> bool:
        """Whether a setting takes whole numbers only."""
        group, _, name = key.rpartition(".")
        settings = OmegaConf.select(self.config, group) if group else self.config
        return OmegaConf.is_dict(settings) and name in settings and isinstance(settings._get_node(name), IntegerNode)

    def check_space(self, space: dict[str, BaseDistribution], fixed: list[str]) -> None:
        """Let Hydra find what is no setting, no option or no value for it, before a run begins."""
        ends = {name: getattr(known, "choices", None) or (known.low, known.high) for name, known in space.items()}
        first = {name: values[0] for name, values in ends.items()}
        for name, values in ends.items():
            for value in values:
                tried = first | {name: value}
                overrides = [f"{key}={setting}" for key, setting in tried.items()]
                self.context.config_loader.load_sweep_config(self.config, [*fixed, *overrides])

    def open_study(self, arguments: list[str]) -> Study:
        """The study of this search, the one in its folder if it was stopped there.

        Raises SettingsError when that folder is another search's, or a sweep's without a search.
        """
        if not (self.folder / JOURNAL).is_file() and any(self.folder.glob("*/checkpoints")):
            raise SettingsError(f"hydra.sweep.dir={self.folder} holds runs but no search: choose another folder.")
        try:
            study = open_study(self.folder)
        except Exception as error:
            raise SettingsError(
                f"hydra.sweep.dir={self.folder}: {JOURNAL} cannot be read ({error}): start the search anew."
            ) from error
        now = sorted([*arguments, f"hydra.sweeper.seed={self.seed}", f"hydra.sweeper.prune={self.prune}"])
        before = study.user_attrs.get("overrides", now)
        if before != now:
            left_out, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
            raise SettingsError(
                f"hydra.sweep.dir={self.folder} holds a search with {', '.join(left_out) or 'less'} instead of "
                f"{', '.join(new) or 'nothing'}: give the command it was started with, or another folder."
            )
        study.set_user_attr("overrides", now)
        study.set_user_attr("prune", self.prune)
        return study

    def batches(self, study: Study, space: dict[str, BaseDistribution]) -> Iterator[list[Trial | FrozenTrial]]:
        """Trials to run at once, numbered without gaps, because Hydra counts jobs so: first those that were stopped."""
        from optuna.trial import TrialState

        batch: list[Trial | FrozenTrial] = []
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            if batch and (len(batch) == self.n_jobs or trial.number != batch[-1].number + 1):
                yield batch
                batch = []
            batch.append(trial)
        if batch:
            yield batch
        while (asked := len(study.trials)) < self.n_trials and not is_exhausted(study, space):
            batch = []
            study = open_study(self.folder, seed=self.seed + asked)  # so that a stopped search asks for the same
            while len(batch) < self.n_jobs and asked + len(batch) < self.n_trials:
                trial = study.ask(space)
                if twin := find_twin(study, trial):
                    log.info("run %d would be run %d again, and is left out", trial.number, twin.number)
                    trial.set_user_attr(AGAIN, twin.number)
                    study.tell(trial, twin.value if twin.state == TrialState.COMPLETE else None, twin.state)
                    break
                batch.append(trial)
            if batch:
                yield batch

    def conclude(self, study: Study, fixed: list[str]) -> None:
        """Say, and keep in best.txt, which settings were the best, as a command that trains with them."""
        from optuna.trial import TrialState

        asked = study.get_trials(deepcopy=False)
        ran = [trial for trial in asked if AGAIN not in trial.user_attrs]
        done = sum(trial.state == TrialState.COMPLETE for trial in ran)
        failed = sum(trial.state == TrialState.FAIL or FAILED in trial.user_attrs for trial in ran)
        if not done:
            raise SettingsError(
                f"all {len(ran)} runs of the search failed: their reasons are above; search settings that fit together."
            )
        counts = [(done, "finished"), (len(ran) - done - failed, "pruned"), (failed, "failed")]
        counts += [(len(asked) - len(ran), "left out, the same again")]
        best = study.best_trial
        command = shlex.join(["python", "train.py", *fixed, *settings_of(best)])
        (self.folder / "best.txt").write_text(command + "\n", encoding="utf-8")
        print(
            f"\nsearch    {', '.join(f'{count} {what}' for count, what in counts if count)}\n"
            f"best      {best.value:.4f} bits/byte, run {best.number}: {self.folder / str(best.number)}\n"
            f"again     {command}",
            flush=True,
        )


def settings_of(trial: Trial | FrozenTrial) -> list[str]:
    """The overrides that a trial stands for; numbers of four digits, which a person can copy."""
    settings = []
    for name, value in trial.params.items():
        if isinstance(value, float):
            known = trial.distributions[name]
            value = min(max(float(f"{value:.4g}"), known.low), known.high)
        settings.append(f"{name}={value}")
    return settings


def is_exhausted(study: Study, space: dict[str, BaseDistribution]) -> bool:
    """Whether every combination there is has been tried."""
    sizes = [
        len(known.choices) if hasattr(known, "choices") else (known.high - known.low) // known.step + 1
        for known in space.values()
        if hasattr(known, "choices") or isinstance(known.low, int)
    ]
    tried = {tuple(settings_of(trial)) for trial in study.get_trials(deepcopy=False)}
    return len(sizes) == len(space) and len(tried) >= math.prod(sizes)


def find_twin(study: Study, trial: Trial) -> FrozenTrial | None:
    """An earlier trial with the same settings, which would come to the same end."""
    from optuna.trial import TrialState

    ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    return next(
        (twin for twin in ended if AGAIN not in twin.user_attrs and settings_of(twin) == settings_of(trial)), None
    )


def tell(study: Study, number: int, result: JobReturn) -> None:
    """Record what became of a trial: the best bits per byte of its evaluations, or that it failed.

    A mistake in the settings, and training that diverged, are known to the sampler as pruned: it learns
    from these to look elsewhere, and nothing from trials that failed.
    """
    from optuna.trial import Trial, TrialState

    trial = study.trials[number]
    error = None if result.status == JobStatus.COMPLETED else result._return_value
    if error is None and trial.intermediate_values:
        study.tell(number, min(trial.intermediate_values.values()), skip_if_finished=True)  # the pruned have told
    elif isinstance(error, (SettingsError, DataError)):
        Trial(study, trial._trial_id).set_user_attr(FAILED, str(error))
        study.tell(number, state=TrialState.PRUNED)
    else:
        log.error("run %d failed", number, exc_info=error)
        study.tell(number, state=TrialState.FAIL)

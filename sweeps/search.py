"""Search with Optuna: each job's settings depend on what the jobs before found.

python train.py -m hydra/sweeper=optuna 'optimizer.lr=tag(log,interval(0.005,0.05))' model.n_head=2,4,8

The official hydra-optuna-sweeper (1.3.0) wants an Optuna below 3, of 2022, and begins a stopped search anew.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from data.files import replace_text
from errors import SettingsError, first_line
from runs.summary import Summary, read_job, read_summary
from runs.text import visible
from sweeps.grid import Grid

if TYPE_CHECKING:  # optional, and slow to import
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


class Search(Grid):
    """Runs n_trials trials, n_jobs at a time, to find the settings with the lowest bits per byte, or loss of a task.

    What Optuna asks for follows from the seed and the results before, so that the jobs' folders are all the state of
    a search: one that was stopped asks for the same again, and finds it done.
    """

    def __init__(self, n_trials: int, n_jobs: int, seed: int, **others: Any) -> None:
        super().__init__(**others)
        self.n_trials, self.n_jobs, self.seed = n_trials, n_jobs, seed

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials that are left, once all can be composed, then print the best settings."""
        self.check_adaptive(n_trials=1, n_jobs=1, seed=0)
        if self.variants != [[]]:
            remedy = "leave out hydra/sweeper=optuna, or name what may be chosen as attention=sdpa,mla"
            raise SettingsError("hydra.sweeper.variants are compared, all of them, not searched", remedy)
        try:
            import optuna
        except ImportError:
            raise SettingsError("hydra/sweeper=optuna is not installed", 'pip install -e ".[search]"') from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        (space, fixed), study = self.read_space(arguments), optuna.create_study()
        with self.keeping_folder():
            while (asked := len(study.trials)) < self.n_trials:
                study.sampler = optuna.samplers.TPESampler(seed=self.seed + asked, constant_liar=True)
                trials = [study.ask(space) for _ in range(min(self.n_jobs, self.n_trials - asked))]
                self.run_trials(study, trials, fixed)
            self.conclude(study, fixed)

    def run_trials(self, study: Study, trials: list[Trial], fixed: list[str]) -> None:
        """Run trials side by side, but for those that have failed before, and tell the study what they reached."""
        from optuna.trial import TrialState

        jobs = {trial.number: [*fixed, *settings_of(trial)] for trial in trials}
        left = [number for number, job in jobs.items() if not self.has_failed(number, job)]
        named = [[*jobs[number], f"hydra.sweep.subdir={number}"] for number in left]
        for number, result in zip(left, self.launch(named, trials[0].number), strict=True):
            if result.status == JobStatus.FAILED and not self.has_failed(number, jobs[number]):
                raise result._return_value  # the job could not begin: its folder is another's, or closed
        for trial in trials:
            failed = self.has_failed(trial.number, jobs[trial.number])
            reached = None if failed else loss_of(self.folder / str(trial.number))[1]
            # The sampler learns to look elsewhere.
            study.tell(trial, reached, state=TrialState.PRUNED if reached is None else None)

    def has_failed(self, number: int, job: list[str]) -> bool:
        record = read_job(self.folder / str(number))
        return bool(record and record.reason and sorted(record.overrides) == sorted(job))

    def read_space(self, arguments: list[str]) -> tuple[dict[str, BaseDistribution], list[str]]:
        """Return the settings to search, each with its range, and the overrides that every job has."""
        given = self.read(arguments)
        space = {name: self.distribution(o) for name, o in given.items() if o.is_sweep_override()}
        if not space:
            remedy = "give a range, as in 'optimizer.lr=tag(log,interval(0.005,0.05))' or model.n_head=2,4,8"
            raise SettingsError("hydra/sweeper=optuna has nothing to search", remedy)
        (fixed,) = self.split_arguments([o for o in given.values() if not o.is_sweep_override()], None)[0]
        known: dict[str, Any] = dict(space)  # each value, of intervals both ends, is composed once to find mistakes
        ends = {name: getattr(each, "choices", None) or (each.low, each.high) for name, each in known.items()}
        first = {name: f"{name}={values[0]}" for name, values in ends.items()}
        tried = [first | {name: f"{name}={value}"} for name, values in ends.items() for value in values]
        self.validate_batch_is_legal([[*fixed, *job.values()] for job in tried])
        return space, fixed

    def distribution(self, override: Override) -> BaseDistribution:
        """Return the values that a setting may take; an interval's are whole numbers where the setting is one."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        try:
            if not override.is_interval_sweep():
                return CategoricalDistribution(list(dict.fromkeys(override.sweep_string_iterator())))
            sweep: Any = override.value()
            if int in (type(sweep.start), type(OmegaConf.select(self.config, override.key_or_group))):
                return IntDistribution(int(sweep.start), int(sweep.end), log="log" in sweep.tags)
            return FloatDistribution(sweep.start, sweep.end, log="log" in sweep.tags)
        except ValueError as error:
            raise SettingsError(f"{override.input_line} cannot be searched ({first_line(error)})") from error

    def conclude(self, study: Study, fixed: list[str]) -> None:
        """Print, and keep in best.txt, the best settings as a command that trains with them."""
        done = sum(trial.value is not None for trial in study.trials)
        if not done:
            remedy = "the reasons are above; search settings that fit together"
            raise SettingsError(f"all {self.n_trials} runs of the search failed", remedy)
        best = study.best_trial
        command, folder = shlex.join(["python", "train.py", *fixed, *settings_of(best)]), self.folder / str(best.number)
        replace_text(self.folder / "best.txt", f"{command}\n")
        failed = f", {self.n_trials - done} failed" if done < self.n_trials else ""
        print(f"\nsearch    {done} finished{failed}")
        print(visible(f"best      {loss_of(folder)[0]} {best.value:.4f}, run {best.number}: {folder}"))
        print(visible(f"again     {command}"), flush=True)


def loss_of(folder: Path) -> tuple[str, float | None]:
    """Return what the search makes small, of a run: its bits per byte, or the loss of a task that has none."""
    summary = read_summary(folder) or Summary()
    name = "val_bpb" if summary.val_accuracy is None else "val_loss"
    return name, getattr(summary, name)


def settings_of(trial: Trial | FrozenTrial) -> list[str]:
    """Return the overrides that a trial stands for; numbers have four digits, which a person can copy."""
    settings = []
    for name, value in trial.params.items():
        if isinstance(value, float):
            known: Any = trial.distributions[name]
            value = min(max(float(f"{value:.4g}"), known.low), known.high)
        settings.append(f"{name}={value}")
    return settings

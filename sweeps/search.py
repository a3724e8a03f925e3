"""Search with Optuna: each job's settings depend on what the jobs before found.

python train.py -m hydra/sweeper=optuna 'optimizer.lr=tag(log,interval(0.005,0.05))' model.n_head=2,4,8

The official hydra-optuna-sweeper (1.3.0) wants an Optuna below 3, of 2022, and begins a stopped search anew.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from hydra.core.utils import JobStatus
from omegaconf import IntegerNode, OmegaConf

from errors import SettingsError, first_line
from runs.formatting import RANGES, visible
from runs.summary import read_summary
from sweeps.grid import Grid, jobs_at_once

if TYPE_CHECKING:  # optional, and slow to import
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

JOURNAL = "search.journal"


class Search(Grid):
    """Runs n_trials trials, n_jobs at a time, to find the settings with the lowest bits per byte, or loss of a task."""

    def __init__(
        self,
        n_trials: int,
        n_jobs: int,
        seed: int,
        params: dict[str, str] | None = None,
        variants: list[str] | None = None,
    ) -> None:
        super().__init__(params, variants)
        self.n_trials, self.n_jobs, self.seed = n_trials, n_jobs, seed

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials that are left, once all can be composed, then print the best settings."""
        self.check()
        from optuna.trial import TrialState

        space, fixed = self.read_space(arguments)
        with self.keeping_folder():
            study = self.open_study([*self.params, *arguments])
            for trials in self.batches(study, space):
                jobs = [[*fixed, *settings_of(trial)] for trial in trials]
                for trial, result in zip(trials, self.launch(jobs, trials[0].number), strict=True):
                    assert result.hydra_cfg is not None
                    reached, _ = loss_of(Path(result.hydra_cfg.hydra.runtime.output_dir))
                    if result.status == JobStatus.COMPLETED and reached is not None:
                        study.tell(trial.number, reached)
                    else:  # from pruned trials the sampler learns to look elsewhere, from failed ones nothing
                        is_mistake = isinstance(result._return_value, SettingsError)  # training that diverged is one
                        study.tell(trial.number, state=TrialState.PRUNED if is_mistake else TrialState.FAIL)
            self.conclude(study, fixed)

    def check(self) -> None:
        """Raise SettingsError for what the search itself cannot do."""
        if self.variants != [[]]:
            remedy = "leave out hydra/sweeper=optuna, or name what may be chosen as attention=sdpa,mla"
            raise SettingsError(f"hydra.sweeper.variants are compared, all of them, not searched: {remedy}.")
        try:
            import optuna  # noqa: F401
        except ImportError:
            raise SettingsError('hydra/sweeper=optuna is not installed: pip install -e ".[search]".') from None
        if self.n_jobs == -1:
            self.n_jobs = jobs_at_once()
        for name, least in (("n_trials", 1), ("n_jobs", 1), ("seed", 0)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise SettingsError(f"hydra.sweeper.{name}={value} must be a whole number from {least}.")
        if self.config.dry_run:
            raise SettingsError("dry_run=true trains nothing to compare: leave out hydra/sweeper=optuna.")
        if "RANK" in os.environ:
            raise SettingsError("hydra/sweeper=optuna starts runs of one process each: leave out torchrun.")

    def read_space(self, arguments: list[str]) -> tuple[dict[str, BaseDistribution], list[str]]:
        """Return the settings to search, each with its range, and the overrides that every job has."""
        given = {o.get_key_element(): o for o in self.parse([*self.params, *arguments])}  # typed ones come last
        space = {name: self.distribution(o) for name, o in given.items() if o.is_sweep_override()}
        if not space:
            raise SettingsError(f"hydra/sweeper=optuna has nothing to search: ranges are {RANGES}.")
        fixed = [override.input_line or "" for override in given.values() if not override.is_sweep_override()]
        known: dict[str, Any] = dict(space)  # each value, of intervals both ends, is composed once to find mistakes
        ends = {name: getattr(each, "choices", None) or (each.low, each.high) for name, each in known.items()}
        tried = range(max(map(len, ends.values())))
        self.validate_batch_is_legal([[*fixed, *(f"{k}={v[i % len(v)]}" for k, v in ends.items())] for i in tried])
        return space, fixed

    def distribution(self, override: Override) -> BaseDistribution:
        """Return the values that a setting may take; an interval's are whole numbers where the setting is one."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        try:
            if not override.is_interval_sweep():
                return CategoricalDistribution(list(dict.fromkeys(override.sweep_string_iterator())))
            sweep: Any = override.value()
            group, _, name = override.key_or_group.rpartition(".")
            settings = OmegaConf.select(self.config, group) if group else self.config
            is_whole = OmegaConf.is_dict(settings) and isinstance(settings._get_node(name), IntegerNode)
            if is_whole or isinstance(sweep.start, int):
                return IntDistribution(int(sweep.start), int(sweep.end), log="log" in sweep.tags)
            return FloatDistribution(sweep.start, sweep.end, log="log" in sweep.tags)
        except ValueError as error:
            raise SettingsError(f"{override.input_line} cannot be searched ({first_line(error)}).") from error

    def open_study(self, asked: list[str]) -> Study:
        """Return the study of this search, or the stopped one in its folder; SettingsError when that is another."""
        where = f"hydra.sweep.dir={self.folder}"
        try:
            study = open_study(self.folder)
        except Exception as error:  # whatever Optuna makes of the file
            why = first_line(error)
            raise SettingsError(f"{where}: {JOURNAL} cannot be read ({why}): start the search anew.") from error
        now = sorted([*asked, f"hydra.sweeper.seed={self.seed}"])
        before = study.user_attrs.get("asked", now)
        if before != now:
            other, new = (" ".join(sorted(set(a) - set(b))) or "less" for a, b in ((before, now), (now, before)))
            raise SettingsError(f"{where} holds a search with {other}, not {new}: give its command, or another folder.")
        study.set_user_attr("asked", now)
        return study

    def batches(self, study: Study, space: dict[str, BaseDistribution]) -> Iterator[list[Trial] | list[FrozenTrial]]:
        """Yield trials to run at once, numbered without gaps as Hydra numbers jobs; first those that were stopped."""
        from optuna.trial import TrialState

        if stopped := study.get_trials(states=(TrialState.RUNNING,)):
            yield stopped
        while (asked := len(study.trials)) < self.n_trials:
            study = open_study(self.folder, seed=self.seed + asked)  # so that a stopped search asks for the same
            yield [study.ask(space) for _ in range(min(self.n_jobs, self.n_trials - asked))]

    def conclude(self, study: Study, fixed: list[str]) -> None:
        """Print, and keep in best.txt, the best settings as a command that trains with them."""
        count, done = len(study.trials), sum(trial.state.name == "COMPLETE" for trial in study.trials)
        if not done:
            remedy = "the reasons are above; search settings that fit together"
            raise SettingsError(f"all {count} runs of the search failed: {remedy}.")
        best = study.best_trial
        command = shlex.join(["python", "train.py", *fixed, *settings_of(best)])
        (self.folder / "best.txt").write_text(command + "\n", encoding="utf-8")
        print(f"\nsearch    {done} finished" + (f", {count - done} failed" if done < count else ""))
        folder = self.folder / str(best.number)
        print(f"best      {best.value:.4f} {loss_of(folder)[1]}, run {best.number}: {visible(folder)}")
        print(visible(f"again     {command}"), flush=True)


def loss_of(folder: Path) -> tuple[float | None, str]:
    """Return what the search makes small, of a run, and its unit."""
    summary = read_summary(folder) or {}
    if summary.get("val_accuracy") is not None:
        return summary["val_loss"], "nats/answer"
    return summary.get("val_bpb"), "bits/byte"


def open_study(folder: Path, seed: int = 0) -> Study:
    """Open the study in a search's folder; with the same history and seed it asks for the same settings next."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal = str(folder / JOURNAL)
    return optuna.create_study(
        study_name="search",
        storage=JournalStorage(JournalFileBackend(journal, lock_obj=JournalFileOpenLock(journal))),
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        load_if_exists=True,
    )


def settings_of(trial: Trial | FrozenTrial) -> list[str]:
    """Return the overrides that a trial stands for; numbers have four digits, which a person can copy."""
    settings = []
    for name, value in trial.params.items():
        if isinstance(value, float):
            known: Any = trial.distributions[name]
            value = min(max(float(f"{value:.4g}"), known.low), known.high)
        settings.append(f"{name}={value}")
    return settings

"""Search with Optuna: each job's settings follow from the results of the jobs before.

python train.py -m hydra/sweeper=optuna 'optimizer.lr=tag(log,interval(0.005,0.05))' model.n_head=2,4,8

The official hydra-optuna-sweeper (1.3.0) wants an Optuna below 3, of 2022, and begins a stopped search anew.
"""

import math
import random
import shlex
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from common.errors import SettingsError, naming
from common.files import replace_text
from common.text import visible
from runs.summary import Summary, read_job, read_summary
from sweeps.grid import Grid, combinations, error_of

TRIED = 200  # combinations tried for a value before it counts as impossible


@dataclass(eq=False, kw_only=True)
class Search(Grid):
    """Runs n_trials trials, n_jobs at a time, to find the settings with the lowest loss.

    A trial is a function of the seed and the results before it. So the folders of the jobs are all the state of a
    search: one that was stopped asks for the same trials again, and finds their results.
    """

    n_trials: int
    n_jobs: int
    seed: int

    def sweep(self, arguments: list[str]) -> None:
        """Check the values to search, run the trials that are left, and print the best settings."""
        # Check the settings of the search, and read its space.
        self.check_adaptive(n_trials=1, n_jobs=1, seed=0)
        if self.groups != [[]]:
            remedy = "leave out hydra/sweeper=optuna, or name what may be chosen as attention=sdpa,mla"
            raise SettingsError("hydra.sweeper.variants are compared, all of them, not searched", remedy)
        try:
            import optuna
        except ImportError:
            raise SettingsError("hydra/sweeper=optuna is not installed", 'pip install -e ".[search]"') from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        space, fixed = self.read_space(arguments)
        study = optuna.create_study()
        # Run the trials, n_jobs at a time: ask, run, tell. A new sampler for each batch keeps no state between them.
        with self.keeping_folder():
            while len(study.trials) < self.n_trials:
                asked = len(study.trials)
                seed = (self.seed + asked) % 2**32  # of these trials; numpy's seeds have 32 bits
                study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
                trials = [study.ask(space) for _ in range(min(self.n_jobs, self.n_trials - asked))]
                jobs = {trial.number: [*fixed, *settings_of(trial.params)] for trial in trials}
                for number, loss in self.run_trials(jobs).items():
                    study.tell(number, loss)
            self.conclude(self.folder / str(study.best_trial.number), [*fixed, *settings_of(study.best_params)])

    def read_space(self, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the checked distribution of each setting, and the overrides of all jobs."""
        given = self.read(arguments)
        space = {name: self.distribution(o) for name, o in given.items() if o.is_sweep_override()}
        if not space:
            remedy = "give a range, as in 'optimizer.lr=tag(log,interval(0.005,0.05))' or model.n_head=2,4,8"
            raise SettingsError("hydra/sweeper=optuna has nothing to search", remedy)
        (fixed,) = combinations(override for name, override in given.items() if name not in space)
        self.check_space(fixed, space)
        return space, fixed

    def check_space(self, fixed: list[str], space: dict[str, Any]) -> None:
        """Raise the mistake of a value that works with no combination of the others.

        Of an interval the ends are tried.
        """
        values = []
        for name, each in space.items():
            ends = getattr(each, "choices", None) or (each.low, each.high)
            values.append([settings_of({name: value})[0] for value in ends])
        chance = random.Random(0)
        for value in chain.from_iterable(values):
            # Draw the values of the others, as the search does: that covers a small space, and enough of a large one.
            drawn = [tuple(value if value in each else chance.choice(each) for each in values) for _ in range(TRIED)]
            for job in dict.fromkeys(drawn):
                try:
                    self.check_job([*fixed, *job])
                    break
                except SettingsError as error:
                    mistake = error
            else:
                raise mistake

    def distribution(self, override: Override) -> Any:
        """Return Optuna's distribution of a setting; of whole numbers if the setting is one."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        with naming(str(override.input_line)):
            if not override.is_interval_sweep():
                return CategoricalDistribution(list(dict.fromkeys(override.sweep_string_iterator())))
            sweep: Any = override.value()
            if int in (type(sweep.start), type(OmegaConf.select(self.config, override.key_or_group))):
                return IntDistribution(int(sweep.start), int(sweep.end), log="log" in sweep.tags)
            return FloatDistribution(sweep.start, sweep.end, log="log" in sweep.tags)

    def run_trials(self, jobs: dict[int, list[str]]) -> dict[int, float]:
        """Run trials side by side, without those that failed before; return the loss of each."""
        left = {number: job for number, job in jobs.items() if not self.has_failed(number, job)}
        named = [[*job, f"hydra.sweep.subdir={number}"] for number, job in left.items()]
        for (number, job), result in zip(left.items(), self.launch(named, min(jobs)), strict=True):
            error = error_of(result)
            if error and not self.has_failed(number, job):
                raise error  # the job could not begin: its folder is another's, or closed
        return {number: loss_of(self.folder / str(number))[1] for number in jobs}

    def has_failed(self, number: int, job: list[str]) -> bool:
        record = read_job(self.folder / str(number))
        return bool(record and record.reason and sorted(record.overrides) == sorted(job))

    def conclude(self, best: Path, settings: list[str]) -> None:
        """Print, and keep in best.txt, the best settings as a command that trains with them."""
        name, loss = loss_of(best)
        if loss == math.inf:
            remedy = "the reasons are above; search settings that fit together"
            raise SettingsError(f"all {self.n_trials} runs of the search failed", remedy)
        command = shlex.join(["python", "train.py", *settings])
        replace_text(self.folder / "best.txt", f"{command}\n")
        print(visible(f"\nbest      {name} {loss:.4f}, run {best.name}: {best}\nagain     {command}"), flush=True)


def loss_of(run: Path) -> tuple[str, float]:
    """Return the name and figure that the search minimizes: bits per byte, or a task's loss.

    Without a result it is infinite.
    """
    summary = read_summary(run) or Summary()
    name = "val_bpb" if summary.val_accuracy is None else "val_loss"
    reached = getattr(summary, name) if summary.status == "finished" else None
    return name, math.inf if reached is None else reached


def settings_of(params: dict[str, Any]) -> list[str]:
    """Return the overrides of a trial; numbers have six digits, which a person can copy."""
    return [f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in params.items()]

"""The sweepers of other packages, such as Optuna's, with the care that ours take.

They read values otherwise, know nothing of a folder in use, and end in tracebacks.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, InstantiationException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import SettingsError, first_line
from runs.summary import jobs_of_sweep, sentence_of
from sweeps.compositions import writable
from sweeps.leaderboard import write_leaderboard
from sweeps.ranges import check_numbers, check_values, expand_ranges, parse_values
from sweeps.sweep import check_launcher, fix_folder, in_the_way, kept_folder, settings_asked, shared_folder


@dataclass(eq=False)
class Search(Sweeper):
    """Runs the sweeper of a package, whose jobs follow from the results of earlier ones."""

    of_package: Any
    """The settings of hydra.sweeper."""

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> None:
        """Check the sweep's own settings, and make the package's sweeper."""
        config = writable(config)
        self.config: DictConfig = config
        self.loader = hydra_context.config_loader
        self.name = f"hydra/sweeper={config.hydra.runtime.choices['hydra/sweeper']}"

        # Check the settings of the sweep.
        if config.dry_run:
            problem = f"dry_run=true trains nothing, and {self.name} chooses jobs by results"
            raise SettingsError(problem, "leave one of them out")
        rate = self.of_package.get("max_failure_rate")
        if rate is not None and not 0 <= rate <= 1:
            problem = f"hydra.sweeper.max_failure_rate={rate} is no share of the jobs"
            raise SettingsError(problem, "name one from 0 to 1")
        direction = self.of_package.get("direction")
        if OmegaConf.is_list(direction) and len(direction) > 1:
            problem = f"hydra.sweeper.direction={direction} is of several figures, and a job has one"
            raise SettingsError(problem, "type minimize or maximize")
        check_launcher(config)
        place: Any = OmegaConf.to_container(config.hydra.sweep)
        if "${" not in str(place["subdir"]):
            raise shared_folder(place["subdir"])
        self.folder = fix_folder(config)

        # Make the package's sweeper.
        own: Any = OmegaConf.to_container(self.of_package)
        if own.get("params"):
            own["params"] = self.read_params(own["params"])
        config.hydra.sweeper = own
        with self.errors_named():
            self.sweeper = Plugins.instance().instantiate_sweeper(
                hydra_context=hydra_context, task_function=task_function, config=config
            )

    def sweep(self, arguments: list[str]) -> None:
        """Let the package's sweeper run its jobs; SettingsError if it gives up."""
        given = self.read(arguments)
        with kept_folder(self.config, self.folder, lambda: write_leaderboard(self.folder)), self.errors_named():
            self.sweeper.sweep(given)

    def read_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return an experiment's values, read as typed ones are, without those that are typed."""
        typed = {override.partition("=")[0].lstrip("+") for override in self.config.hydra.overrides.task}
        left = {name: value for name, value in params.items() if name not in typed}
        for name, value in left.items():
            if isinstance(value, str):  # other packages have mappings there
                (override,) = self.read([f"{name}={value}"])
                left[name] = override.partition("=")[2]
        return left

    def read(self, arguments: Sequence[str]) -> list[str]:
        """Return the overrides with choices alone in place of glob() and of ranges among values."""
        # Of a range alone the plugin's grid leaves the last value out, and more if its step is a fraction.
        is_grid = self.config.hydra.runtime.choices.get("hydra/sweeper/sampler") == "grid"
        return [as_choices(override, is_grid) for override in parse_values(self.loader, arguments)]

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Raise a SettingsError in place of an error of the package, or of one of its jobs."""
        try:
            yield
        except Exception as error:
            if self.is_of_job(error):
                remedy = "the reason is above"
                if "max_failure_rate" in self.of_package:
                    remedy += "; hydra.sweeper.max_failure_rate=1 goes on without jobs that fail"
                raise SettingsError("a job of the search failed", remedy) from error
            is_ours = isinstance(error, SettingsError | HydraException | OmegaConfBaseException)
            if is_ours and not isinstance(error, InstantiationException):
                raise
            raise self.fault(error.__cause__ or error) from error

    def is_of_job(self, error: BaseException) -> bool:
        """Return whether a job failed by this error, and has told it."""
        return any(record.reason == sentence_of(error) for _, record in jobs_of_sweep(self.folder))

    def fault(self, error: BaseException) -> SettingsError:
        """Return an error of the package as a sentence."""
        said = first_line(error)
        if type(error).__module__.startswith("sqlalchemy."):
            problem = f"hydra.sweeper.storage cannot be used ({said})"
            return SettingsError(problem, "write sqlite:///FILE.db, in a folder that is there")
        if isinstance(error, FileExistsError):
            return in_the_way(error)
        reasons = [record.reason for _, record in jobs_of_sweep(self.folder)]
        if said == "No trials are completed yet" or (reasons and all(reasons)):
            return SettingsError(f"no job of {self.name} has a result", "mend what made jobs fail, or run more")
        space = self.of_package.get("custom_search_space")
        if space and said.startswith("Error locating target"):
            problem = f"hydra.sweeper.custom_search_space={space} cannot be imported"
            return SettingsError(problem, "name FILE.FUNCTION, and set PYTHONPATH to the folder of FILE.py")
        if re.match("The `(low|step)` value must be", said):
            bounds = ", ".join(re.findall(r"\w+=[^,()\s]+", said)).rstrip(".")
            remedy = "write interval(A,B) or range(A,B,STEP), with A below B, and above 0 for tag(log,interval(A,B))"
            return SettingsError(f"a range with {bounds} cannot be drawn from", remedy)
        asked = settings_asked(self.config, "hydra.sweeper")
        return SettingsError(f"{self.name} gave up ({said})", f"change the ranges, or {asked}")


def as_choices(override: Override, is_grid: bool = False) -> str:
    """Return an override with its values in place of glob() and of ranges among others.

    Packages read neither. In a grid a range alone is replaced too. Raises SettingsError for values that are no values
    in any sweep.
    """
    value = override.value()
    if not isinstance(value, ChoiceSweep | Glob) and not (is_grid and isinstance(value, RangeSweep)):
        if override.is_sweep_override():
            check_numbers(override, value)
        return str(override.input_line)
    expand_ranges(override)
    check_values(override)
    return f"{override.get_key_element()}={','.join(override.sweep_string_iterator())}"

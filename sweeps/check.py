"""The settings of a sweep's jobs, composed and checked before the first one trains."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cache
from itertools import islice, product

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError

from errors import SettingsError
from hydra_command import GROUPS, check_job
from runs.text import visible

TRIED = 100  # combinations that a search's value is tried in


class Checker:
    """Composes jobs and finds those that cannot run. The choices of groups that jobs share are composed once."""

    def __init__(self, loader: ConfigLoader, config: DictConfig) -> None:
        self.loader, self.config, self.composed = loader, config, dict[tuple[str, ...], DictConfig]()
        parser = OverridesParser.create(config_loader=loader)
        self.parse = cache(parser.parse_override)
        # A cluster's machines have other devices and files, and a plan says itself what this one lacks.
        launcher = config.hydra.runtime.choices["hydra/launcher"]
        self.is_here = launcher != "submitit_slurm" and not config.dry_run

    def compose(self, job: Sequence[str]) -> DictConfig:
        """Return what Hydra composes for a job; its exceptions for groups' options and settings that do not exist."""
        overrides = [self.parse(text) for text in job]
        plain = [o for o in overrides if o.key_or_group not in GROUPS and not (o.is_delete() or o.is_hydra_override())]
        chosen = tuple(str(o.input_line) for o in overrides if o not in plain)
        if chosen not in self.composed:
            whole = self.loader.load_sweep_config(self.config, list(chosen))
            self.composed[chosen] = OmegaConf.masked_copy(whole, [str(name) for name in whole if name != "hydra"])
        config = deepcopy(self.composed[chosen])
        for override in plain:
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_add())
        return config

    def mistake_in(self, job: Sequence[str]) -> SettingsError | None:
        """Return why a job of these overrides cannot run, None if it can as far as is known before its text is read."""
        config = self.compose(job)
        try:
            check_job(config, job, is_here=self.is_here)
        except SettingsError as error:
            return error
        except (InterpolationKeyError, InterpolationResolutionError):
            pass  # of what a job alone knows, as its number
        return None

    def check_jobs(self, jobs: Iterable[tuple[list[str], list[str]]]) -> None:
        """Print why jobs, each a combination of values and a variant, cannot run.

        Raises SettingsError if no job can, or none with one of the values or variants.
        """
        works: set[str] = set()
        failed: dict[str, SettingsError] = {}
        reasons: dict[str, list[str]] = {}
        for number, (combination, variant) in enumerate(jobs):
            values = [*combination, " ".join(variant) or "no change"]
            if error := self.mistake_in([*combination, *variant]):
                failed = dict.fromkeys([*failed, *values], error) | failed
                reasons.setdefault(str(error), []).append(str(number))
            else:
                works.update(values)
        for reason, numbers in reasons.items():
            print(visible(f"job{'s' * (len(numbers) > 1)} {', '.join(numbers)} cannot run: {reason}"), flush=True)
        if failed and not works:
            raise next(iter(failed.values()))
        for value, error in failed.items():
            if value not in works:
                raise works_nowhere(value, error)

    def check_space(self, fixed: list[str], values: list[list[str]]) -> None:
        """Raise SettingsError for a value of a search that works with no values of the other settings."""
        works: set[str] = set()
        for place, value in ((place, value) for place, each in enumerate(values) for value in each):
            if value in works:
                continue
            jobs = product(*values[:place], [value], *values[place + 1 :])
            for job in islice(jobs, TRIED):
                mistake = self.mistake_in([*fixed, *job])
                if not mistake:
                    works.update(job)
                    break
            else:
                if mistake and not next(jobs, None):
                    raise works_nowhere(value, mistake)


def works_nowhere(value: str, mistake: SettingsError) -> SettingsError:
    value = value.replace("\\", "")  # by which Hydra marks colons
    return SettingsError(f"{value} works in no job ({mistake.problem})", mistake.remedy)

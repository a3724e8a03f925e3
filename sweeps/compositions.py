"""The compositions of a sweep's jobs, and what their options bring for the sweep itself.

A sweep reads its ranges, variants, launcher and folder once, before its jobs. An option that brings them, such as an
experiment, does so for the whole sweep; in a single job they would have no effect, and are refused.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import SettingsError
from common.text import flat
from sweeps.ranges import SETTINGS


class Compositions:
    """Composes the jobs of a sweep."""

    def __init__(self, loader: ConfigLoader, composed: DictConfig) -> None:
        """composed: the settings of the sweep, as Hydra composed them."""
        self.loader = loader
        self.composed = copy.deepcopy(composed)
        self.typed: Any = OmegaConf.to_container(composed.hydra.overrides.hydra)  # as they are written
        """The typed settings of Hydra."""

    def load(self, overrides: Iterable[str], typed: Sequence[str] | None = None) -> DictConfig:
        """Compose as load_sweep_config() of Hydra does.

        That one refuses options that bring settings of the sweep, from 1.4 on, and does not name the option.
        """
        cfg = self.loader.load_configuration(
            config_name=self.composed.hydra.job.config_name,
            overrides=[*(self.typed if typed is None else typed), *overrides],
            run_mode=RunMode.RUN,
        )
        OmegaConf.copy_cache(from_config=self.composed, to_config=cfg)  # the times and random names of the sweep
        return cfg

    def of_job(self, job: Sequence[str]) -> DictConfig:
        """Compose a job as Hydra will; SettingsError if it brings settings of the sweep."""
        cfg = self.load(job)
        brought = brings(cfg, self.composed)
        if brought:
            culprit = self.culprit(job, lambda without: not brings(without, self.composed))
            targets = [name.removesuffix("._target_") for name in brought if name.endswith("._target_")]
            named = targets or dict.fromkeys(".".join(name.split(".")[:3]) for name in brought)
            problem = f"{culprit} brings {', '.join(named)}, without effect in a job of a sweep"
            raise SettingsError(problem, f"give it a command of its own, -m {culprit}")
        return cfg

    def culprit(self, job: Sequence[str], is_right: Callable[[DictConfig], bool]) -> str:
        """Return the overrides without which a job's composition is right."""
        found = []
        for override in job:
            with suppress(HydraException, OmegaConfBaseException):  # of settings that exist with this override alone
                if is_right(self.load(other for other in job if other != override)):
                    found.append(override)
        return " ".join(found or job)

    def brought_by(self, option: str) -> list[str]:
        """Return the settings of the sweep that an option of a group brings."""
        # Without the typed settings of Hydra: some may exist with this option alone, such as those of its sweeper.
        typed = [one for one in self.typed if one.startswith(("hydra/", "hydra.searchpath"))]
        return brings(self.load([option], typed), self.load([], typed))

    def refuse_clash(self, typed: Iterable[Override]) -> None:
        """Raise SettingsError if two options bring the same setting of the sweep.

        They may be of one group, as in experiment=[a,b].
        """
        brought: dict[str, str] = {}
        for override in typed:
            if override.key_or_group in SETTINGS or override.is_sweep_override():
                continue
            options = override.value()
            for option in options if isinstance(options, list) else [options]:
                own = f"{override.key_or_group}={option}"
                for name in self.brought_by(own) if option else ():
                    if brought.setdefault(name, own) != own:
                        problem = f"{brought[name]} and {own} both bring {name}, and one would replace the other"
                        raise SettingsError(problem, "give each a command of its own")

    def refuse_replaced(self, ranges: dict[str, Override], typed: dict[str, Override]) -> None:
        """Raise SettingsError if an option brings values of its own group.

        An experiment of experiments would do so.
        """
        for name in ranges.keys() & typed.keys() - SETTINGS.keys():
            option = str(typed[name].input_line)
            if self.brought_by(option):
                values = ranges[name].input_line
                raise SettingsError(f"{option} brings {values}, whose place it takes itself", f"type {values}")


def brings(cfg: DictConfig, composed: DictConfig) -> list[str]:
    """Return the settings of a sweep that a composition has otherwise than `composed`."""
    own, others = map(sweep_settings, (cfg, composed))
    # By their letters, for nan is not equal to itself.
    return [name for name, value in own.items() if name not in others or repr(value) != repr(others[name])]


def sweep_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return the settings, as they are written, that a sweep reads."""
    hydra: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    parts = {name: hydra[name] for name in ("sweeper", "launcher", "callbacks")}
    return flat({"hydra": parts | {"sweep": {"dir": hydra["sweep"]["dir"]}}})


def writable(composed: DictConfig) -> DictConfig:
    """Return a copy that may be changed; Hydra 1.4 gives a sweep settings that may not."""
    copied = copy.deepcopy(composed)
    OmegaConf.set_readonly(copied, False)
    OmegaConf.set_readonly(copied.hydra, False)
    return copied

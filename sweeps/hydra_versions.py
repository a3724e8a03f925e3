"""hydra-core 1.3 and 1.4: what has another name or another argument in each.

Every difference is here, so that the end of 1.3 removes this file and little else.
"""

import argparse
import copy
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf

from common.errors import SettingsError, first_line

IS_1_3 = hydra.__version__.startswith("1.3.")
VERSION_BASE = {"version_base": "1.3"} if IS_1_3 else {}
"""For hydra.main() and initialize_config_dir(): 1.3 warns without it, 1.4 warns with it."""
TRUSTED = (
    "hydra._internal.core_plugins.*",
    "hydra_plugins.*",
)
"""What 1.4 may instantiate of a composition: launchers, sweepers and callbacks."""


def main(**arguments: Any) -> Callable[[Callable[[DictConfig], Any]], Callable[[], Any]]:
    """Return hydra.main(), in 1.4 with TRUSTED."""
    if not IS_1_3:
        arguments["execution_whitelist"] = TRUSTED
    return hydra.main(**VERSION_BASE, **arguments)


def register_resolver(name: str, resolver: Callable[..., Any], use_cache: bool = False) -> None:
    """Register the resolver of ${name:…}."""
    # The OmegaConf of 1.3 has a register_resolver too, of earlier versions.
    register: Any = OmegaConf.register_new_resolver if IS_1_3 else OmegaConf.register_resolver
    register(name, resolver, use_cache=use_cache, replace=True)


def store(**arguments: Any) -> None:
    """Store a configuration, in place of one that has its name."""
    if "replace" in inspect.signature(ConfigStore.store).parameters:  # from 1.4 on, which warns otherwise
        arguments["replace"] = True
    ConfigStore.instance().store(**arguments)


class ReadOnce(CachingConfigRepository):
    """The files of settings, each as it was when it was first read."""

    def __deepcopy__(self, memo: Any) -> "ReadOnce":
        return self  # for each composition, which Hydra gives a copy

    def load_config(self, config_path: str) -> Any:
        return copy.deepcopy(super().load_config(config_path))


def load_plugins() -> None:
    """Let Hydra import its plugins; SettingsError names one whose import fails.

    Hydra imports all that are installed, also those that no setting names.
    """
    try:
        Plugins.instance()
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        files.append(str(getattr(error, "filename", "")))  # a SyntaxError has its own
        of_plugins = [file for file in files if "hydra_plugins" in Path(file).parts]
        if not of_plugins:
            raise
        parts = Path(of_plugins[-1]).with_suffix("").parts
        package = parts[parts.index("hydra_plugins") + 1].replace("_", "-")
        problem = f"{of_plugins[-1]} cannot be imported by Hydra, which imports all its plugins ({first_line(error)})"
        remedy = f"remove that plugin, by pip uninstall {package} if pip has installed it"
        raise SettingsError(problem, remedy) from error


@contextmanager
def hydra_kept() -> Iterator[None]:
    """Give Hydra back as a program has set it up, and drop what is stored meanwhile."""
    load_plugins()  # which stores the settings of Hydra's own
    known: dict[type, Any] = Singleton._instances
    kept = {kind: known.pop(kind, None) for kind in (GlobalHydra, JobRuntime, VersionBase, ConfigStore)}
    known[ConfigStore] = copy.deepcopy(kept[ConfigStore])
    try:
        yield
    finally:
        for kind, theirs in kept.items():
            known.pop(kind, None)
            if theirs is not None:
                known[kind] = theirs


def read_once(loader: ConfigLoader) -> None:
    """Read each file of settings once: the jobs of a sweep have what its check has read."""
    loader.repository = ReadOnce(loader.repository)  # type: ignore[attr-defined]


@contextmanager
def no_job() -> Iterator[None]:
    """Leave ${hydra:…} without a value, which a job alone knows.

    1.4 would take the sweep's, or null.
    """
    config = HydraConfig.instance()
    of_sweep = config.cfg
    config.cfg = None
    try:
        yield
    finally:
        config.cfg = of_sweep


@contextmanager
def help_unchecked() -> Iterator[None]:
    """Let hydra-core 1.3 make its parser on Python 3.14.

    There argparse refuses one of its help texts, and Hydra has no public way to give it another parser. hydra-core 1.4
    needs no such help.
    """
    parser = argparse.ArgumentParser
    check = getattr(parser, "_check_help", None)  # from Python 3.14 on
    if check is None or not IS_1_3:
        yield
        return
    parser._check_help = lambda *_: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        parser._check_help = check  # type: ignore[attr-defined]

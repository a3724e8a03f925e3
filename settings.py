"""Where the commands get their settings: NAME=VALUE in, a checked dataclass out, one sentence for a mistake.

Functions of train.py's command import Hydra themselves: the other commands start without it.
"""

import errno
import functools
import logging
import operator
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from console import INTERRUPTED, close_console, open_console, say
from errors import SettingsError
from runs.formatting import RANGES, LogFormatter, literal, visible
from runs.summary import begin_job, device_of_job, fail_job, has_checkpoints
from schema import Schema, described, explain_value, from_arguments, help_text, refuse_flags, to_settings
from training.config import TrainConfig, refuse_idle_settings

ModelOf = Callable[[str], dict[str, Any]]
log = logging.getLogger("tinygpt")
CONF = Path(__file__).resolve().parent / "conf"
CONSOLE = logging.StreamHandler()
CONSOLE.setFormatter(LogFormatter())
# Why the system refuses a file or folder that a person has named.
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR, errno.EISDIR)
# Two sweeps that start in the same second need folders of their own: short_id ends their names.
OmegaConf.register_new_resolver("short_id", lambda: os.urandom(2).hex(), use_cache=True, replace=True)
# Settings that follow from others: ${floordiv:65536,${model.n_embd}}, ${floordiv:${max_steps},0.5}.
OmegaConf.register_new_resolver("floordiv", lambda *n: int(functools.reduce(operator.floordiv, n)), replace=True)


def run_command(schema: type[Schema], about: str | None, function: Callable[[Schema], object]) -> None:
    """Call `function` with the settings that were typed, a checked `schema` object, or show --help.

    about: the script's docstring. A person's mistake ends in one sentence on stderr and exit status 1.
    """
    with mistakes_explained(schema):
        arguments = sys.argv[1:]
        if {"--help", "-h"} & set(arguments):
            print(help_text(schema, about or ""), flush=True)
            return
        if arguments[:1] == ["-sc"]:  # what train.py's tab completion asks of every command
            print(*(f"{name}=" for name, *_ in described(schema)))
            return
        refuse_flags(schema, arguments)
        function(from_arguments(schema, arguments))
        sys.stdout.flush()


def run_train_command(about: str | None, function: Callable[[TrainConfig], Any], model_of: ModelOf) -> None:
    """As run_command(), with Hydra's groups and sweeps. model_of: returns the settings of init_from's model."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    register_schema()

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
    def job(cfg: DictConfig) -> Any:
        log_to_console()
        about_hydra = HydraConfig.get()
        if about_hydra.mode == RunMode.MULTIRUN:
            return run_job(cfg, function, model_of)
        with mistakes_explained(TrainConfig):  # Hydra adds a line to an exception that comes out of here
            asks = about_hydra.sweeper.get("params") or about_hydra.runtime.choices["hydra/sweeper"] == "optuna"
            if asks and not cfg.dry_run:  # a plan of one does no harm
                raise SettingsError("many runs are asked for, and one would be made: add -m.")
            return function(checked(complete(cfg, model_of)))

    with mistakes_explained(TrainConfig):
        arguments = sys.argv[1:]
        if {"--help", "-h"} & set(arguments):
            print(help_text(TrainConfig, about or "", groups_help()), flush=True)
            return
        refuse_flags(TrainConfig, arguments, others=True)
        refuse_folders(arguments)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([str(CONF.parent), *inherited])  # for submitit's processes
        # Hydra reads no flag that follows an override.
        sys.argv[1:] = sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))
        warnings.filterwarnings("ignore", r"\s*'hydra/launcher/", UserWarning)  # its plugins' schemas have their names
        job()


def log_to_console() -> None:  # in job(), which is pickled for other processes, the handler's lock could not be
    CONSOLE.setStream(sys.stdout)
    log.addHandler(CONSOLE)
    log.setLevel(logging.INFO)


def register_schema() -> None:
    """Tell Hydra what conf/train.yaml calls train_schema and brought."""
    from hydra.core.config_store import ConfigStore

    # Hydra copies its store of schemas for every group that it looks at, a hundred times for --hydra-help.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    ConfigStore.instance().store(name="train_schema", node=TrainConfig)
    ConfigStore.instance().store(name="brought", node={})


@contextmanager
def mistakes_explained(schema: type) -> Iterator[None]:
    """End the process with status 1 and one sentence when a person's mistake is raised within."""
    status = 0
    open_console()
    try:
        yield
    except KeyboardInterrupt:
        say(INTERRUPTED)
        status = 130
    except BrokenPipeError:  # the reader of what is printed has seen enough
        pass
    except SystemExit as exiting:
        status = exiting.code if isinstance(exiting.code, int) else 1
    except Exception as error:
        sentence = explain(error, schema)
        if "RANK" not in os.environ and not sentence:
            raise
        # Of torchrun's processes the first to fail says why; before they have met, that is rank 0.
        distributed = sys.modules.get("training.distributed")
        if distributed.first_to_fail() if distributed else os.environ.get("RANK", "0") == "0":
            say(f"error: {visible(sentence)}".replace("\n", "␊") if sentence else traceback.format_exc())
        status = 1
    close_console()
    if "RANK" in os.environ:
        # At once: an orderly shutdown can hang, for ranks that are gone or for its own threads, and everything worth
        # keeping is on the disk.
        os._exit(status)
    if status:
        sys.exit(status)


def refuse_folders(arguments: list[str]) -> None:
    """Raise SettingsError for folders that a single run or a sweep does not take."""
    typed = by_name(arguments)
    if (folder := typed.get("hydra.run.dir")) is not None:
        raise SettingsError(f"hydra.run.dir={folder} is not used: write run_dir={folder}.")
    if typed.get("hydra.job.chdir", "false").lower() not in ("false", "null"):
        raise SettingsError("hydra.job.chdir=true is not used: paths are relative to the folder that you start from.")
    for name in ("run_dir", "resume"):
        if {"-m", "--multirun"} & set(arguments) and typed.get(name, "null") != "null":
            remedy = "leave it out of -m; hydra.sweep.dir=FOLDER names a sweep's folder, and goes on in it"
            raise SettingsError(f"{name}={typed[name]} is for a single run: {remedy}.")


def by_name(overrides: Iterable[str]) -> dict[str, str]:
    return dict(override.lstrip("+").partition("=")[::2] for override in overrides)


def run_job(cfg: DictConfig, function: Callable[[TrainConfig], Any], model_of: ModelOf) -> Any:
    """Call the command's function for one job of a sweep, in the job's folder; log and raise what ends it."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    number, folder = hydra.job.num, Path(hydra.runtime.output_dir)
    varied = " ".join(override for override in hydra.overrides.task if override not in sys.argv)
    log.info("job %s: %s", number, varied)
    begun = False
    try:
        if not cfg.dry_run:  # which writes nothing
            if (loss := begin_job(folder, number, list(hydra.overrides.task))) is not None:
                return loss
            begun = True
            cfg.run_dir = str(folder)
            if has_checkpoints(folder):  # the sweep goes on, or Slurm queued the job again
                cfg.resume, cfg.init_from = str(folder), None
        cfg = complete(cfg, model_of)
        if hydra.runtime.choices["hydra/launcher"] != "basic":
            if threads := hydra.launcher.get("cpus_per_task"):
                os.environ.setdefault("OMP_NUM_THREADS", str(threads))
            cfg.device = device_of_job(cfg.device, number)
        cfg.wandb.group = cfg.wandb.group or os.environ.get("WANDB_RUN_GROUP") or Path(hydra.sweep.dir).name
        cfg.wandb.name = cfg.wandb.name or os.environ.get("WANDB_NAME") or f"{number} {varied}"
        return function(checked(cfg))
    except Exception as error:
        if begun:  # else job.json is of a run that is left alone
            fail_job(folder, error)
        sentence = explain(error, TrainConfig)
        log.error("job %s failed: %s", number, sentence or error, exc_info=not sentence)
        raise


def complete(cfg: DictConfig, model_of: ModelOf) -> DictConfig:
    """Return the settings: defaults < what the resumed run or init_from's model brings < what was asked for.

    cfg: the settings without those of a run or model. Asked for is what is typed, or set by an option that is.
    """
    from hydra import compose
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig

    from runs.directory import find_run, saved_settings

    place = {"run_dir": cfg.run_dir, "resume": None, "init_from": cfg.init_from}
    typed = HydraConfig.get().overrides.task
    brought: dict[str, Any] = {}
    if cfg.resume and (run := find_run(cfg.resume, cfg.run_dir)):
        brought = saved_settings(run)
        place = {"run_dir": str(run), "resume": str(run), "init_from": None if cfg.resume == "auto" else cfg.init_from}
    elif cfg.init_from:
        for override in typed:  # an experiment's tokenizer applies only to new weights
            if override.lstrip("+").startswith(("tokenizer=", "tokenizer.")):
                raise SettingsError(f"init_from={cfg.init_from} has its own tokenizer: leave out {override}.")
        brought = {"model": model_of(cfg.init_from)}
    # A group's option that is typed, as optimizer=adamw, replaces all that is brought of the group.
    known = {setting.name for setting in fields(TrainConfig)} - by_name(typed).keys()
    brought = {name: value for name, value in brought.items() if name in known}
    if cfg.attention and "model" in brought:
        del brought["model"]["attention"]
    if brought:
        ConfigStore.instance().store(name="brought", node=literal(brought))
        try:
            cfg = compose("train", list(typed))
        finally:
            ConfigStore.instance().store(name="brought", node={})  # the next job of a sweep brings its own
    cfg.update(literal(place))
    return cfg


def checked(cfg: DictConfig) -> TrainConfig:
    """Return the settings as TrainConfig; SettingsError where what was typed cannot be honoured."""
    from hydra.core.hydra_config import HydraConfig

    typed = by_name(HydraConfig.get().overrides.task)
    if {"attention", "model.attention"} <= typed.keys():
        given = f"attention={typed['attention']} and model.attention={typed['model.attention']}"
        raise SettingsError(f"{given} are both given: choose one.")
    if empty := [name for name in ("run_dir", "resume", "init_from") if typed.get(name) == ""]:
        raise SettingsError(f"{empty[0]}= is empty: give a folder, or leave it out.")
    if cfg.attention:  # here, so that the model is checked with it
        cfg.model.attention, cfg.attention = cfg.attention, None
    config = to_settings(cfg, TrainConfig)
    refuse_idle_settings(config, typed)
    return config


def explain(error: BaseException, schema: type) -> str | None:
    """Return one sentence for a mistake on the command line, None for an error that is ours."""
    if isinstance(error, SettingsError):
        return str(error)
    if isinstance(error, OSError) and error.errno in CLOSED:
        place = error.filename or "standard output or a file"
        return f"{place} cannot be used ({error.strerror}): name a place with room that is yours to write to."
    for mistake in (error.__cause__, error):
        if isinstance(mistake, OmegaConfBaseException):
            return explain_value(mistake, schema)
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException

    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        return f"{group}={option} does not exist: choose {group} from {', '.join(error.options)}."
    if isinstance(error, OverrideParseException):
        quoted = "put a value that has spaces, commas, brackets, quotes or accents in both kinds of quotes"
        remedy = f"write NAME=VALUE, and {quoted}, as in 'data.path=\"notes (1).txt\"'"
        if re.search(r"=\s*\w+\(", error.override):
            remedy = f"ranges are {RANGES}"
        return f"cannot read the override {error.override!r}: {remedy}."
    if isinstance(error, ValueError) and str(error).startswith("Config group override"):  # it does not say which
        pairs = by_name(sys.argv[1:]).items()
        wrong = [f"{g}={o}" for g, o in pairs if (CONF / g).is_dir() and not (CONF / g / f"{o}.yaml").exists()]
        return f"{' '.join(wrong)} does not exist: a group takes the name of an option, which --help lists."
    return " ".join(str(error).split()) if isinstance(error, HydraException) else None


def groups_help() -> str:
    """Return what --help says of the groups of conf/ and of sweeps."""
    lines = ["Choose a group's option with GROUP=OPTION; conf/GROUP/OPTION.yaml is what it sets:", ""]
    for folder in sorted(path for path in CONF.iterdir() if path.is_dir() and path.name != "hydra"):
        name = "+experiment" if folder.name == "experiment" else folder.name
        lines.append(f"  {name:<13}{' '.join(sorted(path.stem for path in folder.iterdir()))}")
    sweep = "python train.py -m model.n_head=2,4 seed=1,2"
    lines += ["", f"Sweeps: -m tries every combination of values separated by commas, as in  {sweep}", "", ""]
    return "\n".join(lines)

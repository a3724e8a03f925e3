"""Where the entry scripts meet Hydra: typed settings in, one sentence out when they are wrong."""

from __future__ import annotations

import difflib
import errno
import functools
import logging
import operator
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import hydra
from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from errors import DataError, SettingsError
from runs.quoting import asks_for_sweep, flags_first, is_dry_run, literal, quote, quote_prompts, value_typed
from sweeps.launch import RANGES, device_of_job, explain_launch, jobs_at_once, label_lines
from sweeps.trial import RunPruned

log = logging.getLogger("tinygpt")

CONF = Path(__file__).resolve().parent / "conf"
MISTAKES = (SettingsError, DataError, PermissionError)
# Why a folder cannot be written, which Hydra meets before we do.
UNWRITABLE = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR)

# conf/hydra/launcher has the plugins' own names, and values for what they leave open or set too high.
warnings.filterwarnings("ignore", r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")
# Hydra copies its one store of schemas for every group that it looks at, a hundred times for --help.
ConfigStore.__deepcopy__ = lambda store, memo: store
# Two runs that start in the same second must not share a directory: their names end in this.
OmegaConf.register_new_resolver("short_id", lambda: os.urandom(2).hex(), use_cache=True, replace=True)
# Settings that follow from others: ${floordiv:65536,${model.n_embd}}.
OmegaConf.register_new_resolver("floordiv", lambda *numbers: functools.reduce(operator.floordiv, numbers), replace=True)
OmegaConf.register_new_resolver("jobs_at_once", jobs_at_once, use_cache=True, replace=True)


def command(name: str, schema: type) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Make a function of one `schema` object an entry script's command, configured by conf/`name`.yaml.

    A person's mistake ends in one sentence on stderr and exit status 1; in a sweep it ends its own
    job and the others go on. HYDRA_FULL_ERROR=1 shows the traceback instead.
    """
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)

    def decorate(function: Callable[[Any], Any]) -> Callable[[], None]:
        @hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)
        def job(cfg: DictConfig) -> Any:
            try:
                prepare_job(cfg)
                if (loss := loss_if_resumed(cfg)) is not None:
                    return loss
                return function(to_settings(complete_settings(cfg, name), schema))
            except RunPruned as pruned:
                return pruned.loss
            except (KeyboardInterrupt, SystemExit) as stop:
                record_end(stop)
                raise
            except Exception as error:
                report_failure(error, schema, show_traceback)
                raise

        @functools.wraps(function)
        def main() -> None:
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing
            try:
                sys.argv[1:] = rewrite(sys.argv[1:], name)
                inherited = filter(None, [os.environ.get("PYTHONPATH")])
                os.environ["PYTHONPATH"] = os.pathsep.join([str(CONF.parent), *inherited])  # for submitit's processes
                with sweep_ended():
                    job()
            except KeyboardInterrupt:
                sys.exit(130)
            except SystemExit as exiting:
                if "RANK" in os.environ:
                    end_rank(exiting.code)
                raise
            except Exception as error:
                if sentence := explain(error, schema):
                    if show_traceback:
                        raise
                    leave(sentence)
                if "RANK" in os.environ:
                    leave(traceback.format_exc())
                raise
            if "RANK" in os.environ:
                end_rank(0)

        return main

    show_traceback = "HYDRA_FULL_ERROR" in os.environ
    return decorate


def is_sweep() -> bool:
    return HydraConfig.get().mode == RunMode.MULTIRUN


def record_end(error: BaseException) -> None:
    """Let the job's summary.json tell what ended it, if it has one."""
    if callback := sys.modules.get("sweeps.callback"):  # Hydra has imported it, if conf/ names its callback
        callback.record_end(error)


def report_failure(error: Exception, schema: type, show_traceback: bool) -> None:
    """Record and log why a sweep's job failed; a mistake in a single run ends the process in its sentence."""
    record_end(error)
    sentence = explain(error, schema)
    if is_sweep():
        number = HydraConfig.get().job.num
        log.error("job %s failed: %s", number, sentence or error, exc_info=show_traceback or not sentence)
    elif sentence and not show_traceback:
        leave(sentence)


@contextmanager
def sweep_ended() -> Iterator[None]:
    """Within it a sweep ends in its leaderboard, whatever ends it, and in a SettingsError when jobs have failed."""
    try:
        yield
    finally:
        if callback := sys.modules.get("sweeps.callback"):
            callback.end_sweep(sys.exc_info()[1])


def prepare_job(cfg: DictConfig) -> None:
    """Make a sweep's job fit its process; SettingsError where an experiment that is a sweep would train one run."""
    if is_sweep():
        join_sweep(cfg)
    elif (many := HydraConfig.get().sweeper.get("params")) and not cfg.get("dry_run"):  # a plan of one is no harm
        raise SettingsError(f"many runs are asked for (of {' × '.join(many)}), and one would be made: add -m.")


def loss_if_resumed(cfg: DictConfig) -> float | None:
    """The validation loss of a job that a resumed sweep has done already; else None."""
    if "sweep" not in cfg or not cfg.sweep.resume:
        return None
    from sweeps.resume import loss_if_done

    return loss_if_done()


def join_sweep(cfg: DictConfig) -> None:
    """Make the settings of a sweep's job fit the process that it runs in.

    A job whose directory holds its run already was interrupted: a search goes on, or Slurm queued it again.
    """
    hydra_config = HydraConfig.get()
    if hydra_config.runtime.choices["hydra/launcher"] != "basic":
        label_lines(hydra_config.job.num)
        if threads := hydra_config.launcher.get("cpus_per_task"):
            os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        if "device" in cfg:
            cfg.device = device_of_job(cfg.device, hydra_config.job.num)
    if "resume" in cfg:
        from sweeps.resume import has_checkpoints

        if has_checkpoints(Path(hydra_config.runtime.output_dir)):
            cfg.resume, cfg.init_from = hydra_config.runtime.output_dir, None


def leave(sentence: str) -> NoReturn:
    """End the process with status 1 and one sentence; of torchrun's processes only the first to fail says it."""
    distributed = sys.modules.get("training.distributed")
    if os.environ.get("RANK", "0") == "0" if distributed is None else distributed.first_to_fail():
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        end_rank(1)
    sys.exit(1)


def end_rank(status: Any) -> NoReturn:
    """End one of torchrun's processes now: to take its connections to pieces in order can wait for ever, for
    ranks that are gone or for its own threads, and everything worth keeping is on the disk."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


def rewrite(arguments: list[str], name: str) -> list[str]:
    """The command line of the command `name` as Hydra is to read it."""
    arguments = flags_first(arguments)
    return quote_prompts(place_run(arguments) if name == "train" else arguments)


def place_run(arguments: list[str]) -> list[str]:
    """The command line with Hydra's output where this process has to write it.

    What Hydra writes goes into run_dir too. A resumed run goes on in its own directory, and keeps the settings in its
    .hydra; of torchrun's processes only the first writes, and a dry run does not. Raises SettingsError when there is
    no such run, or another one where a new one should be.
    """
    if {"--help", "-h", "--cfg", "-c", "--info", "-i"} & set(arguments):
        return arguments
    if value_typed(arguments, "sweep.resume") not in (None, "null"):
        from sweeps.resume import resumed_command

        arguments = resumed_command(arguments)
    where = value_typed(arguments, "resume")
    resumes = where not in (None, "null")
    if asks_for_sweep(arguments) and value_typed(arguments, "run_dir") is not None:
        raise SettingsError("run_dir is one folder for all jobs: leave it out of -m; hydra.sweep.dir names theirs.")
    if asks_for_sweep(arguments) and resumes:
        raise SettingsError(f"resume={where} goes on with one run: leave out -m, and give the job's own directory.")
    arguments, folder = name_folder_once(arguments)
    writes = os.environ.get("RANK", "0") == "0" and not is_dry_run(arguments)
    if not writes:
        arguments = [*arguments, "hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"]
    if asks_for_sweep(arguments) or not (resumes or folder):
        return arguments
    from runs.directory import OUTPUTS, find_run, refuse_locked, refuse_used

    run = find_run(where, [Path(folder)] if folder else OUTPUTS) if resumes else None
    rest = [argument for argument in arguments if not argument.startswith("resume=")]
    if run is None:
        if folder and writes:  # before Hydra writes over what is there
            refuse_locked(Path(folder))
            refuse_used(Path(folder))
        return rest
    if writes:
        rest = [argument for argument in rest if not argument.startswith("hydra.run.dir=")]
        rest += [f"hydra.run.dir={quote(run)}", "hydra.output_subdir=null"]
    return [*rest, f"resume={quote(run)}"]


def name_folder_once(arguments: list[str]) -> tuple[list[str], str | None]:
    """The command line with run_dir=… as hydra.run.dir=…, of which run_dir follows; and the folder, if one is given."""
    folder, hydras = value_typed(arguments, "run_dir"), value_typed(arguments, "hydra.run.dir")
    if folder in (None, "", "null"):  # which leave the place to Hydra
        return [argument for argument in arguments if not argument.startswith("run_dir=")], hydras
    if hydras not in (None, folder):
        raise SettingsError(f"run_dir={folder} and hydra.run.dir={hydras} are both given: choose one.")
    return [re.sub(r"\A\+*run_dir=", "hydra.run.dir=", argument) for argument in arguments], folder


def complete_settings(cfg: DictConfig, name: str) -> DictConfig:
    """The settings with those of the run to go on with or the model to begin with, and a sweep's names for wandb."""
    if "resume" in cfg and cfg.resume:
        cfg = recall_settings(cfg, name)
    elif "init_from" in cfg and cfg.init_from:
        inherit_settings(cfg, name)
    if "wandb" in cfg and is_sweep():
        name_in_sweep(cfg)
    return cfg


def recall_settings(cfg: DictConfig, name: str) -> DictConfig:
    """The settings of the run that `cfg.resume` goes on with, but for those that are asked for."""
    from runs.directory import saved_settings

    recalled = OmegaConf.merge(cfg, literal(saved_settings(Path(cfg.resume))))
    for key, value in asked_for(cfg, name).items():
        OmegaConf.update(recalled, key, literal(value))
    return recalled


def inherit_settings(cfg: DictConfig, name: str) -> None:
    """Give cfg.model the settings of the model that cfg.init_from names, but for those that are asked for.

    Raises SettingsError when its weights cannot have these, and for a tokenizer: it brings its own.
    """
    from training.pretrained import inherit, origin_config

    for override in HydraConfig.get().overrides.task:  # an experiment's is for who begins anew
        if override.lstrip("+").startswith(("tokenizer=", "tokenizer.")):
            raise SettingsError(f"init_from={cfg.init_from} brings its own tokenizer along: leave out {override}.")
    asked = asked_for(cfg, name)
    of_model = {key: asked[f"model.{key}"] for key in cfg.model if f"model.{key}" in asked}
    cfg.model = inherit(cfg.init_from, origin_config(cfg.init_from), of_model)


def asked_for(cfg: DictConfig, name: str) -> dict[str, Any]:
    """The settings, dotted, that the command line names: by their own name, by their group's, or by an option of
    another group, such as an experiment, that changes them."""
    default = compose(name)
    typed = {override.lstrip("+").partition("=")[0] for override in HydraConfig.get().overrides.task}
    asked = {}
    for key in _keys(OmegaConf.to_container(cfg)):
        value = OmegaConf.select(cfg, key)
        named = key in typed or ("attention" if key == "model.attention" else key.partition(".")[0]) in typed
        if not OmegaConf.is_config(value) and (named or value != OmegaConf.select(default, key)):
            asked[key] = value
    return asked


def name_in_sweep(cfg: DictConfig) -> None:
    """Let wandb show a sweep's runs as one group, named by the sweep's folder, each by its number and what varies."""
    hydra_config = HydraConfig.get()
    varied = [override for override in hydra_config.overrides.task if override not in sys.argv]
    cfg.wandb.group = cfg.wandb.group or Path(hydra_config.sweep.dir).name
    cfg.wandb.name = cfg.wandb.name or " ".join([str(hydra_config.job.num), *varied])


def to_settings(cfg: DictConfig, schema: type) -> Any:
    """The typed, checked `schema` object that Hydra's config stands for.

    Raises SettingsError for a key the schema does not have (`+key=value` slips past Hydra) or values
    that do not fit together.
    """
    known = set(setting_names(schema))
    for key in _keys(OmegaConf.to_container(cfg)):
        if key not in known:
            raise SettingsError(unknown_setting(key, schema))
    try:
        return OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise SettingsError(explain(error, schema)) from error
    except ValueError as error:
        raise SettingsError(str(error)) from error


def explain(error: BaseException, schema: type) -> str | None:
    """One sentence, with the remedy, for a mistake on the command line; None for an error that is ours."""
    cause = error.__cause__
    if isinstance(error, MISTAKES):
        return str(error)
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return (
            f"{error.filename or 'the run directory'} cannot be written ({error.strerror}): "
            "give a folder on a disk with room that you may write to, as hydra.run.dir=..."
        )
    if isinstance(cause, OSError):  # logging's, say
        return explain(cause, schema)
    if sentence := explain_launch(error):
        return sentence
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        if not error.options:
            return f"there is no conf/{error.missing_cfg_file}.yaml."
        return f"{group}={option} does not exist: choose {group} from {', '.join(error.options)}."
    if isinstance(error, OverrideParseException) and re.search(r"=\s*\w+\(", error.override):
        return f"cannot read the override {error.override!r}: ranges are {RANGES}."
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the override {error.override!r}: write key=value, and put a value that has spaces, "
            "commas, brackets or quotes in both kinds of quotes, as in 'data.path=\"notes (1).txt\"'."
        )
    if isinstance(cause, OmegaConfBaseException):
        return explain(cause, schema)
    if isinstance(error, OmegaConfBaseException):
        if type(error).__name__ in ("ConfigKeyError", "ConfigAttributeError"):
            return unknown_setting(error.full_key or str(error.key), schema)
        if type(error).__name__ == "ValidationError":
            return f"{error.full_key} takes {_kind_of_value(error.full_key, schema)}: {str(error).splitlines()[0]}."
        return f"{error.full_key}: {str(error).splitlines()[0]}."
    if isinstance(error, ConfigCompositionException):
        message = str(error)
        if ambiguous := re.search(r"Ambiguous value for argument '((.*?)=(.*))'", message):
            whole, key, value = ambiguous.groups()
            return f"{whole} has a comma: add -m to try each value in turn, or quote it, as in '{key}=\"{value}\"'."
        if missing_plus := re.search(r"No match in the defaults list.*use (\+\S+)", message, re.DOTALL):
            return f"write {missing_plus[1]}, with a plus: there is no default to replace."
        return " ".join(message.split())
    return None


def unknown_setting(key: str, schema: type) -> str:
    """The sentence for a key that is no setting, with the nearest ones that are."""
    if key.startswith("hydra."):
        group = key.rpartition(".")[0]
        return f"there is no setting {key}: add --cfg hydra --package {group} to the command to see those there are."
    names = [*setting_names(schema), *(path.name for path in CONF.iterdir() if path.is_dir())]
    by_last_part = {name.rpartition(".")[2]: name for name in names}
    near = difflib.get_close_matches(key, names, n=2, cutoff=0.75)
    near += [by_last_part[n] for n in difflib.get_close_matches(key.rpartition(".")[2], by_last_part, n=1)]
    hint = " or ".join(dict.fromkeys(near))
    return f"there is no setting {key}" + (f": did you mean {hint}?" if hint else "; --help lists them all.")


def setting_names(schema: type, prefix: str = "") -> Iterator[str]:
    """Every setting of a dataclass and those inside it, dotted: model, model.n_head, …"""
    hints = get_type_hints(schema)
    for field in fields(schema):
        yield prefix + field.name
        if is_dataclass(hints[field.name]):
            yield from setting_names(hints[field.name], f"{prefix}{field.name}.")


def _keys(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _kind_of_value(name: str, schema: type) -> str:
    """What a setting takes, in words."""
    kind: Any = schema
    for part in name.split("."):
        kind = get_type_hints(kind)[part]
    inner = next((option for option in get_args(kind) if option is not type(None)), kind)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(inner, "a group of settings") + (" or null" if inner is not kind else "")

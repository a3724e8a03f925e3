"""Hydra's part of train.py's command line: groups of settings, sweeps and their jobs.

Torch is imported only where with_torch() is called: most mistakes in settings are answered before.
"""

import logging
import math
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from multiprocessing import parent_process
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)

from cli.overrides import CONF, FOLDER, GROUPS, check_typed
from common.aliases import OPTIONS
from common.console import end_with_parent, open_console, show_log
from common.errors import SettingsError, first_line, format_value
from common.files import without_shell_signs
from common.mistakes import sentence_for
from common.settings import NULLS, build, here_it_is, parse_overrides, typed_value
from common.text import flat, hydra_quoted, literal, quote, seen_from_here, without_escapes
from model.config import GPTConfig
from runs.summary import begin_job, fail_job, has_checkpoints, read_summary, threads_of_sweep
from sweeps.grid import VARIANTS
from sweeps.hydra_versions import (
    VERSION_BASE,
    help_unchecked,
    hydra_kept,
    load_plugins,
    main,
    no_job,
    register_resolver,
    store,
)
from sweeps.ranges import SETTINGS, TEXTS, for_hydra
from training.config import TrainConfig

log = logging.getLogger("tinygpt")
PAIRS = """["model.n_embd=64 optimizer.lr=0.02","model.n_embd=128 optimizer.lr=0.01"]"""
DRAWN = "hydra/sweeper=optuna draws values, as docs/sweeps.md shows"
OF_OPTUNA = ("n_trials", "direction", "sampler", "storage", "study_name", "custom_search_space", "max_failure_rate")
DEFAULTS = {
    r"In '(.*?)': (?:Could not override|.* No earlier Group Default for) '([^'@]*)": (
        r"\1.yaml overrides \2, which is no group"
    ),
    r"In '(.*)':? Could not find '([^']*)": r"\1.yaml has \2 in its defaults, which is no option",
    r"Multiple values for ([^. ]*)\.": r"a file of settings has \1 once more in its defaults",
}
"""Hydra's errors of a defaults list, of 1.3 and 1.4, as we say them."""
VALUED = (*FOLDER, "--cfg", "-c", "--package", "-p", "--config-name", "-cn")  # Hydra's flags before a value
OURS = "set for a launcher of tinygpt"  # the value of PYTHONSAFEPATH, which may be any text


def with_torch() -> ModuleType:
    """Return cli/with_torch.py, whose import takes a second."""
    from cli import with_torch

    return with_torch


def register_inherited(typed: dict[str, str], new: TrainConfig | None = None) -> dict[str, str]:
    """Register the schema with the settings that `resume` brings.

    Returns the settings that are typed besides. new: the run that resume=auto would begin.
    """
    inherited: dict[str, Any] = {}
    if "resume" in typed:
        inherited, typed = with_torch().inherited_settings(typed, new)
    register_schema(inherited)
    return typed


def sweep(overrides: list[str], typed: dict[str, str], searched: list[str]) -> None:
    """Run each job of a sweep; searched: overrides for Hydra's search path."""
    register_schema({})
    variants = None
    with suppress(yaml.YAMLError):  # which Hydra's own grammar may read
        variants = yaml.safe_load(typed.get("hydra.sweeper.variants", "null"))
    for variant in variants if isinstance(variants, list) else [""]:
        tell_overruled(typed | dict(word.partition("=")[::2] for word in str(variant).split()), searched)
    # Optuna's sweeper would take a value before a range of the same name.
    last = {override.partition("=")[0]: override for override in without_plus(overrides)}
    call_hydra(["-m", *searched, *map(for_hydra, last.values())])


def show(arguments: list[str]) -> None:
    """Let Hydra print the settings of a job for --cfg, or complete a word for a shell."""
    given = [argument.lstrip("+").partition("=") for argument in arguments if not argument.startswith("-")]
    typed = register_inherited({name: value for name, equals, value in given if equals})
    # Values in place of ${of_weights:…}, which means nothing to a reader.
    settings = asdict(TrainConfig())
    weights = typed.get("init_from", "null")
    if weights not in NULLS and "," not in weights:  # of several runs Hydra says that one job is shown
        settings |= with_torch().settings_of_weights(weights)
    store(name="train_schema", node=literal(settings))
    call_hydra([*map(for_hydra, without_plus(flags_first(arguments)))])


def flags_first(arguments: list[str]) -> list[str]:
    """Return the flags with their values, then the settings.

    Hydra's parser reads settings only where they stand side by side.
    """
    pairs = [*zip(["", *arguments], arguments, strict=False)]
    settings = [word for before, word in pairs if not word.startswith("-") and before not in VALUED]
    return [word for before, word in pairs if word.startswith("-") or before in VALUED] + settings


def without_plus(overrides: list[str]) -> list[str]:
    """Return overrides without a +, which means nothing to a setting that exists already.

    Only Hydra's own settings may be added to, and no group of options is. Theirs get ++, for + is refused by a setting
    that is there.
    """
    bare = [each.lstrip("+") for each in overrides]
    return [
        f"++{name}" if each.startswith("+") and name.startswith("hydra.") else name
        for each, name in zip(overrides, bare, strict=True)
    ]


def run_single(typed: dict[str, str], searched: list[str]) -> None:
    """Train or plan a single run; searched: overrides for Hydra's search path."""
    show_log()
    new = settings_of_new(typed, searched) if typed.get("resume") == "auto" else None
    given = register_inherited(with_beginning(typed, new), new)
    config = compose_settings(given, searched)
    tell_overruled(given, searched)
    if new and config.resume and "run_dir" not in typed:
        tell_found(config, new)
    with_torch().train_or_plan(config)


def settings_of_new(typed: dict[str, str], searched: list[str]) -> TrainConfig | None:
    """Return the settings of the run that resume=auto would begin, None if it could not."""
    register_schema({})
    with suppress(SettingsError, HydraException, OmegaConfBaseException):  # mistakes are told where the run is composed
        return compose_settings(typed | {"resume": "null"}, searched)
    return None


def with_beginning(typed: dict[str, str], new: TrainConfig | None) -> dict[str, str]:
    """Return the typed settings, with an experiment's init_from where resume=auto looks for it.

    new: the run that it would begin.
    """
    if new and new.init_from and "init_from" not in typed:
        return typed | {"init_from": new.init_from}
    return typed


def tell_found(config: TrainConfig, new: TrainConfig) -> None:
    """Tell in which settings the run that resume=auto has found differs from a new one.

    It may be another command's, for settings of which this command asks nothing are the run's.
    """
    found = flat(asdict(config))
    others = [f"{name}={format_value(found[name])}" for name in with_torch().unlike(found, flat(asdict(new)))]
    if others and with_torch().Ranks.of_torchrun().is_first:
        fact = f"resume=auto goes on with {config.resume}, which has {' '.join(others)}"
        log.warning("%s, unlike a new run of this command: run_dir= in each command keeps runs apart.", fact)


def tell_overruled(typed: dict[str, str], searched: list[str]) -> None:
    """Warn of settings of a typed option in whose place an experiment has its own.

    An experiment is for the options that it names or was written for: optimizer=adamw beside it keeps Muon's rates.
    """
    groups = [group for group in GROUPS if group in typed and group != "experiment"]
    experiments = typed["experiment"].split(",") if "experiment" in typed else []
    for group, experiment in product(groups, experiments):
        for option in typed[group].split(","):
            with suppress(HydraException, OmegaConfBaseException):  # mistakes are told where the settings are composed
                own = frozenset(name for name in typed if name.startswith(f"{group}."))
                tell_overruled_option(group, option, experiment, own, tuple(searched))


@cache  # once, also for many variants
def tell_overruled_option(
    group: str, option: str, experiment: str, typed: frozenset[str], searched: tuple[str, ...]
) -> None:
    """Warn of the settings of GROUP=OPTION that an experiment has otherwise and nobody typed."""
    overrides = [*searched, f"{group}={quote(option)}"]
    with composing():
        cfg = compose("train", overrides, return_hydra_config=True)
        theirs = compose("train", [*overrides, f"experiment={quote(experiment)}"])
    own = {}
    for file in files_of(cfg, group, option):
        written = OmegaConf.load(file)  # of its group, a task's of all groups
        settings = OmegaConf.select(written, group, default=written)
        # The rates of an optimizer, or the steps of a schedule, are for this one alone, also if they are defaults.
        own = flat({group: OmegaConf.to_container(cfg[group] if "name" in settings else settings)})
    found = {name: OmegaConf.select(theirs, name) for name in own.keys() & SETTINGS.keys() - typed}
    others = {name: own[name] for name in own if name in found and found[name] != own[name]}
    if others:
        has = " ".join(f"{name}={format_value(found[name])}" for name in others)
        asked = " ".join(f"{name}={format_value(value)}" for name, value in others.items())
        fact = f"experiment={experiment} has {has}, which counts before {group}={option}"
        log.warning("%s: type %s for what that option has.", fact, asked)


def files_of(cfg: DictConfig, group: str, option: str) -> list[Path]:
    """Return the files of an option, in conf/ and in the folders of --config-dir."""
    folders = [CONF, *(Path(place.removeprefix("file://")) for place in cfg.hydra.searchpath)]
    return [*filter(Path.is_file, (folder / group / f"{option}.yaml" for folder in folders))]


def file_with(name: str, cfg: DictConfig) -> Path | None:
    """Return the file of a chosen option that has a setting, None if there is none.

    An experiment counts before others.
    """
    found = None
    for group, option in cfg.hydra.runtime.choices.items():
        for file in files_of(cfg, group, str(option)):
            written = flat(OmegaConf.to_container(OmegaConf.load(file)))  # type: ignore[arg-type]
            is_there = {name, name.removeprefix(f"{group}.")} & written.keys()
            found = file if is_there and (group == "experiment" or not found) else found
    return found


@contextmanager
def naming_file(cfg: DictConfig, typed: Container[str]) -> Iterator[None]:
    """Name the file that has the wrong setting of an error within, unless it is typed."""
    try:
        yield
    except SettingsError as error:
        file = file_with(error.setting, cfg) if error.setting and error.setting not in typed else None
        if file and error.remedy.startswith("correct it"):
            error.remedy = f"correct it in {seen_from_here(file)}"
        raise


def compose_settings(typed: dict[str, str], searched: Sequence[str] = ()) -> TrainConfig:
    """Return the settings of a single run.

    Typed values are literal: no character has a meaning for Hydra.
    """
    with composing():
        overrides = [*searched, *(f"{name}={quote(value)}" for name, value in typed.items())]
        cfg = compose("train", overrides, return_hydra_config=True)
    with naming_file(cfg, typed):
        config = to_settings(cfg, typed, lambda name: value_without(name, typed, searched))
    # An experiment may ask for a sweep. A plan of one run does no harm.
    sweeper = cfg.hydra.sweeper
    choices = cfg.hydra.runtime.choices
    chosen = choices["hydra/sweeper"] not in ("basic", "grid") or choices["hydra/launcher"] != "basic"
    if (sweeper.params or sweeper.variants or chosen) and not config.dry_run:
        remedy = "leave out what asks for them: a run goes on with its own settings" if config.resume else "add -m"
        raise SettingsError("many runs are asked for, and one would be made", remedy)
    return config


def value_without(name: str, typed: dict[str, str], searched: Sequence[str]) -> str:
    """Return a setting's value in a run for which it is not typed, "" if that is not known.

    It may be that of an option, an experiment or init_from's model.
    """
    if name not in typed or "resume" in typed:
        return ""
    with suppress(SettingsError, HydraException, OmegaConfBaseException), composing():
        others = (f"{other}={quote(value)}" for other, value in typed.items() if other != name)
        values = flat(OmegaConf.to_container(compose("train", [*searched, *others]), resolve=True))  # type: ignore[arg-type]
        return typed_value(values[name]) if name in values else ""
    return ""


def call_hydra(arguments: list[str]) -> None:
    """Let Hydra answer --cfg, or run each job of a sweep."""

    def job(cfg: DictConfig) -> Any:  # pickled for other processes, with all that it names of this module
        return run_job(cfg)

    job.check = check_job  # type: ignore[attr-defined]  # for the sweeper, which gets this function
    use_our_sweeper()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing
    # A launcher's processes import our packages, and nothing from the current folder, such as somebody's train.py.
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CONF.parent), *inherited])
    os.environ.setdefault("PYTHONSAFEPATH", OURS)
    sys.argv[1:] = arguments
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.process")
    with help_unchecked():
        main(config_path=str(CONF), config_name="train")(job)()


def register_schema(inherited: dict[str, Any]) -> None:
    """Give Hydra the nodes that conf/train.yaml calls train_schema and inherited."""
    # short_id ends the names of new sweeps' folders: two sweeps that start in the same second need one each.
    register_resolver("short_id", lambda: os.urandom(2).hex(), use_cache=True)
    # Settings that follow from others: ${floordiv:65536,${model.n_embd}}, ${mul:0.001,${batch_size}}.
    register_resolver("floordiv", lambda a, b: int(float(a) // float(b)))
    register_resolver("mul", lambda *numbers: math.prod(map(float, numbers)))
    # A setting of the model for which nothing else asks: ${of_weights:n_embd} is that of init_from's model, or ours.
    register_resolver("of_weights", of_weights)
    settings = literal(asdict(TrainConfig()))
    settings["model"] = {name: f"${{of_weights:{name}}}" for name in settings["model"]}
    store(name="train_schema", node=settings)
    store(name="inherited", node=literal(inherited))


def use_our_sweeper() -> None:
    """Put our sweeper in the place of Hydra's usual one, which is called basic.

    As an override in conf/train.yaml ours would hide an experiment's choice.
    """
    # Hydra warns that its plugins' schemas and our options have the same names, here and in joblib's workers.
    warnings.filterwarnings("ignore", r"\s*'hydra/launcher/", UserWarning)
    load_plugins()  # which registers Hydra's own
    store(group="hydra/sweeper", name="basic", node=OmegaConf.load(CONF / "hydra/sweeper/grid.yaml"), provider="main")


@contextmanager
def composing() -> Iterator[None]:
    """Let compose() read our settings, also in a program that composes others by Hydra."""
    with hydra_kept():
        use_our_sweeper()
        with initialize_config_dir(str(CONF), **VERSION_BASE):
            yield


def of_weights(name: str, *usual: Any, _root_: DictConfig) -> Any:
    """Return a setting of init_from's model; `usual`, or our default, without init_from."""
    if not is_given(_root_, "init_from") or (name == "attention" and is_given(_root_, "attention")):
        return usual[0] if usual else getattr(GPTConfig, name)
    return with_torch().settings_of_weights(as_typed(_root_, "init_from"))["model"][name]


def is_given(cfg: DictConfig, name: str) -> bool:
    """Return whether a composition has a value of a setting; null is a text where it is typed."""
    return cfg[name] not in (None, *NULLS)


def as_typed(cfg: DictConfig, name: str) -> str:
    """Return the text of a setting, which Hydra may have read as a number or a list."""
    value = cfg[name]
    return format_value(OmegaConf.to_object(value) if OmegaConf.is_config(value) else value)


def take_tokenizer(cfg: DictConfig, typed: Iterable[str]) -> None:
    """Set the tokenizer of init_from's weights; SettingsError if another one is typed.

    That of an experiment, or of a task, is for new weights alone.
    """
    with_torch().settings_of_weights.cache_clear()  # the run may have gone on, or be another one by now
    tokenizer = with_torch().settings_of_weights(as_typed(cfg, "init_from")).get("tokenizer")
    for name in typed:
        if name.split(".")[0] == "tokenizer":
            value = OmegaConf.select(cfg, "tokenizer.name" if name == "tokenizer" else name)
            raise SettingsError(f"init_from={cfg.init_from} has its own tokenizer", f"leave out {name}={value}")
    if tokenizer:
        cfg.tokenizer = literal(tokenizer)


def to_settings(
    cfg: DictConfig, typed: Iterable[str] = (), left_out: Callable[[str], str] = lambda name: ""
) -> TrainConfig:
    """Return Hydra's composition as TrainConfig.

    Raises SettingsError for a `typed` setting that has no effect. left_out: as for build().
    """
    if "experiment" in cfg:
        remedy = "begin its file with the line # @package _global_, and write one setting or group under another"
        raise SettingsError("the experiment's file has no settings of a run", remedy)
    code_hash = None
    if is_given(cfg, "code"):  # before the names that it registers are read
        code_hash = with_torch().run_code(as_typed(cfg, "code"))
    if is_given(cfg, "init_from"):
        take_tokenizer(cfg, typed)
    values = flat(OmegaConf.to_container(settings_of_run(cfg), resolve=True))  # type: ignore[arg-type]
    empty = {name.rpartition(".")[0] for name in SETTINGS} & values.keys()
    if empty:
        raise empty_group(min(empty))
    for name in sorted(values.keys() - SETTINGS.keys()):  # of a file, for the typed ones are known
        group, _, setting = name.partition(".")
        if setting in SETTINGS:
            remedy = f"begin it with the line # @package _global_, and write the settings of {group} below {group}:"
            raise SettingsError(f"the file of {group}= has {setting}, which is not in {group}", remedy)
    values["code_hash"] = code_hash
    asked = set(typed)
    short = values.get("attention")
    value = values.get("model.attention")
    given = None not in (short, value) and "model.attention" in asked
    if given and short != value:  # TrainConfig cannot tell a typed default
        raise SettingsError(f"attention={short} and model.attention={value} are both given", "choose one")
    config = build(TrainConfig, values, left_out)

    # A typed setting without effect is a mistake; its default claims nothing, and is none.
    idle = config.idle()
    if any(name.startswith("model.") for name in asked):
        idle |= with_torch().idle_model_settings(config.model)
    values = flat(asdict(config))
    defaults = flat(asdict(TrainConfig()))
    for name in sorted(asked & idle.keys()):
        full = "tokenizer.name" if name == "tokenizer" else name
        if values[full] != defaults[full]:
            reason, its_value = idle[name]
            fault = f"has no effect with {reason}={its_value}"
            raise SettingsError(fault, f"leave it out, or change {reason}", setting=name, value=values[full])
    return config


def settings_of_run(cfg: DictConfig) -> DictConfig:
    """Return Hydra's composition without Hydra's own settings."""
    return OmegaConf.masked_copy(cfg, [str(name) for name in cfg if name != "hydra"])


def check_job(overrides: Sequence[str], compose: Callable[[], DictConfig]) -> TrainConfig | None:
    """Return the settings of a job, None if a value is known to the job alone.

    Raises SettingsError if the job cannot run, as far as is known before its text is read.
    """
    typed = parse_overrides(overrides)
    check_typed(typed, is_sweep=True)
    cfg = compose()
    try:
        with no_job(), naming_file(cfg, typed):
            config = to_settings(cfg, typed)
    except InterpolationKeyError:
        raise
    except InterpolationResolutionError:
        if "${hydra:" not in str(OmegaConf.to_container(settings_of_run(cfg))):
            raise
        return None  # a value that only the job knows, such as ${hydra:job.num}
    run_id = os.environ.get("WANDB_RUN_ID")
    if run_id and config.wandb.active_mode != "disabled":  # the jobs would overwrite each other
        raise SettingsError(f"WANDB_RUN_ID={run_id} is one run of wandb, and a sweep has many", "unset WANDB_RUN_ID")
    # A cluster's machines have other devices and files. A plan itself refuses a device that is missing here.
    on_cluster = cfg.hydra.runtime.choices["hydra/launcher"] == "submitit_slurm"
    with_torch().check_start(config, is_here=not on_cluster and not config.dry_run)
    return config


def unset_path() -> None:
    """Take back the paths that call_hydra() has set.

    A program that a job itself starts has its own.
    """
    if os.environ.get("PYTHONSAFEPATH") == OURS:
        _, _, inherited = os.environ.pop("PYTHONPATH").partition(os.pathsep)
        os.environ |= {"PYTHONPATH": inherited} if inherited else {}
        del os.environ["PYTHONSAFEPATH"]


def run_job(cfg: DictConfig) -> Any:
    """Train or plan one job of a sweep, in the job's folder; log and raise its exception.

    Returns the figure that a sweeper may minimise.
    """
    parent = parent_process()  # None with n_jobs=1, and with other launchers
    own = HydraConfig.get()
    number = own.job.num
    if parent:
        open_console()  # which a worker has not done
    show_log(number if parent else None)
    unset_path()
    folder = Path(own.runtime.output_dir)
    typed = {override.partition("=")[0]: override for override in sys.argv}  # of a setting typed twice the last
    varied = " ".join(each for each in map(without_escapes, own.overrides.task) if each not in typed.values())
    log.info("job %s: %s", number, varied)
    begun = False
    try:
        # The folder: a job that is finished is not run again, and one that has begun goes on.
        if not cfg.dry_run:  # which writes nothing
            objective = begin_job(folder, number, list(own.overrides.task))
            if objective is not None:
                return objective
            begun = True
            cfg.run_dir = literal(str(folder))

        # The machine, which jobs of a parallel launcher share.
        if own.runtime.choices["hydra/launcher"] == "joblib" and parent:
            end_with_parent(parent.pid)  # whose workers would train on, unseen, if it were killed
        if own.runtime.choices["hydra/launcher"] != "basic":
            threads = own.launcher.get("cpus_per_task")
            if threads:
                os.environ.setdefault("OMP_NUM_THREADS", str(threads))
            cfg.device = with_torch().device_of_job(cfg.device, number)

        cfg.wandb.group = cfg.wandb.group or os.environ.get("WANDB_RUN_GROUP") or literal(Path(own.sweep.dir).name)
        cfg.wandb.name = cfg.wandb.name or os.environ.get("WANDB_NAME") or literal(f"{number} {varied}")
        # The jobs of a sweep are compared: all have the threads of the first.
        try:
            config = to_settings(cfg, parse_overrides(own.overrides.task))
            if begun and has_checkpoints(folder):  # the sweep goes on, or Slurm queued the job again
                config = replace(config, resume=str(folder), init_from=None)
            loss = with_torch().train_or_plan(config, threads_of_sweep(Path(own.sweep.dir)))
        except SettingsError as error:
            of_drawn = of_search(error, varied) if own.runtime.choices["hydra/sweeper"] == "optuna" else None
            if of_drawn is None:
                raise
            raise of_drawn from error
        summary = read_summary(folder)
        return summary.objective if summary else loss
    except Exception as error:
        if begun:  # otherwise job.json belongs to another run
            fail_job(folder, error)
        sentence = sentence_for(error) or explain(error)
        log.error("job %s failed: %s", number, sentence or error, exc_info=not sentence)
        raise


def of_search(error: SettingsError, drawn: str) -> SettingsError | None:
    """Return the error for values that a search drew; None if it is of other settings.

    The values may not go together. drawn: the overrides that the search chose.
    """
    if not {*drawn.split()} & {*error.problem.split()}:
        return None
    remedy = f"{error.remedy}; hydra.sweeper.custom_search_space draws what goes together, as docs/sweeps.md shows"
    return SettingsError(error.fault, remedy, setting=error.setting, value=error.value)


def empty_group(name: str) -> SettingsError:
    """Return the error for a group, such as model, whose lines are all left out of a file."""
    return SettingsError(f"a file of settings has nothing below the line of {name}", "leave out that line")


def explain(error: BaseException) -> str | None:
    """Return one sentence for a mistake that Hydra or OmegaConf finds, else None."""
    if isinstance(error, MissingConfigException):
        group, option = re.findall(r"((?:hydra/)?[^/]*)/(.*)", error.missing_cfg_file or "/")[0]
        # Hydra has no options for [A,B] and in a defaults list, but the folders in which it looked.
        folders = {CONF, *map(Path, re.findall(r"path=file://(.*)", str(error)))}
        of_list = {file.stem for folder in folders for file in (folder / group).glob("*.yaml")}
        options = error.options or ([] if "/" in option else sorted(of_list))
        if options:
            return f"{group}={option} does not exist: {remedy_for_option(group, option, options)}."
    if isinstance(error, (yaml.MarkedYAMLError, UnicodeDecodeError)):
        return explain_file(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override!r}: {remedy_for_override(str(error.override))}."
    for mistake in (error.__cause__, error):
        if isinstance(mistake, (ConfigAttributeError, ConfigKeyError)):
            return explain_unknown(str(mistake.full_key), mistake.parent_node)
        if isinstance(mistake, OmegaConfBaseException):
            place = mistake.full_key or "a value"
            meaning = (
                "${NAME} stands for the value of a setting, ${mul:A,B} for a product, ${floordiv:A,B} for a quotient, "
                "${oc.env:NAME,DEFAULT} for a variable of the environment"
            )
            if "Cannot merge" in str(mistake):  # a list in the place of a mapping
                meaning = "correct it, or leave it out"
            if isinstance(mistake, ValidationError):  # a value of another type
                is_none = "'None'" in str(mistake)
                meaning = "leave it out, or type null for none" if is_none else "correct it, or leave it out"
            return f"{place} cannot be read ({first_line(mistake)}): {meaning}."
    if str(error).startswith("Config group override must be"):  # as for model=choice(1,2)
        return "an option is the name of a file, and a number or a truth is typed in its place: --help lists all."
    if str(error).startswith("No config source registered"):
        return "hydra.searchpath has a folder that Hydra cannot read: type --config-dir=FOLDER."
    if "full_key: hydra.sweeper.params" in str(error):  # of OmegaConf, which merges nothing into Optuna's null
        return "hydra.sweeper.params is for an experiment's file: type the values of each setting, as in seed=1,2."
    if not isinstance(error, HydraException):
        return None
    sentence = " ".join(str(error).split())
    added = re.search(r"unexpected keyword argument '([^']+)'.* full_key: (\S+)", sentence)
    if added:  # typed with a +
        return explain_unknown(f"{added[2]}.{added[1]}", None)
    written = re.match(r"In '(.*?)': ConfigKeyError .* full_key: (\S+)", sentence)
    if written:  # in an option's file, such as an experiment's
        return f"{written[1]}.yaml: {explain_unknown(written[2], None)}"
    wrong = re.match(r"In '(.*?)': \w+ raised while composing config: (.*?) full_key: (\S+)", sentence)
    if wrong:
        return f"{wrong[1]}.yaml: {wrong[3]} cannot be read ({wrong[2]}): correct it, or leave it out."
    group = re.match("Could not override '(hydra/[^'@]*)'", sentence)
    if group:
        of_search = group[1].startswith("hydra/sweeper/")
        remedy = "add hydra/sweeper=optuna, or leave it out" if of_search else "leave it out"
        return f"{group[1]} has no effect here: {remedy}."
    own = [group for group in GROUPS if group != "experiment"]
    for said, meant in DEFAULTS.items():
        found = re.match(said, sentence)
        if found:
            groups = ", ".join(f"/{group}" for group in [*own, "hydra/launcher", "hydra/sweeper"])
            return f"{found.expand(meant)}: write - override /GROUP: OPTION, with one of {groups}."
    if sentence.startswith("Sweeping over Hydra's configuration"):
        override = sentence.partition("supported")[2].lstrip(" :")[1:-1]
        name, _, value = override.partition("=")
        text = "" if "/" in name or "(" in value else f", or {hydra_quoted(name, value)} for a text with commas"
        return f"{override} is several values, and all jobs have the same {name.lstrip('+')}: type one{text}."
    if sentence.startswith("Ambiguous value"):  # after --cfg alone
        return f"{sentence.split()[4]} has several values, and --cfg shows those of one job: type one of them."
    return sentence


def remedy_for_override(override: str) -> str:
    """Return the remedy for an override that Hydra's grammar refuses; the first that fits."""
    name, _, value = override.partition("=")
    ranges = "ranges are choice(2,4,8) and range(1,5)"
    if value.startswith("zip("):
        return f"write the pairs as variants, as in 'hydra.sweeper.variants={PAIRS}'"
    if re.fullmatch(r"[\w.+/-]+(,[\w.+/-]+)*,", value):
        return f"leave out the last comma, as in {name}={value[:-1]}"
    if name == "hydra.sweeper.params":
        return "type the values of each setting, as in seed=1,2"
    if re.match(r"[\w.]*(uniform|normal|rand|space|logrange)\w*\(", value):
        return f"list values, as in {name}=A,B; {DRAWN}"
    if name == "hydra.sweeper.variants":
        return VARIANTS
    of_null = re.search(r"(choice|shuffle|sort)\(([^()]*\bnull\b[^()]*)\)", value)
    if of_null:
        return f"Hydra's {of_null[1]} takes no null: list the values, as in {name}={of_null[2]}"
    if name in {*SETTINGS} - TEXTS and re.match(r"[\w.*]+\(", value):  # a number takes no quotes
        return f"list values, as in {name}=A,B; {ranges}"
    shown = ("data.path", "notes (1).txt") if set(value) & set("\"'\\,()[]{}") else (name, value)
    example = "'{}=\"{}\"', on Windows \"{}='{}'\"".format(*shown, *shown)  # its PowerShell removes double quotes
    return f"put a value that has commas, brackets or quotes in both kinds of quotes, as in {example}; {ranges}"


def explain_file(error: yaml.MarkedYAMLError | UnicodeDecodeError) -> str | None:
    """Return one sentence for a file of settings that is no YAML, or not UTF-8; else None."""
    if isinstance(error, UnicodeDecodeError):
        named = [file for file in CONF.rglob("*.yaml") if file.read_bytes() == error.object]
        return f"{seen_from_here(named[0])} is not UTF-8: save it in this encoding." if named else None
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return None
    reason = " ".join(str(error.problem or error.context).split())
    remedy = "indent by spaces, quote a value with commas, colons or quotes as a whole, and write each name once"
    if re.search("escape|hexa?decimal", reason):  # libyaml, which Hydra 1.4 uses, spells it without an a
        remedy = "put a value with backslashes in single quotes, or in none"
    return f"{seen_from_here(Path(mark.name))} is no YAML in line {mark.line + 1} ({reason}): {remedy}."


def explain_unknown(name: str, siblings: Iterable[Any] | None) -> str:
    """Return the sentence for a setting that Hydra lacks; siblings: the names beside it."""
    if name.startswith("hydra.job.env_set."):
        return f"{name} is new to Hydra: type +{name}=VALUE."
    # A setting of one of Hydra's plugins is there only with the option of its group that has it.
    group, _, last = name.replace(".", "/").rpartition("/")
    chosen = [file.stem for file in sorted((CONF / group).glob("*.yaml")) if last in OmegaConf.load(file)]
    if group == "hydra/sweeper" and last in OF_OPTUNA:
        chosen = ["optuna"]
    # Of other sweepers, and of a later launcher.
    is_of_others = group == "hydra/sweeper" and last in ("n_jobs", "max_batch_size")
    if is_of_others or last == "inner_max_num_threads":
        return f"there is no setting {name}: {here_it_is(last, ())}."
    if group.startswith("hydra/") and chosen:
        asked = " or ".join(f"{group}={option}" for option in chosen)
        return f"{name} has no effect here: add {asked}, or leave it out."
    if name in SETTINGS:
        return str(empty_group(group.replace("/", ".")))
    known = sorted(sibling for sibling in siblings or () if sibling != "_target_")
    if group.startswith("hydra/") and known:
        return f"there is no setting {name}: {group.replace('/', '.')} has {', '.join(known)}."
    return f"there is no setting {name}: --cfg hydra shows those of Hydra."


def remedy_for_option(group: str, option: str, options: Sequence[str]) -> str:
    """Return the remedy for an option that a group of conf/ lacks."""
    file = CONF / group / f"{option.removesuffix('.yml')}.yml"  # which Hydra does not read
    if file.is_file():
        return f"rename {seen_from_here(file)} to {file.stem}.yaml"
    plain = Path(without_shell_signs(option)).stem
    similar = [known for known in options if known.lower() == plain.lower()]
    if similar:
        return f"did you mean {group}={similar[0]}"
    if group == "data" and Path(option).exists():
        return f"type {shlex.quote(f'data.path={option}')}"
    ours, _, difference = OPTIONS.get(group, {}).get(option.lower(), "").partition(": ")
    if ours:
        return f"choose {group}={ours} ({difference}), or another of {', '.join(options)}"
    if (group, option) == ("hydra/sweeper", "optuna"):
        return "pip install hydra-optuna-sweeper"
    remedy = f"choose {group} from {', '.join(options)}"
    if group == "hydra/sweeper":
        remedy += f"; {DRAWN}"
    if group == "data":
        remedy += "; a file of yours is data.path=FILE, a data set of Hugging Face data=hf data.name=NAME"
    if group == "model" and re.search(r"[./\\]", option):
        remedy += "; trained weights are init_from=RUN or init_from=hf:NAME"
    if group == "experiment" and {*options} <= {file.stem for file in (CONF / group).glob("*.yaml")}:
        remedy += "; one of yours needs --config-dir=FOLDER beside it"
    if group == "tokenizer" and re.search(r"[./\\]", option):
        remedy += "; a file of another tokenizer is read only with its model, by init_from=hf:FOLDER"
    return remedy

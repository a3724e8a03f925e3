"""train.py's settings, which go through Hydra for its groups and sweeps. Imported where torch is not waited for yet."""

import functools
import logging
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.command import help_entry, help_text
from common.errors import SettingsError, first_line, format_value
from common.mistakes import mistakes_explained, sentence_for
from common.settings import build, parse_overrides, setting_hints, unknown_setting
from common.text import LogFormatter, flat, literal, quote
from runs.summary import begin_job, fail_job, has_checkpoints
from training.config import TrainConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

Function = Callable[[TrainConfig], Any]

log = logging.getLogger("tinygpt")
CONF = Path(__file__).resolve().parents[1] / "conf"
CONSOLE = logging.StreamHandler()
CONSOLE.setFormatter(LogFormatter())
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
SWEEP = ("-m", "--multirun")
SHOWN = (["job"], ["hydra"], ["all"])  # what --cfg shows of the settings
NUMBERS = (int, int | None, float, float | None, bool)
RANGES = "choice(2,4,8), range(1,5), interval(0.005,0.05) and tag(log,interval(0.005,0.05))"


def run_train_command(function: Function) -> None:
    """As cli.command.run_command(), with Hydra's groups and sweeps."""
    with mistakes_explained(explain):
        arguments = sys.argv[1:]
        if {"--help", "-h"} & set(arguments):
            print(help_text(TrainConfig, function, groups_help()), flush=True)
        elif arguments[:1] == ["-sc"] or (arguments[:1] == ["--cfg"] and arguments[1:2] in SHOWN):
            ask_hydra(arguments, function)
        else:
            is_sweep = bool(set(SWEEP) & set(arguments))
            overrides = [argument for argument in arguments if argument not in SWEEP]
            typed = parse_overrides(overrides)
            check_typed(typed, is_sweep)
            brought, typed = inherited_settings(typed)
            register_schema(brought)
            if is_sweep:
                # A + means nothing to what is there already; only Hydra's own settings may be added to.
                plain = [o if o.lstrip("+").startswith("hydra") else o.lstrip("+") for o in overrides]
                call_hydra(["-m", *plain], function)
            else:
                show_log()
                function(compose_settings(typed))


def ask_hydra(arguments: list[str], function: Function) -> None:
    """Print what tab completion offers, forms and modifiers of attention for a start, or what --cfg shows."""
    if typed := re.search(r"\s((?:model\.)?attention=)(\S*)$", os.environ.get("COMP_LINE", "")):
        from model.attention.registry import completions

        print(*(typed[1] + name for name in completions(typed[2])))
        return
    register_schema({})
    call_hydra(arguments, function)


def compose_settings(typed: dict[str, str]) -> TrainConfig:
    """Return the settings of a single run. What is typed stands for itself, whatever characters it has."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONF), version_base="1.3"):
        overrides = [f"{name}={quote(value)}" for name, value in typed.items()]
        cfg = compose("train", overrides, return_hydra_config=True)
    config, sweeper = to_settings(cfg, typed), cfg.hydra.sweeper
    if (sweeper.params or sweeper.variants) and not config.dry_run:  # a plan of one does no harm
        raise SettingsError("many runs are asked for, and one would be made", "add -m")
    return config


def call_hydra(arguments: list[str], function: Function) -> None:
    """Let Hydra answer -sc or --cfg, or call `function` with each job's settings of a sweep."""
    import hydra

    def job(cfg: "DictConfig") -> Any:  # pickled for other processes, with all that it names of this module
        return run_job(cfg, function)

    job.check = check_job  # type: ignore[attr-defined]  # for the sweeper, which gets this function
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CONF.parent), *inherited])  # for submitit's processes
    sys.argv[1:] = arguments
    # Its plugins' schemas have the names of ours, which is said in this process and again in joblib's.
    warnings.filterwarnings("ignore", r"\s*'hydra/launcher/", UserWarning)
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.process")
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(job)()


def show_log() -> None:
    CONSOLE.setStream(sys.stdout)
    log.addHandler(CONSOLE)
    log.setLevel(logging.INFO)


def check_typed(typed: dict[str, str], is_sweep: bool) -> None:
    """Raise SettingsError for what Hydra would refuse in words of its own, or take for something else."""
    hints = setting_hints(TrainConfig)
    for name, value in typed.items():
        is_hydras = name.startswith("hydra")
        if not is_hydras and name not in GROUPS and name not in hints:
            raise unknown_setting(name, [*GROUPS, *hints])
        if is_hydras and not is_sweep:
            raise SettingsError(f"{name}={value} is for sweeps", "add -m, or leave it out")
        is_one = name in GROUPS or name.endswith("attention") or hints.get(name) in NUMBERS
        if "," in value and is_one and not is_sweep:
            raise SettingsError(f"{name}={value} is several values for one run", "add -m to train with each")
        if name == "hydra.sweep.dir" and value == "null":
            raise SettingsError(f"{name}=null is no folder", "name one, or leave it out for a new one")
        if is_sweep and name in ("run_dir", "resume") and value != "null":
            remedy = "leave it out of -m; hydra.sweep.dir=FOLDER names a sweep's folder, and goes on in it"
            raise SettingsError(f"{name}={value} is for a single run", remedy)


def inherited_settings(typed: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what resume's run or init_from's model brings, which counts where nothing is typed, and what is typed with
    the run's directory in place of what was typed for it."""
    places = ("run_dir", "resume", "init_from")
    run_dir, resume, init_from = (None if typed.get(name) == "null" else typed.get(name) for name in places)
    if resume not in (None, "auto", run_dir) and run_dir:
        remedy = "leave out run_dir: a run goes on in its own"
        raise SettingsError(f"{resume=!s} and {run_dir=!s} are two folders", remedy)
    brought: dict[str, Any] = {}
    if resume:
        from runs.directory import find_run, settings_to_go_on

        if run := find_run(resume, run_dir):
            brought = settings_to_go_on(run, setting_hints(TrainConfig), typed)
            typed = typed | {"resume": str(run), "run_dir": str(run)}
            if resume == "auto":  # the same command again, which may have begun with init_from
                typed.pop("init_from", None)
        else:
            typed = typed | {"resume": "null"}
    if init_from and not brought:
        from training.pretrained import pretrained_config

        brought = {"model": asdict(pretrained_config(init_from.strip("\"'")))}  # which a sweep's may have
        for name in typed:  # an experiment's tokenizer applies only to new weights
            if name.split(".")[0] == "tokenizer":
                raise SettingsError(f"init_from={init_from} has its own tokenizer", f"leave out {name}={typed[name]}")
    # A group's option that is typed, as optimizer=adamw, replaces all that is brought of the group.
    brought = {name: value for name, value in brought.items() if name not in typed}
    if "attention" in typed and "model" in brought:
        del brought["model"]["attention"]
    return brought, typed


def register_schema(brought: dict[str, Any]) -> None:
    """Tell Hydra what conf/train.yaml calls train_schema and brought."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    # Two sweeps that start in the same second need folders of their own: short_id ends their names.
    OmegaConf.register_new_resolver("short_id", lambda: os.urandom(2).hex(), use_cache=True, replace=True)
    # Settings that follow from others: ${floordiv:65536,${model.n_embd}}, ${floordiv:${max_steps},0.5}.
    OmegaConf.register_new_resolver("floordiv", lambda *n: int(functools.reduce(operator.floordiv, n)), replace=True)
    ConfigStore.instance().store(name="train_schema", node=literal(asdict(TrainConfig())))
    ConfigStore.instance().store(name="brought", node=literal(brought))


def to_settings(cfg: "DictConfig", typed: Iterable[str] = ()) -> TrainConfig:
    """Return what Hydra has composed as TrainConfig; SettingsError for a `typed` setting that has no effect."""
    from omegaconf import OmegaConf

    ours = OmegaConf.masked_copy(cfg, [str(name) for name in cfg if name != "hydra"])
    config = build(TrainConfig, flat(OmegaConf.to_container(ours, resolve=True)))  # type: ignore[arg-type]
    asked, idle = set(typed), config.idle()
    if any(name.startswith("model.") for name in asked):
        from model.attention import unused_settings  # with torch, which a mistake above does not wait for

        # A choice of model= may bring heads, and learned positions are the GPT's.
        model, kept = config.model, {"n_head"} | ({"position"} if config.model.position != "alibi" else set())
        idle |= {f"model.{name}": f"attention={model.attention}" for name in unused_settings(model) - kept}
    now, default = (flat(asdict(settings)) for settings in (config, TrainConfig()))
    for name in sorted(asked & idle.keys()):
        full = "tokenizer.name" if name == "tokenizer" else name
        if now[full] != default[full]:  # a default that is typed claims nothing
            problem = f"{name}={format_value(now[full])} has no effect with {idle[name]}"
            raise SettingsError(problem, f"leave it out, or change {idle[name].partition('=')[0]}")
    return config


def check_job(overrides: Sequence[str], compose: Callable[[], "DictConfig"]) -> None:
    """Raise SettingsError if a job of a sweep cannot run, as far as is known before its text is read."""
    from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError

    typed = parse_overrides(overrides)
    check_typed(typed, is_sweep=True)
    cfg = compose()
    try:
        config = to_settings(cfg, typed)
    except InterpolationKeyError:
        raise
    except InterpolationResolutionError:  # a value that only the job knows, such as ${hydra:job.num}
        return
    from training.start import check_start  # with torch, which a mistake above does not wait for

    # A cluster's machines have other devices and files, and a plan itself says what this machine lacks.
    is_cluster = cfg.hydra.runtime.choices["hydra/launcher"] == "submitit_slurm"
    check_start(config, is_here=not is_cluster and not config.dry_run)


def run_job(cfg: "DictConfig", function: Function) -> Any:
    """Call the command's function for one job of a sweep, in the job's folder; log and raise what ends it."""
    from hydra.core.hydra_config import HydraConfig

    show_log()
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
            cfg.run_dir = literal(str(folder))
            if has_checkpoints(folder):  # the sweep goes on, or Slurm queued the job again
                cfg.resume, cfg.init_from = literal(str(folder)), None
        if hydra.runtime.choices["hydra/launcher"] != "basic":
            if threads := hydra.launcher.get("cpus_per_task"):
                os.environ.setdefault("OMP_NUM_THREADS", str(threads))
            cfg.device = device_of_job(cfg.device, number)
        cfg.wandb.group = cfg.wandb.group or os.environ.get("WANDB_RUN_GROUP") or literal(Path(hydra.sweep.dir).name)
        cfg.wandb.name = cfg.wandb.name or os.environ.get("WANDB_NAME") or literal(f"{number} {varied}")
        return function(to_settings(cfg, parse_overrides(hydra.overrides.task)))
    except Exception as error:
        if begun:  # else job.json is of a run that is left alone
            fail_job(folder, error)
        sentence = sentence_for(error) or explain(error)
        log.error("job %s failed: %s", number, sentence or error, exc_info=not sentence)
        raise


def device_of_job(device: str, number: int) -> str:
    """Return the device of job `number` of those that share the machine: auto and cuda are dealt out in turn."""
    import torch  # commands that only print something do not wait for it

    count = torch.cuda.device_count()
    return f"cuda:{number % count}" if device in ("auto", "cuda") and count > 1 else device


def explain(error: BaseException) -> str | None:
    """Return one sentence for a mistake that Hydra or OmegaConf finds, None for an error that is ours."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    if isinstance(error, MissingConfigException) and error.options:
        group, option = re.findall(r"((?:hydra/)?[^/]*)/(.*)", error.missing_cfg_file or "/")[0]
        return f"{group}={option} does not exist: choose {group} from {', '.join(error.options)}."
    if isinstance(error, OverrideParseException):
        quoted = "put a value that has spaces, commas, brackets, quotes or accents in both kinds of quotes"
        remedy = f"{quoted}, as in 'data.path=\"notes (1).txt\"'; ranges are {RANGES}"
        return f"cannot read the override {error.override!r}: {remedy}."
    for mistake in (error.__cause__, error):
        if isinstance(mistake, (ConfigAttributeError, ConfigKeyError)):
            return f"there is no setting {mistake.full_key}: --cfg hydra shows those of Hydra."
        if isinstance(mistake, OmegaConfBaseException):
            place = mistake.full_key or "a value"
            return f"{place} cannot be read ({first_line(mistake)}): ${{NAME}} stands for the value of a setting."
    return " ".join(str(error).split()) if isinstance(error, HydraException) else None


def groups_help() -> str:
    """Return what --help says of the groups of conf/ and of sweeps."""
    options = {group: sorted(path.stem for path in (CONF / group).iterdir()) for group in GROUPS}
    groups = "\n".join(help_entry(group, " ".join(names), 15) for group, names in options.items())
    sweep = "Sweeps: -m tries every combination of values separated by commas, as in  "
    about = f"Choose a group's option with GROUP=OPTION; conf/GROUP/OPTION.yaml is what it sets:\n\n{groups}\n\n"
    return f"{about}{sweep}python train.py -m model.n_head=2,4 seed=1,2\n\n"

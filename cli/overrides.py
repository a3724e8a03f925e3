"""The arguments of train.py, checked without Hydra: settings, groups of conf/, sweeps."""

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from common.errors import SettingsError, format_value
from common.files import is_there, user_path
from common.settings import (
    NULLS,
    OF_ONE_RUN,
    TEXT_KINDS,
    WANDB_COMMAND,
    WANDB_SWEEP,
    did_you_mean,
    read_value,
    setting_hints,
    unknown_setting,
)
from common.text import flat, quote, seen_from_here
from training.config import TrainConfig

CONF = Path(__file__).resolve().parents[1] / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
DEFAULTS = CONF / "train.yaml"
SWEEP = ("-m", "--multirun")
FOLDER = ("--config-dir", "-cd")
FILE = ("--config-name", "-cn", "--config-path", "-cp", "--config", "-c", "--config-file", "--cfg-file")  # of others
SUFFIXES = (".yaml", ".yml", ".json", ".py")
LOGS = ("output", "job_logging", "hydra_logging", "verbose")  # Hydra's settings of its own files and logs
WHOLE = {
    "hydra.launcher": "hydra/launcher",
    "hydra.sweeper": "hydra/sweeper",
    "hydra.sweeper.sampler": "hydra/sweeper/sampler",
    "hydra.sweep": "hydra.sweep.dir",
}
"""Hydra's nodes that people give a value, with the names that they mean."""
SERVED = (
    *("hydra/launcher", "hydra/sweeper", "hydra/sweeper/sampler", "hydra/callbacks"),
    *("hydra.launcher", "hydra.sweeper", "hydra.callbacks", "hydra.sweep", "hydra.sweep.dir", "hydra.sweep.subdir"),
    *("hydra.output_subdir", "hydra.searchpath"),
    *("hydra.job.name", "hydra.job.env_set", "hydra.job.env_copy", "hydra.job.config.override_dirname"),
    *("hydra.run.dir", "hydra.job.chdir"),  # which sweeps.sweep.check_launcher() answers
)
"""Hydra's settings and nodes that a sweep serves: others end in tracebacks, write each line twice, or do nothing."""
HYDRAS = (
    *("callbacks", "help", "hydra_help", "hydra_logging", "job", "job_logging", "launcher", "mode"),
    *("output_subdir", "overrides", "run", "runtime", "searchpath", "sweep", "sweeper", "verbose"),
)
"""The nodes below hydra."""
FILLED_IN = ("hydra.launcher._target_", "hydra.sweeper._target_", "hydra.callbacks.sweeps")  # by conf/
HYDRAS_GROUPS = ("hydra", "hydra.launcher", "hydra.sweeper", "hydra.sweep", "hydra.job", "hydra.callbacks")
IN_SHELL = re.compile(r"\$\{oc\.env:(\w+)(?:,([^}]*))?\}|\$\{now:([^}]*)\}")  # what a shell has as well
CALL = re.compile(r"\$\{[\w.]+:")  # of a resolver of Hydra's, as in ${now:%H}
NAMED = re.compile(r"\$\{([\w.]+)\}")  # a setting, as in ${seed}
PATHS = ("data.path", "data.val_path", "init_from", "code")
NUMBERS = (int, int | None, float, float | None, bool)


def take_folder(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without --config-dir=FOLDER, and the override that names FOLDER.

    Raises SettingsError for a folder that cannot be read, and for a file of settings in place of an experiment.
    """
    left: list[str] = []
    searched: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in FOLDER:
            folder = own_options(value if equals else next(words, ""))
            searched = [f"hydra.searchpath=[{quote(f'file://{folder}')}]"]
        elif flag in FILE or (not equals and word.endswith(SUFFIXES)):
            remedy = "write settings in FOLDER/experiment/NAME.yaml below a line # @package _global_, and type "
            raise SettingsError(f"cannot read {word!r}", f"{remedy}--config-dir=FOLDER experiment=NAME")
        else:
            left.append(word)
    return left, searched


def own_options(typed: str) -> Path:
    """Return the absolute path of a folder with options, such as experiment/NAME.yaml.

    Raises SettingsError for a folder without options, for a file in another encoding, and by refuse_hidden() and
    refuse_misread().
    """
    folder = user_path("--config-dir", typed).resolve()
    files = [*folder.glob("*/*.yaml")]
    if not files or not typed:
        remedy = f"name one with files such as {GROUPS[1]}/NAME.yaml"
        raise SettingsError("is no folder with options", remedy, setting="--config-dir", value=typed)
    refuse_hidden(folder)
    for file in files:
        try:
            file.read_bytes().decode()
        except UnicodeDecodeError:
            raise SettingsError(f"{seen_from_here(file)} is not UTF-8", "save it in this encoding") from None
        refuse_misread(file)
    return folder


def refuse_hidden(folder: Path) -> None:
    """Raise SettingsError for a file with the name of an option of ours, which Hydra reads."""
    for ours in sorted(CONF.rglob("*/*.yaml")):
        place = ours.relative_to(CONF)
        file = folder / place
        if file.is_file() and ours.read_bytes() != file.read_bytes():
            problem = f"{seen_from_here(file)} is not read: tinygpt has an option of its own of this name"
            group = place.parent.as_posix()
            raise SettingsError(problem, f"rename it, as to my_{file.name}, and type {group}=my_{file.stem}")


def refuse_misread(file: Path) -> None:
    """Raise SettingsError for a value of a file that YAML reads as another than is typed.

    Without quotes YAML takes 12:30 for 750, 010 for 8, no for false and 1.10 for 1.1. Raises it too for a byte order
    mark before the line # @package _global_, which Hydra then passes over, and by package_of(), check_shape(),
    refuse_second_override() and refuse_not_served().
    """
    from omegaconf import OmegaConf  # mistakes in typed settings are answered before this import

    hints = setting_hints(TrainConfig)
    content = file.read_text("utf-8")
    if re.match("\ufeff *# *@package", content):
        fault = f"{seen_from_here(file)} begins with a byte order mark, which hides its line # @package from Hydra"
        remedy = rf"sed -i '1s/^\xEF\xBB\xBF//' {shlex.quote(seen_from_here(file))} removes it"
        raise SettingsError(fault, remedy)
    package = package_of(file, content)
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(file))
    except Exception:  # Hydra finds these mistakes again, and composition.explain() names them
        return
    if package != "experiment":  # an experiment without the line is refused where the settings are composed
        check_shape(file, loaded, package)
    written = flat({package: yaml.load(content, yaml.BaseLoader)})  # each value is a text
    read = flat({package: loaded})
    if file != DEFAULTS:
        refuse_second_override(file, content)
        refuse_not_served(file, [name.removeprefix(".") for name in written])
    for place in written.keys() & read.keys():
        name = place.removeprefix(".").removeprefix("hydra.sweeper.params.")
        hint = hints.get(name)
        if hint is None or name == "compile":  # whose on and off may be true and false
            continue
        is_range = "hydra.sweeper.params." in place and isinstance(read[place], list)
        pairs = zip(written[place], read[place], strict=True) if is_range else [(written[place], read[place])]
        for typed, value in pairs:
            if is_misread(name, typed, value, hint):
                fault = f"{seen_from_here(file)} has {name}: {format_value(typed)}, which YAML reads as "
                remedy = "write the number that is meant"
                if hint in TEXT_KINDS:
                    remedy = "put quotes around each text" if isinstance(typed, list) else f"write '{typed}'"
                raise SettingsError(fault + format_value(value), remedy)


def package_of(file: Path, content: str) -> str:
    """Return the node below which Hydra puts the settings of a file, "" for the root.

    Raises SettingsError for a line # @package that Hydra cannot read, or that is of no experiment.
    """
    if file == DEFAULTS:
        return ""
    group = file.parent.name
    line = re.search(r"^\s*#\s*@package[ \t]+(.*)", content, re.M)
    if not line:
        return group
    package = line[1].strip()
    if package != "_global_" and (group == "experiment" or " " in package):
        fault = f"{seen_from_here(file)} has the line {line[0].strip()}"
        raise SettingsError(fault, "write # @package _global_, and nothing behind it")
    return {"_global_": "", "_group_": group}.get(package, package)


def refuse_not_served(file: Path, names: list[str]) -> None:
    """Raise SettingsError for a setting of Hydra's in a file that no sweep serves."""
    for name in names:
        if name == "hydra.searchpath":
            raise SettingsError(f"{seen_from_here(file)} has {name}", "leave it out, and type --config-dir=FOLDER")
        if name.startswith("hydra.") and not is_served(name):
            fault = f"{seen_from_here(file)} has {name}, which is no setting of a sweep"
            raise SettingsError(fault, remedy_for_hydras(name))


def check_shape(file: Path, settings: Any, package: str) -> None:
    """Raise SettingsError for a file with a group in the place of a setting, or the reverse."""
    name_of_file = seen_from_here(file)
    if settings is not None and not isinstance(settings, dict):
        raise SettingsError(f"{name_of_file} is no list of settings", "write a line NAME: VALUE for each")
    hints = setting_hints(TrainConfig)
    for above, own, value in nodes(settings or {}, f"{package}." if package else ""):
        name = f"{above}{own}"
        of_sweeper = above.startswith("hydra.sweeper.")  # which has the names of settings
        if not isinstance(own, str) or (("." in own or "/" in own) and not of_sweeper):
            refuse_name(name_of_file, own, value)
        typed = f"{name}: {json.dumps(value, ensure_ascii=False, default=str)}"
        if own == "defaults" and not is_defaults(value):
            raise SettingsError(f"{name_of_file} has {typed}", "write a line - override /GROUP: OPTION for each group")
        if name in hints and isinstance(value, dict):
            raise SettingsError(f"{name_of_file} has {typed}, and {name} takes one value", f"write {own}: VALUE")
        is_group = name in (*GROUPS, *HYDRAS_GROUPS) or any(known.startswith(f"{name}.") for known in hints)
        if is_group and value is None:
            raise SettingsError(f"{name_of_file} has nothing below the line of {name}", "leave out that line")
        if is_group and not isinstance(value, dict):
            remedy = f"write its settings below the line of {name}"
            group = name.replace(".", "/")
            if name in (*GROUPS, "hydra.launcher", "hydra.sweeper") and re.fullmatch(r"[\w.-]+", str(value)):
                line = f"{group}: {value}" if file == DEFAULTS else f"override /{group}: {value}"
                line = str(value) if name == file.parent.name else line
                remedy = f"write the option among its defaults, as in - {line}"
            raise SettingsError(f"{name_of_file} has {typed}, and {name} is a group of settings", remedy)


def refuse_name(file: str, name: Any, value: Any) -> None:
    """Raise SettingsError for the name of a setting or group that Hydra does not read as one."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    if not isinstance(name, str):
        fault = f"{file} has {format_value(name)}: {shown}, which YAML reads as no name"
        raise SettingsError(fault, "write a line NAME: VALUE for each setting")
    *above, last = name.split(".")
    remedy = f"write {': {'.join([*above, last])}: {shown}{'}' * len(above)}"
    if "/" in name:
        remedy = f"write it among its defaults, as in - override /{name.lstrip('/')}: OPTION"
    raise SettingsError(f"{file} has {name}: {shown}", remedy)


def nodes(settings: dict[Any, Any], above: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield settings and groups: the dotted names above each, its own name, its value."""
    for name, value in settings.items():
        yield above, name, value
        if isinstance(value, dict):
            yield from nodes(value, f"{above}{name}.")


def is_defaults(value: Any) -> bool:
    """Return whether a value is a list of options, as Hydra reads the defaults of a file."""

    def is_item(item: Any) -> bool:
        if isinstance(item, dict) and len(item) == 1:
            (option,) = item.values()
            options = option if isinstance(option, list) else [option]
            return option is None or all(isinstance(one, str) for one in options)
        return isinstance(item, str)

    return isinstance(value, list) and all(map(is_item, value))


def refuse_second_override(file: Path, content: str) -> None:
    """Raise SettingsError for an override in a file's defaults that comes second."""
    counts = Counter(overridden(content))
    of_ours = overridden(DEFAULTS.read_text("utf-8")) if counts else []
    for group, count in counts.items():
        if group in of_ours:
            fault = f"conf/train.yaml overrides {group}, so that of {seen_from_here(file)} has no effect"
            raise SettingsError(fault, "take one of them out")
        if count > 1:
            fault = f"{seen_from_here(file)} overrides {group} {count} times, and Hydra takes the first"
            raise SettingsError(fault, "leave the one that is meant")


def overridden(content: str) -> list[str]:
    """Return the groups that the defaults of a file of settings override, in order.

    Such a line is `- override /optimizer: muon`.
    """
    settings = yaml.load(content, yaml.BaseLoader)
    defaults = settings.get("defaults") if isinstance(settings, dict) else None
    items = [item for item in defaults if isinstance(item, dict)] if isinstance(defaults, list) else []
    names = [name for item in items for name in item if name.startswith("override ")]
    return [name.removeprefix("override ").strip().lstrip("/") for name in names]


def check_options(typed: dict[str, str]) -> None:
    """Call refuse_misread() for files of conf/ that are read, refuse_hidden() for other folders."""
    for folder in re.findall(r"file://(.+?)['\"]*(?=\]|,\s*['\"]?(?:file|pkg)://)", typed.get("hydra.searchpath", "")):
        refuse_hidden(Path(folder))
    for group in typed.keys() & {*GROUPS}:
        for option in typed[group].strip("[]()").split(","):
            file = CONF / group / f"{option}.yaml"
            if file.is_file():
                refuse_misread(file)
    refuse_misread(DEFAULTS)


def is_misread(name: str, typed: Any, value: Any, hint: Any) -> bool:
    """Return whether YAML's value of a setting is another than that of the same typed letters."""
    if value is None:  # also ~, and nothing
        return False
    try:
        meant = read_value(name, value, hint)
    except SettingsError:  # which is told where the settings are read
        return False
    try:
        return read_value(name, typed, hint) != meant
    except SettingsError:  # letters of YAML alone, such as .nan and 0x10; but a time is rarely meant as a number
        return ":" in typed


def is_served(name: str) -> bool:
    """Return whether a sweep serves a setting of Hydra's, by its dotted name."""

    def is_of(*nodes: str) -> bool:
        return name in nodes or name.startswith(tuple(f"{node}." for node in nodes))

    return is_of(*SERVED) and not is_of(*FILLED_IN)


def check_hydras(name: str, value: str, is_sweep: bool) -> None:
    """Raise SettingsError for a setting of Hydra's that has no use here."""
    if not is_sweep:
        remedy = "add -m; run_dir= names the folder of a run"
        if name == "hydra.run.dir":  # which a sweep has no use for
            raise SettingsError(f"{name}={value} has no effect here", "run_dir=FOLDER names the folder of a run")
        if name == "hydra.searchpath":
            remedy = "type --config-dir=FOLDER"
        if name.startswith("hydra.job.env_set."):
            remedy = f"type {name.removeprefix('hydra.job.env_set.')}={value} before the command"
        if not is_served(name):
            remedy = "type -m in its place" if name == "hydra.mode" else remedy_for_hydras(name)
        if is_log(name):
            remedy = "leave it out: Hydra writes no file and no log of its own for a run"
        raise SettingsError(f"{name}={value} is for sweeps", remedy)
    if not is_served(name):
        raise SettingsError(f"{name}={value} is no setting of a sweep", remedy_for_hydras(name))


def is_log(name: str) -> bool:
    """Return whether a setting of Hydra's is of its own files and logs."""
    return name.removeprefix("hydra")[1:].startswith(LOGS)


def remedy_for_hydras(name: str) -> str:
    """Return the remedy for a setting of Hydra's that no sweep serves."""
    meant = get_close_matches(name, SERVED, 1, cutoff=0.93)  # which hydra.job.num and hydra.job.name do not reach
    logged = ", for the terminal and train.log have the messages of each job" * is_log(name)
    node, _, rest = name.partition(".")
    is_of_part = node == "hydra" and rest.partition(".")[0] not in HYDRAS  # of a sweeper, launcher or folder
    parts = f", or type its part of Hydra too, as in hydra.sweeper.{rest} or hydra.launcher.{rest}" * is_of_part
    return did_you_mean(meant) or f"leave it out{logged}{parts}"


def several_settings(group: str, value: str, is_sweep: bool) -> SettingsError:
    """Return the error for a group with its settings in braces, as in optimizer={'lr': 0.01}."""
    parts: list[dict[str, Any]] = []
    with suppress(yaml.YAMLError, TypeError):  # the latter is of a name that is a number
        spaced = re.sub(r"([{,]\s*[A-Za-z_]\w*):(?=\S)", r"\1: ", value)  # YAML needs the blank, Hydra does not
        parsed = yaml.safe_load(f"[{spaced}]")
        parts = [flat({group: part}) for part in parsed] if all(isinstance(part, dict) for part in parsed) else []
    named = parts[0] if len(parts) == 1 else {}
    variants = [[f"{name}={format_value(one)}" for name, one in part.items()] for part in parts]
    if is_sweep and len(parts) > 1 and not any(" " in one for variant in variants for one in variant):
        # The values of a part belong together.
        together = json.dumps([*map(" ".join, variants)], ensure_ascii=False)
        remedy = f"type {shlex.quote(f'hydra.sweeper.variants={together}')}"
    elif WANDB_SWEEP and named:
        remedy = f"in the sweep's YAML write the parameters as {', '.join(f'{name}: …' for name in named)}"
    elif named and None not in named.values():
        remedy = f"type {' '.join(f'{name}={setting}' for name, setting in named.items())}"
    else:
        remedy = f"type each setting as {group}.NAME=VALUE"
    return SettingsError(f"{group}={value} has settings in braces", remedy)


def check_wandb_sweep(typed: dict[str, str]) -> None:
    """Raise SettingsError unless the values that wandb's agent has chosen for a run are typed.

    wandb shows them as the run's, also if the command in the sweep's YAML has no ${args_no_hyphens}.
    """
    file = Path(os.environ.get("WANDB_SWEEP_PARAM_PATH", ""))
    if not (WANDB_SWEEP and file.is_file()):
        return
    hints = setting_hints(TrainConfig)
    for name, chosen in yaml.safe_load(file.read_text(encoding="utf-8")).items():
        if not isinstance(chosen, dict):  # the version of the file
            continue
        kind = hints.get(name, str)  # an option of a group is a text
        value = str(chosen["value"])  # as the agent types it
        if name not in typed or read_value(name, typed[name], kind) != read_value(name, value, kind):
            raise SettingsError(f"{name}={value} is chosen by a sweep of wandb, and not typed", WANDB_COMMAND)


def in_shell(variable: re.Match[str]) -> str:
    """Return a match of IN_SHELL as a shell writes it."""
    name, default, time = variable.groups()
    if time is not None:
        return f"$(date '+{time}')"
    return f"${name}" if default is None else f"${{{name}:-{default}}}"


def check_typed(typed: dict[str, str], is_sweep: bool) -> None:
    """Raise SettingsError for arguments that Hydra would misread, or refuse less clearly."""
    hints = setting_hints(TrainConfig)
    for name, value in typed.items():
        is_hydras = name.startswith("hydra")
        if value.startswith("{") and name in {known.partition(".")[0] for known in hints if "." in known}:
            raise several_settings(name, value, is_sweep)
        if not is_hydras and name not in GROUPS and name not in hints:
            raise unknown_setting(name, [*GROUPS, *hints], typed)
        if name in WHOLE and not value.startswith("{"):
            remedy = "leave it out" if value == "null" else f"type {WHOLE[name]}={value}"
            raise SettingsError(f"{name}={value} would take the place of all its settings", remedy)
        dotted = name.replace("/", ".")
        if dotted.startswith(("hydra.launcher.", "hydra.sweeper.")) and name not in (dotted, "hydra/sweeper/sampler"):
            raise SettingsError(f"{name}={value} has a slash, which is for options", f"type {dotted}={value}")
        if is_hydras:
            check_hydras(name, value, is_sweep)
        absent = {*re.findall(r"\w+", value)} - os.environ.keys() if name == "hydra.job.env_copy" else set()
        if absent:
            remedy = f"set {min(absent)} before the command, or leave it out"
            raise SettingsError(f"{name}={value} has a variable that is not set", remedy)
        is_one = name in GROUPS or name.endswith("attention") or hints.get(name) in NUMBERS
        # A text may have any signs, and a folder's name; but ${oc.env:NAME}, ${now:%H} and ${seed} are meant for Hydra.
        is_computed = CALL.search(value) or {*NAMED.findall(value)} & hints.keys()
        is_number = "${" in value and hints.get(name) in NUMBERS
        if not is_sweep and (is_number or (is_computed and not name.endswith("prompt"))):
            remedy = "type the value, or add -m"
            if IN_SHELL.search(value):
                noun = "the time" if "${now:" in value else "a variable"
                remedy += f'; the shell puts in {noun}: {name}="{IN_SHELL.sub(in_shell, value)}"'
            raise SettingsError(f"{name}={value}: ${{…}} has a value in sweeps alone", remedy)
        is_list = value.startswith(("[", "("))
        # In a sweep Hydra composes a list of options into one job, which two experiments may be for.
        if "," in value and is_one and (not is_sweep or (is_list and name != "experiment")):
            bare = value.translate(str.maketrans("", "", "[]()"))
            remedy = f"type -m {name}={bare}" if is_list else "add -m"
            remedy += " to train with each"
            if is_list and name.endswith("attention"):
                remedy += f"; {name}={bare.replace(',', '/')} has them in turns, layer by layer"
            elif is_list and name.startswith("model."):
                remedy += "; all layers of a model have the same"
            elif re.fullmatch(r"\d{1,3}(,\d{3})*,000", value):
                remedy = f"write {name}={value.replace(',', '')}, or {remedy}"
            raise SettingsError(f"{name}={value} is several values for one run", remedy)
        is_option = name in GROUPS or name.startswith("hydra/")
        if is_sweep and is_option and value.startswith(("[", "{")) and (name != "experiment" or value[0] == "{"):
            raise SettingsError(f"{name}={value} is no option", "leave it out, or type one option without brackets")
        if is_sweep and name in GROUPS and "null" in value.strip("[]").split(","):
            raise SettingsError(f"{name}={value}: null is no option of {name}", "leave it out, or name an option")
        if is_sweep and name in PATHS and "," in value and is_there(name, value):
            quoted = shlex.quote(f"{name}={quote(value)}")
            raise SettingsError(f"{name}={value} is several values", f"{quoted} is the file or folder of this name")
        if is_sweep and name in OF_ONE_RUN and value not in NULLS:
            remedy = "leave it out of -m; hydra.sweep.dir=FOLDER names a sweep's folder, and goes on in it"
            raise SettingsError(f"{name}={value} is for a single run", remedy)

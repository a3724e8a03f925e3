"""Settings: NAME=VALUE arguments in, a checked dataclass out, one sentence for a mistake."""

import difflib
import json
import logging
import os
import re
import shlex
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from itertools import product, takewhile
from types import NoneType
from typing import Any, TypeVar, get_args

import yaml

from common.aliases import ALIASES, ALIASES_BESIDE, OPTIONS
from common.errors import SettingsError, format_value
from common.files import is_there
from common.text import flat, unescaped

Schema = TypeVar("Schema")
log = logging.getLogger("tinygpt")  # without a handler its warnings go to stderr
MAY_BE_EMPTY = ("prompt", "sample_prompt")
"""Settings whose empty text has a meaning."""
OF_ONE_RUN = ("run_dir", "resume")
"""Settings that a sweep's jobs have of their own."""
OF_WORDS = re.compile(r"(sample_)?prompts?|stop|(data\.)?separator|wandb\..*")
"""The settings whose texts may have words such as seed=2."""
NO_LIMIT = ("all", "inf", "infinity", "never", "none", "null", "random", "unlimited")
"""Words in place of a number, for what others write as -1: a setting that refuses both has one remedy."""
TEXT_KINDS = (str, str | None, list[str], list[str] | None)
"""The types of settings that are texts, or lists of them."""
NULLS = ("null", "None")  # None is Python's, which a sweep by wandb types
COMMANDS: dict[str, type] = {}
"""The settings of each command, which cli/command.py enters."""
WANDB_SWEEP = "WANDB_SWEEP_ID" in os.environ
"""Whether the agent of a sweep by wandb starts this command."""
WANDB_COMMAND = """write command: ["${env}", python, "${program}", "${args_no_hyphens}"] in the sweep's YAML"""
"""The remedy for a command that the agent types otherwise."""
LINE_ENDS = {"^": "cmd.exe", "`": "PowerShell", "\\": "a Linux shell"}
"""The sign by which a command goes on in the next line, and the shell that reads it so."""
NONE: dict[str, Any] = {}
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_overrides(arguments: Iterable[str], names: Collection[str] = ()) -> dict[str, str]:
    """Return the values of NAME=VALUE arguments by name, without Hydra's leading +.

    Raises SettingsError for any other argument, and for an empty value: a shell variable that is not set gives one.
    names: the settings that there are, for the answer to --NAME.
    """
    values = {}
    before = ""
    arguments = [*arguments]
    pairs = (argument.lstrip("-+").partition("=") for argument in arguments)
    typed = {name: value for name, _, value in pairs}
    for place, argument in enumerate(arguments):
        if not argument:
            problem = f"cannot read {argument!r}, an empty argument, as of a variable in quotes that is not set"
            raise SettingsError(problem, "leave it out, or give the variable a value")
        if not argument.strip(" "):
            problem = f"cannot read {argument!r}, an argument of blanks, as of one behind the \\ that ends a line"
            raise SettingsError(problem, "leave it out")
        shell = LINE_ENDS.get(argument.strip())
        if shell and not any(map(is_word_alone, arguments[place + 1 : place + 2])):  # as in a text without quotes
            problem = f"cannot read {argument.strip()}, by which a command of {shell} goes on in the next line"
            raise SettingsError(problem, "leave it out, and type the command on one line")
        if argument.startswith("'"):
            shown = "NAME=['A','B']" if "[" in argument else argument.strip("'")
            remedy = f'type double quotes around an argument, and single ones inside, as in "{shown}"'
            fault = "cmd.exe leaves single quotes in place"
            if os.name != "nt":  # where a program starts the command, such as Docker, each quote is a letter
                fault = "no shell has taken its single quotes"
                remedy = f"leave them out, as in {argument.strip(chr(39))}"
            raise SettingsError(f"cannot read {argument!r}: {fault}", remedy)
        name, equals, value = argument.lstrip("+").partition("=")
        # Refuse signs that a person may not see. A setting's name has none of them, and a value no \r at its end.
        if argument.endswith("\r"):
            problem = f"{argument!r} ends in a carriage return, as each line of a script with Windows' line ends"
            raise SettingsError(problem, r"convert the script: sed -i 's/\r$//' SCRIPT")
        sign = hidden_sign(name)
        if sign:
            remedy = "type it anew: editors and web pages put such signs in place of - and quotes, or between letters"
            raise SettingsError(f"cannot read {argument!r}, which has {sign}", remedy)
        # As in Hydra, and no file of a home folder.
        is_taken_away = name.startswith("~") and ("/" not in name or name.startswith("~hydra/"))
        if name.startswith("-") or is_taken_away or not name or not equals:
            remedy = f"settings are typed NAME=VALUE, without dashes; {way_without_dashes(name, typed, names, before)}"
            if is_taken_away:
                another = f"; {name[1:]}=VALUE gives another" if name[1:] in names else ""
                remedy = f"leave it out: a setting that is not typed has its default{another}"
            elif before and not equals and not name.startswith(("-", "~")):
                words = [before, *takewhile(is_word_alone, arguments[place:])]
                whole = " ".join(words).replace("'", "")
                listed = ",".join(words).replace("'", "")
                remedy += f'; quote a value with spaces: "{whole}", and in PowerShell one with commas: "{listed}"'
            if argument.startswith("#"):  # of a command pasted with its comment
                remedy = "leave out the comment, or let zsh do so from now on: setopt interactivecomments"
            if name in ("--local-rank", "--local_rank"):
                remedy = "leave it out, and type torchrun in place of python -m torch.distributed.launch, which adds it"
            if argument in ("-m", "--multirun") and "=" in "".join(arguments[place + 1 : place + 2]):  # as of train.py
                remedy = "leave it out, and start the command once for each value: train.py alone has sweeps"
            if WANDB_SWEEP and name.startswith("--"):  # as the agent types them by default
                remedy = WANDB_COMMAND
            raise SettingsError(f"cannot read {argument!r}", remedy)
        if not value and name not in MAY_BE_EMPTY:
            words = [*takewhile(is_word_alone, arguments[place + 1 :])]
            remedy = f"write {shlex.quote(argument + ' '.join(words))}" if words else "give it a value, or leave it out"
            raise SettingsError(f"{name}= is empty", remedy)
        # Quotes hold several arguments together.
        apart = taken_apart(argument, names) if name in names and not OF_WORDS.fullmatch(name) else ""
        if apart and not is_there(name, value):
            raise SettingsError(f"{argument!r} is several settings in one argument", apart)
        values[name] = value
        before = argument
    return values


def is_word_alone(argument: str) -> bool:
    """Return whether an argument is a part of a value that a shell has divided."""
    return "=" not in argument and not argument.startswith(("-", "+", "~", "#"))


def way_without_dashes(name: str, typed: Mapping[str, str], names: Collection[str], before: str) -> str:
    """Return what to type in place of --NAME, --NAME=VALUE or NAME.

    typed: all settings of the command. before: the argument before it.
    """
    bare = name.lstrip("-")
    value = typed.get(bare)
    apart = taken_apart(f"{bare}={value}", names)
    if apart:
        return apart
    if bare in names:
        return f"type {shlex.quote(f'{bare}={value}') if value else f'{bare}=VALUE'}"
    is_word = bare == name and before  # perhaps of a text without quotes
    return "--help all lists them" if is_word else remedy_for_unknown(bare, names, typed)


def taken_apart(argument: str, names: Collection[str]) -> str:
    """Return the remedy for an argument that holds several settings; "" for one."""
    first, *others = argument.split() or [""]
    is_several = all("=" in word and (word.startswith("--") or word.partition("=")[0] in names) for word in others)
    apart = shlex.join([first, *(word.lstrip("-") for word in others)])
    return f"type each as an argument of its own: {apart}" if others and is_several else ""


def tell_repeated(arguments: Iterable[str], is_sweep: bool = True) -> None:
    """Tell of a setting that is typed with several values, of which the last one counts.

    So a shell hands on seed={1,2}: seed=1 seed=2.
    """
    given: dict[str, dict[str, None]] = {}
    for argument in arguments:
        name, _, value = argument.lstrip("+").partition("=")
        given.setdefault(name, {})[value] = None
    for name, values in given.items():
        if len(values) > 1 and os.environ.get("RANK", "0") == "0":
            *_, last = values
            is_plain = all(re.fullmatch(r"[\w./+-]+", value) for value in values)  # for the shell and for Hydra
            swept = is_sweep and is_plain and not name.startswith("hydra") and name not in OF_ONE_RUN
            remedy = f": a run for each is -m {name}={','.join(values)}" if swept else ""
            log.warning("%s is typed with %d values, and the last one counts, %s%s.", name, len(values), last, remedy)


def hidden_sign(text: str) -> str:
    """Return the first sign of a text that is invisible or looks like - or a quote; or "".

    It is named by its code, as in U+2013 (EN DASH).
    """
    for letter in text:
        is_hidden = unicodedata.category(letter) in ("Cf", "Zs", "Pd", "Pi", "Pf")
        if is_hidden and not letter.isascii():
            return f"U+{ord(letter):04X} ({unicodedata.name(letter, 'no name')})"
    return ""


def from_arguments(schema: type[Schema], arguments: list[str], base: Schema | None = None) -> Schema:
    """Return the `schema` object of NAME=VALUE arguments, which change `base` or the defaults."""
    values = {} if base is None else flat(asdict(base))  # type: ignore[call-overload]
    typed = parse_overrides(arguments, setting_hints(schema))
    settings = build(schema, values | typed, None if base is None else lambda name: typed_value(values[name]))
    tell_lists(schema, typed)
    return settings


def tell_lists(schema: type, typed: dict[str, str]) -> None:
    """Tell of lists that are read otherwise than they may be meant.

    stop=[INST] is a list of the text INST, and stop=A,B the one text A,B.
    """
    hints = setting_hints(schema)
    for name, value in typed.items():
        if hints.get(name) not in (list[str], list[str] | None):
            continue
        if re.fullmatch(r"""\[[^][{},"']+\]""", value) and "\\n" not in value:
            text = value[1:-1].strip()
            whole = as_list(name, [value])
            log.warning("%s=%s is a list of the text %s: %s has the brackets.", name, value, text, whole)
        elif re.fullmatch(r"""[^][\s,"']+(,[^][\s,"']+)+""", value):
            texts = [unescaped(each) or "" for each in value.split(",")]
            log.warning("%s=%s is one text with its commas: %s is a list.", name, value, as_list(name, texts))


def as_list(name: str, texts: list[str]) -> str:
    """Return a list of texts as it is typed in a shell."""
    return shlex.quote(f"{name}={json.dumps(texts, ensure_ascii=False)}")


def build(schema: type[Schema], values: dict[str, Any], left_out: Callable[[str], str] | None = None) -> Schema:
    """Return the checked `schema` object of values by dotted names.

    Raises SettingsError for an unknown name, a wrong type or a value that the dataclass refuses. left_out: returns
    the value of a setting that is not typed, "" if it is not known; by default that of the dataclass.
    """
    settings = {name: field for name, field, _ in settings_in(schema)}
    # data=jsonl is short for data.source=jsonl.
    values = {f"{name}.source" if f"{name}.source" in settings else name: value for name, value in values.items()}
    for name in values:
        if name not in settings:
            raise unknown_setting(name, settings, values)

    def make(group: type, prefix: str) -> Any:
        given = {}
        for field in fields(group):
            name = prefix + field.name
            if is_dataclass(field.type):
                given[field.name] = make(field.type, f"{name}.")  # type: ignore[arg-type]
            elif name in values:
                given[field.name] = read_value(name, values[name], field.type)
        return group(**given)

    try:
        return make(schema, "")
    except SettingsError as error:
        name = error.setting
        if not error.remedy and error.value.lower() in NO_LIMIT:
            error.remedy = remedy_below(schema, values, name)
        if not error.remedy and name in settings:
            usual = typed_default(settings[name]) if left_out is None else left_out(name)
            error.remedy = "correct it, or leave it out" + f" for {name}={usual}" * bool(usual)
        raise


def remedy_below(schema: type, values: dict[str, Any], name: str) -> str:
    """Return the remedy for a setting that is -1, or "" if it may be."""
    try:
        build(schema, values | {name: -1})
    except SettingsError as error:
        return error.remedy if error.setting == name else ""
    return ""


def read_value(name: str, value: Any, hint: Any) -> Any:
    """Return a typed or parsed value in its setting's type; SettingsError for another type."""
    is_nullable = NoneType in get_args(hint)
    if is_nullable and value in (None, *NULLS):
        return None
    if value is None and name in MAY_BE_EMPTY:  # as YAML reads a name without a value
        return ""
    kind = get_args(hint)[0] if is_nullable else hint
    noun, read = READERS[kind]
    try:
        if kind is str and value in (None, *NULLS) and name not in MAY_BE_EMPTY:  # else it would name a folder
            raise ValueError("a text is wanted")
        return read(value)
    except (LookupError, ValueError, yaml.YAMLError):
        sign = hidden_sign(format_value(value))
        has_sign = f", and has {sign}" if sign else ""
        counted = " of steps" * name.endswith("_interval")  # not of minutes
        fault = f"is not {noun}{counted}{', or null' * is_nullable}{has_sign}"
        remedy = f"write '{name}={quoted_list(value)}'" if kind == list[str] and quoted_list(value) else ""
        if kind is int and str(value).startswith("+"):
            remedy = "write the sum, without +"
        ours = in_our_letters(value, kind)
        if ours:
            remedy = f"write {name}={ours}"
        raise SettingsError(fault, remedy, setting=name, value=value) from None


def quoted_list(value: Any) -> str:
    """Return a list of texts with quotes around each, "" if it is none: [".","!"] for [.,!].

    A text may have brackets of its own: ["[A]","[B]"] for [[A],[B]].
    """
    items = str(value)[1:-1].split(",")
    bare = [item.strip()[1:-1] if re.fullmatch(r"\s*\[.*\]\s*", item) else item for item in items]
    is_list = str(value)[:1] == "[" and str(value)[-1:] == "]" and not {*"".join(bare)} & {*"[]{}'\""}
    if not is_list or not all(items):
        return ""
    quoted = "[{}]".format(",".join(f'"{item.strip()}"' for item in items))
    try:
        yaml.safe_load(quoted)
    except yaml.YAMLError:  # a backslash that begins no escape of YAML
        quoted = quoted.replace("\\", "\\\\")
    return quoted


def in_our_letters(value: Any, kind: Any) -> str:
    """Return a truth or a number as it is typed here: 10000 for 10k; "" if it is neither."""
    text = format_value(value)
    if kind is bool:
        return {"1": "true", "0": "false"}.get(text, "")
    number = re.fullmatch(r"(\d+|\d*\.\d+)([kKMB%])", text)
    if kind not in (int, float) or not number or (kind is int and number[2] == "%"):
        return ""
    scale = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "%": 0.01}[number[2]]
    return f"{float(number[1]) * scale:.12g}"


def whole_number(value: Any) -> int:
    """Return 1000 for 1000, 1e3 and 1000.0; not for +1000, as if it were added to another."""
    text = format_value(value)
    if not float(text).is_integer() or text.startswith("+"):
        raise ValueError("a whole number is wanted")
    return int(text) if text.lstrip("-").isdecimal() else int(float(text))


def texts(value: Any) -> list[str]:
    """Return the texts of [a,b], or of a single one without brackets, in which \\n is a line end."""
    # BaseLoader leaves every item a text: no is not False, 1 not a number.
    parsed = value
    if isinstance(value, str):
        if value.startswith("extend_list("):  # of hydra-core 1.4, in sweeps
            raise ValueError("a whole list is wanted")
        parsed = yaml.load(value, yaml.BaseLoader) if value[:1] == "[" else unescaped(value)
    items = [*parsed] if isinstance(parsed, (list, tuple)) else [parsed]
    if any(isinstance(item, (list, dict, NoneType)) for item in items):
        raise ValueError("a text is wanted")
    return [format_value(item) for item in items]


# {type: (its noun, its reader)}
READERS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    str: ("a text", format_value),
    bool: ("true or false", lambda value: TRUTHS[format_value(value).lower()]),
    int: ("a whole number", whole_number),
    float: ("a number", lambda value: float(format_value(value))),
    list[str]: ("a list of texts, as in '[a,b]'", texts),
    list[int]: ("a list of whole numbers, as in '[1,2]'", lambda value: [whole_number(text) for text in texts(value)]),
}


def settings_in(schema: Any, prefix: str = "") -> Iterator[tuple[str, Field, type]]:
    """Yield the dotted name, field and dataclass of each setting, groups last."""
    for field in sorted(fields(schema), key=lambda field: is_dataclass(field.type)):
        if is_dataclass(field.type):
            yield from settings_in(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, schema


def setting_hints(schema: type) -> dict[str, Any]:
    """Return the type hint of each setting by its dotted name."""
    return {name: field.type for name, field, _ in settings_in(schema)}


def typed_default(field: Field) -> str:
    """Return a setting's default as a person would type it."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return typed_value(default)


def typed_value(value: Any) -> str:
    """Return a setting's value as a person would type it."""
    return value if isinstance(value, str) and value else json.dumps(value)


def unknown_setting(name: str, names: Collection[str], typed: Mapping[str, Any] = NONE) -> SettingsError:
    """Return the error for a name that is not among `names`, with ours for it.

    typed: all settings of the command.
    """
    return SettingsError(f"there is no setting {name}", remedy_for_unknown(name, names, typed))


def remedy_for_unknown(name: str, names: Collection[str], typed_values: Mapping[str, Any] = NONE) -> str:
    """Return the remedy for a name that is not among `names`.

    typed_values: all settings of the command.
    """
    # It may be meant to add to a list: wandb.tags.+=c, wandb.tags.2=c, wandb.tags[2]=c.
    whole = re.sub(r"\.?\+$|\.\d+$|\[\d*\]$|\.append$", "", name)
    if whole != name and whole in names:
        return f"a list is typed whole, as in '{whole}=[A,B]'"
    typed = name.lower().replace("-", "_")
    last = last_word(typed)
    # A command that reads a checkpoint takes its model as it is.
    beside = {**typed_values, typed: typed_values.get(name, ""), last: typed_values.get(name, "")}
    meant = [typed, *ours_for(typed, names, beside)]
    of_model = [each for each in meant if each == "attention" or each.startswith("model.")]
    if of_model and not {*meant} & {*names} and not any(known.startswith("model") for known in names):
        (shape, *_) = of_model
        remedy = "docs/library.md changes one that shapes no weight, such as block_size or rope_theta"
        if shape in ("attention", "model.n_kv_head"):
            remedy = f"'python train.py init_from=RUN {shape}=…' trains one that begins with its weights, if they fit"
        return f"the checkpoint has those of its model; {remedy}"
    # It may be another trainer's name, with a group or without; be typed with another group, or be a group; be another
    # command's; or be misspelt.
    same = [known for known in names if last_word(known) == last]
    return (
        did_you_mean([typed] if typed in names else [])
        or here_it_is(typed, names, beside)
        or did_you_mean([last] if last in names else same)
        or did_you_mean([known for known in names if known.startswith(f"{typed}.")])
        or of_another_command([typed], names)
        or here_it_is(last, names, beside)
        or of_another_command(ours_for(last, names, beside), names)
        or did_you_mean(similar(typed, names))
        or "--help all lists them"
    )


def in_our_words(error: SettingsError) -> SettingsError:
    """Return the error for a value with ours as its remedy, if another trainer has the value."""
    ours, _, difference = OPTIONS.get(error.setting, {}).get(error.value.lower(), "").partition(": ")
    if not ours:
        return error
    remedy = f"here it is {error.setting}={ours}{difference and f' ({difference})'}"
    return SettingsError(error.fault, remedy, setting=error.setting, value=error.value)


def row_of(word: str, names: Collection[str], typed: Mapping[str, Any]) -> str:
    """Return the key of NAMES for another trainer's name, "" for none.

    It is that of NAMES_BESIDE where a condition holds.
    """
    for condition, others in ALIASES_BESIDE.items():
        name, equals, values = condition.partition("=")
        if word in others and (typed.get(name) in values.split() if equals else name in names):
            return others[word]
    return ALIASES.get(word, "")


def ours_for(word: str, names: Collection[str], typed: Mapping[str, Any]) -> list[str]:
    """Return our settings for another trainer's name."""
    return row_of(word, names, typed).partition(": ")[0].split()


def here_it_is(word: str, names: Collection[str], typed: Mapping[str, Any] = NONE) -> str:
    """Return the remedy for another trainer's name, "" if it has none among `names`."""
    ours, _, difference = row_of(word, names, typed).partition(": ")
    if not ours:
        return difference
    known = next((each for each in ours.split() if each in names), None)
    if (
        known
        and difference.startswith(f"{known}=")
        and typed.get(word)
        and TRUTHS.get(str(typed[word]).lower()) is False
    ):
        difference += " for true"  # as precision=bf16 is for bf16, of which the typed value is the opposite
    return f"here it is {known}{difference and f' ({difference})'}" if known else ""


def did_you_mean(known: list[str]) -> str:
    """Return the question whether a known setting was meant, "" for none."""
    return f"did you mean {' or '.join(known)}?" if known else ""


def of_another_command(words: Sequence[str], names: Collection[str]) -> str:
    """Return which commands have one of these settings, "" if none has.

    names: the settings of this command, which is none of them.
    """
    for word in words:
        if any(known == word or known.startswith(f"{word}.") for known in names):
            continue
        having = [command for command, schema in COMMANDS.items() if has_setting(schema, word)]
        if having:
            return f"{word} is a setting of {' and '.join(having)}"
    return ""


def has_setting(schema: type, word: str) -> bool:
    """Return whether a schema has a setting, or a group of settings, of this name."""
    return any(name == word or name.startswith(f"{word}.") for name, *_ in settings_in(schema))


def similar(typed: str, names: Collection[str]) -> list[str]:
    """Return up to two settings that are spelt nearly so, with or without their group."""
    near: dict[str, float] = {}
    for known in names:
        for one, other in product({typed, last_word(typed)}, {known, last_word(known)}):
            near[known] = max(likeness(one, other), near.get(known, 0.0))
    return sorted((known for known in near if near[known]), key=lambda known: -near[known])[:2]


def likeness(one: str, other: str) -> float:
    """Return how alike two names are: 0 unless each word is, or nearly all letters are.

    By the letters alone test_size would be near latent_size, and wandb.id near wandb.mode.
    """
    words = re.split(r"[._]", one)
    others = re.split(r"[._]", other)
    letters = ratio("".join(words), "".join(others))
    is_near = len(words) == len(others) and all(ratio(*pair) >= 0.75 for pair in zip(words, others, strict=True))
    return letters if is_near or letters >= 0.88 else 0.0


def ratio(one: str, other: str) -> float:
    """Return the share of two texts' letters that are alike."""
    return difflib.SequenceMatcher(None, one, other).ratio()


def last_word(name: str) -> str:
    """Return a setting's name without its group."""
    return name.rpartition(".")[2]

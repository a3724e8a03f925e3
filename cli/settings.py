"""Settings as a person meets them: NAME=VALUE in, a checked dataclass out, --help, one sentence for a mistake.

cli/hydra_command.py adds what train.py has besides: groups of settings and sweeps.
"""

import ast
import difflib
import errno
import inspect
import json
import logging
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

import yaml

from common.console import close_console, open_console, print_error
from common.errors import DeviceError, SettingsError, device_failed, first_line, format_value
from common.text import LogFormatter, flat, visible

Schema = TypeVar("Schema")
# The system's errors that a mistake of ours would give: all others are a person's. user_path(), reading() and writing()
# of common/files.py name the setting that led there, where a path was given.
OURS = (None, errno.ENOENT, errno.EEXIST, errno.EBADF, errno.EINVAL)
# What libraries say where the machine, or a limit, gives them too little.
TOO_LITTLE = ("out of memory", "can't allocate memory", "bad_alloc", "failed to map segment", "can't start new thread")
MAY_BE_EMPTY = ("prompt", "sample_prompt")  # settings for which an empty text means something
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# What other trainers call a setting.
ALIASES = {"learning_rate": "optimizer.lr", "max_iters": "max_steps", "out_dir": "run_dir", "d_model": "model.n_embd"}


def run_command(schema: type[Schema], function: Callable[[Schema], object]) -> None:
    """Call `function` with the settings that were typed, a checked `schema` object, or show --help.

    A person's mistake ends in one sentence on stderr and exit status 1.
    """
    with mistakes_explained():
        arguments = sys.argv[1:]
        if {"--help", "-h"} & set(arguments):
            print(help_text(schema, function), flush=True)
        elif arguments[:1] == ["-sc"]:  # what train.py's tab completion asks of every command
            print(*(f"{name}=" for name in setting_hints(schema)))
        else:
            function(from_arguments(schema, arguments))
            sys.stdout.flush()


@contextmanager
def mistakes_explained(explain: Callable[[BaseException], str | None] = lambda error: None) -> Iterator[None]:
    """End the process with status 1 and one sentence when a person's mistake is raised within.

    explain: returns a sentence for exceptions of a library that stand for a mistake.
    """
    status = 0
    rank = os.environ.get("RANK")
    at_once = rank is not None
    open_console()
    if logging.lastResort:  # what is logged without a handler
        logging.lastResort.setFormatter(LogFormatter())
    try:
        refuse_deleted_folder()
        yield
    except BrokenPipeError:  # the reader of what is printed has seen enough
        pass
    except SystemExit as exiting:
        status = exiting.code if isinstance(exiting.code, int) else 1
    except KeyboardInterrupt:
        print_error("stopped by Ctrl-C")
        status = 130
        at_once = True
    except Exception as error:
        sentence = sentence_for(error) or explain(error)
        if not sentence and rank is None:
            raise
        # A mistake is made by all of torchrun's processes, but a device fails alone.
        if not (rank or "").strip("0").isdecimal() or not sentence or isinstance(error, DeviceError | RuntimeError):
            print_error(f"error: {visible(sentence)}".replace("\n", "␊") if sentence else traceback.format_exc())
        status = 1
    close_console()
    if at_once:
        # An orderly shutdown can hang, for ranks that are gone or for its own threads, and everything worth
        # keeping is on the disk.
        os._exit(status)
    if status:
        sys.exit(status)


def refuse_deleted_folder() -> None:
    """Raise SettingsError if the working directory no longer exists: torch cannot even be imported there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise SettingsError("the working directory has been deleted", "change to a folder that exists") from None


def sentence_for(error: BaseException) -> str | None:
    """Return one sentence for a person's mistake, None for an error that is ours."""
    if isinstance(error, SettingsError):
        return str(error)
    if isinstance(error, OSError) and error.errno not in OURS:
        place = error.filename or "standard output or a file"
        return f"{place} cannot be used ({error.strerror}): check its name, its permissions and the room on its disk."
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in TOO_LITTLE):
        remedy = "choose a smaller model or batch, or raise the limits that ulimit -a shows"
        return f"there is not enough memory, or too few threads ({first_line(error)}): {remedy}."
    if device_failed(error):
        return f"the GPU failed ({first_line(error)}): look for the cause in nvidia-smi and dmesg, or set device=cpu."
    return None


def parse_overrides(arguments: Iterable[str]) -> dict[str, str]:
    """Return what is typed as NAME=VALUE by its names, without the + that Hydra wants before some.

    Raises SettingsError for what is typed otherwise, and for an empty value, as of a variable that the shell has not.
    """
    values = {}
    for argument in arguments:
        name, equals, value = argument.lstrip("+").partition("=")
        if name.startswith("-") or not name or not equals:
            remedy = "settings are typed NAME=VALUE, without dashes; --help lists them"
            raise SettingsError(f"cannot read {argument!r}", remedy)
        if not value and name not in MAY_BE_EMPTY:
            raise SettingsError(f"{name}= is empty", "give it a value, or leave it out")
        values[name] = value
    return values


def from_arguments(schema: type[Schema], arguments: list[str], base: Schema | None = None) -> Schema:
    """Return the `schema` object that NAME=VALUE arguments describe, on top of `base` or the defaults."""
    values = {} if base is None else flat(asdict(base))  # type: ignore[call-overload]
    return build(schema, values | parse_overrides(arguments))


def build(schema: type[Schema], values: dict[str, Any]) -> Schema:
    """Return the checked `schema` object of values by dotted names; SettingsError for unknown names and other types."""
    known = setting_hints(schema)
    for name in values:
        if name not in known:
            raise unknown_setting(name, known)

    def make(kind: type, prefix: str) -> Any:
        given = {}
        for field in fields(kind):
            name = prefix + field.name
            if is_dataclass(field.type):
                given[field.name] = make(field.type, f"{name}.")  # type: ignore[arg-type]
            elif name in values:
                given[field.name] = converted(name, values[name], field.type)
        return kind(**given)

    try:
        return make(schema, "")
    except SettingsError as error:
        name = error.problem.partition("=")[0]
        if error.remedy or name not in known:
            raise
        default = next(default for setting, default, _ in described(schema) if setting == name)
        raise SettingsError(error.problem, f"correct it, or leave it out for {name}={default}") from None


def whole_number(value: Any) -> int:
    """Return 1000 for 1000, 1e3 and 1000.0."""
    text = format_value(value)
    if not float(text).is_integer():
        raise ValueError("a whole number is wanted")
    return int(text) if text.lstrip("+-").isdecimal() else int(float(text))


def texts(value: Any) -> list[str]:
    """Return the texts of [a,b], or the one that is typed without brackets."""
    items = yaml.load(value, yaml.BaseLoader) if isinstance(value, str) and value[:1] == "[" else value
    items = items if isinstance(items, list) else [items]
    if any(isinstance(item, (list, dict, NoneType)) for item in items):
        raise ValueError("a text is wanted")
    return [format_value(item) for item in items]


READERS: dict[Any, tuple[str, Callable[[Any], Any]]] = {  # what a value of a type is, and what reads it
    str: ("a text", format_value),
    bool: ("true or false", lambda value: TRUTHS[format_value(value).lower()]),
    int: ("a whole number", whole_number),
    float: ("a number", lambda value: float(format_value(value))),
    list[str]: ("a list of texts, as in '[a,b]'", texts),
    list[int]: ("a list of whole numbers, as in '[1,2]'", lambda value: [whole_number(text) for text in texts(value)]),
}


def converted(name: str, value: Any, hint: Any) -> Any:
    """Return a value, as typed or as Hydra read it, in the type of its setting; SettingsError where it has none."""
    nullable = NoneType in get_args(hint)
    if nullable and value in (None, "null"):
        return None
    wanted, read = READERS[get_args(hint)[0] if nullable else hint]
    try:
        return read(value)
    except (LookupError, ValueError, yaml.YAMLError):
        raise SettingsError(f"{name}={format_value(value)} is not {wanted}{', or null' * nullable}") from None


def settings_in(schema: Any, prefix: str = "") -> Iterator[tuple[str, Field, type]]:
    """Yield every setting's dotted name, its field and the dataclass it is of; those of groups after single ones."""
    for field in sorted(fields(schema), key=lambda field: is_dataclass(field.type)):
        if is_dataclass(field.type):
            yield from settings_in(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, schema


def setting_hints(schema: type) -> dict[str, Any]:
    """Return the type hint of each setting by its dotted name."""
    return {name: field.type for name, field, _ in settings_in(schema)}


def unknown_setting(name: str, names: Collection[str]) -> SettingsError:
    """Return the error for a name that is not one of `names`, with the nearest ones that are."""
    meant = {known.rpartition(".")[2]: known for known in names} | {known: known for known in names}
    meant |= {alias: known for alias, known in ALIASES.items() if known in names}
    words = (name, name.rpartition(".")[2])
    near = [meant[like] for word in words for like in difflib.get_close_matches(word, meant, n=2, cutoff=0.75)]
    near = [known for known in names if known.startswith(f"{name}.")] or near  # of a group such as wandb
    remedy = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else "--help lists them all"
    return SettingsError(f"there is no setting {name}", remedy)


def help_text(schema: type, function: Callable, groups: str = "") -> str:
    """Return the text of --help: the docstring of the function's script, its groups, and each setting."""
    script = ast.parse(inspect.getsource(sys.modules[function.__module__]))  # python -OO drops __doc__
    lines = f"{ast.get_docstring(script)}\n\n{groups}Settings and their defaults:\n".split("\n")
    settings = [help_entry(f"{name}={default}", meaning, 36) for name, default, meaning in described(schema)]
    return "\n".join([*(textwrap.fill(line, help_width()) for line in lines), *settings])


def help_width() -> int:
    """Return how many columns --help may use."""
    return max(20, min(shutil.get_terminal_size((120, 24)).columns, 120))


def help_entry(name: str, meaning: str, column: int) -> str:
    """Return a name with its meaning from `column` on, or below it where it is too long or the terminal is narrow."""
    indent = " " * (column if help_width() >= 80 else 4)
    filled = textwrap.fill(meaning, help_width(), initial_indent=indent, subsequent_indent=indent)
    return f"  {name:<{column - 2}}{filled[column:]}" if len(name) + 2 < len(indent) else f"  {name}\n{filled}"


def described(schema: type) -> Iterator[tuple[str, str, str]]:
    """Yield the name, default and meaning of every setting."""
    for name, field, owner in settings_in(schema):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        typed = default if isinstance(default, str) and default else json.dumps(default)
        sentence = re.match(r".*?\.(?= [A-Z]|$)|.*", setting_docs(owner)[field.name])
        yield name, typed, sentence[0] if sentence else ""


@cache
def setting_docs(schema: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and its bases, on one line each."""
    docs = {}
    for kind in reversed(schema.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(field.target, ast.Name):
                docs[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return docs

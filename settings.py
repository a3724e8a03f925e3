"""Settings as a person meets them: NAME=VALUE in, a checked dataclass out, --help, one sentence for a mistake.

hydra_command.py adds what train.py has besides: groups of settings and sweeps.
"""

import ast
import difflib
import errno
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from console import close_console, open_console, say
from errors import SettingsError, first_line, shown
from runs.text import flat, visible

Schema = TypeVar("Schema")
# Why the system refuses a file or folder that a person has named.
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR, errno.EISDIR)
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# What other trainers call a setting.
ALIASES = {
    "learning_rate": "optimizer.lr", "max_iters": "max_steps", "out_dir": "run_dir", "dropout_p": "model.dropout",
    "n_layers": "model.n_layer", "n_heads": "model.n_head", "d_model": "model.n_embd",
}  # fmt: skip


def run_command(schema: type[Schema], about: str | None, function: Callable[[Schema], object]) -> None:
    """Call `function` with the settings that were typed, a checked `schema` object, or show --help.

    about: the script's docstring. A person's mistake ends in one sentence on stderr and exit status 1.
    """
    with mistakes_explained():
        arguments = sys.argv[1:]
        if {"--help", "-h"} & set(arguments):
            print(help_text(schema, about or ""), flush=True)
        elif arguments[:1] == ["-sc"]:  # what train.py's tab completion asks of every command
            print(*(f"{name}=" for name, *_ in described(schema)))
        else:
            refuse_flags(schema, arguments)
            function(from_arguments(schema, arguments))
            sys.stdout.flush()


@contextmanager
def mistakes_explained(explain: Callable[[BaseException], str | None] = lambda error: None) -> Iterator[None]:
    """End the process with status 1 and one sentence when a person's mistake is raised within.

    explain: returns a sentence for exceptions of a library that stand for a mistake.
    """
    status, rank = 0, os.environ.get("RANK")
    open_console()
    try:
        yield
    except BrokenPipeError:  # the reader of what is printed has seen enough
        pass
    except SystemExit as exiting:
        status = exiting.code if isinstance(exiting.code, int) else 1
    except Exception as error:
        sentence = sentence_for(error) or explain(error)
        if not sentence and rank is None:
            raise
        if rank in (None, "0") or not sentence:  # a mistake is made by all of torchrun's processes
            say(f"error: {visible(sentence)}".replace("\n", "␊") if sentence else traceback.format_exc())
        status = 1
    close_console()
    if rank is not None:
        # At once: an orderly shutdown can hang, for ranks that are gone or for its own threads, and everything worth
        # keeping is on the disk.
        os._exit(status)
    if status:
        sys.exit(status)


def sentence_for(error: BaseException) -> str | None:
    """Return one sentence for a person's mistake, None for an error that is ours."""
    if isinstance(error, SettingsError):
        return str(error)
    if isinstance(error, OSError) and error.errno in CLOSED:
        place = error.filename or "standard output or a file"
        return f"{place} cannot be used ({error.strerror}): name a place with room that is yours to write to."
    return None


def by_name(arguments: Iterable[str]) -> dict[str, str]:
    """Return what is typed as NAME=VALUE by its names, without the + that Hydra wants before some."""
    return dict(argument.lstrip("+").partition("=")[::2] for argument in arguments)


def from_arguments(schema: type[Schema], arguments: list[str], base: Schema | None = None) -> Schema:
    """Return the `schema` object that NAME=VALUE arguments describe, on top of `base` or the defaults."""
    values = {} if base is None else flat(asdict(base))  # type: ignore[call-overload]
    return build(schema, values | by_name(arguments))


def build(schema: type[Schema], values: dict[str, Any]) -> Schema:
    """Return the checked `schema` object of values by dotted names; SettingsError for unknown names and other types."""
    kinds = setting_kinds(schema)
    for name, value in values.items():
        if name not in kinds:
            raise unknown_setting(name, schema)
        if inside := [other for other in kinds if other.startswith(f"{name}.")]:
            raise SettingsError(f"{name}={shown(value)} is no setting", f"set one of {', '.join(inside)}")

    def make(kind: type, prefix: str) -> Any:
        given = {}
        for field, hint in get_type_hints(kind).items():
            name = prefix + field
            if is_dataclass(hint):
                given[field] = make(hint, f"{name}.")  # type: ignore[arg-type]
            elif name in values:
                given[field] = converted(name, values[name], kinds[name])
        return kind(**given)

    return make(schema, "")


def converted(name: str, value: Any, kinds: set[Any]) -> Any:
    """Return a value, as typed or as Hydra read it, in the type of its setting; SettingsError where it has none."""
    nullable = NoneType in kinds
    if nullable and value in (None, "null"):
        return None
    if list in kinds:
        return _listed(name, value, kinds)
    text = shown(value)
    try:
        if str in kinds and value is not None:
            return text
        if bool in kinds:
            return TRUTHS[text.lower()]
        number = float(text)
        if float in kinds:
            return number
        if number == int(number):
            return int(text) if text.lstrip("+-").isdecimal() else int(number)
    except (LookupError, ValueError, OverflowError):
        pass
    named = {str: "a text", bool: "true or false", float: "a number", int: "a whole number"}
    wanted = next(words for kind, words in named.items() if kind in kinds)
    raise SettingsError(f"{name}={text} is not {wanted}{', or null' * nullable}")


def _listed(name: str, value: Any, kinds: set[Any]) -> list[Any]:
    """Return a list of texts or whole numbers, which may be typed as [a,b], or as a for one."""
    what, remedy = "whole numbers" if int in kinds else "texts", f"write '{name}=[a,b]'"
    try:
        items = yaml.load(value, yaml.BaseLoader) if isinstance(value, str) and value[:1] == "[" else value
    except yaml.YAMLError as error:
        raise SettingsError(f"{name}={value} cannot be read as a list ({first_line(error)})", remedy) from None
    items = items if isinstance(items, list) else [items]
    if any(isinstance(item, (list, dict, NoneType)) for item in items):
        raise SettingsError(f"{name}={shown(value)} is no list of {what}", remedy)
    return [converted(name, item, {int}) if int in kinds else shown(item) for item in items]


def setting_kinds(schema: Any, prefix: str = "") -> dict[str, set[Any]]:
    """Return the types that the value of each setting may have, by its dotted name; of a group its dataclass, of a list
    that of its items too."""
    found: dict[str, set[Any]] = {}
    for name, hint in get_type_hints(schema).items():
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        found[prefix + name] = {get_origin(part) or part for part in parts} | ({int} if list[int] in parts else set())
        if is_dataclass(hint):
            found |= setting_kinds(hint, f"{prefix}{name}.")
    return found


def unknown_setting(name: str, schema: type) -> SettingsError:
    """Return the error for a name that is no setting, with the nearest ones that are."""
    names = list(setting_kinds(schema))
    by_last_part = {known.rpartition(".")[2]: known for known in names}
    near = [ALIASES[name]] if ALIASES.get(name) in names else []
    near += difflib.get_close_matches(name, names, n=2, cutoff=0.75)
    near += [by_last_part[n] for n in difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1)]
    remedy = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else "--help lists them all"
    return SettingsError(f"there is no setting {name}", remedy)


def refuse_flags(schema: type, arguments: list[str]) -> None:
    """Raise SettingsError for what is not typed NAME=VALUE."""
    for argument, following in pairwise([*arguments, "VALUE"]):
        typed, equals, value = argument.lstrip("-").partition("=")
        is_flag = argument.startswith("-")
        if is_flag and (name := typed.replace("-", "_")) in setting_kinds(schema):
            meant = f"{name}={value if equals else following}"
            raise SettingsError("settings are typed without dashes", f"write {meant}")
        if is_flag or not typed or not equals:
            problem = f"there is no flag {argument}" if is_flag else f"cannot read {argument!r}"
            raise SettingsError(problem, "settings are typed NAME=VALUE; --help lists them")


def help_text(schema: type, about: str, groups: str = "") -> str:
    """Return what --help shows: about the command, its groups, and each setting with its default and meaning."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    lines = [f"{about.strip()}\n\n{groups}Settings and their defaults:\n"]
    for name, default, meaning in described(schema):
        left = f"  {name}={default}"
        filled = textwrap.fill(meaning, width, initial_indent=" " * 36, subsequent_indent=" " * 36)
        lines.append(f"{left:<35} {filled[36:]}" if len(left) < 36 else f"{left}\n{filled}")
    return "\n".join(lines)


def described(schema: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the name, default and meaning of every setting that takes a value, groups after single ones."""
    hints, meanings = get_type_hints(schema), setting_docs(schema)
    for field in sorted(fields(schema), key=lambda field: is_dataclass(hints[field.name])):
        if is_dataclass(hints[field.name]):
            yield from described(hints[field.name], f"{prefix}{field.name}.")
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        typed = default if isinstance(default, str) and default else json.dumps(default)
        sentence = re.match(r".*?\.(?= [A-Z]|$)|.*", meanings[field.name])
        yield prefix + field.name, typed, sentence[0] if sentence else ""


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

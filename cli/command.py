"""A command's settings and its --help. cli/hydra_command.py adds train.py's groups of settings and its sweeps."""

import ast
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from common.mistakes import mistakes_explained
from common.settings import from_arguments, setting_hints, settings_in, typed_default

Schema = TypeVar("Schema")


def run_command(schema: type[Schema], function: Callable[[Schema], object]) -> None:
    """Call `function` with the settings that were typed, a checked `schema` object, or show --help.

    A person's mistake ends in one sentence on stderr and exit status 1.
    """
    with mistakes_explained():
        arguments = sys.argv[1:]
        if {"--help", "-h"} & set(arguments):
            print(help_text(schema, Path(inspect.getfile(function))), flush=True)
        elif arguments[:1] == ["-sc"]:  # what train.py's tab completion asks of every command
            print(*(f"{name}=" for name in setting_hints(schema)))
        else:
            function(from_arguments(schema, arguments))
            sys.stdout.flush()


def help_text(schema: type, script: Path, groups: str = "") -> str:
    """Return the text of --help: the script's docstring, its groups, and each setting."""
    module = ast.parse(script.read_text(encoding="utf-8"))  # python -OO drops __doc__
    lines = f"{ast.get_docstring(module)}\n\n{groups}Settings and their defaults:\n".split("\n")
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
        sentence = re.match(r".*?\.(?= [A-Z]|$)|.*", setting_docs(owner)[field.name])
        yield name, typed_default(field), sentence[0] if sentence else ""


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

"""Overrides as text: quoted for Hydra, to be pasted into a shell, and as typed before Hydra has read them."""

from __future__ import annotations

import re
import shlex
from typing import Any

PROMPTS = ("prompt", "sample_prompt")
QUOTED = re.compile(r"""(["'])(?:(?!\1)[^\\]|\\.)*\1""", re.DOTALL)


def override(setting: str, path: object) -> str:
    """SETTING=PATH for a shell, with the quotes that it and Hydra need."""
    plain = re.fullmatch(r"[A-Za-z_/.][\w/.-]*", str(path), re.ASCII)
    return shlex.quote(f"{setting}={path if plain else quote(path)}")


def quote(text: object) -> str:
    """Text as an override's value, whatever characters it has."""
    # Hydra reads a backslash as one, unless a quote or the end follows it.
    return '"' + re.sub(r'(\\*)("|\Z)', lambda end: 2 * end[1] + ('\\"' if end[2] else ""), literal(str(text))) + '"'


def literal(value: Any) -> Any:
    """A value as OmegaConf has to be given it, so that ${x} in its text stands for itself."""
    if isinstance(value, dict):
        return {name: literal(item) for name, item in value.items()}
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def flags_first(arguments: list[str]) -> list[str]:
    """The command line with -m before the overrides: Hydra reads none that follow it, if others came before it."""
    return sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))


def quote_prompts(arguments: list[str]) -> list[str]:
    """The command line with its prompts quoted for Hydra, to which commas, quotes and brackets mean something.

    Those that are quoted already stay as they are, and in a sweep all: there a comma separates two prompts.
    """
    if asks_for_sweep(arguments):
        return arguments
    pairs = [argument.partition("=") for argument in arguments]
    return [
        f"{name}={quote(value)}" if name in PROMPTS and equals and not QUOTED.fullmatch(value) else argument
        for argument, (name, equals, value) in zip(arguments, pairs, strict=True)
    ]


def asks_for_sweep(arguments: list[str]) -> bool:
    return bool({"--multirun", "-m"} & set(arguments))


def is_dry_run(arguments: list[str]) -> bool:
    """Whether the command line asks for no more than a plan, before Hydra has read it and made a folder."""
    given = value_typed(arguments, "dry_run") or ""
    return given.lower() in ("true", "yes", "on", "y", "1")  # as OmegaConf reads it


def value_typed(arguments: list[str], name: str) -> str | None:
    """What the command line gives a setting, without its quotes; None where it is not there."""
    pairs = [argument.lstrip("+").partition("=") for argument in arguments]
    values = [value.strip("'\"") for key, equals, value in pairs if key == name and equals]
    return values[-1] if values else None

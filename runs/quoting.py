"""Settings as text: quoted for Hydra, or to be pasted into a shell."""

from __future__ import annotations

import re
import shlex
from typing import Any

RANGES = "choice(2,4,8), range(1,5), interval(0.005,0.05) and tag(log,interval(0.005,0.05))"


def shell_quoted(setting: str, path: object) -> str:
    """Return SETTING=PATH with the quotes that a shell and Hydra need."""
    plain = re.fullmatch(r"[A-Za-z_/.][\w/.-]*", str(path), re.ASCII)
    return shlex.quote(f"{setting}={path if plain else quote(path)}")


override = shell_quoted  # until every caller has the new name


def quote(text: object) -> str:
    """Return text as the value of an override for Hydra, whatever characters it has."""
    # Hydra reads a backslash as one, unless a quote or the end follows it.
    return '"' + re.sub(r'(\\*)("|\Z)', lambda end: 2 * end[1] + ('\\"' if end[2] else ""), literal(str(text))) + '"'


def literal(value: Any) -> Any:
    """Return a value as OmegaConf has to be given it, so that ${x} in its text stands for itself."""
    if isinstance(value, dict):
        return {name: literal(item) for name, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def is_dry_run(arguments: list[str]) -> bool:
    """Whether the command line asks for no more than a plan, before Hydra has read it and made a folder."""
    given = value_typed(arguments, "dry_run") or ""
    return given.lower() in ("true", "yes", "on", "y", "1")  # as OmegaConf reads it


def value_typed(arguments: list[str], name: str) -> str | None:
    """What the command line gives a setting, without its quotes; None where it is not there."""
    pairs = [argument.lstrip("+").partition("=") for argument in arguments]
    values = [value.strip("'\"") for key, equals, value in pairs if key == name and equals]
    return values[-1] if values else None

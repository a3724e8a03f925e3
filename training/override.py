"""Overrides as text: values quoted for Hydra, and settings to be pasted into a shell."""

from __future__ import annotations

import re
import shlex
from typing import Any


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

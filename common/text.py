"""Settings and numbers as text: quoted for Hydra, to be pasted into a shell, or as people read them."""

import logging
import os
import re
import shlex
from pathlib import Path, PurePath
from typing import Any

PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
# C1 controls; signs that turn the direction of writing, end lines or cannot be seen; halves of characters.
UNSEEN = ("\x80-\x9f", "\u061c", "\u200b", "\u200e-\u200f", "\u2028-\u202e", "\u2060-\u206f", "\ufeff", "\ufff9-\ufffb")
for first, last in ((each[0], each[-1]) for each in (*UNSEEN, "\ud800-\udfff")):
    PICTURES |= dict.fromkeys(range(ord(first), ord(last) + 1), 0xFFFD)


def visible(text: object) -> str:
    """Return text as it may be printed: all that could steer a terminal, but tab and line end, as a sign of its own."""
    return str(text).translate(PICTURES)


class LogFormatter(logging.Formatter):
    """Makes visible what is logged."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def seen_from_here(path: Path) -> str:
    """Return a path relative to the current folder; as it is if that lies on another drive of Windows."""
    try:
        return os.path.relpath(path)
    except ValueError:
        return str(path)


def hydra_quoted(setting: str, path: object) -> str:
    """Return SETTING=PATH for train.py, ready to be pasted into a shell; Hydra's own settings are quoted for it too."""
    path = path.as_posix() if isinstance(path, PurePath) else path  # cmd.exe has other quotes, and reads slashes
    is_plain = re.fullmatch(r"[A-Za-z_/.][\w/.-]*", str(path), re.ASCII) or not setting.startswith("hydra")
    return shlex.quote(f"{setting}={path if is_plain else quote(path)}")


def quote(text: object) -> str:
    """Return text as the value of an override for Hydra, whatever characters it has."""
    # Hydra reads a backslash as one, unless a quote or the end follows it.
    return '"' + re.sub(r'(\\*)("|\Z)', lambda end: 2 * end[1] + ('\\"' if end[2] else ""), literal(str(text))) + '"'


def command(script: str) -> str:
    """Return how a person here starts a script of this checkout: python sample.py, elsewhere with its path."""
    return f"python {shlex.quote(seen_from_here(Path(__file__).resolve().parents[1] / script))}"


def literal(value: Any) -> Any:
    """Return a value as OmegaConf has to be given it, so that ${x} in its text stands for itself."""
    if isinstance(value, dict):
        return {name: literal(item) for name, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return found


def si(number: float, digits: int = 4, space: str = " ") -> str:
    """Format a number with an SI prefix, ready for its unit: 1,234,567 is "1.235 M"."""
    exponent = int(f"{number:.{digits - 1}e}".split("e")[1])  # after rounding
    power = min(6, max(0, exponent // 3))
    return f"{number / 1000**power:.{digits}g}{space}{' kMGTPE'[power].strip()}"


def duration(seconds: float) -> str:
    """Format a duration in the largest unit of which it has at least 1.5."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 block, 2 blocks."""
    return f"{count:,} {noun}{'s' * (count != 1)}"

"""Settings and numbers as text: for Hydra, for a shell, for people."""

import logging
import os
import re
import shlex
from pathlib import Path, PurePath
from typing import Any

PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
# Ranges of C1 controls, of signs that reverse the text, end lines or are invisible, and of lone surrogates.
UNSEEN = (
    "\x80-\x9f",
    "\u061c",
    "\u200b",
    "\u200e-\u200f",
    "\u2028-\u202e",
    "\u2060-\u206f",
    "\ufeff",
    "\ufff9-\ufffb",
    "\ud800-\udfff",
)
for signs in UNSEEN:
    PICTURES |= dict.fromkeys(range(ord(signs[0]), ord(signs[-1]) + 1), 0xFFFD)


def visible(text: object) -> str:
    """Replace control characters, except tab and line end, by visible ones; safe to print."""
    return str(text).translate(PICTURES)


# The escapes of typed texts, besides \xHH and \uHHHH; any other backslash stands for itself.
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "\\": "\\"}


def unescaped(typed: str | None) -> str | None:
    """Return a text with the characters for which \\n, \\t, \\x0c and the like stand."""

    def character(escape: re.Match) -> str:
        code = escape[2] or escape[3]
        return chr(int(code, 16)) if code else ESCAPES[escape[1]]

    pattern = r"\\(?:([nrtfv\\])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))"
    return None if typed is None else re.sub(pattern, character, typed)


def escaped(text: str) -> str:
    """Return the text that unescaped() turns into `text`, on one line."""
    names = {character: name for name, character in ESCAPES.items()}
    return "".join(f"\\{names[letter]}" if letter in names else letter for letter in text)


class LogFormatter(logging.Formatter):
    """Formats log records by visible()."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def seen_from_here(path: Path) -> str:
    """Return a path relative to the current folder; unchanged on another drive of Windows."""
    try:
        return os.path.relpath(path)
    except ValueError:
        return str(path)


def hydra_quoted(setting: str, path: object) -> str:
    """Return SETTING=PATH quoted for a shell, and a setting of Hydra's quoted for Hydra too."""
    # With slashes, which cmd.exe reads too: shlex would quote a backslash, in quotes that cmd.exe does not know.
    path = path.as_posix() if isinstance(path, PurePath) else path
    is_plain = re.fullmatch(r"[A-Za-z_/.][\w/.-]*", str(path), re.ASCII) or not setting.startswith("hydra")
    return shlex.quote(f"{setting}={path if is_plain else quote(path)}")


def quote(text: object) -> str:
    """Return any text as the value of an override for Hydra."""
    # Escape quotes, and double the backslashes before a quote or the end: Hydra reads others as they are.
    escaped = re.sub(r'(\\*)("|\Z)', lambda end: 2 * end[1] + ('\\"' if end[2] else ""), literal(str(text)))
    return f'"{escaped}"'


def command(script: str) -> str:
    """Return the command that starts a script of this checkout from here: python sample.py."""
    checkout = Path(__file__).resolve().parents[1]
    return f"python {shlex.quote(seen_from_here(checkout / script))}"


def literal(value: Any) -> Any:
    """Escape a value for OmegaConf, so that ${x} in its text is literal."""
    if isinstance(value, dict):
        return {name: literal(item) for name, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def si(number: float, digits: int = 4, space: str = " ") -> str:
    """Format a number with an SI prefix, ready for its unit: 1,234,567 is "1.235 M"."""
    # Of the rounded number: 999,960 with 4 digits is 1 M.
    exponent = int(f"{number:.{digits - 1}e}".split("e")[1])
    power = min(6, max(0, exponent // 3))
    return f"{number / 1000**power:.{digits}g}{space}{' kMGTPE'[power].strip()}"


def duration(seconds: float) -> str:
    """Format a duration in the largest unit that gives at least 1.5."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 block, 2 blocks."""
    return f"{count:,} {noun}{'s' * (count != 1)}"

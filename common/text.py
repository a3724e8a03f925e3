"""Settings and numbers as text: for Hydra, for a shell, for people."""

import logging
import os
import re
import shlex
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path, PurePath
from typing import IO, Any

# What acts on a terminal, each with its sign: what moves the cursor or begins a command, and what reorders the text.
SIGNS: dict[int, str] = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "␡"}
ACTING = ("\x80-\x9f", "\u061c", "\u200e-\u200f", "\u2028-\u202e", "\u2066-\u2069")
for letters in ACTING:
    SIGNS |= {code: f"<U+{code:04X}>" for code in range(ord(letters[0]), ord(letters[-1]) + 1)}
SIGNS |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # bytes that are no letter, such as those of a file's name


def visible(text: object) -> str:
    """Return a text for a terminal, on which none of its letters acts except tab and line end."""
    return str(text).translate(SIGNS)


def for_stream(text: object, stream: IO[str] | None) -> str:
    """Return a text as a stream gets it: as it is, but visible() on a terminal."""
    with suppress(ValueError):  # a stream that is closed
        if stream is not None and stream.isatty():
            return visible(text)
    return str(text)


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


class StreamFormatter(logging.Formatter):
    """Formats log records for_stream()."""

    def __init__(self, stream: Callable[[], IO[str] | None]) -> None:
        """stream: returns the stream that gets the records."""
        super().__init__()
        self.stream = stream
        self.job: int | None = None
        """The number that begins each line, where jobs write side by side."""

    def format(self, record: logging.LogRecord) -> str:
        text = for_stream(super().format(record), self.stream())
        return text if self.job is None else re.sub("^(?=.)", f"{self.job} | ", text, flags=re.MULTILINE)


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
    is_plain = re.fullmatch(r"[A-Za-z_/.][\w/.-]*", str(path), re.ASCII) or not setting.lstrip("+").startswith("hydra")
    return shlex.quote(f"{setting}={path if is_plain else quote(path)}")


def quote(text: object) -> str:
    """Return any text as the value of an override for Hydra."""
    # Escape quotes, and double the backslashes before a quote or the end: Hydra reads others as they are.
    escaped = re.sub(r'(\\*)("|\Z)', lambda end: 2 * end[1] + ('\\"' if end[2] else ""), literal(str(text)))
    return f'"{escaped}"'


QUOTED = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""  # a value in quotes for Hydra


def without_escapes(override: str) -> str:
    """Return an override of a job without the backslashes that Hydra puts into values."""
    return override if re.search(QUOTED, override) else re.sub(r"\\([\\()\[\]{}:=,\s])", r"\1", override)


def quoted_as_typed(override: str, texts: Container[str], groups: Container[str]) -> str:
    """Return NAME=VALUE with quotes around values that Hydra would read otherwise, or refuse.

    A shell leaves ~ as it is after NAME=, and Hydra's grammar has no such letter. Of a setting of `texts` Hydra would
    make 100000.0 of 1e5, 10 of 1_0, true of True and one backslash of two, drop the blanks around a single value, and
    refuse é and a=b. Of the option of a group, which is the name of a file, it makes a number or a truth too.
    """
    name, equals, value = override.partition("=")
    is_list = value.startswith("[")
    signs = "\"'(){}" if is_list else "\"'()[]{}"
    unquoted = re.sub(QUOTED, "", value)
    if any(sign in unquoted for sign in signs) or re.search(r"\\[,=:\s]", unquoted):  # Hydra's lists and escapes
        return override
    is_option = name.lstrip("+") in groups
    is_text = is_option or name.lstrip("+") in texts
    is_single = not is_list and "," not in value

    def quoted(part: re.Match[str]) -> str:
        text = part[0] if is_single else part[0].strip()
        if text.startswith(("'", '"')):
            return part[0]
        is_misread = (is_text and is_read_otherwise(text)) or (is_option and text.isdecimal())
        return quote(text) if "~" in text or is_misread else part[0]

    return name + equals + re.sub(rf"{QUOTED}|[^,\[\]\"']+", quoted, value)


def is_read_otherwise(text: str) -> bool:
    """Return whether Hydra changes a text that has no quotes, or cannot read it."""
    with suppress(ValueError):
        return str(int(text)) != text
    with suppress(ValueError):
        float(text)
        return True
    is_word = text.lower() in ("true", "false") or (text.lower() == "null" and text != "null")
    is_known = re.fullmatch(r"[\w\s.+/%@:?*|$\\-]*", text, re.ASCII)
    return is_word or not is_known or text != text.strip() or "\\\\" in text


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

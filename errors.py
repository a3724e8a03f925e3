"""Mistakes a person can make, and the checks of settings that find them.

Each message names the setting as typed, its value and the remedy. Checks of numbers let None pass: a default.
"""

import functools
import math
from collections.abc import Collection, Iterable
from pathlib import Path


class SettingsError(ValueError):
    """A setting that cannot be honoured."""


class DataError(SettingsError):
    """Text or tokens that are missing or cannot be used."""


class CheckpointError(SettingsError):
    """A checkpoint that is missing or damaged."""


class FormatError(CheckpointError):
    """A checkpoint of another version of tinygpt, whole as far as this one can tell."""


class HuggingFaceError(SettingsError):
    """A Hugging Face model, configuration or tokenizer that has no counterpart here."""


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, without the pages that may follow."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def one_of(name: str, value: str | None, known: Collection[str]) -> None:
    if value not in known:
        raise SettingsError(f"{name}={value} is not known: choose one of {', '.join(known)}.")


def at_least(name: str, value: float | None, least: float, remedy: str = "") -> None:
    """Refuse less than `least`, NaN and infinity. remedy: what else may be given, after a comma."""
    if value is not None and not least <= value < math.inf:
        finite = "finite and " if isinstance(value, float) else ""
        raise SettingsError(f"{name}={value} must be {finite}at least {least}{remedy and f', {remedy}'}.")


def positive(name: str, value: float | None, remedy: str = "") -> None:
    """Refuse 0, negative numbers, NaN and infinity."""
    if value is not None and not 0 < value < math.inf:
        raise SettingsError(f"{name}={value} must be finite and above 0{remedy and f', {remedy}'}.")


def fraction(name: str, value: float | None, *, below: float = math.inf, most: float = 1, above: float = -1) -> None:
    """Refuse what is not from 0 to `most`, or not above `above`, or not below `below`."""
    if value is not None and not (0 <= value <= most and above < value < below):
        lower = "at least 0" if above < 0 else f"above {above}"
        upper = f"below {below}" if below <= most else f"at most {most}"
        raise SettingsError(f"{name}={value} must be {lower} and {upper}.")


def refuse_idle(settings: object, rules: Iterable[tuple[str, str, bool]], given: Collection[str] | None = None) -> None:
    """Refuse settings that change nothing beside others.

    rules: names, what takes their meaning, and whether it does. given: those that were typed; all for None.
    """
    for names, taker, holds in rules:
        for name in names.split() if holds else ():
            *path, last = name.split(".")
            owner = functools.reduce(getattr, path, settings)
            value, default = getattr(owner, last), getattr(type(owner), last, [])
            if value not in (None, default) and (given is None or name in given):
                raise SettingsError(f"{name}={value} means nothing with {taker}: leave it out, or change the other.")


def page_name(name: str, path: str | None) -> None:
    """Refuse a file whose name no browser would take for a page."""
    if path and not path.endswith(".html"):
        raise SettingsError(f"{name}={path} is a page: give its name the ending .html.")


def refuse_unwritable(name: str, path: str) -> None:
    """Refuse a file that cannot be written, before the work that fills it."""
    file, is_new = Path(path), not Path(path).exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise SettingsError(f"{name}={path} cannot be written ({error.strerror}): name another file.") from None
    if is_new:
        file.unlink()

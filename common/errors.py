"""Errors that are a person's mistakes, and the checks of settings that raise them.

The checks of numbers accept None, which stands for a default.
"""

import errno
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from numbers import Real
from types import NoneType
from typing import Any, get_args, get_origin

PICKLED = (
    "a pickle, such as nanoGPT's ckpt.pt, can run code and is not read: keep a model of ours by save_checkpoint() "
    "(docs/library.md), or save that of another trainer in Hugging Face's format, then export.py import_from=FOLDER"
)
"""The remedy for a file of torch.save(), of another trainer or of a person's own."""


class SettingsError(ValueError):
    """A setting that cannot be used, as a sentence: SETTING=VALUE FAULT: REMEDY.

    Code that catches an error reads its attributes, never its sentence.
    """

    def __init__(self, fault: str, remedy: str = "", *, setting: str = "", value: object = "") -> None:
        """Without setting and value, the fault is the whole problem; value alone is a file."""
        # ValueError.__init__() is not called: args stay those of the call, from which copy and pickle make the error.
        self.fault = fault.removesuffix(".")
        self.remedy = remedy.removesuffix(".")
        self.setting = setting
        self.value = format_value(value)

    @property
    def subject(self) -> str:
        """The setting with its value, as it is typed, or the file; "" if it is not known."""
        return f"{self.setting}={self.value}" if self.setting else self.value

    @property
    def problem(self) -> str:
        """The sentence without its remedy."""
        joint = " " if self.subject and self.fault[:1] != ":" else ""
        return f"{self.subject}{joint}{self.fault}"

    def __str__(self) -> str:
        sentence = f"{self.problem}: {self.remedy}" if self.remedy else self.problem
        return sentence if sentence.endswith("?") else f"{sentence}."  # a remedy may be a question


class DataError(SettingsError):
    """Text or tokens that are missing or cannot be used."""


class CheckpointError(SettingsError):
    """A checkpoint that is missing or damaged."""


class HuggingFaceError(SettingsError):
    """A Hugging Face model, configuration or tokenizer that has no counterpart here."""


class DeviceError(SettingsError):
    """A device that failed or has no memory left; under torchrun each process reports its own."""


# Words in the errors of CUDA, its libraries, HIP, NCCL and Metal, which have no common type.
DEVICE_FAILURES = (
    "CUDA error",
    "CUDA driver error",
    "cuDNN error",
    "Triton Error",
    "Cuda failure",
    "GPU is lost",
    "HIP error",
    "MPS",
    "Metal",
)


ANY_SEED = "seed=$RANDOM, in bash, is another one each time"
"""The remedy for a seed that shall differ from run to run."""
ON_THE_CPU = "set the environment variable PYTORCH_ENABLE_MPS_FALLBACK=1, or device=cpu"
"""The remedy for an operation that Apple's GPUs lack."""
# Words in the errors of torch, CUDA's libraries, C++ and Python if the machine, or a limit, gives a process too little
# memory or too few threads.
NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",
    "bad_alloc",
    "failed to map segment",
    "can't start new thread",
)


def lacks_operator(error: BaseException) -> bool:
    """Return whether an error says that Apple's GPUs lack an operation."""
    return isinstance(error, NotImplementedError) and "MPS" in str(error)


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that there is too little memory, or too few threads."""
    is_typed = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # the latter is torch's
    return is_typed or any(words in str(error).lower() for words in NO_MEMORY)


def device_failed(error: BaseException) -> bool:
    """Return whether an error says that a GPU has failed, so that nothing can be read from it."""
    is_failure = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
    return is_failure and any(words in str(error) for words in DEVICE_FAILURES)


@contextmanager
def naming(setting: str, value: str, also: str = "") -> Iterator[None]:
    """Blame an error raised inside on SETTING=VALUE, such as init_from=run.

    also: another form of the value, which the error may have, such as the absolute path.
    """
    try:
        yield
    except SettingsError as error:
        named = copy(error)
        # The error may be of the same value, as a file or as a checkpoint: it is not said twice.
        if error.setting in ("checkpoint", setting):
            named.setting = ""
        is_same = not named.setting and named.value and named.value in (value, also)
        if not is_same:
            named.fault = f": {named.problem}"
        named.setting = setting
        named.value = value
        raise named from error
    except ValueError as error:
        raise SettingsError(f": {first_line(error)}", setting=setting, value=value) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def library_fault(fault: str, library: str, install: str, error: Exception) -> tuple[str, str]:
    """Return fault and remedy for an optional library whose import failed.

    It is absent, or does not fit another. fault: ends in the need of it. install: the remedy if it is absent.
    """
    if isinstance(error, ModuleNotFoundError) and error.name == library:
        return fault, install
    return f"{fault}, whose import fails ({first_line(error)})", mend(library)


def misfit(error: BaseException) -> str | None:
    """Return why a library's machine code cannot be loaded, None for another error."""
    while error.__cause__:  # NumPy explains it at length, as the cause of its own error
        error = error.__cause__
    if isinstance(error, ImportError) and str(error.path).endswith(tuple(EXTENSION_SUFFIXES)):
        return first_line(error)
    return None


def lacks_temporary(error: BaseException | None) -> str | None:
    """Return why there is no folder for temporary files; None for an error of something else."""
    while error:
        reason = str(getattr(error, "strerror", None))
        if reason.startswith("No usable temporary directory"):
            return reason
        error = error.__cause__ or error.__context__
    return None


def mend(library: str) -> str:
    """Return the remedy for a library that is installed and cannot be imported."""
    return f"mend its installation, as by pip install -U {library}"


def os_error_reason(error: BaseException) -> str:
    """Return the system's message for an OSError, otherwise the first line of the error's."""
    if getattr(error, "errno", None) == errno.EFBIG:  # which is no lack of room
        return "File too large, for the disk, as FAT, or for ulimit -f"
    return getattr(error, "strerror", None) or first_line(error)


def cause(error: BaseException) -> str:
    """Return the reason why content cannot be used, with the file or field that is missing."""
    if isinstance(error, SettingsError):
        return error.problem
    if isinstance(error, OSError) and error.filename:
        return f"{os_error_reason(error)}: {error.filename}"
    return f"it has no {first_line(error)}" if isinstance(error, KeyError) else os_error_reason(error)


@contextmanager
def damage_named(
    kind: type[SettingsError],
    fault: str,
    remedy: str,
    *,
    setting: str = "",
    value: object,
) -> Iterator[None]:
    """Turn any error of a damaged file within into `kind`: SETTING=VALUE FAULT (cause): REMEDY."""
    try:
        yield
    except (kind, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of tiktoken's or tokenizers' Rust is no Exception
        raise kind(f"{fault} ({cause(error)})", remedy, setting=setting, value=value) from error


def format_value(value: object) -> str:
    """Format a setting's value as a person types it: null, true, 2 for 2.0, [a,b]."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(format_value, value))}]"
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


# The noun of each type in an error.
NOUNS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", list: "a list"}


def one_of(name: str, value: str | None, known: Collection[str]) -> None:
    if value not in known:
        plain = str(value).strip("\"'")
        remedy = f"did you mean {name}={plain}" if plain in known else f"choose one of {', '.join(known)}"
        raise SettingsError("is not known", remedy, setting=name, value=value)


def refuse_taken(name: str, known: Any, subject: Any) -> None:
    """Raise SettingsError for a name that is taken, unless its subject is defined again.

    That is one with the module and the name of the known one, as by a notebook's cell that runs twice.
    """
    place, again = ([getattr(each, part, None) for part in ("__module__", "__name__")] for each in (known, subject))
    if place != again or None in place:
        remedy = "choose another one"
        if str(place[0]).startswith("code_"):  # as model/attention/code.py calls a file of code=
            remedy += ", or run each of the two files in a process of its own"
        raise SettingsError(f"the name {name!r} is taken", remedy)


def in_utf8(name: str, text: str) -> None:
    """Refuse a text with a shell's bytes that are not UTF-8: no text of a model has them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        remedy = "type it in UTF-8, under a locale that has it, such as LC_ALL=C.UTF-8"
        raise SettingsError("is not text in UTF-8", remedy, setting=name, value=text) from None


def check_types(settings: Any, group: str = "") -> None:
    """Give each field of a dataclass its own type.

    A program may have another one with the same meaning: a whole number may be 1e3 or NumPy's, a text a Path, and a
    group a dict. Raises SettingsError for every other type.
    group: the part before the name of a field as it is typed, such as model. in model.n_embd.
    """
    for field in fields(settings):
        setattr(settings, field.name, in_type(group + field.name, getattr(settings, field.name), field.type))


def in_type(name: str, value: Any, hint: Any) -> Any:
    """Return a value in the type of its field; SettingsError for one that has none in it."""
    kind: Any = get_args(hint)[0] if NoneType in get_args(hint) else hint
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if value is None and kind is not hint:
        return None
    if kind is int and is_number and float(value).is_integer():
        return int(value)
    if kind is float and is_number:
        return float(value)
    if kind is str and isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if get_origin(kind) is list and isinstance(value, (list, tuple)):
        return [in_type(f"each of {name}", item, *get_args(kind)) for item in value]
    if isinstance(kind, type) and is_dataclass(kind):
        return in_group(name, value, kind)
    noun = NOUNS.get(get_origin(kind) or kind)
    if noun is None or type(value) is kind:  # a type of somebody's own settings, or a bool
        return value
    remedy = "give a number, without quotes" if isinstance(value, str) and kind in (int, float) else ""
    raise SettingsError("is a text" if remedy else f"is not {noun}", remedy, setting=name, value=value)


def in_group(name: str, value: Any, group: Any) -> Any:
    """Return a group of settings, which may be given as a dict; SettingsError for anything else."""
    if isinstance(value, dict):
        known = [field.name for field in fields(group)]
        for unknown in value.keys() - {*known}:
            raise SettingsError(f"there is no setting {name}.{unknown}", f"{group.__name__} has {', '.join(known)}")
        return group(**value)
    if not isinstance(value, group):
        raise SettingsError(f"is not a {group.__name__}", setting=name, value=value)
    return value


def at_least(name: str, value: float | None, least: float, remedy: str = "") -> None:
    """Refuse less than `least`, NaN and infinity."""
    if value is not None and not least <= value < math.inf:
        finite = "finite and " if isinstance(value, float) else ""
        raise SettingsError(f"must be {finite}at least {format_value(least)}", remedy, setting=name, value=value)


def positive(name: str, value: float | None) -> None:
    """Refuse 0, negative numbers, NaN and infinity."""
    if value is not None and not 0 < value < math.inf:
        raise SettingsError("must be finite and above 0", setting=name, value=value)


def fraction(
    name: str,
    value: float | None,
    *,
    below: float = math.inf,
    most: float = 1,
    above: float = -1,
) -> None:
    """Refuse all but 0 ≤ value ≤ most with above < value < below."""
    if value is not None and not (0 <= value <= most and above < value < below):
        lower = "at least 0" if above < 0 else f"above {above}"
        upper = f"below {below}" if below <= most else f"at most {most}"
        raise SettingsError(f"must be {lower} and {upper}", setting=name, value=value)

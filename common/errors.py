"""Errors that are a person's mistakes, and the checks of settings that raise them.

The checks of numbers accept None, which stands for a default.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class SettingsError(ValueError):
    """A setting that cannot be used: the problem, which begins with NAME=VALUE, and the remedy."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem = problem.removesuffix(".")
        self.remedy = remedy.removesuffix(".")

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


ON_THE_CPU = "set the environment variable PYTORCH_ENABLE_MPS_FALLBACK=1, or device=cpu"
"""The remedy for an operation that Apple's GPUs lack."""
# Words in the errors of torch, CUDA's libraries, C++ and Python if the machine, or a limit, gives a process too little
# memory or too few threads.
NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
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
def naming(setting: str, also: str = "") -> Iterator[None]:
    """Put `setting`, such as init_from=run, before the message of an error raised inside.

    also: another form of its value, with which the message may begin, such as the absolute path.
    """
    try:
        yield
    except SettingsError as error:
        name, _, value = setting.partition("=")
        # The message may begin with the same value, as NAME=VALUE or checkpoint=VALUE: it is not said twice.
        problem = error.problem.removeprefix(f"{name}=").removeprefix("checkpoint=")
        said = next((form for form in (value, also) if form and problem.startswith(f"{form} ")), None)
        problem = problem.removeprefix(said) if said else f": {problem}"
        raise type(error)(f"{setting}{problem}", error.remedy) from error
    except ValueError as error:
        raise SettingsError(f"{setting}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def os_error_reason(error: BaseException) -> str:
    """Return the system's message for an OSError, otherwise the first line of the error's."""
    return getattr(error, "strerror", None) or first_line(error)


def cause(error: BaseException) -> str:
    """Return the reason why content cannot be used, with the file or field that is missing."""
    if isinstance(error, SettingsError):
        return error.problem
    if isinstance(error, OSError) and error.filename:
        return f"{os_error_reason(error)}: {error.filename}"
    return f"it has no {first_line(error)}" if isinstance(error, KeyError) else os_error_reason(error)


@contextmanager
def damage_named(kind: type[SettingsError], problem: str, remedy: str) -> Iterator[None]:
    """Turn any error that a damaged file raises within into `kind`: PROBLEM (cause): REMEDY."""
    try:
        yield
    except (kind, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of tiktoken's or tokenizers' Rust is no Exception
        raise kind(f"{problem} ({cause(error)})", remedy) from error


def format_value(value: object) -> str:
    """Format a setting's value as a person types it: null, true, 2 for 2.0, [a,b]."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(format_value, value))}]"
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def one_of(name: str, value: str | None, known: Collection[str]) -> None:
    if value not in known:
        raise SettingsError(f"{name}={format_value(value)} is not known", f"choose one of {', '.join(known)}")


def at_least(name: str, value: float | None, least: float) -> None:
    """Refuse less than `least`, NaN and infinity."""
    if value is not None and not least <= value < math.inf:
        finite = "finite and " if isinstance(value, float) else ""
        raise SettingsError(f"{name}={format_value(value)} must be {finite}at least {format_value(least)}")


def positive(name: str, value: float | None) -> None:
    """Refuse 0, negative numbers, NaN and infinity."""
    if value is not None and not 0 < value < math.inf:
        raise SettingsError(f"{name}={format_value(value)} must be finite and above 0")


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
        raise SettingsError(f"{name}={format_value(value)} must be {lower} and {upper}")

"""What a person can get wrong. The message of each names the setting as typed, its value and the remedy."""

from __future__ import annotations


class SettingsError(ValueError):
    """A setting that cannot be honoured."""


class DataError(SettingsError):
    """Text or tokens that cannot be had or used."""


class CheckpointError(SettingsError):
    """A checkpoint that is missing, damaged or of another format."""


class HuggingFaceError(SettingsError):
    """A model, configuration or tokenizer of Hugging Face's that has no counterpart here."""


def first_line(error: BaseException) -> str:
    """What a library's error says, without the pages that may follow."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

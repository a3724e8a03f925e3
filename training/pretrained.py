"""Weights that another training has made, to begin a new one with."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiktoken

from model.config import GPTConfig
from model.gpt import GPT
from training.checkpoint import open_checkpoint
from training.config import SettingsError

log = logging.getLogger("tinygpt")

FREE = ("dropout", "attention_dropout")  # what a model's weights do not show


def load_pretrained(where: str) -> tuple[GPT, tiktoken.Encoding]:
    """The model and the tokenizer that init_from=`where` names: a run or checkpoint, or hf:NAME_OR_FOLDER.

    Raises SettingsError, naming init_from, when they cannot be had.
    """
    try:
        if where.startswith("hf:"):
            from interop.huggingface import find_folder, from_huggingface
            from interop.tokenizer import read_tokenizer_json

            name = where.removeprefix("hf:")
            return from_huggingface(name), read_tokenizer_json(find_folder(name))
        if not Path(where).exists():
            raise SettingsError("it does not exist: give a run directory, a checkpoint, or hf:NAME_OR_FOLDER.")
        checkpoint = open_checkpoint(where, say=log.warning)
        return checkpoint.model, checkpoint.tokenizer
    except ValueError as error:
        raise SettingsError(f"init_from={where}: {error}") from error


def check_shape(where: str, asked: dict[str, Any]) -> None:
    """Raise SettingsError when the model that init_from=`where` names has not these settings; null asks for nothing."""
    asked = {key: value for key, value in asked.items() if key not in FREE and value is not None}
    if not asked:
        return
    found = load_pretrained(where)[0].config
    differing = [
        f"model.{key}={value} (it has {getattr(found, key)})"
        for key, value in asked.items()
        if value != getattr(found, key)
    ]
    if differing:
        raise SettingsError(
            f"init_from={where} brings a model along that is not the one asked for: {', '.join(differing)}: "
            "leave these settings out to go on with its weights, or leave out init_from."
        )


def shape_of(pretrained: GPT, asked: GPTConfig) -> GPTConfig:
    """The pretrained model's settings, with the dropout asked for."""
    return replace(pretrained.config, **{name: getattr(asked, name) for name in FREE})

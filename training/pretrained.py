"""Weights that another training has made, to begin a new one with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import tiktoken

from model.config import GPTConfig
from model.gpt import GPT
from training.checkpoint import find_checkpoint, load_checkpoint
from training.config import SettingsError


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
        checkpoint = load_checkpoint(find_checkpoint(where))
        return checkpoint.model, checkpoint.tokenizer
    except ValueError as error:
        raise SettingsError(f"init_from={where}: {error}") from error


def shape_of(pretrained: GPT, asked: GPTConfig) -> GPTConfig:
    """The pretrained model's settings with the dropout asked for: what training may change, and weights do not show."""
    return replace(pretrained.config, dropout=asked.dropout, attention_dropout=asked.attention_dropout)

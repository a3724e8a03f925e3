"""Weights that another training has made, to begin a new one with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiktoken

from model.config import GPTConfig
from model.gpt import GPT
from training.checkpoint import find_checkpoints, first_intact, open_checkpoint, read_meta
from training.config import SettingsError, TrainConfig

log = logging.getLogger("tinygpt")

FREE = ("dropout", "attention_dropout")  # what a model's weights do not show


def load_origin(config: TrainConfig) -> tuple[GPT, tiktoken.Encoding] | tuple[None, None]:
    """The model and tokenizer that config.init_from names, None where it is null; config.model takes its settings.

    Raises SettingsError, naming init_from, when they cannot be had.
    """
    if not config.init_from:
        return None, None
    with naming(config.init_from) as name:
        if name:
            from interop.huggingface import find_folder, from_huggingface
            from interop.tokenizer import read_tokenizer_json

            model, encoding = from_huggingface(name), read_tokenizer_json(find_folder(name))
        else:
            checkpoint = open_checkpoint(config.init_from, say=log.warning)
            model, encoding = checkpoint.model, checkpoint.tokenizer
    config.model = replace(model.config, **{name: getattr(config.model, name) for name in FREE})
    log.info("init_from=%s: its weights, its tokenizer, and its settings but for dropout", config.init_from)
    return model, encoding


def check_shape(where: str, asked: dict[str, Any]) -> None:
    """Raise SettingsError when the model that init_from=`where` names has not these settings; null asks for nothing.

    Its weights are not read.
    """
    asked = {key: value for key, value in asked.items() if key not in FREE and value is not None}
    if not asked:
        return
    with naming(where) as name:
        if name:
            from interop.huggingface import read_config

            found = read_config(name)
        else:
            meta = first_intact(find_checkpoints(where), read_meta, log.warning)
            found = GPTConfig(**meta["config"]["model"])
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


@contextmanager
def naming(where: str) -> Iterator[str | None]:
    """The NAME_OR_FOLDER of hf:NAME_OR_FOLDER, None for a run or checkpoint; an error within names init_from."""
    try:
        if not where.startswith("hf:") and not Path(where).exists():
            raise SettingsError("it does not exist: give a run directory, a checkpoint, or hf:NAME_OR_FOLDER.")
        yield where.removeprefix("hf:") if where.startswith("hf:") else None
    except ValueError as error:
        raise SettingsError(f"init_from={where}: {error}") from error

"""Weights that another training has made, to begin a new one with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tiktoken
import torch

from errors import SettingsError
from model.config import ATTENTION_FUNCTIONS, GPTConfig
from model.gpt import GPT
from runs.checkpoint import find_checkpoints, first_intact, open_checkpoint, read_meta
from training.config import TrainConfig

log = logging.getLogger("tinygpt")

SAME_WEIGHTS = (*ATTENTION_FUNCTIONS, "stacked")  # forms of attention that read a checkpoint alike
# What a run may ask for that its weights were not trained with.
FREE = (
    *("attention", "attention_window", "rope_theta", "rope_scaling", "rope_scaling_factor"),
    *("block_size", "vocab_size", "dropout", "attention_dropout"),
)


def load_origin(config: TrainConfig) -> tuple[GPT, tiktoken.Encoding] | tuple[None, None]:
    """The model and tokenizer that config.init_from names, None where it is null.

    config.model takes the model's settings where it is null. Raises SettingsError, naming init_from, when they
    cannot be had or config.model asks for another model.
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
    config.model = inherit(config.init_from, model.config, asdict(config.model))
    asked = [f"{name}={now}" for name, now in asdict(config.model).items() if now != getattr(model.config, name)]
    but = f", but for {', '.join(asked)}" if asked else ""
    log.info("init_from=%s: its weights, tokenizer and settings%s", config.init_from, but)
    return model, encoding


def origin_config(where: str) -> GPTConfig:
    """The settings of the model that init_from=`where` names, without reading its weights."""
    with naming(where) as name:
        if name:
            from interop.huggingface import read_config

            return read_config(name)
        meta = first_intact(find_checkpoints(where), read_meta, log.warning)
        return GPTConfig(**meta["config"]["model"])


def inherit(where: str, found: GPTConfig, asked: dict[str, Any]) -> GPTConfig:
    """The settings `found` in the model that init_from=`where` names, with those asked for.

    Raises SettingsError when it would need other weights, or the settings do not fit together.
    """
    differing = [
        f"model.{name}={value} (it has {getattr(found, name)})"
        for name, value in asked.items()
        if value not in (None, getattr(found, name)) and not _fits(name, value, getattr(found, name))
    ]
    if differing:
        raise SettingsError(
            f"init_from={where} brings a model along that is not the one asked for: {', '.join(differing)}: "
            "leave these settings out to go on with its weights, or leave out init_from."
        )
    own = ("vocab_size",) if asked.get("vocab_size") is None else ()
    try:
        return replace(found, **{name: asked[name] for name in FREE if name in asked and name not in own})
    except ValueError as error:
        raise SettingsError(f"init_from={where}: {error}") from error


def _fits(name: str, asked: Any, found: Any) -> bool:
    """Whether weights that were trained with one value of a setting can go on with another."""
    return name in FREE and (name != "attention" or {asked, found} <= set(SAME_WEIGHTS))


def copy_weights(pretrained: GPT, model: GPT) -> None:
    """Give a fresh model the weights of another, whose block_size and vocab_size may differ.

    Learned positions and tokens that are too many are dropped. Where positions are too few the model's own
    follow. A new token starts as the mean of all known ones, in the embedding and in lm_head, so that it is
    as likely as an average token and moves the others' probabilities little (Hewitt 2021).
    """
    weights, fresh = pretrained.state_dict(), model.state_dict()
    if model.config.position == "learned":
        name = "position_embedding.weight"
        known = weights[name][: model.config.block_size]
        weights[name] = torch.cat((known, fresh[name][len(known) :].to(known)))
    for name in ("token_embedding.weight", "lm_head.weight"):
        known = weights[name][: model.config.vocab_size]
        new = weights[name].mean(0, keepdim=True).expand(model.config.vocab_size - len(known), -1)
        weights[name] = torch.cat((known, new))
    model.load_state_dict(weights)


@contextmanager
def naming(where: str) -> Iterator[str | None]:
    """The NAME_OR_FOLDER of hf:NAME_OR_FOLDER, None for a run or checkpoint; an error within names init_from."""
    try:
        if not where.startswith("hf:") and not Path(where).exists():
            raise SettingsError("it does not exist: give a run directory, a checkpoint, or hf:NAME_OR_FOLDER.")
        yield where.removeprefix("hf:") if where.startswith("hf:") else None
    except ValueError as error:
        raise SettingsError(f"init_from={where}: {error}") from error

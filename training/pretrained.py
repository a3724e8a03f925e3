"""Pretrained weights that a new run begins with."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import tiktoken
import torch
from torch import Tensor

from errors import SettingsError
from model.attention import ATTENTION_FUNCTIONS
from model.config import GPTConfig
from model.gpt import GPT
from runs.checkpoint import find_checkpoints, first_intact, read_meta, read_parts
from training.config import TrainConfig
from training.distributed import load_whole, whole

Read = Callable[[str], Tensor]
log = logging.getLogger("tinygpt")

SAME_WEIGHTS = {*ATTENTION_FUNCTIONS, "stacked"}  # forms of attention that read a checkpoint alike
WEIGHTLESS = {"window", "nope"}  # modifiers without weights
# What a run may change of the model that its weights were trained in.
FREE = {"attention_window", "score_softcap", "rope_theta", "rope_scaling", "rope_scaling_factor"}
FREE |= {"block_size", "vocab_size", "dropout", "attention_dropout"}


def load_origin(config: TrainConfig) -> tuple[Read | None, tiktoken.Encoding | None]:
    """Return what reads a weight of the model that config.init_from names, and its tokenizer; None where it is null.

    config.model takes the model's settings where it is null. Raises SettingsError, naming init_from, when they
    cannot be read or config.model would need other weights.
    """
    if not config.init_from:
        return None, None
    encoding: tiktoken.Encoding | None
    with naming(config.init_from) as name:
        if name:
            from interop.huggingface import find_folder, read_huggingface
            from interop.tokenizer import read_tokenizer_json

            (found, read), encoding = read_huggingface(name), read_tokenizer_json(find_folder(name))
        else:
            found, weights, encoding, _ = first_intact(find_checkpoints(config.init_from), read_parts)
            read = weights.__getitem__
        config.model = inherit(found, config.model)
    asked = [f"{name}={now}" for name, now in asdict(config.model).items() if now != getattr(found, name)]
    but = f", but for {', '.join(asked)}" if asked else ""
    kept = "weights, tokenizer and settings" if encoding else "weights and settings"
    log.info("init_from=%s: its %s%s", config.init_from, kept, but)
    return read, encoding


def origin_config(where: str) -> GPTConfig:
    """Return the settings of the model that init_from=`where` names, without reading its weights."""
    with naming(where) as name:
        if name:
            from interop.huggingface import read_config

            return read_config(name)
        return GPTConfig(**first_intact(find_checkpoints(where), read_meta)["config"]["model"])


def inherit(found: GPTConfig, asked: GPTConfig) -> GPTConfig:
    """Return the settings asked for, with those of the pretrained model where it has one and none is asked for.

    Raises SettingsError when they would need other weights.
    """
    settings, differing = asdict(found), []
    for name, value in asdict(asked).items():
        free = name in FREE or (name == "attention" and layers_of(found, value) == layers_of(found, found.attention))
        if not free and value not in (None, settings[name]):
            differing.append(f"model.{name}={value} (it has {settings[name]})")
        elif free and (name != "vocab_size" or value is not None):
            settings[name] = value
    if differing:
        remedy = "leave these settings out to continue with its weights, or leave out init_from"
        raise SettingsError(f"its model is not the one asked for: {', '.join(differing)}: {remedy}.")
    return GPTConfig(**settings)


def layers_of(config: GPTConfig, attention: str) -> list[tuple[str, set[str]]]:
    """Return each layer's form and modifiers of a pattern, as far as a checkpoint tells them apart."""
    parts = map(replace(config, attention=attention).at, range(config.n_layer))
    return [("sdpa" if one.form in SAME_WEIGHTS else one.form, set(one.modifiers) - WEIGHTLESS) for one in parts]


def copy_weights(read: Read, model: GPT) -> None:
    """Copy the weights that `read` names into a fresh model, whose block_size and vocab_size may differ.

    Surplus learned positions and tokens are dropped; missing positions keep the fresh weights. A new token starts
    as the mean of all known ones, in the embedding and in lm_head, so that it is as likely as an average token and
    changes the others' probabilities little (Hewitt 2021).
    """

    def resized(name: str) -> Tensor:
        known, fresh = read(name), model.get_parameter(name)
        missing = len(fresh) - len(known)
        if missing <= 0:
            return known[: len(fresh)]
        new = known.mean(0, keepdim=True).expand(missing, -1)
        if name == "position_embedding.weight":
            new = whole(fresh.detach())[len(known) :].to(known)
        return torch.cat((known, new))

    load_whole(model, resized)


@contextmanager
def naming(where: str) -> Iterator[str | None]:
    """Yield the NAME_OR_FOLDER of hf:NAME_OR_FOLDER, None for a run or checkpoint; errors within name init_from."""
    try:
        if not where.startswith("hf:") and not Path(where).exists():
            raise SettingsError("it does not exist: give a run directory, a checkpoint, or hf:NAME_OR_FOLDER.")
        yield where.removeprefix("hf:") if where.startswith("hf:") else None
    except ValueError as error:
        raise SettingsError(f"init_from={where}: {error}") from error

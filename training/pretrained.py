"""Pretrained weights from which a new run starts."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import tiktoken
import torch
from torch import Tensor

from common.errors import SettingsError, format_value, naming
from common.files import user_path
from common.text import hydra_quoted
from interop.huggingface import find_folder, noted_training, read_config, read_huggingface
from interop.tokenizer import read_tokenizer_json
from model.attention import SETTINGS, MultiHeadAttention, layer_class
from model.config import GPTConfig
from model.gpt import GPT
from model.weights import load_weights, plain_weights
from runs.checkpoint import Meta, Progress, find_checkpoints, first_intact, open_checkpoint, read_meta, read_settings
from runs.resume import WITHOUT_WEIGHTS, remedy_in_python
from training.config import TrainConfig

Read = Callable[[str], Tensor]

GPT2 = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

# Settings of the pretrained model that a run may change.
MAY_CHANGE_ON_INIT = {"model.block_size", "model.vocab_size", *WITHOUT_WEIGHTS}


def open_pretrained(config: TrainConfig) -> tuple[TrainConfig, Callable[[GPT], str | None], tiktoken.Encoding | None]:
    """Return config with init_from's settings, a copier of its weights, its tokenizer.

    The copier returns the hash of the weights. Without init_from config is unchanged, the copier does nothing and
    returns None, and the tokenizer is None. Settings that may change are config.model's. Raises SettingsError, which
    names init_from, if the model cannot be read or config.model would need other weights.
    """
    if not config.init_from:
        return config, lambda model: None, None
    # Open a model of Hugging Face's, or a checkpoint of ours, and change its settings to those asked for.
    encoding: tiktoken.Encoding | None
    with naming("init_from", config.init_from):
        name = name_of_theirs(config.init_from)
        if name:
            found, read = read_huggingface(name)
            encoding = read_tokenizer_json(find_folder(name), found.vocab_size)
        else:
            checkpoint = open_checkpoint(config.init_from)
            found, encoding = checkpoint.model.config, checkpoint.encoding
            read = plain_weights(checkpoint.model).__getitem__
        model = inherit(found, config.model)
    return replace(config, model=model), partial(copy_weights, read), encoding


def pretrained_config(where: str) -> GPTConfig:
    """Return the settings of init_from's model, without reading its weights."""
    with naming("init_from", where):
        name = name_of_theirs(where)
        if name:
            return read_config(name)
        return first_intact(find_checkpoints(where), read_settings)


def refuse_other_model(config: TrainConfig) -> None:
    """Raise SettingsError if config.model would need other weights than init_from's.

    These are not read.
    """
    if config.init_from:
        found = pretrained_config(config.init_from)
        with naming("init_from", config.init_from):
            inherit(found, config.model)


def changes_from(where: str, model: GPTConfig) -> str:
    """Return the settings of a run's model that init_from's has otherwise, as the end of a line."""
    found = asdict(pretrained_config(where))
    changed = {name: value for name, value in asdict(model).items() if value != found[name]}
    told = [
        f"model.{name}={format_value(value)} (it has {format_value(found[name])})" for name, value in changed.items()
    ]
    return f", with {', '.join(told)}" if told else ""


def pretrained_meta(where: str | None) -> Meta | None:
    """Return the meta.json of init_from's checkpoint; None without init_from.

    Of a folder of hf:NAME these are the texts and settings that export.py has noted there.
    """
    if not where:
        return None
    with naming("init_from", where):
        name = name_of_theirs(where)
        if name is None:
            return first_intact(find_checkpoints(where), read_meta, lambda problem: None)  # told as it was opened
        texts, data = noted_training(name)
        return Meta({"data": data}, Progress(learned=texts))


def inherit(found: GPTConfig, asked: GPTConfig) -> GPTConfig:
    """Return the pretrained model's settings, changed by those asked for.

    Raises SettingsError if they would need other weights.
    """
    settings = asdict(found)
    differing = {}
    for name, value in asdict(asked).items():
        # A setting is free if no weight depends on it; of attention= that depends on the forms.
        free = f"model.{name}" in MAY_CHANGE_ON_INIT
        free |= name == "attention" and weights_of(found, value) == weights_of(found, found.attention)
        free |= name == "n_kv_head" and can_pool(found, value)
        known = found.kv_heads if name == "n_kv_head" else settings[name]  # null is a key head for each query head
        if not free and value not in (None, known):
            differing[name] = f"model.{name}={format_value(value)} (it has {format_value(known)})"
        elif free and (name not in ("vocab_size", "n_kv_head") or value is not None):  # null keeps the pretrained ones
            settings[name] = value
    if differing:
        remedy = "leave these settings out to continue with its weights, or leave out init_from"
        remedy += remedy_in_python(asdict(asked), asdict(GPTConfig()), differing)
        if "attention" in differing:
            remedy += "; docs/library.md adds to a trained model what has new weights"
        raise SettingsError(f"its model is not the one asked for: {', '.join(differing.values())}", remedy)
    # yarn and llama3 tell slow planes by the length at which the weights were trained, not by that asked for.
    factor = 1.0 if found.rope_scaling == "none" else found.rope_scaling_factor
    trained = found.rope_trained_length or found.block_size / factor
    is_scaled = settings["rope_scaling"] in ("yarn", "llama3") and settings["rope_trained_length"] is None
    if is_scaled and settings["block_size"] / settings["rope_scaling_factor"] != trained:
        settings["rope_trained_length"] = round(trained)
    return GPTConfig(**settings)


def weights_of(config: GPTConfig, attention: str) -> list[tuple[str, set[str]]]:
    """Return each layer's form and modifiers; forms with the same weights are equal."""
    parts = [part.split("+") for part in attention.split("/")]
    layers = [parts[layer % len(parts)] for layer in range(config.n_layer)]
    return [("sdpa" if has_plain_weights(form) else form, set(added) - SETTINGS.keys()) for form, *added in layers]


def has_plain_weights(form: str) -> bool:
    """Return whether a form has sdpa's weights, as one has that differs in its function alone."""
    cls = layer_class(form)
    return cls is MultiHeadAttention or cls.has_plain_weights


def can_pool(config: GPTConfig, kv_heads: int | None) -> bool:
    """Return whether a model's key heads can be averaged to `kv_heads`.

    Only the size of qkv_proj may depend on their number.
    """
    layers = weights_of(config, config.attention)
    is_plain = all(layer == ("sdpa", set()) for layer in layers) and config.position != "pope"
    return is_plain and kv_heads is not None and config.kv_heads % kv_heads == 0


@torch.no_grad()
def copy_weights(read: Read, model: GPT) -> str:
    """Copy pretrained weights into a fresh model, whose sizes may differ; return their hash.

    These sizes are block_size, vocab_size and n_kv_head.

    Fewer key heads are the means of those that they replace, and so are their values (Ainslie et al. 2023, section
    2.1): the run learns to do with them.

    Surplus learned positions and tokens are dropped. New positions keep the fresh weights. A new token starts as the
    mean of all others, in the embedding and in lm_head. So it is as likely as an average token, and changes the others'
    probabilities little (Hewitt 2021).
    """

    digest = hashlib.sha256()

    def resized(name: str, fresh: Tensor) -> Tensor:
        known = read(name)
        digest.update(known.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if ".qkv_proj." in name and len(known) != len(fresh):
            layer: Any = model.get_submodule(name.partition(".qkv_proj")[0])
            return pooled(known, layer)
        # Cut surplus rows, or add the missing ones.
        missing = len(fresh) - len(known)
        if missing <= 0:
            return known[: len(fresh)]
        new = known.mean(0, keepdim=True).expand(missing, -1)
        if name == "position_embedding.weight":
            new = fresh[len(known) :].to(known)
        return torch.cat((known, new))

    load_weights(model, {name: resized(name, fresh.detach()) for name, fresh in model.named_parameters()})
    return digest.hexdigest()[:16]


def pooled(rows: Tensor, layer: MultiHeadAttention) -> Tensor:
    """Return rows of qkv_proj with key heads and their values averaged to a layer's."""
    queries = layer.query_heads * layer.head_dim
    q, kv = rows.split((queries, len(rows) - queries))
    heads = kv.unflatten(0, (2, layer.kv_heads, -1, layer.head_dim))  # (2 old D, …) -> (2, Hkv, old / Hkv, D, …)
    return torch.cat((q, heads.mean(2).flatten(0, 2)))


def name_of_theirs(where: str) -> str | None:
    """Return NAME of hf:NAME; None for a run or checkpoint, which must exist."""
    if where.startswith("hf:"):
        return where.removeprefix("hf:")
    folder = user_path("init_from", where)
    if (folder / "config.json").is_file() and not (folder / "meta.json").is_file():
        begins = f"{hydra_quoted('init_from', f'hf:{where}')} begins with it"
        raise SettingsError("it is a folder of Hugging Face's", begins)
    if not folder.exists():
        # nanoGPT's values of init_from.
        remedies = {"resume": "resume=auto, or resume=RUN, continues a run"}
        remedies |= dict.fromkeys(("scratch", "none", "random"), "leave it out to begin anew")
        remedies |= dict.fromkeys(GPT2, f"init_from=hf:{where} begins with it")
        remedy = remedies.get(where, "give a run directory, a checkpoint, or hf:NAME_OR_FOLDER")
        raise SettingsError("it does not exist", remedy)
    return None

"""Names and layouts of Hugging Face's GPT-2, Llama and Qwen3, to and from ours.

The three are one transformer in different words. What differs beside names:

GPT-2          stores linear weights transposed, and q, k and v as one
Llama, Qwen3   rotate channel i with channel i + D/2, where we rotate 2i with 2i + 1: the rows of the
               query and key projections (and Qwen3's QK-norm weights) change places

Weights and config are read and written as safetensors and JSON: the transformers library is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.attention import ATTENTION_VARIANTS, MultiHeadAttention
from model.attention.multihead import NORM_EPS
from model.config import GPTConfig
from model.gpt import GPT
from training.config import SettingsError


class HuggingFaceError(SettingsError):
    """A model that one side cannot express, or a folder that holds none; the message names what is in the way."""


@dataclass(frozen=True)
class Target:
    """What a model of Hugging Face's is made of, in our settings, and the preset that always fits it."""

    settings: dict[str, Any]
    preset: str


TARGETS = {
    "GPT2LMHeadModel": Target({"position": "learned", "norm": "layernorm", "qk_norm": False}, preset="gpt2"),
    "LlamaForCausalLM": Target(
        {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": False}, preset="llama"
    ),
    "Qwen3ForCausalLM": Target(
        {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True}, preset="tiny"
    ),
}


def choose_target(model: GPT) -> str:
    """The class of Hugging Face's that computes the same as `model`.

    Raises HuggingFaceError, naming the settings in the way and a preset that fits, when there is none.
    """
    config = model.config
    misfits = {
        name: [key for key, value in target.settings.items() if getattr(config, key) != value]
        for name, target in TARGETS.items()
    }
    name = min(misfits, key=lambda name: len(misfits[name]))
    obstacles = [f"{key}={getattr(config, key)}" for key in misfits[name]]
    if not isinstance(model.blocks[0].attention, MultiHeadAttention) or config.attention in ATTENTION_VARIANTS:
        obstacles.append(f"attention={config.attention}")
    for key in ("logit_softcap", "attention_window"):
        if getattr(config, key) is not None:
            obstacles.append(f"{key}={getattr(config, key)}")
    if name == "GPT2LMHeadModel":
        if config.mlp not in GPT2_ACTIVATIONS:
            obstacles.append(f"mlp={config.mlp}")
        if not (config.bias and config.qkv_bias):
            obstacles.append(f"bias={config.bias}, qkv_bias={config.qkv_bias} (both must be true)")
        if config.kv_heads != config.n_head:
            obstacles.append(f"n_kv_head={config.n_kv_head}")
        if config.n_head * config.head_channels != config.n_embd:
            obstacles.append(f"head_size={config.head_size}")
    elif config.bias or config.qkv_bias:
        obstacles.append(f"bias={config.bias}, qkv_bias={config.qkv_bias} (both must be false)")
    if name == "LlamaForCausalLM" and config.n_embd % model.blocks[0].attention.n_head:
        obstacles.append(f"n_head={config.n_head} that does not divide n_embd={config.n_embd}")
    if name == "Qwen3ForCausalLM" and config.norm_eps != NORM_EPS:
        obstacles.append(f"norm_eps={config.norm_eps} (must be {NORM_EPS}, that of QK-norm)")
    if obstacles:
        raise HuggingFaceError(
            f"Hugging Face's {name} is the nearest, but has no {', '.join(obstacles)}: "
            f"a model trained with model={TARGETS[name].preset} can be exported."
        )
    return name


def to_huggingface(model: GPT, folder: Path, end_of_text: int | None = None) -> str:
    """Write config.json and model.safetensors for AutoModelForCausalLM; returns the name of its class.

    end_of_text: the id that ends a document. Raises HuggingFaceError when no class computes the same.
    """
    name = choose_target(model)
    weights = model.state_dict()
    if model.config.tie_embeddings:
        del weights["lm_head.weight"]
    if name == "GPT2LMHeadModel":
        weights = _gpt2_weights(weights)
    else:
        weights = {_llama_name(ours): _half_split(ours, tensor, model) for ours, tensor in weights.items()}
    config = _gpt2_config(model.config) if name == "GPT2LMHeadModel" else _llama_config(model, name)
    dtype = str(model.token_embedding.weight.dtype).removeprefix("torch.")
    config |= {"architectures": [name], "torch_dtype": dtype, "tie_word_embeddings": model.config.tie_embeddings}
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}  # as in training, what ends one begins the next
    config |= ends
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: tensor.cpu().contiguous() for key, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for file, content in (("config.json", config), ("generation_config.json", ends)):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return name


def from_huggingface(where: str) -> GPT:
    """Our GPT with the weights of a GPT-2, Llama or Qwen3, in a folder or by its name on the hub.

    The logits are the same. Weights become float32. Raises HuggingFaceError when it cannot be read or
    has what ours cannot express.
    """
    with _readable(where):
        model = GPT(read_config(where))
        theirs = _read_weights(find_folder(where))
        is_gpt2 = model.config.position == "learned"
        ours = _from_gpt2_weights(theirs, model) if is_gpt2 else _from_llama_weights(theirs, model)
        if model.config.tie_embeddings:
            ours["lm_head.weight"] = ours["token_embedding.weight"]
        model.load_state_dict(ours)
    return model.eval()


def read_config(where: str) -> GPTConfig:
    """The settings of a GPT-2, Llama or Qwen3 in our words, without its weights; HuggingFaceError as above."""
    with _readable(where):
        settings = json.loads((find_folder(where) / "config.json").read_bytes())
        kind = settings["model_type"]
        if kind not in ("gpt2", "llama", "qwen3"):
            raise HuggingFaceError(f"{where} is a {kind}: only gpt2, llama and qwen3 models can be read.")
        return _from_gpt2_config(settings) if kind == "gpt2" else _from_llama_config(settings, kind)


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Within it whatever a damaged file raises becomes a HuggingFaceError."""
    try:
        yield
    except HuggingFaceError:
        raise
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise HuggingFaceError(f"{where} cannot be read as a model ({type(error).__name__}: {reason}).") from error


def find_folder(where: str) -> Path:
    """The local folder, or the files of that name on the hub, downloaded once by the huggingface_hub library."""
    folder = Path(where).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise HuggingFaceError(
            f"{where} is no local folder, and to look on the hub takes: pip install huggingface_hub."
        ) from None
    try:
        return Path(snapshot_download(where, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # whatever the network, the hub or the disk raises
        reason = " ".join(str(error).split())[:200]
        raise HuggingFaceError(
            f"{where} is no local folder and could not be downloaded ({type(error).__name__}: {reason}): "
            "check the name and the network, or give a folder."
        ) from error


# GPT-2


GPT2_NAMES = {
    "attention_norm": "ln_1",
    "attention.o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
GPT2_ENDS = {"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f"}


def _gpt2_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.inner,
        "activation_function": GPT2_ACTIVATIONS[config.mlp],
        "layer_norm_epsilon": config.norm_eps,
        "attn_pdrop": config.attention_dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
    }


def _from_gpt2_config(settings: dict[str, Any]) -> GPTConfig:
    mlp = "gelu" if settings.get("activation_function") == GPT2_ACTIVATIONS["gelu"] else "gelu_tanh"
    _expect(
        settings,
        activation_function=GPT2_ACTIVATIONS[mlp],
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
    )
    return GPTConfig(
        n_layer=settings["n_layer"],
        n_head=settings["n_head"],
        n_embd=settings["n_embd"],
        n_inner=_unless(settings.get("n_inner"), 4 * settings["n_embd"]),
        block_size=settings["n_positions"],
        vocab_size=settings["vocab_size"],
        norm_eps=settings["layer_norm_epsilon"],
        mlp=mlp,
        bias=True,
        qkv_bias=True,
        zero_init=False,
        tie_embeddings=settings.get("tie_word_embeddings", True),
        **TARGETS["GPT2LMHeadModel"].settings,
    )


def _gpt2_weights(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    theirs = {}
    for name, tensor in ours.items():
        stem, _, kind = name.rpartition(".")
        if stem == "lm_head":
            theirs["lm_head.weight"] = tensor
        elif stem in GPT2_ENDS:
            theirs[f"transformer.{GPT2_ENDS[stem]}.{kind}"] = tensor
        elif name.endswith(("q_proj.weight", "q_proj.bias")):
            layer = stem.split(".")[1]
            qkv = torch.cat([ours[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")])
            theirs[f"transformer.h.{layer}.attn.c_attn.{kind}"] = qkv.t() if kind == "weight" else qkv
        elif not stem.endswith(("k_proj", "v_proj")):
            _, layer, part = stem.split(".", 2)
            transposed = tensor.t() if tensor.ndim == 2 else tensor
            theirs[f"transformer.h.{layer}.{GPT2_NAMES[part]}.{kind}"] = transposed
    return theirs


def _from_gpt2_weights(theirs: dict[str, Tensor], model: GPT) -> dict[str, Tensor]:
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    ours = {}
    for name in model.state_dict():
        stem, _, kind = name.rpartition(".")
        if stem == "lm_head":
            if not model.config.tie_embeddings:
                ours[name] = theirs["lm_head.weight"]
        elif stem in GPT2_ENDS:
            ours[name] = theirs[f"{GPT2_ENDS[stem]}.{kind}"]
        else:
            _, layer, part = stem.split(".", 2)
            if part.endswith(("q_proj", "k_proj", "v_proj")):
                place = ("q_proj", "k_proj", "v_proj").index(part.rpartition(".")[2])
                tensor = theirs[f"h.{layer}.attn.c_attn.{kind}"].chunk(3, dim=-1)[place]
            else:
                tensor = theirs[f"h.{layer}.{GPT2_NAMES[part]}.{kind}"]
            ours[name] = tensor.t() if tensor.ndim == 2 else tensor
    return ours


# Llama and Qwen3


def _llama_config(model: GPT, name: str) -> dict[str, Any]:
    config, attention = model.config, model.blocks[0].attention
    scaling = None
    if config.rope_scaling == "linear":
        scaling = {"rope_type": "linear", "factor": config.rope_scaling_factor}
    return {
        "model_type": "qwen3" if name == "Qwen3ForCausalLM" else "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": attention.n_head,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": attention.rope.theta,  # the base that ntk has raised
        "rope_scaling": scaling,
        "attention_dropout": config.attention_dropout,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }


def _from_llama_config(settings: dict[str, Any], kind: str) -> GPTConfig:
    _expect(settings, hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False)
    # Version 5 of transformers keeps both under rope_parameters.
    rope = {"rope_theta": settings.get("rope_theta", 10_000.0)}
    rope |= settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling not in ("default", "linear"):
        raise HuggingFaceError(f"rope_type={scaling} is not known here: only default and linear are.")
    if kind == "qwen3" and settings["rms_norm_eps"] != NORM_EPS:
        raise HuggingFaceError(f"rms_norm_eps={settings['rms_norm_eps']} is not known here: QK-norm's is {NORM_EPS}.")
    heads, width = settings["num_attention_heads"], settings["hidden_size"]
    target = TARGETS["Qwen3ForCausalLM" if kind == "qwen3" else "LlamaForCausalLM"]
    kv_heads = settings.get("num_key_value_heads", heads)
    return GPTConfig(
        n_layer=settings["num_hidden_layers"],
        n_head=heads,
        n_kv_head=_unless(kv_heads, heads),
        head_size=_unless(settings.get("head_dim"), width / heads),
        n_embd=width,
        n_inner=settings["intermediate_size"],
        block_size=settings["max_position_embeddings"],
        vocab_size=settings["vocab_size"],
        rope_theta=rope["rope_theta"],
        rope_scaling="linear" if scaling == "linear" else "none",
        rope_scaling_factor=rope.get("factor", 1.0) if scaling == "linear" else 1.0,
        norm_eps=settings["rms_norm_eps"],
        tie_embeddings=settings.get("tie_word_embeddings", False),
        attention_dropout=settings.get("attention_dropout", 0.0),
        **target.settings,
    )


LLAMA_NAMES = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
}
LLAMA_ENDS = {
    "token_embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}


def _llama_name(ours: str) -> str:
    if ours in LLAMA_ENDS:
        return LLAMA_ENDS[ours]
    _, layer, part, rest = ours.split(".", 3)
    return f"model.layers.{layer}.{LLAMA_NAMES[part]}.{rest}"


def _from_llama_weights(theirs: dict[str, Tensor], model: GPT) -> dict[str, Tensor]:
    names = model.state_dict()
    if model.config.tie_embeddings:
        del names["lm_head.weight"]
    return {ours: _adjacent_pairs(ours, theirs[_llama_name(ours)], model) for ours in names}


def _half_split(name: str, tensor: Tensor, model: GPT) -> Tensor:
    """Rows of each head from (x0, y0, x1, y1, …) to (x0, x1, …, y0, y1, …), where a rotation turns (x, y)."""
    if not _is_rotated(name):
        return tensor
    D = model.blocks[0].attention.head_size
    return tensor.unflatten(0, (-1, D // 2, 2)).transpose(1, 2).flatten(0, 2)  # (n·D, …) by (n, D/2, 2, …)


def _adjacent_pairs(name: str, tensor: Tensor, model: GPT) -> Tensor:
    """The way back: from (x0, x1, …, y0, y1, …) to (x0, y0, x1, y1, …)."""
    if not _is_rotated(name):
        return tensor
    D = model.blocks[0].attention.head_size
    return tensor.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).flatten(0, 2)  # (n·D, …) by (n, 2, D/2, …)


def _is_rotated(name: str) -> bool:
    return any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))


def _read_weights(folder: Path) -> dict[str, Float[Tensor, " ..."]]:
    """All weights, from one file or from the several that an index lists, as float32."""
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    weights: dict[str, Tensor] = {}
    for file in sorted(files):
        if Path(file).name != file:
            raise HuggingFaceError(f"{index} names a file elsewhere ({file}).")
        weights |= load_file(folder / file)
    return {name: tensor.float() for name, tensor in weights.items()}


def _expect(settings: dict[str, Any], **expected: Any) -> None:
    """Raises HuggingFaceError for a setting that is there and has another value."""
    for name, value in expected.items():
        if settings.get(name, value) != value:
            raise HuggingFaceError(f"{name}={settings[name]} is not known here: only {name}={value} is.")


def _unless(value: int | None, default: float) -> int | None:
    """None for a value that is what None stands for."""
    return None if value == default else value

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

from errors import HuggingFaceError
from model.attention import ATTENTION_VARIANTS, MultiHeadAttention
from model.attention.layer import NORM_EPS
from model.config import GPTConfig
from model.gpt import GPT, load_weights, plain_weights


@dataclass(frozen=True)
class Target:
    """A model of Hugging Face's: its class, what it is made of in our settings, and the preset that always fits it."""

    name: str
    settings: dict[str, Any]
    preset: str


LLAMA = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu"}
TARGETS = {
    "gpt2": Target("GPT2LMHeadModel", {"position": "learned", "norm": "layernorm", "qk_norm": False}, "gpt2"),
    "llama": Target("LlamaForCausalLM", LLAMA | {"qk_norm": False}, "llama"),
    "qwen3": Target("Qwen3ForCausalLM", LLAMA | {"qk_norm": True}, "tiny"),
}
"""By their model_type."""


def choose_target(model: GPT) -> str:
    """The model_type of Hugging Face's that computes the same as `model`.

    Raises HuggingFaceError, naming the settings in the way and a preset that fits, when there is none.
    """
    config = model.config
    misfits = {
        kind: [key for key, value in target.settings.items() if getattr(config, key) != value]
        for kind, target in TARGETS.items()
    }
    kind = min(misfits, key=lambda kind: len(misfits[kind]))
    obstacles = [f"{key}={getattr(config, key)}" for key in misfits[kind]]
    if not isinstance(model.blocks[0].attention, MultiHeadAttention) or config.attention in ATTENTION_VARIANTS:
        obstacles.append(f"attention={config.attention}")
    for key in ("logit_softcap", "attention_window"):
        if getattr(config, key) is not None:
            obstacles.append(f"{key}={getattr(config, key)}")
    if kind == "gpt2":
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
    if kind == "llama" and config.n_embd % model.blocks[0].attention.n_head:
        obstacles.append(f"n_head={config.n_head} that does not divide n_embd={config.n_embd}")
    if kind == "qwen3" and config.norm_eps != NORM_EPS:
        obstacles.append(f"norm_eps={config.norm_eps} (must be {NORM_EPS}, that of QK-norm)")
    if obstacles:
        raise HuggingFaceError(
            f"Hugging Face's {TARGETS[kind].name} is the nearest, but has no {', '.join(obstacles)}: "
            f"a model trained with model={TARGETS[kind].preset} can be exported."
        )
    return kind


def to_huggingface(model: GPT, folder: Path, end_of_text: int | None = None) -> str:
    """Write config.json and model.safetensors for AutoModelForCausalLM; returns the name of its class.

    end_of_text: the id that ends a document. Raises HuggingFaceError when no class computes the same.
    """
    kind = choose_target(model)
    name = TARGETS[kind].name
    config = _gpt2_config(model.config) if kind == "gpt2" else _llama_config(model)
    dtype = str(model.token_embedding.weight.dtype).removeprefix("torch.")
    config |= {"model_type": kind, "architectures": [name], "torch_dtype": dtype}
    config["tie_word_embeddings"] = model.config.tie_embeddings
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}  # as in training, what ends one begins the next
    config |= ends
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: tensor.cpu().contiguous() for key, tensor in _to_theirs(model).items()},
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
        load_weights(model, _to_ours(_read_weights(find_folder(where)), model))
    return model.eval()


def read_config(where: str) -> GPTConfig:
    """The settings of a GPT-2, Llama or Qwen3 in our words, without its weights; HuggingFaceError as above."""
    with _readable(where):
        settings = json.loads((find_folder(where) / "config.json").read_bytes())
        kind = settings["model_type"]
        if kind not in TARGETS:
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


# Weights


# What our names are in theirs, a part at a time, in this order.
GPT2_WORDS = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "attention.q_proj": "attn.c_attn",
    "attention.k_proj": "attn.c_attn",
    "attention.v_proj": "attn.c_attn",
    "attention.o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up_proj": "c_fc",
    "down_proj": "c_proj",
}
LLAMA_WORDS = {
    "token_embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.": "self_attn.",
    "mlp_norm": "post_attention_layernorm",
}
ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")


def _to_theirs(model: GPT) -> dict[str, Tensor]:
    """A model's weights under their names and in their layout."""
    ours = plain_weights(model)
    return {
        theirs: torch.cat([_change_layout(name, ours[name], model) for name in names], dim=-1)
        for theirs, names in _names_in_theirs(model).items()
    }


def _to_ours(theirs: dict[str, Tensor], model: GPT) -> dict[str, Tensor]:
    """The way back; `model` has the shape that the weights are for."""
    ours = {}
    for their_name, names in _names_in_theirs(model).items():
        if their_name not in theirs:
            their_name = their_name.removeprefix("transformer.")  # GPT2Model, without a head, has none
        for name, tensor in zip(names, theirs[their_name].chunk(len(names), dim=-1), strict=True):
            ours[name] = _change_layout(name, tensor, model, back=True)
    return ours


def _names_in_theirs(model: GPT) -> dict[str, list[str]]:
    """For each of their weights which of ours it holds side by side: one, or GPT-2's three projections."""
    words = GPT2_WORDS if _is_gpt2(model) else LLAMA_WORDS
    names: dict[str, list[str]] = {}
    for ours in plain_weights(model):
        theirs = ours
        for word, their_word in words.items():
            theirs = theirs.replace(word, their_word)
        names.setdefault(theirs, []).append(ours)
    return names


def _change_layout(name: str, tensor: Tensor, model: GPT, *, back: bool = False) -> Tensor:
    """A weight of ours as they have it, or with `back` the other way round.

    GPT-2's matrices are transposed. In Llama and Qwen3 a rotation turns pairs (x, y) of a head's rows, which
    are (x0, y0, x1, y1, …) here and (x0, x1, …, y0, y1, …) there.
    """
    if _is_gpt2(model):
        return tensor.t() if name.startswith("blocks.") and tensor.ndim == 2 else tensor
    if not any(part in name for part in ROTATED):
        return tensor
    half = model.blocks[0].attention.head_size // 2
    pairs = (2, half) if back else (half, 2)
    return tensor.unflatten(0, (-1, *pairs)).transpose(1, 2).flatten(0, 2)  # (n·D, …) by (n, D/2, 2, …)


def _is_gpt2(model: GPT) -> bool:
    return model.config.position == "learned"


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


# GPT-2


GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def _gpt2_config(config: GPTConfig) -> dict[str, Any]:
    return {
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
        **TARGETS["gpt2"].settings,
    )


# Llama and Qwen3


def _llama_config(model: GPT) -> dict[str, Any]:
    config, attention = model.config, model.blocks[0].attention
    scaling = None
    if config.rope_scaling == "linear":
        scaling = {"rope_type": "linear", "factor": config.rope_scaling_factor}
    return {
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
    return GPTConfig(
        n_layer=settings["num_hidden_layers"],
        n_head=heads,
        n_kv_head=_unless(settings.get("num_key_value_heads", heads), heads),
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
        **TARGETS[kind].settings,
    )


def _expect(settings: dict[str, Any], **expected: Any) -> None:
    """Raises HuggingFaceError for a setting that is there and has another value."""
    for name, value in expected.items():
        if settings.get(name, value) != value:
            raise HuggingFaceError(f"{name}={settings[name]} is not known here: only {name}={value} is.")


def _unless(value: int | None, default: float) -> int | None:
    """None for a value that is what None stands for."""
    return None if value == default else value

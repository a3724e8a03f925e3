"""Names and layouts of Hugging Face's GPT-2, Llama and Qwen3, to and from ours.

The three are one transformer in different words. Apart from names two things differ:

GPT-2          stores linear weights transposed, and q, k and v as one
Llama, Qwen3   rotate channel i with channel i + D/2, we rotate 2i with 2i + 1: the rows of the query and key
               projections (and Qwen3's QK-norm weights) are reordered

Weights and config are read and written as safetensors and JSON, without the transformers library.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from errors import HuggingFaceError, first_line
from model.attention import ATTENTION_FUNCTIONS, MultiHeadAttention
from model.attention.layer import NORM_EPS
from model.config import GPTConfig
from model.gpt import GPT, load_weights, plain_weights, save_file
from model.size import without_weights


@dataclass(frozen=True)
class Target:
    """A model of Hugging Face's, in its words and ours."""

    name: str
    """Its class."""
    preset: str
    """Our preset that it always fits."""
    settings: dict[str, Any]
    """What it is made of: settings of ours that differ from the defaults."""
    fixed: dict[str, Any]
    """Settings of theirs that ours computes with this value only."""
    names: dict[str, str]
    """Settings of ours that may have any value, and theirs for each."""
    weights: dict[str, str]
    """Parts of our weights' names in the order of replacement, and theirs."""


QWEN3 = Target(
    name="Qwen3ForCausalLM",
    preset="tiny",
    settings={},
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    names={
        "vocab_size": "vocab_size", "block_size": "max_position_embeddings", "n_embd": "hidden_size",
        "n_inner": "intermediate_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_kv_head": "num_key_value_heads", "head_size": "head_dim", "norm_eps": "rms_norm_eps",
        "attention_dropout": "attention_dropout",
    },
    weights={
        "token_embedding": "model.embed_tokens", "final_norm": "model.norm", "blocks": "model.layers",
        "attention_norm": "input_layernorm", "attention.": "self_attn.", "mlp_norm": "post_attention_layernorm",
    },
)  # fmt: skip
LLAMA = replace(QWEN3, name="LlamaForCausalLM", preset="llama", settings={"qk_norm": False})
SLIDING = "sliding_attention"  # one of Qwen3's layer_types; the other is full_attention
GPT2 = Target(
    name="GPT2LMHeadModel",
    preset="gpt2",
    settings={"position": "learned", "norm": "layernorm", "qk_norm": False, "bias": True, "qkv_bias": True},
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    names={name: name for name in ("vocab_size", "n_embd", "n_layer", "n_head", "n_inner")}
    | {"block_size": "n_positions", "norm_eps": "layer_norm_epsilon"},
    weights={
        "token_embedding": "transformer.wte", "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f", "blocks": "transformer.h", "attention_norm": "ln_1", "mlp_norm": "ln_2",
        "attention.q_proj": "attn.c_attn", "attention.k_proj": "attn.c_attn", "attention.v_proj": "attn.c_attn",
        "attention.o_proj": "attn.c_proj", "up_proj": "c_fc", "down_proj": "c_proj",
    },
)  # fmt: skip
TARGETS = {"qwen3": QWEN3, "llama": LLAMA, "gpt2": GPT2}  # by their model_type
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}

OPTIONAL = ("n_inner", "n_kv_head", "head_size", "attention_dropout")  # may be missing from their config.json
CHECKED = ("attention", "attention_window", "n_head", "rope_theta", "rope_scaling", "rope_scaling_factor")
WITHOUT_EFFECT = ("tie_embeddings", "zero_init", "dropout", "score_softcap", "latent_size")


def _obstacles(model: GPT, kind: str) -> list[str]:
    config, attention = model.config, model.blocks[0].attention
    free = {*CHECKED, *WITHOUT_EFFECT, *QWEN3.names}
    wanted = {field.name: field.default for field in fields(GPTConfig) if field.name not in free}
    if kind == "gpt2":
        wanted["mlp"] = config.mlp if config.mlp in GPT2_ACTIVATIONS else "gelu_tanh"
    found = [name for name, value in (wanted | TARGETS[kind].settings).items() if getattr(config, name) != value]
    layers = [config.at(layer) for layer in range(config.n_layer)]
    known = {*ATTENTION_FUNCTIONS, "single_head", "stacked"}
    if not {layer.form for layer in layers} <= known or any({*layer.modifiers} - {"window"} for layer in layers):
        found.append("attention")
    if kind != "qwen3" and any(layer.attention_window for layer in layers):
        found.append("attention_window")
    if config.rope_scaling == "yarn":
        found.append("rope_scaling")
    obstacles = [f"{name}={getattr(config, name)}" for name in found]
    if isinstance(attention, MultiHeadAttention):
        if kind == "gpt2" and attention.kv_heads != attention.n_head:
            obstacles.append(f"n_kv_head={config.n_kv_head}")
        if kind == "gpt2" and attention.n_head * attention.head_size != config.n_embd:
            obstacles.append(f"head_size={config.head_size}")
        if kind == "llama" and config.n_embd % attention.n_head:
            obstacles.append(f"n_head={config.n_head} that does not divide n_embd={config.n_embd}")
    if kind == "qwen3" and config.norm_eps != NORM_EPS:
        obstacles.append(f"norm_eps={config.norm_eps} (must be {NORM_EPS}, that of QK-norm)")
    return obstacles


def to_huggingface(model: GPT, folder: Path, end_of_text: int | None = None) -> str:
    """Write config.json and model.safetensors for AutoModelForCausalLM, and return the name of its class.

    end_of_text: the id that ends a document. Raises HuggingFaceError when no class computes the same.
    """
    obstacles = {kind: _obstacles(model, kind) for kind in TARGETS}
    kind = min(obstacles, key=lambda kind: len(obstacles[kind]))
    if missing := ", ".join(obstacles[kind]):
        problem = f"Hugging Face's {TARGETS[kind].name} comes nearest, but has no {missing}"
        raise HuggingFaceError(f"{problem}: a model trained with model={TARGETS[kind].preset} can be exported.")
    dtype = str(model.token_embedding.weight.dtype).removeprefix("torch.")
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}  # what ends a document begins the next
    config = {"model_type": kind, "architectures": [TARGETS[kind].name], "torch_dtype": dtype}
    config |= _their_config(model, kind) | ends
    folder.mkdir(parents=True, exist_ok=True)
    ours = plain_weights(model)
    weights = {
        theirs: torch.cat([_change_layout(name, ours[name], model) for name in names], dim=-1).cpu().contiguous()
        for theirs, names in _names_in_theirs(model).items()
    }
    save_file(weights, folder / "model.safetensors")
    # The padding is not in config.json: there it would keep the embedding of the token that ends texts from training.
    for file, content in (("config.json", config), ("generation_config.json", ends | {"pad_token_id": end_of_text})):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return TARGETS[kind].name


def from_huggingface(where: str) -> GPT:
    """Return our GPT with the float32 weights of a GPT-2, Llama or Qwen3, whose logits it gives.

    where: a folder or a name on the hub. Raises HuggingFaceError when ours cannot express it.
    """
    config, read = read_huggingface(where)
    model = GPT(config)
    with readable(where):
        load_weights(model, {name: read(name) for name, _ in model.named_parameters()})
    return model.eval()


def read_huggingface(where: str) -> tuple[GPTConfig, Callable[[str], Tensor]]:
    """Return the settings of from_huggingface(where), and what reads its weight of a name in ours."""
    folder, config = find_folder(where), read_config(where)
    index = folder / "model.safetensors.index.json"  # of the several files that a large one is in
    with readable(where):
        files = json.loads(index.read_bytes())["weight_map"].values() if index.is_file() else ["model.safetensors"]
        weights: dict[str, Tensor] = {}  # mapped from the files
        for file in sorted(set(files)):
            if Path(file).name != file:
                raise HuggingFaceError(f"{index} names a file elsewhere ({file}).")
            weights |= load_file(folder / file)
        model, parts = without_weights(config), {}
        for theirs, names in _names_in_theirs(model).items():
            if theirs not in weights:
                theirs = theirs.removeprefix("transformer.")  # GPT2Model, without a head, has none
            for name, part in zip(names, weights[theirs].chunk(len(names), dim=-1), strict=True):
                shape = tuple(model.get_parameter(name).shape)
                if _change_layout(name, part.to("meta"), model, back=True).shape != shape:
                    raise ValueError(f"{theirs} does not have the size that config.json says, {shape}")
                parts[name] = part
    return config, lambda name: _change_layout(name, parts[name].float(), model, back=True)


def read_config(where: str) -> GPTConfig:
    """Return the settings of a GPT-2, Llama or Qwen3 in our words, without its weights; HuggingFaceError as above."""
    with readable(where):
        settings = json.loads((find_folder(where) / "config.json").read_bytes())
        kind = settings["model_type"]
        if kind not in TARGETS:
            raise HuggingFaceError(f"{where} is a {kind}: only gpt2, llama and qwen3 models can be read.")
        target = TARGETS[kind]
        fixed, ours = dict(target.fixed), dict(target.settings)
        if kind == "gpt2":
            mlp = "gelu" if settings.get("activation_function") == "gelu" else "gelu_tanh"
            ours |= {"mlp": mlp, "zero_init": False}
            fixed["activation_function"] = GPT2_ACTIVATIONS[mlp]
        else:  # version 5 of transformers has both under rope_parameters
            rope = {"rope_theta": settings.get("rope_theta", 10_000.0)}
            rope |= settings.get("rope_parameters") or settings.get("rope_scaling") or {}
            scaling = rope.get("rope_type", rope.get("type", "default"))
            if scaling not in ("default", "linear"):
                raise HuggingFaceError(f"rope_type={scaling} is not known here: only default and linear are.")
            ours["rope_theta"] = rope["rope_theta"]
            if scaling == "linear":
                ours |= {"rope_scaling": "linear", "rope_scaling_factor": rope["factor"]}
        if kind == "qwen3":
            fixed["rms_norm_eps"] = NORM_EPS  # that of QK-norm
            ours |= _windows(settings)
        for name, value in fixed.items():
            if settings.get(name, value) != value:
                raise HuggingFaceError(f"{name}={settings[name]} is not known here: only {name}={value} is.")
        for name, theirs in target.names.items():
            if name not in OPTIONAL or settings.get(theirs) is not None:
                ours[name] = settings[theirs]
        return GPTConfig(**ours, tie_embeddings=settings.get("tie_word_embeddings", kind == "gpt2"))


def _windows(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a Qwen3's layer_types come to in our words."""
    n, window = settings["num_hidden_layers"], settings.get("sliding_window")
    if not settings.get("use_sliding_window") or window is None:
        return {}
    most = settings.get("max_window_layers", 28)  # where there are no layer_types, the first that has a window
    types = settings.get("layer_types") or [SLIDING if layer >= most else "" for layer in range(n)]
    return {"attention": "/".join("sdpa" + "+window" * (kind == SLIDING) for kind in types), "attention_window": window}


@contextmanager
def readable(where: object) -> Iterator[None]:
    """Turn whatever a damaged file raises into a HuggingFaceError."""
    try:
        yield
    except HuggingFaceError:
        raise
    except Exception as error:
        raise HuggingFaceError(f"{where} cannot be read ({type(error).__name__}: {first_line(error)}).") from error


@lru_cache  # settings, weights and tokenizer are in one folder, for which the hub is asked once
def find_folder(where: str) -> Path:
    """Return a local folder, or that of the files of this name on the hub, which huggingface_hub downloads once."""
    folder = Path(where).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download  # optional

        return Path(snapshot_download(where, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # whatever the network, the hub or the disk raises
        reason = f"{type(error).__name__}: {first_line(error)}"
        problem = f"{where} is not a local folder and could not be downloaded ({reason})"
        remedy = "check the name and the network, try pip install huggingface_hub, or give a folder"
        raise HuggingFaceError(f"{problem}: {remedy}.") from error


def _names_in_theirs(model: GPT) -> dict[str, list[str]]:
    """Return for each of their weights which of ours it holds side by side: one, or GPT-2's three projections."""
    names: dict[str, list[str]] = {}
    for ours in plain_weights(model):
        theirs = ours
        for word, their_word in (GPT2 if model.config.position == "learned" else LLAMA).weights.items():
            theirs = theirs.replace(word, their_word)
        names.setdefault(theirs, []).append(ours)
    return names


def _change_layout(name: str, tensor: Tensor, model: GPT, *, back: bool = False) -> Tensor:
    """Return a weight of ours in their layout, or with `back` the reverse.

    GPT-2's matrices are transposed. In Llama and Qwen3 a rotation turns pairs (x, y) of a head's rows, which are
    (x0, y0, x1, y1, …) here and (x0, x1, …, y0, y1, …) there.
    """
    if model.config.position == "learned":  # a GPT-2
        return tensor.t() if name.startswith("blocks.") and tensor.ndim == 2 else tensor
    if not any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
        return tensor
    attention = model.blocks[0].attention
    assert isinstance(attention, MultiHeadAttention), "to_huggingface refuses the others"
    half = attention.head_size // 2
    pairs = (2, half) if back else (half, 2)
    return tensor.unflatten(0, (-1, *pairs)).transpose(1, 2).flatten(0, 2)  # (n·D, …) by (n, D/2, 2, …)


def _their_config(model: GPT, kind: str) -> dict[str, Any]:
    config, attention, target = model.config, model.blocks[0].attention, TARGETS[kind]
    assert isinstance(attention, MultiHeadAttention), "to_huggingface refuses the others"
    ours = asdict(config) | {"n_inner": config.inner}
    ours |= {"n_head": attention.n_head, "n_kv_head": attention.kv_heads, "head_size": attention.head_size}
    theirs = {their: ours[name] for name, their in target.names.items()} | target.fixed
    theirs["tie_word_embeddings"] = config.tie_embeddings
    if kind == "gpt2":
        dropout = {"attn_pdrop": config.attention_dropout, "embd_pdrop": config.dropout, "resid_pdrop": config.dropout}
        return theirs | dropout | {"n_ctx": config.block_size, "activation_function": GPT2_ACTIVATIONS[config.mlp]}
    assert attention.rope is not None, "to_huggingface wants it"
    windows = [block.attention.window is not None for block in model.blocks]
    if kind == "qwen3" and any(windows):
        types = [SLIDING if window else "full_attention" for window in windows]
        theirs |= {"use_sliding_window": True, "sliding_window": config.attention_window, "layer_types": types}
    linear = {"rope_type": "linear", "factor": config.rope_scaling_factor}
    theirs["rope_theta"] = attention.rope.planes.theta  # the base that ntk has raised
    return theirs | {"rope_scaling": linear if config.rope_scaling == "linear" else None}

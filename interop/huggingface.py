"""Models of Hugging Face, to and from a GPT, without transformers: those of TARGETS.

They are one transformer under different names. Besides the names two layouts differ:

GPT-2 stores linear weights transposed.
The others store queries, keys and values apart, and gate and up too. Their RoPE rotates channel i with channel i + D/2,
ours 2i with 2i + 1, so the rows of queries and keys, their biases and Qwen3's QK-norm weights are reordered.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from common.errors import HuggingFaceError, SettingsError, format_value
from common.files import read_foreign, regular
from common.settings import build
from common.text import plural
from data.config import DataConfig
from interop import WRITTEN, find_folder, first_names, importing
from model.attention import SOFTMAX
from model.attention.layer import NORM_EPS
from model.config import GPTConfig
from model.gpt import GPT
from model.rope import Rope
from model.size import without_weights
from model.surgery import saved_name
from model.weights import check_choices, check_weights, load_weights, plain_weights, save_file

log = logging.getLogger("tinygpt")  # without a handler its warnings go to stderr


class Target(NamedTuple):
    """A model class of Hugging Face, with its translation to a GPT."""

    name: str
    """The name of the class."""
    preset: str
    """model=PRESET, whose models can always be exported to it."""
    settings: dict[str, Any]
    """Our settings that must have these values, other than our defaults."""
    fixed: dict[str, Any]
    """Their settings that must have these values."""
    names: dict[str, str]
    """{our setting: theirs}, for settings of any value."""
    weights: dict[str, str]
    """{part of a weight's name here: there}, in the order of replacement."""
    defaults: dict[str, Any]
    """Their settings that a config.json may leave out, with the values that transformers takes then."""
    prefix: str
    """What the names begin with, but for lm_head and in a file without it."""


QWEN3 = Target(
    name="Qwen3ForCausalLM",
    preset="tiny",
    settings={},
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    names={
        "vocab_size": "vocab_size",
        "block_size": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_kv_head": "num_key_value_heads",
        "head_size": "head_dim",
        "norm_eps": "rms_norm_eps",
        "attention_dropout": "attention_dropout",
    },
    weights={
        "token_embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "blocks": "model.layers",
        "attention_norm": "input_layernorm",
        "attention.": "self_attn.",
        "mlp_norm": "post_attention_layernorm",
    },
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    prefix="model.",
)
LLAMA = QWEN3._replace(
    name="LlamaForCausalLM",
    preset="llama",
    settings={"qk_norm": False},
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
)
QWEN2 = LLAMA._replace(
    name="Qwen2ForCausalLM",
    settings={"qk_norm": False, "qkv_bias": True},
    fixed={"hidden_act": "silu"},
    defaults={name: value for name, value in QWEN3.defaults.items() if name != "head_dim"},
)
MISTRAL = LLAMA._replace(
    name="MistralForCausalLM",
    fixed={"hidden_act": "silu"},
    defaults=LLAMA.defaults
    | {
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
)
SMOLLM3 = LLAMA._replace(
    name="SmolLM3ForCausalLM",
    defaults=LLAMA.defaults
    | {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
    },
)
ARCEE = LLAMA._replace(
    name="ArceeForCausalLM",
    settings={"qk_norm": False, "mlp": "relu2"},
    fixed={"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False},
    defaults=LLAMA.defaults
    | {
        "hidden_size": 2560,
        "intermediate_size": 18_432,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
)
SLIDING = "sliding_attention"  # one of Qwen's layer_types; the other is full_attention
GPT2 = Target(
    name="GPT2LMHeadModel",
    preset="gpt2",
    settings={"position": "learned", "norm": "layernorm", "qk_norm": False, "bias": True, "qkv_bias": True},
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    names={name: name for name in ("vocab_size", "n_embd", "n_layer", "n_head", "n_inner")}
    | {"block_size": "n_positions", "norm_eps": "layer_norm_epsilon"}
    | {"attention_dropout": "attn_pdrop", "dropout": "resid_pdrop"},
    weights={
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "blocks": "transformer.h",
        "attention_norm": "ln_1",
        "mlp_norm": "ln_2",
        "attention.qkv_proj": "attn.c_attn",
        "attention.o_proj": "attn.c_proj",
        "up_proj": "c_fc",
        "down_proj": "c_proj",
    },
    defaults={
        "vocab_size": 50_257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    prefix="transformer.",
)
# Other names of GPT-2's settings.
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
HEAD = "lm_head.weight"
# Our weights that join several of theirs.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# {their model_type: target}; of two classes that compute the same the first is written
TARGETS = {"qwen3": QWEN3, "llama": LLAMA, "gpt2": GPT2, "qwen2": QWEN2, "mistral": MISTRAL}
TARGETS |= {"smollm3": SMOLLM3, "arcee": ARCEE}
WITH_LAYER_TYPES = ("qwen2", "qwen3", "smollm3")  # which say for each layer whether it has a window
DIVIDED = ("llama", "arcee")  # whose heads must divide hidden_size
# {model_type: what it has and a GPT here has not}, of models whose attention is a string of ours, or nearly so.
EXPERTS = "experts"
AFTER = "norms after attention and MLP"
AROUND = "norms before and after attention and MLP"
BESIDE = "MLP beside attention"
LACKING = dict.fromkeys(("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "granitemoe"), EXPERTS)
LACKING |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_linear", "exaone_moe", "afmoe", "minimax_m2"), EXPERTS)
LACKING |= dict.fromkeys(("olmo2", "olmo3", "olmo_hybrid", "exaone4"), AFTER)
LACKING |= dict.fromkeys(("gemma2", "gemma3_text", "gemma3"), f"{AROUND}, scaled embeddings or gated GELU")
LACKING |= {"gemma": "scaled embeddings or gated GELU", "glm4": AROUND}
LACKING |= dict.fromkeys(("gpt_neox", "gptj", "phi", "falcon", "cohere", "cohere2"), BESIDE)
LACKING |= {
    "apertus": "xIELU",
    "granite": "multipliers of embeddings, layers and logits",
    "hunyuan_v1_dense": "QK-norm after the rotation",
    "lfm2": f"QK-norm with an epsilon other than {NORM_EPS}",
    "nanochat": "norms without weights",
    "olmo": "norms without weights",
}
OTHER_HEADS = ("Classification", "QuestionAnswering", "Reward")  # parts of the names of classes
BIASES = ("bias", "qkv_bias")
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
FLAGS = {name for target in TARGETS.values() for name, value in target.fixed.items() if isinstance(value, bool)}
FLAGS |= {"is_causal", "tie_word_embeddings", "use_sliding_window"}
SYNONYMS = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}
# {rope_type: its other parameters}, with the only values that model/rope.py computes.
ROPE_TYPES = {"linear": {}, "yarn": {}, "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}
# Parameters of yarn that may be written out, with the same values.
ROPE_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "partial_rotary_factor": 1.0}
YARN_LENGTHS = ("attention_factor", "mscale", "mscale_all_dim")
ANOTHER = "choose another model"
PLAIN = "choose its version with plain float32, bfloat16 or float16 weights, adapters merged"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYERS = ("h", "layers")  # what the layers are called there
LAYER = re.compile(rf"(?:.*\.)?(?:{'|'.join(LAYERS)})\.(\d+)\.")
# Weights that change no logit: constants that older versions saved, and attention to an encoder, which a GPT has not.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
UNUSED = (".crossattention.", ".ln_cross_attn.")
INDEX = "model.safetensors.index.json"
MISTRALS = "consolidated"  # files of Mistral and Meta, with other names of the weights
SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
TEXTS = "tinygpt_texts"
"""The name in config.json of fingerprints of texts, which transformers keeps as it is."""
DATA = "tinygpt_data"
"""Likewise, of the settings READING of the run."""
READING = ("document_mask", "separator", "text_field")
"""Settings of data by which eval.py reads a text as in training, and keeps its documents apart."""

# Settings that may be missing from their config.json.
OPTIONAL = ("n_inner", "n_kv_head", "head_size", "attention_dropout", "dropout")
# Settings that _obstacles() compares separately, or that change no logit.
CHECKED = {"attention", "attention_window", "n_head", "tie_embeddings", "zero_init", "dropout", "score_softcap"}
CHECKED |= {"rope_theta", "rope_scaling", "rope_scaling_factor", "rope_trained_length", "latent_size", "ngram_rows"}


def _obstacles(model: GPT, model_type: str) -> list[str]:
    """Return the model's settings that Hugging Face's model_type cannot express, as NAME=VALUE."""
    # Compare the settings that must have one value.
    config = model.config
    attention = model.attentions[0]
    free = CHECKED | QWEN3.names.keys()
    wanted = {field.name: field.default for field in fields(GPTConfig) if field.name not in free}
    if model_type == "gpt2":
        wanted["mlp"] = config.mlp if config.mlp in GPT2_ACTIVATIONS else "gelu_tanh"
    wanted |= TARGETS[model_type].settings
    if model_type == "gpt2":
        wanted = {name: value for name, value in wanted.items() if name not in BIASES}  # zeros are written for none
    found = [name for name, value in wanted.items() if getattr(config, name) != value]
    # Compare the settings that depend on the layers and heads.
    layers = [config.at(layer) for layer in range(config.n_layer)]
    foreign = {layer.form for layer in layers} - {*SOFTMAX, "single_head", "stacked"}
    known = {"window", "nope"} if model_type == "smollm3" else {"window"}
    # Windows have one size. Some classes have them in the layers that they name, Mistral in all or none.
    windows = {each.window for each in model.attentions}
    sizes = windows - {None}
    has_windows = model_type in WITH_LAYER_TYPES or (model_type == "mistral" and None not in windows)
    heads = {(each.n_head, each.kv_heads, each.head_dim) for each in model.attentions}
    lacks = {
        "attention": foreign or len(heads) > 1 or any({*layer.modifiers} - known for layer in layers),
        # Of a window of one position transformers 5 keeps all keys while it generates, and sees them.
        "attention_window": len(sizes) > has_windows or 1 in sizes,
        "n_kv_head": model_type == "gpt2" and attention.kv_heads != attention.n_head,
        "head_size": model_type == "gpt2" and attention.n_head * attention.head_dim != config.n_embd,
        "n_head": model_type in DIVIDED and config.n_embd % attention.n_head,  # transformers divides them
        "norm_eps": model_type == "qwen3" and config.norm_eps != NORM_EPS,  # QK-norm has the same there
    }
    found += [name for name, lacking in lacks.items() if lacking]
    obstacles = [f"{name}={format_value(getattr(config, name))}" for name in found]
    # The trained length is a whole number there. Ours may be block_size / rope_scaling_factor.
    rope = _rope(model)
    if config.rope_scaling in ("yarn", "llama3") and rope is not None and rope.trained % 1:
        obstacles.append(f"rope_trained_length={rope.trained:.2f}")
    return obstacles


def _rope(model: GPT) -> Rope | None:
    """Return the rotation of the layers that have one; it is the same in all."""
    return next((attention.rope for attention in model.attentions if attention.rope is not None), None)


def to_huggingface(
    model: GPT,
    folder: Path | str,
    end_of_text: int | None = None,
    dtype: torch.dtype | None = None,
) -> str:
    """Write a folder for AutoModelForCausalLM, and return the name of the model's class.

    end_of_text: the id that separates documents. dtype: the type of the weights in the folder, by default theirs.
    Raises HuggingFaceError if no class computes the same, and SettingsError if the model is no longer that of its
    settings, or a weight is too large for float16.
    """
    check_weights(model)
    check_choices(model, but=("n_head", "attention_window"))  # which are written as the layers have them
    dtype = dtype or model.token_embedding.weight.dtype
    for name, tensor in plain_weights(model).items():
        if tensor.isfinite().all() and not tensor.to(dtype).isfinite().all():
            problem = f"dtype={str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:,.6g}"
            wider = "bfloat16" if dtype == torch.float16 else "float32"
            raise SettingsError(f"{problem}, and {name} has larger weights", f"set dtype={wider}")

    # Choose the class with the fewest obstacles; it must have none.
    obstacles = {model_type: _obstacles(model, model_type) for model_type in TARGETS}
    model_type = min(obstacles, key=lambda model_type: len(obstacles[model_type]))
    target = TARGETS[model_type]
    if fewest := len(obstacles[model_type]):
        lacks = [
            f"{TARGETS[each].name} has no {' and no '.join(found)}"
            for each, found in obstacles.items()
            if len(found) == fewest
        ]
        problem = f"no class of Hugging Face has all settings of this model ({'; '.join(dict.fromkeys(lacks))})"
        raise HuggingFaceError(problem, f"train without those of one class, as with model={target.preset} alone")

    # Translate the settings. The separator both begins and ends a document.
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    config = {"model_type": model_type, "architectures": [target.name]}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    config |= _their_config(model, model_type) | ends

    # Translate the weights.
    weights = {}
    for name, tensor in plain_weights(model).items():
        parts = _parts(name, model)
        for theirs, part in zip(parts, tensor.split([*parts.values()]), strict=True):
            weights[theirs] = _change_layout(theirs, part, model).to("cpu", dtype).contiguous()
    if model_type == "gpt2":
        # GPT-2 has a bias in each linear layer and norm: zeros stand for none.
        for name, tensor in [*weights.items()]:
            if name.endswith(".weight") and (".h." in name or ".ln_f" in name):
                weights.setdefault(f"{name[:-6]}bias", torch.zeros(tensor.shape[-1], dtype=dtype))

    # Write both. config.json has no padding id: with it, transformers would never train the embedding of that id.
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    for file, content in (("config.json", config), ("generation_config.json", ends | {"pad_token_id": end_of_text})):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")
    return target.name


def note_training(folder: Path, texts: Sequence[str], data: Mapping[str, Any]) -> None:
    """Note in config.json the texts that the weights have learned, and how they were read.

    texts: their fingerprints; data: settings of data, of which READING are noted.
    """
    file = folder / "config.json"
    noted = {TEXTS: [*texts], DATA: {name: data[name] for name in READING if name in data}}
    file.write_text(json.dumps(json.loads(file.read_text()) | noted, indent=2) + "\n")


def noted_training(where: str) -> tuple[list[str], dict[str, Any]]:
    """Return the texts and settings of note_training() in a folder, perhaps another person's."""
    config = json.loads(read_foreign(find_folder(where) / "config.json"))
    texts = config.get(TEXTS)
    data = config.get(DATA)
    found = texts if isinstance(texts, list) else []
    known = [text for text in found if isinstance(text, str) and re.fullmatch("[a-z]+-[0-9a-f]{16}", text)]
    read = {name: data[name] for name in READING if name in data} if isinstance(data, dict) else {}
    try:
        DataConfig(**read)
    except SettingsError:  # of somebody else, or of another version
        read = {}
    return known, read


def version_needed(model: GPT) -> str:
    """Return the first version of transformers that computes the logits of an exported model."""
    # Before 4.56 YaRN took max_position_embeddings / original_max_position_embeddings in place of factor. Before 4.53
    # Qwen3 had no layer_types, and transformers no SmolLM3 and Arcee; before 4.51 it had no Qwen3.
    if model.config.rope_scaling == "yarn":
        return "4.56"
    has_windows = any(attention.window is not None for attention in model.attentions)
    is_new = model.config.mlp == "relu2" or "nope" in model.config.attention  # Arcee, SmolLM3
    return "4.53" if has_windows or is_new else "4.51"


def from_huggingface(where: str) -> GPT:
    """Return a GPT with the float32 weights of one of TARGETS, and its logits.

    where: a folder or a name on the hub. Raises HuggingFaceError if a GPT cannot express it.
    """
    config, read = read_huggingface(where)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers do not depend on it
        model = GPT(config)
    with importing(where):
        load_weights(model, {name: read(name) for name, _ in model.named_parameters()})
    return model.eval()


def read_huggingface(where: str) -> tuple[GPTConfig, Callable[[str], Tensor]]:
    """Return our settings for a model, and a function that returns a weight by our name."""
    folder = find_folder(where)
    config = read_config(where)
    with importing(where):
        # Map the files into memory.
        weights: dict[str, Tensor] = {}
        files = _files(folder)
        _check_files(folder, files)
        for file in files:
            weights |= {saved_name(name): tensor for name, tensor in load_file(regular(file)).items()}
        _check_names(weights, config, where)
        if not config.tie_embeddings and HEAD not in weights:
            remedy = f"set tie_word_embeddings to true if it shares the embedding, or {ANOTHER}"
            raise _missing(HEAD, "tie_word_embeddings=false in its config.json", weights, remedy, where)

        _check_layers(weights, config, where)

        # Building the shapes of a config.json with a billion layers would take forever.
        if config.n_layer > len(weights):
            raise ValueError(f"it has {len(weights):,} weights for the {config.n_layer:,} layers of its config.json")

        # Check their parts of each of our weights.
        model = without_weights(config)
        ours = dict[str, list[Tensor]]()
        used = {_stored(HEAD, weights)} if config.tie_embeddings else set[str]()
        for name, tensor in plain_weights(model).items():
            for theirs, rows in _parts(name, model).items():
                stored = _stored(theirs, weights)
                if stored not in weights and name == "token_embedding.weight" and config.tie_embeddings:
                    stored = HEAD  # of two names for one tensor safetensors' save_model() keeps either
                if stored not in weights:
                    raise _missing(theirs, "its config.json", weights, ANOTHER, where)
                used.add(stored)
                if weights[stored].dtype not in DTYPES:
                    dtype = str(weights[stored].dtype).removeprefix("torch.")
                    raise HuggingFaceError(f"has {stored} quantised, as {dtype}", f"{PLAIN}, or {ANOTHER}", value=where)
                asked = _change_layout(theirs, tensor.new_empty(rows, *tensor.shape[1:]), model).shape
                if weights[stored].shape != asked:
                    held, wanted = (" × ".join(map(str, shape)) for shape in (weights[stored].shape, asked))
                    fault = f"has {stored} of {held} numbers, where its config.json asks for {wanted}"
                    remedy = f"put the config.json of these weights beside them, or {ANOTHER}"
                    if weights[stored].shape == asked[::-1]:
                        remedy = "transpose the matrices of its layers: GPT-2 has (in, out), the others (out, in)"
                    raise HuggingFaceError(fault, remedy, value=where)
                part = _change_layout(theirs, weights[stored], model, back=True)
                if not part.isfinite().all():
                    raise ValueError(f"its {theirs} is not finite")
                ours.setdefault(name, []).append(part)
        _check_left_over(weights, used, where)
    return config, lambda name: torch.cat([part.float() for part in ours[name]])


def _files(folder: Path) -> list[Path]:
    """Return the files of a model's weights; a large one has several."""
    # As in transformers, one file goes before an index, which may be left from an earlier save of several.
    index = folder / INDEX
    whole = folder / "model.safetensors"
    if whole.exists() or not index.exists():
        return [whole]
    return [folder / name for name in sorted(set(json.loads(read_foreign(index))["weight_map"].values()))]


def _check_files(folder: Path, files: list[Path]) -> None:
    """Raise HuggingFaceError if weights are missing, or in another format or file."""
    missing = [file.name for file in files if not file.exists()]
    others = sorted(file.name for ending in OTHER_WEIGHTS for file in folder.glob(f"*{ending}") if file not in files)
    if missing and (folder / INDEX).exists():
        lacks = f"lacks {len(missing)} of the {len(files)} files that its {INDEX} names, such as {missing[0]}"
        raise HuggingFaceError(f"{folder} {lacks}", f"download them too, or the {INDEX} of the files that are there")
    if missing and others:
        wanted = missing[0]
        remedy = "save the model again by transformers' save_pretrained()"
        if any(SHARD.search(name) for name in others):
            wanted = INDEX
            remedy = "download that file too"
        elif others[0].endswith(".safetensors") and not others[0].startswith(MISTRALS):
            remedy = f"rename the file that you want to {wanted}"
        raise HuggingFaceError(f"{folder} has {', '.join(others)}, but no {wanted}", remedy)


def _check_names(weights: dict[str, Tensor], config: GPTConfig, where: str) -> None:
    """Raise HuggingFaceError if the weights have names of another program.

    Mistral, litgpt and a GPT here have other names, and other orders of rows.
    """
    names = _target(config).weights
    norm = f"{names['blocks']}.0.{names['attention_norm']}.weight"
    if not weights or any(_stored(name, weights) in weights for name in (norm, f"{names['token_embedding']}.weight")):
        return
    fault = f"has no {norm}, but weights of other names ({first_names(sorted(weights))})"
    remedy = "save the model again by transformers' save_pretrained(): new names alone leave the order of their rows"
    if all(name.startswith("base_model.model.") for name in weights):
        remedy = "merge its adapters, with peft's merge_and_unload() and save_pretrained()"
    raise HuggingFaceError(fault, remedy, value=where)


def _check_layers(weights: dict[str, Tensor], config: GPTConfig, where: str) -> None:
    """Raise HuggingFaceError if the file has more or fewer layers than its config.json."""
    held = {int(found[1]) for name in weights if (found := LAYER.match(name))}
    n_layer = config.n_layer
    if not held or held != {*range(len(held))} or len(held) == n_layer:
        return
    remedy = f"set num_hidden_layers (of a GPT-2 n_layer) to {len(held)} there"
    remedy += ", with as many layer_types" * ("/" in config.attention)
    remedy += ", or copy or download the others" if len(held) < n_layer else ": docs/library.md drops blocks afterwards"
    raise HuggingFaceError(f"has {plural(len(held), 'layer')}, and its config.json {n_layer:,}", remedy, value=where)


def _check_left_over(weights: dict[str, Tensor], used: set[str], where: str) -> None:
    """Raise HuggingFaceError if a layer has other weights too: they are part of its logits.

    A quantised weight has scales beside it, and a bias may be there against config.json. Weights outside of the layers
    and of the modules that were read, such as a classifier, change no logit there either; a warning names them.
    """
    parts = {name.rpartition(".")[0] for name in used}
    left = [name for name in sorted(weights.keys() - used) if not name.endswith(BUFFERS)]
    left = [name for name in left if not any(word in name for word in UNUSED)]
    for name in left:
        part = name.rpartition(".")[0]
        is_read = part in parts or f"{part.rpartition('.')[0]}.weight" in used  # beside a weight, or a part of it
        in_layer = any(f".{layers}." in f".{name}" for layers in LAYERS)
        if is_read or in_layer:
            raise HuggingFaceError(
                f"{where} has {name}, for which its config.json has no place", f"{PLAIN}, or {ANOTHER}"
            )
    if left:
        told = "%s: read without %s, for which its class has no place; transformers leaves it out too."
        log.warning(told, where, first_names(left))


def _missing(theirs: str, asker: str, weights: Iterable[str], remedy: str, where: str) -> HuggingFaceError:
    """Return the error of a weight that a file lacks, where `asker` asks for it.

    Quantised numbers, such as q_proj.qweight, and adapters have names of their own in the weight's module.
    """
    modules = tuple(name.removesuffix("weight") for name in (theirs, _stored(theirs, ())) if name.endswith(".weight"))
    others = sorted(name for name in weights if name.startswith(modules) and not name.endswith(".bias"))
    if others:
        return HuggingFaceError(f"has no {theirs}, but {first_names(others)}", f"{PLAIN}, or {ANOTHER}", value=where)
    return HuggingFaceError(f"has no {theirs}, which {asker} asks for", remedy, value=where)


def _stored(theirs: str, names: Container[str]) -> str:
    """Return the name of a weight in a file.

    It has no prefix if a model without lm_head was saved.
    """
    prefix = next((target.prefix for target in TARGETS.values() if theirs.startswith(target.prefix)), "")
    return theirs if theirs in names else theirs.removeprefix(prefix)


def _has_own_head(folder: Path, target: Target) -> bool:
    """Return whether a model's lm_head differs from its embedding.

    transformers 5 takes it then, also if config.json says that they are tied.
    """
    embedding = f"{target.weights['token_embedding']}.weight"
    found: dict[str, Tensor] = {}
    for file in _files(folder):
        if not file.exists():
            return False
        with safe_open(regular(file), "pt") as opened:
            names = {saved_name(name): name for name in set(opened.keys())}
            found |= {name: opened.get_tensor(names[name]) for name in {HEAD, _stored(embedding, names)} & names.keys()}
    both = list(found.values())
    return len(both) == 2 and not torch.equal(*both)


def read_config(where: str) -> GPTConfig:
    """Return our settings for the config.json of one of TARGETS."""
    file = find_folder(where) / "config.json"
    with importing(where):
        if file.with_name("adapter_config.json").exists():
            problem = "is an adapter, such as LoRA's, not a model"
            remedy = "merge it into its model, with peft's merge_and_unload() and save_pretrained()"
            if file.exists() and all(weights.exists() for weights in _files(file.parent)):
                # transformers adds it to them, if peft is there.
                problem = "has an adapter, such as LoRA's, beside its weights"
                remedy += "; if they have it already, move adapter_config.json away"
            raise HuggingFaceError(problem, remedy, value=where)

        if not file.exists():
            remedy = f"give the folder {WRITTEN}"
            if (file.parent / "meta.json").exists() or (file.parent / "checkpoints").exists():
                remedy = f"a run or checkpoint of tinygpt is given as it is, by checkpoint={where} or init_from={where}"
            raise HuggingFaceError("has no config.json", remedy, value=where)

        # Find its class.
        settings = json.loads(read_foreign(file))
        if settings.get("quantization_config"):
            method = settings["quantization_config"].get("quant_method", "quantization_config")
            raise HuggingFaceError(f"is quantised ({method})", f"{PLAIN}, or {ANOTHER}", value=where)
        model_type = settings["model_type"]
        if model_type not in TARGETS:
            remedy = f"choose a model of {', '.join(sorted(TARGETS))}"
            lacking = f", and a GPT here has no {LACKING[model_type]}" if model_type in LACKING else ""
            raise HuggingFaceError(f"is a {model_type}{lacking}", remedy, value=where)

        target = TARGETS[model_type]
        if model_type == "gpt2":
            settings = {GPT2_NAMES.get(name, name): value for name, value in settings.items()}
        settings = target.defaults | settings
        _check_types(settings, where)

        # A classifier has no logits of tokens. If it is tied, the embedding would take the place of its head.
        kind = (settings.get("architectures") or [target.name])[0]
        if any(word in kind for word in OTHER_HEADS):
            raise HuggingFaceError(f"is a {kind}, which writes no text", f"choose a {target.name}", value=where)

        # A class of their own, beside the weights, may compute something else. It is never run.
        code = settings.get("auto_map") or {}
        own = code.get("AutoModelForCausalLM") or code.get("AutoModel")
        if own:
            remedy = f"choose a {target.name}, or take auto_map out of its config.json if they compute the same"
            raise HuggingFaceError(f"has code of its own ({own}), which is not run", remedy, value=where)

        # Derive the settings that depend on several of theirs.
        fixed = target.fixed | {"is_causal": True}  # else all of their classes let a token see those after it
        ours = dict(target.settings)
        if model_type == "gpt2":
            mlp = "gelu" if settings["activation_function"] == "gelu" else "gelu_tanh"
            ours |= {"mlp": mlp, "zero_init": False}
            fixed["activation_function"] = GPT2_ACTIVATIONS[mlp]
        else:
            # transformers 5 has the base under rope_parameters too. As there, rope_scaling goes before them: people add
            # it to a config.json by hand, for longer texts.
            rope = {"rope_theta": settings.get("rope_theta", 10_000.0)}
            rope |= settings.get("rope_scaling") or settings.get("rope_parameters") or {}
            ours |= _our_rope({name: value for name, value in rope.items() if value is not None}, settings)
        if model_type == "qwen3":
            fixed["rms_norm_eps"] = NORM_EPS  # QK-norm has the same
        if model_type == "mistral" and settings.get("layer_types") is None:
            ours["attention_window"] = settings["sliding_window"]  # of all layers; None if they have none
        elif model_type in (*WITH_LAYER_TYPES, "mistral"):
            ours |= _our_layers(settings, where)

        # Refuse values that a GPT cannot express, and translate the others by name.
        for name, value in fixed.items():
            given = settings.get(name, value)
            if given != value and (not isinstance(given, str) or SYNONYMS.get(given) != value):
                raise HuggingFaceError(f"has {name}={given}", f"choose a model with {name}={value}", value=where)
        for name, theirs in target.names.items():
            if name not in OPTIONAL or settings.get(theirs) is not None:
                ours[name] = settings[theirs]
        ours["tie_embeddings"] = settings["tie_word_embeddings"] and not _has_own_head(file.parent, target)
        return build(GPTConfig, ours)


def _check_types(settings: dict[str, Any], where: str) -> None:
    """Raise HuggingFaceError for words of JSON in quotes and flags of another type.

    "false" would pass for true.
    """
    for name, given in settings.items():
        word = given.lower() if isinstance(given, str) else ""
        if word in WORDS:
            problem = f"has {name}={json.dumps(given)} in config.json"
            raise HuggingFaceError(problem, f"write {WORDS[word]}, without quotes", value=where)
        if name in FLAGS and not isinstance(given, bool | None):
            problem = f"has {name}={json.dumps(given)} in config.json"
            raise HuggingFaceError(problem, "write true or false", value=where)


def _our_rope(rope: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return our settings for their parameters of RoPE."""
    ours = {"rope_theta": rope.pop("rope_theta")}
    scaling = rope.pop("rope_type", rope.pop("type", "default"))
    if scaling == "default":
        return ours
    if scaling not in ROPE_TYPES:
        known = f"choose a model with {', '.join(ROPE_TYPES)} or default"
        raise HuggingFaceError(f"rope_type={scaling} is not known here", known)
    if "factor" not in rope:
        raise HuggingFaceError(f"rope_type={scaling} has no factor", "choose a model whose config.json has one")
    ours |= {"rope_scaling": scaling, "rope_scaling_factor": rope.pop("factor")}
    trained = rope.pop("original_max_position_embeddings", settings["max_position_embeddings"])
    if scaling == "yarn" and math.isclose(_yarn_length(rope, ours["rope_scaling_factor"]), 1, rel_tol=1e-6):
        # They may say in three ways how long queries and keys are, here with the paper's value.
        rope = {name: value for name, value in rope.items() if name not in YARN_LENGTHS}
    if scaling == "linear":
        # It reads no more than the factor.
        rope = {name: value for name, value in rope.items() if name == "partial_rotary_factor"}
    rope = {name: value for name, value in rope.items() if ROPE_DEFAULTS.get(name) != value}
    if rope != ROPE_TYPES[scaling]:
        remedy = f"choose a model with {ROPE_TYPES[scaling] or 'no more than factor'}"
        raise HuggingFaceError(f"rope_type={scaling} with {rope} is not known here", remedy)
    return ours if scaling == "linear" else ours | {"rope_trained_length": trained}


def _yarn_length(rope: dict[str, Any], factor: float) -> float:
    """Return the length that yarn's parameters give queries and keys, divided by the paper's."""

    def length(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    theirs = length()
    if "attention_factor" in rope:
        theirs = rope["attention_factor"]
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        theirs = length(rope["mscale"]) / length(rope["mscale_all_dim"])
    return theirs / length()


def _our_layers(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Return our settings for the windows and for the layers without positions.

    Qwen2, Qwen3, SmolLM3 and Mistral have windows: layer_types name their layers; without them those from Qwen's
    max_window_layers on, or SmolLM3's without positions. As in transformers, use_sliding_window=false takes away all
    of Qwen's, but none that SmolLM3's layer_types name.
    """
    n_layer = build(GPTConfig, {"n_layer": settings["num_hidden_layers"]}).n_layer
    if n_layer > 10_000:
        return {}  # it is damaged: the count of weights refuses it, before any list
    has_rope = _with_rope(settings, n_layer, where)
    uses_window = settings.get("use_sliding_window")
    is_qwen = settings["model_type"] in ("qwen2", "qwen3")
    window = settings["sliding_window"] if uses_window or not is_qwen else None
    full = settings.get("max_window_layers") if is_qwen else None
    slides = [False] * n_layer
    if window is not None and uses_window:
        slides = [not each for each in has_rope] if full is None else [layer >= full for layer in range(n_layer)]
    types = [SLIDING if each else "full_attention" for each in slides]
    if window is not None and settings.get("layer_types") is not None:
        types = settings["layer_types"]
    unknown = [name for name in types if name not in (SLIDING, "full_attention")]
    if unknown or len(types) != n_layer:
        fault = f"has layer_types={types} for {n_layer} layers"
        remedy = f"choose a model with {SLIDING} or full_attention for each of them"
        raise HuggingFaceError(fault, remedy, value=where)
    parts = zip(types, has_rope, strict=True)
    layers = ["sdpa" + "+window" * (name == SLIDING) + "+nope" * (not rotates) for name, rotates in parts]
    if {*layers} == {"sdpa"}:
        return {}
    return {"attention": "/".join(layers)} | ({"attention_window": window} if SLIDING in types else {})


def _with_rope(settings: dict[str, Any], n_layer: int, where: str) -> list[bool]:
    """Return for each layer whether it rotates queries and keys.

    SmolLM3's no_rope_layers are 0 where it does not.
    """
    if settings["model_type"] != "smollm3":
        return [True] * n_layer
    rotates = settings.get("no_rope_layers")
    if rotates is None:
        return [(layer + 1) % settings["no_rope_layer_interval"] != 0 for layer in range(n_layer)]
    if len(rotates) < n_layer or any(each not in (0, 1) for each in rotates):
        fault = f"has no_rope_layers={rotates} for {n_layer} layers"
        raise HuggingFaceError(fault, "choose a model with 0 or 1 for each of them", value=where)
    return [bool(each) for each in rotates[:n_layer]]


def _target(config: GPTConfig) -> Target:
    """Return a class whose weights have the names of those of a model with these settings."""
    return GPT2 if config.position == "learned" else LLAMA


def _parts(name: str, model: GPT) -> dict[str, int]:
    """Return {their weight: number of rows} for the weights that ours, `name`, joins."""
    theirs = name
    for word, their_word in _target(model.config).weights.items():
        theirs = theirs.replace(word, their_word)
    for joined, parts in JOINED.items():
        if joined in theirs:
            rows = _joined_rows(joined, model)
            return {theirs.replace(joined, part): n for part, n in zip(parts, rows, strict=True)}
    return {theirs: len(model.get_parameter(name))}


def _joined_rows(joined: str, model: GPT) -> tuple[int, ...]:
    """Return the numbers of rows that one of JOINED joins.

    A plain nn.Linear in its place does not say them.
    """
    if joined == "gate_up_proj":
        return (model.config.inner,) * 2
    attention = model.attentions[0]  # _obstacles() refuses layers with others
    D = attention.head_dim
    return attention.query_heads * D, attention.kv_heads * D, attention.kv_heads * D


def _change_layout(
    theirs: str,
    tensor: Tensor,
    model: GPT,
    *,
    back: bool = False,
) -> Tensor:
    """Return a weight of ours in their layout; with back=True, one of theirs in ours.

    `theirs` is its name there. GPT-2's matrices are transposed. RoPE rotates pairs (x, y) of a head's rows, which are
    (x0, y0, x1, y1, …) here, and (x0, x1, …, y0, y1, …) in all but GPT-2.
    """
    if model.config.position == "learned":  # GPT-2
        return tensor.t() if ".h." in f".{theirs}" and tensor.ndim == 2 else tensor
    if not any(part in theirs for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
        return tensor
    half = model.attentions[0].head_dim // 2
    pairs = (2, half) if back else (half, 2)
    # Split the rows into heads and pairs, (H·D, …) -> (H, D/2, 2, …), exchange the last two, and join them again.
    return tensor.unflatten(0, (-1, *pairs)).transpose(1, 2).flatten(0, 2)


def _their_config(model: GPT, model_type: str) -> dict[str, Any]:
    """Return the content of config.json, without the class and the special tokens."""
    # Translate the settings by name.
    config = model.config
    attention = model.attentions[0]
    target = TARGETS[model_type]
    ours = asdict(config) | {"n_inner": config.inner}
    ours |= {"n_head": attention.n_head, "n_kv_head": attention.kv_heads, "head_size": attention.head_dim}
    theirs = {their: ours[name] for name, their in target.names.items()} | target.fixed
    theirs["tie_word_embeddings"] = config.tie_embeddings
    if model_type == "gpt2":
        theirs["n_ctx"] = config.block_size  # an old name of n_positions, which llama.cpp's converter reads
        return theirs | {"embd_pdrop": config.dropout, "activation_function": GPT2_ACTIVATIONS[config.mlp]}

    # Windows and RoPE, which GPT-2 has not.
    types = [SLIDING if each.window is not None else "full_attention" for each in model.attentions]
    if model_type == "mistral":
        theirs["sliding_window"] = None  # without it they have one of 4,096
    if SLIDING in types:
        theirs["sliding_window"] = max(each.window or 0 for each in model.attentions)  # they all have this one
        if model_type in WITH_LAYER_TYPES:
            theirs |= {"use_sliding_window": True, "layer_types": types}
    if model_type == "smollm3":
        theirs["no_rope_layers"] = [int(each.rope is not None) for each in model.attentions]
        theirs["pad_token_id"] = None  # without it they have 128,004
    rope = _rope(model)  # None if all layers have nope
    theirs |= {"rope_theta": config.rope_theta, "rope_scaling": None}
    if rope is not None and config.rope_scaling != "none":
        scaling = {"rope_type": rope.scaling, "factor": rope.stretch, **ROPE_TYPES[rope.scaling]}
        if rope.scaling != "linear":
            scaling["original_max_position_embeddings"] = int(rope.trained)
        theirs["rope_scaling"] = scaling
    return theirs

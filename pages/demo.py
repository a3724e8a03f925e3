"""The page of a model: it writes in a browser, and shows the attention of each head."""

import re
from dataclasses import asdict
from typing import Any

import torch
from tiktoken import Encoding

from common.errors import SettingsError
from common.text import flat, si
from data.tokenizer import tokenizer_content
from model.attention import SOFTMAX, MultiHeadAttention
from model.attention.masks import alibi_slopes
from model.weights import check_unedited, plain_weights
from pages.kit import fill_page, packed, shape
from pages.runs import RECORD, text_of
from runs.checkpoint import Checkpoint
from runs.metrics import read_metrics

# The names in attention= that gpt.js knows.
FORMS = (*SOFTMAX, "stacked", "single_head", "softmax1")
MODIFIERS = (
    "window",
    "nope",
    "value_residual",
    "key_offset",
    "forget",
    "fade",
    "sink",
    "token_sink",
    "xsa",
    "out_norm",
    "gate",
    "gate_element",
    "gate_biased",
    "gate_softplus",
    "gate_silu",
)
VALIDATION = "; validation "  # between the description of a text and that of its validation text
LARGEST = 500_000_000
"""Bytes of the largest page."""

# Parts of the patterns of tokenizers, and their equals in JavaScript, whose \s is another set.
CONTRACTIONS = "(?:[sdmtSDMTſ]|[lL]{2}|[vV][eE]|[rR][eE])"
IN_JAVASCRIPT = {
    "(?i:[sdmt]|ll|ve|re)": CONTRACTIONS,
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)": f"(?:'{CONTRACTIONS})",
    "(?s:.)": "[^]",
    r"\s": r"\p{White_Space}",
    r"\S": r"\P{White_Space}",
}
FOREIGN = r"\(\?[^:=!]|\\[bBdDwWhRXAzZG]|(?<!\\)\."  # not in JavaScript, or with another meaning


def demo_page(checkpoint: Checkpoint, to: str, dtype: str) -> str:
    """Return the page TO of a checkpoint, with weights of `dtype`, float16 or float32.

    Raises SettingsError if the page cannot compute or hold the model.
    """
    model = checkpoint.model
    check_unedited(model)
    known = nearest(model.config.attention)
    if known != model.config.attention:
        problem = f"to={to}: a page cannot compute attention={model.config.attention}"
        raise SettingsError(problem, f"train with attention={known}, the nearest that it can")
    title, figures = describe(checkpoint)
    data: dict[str, Any] = {
        "figures": figures,
        "config": asdict(model.config),
        "layers": [layer(attention, model.config.at(i).form) for i, attention in enumerate(model.attentions)],
        "tokenizer": browser_tokenizer(checkpoint.tokenizer, to),
        "dtype": dtype,
        "weights": {},
    }
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in plain_weights(model).items()}
    size = sum(tensor.nbytes for tensor in weights.values()) * 4 // 3  # in base64
    if size > LARGEST:
        problem = f"to={to} would have {si(size, 3)}B, more than the {si(LARGEST, 3)}B that browsers open"
        remedy = "set dtype=float16" if dtype == "float32" and size // 2 <= LARGEST else "choose a smaller model"
        raise SettingsError(problem, remedy)
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise SettingsError(f"dtype=float16 ends at 65,504, and {name} has larger weights", "set dtype=float32")
        data["weights"][name] = packed(tensor.numpy())
    return fill_page("demo.html", title, data)


def nearest(attention: str) -> str:
    """Return the pattern without unknown modifiers, and with sdpa for unknown forms."""
    layers = []
    for names in attention.split("/"):
        form, *modifiers = names.split("+")
        layers.append("+".join([form if form in FORMS else "sdpa", *[name for name in modifiers if name in MODIFIERS]]))
    return "/".join(layers)


def layer(attention: MultiHeadAttention, form: str) -> dict[str, Any]:
    """Return the form and the shape of a layer's attention, for gpt.js."""
    rope = None
    if attention.rope is not None:
        frequencies, length = attention.rope.frequencies()
        rope = {"frequencies": frequencies.tolist(), "length": length}
    return {
        "form": form,
        "heads": attention.n_head,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "window": attention.window,
        "slopes": alibi_slopes(attention.n_head) if attention.alibi else None,
        "rope": rope,
        "pope_frequencies": None if attention.pope is None else attention.pope.frequencies().tolist(),
        "modifiers": [*attention.modifiers],
    }


def browser_tokenizer(tokenizer: Encoding, to: str) -> dict[str, Any]:
    """Return a tokenizer for tokenizer.js; SettingsError if JavaScript lacks its pattern."""
    content = tokenizer_content(tokenizer)
    pattern = content["pat_str"]
    for theirs, ours in IN_JAVASCRIPT.items():
        pattern = pattern.replace(theirs, ours)
    # JavaScript has no possessive quantifiers. Greedy ones match the same: nothing that follows them in these patterns
    # could match the characters that they give back.
    pattern = re.sub(r"([?*+]|\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    if re.search(FOREIGN, pattern):
        problem = f"to={to}: JavaScript cannot cut text by the pattern of tokenizer={tokenizer.name}"
        raise SettingsError(problem, "train with tokenizer=bpe, byte, gpt2 or cl100k_base")
    return {"pattern": pattern, "tokens": content["mergeable_ranks"], "special": content["special_tokens"]}


def describe(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return a title, and one line of figures: sizes, and bits per byte if they are known."""
    title = "A small language model"
    config = checkpoint.model.config
    figures = shape(config.attention, config.n_layer, config.n_head, config.n_embd)
    meta = checkpoint.meta
    bpb = meta.progress.metrics.get("val_bpb")
    if bpb is not None:  # an imported model has none, and its text is unknown
        notes = read_metrics(checkpoint.path.parents[1] / RECORD)
        settings = flat(meta.config)
        told = [{"text": without_folders(note["text"])} for note in notes if note.get("text")]
        title += f", trained on {text_of(settings, told)}"
        if "seed" in settings:
            figures += f", trained with seed {settings['seed']}"
        figures += f", {bpb:.4f} bits per byte"
    return title, figures


def without_folders(text: str) -> str:
    """Return the description of a text with the last part alone of each path.

    The page may be sent to others: it does not tell in which folder the text lies.
    """
    told = [re.sub(r"^.*[/\\]([^/\\]+)[/\\]*: ", r"\1: ", part) for part in text.split(VALIDATION)]
    return VALIDATION.join(told)

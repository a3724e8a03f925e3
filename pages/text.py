"""The page of a text: how surprised a model was by each token, what it expected instead, what every head looked at."""

import codecs
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import tiktoken
from jaxtyping import Float, Int

from common.text import visible
from data.tokenizer import token_bytes
from pages.kit import fill_page, packed, packed_shares


@dataclass(frozen=True)
class Reading:
    """One model's reading of a text of N tokens. The R rows of attention are the mean of all heads, then for each layer
    the mean of its heads and every head."""

    name: str  # of the model, as the title has it
    tokenizer: tiktoken.Encoding
    tokens: Int[np.ndarray, " N"]
    nats: Float[np.ndarray, " N"]  # -log p of each token; NaN of the first, which nothing precedes
    likeliest: Int[np.ndarray, "N A"]  # the tokens most likely to follow each, the likeliest first
    chances: Float[np.ndarray, "N A"]  # their probabilities
    heads: list[int]  # how many heads each layer has
    keys: Int[np.ndarray, "R N K"]  # the tokens that each looked at most
    weights: Float[np.ndarray, "R N K"]  # how much; at least 0, above 1 in some variants


def byte_ends(tokenizer: tiktoken.Encoding, tokens: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Return where each token ends, in bytes of text; a special token counts as one."""
    return np.cumsum(np.maximum(token_bytes(tokenizer)[tokens], 1))


def text_page(readings: list[Reading], summary: str) -> str:
    """Return the page, which needs nothing else, of one model's reading of a text or of two models'."""
    others = readings[::-1] if len(readings) > 1 else [None]
    models = [page_data(reading, other) for reading, other in zip(readings, others, strict=True)]
    title = visible(" and ".join(reading.name for reading in readings))
    return fill_page("text.html", title, {"summary": visible(summary), "models": models})


def page_data(reading: Reading, other: Reading | None) -> dict[str, Any]:
    """Return a reading as the page's script takes it, beside another one with that one's surprise at the same bytes."""
    bits = reading.nats / math.log(2)
    ends = byte_ends(reading.tokenizer, reading.tokens)
    vocabulary, numbers = np.unique(np.append(reading.tokens, reading.likeliest), return_inverse=True)
    count = len(reading.tokens)
    largest = max(1.0, float(reading.weights.max()))
    data = {
        "heads": reading.heads, "top": reading.keys.shape[-1], "largest": largest,
        "vocabulary": [name_of(reading.tokenizer, token) for token in vocabulary.tolist()],
        "tokens": numbers[:count].tolist(), "likeliest": numbers[count:].tolist(),
        "chances": [float(f"{chance:.3g}") for chance in reading.chances.flatten().tolist()],
        "shown": token_texts(reading.tokenizer, reading.tokens),
        "bits": np.round(bits, 3).tolist(), "ends": ends.tolist(),
        "keys": packed(reading.keys.astype("<u2")), "weights": packed_shares(reading.weights / largest),
    }  # fmt: skip
    if other:  # which may cut the same bytes into other tokens: each spreads its surprise evenly over its bytes
        theirs = byte_ends(other.tokenizer, other.tokens)
        total = np.interp(np.append(0, ends), np.append(0, theirs), np.append(0, np.nancumsum(other.nats)))
        data["other"] = np.round(np.diff(total) / math.log(2), 3).tolist()
    return data


def name_of(tokenizer: tiktoken.Encoding, token: int) -> str:
    """Return a token's text; its bytes as ‹E6› where they are a part of a character, its number where it has none."""
    try:
        content = tokenizer.decode_single_token_bytes(token)
        return visible(content.decode())
    except UnicodeDecodeError:
        return f"‹{content.hex(' ').upper()}›"
    except KeyError:  # of a padded vocabulary
        return f"‹{token}›"


def token_texts(tokenizer: tiktoken.Encoding, tokens: np.ndarray) -> list[str]:
    """Return the text that each token adds: a character of several tokens comes with its last one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(tokenizer.decode_single_token_bytes(token)) for token in tokens.tolist()]
    return [visible(text) for text in [*texts[:-1], texts[-1] + decoder.decode(b"", final=True)]]

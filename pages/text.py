"""The page of a text: surprise at each token, predictions, and the attention of every head."""

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
    """One model's reading of a text of N tokens.

    The R rows of attention are the mean of all heads, then for each layer the mean of its heads and every head.
    """

    name: str  # the model's, for the title
    tokenizer: tiktoken.Encoding
    tokens: Int[np.ndarray, " N"]
    nats: Float[np.ndarray, " N"]  # -log p of each token; NaN for the first, which has no context
    likeliest: Int[np.ndarray, "N A"]  # the A likeliest next tokens after each, in descending order
    chances: Float[np.ndarray, "N A"]  # their probabilities
    heads: list[int]  # the number of heads in each layer
    keys: Int[np.ndarray, "R N K"]  # the K keys with the largest weights, in descending order
    weights: Float[np.ndarray, "R N K"]  # their weights: at least 0, in some forms above 1


def byte_ends(tokenizer: tiktoken.Encoding, tokens: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Return the end of each token in bytes of the text; a special token counts as one byte."""
    return np.cumsum(np.maximum(token_bytes(tokenizer)[tokens], 1))


def text_page(readings: list[Reading], summary: str) -> str:
    """Return the page of a text as one model or two models read it."""
    others = readings[::-1] if len(readings) > 1 else [None]
    models = [page_data(reading, other) for reading, other in zip(readings, others, strict=True)]
    title = visible(" and ".join(reading.name for reading in readings))
    return fill_page("text.html", title, {"summary": visible(summary), "models": models})


def page_data(reading: Reading, other: Reading | None) -> dict[str, Any]:
    """Return the data of a reading for the page's script.

    other: the other model's reading, whose surprise at the bytes of each token is added.
    """
    ends = byte_ends(reading.tokenizer, reading.tokens)
    # The page's vocabulary has only the tokens that it shows; ids are places in it.
    shown = np.append(reading.tokens, reading.likeliest)
    vocabulary, ids = np.unique(shown, return_inverse=True)
    count = len(reading.tokens)
    largest = max(1.0, float(reading.weights.max()))
    data = {
        "heads": reading.heads,
        "top": reading.keys.shape[-1],
        "largest": largest,
        "vocabulary": [name_of(reading.tokenizer, token) for token in vocabulary.tolist()],
        "tokens": ids[:count].tolist(),
        "likeliest": ids[count:].tolist(),
        "chances": [float(f"{chance:.3g}") for chance in reading.chances.flatten().tolist()],
        "shown": token_texts(reading.tokenizer, reading.tokens),
        "bits": to_bits(reading.nats),
        "ends": ends.tolist(),
        "keys": packed(reading.keys.astype("<u2")),
        "weights": packed_shares(reading.weights / largest),
    }
    if other:
        # Its tokens may end at other bytes: a token's surprise is spread evenly over its bytes.
        total = np.interp(
            np.append(0, ends),
            np.append(0, byte_ends(other.tokenizer, other.tokens)),
            np.append(0, np.nancumsum(other.nats)),
        )
        data["other"] = to_bits(np.diff(total))
    return data


def to_bits(nats: np.ndarray) -> list[float]:
    """Return numbers in bits, rounded for the page."""
    return np.round(nats / math.log(2), 3).tolist()


def name_of(tokenizer: tiktoken.Encoding, token: int) -> str:
    """Return the visible name of a token.

    That is its text; its bytes as ‹E6› if they are part of a character; its id as ‹257› if it has no bytes.
    """
    try:
        content = tokenizer.decode_single_token_bytes(token)
        return visible(content.decode())
    except UnicodeDecodeError:
        return f"‹{content.hex(' ').upper()}›"
    except KeyError:  # of a padded vocabulary
        return f"‹{token}›"


def token_texts(tokenizer: tiktoken.Encoding, tokens: np.ndarray) -> list[str]:
    """Return the text of each token; a character of several tokens is the text of the last one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(tokenizer.decode_single_token_bytes(token)) for token in tokens.tolist()]
    texts[-1] += decoder.decode(b"", final=True)
    return [visible(text) for text in texts]

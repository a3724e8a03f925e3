"""A page that shows how surprised a model was by every token of a text."""

from __future__ import annotations

import html
import math
from pathlib import Path

import numpy as np
import tiktoken

from errors import SettingsError

MOST_TOKENS = 100_000  # more makes browsers slow
DARKEST = 12  # bits from which on the tint no longer grows

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.6 ui-monospace, monospace; max-width: 62em; margin: 2em auto; padding: 0 1em }}
header {{ font-family: system-ui, sans-serif; margin-bottom: 2em }}
main {{ white-space: pre-wrap; overflow-wrap: anywhere }}
i {{ font-style: normal; border-radius: 2px }}
{tints}
</style>
<header><h1>{title}</h1><p>{summary}</p>
<p>Bits of surprise: {legend}. Hold the pointer over a token to read its own.</p></header>
<main>{text}</main></html>
"""


def write_surprise(
    path: Path, tokenizer: tiktoken.Encoding, tokens: np.ndarray, nats: np.ndarray, title: str, summary: str
) -> None:
    """Write one HTML file, which needs nothing else, with each token tinted by its surprise in bits.

    nats: the surprise of every token but the first.

    Raises SettingsError when it cannot be written.
    """
    bits = nats / math.log(2)
    shown = min(len(bits), MOST_TOKENS)
    if shown < len(bits):
        summary += f" Shown here are the first {shown:,} tokens."
    page = PAGE.format(
        title=html.escape(title),
        summary=html.escape(summary),
        tints="\n".join(f".b{n} {{ background: rgba(255, 90, 0, {n / DARKEST:.2f}) }}" for n in range(DARKEST + 1)),
        legend=" ".join(f'<i class="b{n}">&nbsp;{n}&nbsp;</i>' for n in range(DARKEST + 1)),
        text="".join(_tinted(tokenizer, tokens[1 : shown + 1].tolist(), bits[:shown].tolist())),
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"html={path} cannot be written ({error.strerror}): give another place.") from None


def _tinted(tokenizer: tiktoken.Encoding, tokens: list[int], bits: list[float]) -> list[str]:
    """An element a token, or where several make one character between them an element for all of these."""
    elements, pending, total = [], b"", 0.0
    for token, own in zip(tokens, bits, strict=True):
        pending, total = pending + tokenizer.decode_single_token_bytes(token), total + own
        if not _cut_short(pending):
            elements.append(_element(pending, total))
            pending, total = b"", 0.0
    return [*elements, _element(pending, total)] if pending else elements


def _cut_short(text: bytes) -> bool:
    """Whether the bytes end inside a character that may still become whole."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _element(text: bytes, bits: float) -> str:
    shown = html.escape(text.decode("utf-8", errors="replace"))
    tint = min(round(bits), DARKEST) if bits == bits else DARKEST  # NaN is the worst
    return f'<i class="b{tint}" title="{bits:.1f} bits">{shown}</i>'

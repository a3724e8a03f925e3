"""A page that shows how surprised a model was by every token of a text."""

import codecs
import html
import math
from pathlib import Path

import numpy as np
import tiktoken

from pages.template import fill_page

MOST_TOKENS = 100_000  # more makes browsers slow
DARKEST = 12  # bits from which on the tint no longer grows


def write_surprise(
    path: Path, tokenizer: tiktoken.Encoding, tokens: np.ndarray, nats: np.ndarray, title: str, summary: str
) -> None:
    """Write one HTML file, which needs nothing else, with each token tinted by its surprise in bits.

    nats: the surprise of every token but the first.
    """
    bits = nats / math.log(2)
    shown = min(len(bits), MOST_TOKENS)
    if shown < len(bits):
        summary += f" Shown here are the first {shown:,} tokens."
    elements, text, total = [], "", 0.0  # one for each token, or for all tokens that make one character together
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for number, (token, own) in enumerate(zip(tokens[1 : shown + 1].tolist(), bits[:shown].tolist(), strict=True), 1):
        text += decoder.decode(tokenizer.decode_single_token_bytes(token), final=number == shown)
        total += own
        if not decoder.getstate()[0]:  # no character has begun
            tint = min(round(total), DARKEST) if total == total else DARKEST  # NaN is the worst
            elements.append(f'<i class="b{tint}" title="{total:.1f} bits">{html.escape(text)}</i>')
            text, total = "", 0.0
    page = fill_page(
        "surprise.html",
        title,
        SUMMARY=html.escape(summary),
        TINTS="\n".join(f".b{n} {{ background: rgba(255, 90, 0, {n / DARKEST:.2f}) }}" for n in range(DARKEST + 1)),
        LEGEND=" ".join(f'<i class="b{n}">&nbsp;{n}&nbsp;</i>' for n in range(DARKEST + 1)),
        TEXT="".join(elements),
    )
    path.write_text(page, encoding="utf-8")

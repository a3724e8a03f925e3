"""Samples on the screen as they are drawn."""

from __future__ import annotations

import sys

import tiktoken

from generation.config import SampleConfig
from generation.decoder import Decoder
from generation.text import complete, encode_prompt


def print_samples(decoder: Decoder, tokenizer: tiktoken.Encoding, config: SampleConfig, prompt: str) -> str:
    """Print the prompt and each sample behind it, the first one as it comes, later ones in their turn.

    On a terminal the prompt is dimmed and control characters are made visible. Returns the first sample's text.
    Ctrl-C ends an interactive one where it is.
    """
    block_size = decoder.model.config.block_size
    tokens = encode_prompt(tokenizer, prompt, special_tokens=config.special_tokens, block_size=block_size)
    terminal = sys.stdout.isatty()

    def show(text: str) -> None:
        print(visible(text) if terminal else text, end="", flush=True)

    def begin(number: int) -> None:
        if config.num_samples > 1:
            print(f"--- sample {number + 1} of {config.num_samples}")
        print(f"\x1b[2m{visible(prompt)}\x1b[0m" if terminal else prompt, end="", flush=True)

    texts = [""] * config.num_samples
    seeds = [config.seed + number for number in range(config.num_samples)]
    ended: set[int] = set()
    current = 0
    begin(current)
    try:
        for chunk in complete(decoder, tokenizer, [tokens] * config.num_samples, seeds=seeds, **config.drawing()):
            texts[chunk.sample] += chunk.text
            if chunk.sample == current:
                show(chunk.text)
            if chunk.finish:
                ended.add(chunk.sample)
            while current in ended:
                print()
                current += 1
                if current < config.num_samples:
                    begin(current)
                    show(texts[current])
    except KeyboardInterrupt:
        print()
        if not config.interactive:
            raise
    return texts[0]


def visible(text: str) -> str:
    """Return the text with pictures for control characters except tab and line end, so that none can steer the
    terminal."""
    return text.translate(PICTURES)


PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

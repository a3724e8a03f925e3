"""Samples on the screen as they are drawn, and prompts typed one after the other."""

import os
import sys
from contextlib import suppress
from dataclasses import asdict, fields

import tiktoken

from common.errors import SettingsError, format_value
from common.settings import from_arguments
from common.text import visible
from generation.config import SampleConfig, SamplingParams
from generation.generate import encode_prompt, generate
from generation.jsonl import warn_if_cropped
from model.gpt import GPT
from runs.checkpoint import Checkpoint

HELP = """Type a prompt and the model continues it; an empty line continues the last text.
A line that ends in \\ goes on in the next one.
Ctrl-C stops the text, Ctrl-D or /quit ends the session.
/settings            what can be changed, with its present value
/temperature 0.5     change a setting for the texts to come
//text               a prompt that begins with a slash"""
CHANGEABLE = [*(field.name for field in fields(SamplingParams)), "seed", "num_samples", "special_tokens"]


def print_samples(model: GPT, tokenizer: tiktoken.Encoding, config: SampleConfig, prompt: str) -> str:
    """Print the prompt and each sample behind it, the first of batch_size as it comes, the others when all are there.

    Control characters are made visible, and a terminal's prompt is dimmed. Returns the first sample's text. Ctrl-C ends
    an interactive one where it is.
    """
    tokens = encode_prompt(tokenizer, prompt, config.special_tokens)
    warn_if_cropped(tokens, model.config.block_size)
    begun, count, written = visible(prompt), config.num_samples, ""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        begun = f"\x1b[2m{begun}\x1b[0m"

    def heading(number: int) -> str:
        return f"--- sample {number + 1} of {count}\n{begun}" if count > 1 else begun

    try:
        for first in range(0, count, config.batch_size):
            numbers = range(count)[first : first + config.batch_size]
            print(heading(first), end="", flush=True)
            seeds = [config.seed + number for number in numbers]
            texts = [""] * len(seeds)
            for part in generate(model, tokenizer, [tokens] * len(seeds), seeds=seeds, params=config):
                texts[part.sample] += part.text
                if part.sample == 0:
                    written += part.text * (first == 0)
                    print(visible(part.text), end="", flush=True)
            print()
            for number, text in zip(numbers[1:], texts[1:], strict=True):
                print(heading(number) + visible(text))
    except KeyboardInterrupt:
        print()
        if not config.interactive:
            raise
    return written


def converse(checkpoint: Checkpoint, config: SampleConfig) -> None:
    """Ask for a line and continue it, until the end of the input."""
    with suppress(ImportError):  # a Python may be built without it
        import readline  # noqa: F401  (the arrow keys recall earlier lines)
    text = ""
    print("/help shows what can be typed.")
    while True:
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + input("... ")
        except (EOFError, KeyboardInterrupt) as end:
            print()
            if isinstance(end, EOFError):
                return
            continue
        if line.strip() == "/quit":
            return
        try:
            if line.startswith("/") and not line.startswith("//"):
                config = obey(line[1:], config)
            else:
                prompt = line.removeprefix("/") if line else text
                text = prompt + print_samples(checkpoint.model, checkpoint.tokenizer, config, prompt)
        except SettingsError as error:
            print(visible(error))


def obey(order: str, config: SampleConfig) -> SampleConfig:
    """Do what a line that began with a slash asks; return the settings after it."""
    name, _, value = order.replace("=", " ", 1).partition(" ")
    now = {key: format_value(value) for key, value in asdict(config).items() if key in CHANGEABLE}
    if name in now and value.strip():
        return from_arguments(SampleConfig, [f"{name}={value.strip()}"], config)
    if name == "settings":
        print(*(visible(f"{key} {now[key]}") for key in now), sep="\n")
    elif name in now:
        print(visible(f"{name} {now[name]}"))
    else:
        print(HELP if name == "help" else f"there is no /{visible(name)}: /help shows what there is.")
    return config

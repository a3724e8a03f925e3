"""Samples on the screen as they are drawn, and prompts typed one after the other."""

import sys
from contextlib import suppress
from dataclasses import asdict

import tiktoken

from errors import SettingsError
from generation.config import SampleConfig
from generation.decoder import Decoder
from generation.text import complete, encode_prompt
from runs.checkpoint import Checkpoint
from runs.formatting import visible
from schema import from_arguments

HELP = """Type a prompt and the model continues it; an empty line continues the last text.
A line that ends in \\ goes on in the next one.
Ctrl-C stops the text, Ctrl-D or /quit ends the session.
/settings            what can be changed, with its present value
/temperature 0.5     change a setting for the texts to come
//text               a prompt that begins with a slash"""

FIXED = {"checkpoint", "prompt", "prompt_file", "prompts", "results", "interactive"}
FIXED |= {"batch_size", "logprobs", "page", "device", "precision"}


def print_samples(decoder: Decoder, tokenizer: tiktoken.Encoding, config: SampleConfig, prompt: str) -> str:
    """Print the prompt and each sample behind it, the first one as it comes, later ones in their turn.

    On a terminal the prompt is dimmed and control characters are made visible. Returns the first sample's text.
    Ctrl-C ends an interactive one where it is.
    """
    tokens = encode_prompt(tokenizer, prompt, config.special_tokens, decoder.model.config.block_size)
    decoder.refuse_more("num_samples", config.num_samples, config.max_new_tokens)
    terminal = sys.stdout.isatty()

    def show(text: str) -> None:
        print(visible(text) if terminal else text, end="", flush=True)

    def begin(number: int) -> None:
        if config.num_samples > 1:
            print(f"--- sample {number + 1} of {config.num_samples}")
        print(f"\x1b[2m{visible(prompt)}\x1b[0m" if terminal else prompt, end="", flush=True)

    texts = [""] * config.num_samples
    ended: set[int] = set()
    current = 0
    begin(current)
    try:
        seeds = [config.seed + number for number in range(config.num_samples)]
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


def converse(checkpoint: Checkpoint, config: SampleConfig) -> None:
    """Ask for a line and continue it, until the end of the input."""
    with suppress(ImportError):  # a Python may be built without it
        import readline  # noqa: F401  (the arrow keys recall earlier lines)
    decoder, text = Decoder(checkpoint.model), ""
    print("/help shows what can be typed.")
    while True:
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + input("... ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line.strip() == "/quit":
            return
        if line.startswith("/") and not line.startswith("//"):
            config = _obey(line[1:], config)
        else:
            prompt = line.removeprefix("/") if line else text
            text = prompt + print_samples(decoder, checkpoint.tokenizer, config, prompt)


def _obey(order: str, config: SampleConfig) -> SampleConfig:
    """Do what a line that began with a slash asks; return the settings after it."""
    name, _, value = order.replace("=", " ", 1).partition(" ")
    changeable = {key: now for key, now in asdict(config).items() if key not in FIXED}
    if name == "settings":
        print("\n".join(visible(f"{key} {now}") for key, now in changeable.items()))
    elif name not in changeable:
        print(HELP if name == "help" else f"there is no /{visible(name)}: /help shows what there is.")
    elif not value.strip():
        print(visible(f"{name} {changeable[name]}"))
    else:
        try:
            return from_arguments(SampleConfig, [f"{name}={value.strip()}"], config)
        except SettingsError as error:
            print(visible(error))
    return config

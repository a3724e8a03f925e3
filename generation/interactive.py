"""Prompts typed one after the other, with settings that can be changed in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from errors import SettingsError
from generation.config import SampleConfig
from generation.decoder import Decoder
from generation.terminal import print_samples
from runs.checkpoint import Checkpoint

HELP = """Type a prompt and the model continues it; an empty line continues the last text.
Ctrl-C stops the text, Ctrl-D ends the session.
/settings            what can be changed, with its present value
/temperature 0.5     change a setting for the texts to come
//text               a prompt that begins with a slash"""

FIXED = (
    *("checkpoint", "prompt", "prompt_file", "prompts", "results", "interactive"),
    *("batch_size", "logprobs", "attention_map", "device"),
)
Change = Callable[[SampleConfig, str, str], SampleConfig]


def converse(checkpoint: Checkpoint, config: SampleConfig, change: Change) -> None:
    """Ask for a line and continue it, until the end of the input.

    change: returns the settings with one, given by its name, set to a value as typed.
    """
    decoder, save_history = Decoder(checkpoint.model), _load_history()
    print("/help shows what can be typed.")
    text = ""
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            save_history()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line.startswith("/") and not line.startswith("//"):
            config = _obey(line[1:], config, change)
            continue
        prompt = line.removeprefix("/") if line else text
        text = prompt + print_samples(decoder, checkpoint.tokenizer, config, prompt)


def _obey(order: str, config: SampleConfig, change: Change) -> SampleConfig:
    """Do what a line that began with a slash asks; return the settings after it."""
    name, _, value = order.replace("=", " ", 1).partition(" ")
    changeable = {key: now for key, now in asdict(config).items() if key not in FIXED}
    if name == "settings":
        print("\n".join(f"{key} {now}" for key, now in changeable.items()))
    elif name not in changeable:
        print(HELP if name == "help" else f"there is no /{name}: /help shows what there is.")
    elif not value.strip():
        print(f"{name} {changeable[name]}")
    else:
        try:
            return change(config, name, value.strip())
        except SettingsError as error:
            print(error)
    return config


def _load_history() -> Callable[[], None]:
    """Make the arrow keys recall earlier lines, of earlier sessions too; return what saves them."""
    try:
        import readline
    except ImportError:  # a Python may be built without it
        return lambda: None
    file = Path("~/.cache/tinygpt/prompts").expanduser()
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(1000)

    def save() -> None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)

    return save

"""Prompts typed one after the other, with settings that can be changed in between."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from errors import SettingsError
from generation.config import SampleConfig
from generation.decoder import Decoder
from generation.terminal import stream
from runs.checkpoint import Checkpoint
from settings import explain, to_settings

HELP = """Type a prompt and the model continues it; an empty line goes on with the last text.
Ctrl-C stops the text, Ctrl-D ends the session.
/settings            what can be changed, as it stands
/temperature 0.5     change a setting, for what comes
//text               a prompt that begins with a slash"""

FIXED = (
    *("checkpoint", "prompt", "prompt_file", "prompts", "results", "interactive"),
    *("batch_size", "logprobs", "attention_map", "device"),
)


def converse(checkpoint: Checkpoint, config: SampleConfig) -> None:
    """Ask for a line and continue it, until the end of the input."""
    decoder, save_history = Decoder(checkpoint.model), _load_history()
    print("/help tells what can be typed.")
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
            config = _obey(line[1:], config)
            continue
        prompt = line.removeprefix("/") if line else text
        text = prompt + stream(decoder, checkpoint.tokenizer, config, prompt)


def _obey(order: str, config: SampleConfig) -> SampleConfig:
    """The settings after a line that began with a slash."""
    name, _, value = order.replace("=", " ", 1).partition(" ")
    changeable = {key: now for key, now in asdict(config).items() if key not in FIXED}
    if name == "settings":
        print("\n".join(f"{key} {now}" for key, now in changeable.items()))
    elif name not in changeable:
        print(HELP if name == "help" else f"there is no /{name}: /help tells what there is.")
    elif not value.strip():
        print(f"{name} {changeable[name]}")
    else:
        try:
            return change(config, name, value.strip())
        except SettingsError as error:
            print(error)
    return config


def change(config: SampleConfig, name: str, value: str) -> SampleConfig:
    """The settings with one of them given as on the command line; SettingsError when it does not fit."""
    schema = type(config)
    try:
        override = OmegaConf.from_dotlist([f"{name}={value}"])
        return to_settings(OmegaConf.merge(OmegaConf.structured(schema), asdict(config), override), schema)
    except OmegaConfBaseException as error:
        raise SettingsError(explain(error, schema)) from error


def _load_history():
    """Make the arrow keys recall earlier lines, of earlier sessions too; returns what saves them."""
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

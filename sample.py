"""Generate text from a checkpoint:  python sample.py

Takes the newest run unless told otherwise:  python sample.py checkpoint=outputs/… prompt="def main" temperature=0.8
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli import command
from model.controls import Controls
from training.config import SettingsError


@dataclass(kw_only=True)
class SampleConfig(Controls):
    """What to generate, and how."""

    checkpoint: str | None = None
    """A run's directory (its best checkpoint) or a checkpoint's own; the newest run when null."""
    prompt: str = ""
    """What the text continues; the start of a document when empty."""
    prompt_file: str | None = None
    """Read the prompt from this file; - reads it from standard input."""
    prompts: str | None = None
    """Read many prompts, {"prompt": "…"} a line, from this file; - reads them from standard input."""
    results: str | None = None
    """Write the samples as JSON, one a line, to this new file; - writes them to standard output."""
    interactive: bool = False
    """Ask for prompts until Ctrl-D; /help tells what else can be typed."""
    special_tokens: bool = False
    """Let <|endoftext|> and its like in a prompt be the tokens, not the text, that they are."""

    num_samples: int = 1
    """Texts to write for each prompt, which is read once for all of them."""
    batch_size: int = 16
    """With `prompts`: texts to write at a time."""
    max_new_tokens: int = 256
    """Tokens at the most; a sample also ends where the model ends the document."""
    stop: list[str] = field(default_factory=list)
    """End a sample before the first of these strings."""

    temperature: float = 0.8
    seed: int = 1
    """Sample i of a prompt is drawn with seed + i."""
    logprobs: bool = False
    """Add each token's log-probability, in nats and before the controls, to `results`."""
    attention_map: str | None = None
    """Instead of writing, draw what every head attends to in the prompt, to this .html or .png file."""
    device: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("prompt", "prompt_file", "prompts") if getattr(self, name)]
        if len(given) > 1:
            both = " and ".join(f"{name}={getattr(self, name)}" for name in given)
            raise ValueError(f"{both} are given: choose one.")
        if self.interactive and (self.prompt_file or self.prompts or self.results):
            raise ValueError("interactive=true asks for the prompts: give no prompt_file, prompts or results with it.")
        if self.logprobs and not (self.results or self.prompts):
            raise ValueError("logprobs=true is written as JSON: add results=FILE, or results=- to see it here.")
        if "" in self.stop:
            raise ValueError("stop has an empty string, which every text contains: remove it.")
        for name in ("num_samples", "batch_size", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if not 0 <= self.seed < 2**63 - self.num_samples:
            raise ValueError(f"seed={self.seed} must be from 0 to 2^63.")

    def drawing(self) -> dict[str, Any]:
        """The settings that inference.write.write takes."""
        return {"max_new_tokens": self.max_new_tokens, "controls": self, "stop": self.stop}


def sample(config: SampleConfig) -> None:
    """Write the samples as they are drawn."""
    from inference.attention_map import draw_prompt
    from inference.completions import complete_prompts, read_prompts
    from inference.interactive import converse
    from inference.stream import stream
    from model.decode import Decoder
    from training.checkpoint import CheckpointError, open_checkpoint
    from training.device import choose_device

    device = choose_device(config.device)
    records = read_prompts(config.prompts) if config.prompts else None
    prompt = read_prompt(config)
    checkpoint = open_checkpoint(config.checkpoint, device)
    if sys.stderr.isatty():
        print(f"{checkpoint.path}, step {checkpoint.meta['step']}", file=sys.stderr)

    try:
        if config.attention_map:
            draw_prompt(checkpoint, prompt, Path(config.attention_map))
        elif config.interactive:
            converse(checkpoint, config)
        elif records or config.results:
            complete_prompts(checkpoint, config, records or [{"prompt": prompt}])
        else:
            stream(Decoder(checkpoint.model), checkpoint.tokenizer, config, prompt)
    except FloatingPointError as error:
        raise CheckpointError(f"checkpoint={checkpoint.path} is of no use ({error}): take an earlier one.") from None


def read_prompt(config: SampleConfig) -> str:
    """The prompt, from the setting, a file or standard input; bytes that are no UTF-8 become U+FFFD."""
    if config.prompt_file is None:
        return config.prompt
    if config.prompt_file == "-":
        return sys.stdin.buffer.read().decode("utf-8", errors="replace")
    try:
        return Path(config.prompt_file).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SettingsError(f"prompt_file={config.prompt_file} cannot be read ({error.strerror}).") from None


@command("sample", SampleConfig)
def main(config: SampleConfig) -> None:
    sys.stdout.reconfigure(errors="replace")
    try:
        sample(config)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

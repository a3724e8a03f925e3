"""Generate text from a checkpoint:  python sample.py

Takes the newest run unless told otherwise:  python sample.py checkpoint=outputs/… prompt="def main" temperature=0.8
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from training.cli import command
from training.config import SettingsError


@dataclass(kw_only=True)
class SampleConfig:
    """What to generate, and how."""

    checkpoint: str | None = None
    """A run's directory (its best checkpoint) or a checkpoint's own; the newest run when null."""
    prompt: str = ""
    """What the text continues; the start of a document when empty."""
    prompt_file: str | None = None
    """Read the prompt from this file; - reads it from standard input."""
    num_samples: int = 1
    max_new_tokens: int = 256
    """Tokens at the most; a sample also ends where the model ends the document."""
    temperature: float = 0.8
    """Below 1 sharper, above 1 flatter, 0 always the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach this sum (Holtzman et al. 2020)."""
    seed: int = 1
    """Sample i is drawn with seed + i."""
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.prompt and self.prompt_file:
            raise ValueError(f"prompt and prompt_file={self.prompt_file} are both given: choose one.")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative; 0 takes the likeliest token.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; 1 turns it off.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or null to turn it off.")
        for name in ("num_samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative.")


def read_prompt(config: SampleConfig) -> str:
    """The prompt, from the setting, a file or standard input."""
    if config.prompt_file is None:
        return config.prompt
    if config.prompt_file == "-":
        return sys.stdin.buffer.read().decode("utf-8", errors="replace")
    try:
        return Path(config.prompt_file).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SettingsError(f"prompt_file={config.prompt_file} cannot be read ({error.strerror}).") from None


def sample(config: SampleConfig) -> None:
    """Write the samples to standard output as they are drawn."""
    from training.checkpoint import find_checkpoint, load_checkpoint
    from training.device import choose_device
    from training.sampling import continue_text

    prompt = read_prompt(config)
    device = choose_device(config.device)
    checkpoint = load_checkpoint(find_checkpoint(config.checkpoint), device)
    if sys.stderr.isatty():
        print(f"{checkpoint.path}, step {checkpoint.meta['step']}", file=sys.stderr)

    for number in range(config.num_samples):
        if config.num_samples > 1:
            print(f"--- sample {number + 1} of {config.num_samples}")
        print(prompt, end="", flush=True)
        for piece in continue_text(
            checkpoint.model,
            checkpoint.tokenizer,
            prompt,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed + number,
        ):
            print(piece, end="", flush=True)
        print()


@command("sample", SampleConfig)
def main(config: SampleConfig) -> None:
    sample(config)


if __name__ == "__main__":
    main()

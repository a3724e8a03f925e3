"""What is done to the logits before a token is drawn; model/generate.py does it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Controls:
    """The settings of drawing a token; the defaults draw from the model's own distribution.

    Raises ValueError, naming the setting, its value and a remedy, when one cannot be honoured.
    """

    temperature: float = 1.0
    """Divides the logits: below 1 sharper, above 1 flatter, 0 always the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach this sum (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Draw from tokens at least this fraction as likely as the likeliest one (Nguyen et al. 2024)."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that the text already has, or multiplies negative ones (Keskar et al. 2019)."""

    def __post_init__(self) -> None:
        # A quotient beyond the range of float32 would be no number.
        if self.temperature != 0 and not 1e-6 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} must be 0, which takes the likeliest token, or a number from 1e-6 on."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or null to turn it off.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; 1 turns it off.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be from 0 to 1; 0 turns it off.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be positive; 1 turns it off.")


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
        """The settings that generation.text.write takes."""
        return {"max_new_tokens": self.max_new_tokens, "controls": self, "stop": self.stop}

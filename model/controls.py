"""What is done to the logits before a token is drawn; model/generate.py does it."""

from __future__ import annotations

from dataclasses import dataclass


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

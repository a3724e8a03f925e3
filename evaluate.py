"""Measure how well a checkpoint predicts text:  python evaluate.py [NAME=VALUE ...]

python evaluate.py                             # the newest run, on its validation split
python evaluate.py data.path=notes.txt against=outputs/DATE/TIME-xxxx html=surprise.html
"""

import os
import sys
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING

import console  # noqa: F401  (first: Ctrl-C from here on ends in one line)
from errors import SettingsError, at_least, one_of, refuse_unwritable
from runs.formatting import visible

if TYPE_CHECKING:  # torch is imported where it is used: --help does not wait for it
    from generation.scoring import Scores


@dataclass(kw_only=True)
class TextConfig:
    """The text to score."""

    path: str | None = None
    """A file, a folder (searched at any depth) or a glob; the validation split of the checkpoint's run when null."""


@dataclass(kw_only=True)
class EvaluateConfig:
    """What to score, and how."""

    checkpoint: str | None = None
    """A run's directory, for its best checkpoint, or a checkpoint's; the newest run when null."""
    against: str | None = None
    """A second one, to compare on the same text."""
    data: TextConfig = field(default_factory=TextConfig)
    stride: int | None = None
    """Each token has at least block_size - stride tokens before it; an eighth of block_size when null. 1 is exact and
    slow; block_size is fast, and what the trainer reports."""
    html: str | None = None
    """File for a page of the text in which every token is tinted by its surprise under `checkpoint`."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: str = "auto"
    """Type of the matrix products: fp32, bf16 or fp16; auto is the run's, whose own auto is bf16 where that is fast."""

    def __post_init__(self) -> None:
        one_of("precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        at_least("stride", self.stride, 1, "or null for an eighth of block_size")


def evaluate(config: EvaluateConfig) -> "list[Scores]":
    """Print and return the figures of one checkpoint, or of two side by side."""
    import torch

    from generation.scoring import BLOCK_BYTES, compare, load_text, score
    from pages.surprise import write_surprise
    from runs.checkpoint import open_checkpoint
    from training.device import choose_device, choose_precision

    if config.html:
        refuse_unwritable("html", config.html)
    device = choose_device(config.device)
    places = [config.checkpoint] + [config.against] * (config.against is not None)
    checkpoints = [open_checkpoint(place, device) for place in places]
    description, texts = load_text(config.data.path, checkpoints)
    scores = []
    for checkpoint, tokens in zip(checkpoints, texts, strict=True):
        block_size = checkpoint.model.config.block_size
        stride = config.stride or max(1, block_size // 8)
        if stride > block_size:
            raise SettingsError(f"stride={stride} would skip tokens: the model of {checkpoint.path} sees {block_size}.")
        name = checkpoint.meta["config"]["precision"] if config.precision == "auto" else config.precision
        precision = choose_precision(name, device)
        autocast = torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32)
        apart = bool(checkpoint.meta["config"]["data"].get("document_mask"))
        model, tokenizer = checkpoint.model, checkpoint.tokenizer
        scores.append(score(model, tokenizer, tokens, stride=stride, autocast=autocast, document_mask=apart))

    totals = [s.total for s in scores]
    print(f"text        {visible(description)}; {totals[0].text_bytes:,} bytes are scored")
    rows = {
        "checkpoint": [visible(os.path.relpath(c.path)) for c in checkpoints],
        "tokens": [f"{total.tokens:,}" for total in totals],
        "nats/token": [f"{total.loss:.4f}" for total in totals],
        "perplexity": [f"{total.perplexity:,.2f}" for total in totals],
        "bits/byte": [f"{total.bpb:.4f}" for total in totals],
        "± documents": [f"{total.bpb_stderr:.4f}" for total in totals if total.bpb_stderr is not None],
    }
    print_columns(rows)
    if len(scores) == 2:
        difference, error = compare(*scores)
        shown, note = "", f"too short a text for a standard error: give at least {2 * BLOCK_BYTES:,} bytes"
        if error is not None:
            shown, note = f" ± {error:.4f}", "standard error"
        print(f"difference  {difference:+.4f}{shown} bits/byte ({note})")
    if config.html:
        summary = f"{description}. {totals[0].loss:.3f} nats a token, {totals[0].bpb:.3f} bits a byte."
        title = f"Surprise of {os.path.relpath(checkpoints[0].path)}"
        write_surprise(Path(config.html), checkpoints[0].tokenizer, texts[0], scores[0].nats, title, summary)
        print(f"page        {visible(config.html)}")
    return scores


def print_columns(rows: dict[str, list[str]]) -> None:
    width = max(len(cell) for cells in rows.values() for cell in cells) + 2
    for name, cells in rows.items():
        if cells:
            print(f"{name:12}" + "".join(f"{cell:{width}}" for cell in cells).rstrip())


def main() -> None:
    from settings import run_command  # not in every environment that imports this file by mistake: see below

    run_command(EvaluateConfig, __doc__, evaluate)


if __name__ == "__main__":
    main()
else:  # In this folder `import evaluate`, as in lm_eval's tasks, finds this file. It means the installed package.
    elsewhere = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
    if (spec := PathFinder.find_spec(__name__, elsewhere)) and spec.loader:
        sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[__name__])

"""Measure how well a checkpoint predicts text:  python eval.py [NAME=VALUE ...]

python eval.py                                 # the newest run, on its validation split
python eval.py data.path=notes.txt against=outputs/DATE/TIME-xxxx page=text.html
python eval.py probes=true                     # induction, long contexts, sinks, gates, a needle
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cli.command import run_command
from common.errors import CheckpointError, SettingsError, at_least, naming, one_of, os_error_reason
from common.text import seen_from_here, visible
from generation.config import check_page
from runs.metrics import finite

if TYPE_CHECKING:  # torch is imported where it is used: --help does not wait for it
    from generation.score import How, Scores
    from runs.checkpoint import Checkpoint
    from runs.metrics import Evaluation


# What is printed of an Evaluation: its title, its name there and its format.
OF_TEXT = {"tokens": ("tokens", ","), "nats/token": ("loss", ".4f"), "perplexity": ("perplexity", ",.2f")}
OF_TEXT |= {"bits/byte": ("bpb", ".4f"), "± documents": ("bpb_stderr", ".4f")}
OF_TASK = {"answers": ("tokens", ","), "nats/answer": ("loss", ".4f"), "accuracy": ("accuracy", ".4f")}


@dataclass(kw_only=True)
class TextConfig:
    """The text to score."""

    path: str | None = None
    """A file, a folder (searched at any depth) or a glob; the validation split of the checkpoint's run when null."""


@dataclass(kw_only=True)
class EvalConfig:
    """What to score, and how."""

    checkpoint: str | None = None
    """A run's directory, for its best checkpoint, or a checkpoint's; the newest run when null."""
    against: str | None = None
    """A second one, to compare on the same text."""
    data: TextConfig = field(default_factory=TextConfig)
    stride: int | None = None
    """Each token has at least block_size - stride tokens before it; an eighth of block_size when null. 1 is exact and
    slow; block_size, the most, is fast and what the trainer reports."""
    page: str | None = None
    """File for a page of the text: each token's surprise, what was expected, what every head looked at."""
    probes: bool = False
    """Instead of scoring, probe what the model does: induction, loss by position up to 16 × block_size, sinks, gates, a
    needle. Figures go to step_N.probes.json beside the checkpoint."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: str = "auto"
    """Type of the matrix products: fp32, bf16 or fp16; auto is the run's, whose own auto is bf16 where that is fast."""

    def __post_init__(self) -> None:
        one_of("precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        at_least("stride", self.stride, 1)
        check_page(self.page)
        if self.probes and (given := [name for name in ("against", "stride", "page") if getattr(self, name)]):
            raise SettingsError(f"{given[0]}={getattr(self, given[0])} and probes=true are both given", "choose one")


def evaluate(config: EvalConfig) -> "list[Scores] | list[Evaluation]":
    """Print and return the figures of one checkpoint, or of two side by side; none of probes."""
    from common.files import writing
    from runs.checkpoint import open_checkpoint
    from training.device import choose_device

    device = choose_device(config.device)
    checkpoints = [open_checkpoint(config.checkpoint, device)]
    if config.against is not None:
        with naming(f"against={config.against}"):
            checkpoints.append(open_checkpoint(config.against, device))
    if config.probes:
        probe_checkpoint(config, checkpoints[0])
        return []
    if config.data.path is None and checkpoints[0].encoding is None:
        return evaluate_task(config, checkpoints)
    with writing("page", config.page) if config.page else nullcontext() as page:
        return evaluate_text(config, checkpoints, page)


def evaluate_text(config: EvalConfig, checkpoints: "list[Checkpoint]", page: Path | None) -> "list[Scores]":
    """Print and return the scores of checkpoints on one text, and write the page of it that is asked for."""
    from generation.score import BLOCK_BYTES, compare, load_text, score
    from pages.reading import write_page

    description, texts = load_text(config.data.path, checkpoints)
    hows = [how_to_read(checkpoint, config) for checkpoint in checkpoints]
    scores = []
    for checkpoint, tokens, how in zip(checkpoints, texts, hows, strict=True):
        try:
            scores.append(score(checkpoint.model, checkpoint.tokenizer, tokens, how))
        except FloatingPointError as error:
            remedy = "set precision=fp32, or take another one"
            raise CheckpointError(f"checkpoint={checkpoint.path} is unusable ({error})", remedy) from None
    totals = [each.total for each in scores]
    print(f"text        {visible(description)}; {totals[0].text_bytes:,} bytes are scored")
    print_columns(checkpoints, totals, OF_TEXT)
    told = f"{description}. Bits per byte: {' and '.join(f'{each.bpb:.4f}' for each in totals)}."
    if len(scores) > 1:
        difference, deviation = compare(*scores)
        apart = f"{difference:+.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")
        note = f"with a standard error from {2 * BLOCK_BYTES:,} bytes on" if deviation is None else "standard error"
        print(f"difference  {apart} bits/byte ({note})")
        told += f" The second's less the first's: {apart}."
    if page:
        write_page(page, checkpoints, texts, hows, told)
        print(f"page        {visible(config.page)}")
    return scores


def evaluate_task(config: EvalConfig, checkpoints: "list[Checkpoint]") -> "list[Evaluation]":
    """Print and return the figures of checkpoints on the held-out windows of the task that the first has learned."""
    from data.tasks import HELD_OUT
    from generation.score import learned_task
    from training.evaluation import evaluate as score_windows

    task = learned_task(checkpoints[0])
    size = checkpoints[0].model.config.block_size
    if config.page:
        raise SettingsError(f"page={config.page}: data={task.name} has no text to show", "leave it out")
    for has in (checkpoint.model.config for checkpoint in checkpoints[1:]):
        if (has.vocab_size or 0) < task.vocab_size or has.block_size < size:
            problem = f"has {has.vocab_size} ids and windows of {has.block_size}, too few for {task.name}"
            raise SettingsError(f"against={config.against} {problem}", "name another checkpoint")
    batch = max(1, 16_384 // size)
    results = [score_windows(c.model, task, size, batch, how_to_read(c, config).autocast) for c in checkpoints]
    print(f"task        {task.name}: {HELD_OUT:,} held-out windows of {size:,} tokens")
    print_columns(checkpoints, results, OF_TASK)
    return results


def probe_checkpoint(config: EvalConfig, checkpoint: "Checkpoint") -> None:
    """Print what the probes find, and write it beside the checkpoint."""
    from common.files import replace_text
    from pages.probes import probe, summary

    file = checkpoint.path.with_name(f"{checkpoint.path.name}.probes.json")
    found = probe(checkpoint, how_to_read(checkpoint, config), config.data.path)
    print_columns([checkpoint], [], {})
    print(visible("\n".join(summary(found))), flush=True)
    try:
        replace_text(file, json.dumps(finite(found), indent=1) + "\n")
    except OSError as error:
        raise SettingsError(
            f"probes=true: {file} cannot be written ({os_error_reason(error)})", "copy the run elsewhere"
        ) from None
    print(visible(f"figures     {seen_from_here(file)}"))


def how_to_read(checkpoint: "Checkpoint", config: EvalConfig) -> "How":
    """Return how a checkpoint reads: in the asked precision, by default its run's, and with documents apart where its
    run kept them so."""
    import torch

    from generation.score import How
    from runs.checkpoint import readable
    from training.device import choose_precision

    device = checkpoint.model.token_embedding.weight.device
    settings = checkpoint.meta.config
    name = settings.get("precision", "auto") if config.precision == "auto" else config.precision
    dtype = choose_precision(name, device)
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
    with readable(checkpoint.path):
        apart = settings.get("data", {}).get("document_mask")
    separator = checkpoint.encoding.eot_token if apart and checkpoint.encoding else None
    return How(autocast, config.stride, separator)


def print_columns(
    checkpoints: "list[Checkpoint]", results: "list[Evaluation]", figures: dict[str, tuple[str, str]]
) -> None:
    """Print a column for each checkpoint and a row for each of the figures that is known."""
    rows = {"checkpoint": [visible(seen_from_here(checkpoint.path)) for checkpoint in checkpoints]}
    for title, (name, form) in figures.items():
        rows[title] = [format(value, form) for result in results if (value := getattr(result, name)) is not None]
    width = max(len(cell) for cells in rows.values() for cell in cells) + 2
    for title, cells in rows.items():
        if cells:
            print(f"{title:12}" + "".join(f"{cell:{width}}" for cell in cells).rstrip())


def main() -> None:
    run_command(EvalConfig, evaluate)


if __name__ == "__main__":
    main()

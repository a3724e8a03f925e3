"""Measure how well a checkpoint predicts text:  python evaluate.py [NAME=VALUE ...]

python evaluate.py                             # the newest run, on its validation split
python evaluate.py data.path=notes.txt against=outputs/DATE/TIME-xxxx page=text.html
python evaluate.py probes=true                 # induction, long contexts, sinks, gates, a needle
"""

import json
import os
import sys
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import console  # noqa: F401  (first: Ctrl-C from here on ends in one line)
from errors import SettingsError, at_least, one_of, page_name, refuse_idle, refuse_unwritable
from runs.formatting import visible
from runs.metrics import finite

if TYPE_CHECKING:  # torch is imported where it is used: --help does not wait for it
    import torch

    from generation.scoring import Scores
    from runs.checkpoint import Checkpoint
    from runs.metrics import Evaluation


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
    page: str | None = None
    """File for a page of the text: each token's surprise, what was expected, what every head looked at."""
    probes: bool = False
    """Instead of scoring, probe what the model does: induction, loss by position up to 16 × block_size, sinks, gates, a
    needle. Figures go to probes/probes.json of the run's directory, with a picture of each."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: str = "auto"
    """Type of the matrix products: fp32, bf16 or fp16; auto is the run's, whose own auto is bf16 where that is fast.
    int8, on a CPU, compares the checkpoint with itself in the weights of sample.py precision=int8."""

    def __post_init__(self) -> None:
        one_of("precision", self.precision, ("auto", "fp32", "bf16", "fp16", "int8"))
        page_name("page", self.page)
        at_least("stride", self.stride, 1, "or null for an eighth of block_size")
        rounded = "precision=int8, which compares a checkpoint with itself"
        refuse_idle(self, [("against probes", rounded, self.precision == "int8")])
        refuse_idle(self, [("against stride page", "probes=true", self.probes)])


def evaluate(config: EvaluateConfig) -> "list[Scores] | list[Evaluation]":
    """Print and return the figures of one checkpoint, or of two side by side; none of probes."""
    from model.packed import to_int8
    from runs.checkpoint import open_checkpoint
    from training.device import choose_device, refuse_int8

    if config.page:
        refuse_unwritable("page", config.page)
    device = choose_device(config.device)
    refuse_int8(config.precision, device)
    rounded = config.precision == "int8"
    second = config.checkpoint if rounded else config.against
    places = [config.checkpoint] + [second] * (rounded or second is not None)
    checkpoints = [open_checkpoint(place, device) for place in places]
    if rounded:
        to_int8(checkpoints[1].model)
    if config.probes:
        probe_checkpoint(config, checkpoints[0])
        return []
    if config.data.path is None and checkpoints[0].encoding is None:
        return evaluate_task(config, checkpoints)
    return evaluate_text(config, checkpoints)


def evaluate_text(config: EvaluateConfig, checkpoints: "list[Checkpoint]") -> "list[Scores]":
    """Print and return the scores of checkpoints on one text, and write the page of it that is asked for."""
    from generation.reading import beginnings, read
    from generation.scoring import BLOCK_BYTES, compare, load_text, score, separator_of
    from pages.text import write_text_page

    stride, hows = config.stride, list[dict[str, Any]]()
    for checkpoint in checkpoints:
        if stride and stride > (sees := checkpoint.model.config.block_size):
            raise SettingsError(f"stride={stride} would skip tokens: the model of {checkpoint.path} sees {sees}.")
        autocast = autocast_of(checkpoint, config.precision)
        hows.append({"stride": stride, "autocast": autocast, "separator": separator_of(checkpoint)})
    description, texts = load_text(config.data.path, checkpoints)
    models = [(checkpoint.model, checkpoint.tokenizer) for checkpoint in checkpoints]
    scores = [score(*model, tokens, **how) for model, tokens, how in zip(models, texts, hows, strict=True)]
    totals = [each.total for each in scores]
    print(f"text        {visible(description)}; {totals[0].text_bytes:,} bytes are scored")
    rows = {
        "weights": ["fp32", "int8"] if config.precision == "int8" else [],
        "tokens": [f"{total.tokens:,}" for total in totals],
        "nats/token": [f"{total.loss:.4f}" for total in totals],
        "perplexity": [f"{total.perplexity:,.2f}" for total in totals],
        "bits/byte": [f"{total.bpb:.4f}" for total in totals],
        "± documents": [f"{total.bpb_stderr:.4f}" for total in totals if total.bpb_stderr is not None],
    }
    print_columns(checkpoints, rows)
    if len(scores) == 2:
        difference, error = compare(*scores)
        shown, note = "", f"too short a text for a standard error: give at least {2 * BLOCK_BYTES:,} bytes"
        if error is not None:
            shown, note = f" ± {error:.4f}", "standard error"
        print(f"difference  {difference:+.4f}{shown} bits/byte ({note})")
    if config.page:
        names = [os.path.relpath(checkpoint.path) for checkpoint in checkpoints]
        begun = beginnings([tokenizer for _, tokenizer in models], texts)
        readings = [
            read(*model, tokens, name=name, models=len(models), **how)
            for model, tokens, name, how in zip(models, begun, names, hows, strict=True)
        ]
        figures = (f"{name}: {total.bpb:.3f} bits a byte" for name, total in zip(names, totals, strict=True))
        kept = "" if len(begun[0]) == len(texts[0]) else f" Shown here are the first {len(begun[0]):,} tokens."
        write_text_page(Path(config.page), readings, f"{description}. {'; '.join(figures)}.{kept}")
        print(f"page        {visible(config.page)}")
    return scores


def evaluate_task(config: EvaluateConfig, checkpoints: "list[Checkpoint]") -> "list[Evaluation]":
    """Print and return the figures of checkpoints on the held-out windows of the task that the first has learned."""
    from data.tasks import HELD_OUT
    from generation.scoring import learned_task
    from training.evaluation import evaluate

    task, block_size = learned_task(checkpoints[0]), checkpoints[0].model.config.block_size
    refuse_idle(config, [("stride page", f"a checkpoint that has learned data={task.name}", True)])
    for has in (checkpoint.model.config for checkpoint in checkpoints[1:]):
        if (has.vocab_size or 0) < task.vocab_size or (has.position == "learned" and has.block_size < block_size):
            problem = f"has {has.vocab_size} ids and windows of {has.block_size}, too few for {task.name}"
            raise SettingsError(f"against={config.against} {problem}: name another checkpoint.")
    batch_size = max(1, 16_384 // block_size)
    precision = config.precision
    results = [evaluate(c.model, task, block_size, batch_size, autocast_of(c, precision)) for c in checkpoints]
    print(f"task        {task.name}: {HELD_OUT:,} held-out windows of {block_size:,} tokens")
    rows = {
        "answers": [f"{result.tokens:,}" for result in results],
        "nats/answer": [f"{result.loss:.4f}" for result in results],
        "accuracy": [f"{result.accuracy:.4f}" for result in results],
    }
    print_columns(checkpoints, rows)
    return results


def probe_checkpoint(config: EvaluateConfig, checkpoint: "Checkpoint") -> None:
    """Print, write and draw what the probes find."""
    from generation.probes import probe, summary
    from pages.probes_plot import draw_probes

    place, folder = checkpoint.path, checkpoint.path.with_name(f"{checkpoint.path.name}.probes")
    if place.parent.name == "checkpoints":  # of a run
        folder = place.parents[1] / "probes"
    folder.mkdir(exist_ok=True)
    found = probe(checkpoint, autocast_of(checkpoint, config.precision), config.data.path)
    (folder / "probes.json").write_text(json.dumps(finite(found), indent=1) + "\n", encoding="utf-8")
    draw_probes(found, folder)
    print(f"checkpoint  {visible(os.path.relpath(place))}")
    for line in summary(found):
        print(visible(line))
    print(f"pictures    {visible(os.path.relpath(folder))}")


def autocast_of(checkpoint: "Checkpoint", precision: str) -> "torch.autocast":
    """Return autocast in the asked precision; auto is that of the checkpoint's run."""
    import torch

    from training.device import choose_precision

    device = checkpoint.model.token_embedding.weight.device
    name = checkpoint.meta["config"]["precision"] if precision in ("auto", "int8") else precision
    dtype = choose_precision(name, device)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def print_columns(checkpoints: "list[Checkpoint]", rows: dict[str, list[str]]) -> None:
    """Print a column for each checkpoint, but no row without cells."""
    rows = {"checkpoint": [visible(os.path.relpath(checkpoint.path)) for checkpoint in checkpoints], **rows}
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

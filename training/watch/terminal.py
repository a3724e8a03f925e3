"""What a person sees of a run: what it is, the bar, log lines, and at the end a plot and what to type next."""

import itertools
import logging
import math
import shlex
import sys
from contextlib import ExitStack
from multiprocessing import parent_process
from shutil import get_terminal_size
from typing import TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data.tasks import HELD_OUT, TaskData
from model.size import count_parameters
from runs.formatting import hydra_quoted
from runs.metrics import Evaluation, Row, series
from training.device import peak_memory
from training.evaluation import SCORED_TOKENS
from training.optimizer import split_parameters
from training.run import Run

log = logging.getLogger("tinygpt")

HEIGHT = 10
WIDEST = 100
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # Unicode 11.1: the bit of each dot, by column and row
BLANK = 0x2800


class Terminal:
    """Shows a run in the terminal; its log lines are in train.log too."""

    name = "the terminal"

    def began(self, run: Run) -> None:
        progress = run.progress
        if not progress.step:
            log.info("%s", describe(run))
        self.warned = (progress.step, progress.skipped)
        bar = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"
        form = bar if run.max_steps else "{desc}{n_fmt} steps [{elapsed}{postfix}]"
        off = parent_process() is not None or None  # None: no bar unless on a terminal
        self.shown = ExitStack()
        self.bar = tqdm(total=run.max_steps, initial=progress.step, unit="step", disable=off, bar_format=form)
        self.shown.callback(self.bar.close)
        loggers = [one for one in (logging.root, log) if any(type(h) is logging.StreamHandler for h in one.handlers)]
        self.shown.enter_context(logging_redirect_tqdm(loggers))  # lines go above the bar instead of through it

    def moved(self, run: Run) -> None:
        self.bar.update(run.progress.step - self.bar.n)  # drawn ten times a second at most

    def stepped(self, run: Run, row: Row) -> None:
        step, skipped = run.progress.step, run.progress.skipped
        if new := skipped - self.warned[1]:
            text = "step %d: %d of the last %d steps changed nothing, because loss or gradient was not finite"
            log.warning(text, step, new, step - self.warned[0])
        self.warned = (step, skipped)
        figures = f"loss {row['loss']:.3f}, {row['tokens_per_s'] / 1000:.1f}k tokens/s"
        if not isinstance(run.data, TaskData):
            figures += f", epoch {row['tokens'] / len(run.data.train):.2f}"
        if run.device.type == "cuda":
            figures += f", {peak_memory(run.device) / 1e9:.1f} GB"
        self.bar.set_postfix_str(figures, refresh=False)

    def evaluates(self, run: Run) -> None:
        self.bar.set_description_str("evaluating ")

    def evaluated(self, run: Run, row: Row, result: Evaluation, sample: str) -> None:
        self.bar.set_description_str("", refresh=False)
        if result.accuracy is not None:
            figures = f"{result.loss:.4f} nats/answer, accuracy {result.accuracy:.2%}"
        else:
            perplexity = f"{result.perplexity:.{'1f' if result.perplexity < 1e6 else '2e'}}"
            figures = f"{result.loss:.4f} nats/token, perplexity {perplexity}, {result.bpb:.4f} bits/byte"
            if result.bpb_stderr is not None:
                figures += f" ± {result.bpb_stderr:.4f} over documents"
            figures += "".join(f"; {name} {loss:.4f}" for name, loss in result.texts.items())
        log.info("step %d: validation loss %s", run.progress.step, figures)
        if sample:
            log.info("%s", "\n".join("  │ " + line for line in sample.splitlines()))

    def ended(self, run: Run, error: BaseException | None) -> None:
        self.shown.close()
        if error is None:
            print_losses(run.rows)
            best, unit = run.progress.best_loss, "token" if run.data.tokenizer else "answer"
            log.info("\nbest validation loss %.4f nats/%s", math.nan if best is None else best, unit)
            log.info("curves    %s", run.directory / "report.html")
            if run.data.tokenizer:
                log.info("sample    python sample.py %s", shlex.quote(f"checkpoint={run.directory}"))
        elif isinstance(error, SystemExit):
            again = f"python train.py {hydra_quoted('resume', run.directory)}"
            log.info("stopped after step %d; to continue:  %s", run.progress.step, again)


def describe(run: Run) -> str:
    """Say what is about to happen, in a few lines."""
    config, model, data = run.config, run.config.model, run.data
    total = count_parameters(run.model).total()
    matrices = itertools.chain(*split_parameters(run.model)[:3])  # what Muon moves
    length = f"{run.max_steps:,} steps" if run.max_steps else f"{config.max_minutes:g} minutes in steps"
    heads = run.model.blocks[0].attention.n_head  # a form with one head has one whatever config.model says
    processes = f" × {run.ranks.size} ({config.distributed})" if run.ranks.size > 1 else ""
    if isinstance(data, TaskData):
        answers, epochs = data.targets(model.block_size), ""
        counted = f"{answers:,} answer{'s' * (answers > 1)} in each window of {model.block_size:,} tokens"
        told = f"task      {data.name}: {counted}, {data.vocab_size:,} ids; {HELD_OUT:,} windows held out\n"
    else:
        epochs = f", {data.epochs(run.max_steps * config.tokens_per_step)}" if run.max_steps else ""
        scored = data.held_out_tokens(model.block_size, SCORED_TOKENS)
        part = f" ({scored:,} of them, spread evenly, at each)" if scored < len(data.val) else ""
        told = (
            f"text      {data.description}\n"
            f"tokens    {len(data.train):,} for training, {len(data.val):,} for validation{part}, "
            f"{data.tokenizer.name} with {data.tokenizer.n_vocab:,} ids\n"
        )
    return told + (
        f"model     {total:,} parameters, {sum(m.numel() for m in matrices):,} of them in {model.n_layer} blocks of "
        f"{heads} head{'s' * (heads > 1)} ({model.attention}), {model.n_embd} wide\n"
        f"run       {length} of {config.batch_size} × {model.block_size} tokens{epochs}, "
        f"on {run.device}{processes} in {run.precision}\n"
        f"output    {run.directory}"
    )


def print_losses(rows: list[dict], stream: TextIO | None = None) -> None:
    """Print the losses of metrics.jsonl's rows where a person sees it: to a UTF-8 terminal, and nowhere else."""
    stream = stream or sys.stdout
    if stream.isatty() and (stream.encoding or "").lower().replace("-", "") == "utf8":
        print(plot_losses(rows, get_terminal_size().columns), end="", file=stream)


def plot_losses(rows: list[dict], columns: int) -> str:
    """The plot in at most `columns` columns: training loss as a line, evaluations as ●; "" where there is none."""
    measured = (zip(*series(rows, name), strict=True) for name in ("loss", "val_loss"))
    train, val = ([(step, loss) for step, loss in points if math.isfinite(loss)] for points in measured)
    if not train + val or columns < 20:
        return ""
    losses = [loss for _, loss in train + val]
    low, high, last = min(losses), max(losses), max(step for step, _ in train + val)
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    width = min(columns, WIDEST) - margin - 2

    def place(step: int, loss: float) -> tuple[int, int]:
        """Column and row of a point, counted in dots."""
        x = step / max(last, 1) * (2 * width - 1)
        return round(x), round((high - loss) / (high - low or 1) * (4 * HEIGHT - 1))

    cells = [[BLANK] * width for _ in range(HEIGHT)]
    points = [place(*point) for point in train]
    for (x, y), (to_x, to_y) in zip(points, points[1:] or points, strict=False):
        for dot in range(n := max(to_x - x, abs(to_y - y), 1)):
            column, row = x + (to_x - x) * dot // n, y + (to_y - y) * dot // n
            cells[row // 4][column // 2] |= DOTS[column % 2][row % 4]
    for column, row in (place(*point) for point in val):
        cells[row // 4][column // 2] = ord("●")
    end = f"{last:,}"
    legends = ("steps: ⣀⠤⠒ training, ● validation", "steps, ● validation", "steps", "")
    legend = next((text for text in legends if len(text) < width - len(end)), "")
    drawn = ["".join(map(chr, row)).rstrip(chr(BLANK)) for row in cells]
    lines = [f"{label:>{margin}} │{row}" for label, row in zip(labels, drawn, strict=True)]
    lines += [f"{'':{margin}} └{'─' * width}", f"{'':{margin}}  0{legend:^{width - 1 - len(end)}}{end}", ""]
    return "\n".join(lines)

"""Logger for the terminal: the run's description, its progress, and the next commands."""

import logging
import math
import statistics
import time
import warnings
from collections import deque
from contextlib import ExitStack
from dataclasses import replace

from common.console import Bar, progress_bar
from common.text import command, hydra_quoted, plural
from common.threads import Load
from data.batches import Dataset, TokenDataset
from data.tasks import HELD_OUT
from data.tokenizer import gzip_bits
from model.gpt import GPT
from model.size import count_parameters, flops_per_token
from runs.metrics import Row
from training.config import TrainConfig
from training.device import peak_flops, peak_memory
from training.evaluation import evaluation_tokens
from training.logger import Logger
from training.optimizer import warmup_steps
from training.run import Run

with warnings.catch_warnings(action="ignore"):  # in a notebook it asks for ipywidgets, which our bar does not use
    from tqdm.contrib.logging import logging_redirect_tqdm

log = logging.getLogger("tinygpt")

EPOCHS = 4  # repeated as often, a text teaches almost as much as new text (Muennighoff et al. 2023)
MOST_EPOCHS = 40  # and from here on nothing, in figure 1 there; a small model with dropout still gains at 29
SMALL = 300_000  # bytes
LONG_ENOUGH = 10  # seconds over which other programs are watched
SLOW = 0.6  # of the fastest speed: a run that is told that the machine is busy
EASIER = 0.6  # of the training loss: a validation loss that says little of the training text
LEARNED = 0.3  # nats: a lower training loss is that of a text known by heart
KNOWN = 0.95  # of the validation loss: a training loss that is lower may be that of a text known by heart
LATE = 0.8  # of a run's steps: the training losses that are compared with its last evaluation
SETTLED = 100  # steps before which a loss falls too fast for that
FAR_FROM_END = 0.5  # of the peak rate above its last: the schedule of a run that max_minutes has cut
QUIET = 25  # seconds without a line after which a run without a bar logs its progress


class Terminal(Logger):
    """Shows a run in the terminal or a notebook; train.log gets the same lines."""

    writes = "terminal"

    def __init__(self, run: Run) -> None:
        self.run = run
        progress = run.progress
        self.begun = progress.step
        if not progress.step:
            processes = f" × {run.ranks.size}" if run.ranks.size > 1 else ""
            about = "\n".join(describe(replace(run.config, max_steps=run.max_steps), run.data, run.model))
            place = f"{run.device}{processes} in {run.precision}{run.threads_note}"
            log.info("%s, on %s\noutput    %s", about, place, run.directory)
        bar = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        # {bar} makes tqdm cut the line at the terminal's width, even if the bar is only spaces.
        bar_format = bar if run.max_steps else "{desc}{n_fmt} steps [{elapsed}{postfix}]{bar}"
        self.display = ExitStack()
        self.bar = progress_bar(total=run.max_steps, initial=progress.step, unit="step", bar_format=bar_format)
        self.display.callback(self.bar.close)
        if not self.bar.disable:
            # Print log lines above the bar instead of through it.
            loggers = [
                each for each in (logging.root, log) if any(type(h) is logging.StreamHandler for h in each.handlers)
            ]
            self.display.enter_context(logging_redirect_tqdm(loggers, Bar))
        self.last_line = time.monotonic()
        self.figures = ""
        self.evaluated = progress.evaluated  # before this
        self.losses = deque[tuple[int, float]](maxlen=200)  # of the latest rows, with their steps
        self.load = Load()
        self.fastest = 0.0  # tokens a second of a row
        self.is_told_busy = False
        peak = peak_flops(run.device, run.dtype)
        # MFU for each token a second: its arithmetic, as a share of the devices' peak in the run's type.
        self.utilization = flops_per_token(run.model) / (peak * run.ranks.size) if peak else None

    def on_row(self, row: Row, sample: str) -> None:
        if "val_loss" in row:
            return self.log_evaluation(row, sample)
        self.tell_if_busy(row["tokens_per_s"])
        self.losses.append((self.run.progress.step, row["loss"]))
        self.figures = f": loss {row['loss']:.3f}, {row['tokens_per_s'] / 1000:.1f}k tokens/s"
        if self.utilization:
            self.figures += f" ({self.utilization * row['tokens_per_s']:.0%} MFU)"
        if isinstance(self.run.data, TokenDataset):
            self.figures += f", epoch {row['tokens'] / len(self.run.data.train):.2f}"
        if self.run.device.type == "cuda":
            self.figures += f", {peak_memory(self.run.device) / 1e9:.1f} GB"
        self.bar.set_postfix_str(self.figures[2:], refresh=False)

    def on_step(self) -> None:
        step = self.run.progress.step
        self.bar.update(step - self.bar.n if not self.bar.disable else 0)  # draws ten times a second at most
        if self.bar.disable and time.monotonic() > self.last_line + QUIET:
            of = f" of {self.run.max_steps:,}" if self.run.max_steps else ""
            row = self.losses[-1][0] if self.losses else step
            log.info("step %d%s%s%s", step, of, self.figures, f" (at step {row})" if row < step else "")
            self.last_line = time.monotonic()

    def tell_if_busy(self, speed: float) -> None:
        """Warn once if other programs take the cores of a run on a CPU."""
        self.fastest = max(self.fastest, speed)
        if self.is_told_busy or self.run.device.type != "cpu" or self.load.age < LONG_ENOUGH:
            return
        others = self.load.others()
        if others >= 0.5 and speed < SLOW * self.fastest:
            share = f"other programs use {others:.1f} cores, and a step takes {self.fastest / speed:.1f} times as long"
            log.warning("step %d: %s as it did", self.run.progress.step, share)
            self.is_told_busy = True

    def log_evaluation(self, row: Row, sample: str) -> None:
        loss = row["val_loss"]
        if "val_accuracy" in row:
            figures = f"{loss:.4f} nats/answer, accuracy {row['val_accuracy']:.2%}"
        else:
            perplexity = math.exp(min(loss, 700))  # exp(710) is no float
            digits = "1f" if perplexity < 1e6 else "2e"
            figures = f"{loss:.4f} nats/token, perplexity {perplexity:.{digits}}, {row['val_bpb']:.4f} bits/byte"
            if "val_bpb_stderr" in row:
                figures += f" ± {row['val_bpb_stderr']:.4f} over documents"
        log.info("step %d: validation loss %s", self.run.progress.step, figures)
        if sample:
            log.info("%s", "\n".join("  │ " + line for line in sample.splitlines()))
        self.last_line = time.monotonic()

    def on_end(self, error: BaseException | None) -> None:
        self.display.close()
        run = self.run
        code = f" {hydra_quoted('code', run.config.code)}" if run.config.code else ""
        if error is None:
            self.log_result()
            log.info("curves    %s", run.directory / "report.html")
            if run.data.tokenizer:
                log.info("sample    %s %s%s", command("sample.py"), hydra_quoted("checkpoint", run.directory), code)
        elif isinstance(error, SystemExit):
            again = f"{command('train.py')} {hydra_quoted('resume', run.directory)}{code}"
            log.info("stopped after step %d; to continue:  %s", run.progress.step, again)

    def log_result(self) -> None:
        # A uniform guess scores ln V: a run that ends there has learned nothing.
        config = self.run.config
        progress = self.run.progress
        data = self.run.data
        best = progress.result
        unit = "token" if data.tokenizer else "answer"
        if progress.best_loss is None:
            log.info("\nno validation loss counts: the steps that were evaluated had no checkpoint then")
        else:
            log.info("\nbest validation loss %.4f nats/%s, at step %d", best, unit, progress.best_step)
        if self.run.is_out_of_patience:
            log.info("patience  %s brought no better loss: the run ends", plural(progress.without_gain, "evaluation"))
        self.tell_if_cut()
        passes = 0.0
        if isinstance(data, TokenDataset):
            log.info("gzip      needs %.4f bits/byte for the validation text", gzip_bits(data.tokenizer, data.val))
            passes = epochs(config, data, progress.step)
        chance = math.log(data.vocab_size)
        slower = f"lower {config.optimizer.suspects()}"
        if progress.best_loss is not None and progress.step and best > chance - 0.01:
            is_slow = max(config.optimizer.rates.values()) < 1e-5
            rates = f"raise {config.optimizer.suspects()}" if is_slow else slower
            is_known = passes > EPOCHS and self.may_know_its_text()
            remedy = by_heart(config) if is_known else f"{rates}, or train longer"
            log.warning("no better than chance, ln %d = %.4f: %s", data.vocab_size, chance, remedy)
        elif passes and progress.metrics.get("val_loss", best) > 1.02 * best:
            reason = "The training loss is hardly lower" if passes > 1 else "Every token was new"
            remedy = by_heart(config) if passes > 1 and self.may_know_its_text() else f"{reason}: {slower}"
            log.warning("after its best step the loss rose; sample.py takes that step's checkpoint. %s", remedy)
        elif passes > EPOCHS and progress.step <= config.eval_interval and self.evaluated in (0, progress.evaluated):
            # Nothing tells whether it rose.
            log.warning("the only evaluation came after %.1f epochs: lower eval_interval to catch the best", passes)
        self.tell_if_easier()

    def tell_if_cut(self) -> None:
        """Warn if max_minutes ended the run too early.

        That is before its first step, in its warm-up, or while its rate was far from the schedule's end.
        """
        config = self.run.config
        step = self.run.progress.step
        is_whole = self.run.max_steps is not None and step >= self.run.max_steps
        if config.max_minutes is None or is_whole or self.run.is_out_of_patience:
            return
        # Without a step of this process the schedule was not followed.
        if not step:
            log.warning("max_minutes=%g was over before the first step: raise it", config.max_minutes)
        if step == self.begun:
            return

        # In the warm-up.
        warmup = warmup_steps(config.schedule, self.run.max_steps)
        if step <= warmup:
            cause = (
                f"max_minutes={config.max_minutes:g} was over after {step} of the {plural(warmup, 'step')} of warm-up"
            )
            log.warning("%s: lower schedule.warmup_steps, or resume= with a larger max_minutes", cause)
            return

        # Far from the end of a schedule that decays.
        if config.schedule.name == "constant":
            return
        group = self.run.optimizers[0].param_groups[0]
        factor = group["lr"] / group["peak_lr"]
        if factor - config.schedule.final_factor > FAR_FROM_END:
            cause = f"max_minutes={config.max_minutes:g} was over in a long step, as one that Ctrl-Z halts"
            remedy = "resume= with a larger max_minutes goes on"
            log.warning("%s: the learning rate is still %.0f%% of its peak; %s", cause, 100 * factor, remedy)

    def tell_if_easier(self) -> None:
        """Warn if the held-out text is much easier than the training text."""
        run = self.run
        step = run.progress.step
        late = self.late_losses()
        if not isinstance(run.data, TokenDataset) or step < SETTLED or len(late) < 4:
            return
        training = statistics.median(late)
        if training > LEARNED and run.progress.metrics.get("val_loss", training) < EASIER * training:
            remedy = "name a text of each kind" if run.config.data.val_path else "hold some of each kind out"
            place = "in val.bin" if run.config.data.source == "nanogpt" else "by data.val_path"
            problem = f"the held-out text is much easier than the training text, whose loss is {training:.2f}"
            log.warning("%s: %s %s", problem, remedy, place)

    def late_losses(self) -> list[float]:
        """Return the training losses to compare with the last evaluation.

        None under dropout, which raises them.
        """
        model = self.run.config.model
        if model.dropout or model.attention_dropout:
            return []
        return [loss for at, loss in self.losses if at > LATE * self.run.progress.step]  # earlier ones lie above it

    def may_know_its_text(self) -> bool:
        """Return whether the training loss is known to be below that of the held-out text."""
        late = self.late_losses()
        held_out = self.run.progress.metrics.get("val_loss", math.inf)
        return not late or statistics.median(late) < KNOWN * held_out


def by_heart(config: TrainConfig) -> str:
    """Return the remedies for a text that the model learns by heart."""
    dropout = "" if config.model.dropout else ", set model.dropout=0.2"
    return (
        f"The model may learn its text by heart: add text, train fewer steps{dropout}, "
        "or lower eval_interval to catch the best"
    )


def epochs(config: TrainConfig, data: TokenDataset, steps: int) -> float:
    """Return how many times the training text is read in some steps, the first of a run."""
    return (steps * config.batch_size + data.ahead) * config.model.block_size / len(data.train)


def describe(config: TrainConfig, data: Dataset, model: GPT) -> list[str]:
    """Return the lines that describe a run's data, model and length; config has its max_steps."""
    # Describe the data, and the length of the run.
    block_size = config.model.block_size
    length = plural(config.max_steps, "step") if config.max_steps else f"{config.max_minutes:g} min in steps"
    length += f" of {config.batch_size} × {block_size} tokens"
    if isinstance(data, TokenDataset):
        scored = data.validation_tokens(evaluation_tokens(config, config.max_steps))
        evaluation = "the last evaluation" if config.max_steps else "an evaluation"
        read = f"{len(data.train):,} for training, {len(data.val):,} for validation ({scored:,} in {evaluation})"
        ids = f"{data.tokenizer.name} with {data.tokenizer.n_vocab:,} ids"
        is_chosen = not config.init_from and not config.resume
        if data.tokenizer.name == "bpe" and is_chosen and is_small(data):  # most tokens are rare
            ids += "; for so short a text try tokenizer=byte"
        lines = [f"text      {data.description}", f"tokens    {read}, {ids}"]
        if config.max_steps:
            passes = epochs(config, data, config.max_steps)
            length += f", {passes:.2f} epochs"
            most = MOST_EPOCHS if config.model.dropout else EPOCHS
            if passes > most:
                length += f" (beyond {most} a model may learn the text by heart)"
    else:
        counted = f"{plural(data.targets_per_sequence, 'answer')} in each sequence of {block_size:,} tokens"
        lines = [f"task      {config.data.source}: {counted}, {data.vocab_size:,} ids; {HELD_OUT:,} sequences held out"]

    if config.patience:
        evaluations = math.ceil((config.max_steps or 0) / config.eval_interval)
        # The first one is always better, and the last one ends the run in any case.
        if config.max_steps and evaluations <= config.patience + 1:
            made = f"eval_interval={config.eval_interval} makes {plural(evaluations, 'evaluation')}"
            length += f" (patience={config.patience} cannot end it sooner, for {made})"
        else:
            several = f"{config.patience} evaluations in a row bring" if config.patience > 1 else "an evaluation brings"
            length += f", fewer if {several} no better loss"

    # Describe the model. The heads are counted in a layer, because some forms have one for any n_head.
    parts = count_parameters(model)
    tables = f" ({parts['ngrams']:,} in tables of n-grams)" if parts["ngrams"] else ""
    in_blocks = sum(p.numel() for p in model.blocks.parameters())
    blocks = f"{plural(config.model.n_layer, 'block')} of {plural(model.attentions[0].n_head, 'head')}"
    return [
        *lines,
        f"model     {parts.total():,} parameters{tables}, {in_blocks:,} of them in {blocks} "
        f"({config.model.attention}), {config.model.n_embd} wide",
        f"run       {length}",
    ]


def is_small(data: TokenDataset) -> bool:
    """Return whether the training text has fewer bytes than SMALL; a token has one or more."""
    return len(data.train) < SMALL and len(data.tokenizer.decode_bytes(data.train.tolist())) < SMALL

"""What a person sees of a run: what it is, the bar, log lines, and at the end a plot and what to type next."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from multiprocessing import parent_process

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from runs.metrics import Evaluation, Row
from runs.quoting import hydra_quoted, shell_quoted
from training.optimizer import split_parameters
from training.run import Run
from training.watch import Watcher
from training.watch.terminal_plot import print_losses

log = logging.getLogger("tinygpt")


class Terminal(Watcher):
    """Shows a run in the terminal; its log lines are in train.log too."""

    name = "the terminal"

    def began(self, run: Run) -> None:
        progress = run.progress
        if not progress.step:
            log.info("%s", describe(run))
        self.warned = (progress.step, progress.skipped)
        bar = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"
        self.bar = tqdm(
            total=run.max_steps,
            initial=progress.step,
            unit="step",
            disable=parent_process() is not None or None,  # None: no bar unless on a terminal
            bar_format=bar if run.max_steps else "{n_fmt} steps [{elapsed}{postfix}]",
        )
        self.redirected = ExitStack()
        shown = [
            logger for logger in (logging.root, log) if any(type(h) is logging.StreamHandler for h in logger.handlers)
        ]
        self.redirected.enter_context(logging_redirect_tqdm(shown))  # lines go above the bar instead of through it

    def stepped(self, run: Run, row: Row) -> None:
        step, skipped = run.progress.step, run.progress.skipped
        last_step, last_skipped = self.warned
        if skipped > last_skipped:
            log.warning(
                "step %d: %d of the last %d steps changed nothing, because loss or gradient was not finite",
                *(step, skipped - last_skipped, step - last_step),
            )
        self.warned = (step, skipped)
        self.bar.set_postfix_str(f"loss {row['loss']:.3f}, {row['tokens_per_s'] / 1000:.1f}k tokens/s", refresh=False)
        self.bar.update(step - self.bar.n)

    def evaluated(self, run: Run, row: Row, result: Evaluation, sample: str) -> None:
        log.info(
            "step %d: validation loss %.4f nats/token, perplexity %s, %.4f bits/byte",
            run.progress.step,
            result.loss,
            f"{result.perplexity:.{'1f' if result.perplexity < 1e6 else '2e'}}",
            result.bpb,
        )
        if sample:
            log.info("%s", "\n".join("  │ " + line for line in sample.splitlines()))

    def ended(self, run: Run, error: BaseException | None) -> None:
        self.redirected.close()
        self.bar.close()
        if error is None:
            print_losses(self.rows)
            log.info(
                "\nbest validation loss %.4f nats/token\ncurves    %s\nsample    python sample.py %s",
                run.progress.best_loss or float("nan"),
                run.directory / "loss.png",
                shell_quoted("checkpoint", run.directory),
            )
        elif isinstance(error, SystemExit):
            again = hydra_quoted("resume", run.directory)
            log.info("stopped after step %d; to go on:  python train.py %s", run.progress.step, again)


def describe(run: Run) -> str:
    """Say what is about to happen, in a few lines."""
    config, data = run.config, run.data
    total = sum(parameter.numel() for parameter in run.model.parameters())
    matrices, *_ = split_parameters(run.model)
    epochs = f", {run.max_steps * config.tokens_per_step / len(data.train):.2f} epochs" if run.max_steps else ""
    length = f"{run.max_steps:,} steps" if run.max_steps else f"{config.max_minutes:g} minutes in steps"
    heads = run.model.blocks[0].attention.n_head  # a form with one head has one whatever config.model says
    processes = f" × {run.ranks.size} ({config.distributed})" if run.ranks.size > 1 else ""
    return (
        f"text      {data.description}\n"
        f"tokens    {len(data.train):,} for training, {len(data.val):,} for validation, "
        f"{data.tokenizer.name} with {data.tokenizer.n_vocab:,} ids\n"
        f"model     {total:,} parameters, {sum(m.numel() for m in matrices):,} of them in "
        f"{config.model.n_layer} blocks of {heads} head{'s' * (heads > 1)} ({config.model.attention}), "
        f"{config.model.n_embd} wide\n"
        f"run       {length} of {config.batch_size} × {config.model.block_size} tokens{epochs}, "
        f"on {run.device}{processes} in {run.precision}\n"
        f"output    {run.directory}"
    )

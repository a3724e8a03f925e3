"""Train a GPT on text:  python train.py [NAME=VALUE ...]

As in  python train.py model=small data.path=notes.txt max_steps=2000
"""

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

from hydra_command import run_train_command
from runs.text import flat, visible
from settings import build
from training.config import TrainConfig

if TYPE_CHECKING:
    from runs.metrics import Evaluation
    from training.run import Run

log = logging.getLogger("tinygpt")


def train(config: TrainConfig) -> float:
    """Train one model and return its best validation loss in nats per token.

    Everything the run writes goes into config.run_dir. A mistake in the settings raises a SettingsError
    that names it, before any long work. Ctrl-C and SIGTERM save and raise SystemExit.
    """
    from training.device import fast_products, uncompiled  # torch takes a second to import: --help does without it
    from training.log import Loggers
    from training.optimizer import schedule_factor, set_learning_rate
    from training.start import open_run
    from training.step import memory_named, train_step

    config = build(TrainConfig, flat(asdict(config)))  # a Path is a text now, np.int64 an int, a dict a group
    with open_run(config) as run, Loggers(run) as loggers, fast_products(run.device, run.dtype):
        progress = run.progress
        while True:
            if stop := int(run.ranks.max(run.signals.received)):
                run.save()
                run.saver.finish()
                run.ranks.from_first(None)  # waits: torchrun ends the others when a rank has ended
                raise SystemExit(128 + stop)
            done = run.share_done()
            finished = done >= 1
            evaluates = finished or (progress.step and progress.step % config.eval_interval == 0)
            if evaluates and (progress.step > progress.evaluated or not progress.metrics):
                with uncompiled(run.compiled):
                    loggers.on_evaluation(*evaluate_run(run))
            due = progress.step % config.checkpoint_interval == 0 or progress.best_step == progress.step
            if finished or (due and progress.step):
                run.save(finished=finished)
            if finished:
                break

            factor = schedule_factor(config.schedule, progress.step, done, run.max_steps)
            set_learning_rate(run.optimizers, factor)
            with memory_named(run):
                loss, grad_norm = train_step(run, progress.step)
            progress.step += 1
            logged = progress.step % config.log_interval == 0 or progress.step == 1
            if logged or progress.step % config.max_skipped_steps == 0:
                run.check_numbers()
            if logged:
                loggers.on_step(loss=loss.item(), lr=factor * config.optimizer.lr, grad_norm=grad_norm.item())
            else:
                loggers.on_step()
        run.saver.finish()
    return progress.loss_to_beat


def evaluate_run(run: "Run") -> "tuple[Evaluation, str]":
    """Score the model on the validation split, remember which step was the best, and let the model write a sample."""
    from generation.generate import complete_text, decode_rate
    from training.evaluation import evaluate

    config, progress, block_size = run.config, run.progress, run.config.model.block_size
    windows = config.eval_batch_size or max(1, 4_096 // block_size)
    result = evaluate(run.forward, run.data, block_size, windows, run.autocast, run.ranks)
    progress.evaluated, progress.metrics = progress.step, result.figures
    if result.loss < progress.loss_to_beat:
        progress.best_loss, progress.best_step = result.loss, progress.step
    sample = ""
    if config.sample_tokens and not run.is_sharded:  # generating goes past FSDP, which gathers the shards
        if tokenizer := run.data.tokenizer:
            drawn = complete_text(run.model, tokenizer, config.sample_prompt, max_new_tokens=config.sample_tokens)
            try:
                sample = "".join(drawn)
            except FloatingPointError as error:  # check_numbers ends the run if it stays so
                log.warning("step %d: there is no sample (%s)", progress.step, error)
        if run.share_done() >= 1:
            run.decode_rate = decode_rate(run.model)
    return result, sample


def train_or_plan(config: TrainConfig) -> float | None:
    if config.dry_run:
        from training.plan import plan_run

        print(visible(plan_run(config)), flush=True)
        return None
    return train(config)


def main() -> None:
    run_train_command(train_or_plan)


if __name__ == "__main__":
    main()

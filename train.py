"""Train a GPT on text:  python train.py [NAME=VALUE ...]

As in  python train.py model=small data.path=notes.txt max_steps=2000
"""

import logging
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from cli.hydra_command import run_train_command
from common.settings import build
from common.text import command, flat, hydra_quoted, visible
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
    from pages.report import Report
    from training.device import fast_products, uncompiled  # torch takes a second to import: --help does without it
    from training.log import Loggers
    from training.optimizer import schedule_factor, set_learning_rate
    from training.start import failures_named, open_run
    from training.step import explain_out_of_memory, train_step

    config = build(TrainConfig, flat(asdict(config)))  # a Path is a text now, np.int64 an int, a dict a group
    with (
        open_run(config) as run,
        Loggers(run, Report) as loggers,
        failures_named(run),
        fast_products(run.device, run.dtype),
    ):
        progress = run.progress
        while True:
            if stop := int(run.ranks.max(run.signals.received)):
                run.save()
                run.saver.finish()
                run.ranks.broadcast(None)  # waits: torchrun ends the others when a rank has ended
                raise SystemExit(128 + stop)
            done = run.fraction_done()
            finished = done >= 1
            evaluates = finished or (progress.step and progress.step % config.eval_interval == 0)
            evaluates = evaluates and (progress.step > progress.evaluated or not progress.metrics)
            # An evaluation that fails loses nothing: the weights are saved before it, what it finds after it.
            if evaluates or (progress.step and progress.step % config.checkpoint_interval == 0):
                run.save()
            if evaluates:
                with uncompiled(run.compiled):
                    result, sample = evaluate_run(run, finished=finished)
                    with memory_for(run, "the measurement of the heads", ""):
                        loggers.on_evaluation(result, sample)
            if finished or (evaluates and run.saved == progress.step):
                run.save(finished=finished)
            if finished:
                break

            factor = schedule_factor(config.schedule, progress.step, done, run.max_steps)
            set_learning_rate(run.optimizers, factor)
            with explain_out_of_memory(run):
                loss, grad_norm = train_step(run, progress.step)
            progress.step += 1
            run.start_clock()
            logged = progress.step % config.log_interval == 0 or progress.step == 1
            if logged or progress.step % config.max_skipped_steps == 0:
                run.check_numbers()
            if logged:
                loggers.on_step(loss=loss.item(), lr=factor * config.optimizer.lr, grad_norm=grad_norm.item())
            else:
                loggers.on_step()
        run.saver.finish()
    return progress.result


def evaluate_run(run: "Run", *, finished: bool) -> "tuple[Evaluation, str]":
    """Score the model on the validation split, remember which step was the best, and let the model write a sample.

    The last evaluation of a run may score more targets. Steps are compared on those that all evaluations score.
    """
    from generation.generate import decode_rate, generate_text
    from training.evaluation import evaluate, targets_scored

    config, progress, block_size = run.config, run.progress, run.config.model.block_size
    windows = config.eval_batch_size or run.micro_batch_size
    score = partial(evaluate, run.forward, run.data, block_size, windows, run.autocast, run.ranks)
    between = targets_scored(config)
    most = targets_scored(config, progress.step) if finished else between
    with memory_for(run, "the evaluation", f"eval_batch_size={windows // 2}" if windows > 1 else ""):
        result = compared = score(most=most)
        read, read_before = (run.data.validation_tokens(block_size, targets) for targets in (most, between))
        if progress.metrics and read != read_before:
            compared = score(most=between)
    progress.evaluated, progress.metrics = progress.step, result.figures
    progress.compare(compared.loss, compared.tokens)
    sample = ""
    if config.sample_tokens and not run.is_sharded:  # generating goes past FSDP, which gathers the shards
        with memory_for(run, "the sample", "sample_tokens=0"):
            if tokenizer := run.data.tokenizer:
                drawn = generate_text(run.model, tokenizer, config.sample_prompt, max_new_tokens=config.sample_tokens)
                try:
                    sample = "".join(drawn)
                except FloatingPointError as error:  # check_numbers ends the run if it stays so
                    log.warning("step %d: there is no sample (%s)", progress.step, error)
            if finished:
                run.decode_rate = decode_rate(run.model)
    return result, sample


def memory_for(run: "Run", what: str, setting: str) -> AbstractContextManager[None]:
    """Turn running out of memory between two steps into a SettingsError that says what is saved and what to type."""
    from training.device import memory_errors

    step = run.progress.step
    saved = f"step {step} is saved" if run.saved == step else f"the checkpoints are in {run.directory / 'checkpoints'}"
    again = f"{command('train.py')} {hydra_quoted('resume', run.directory)} {setting}".rstrip()
    return memory_errors(f"{what} after step {step} needs more memory than there is", f"{saved}; go on with  {again}")


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

"""Train a GPT on text:  python train.py [NAME=VALUE ...]

As in  python train.py model=small data.path=notes.txt max_steps=2000
"""

from cli.hydra_command import run_train_command
from common.text import visible
from training.config import TrainConfig


def main() -> None:
    run_train_command(train_or_plan)


def train_or_plan(config: TrainConfig) -> float | None:
    from train import train, train_step  # the rest of this file, which imports torch
    from training.plan import plan_run

    if config.dry_run:
        print(visible(plan_run(train_step, config)), flush=True)
        return None
    return train(config)


# Here, not at the end: the imports below take a second, and --help, completion and mistakes in settings need none.
if __name__ == "__main__":
    main()
    raise SystemExit

import logging
from dataclasses import asdict

import torch
from torch import Tensor

from common.settings import build
from common.text import flat
from generation.generate import decode_rate, generate_text
from pages.report import Report
from runs.metrics import Evaluation
from training.device import fast_products, to_device, uncompiled
from training.distributed import gradient_norm, sync_gradients
from training.evaluation import evaluate, targets_scored
from training.failures import explain_failures, explain_out_of_memory, explain_out_of_memory_between_steps
from training.log import Loggers
from training.optimizer import schedule_factor, set_learning_rate
from training.run import Run
from training.start import open_run

log = logging.getLogger("tinygpt")


def train(config: TrainConfig) -> float:
    """Train one model and return its best validation loss in nats per token.

    Everything the run writes goes into config.run_dir; config itself is left as it is. A mistake in the settings
    raises a SettingsError that names it, before any long work. Ctrl-C and SIGTERM save and raise SystemExit.
    """
    config = build(TrainConfig, flat(asdict(config)))  # checked anew: a Path becomes a str, np.int64 an int
    with (
        open_run(config) as run,
        Loggers(run, Report) as loggers,
        explain_failures(run),
        fast_products(run.device, run.dtype),
    ):
        config = run.config
        progress = run.progress
        while True:
            # Stop on a signal, once all ranks know of it.
            if stop := int(run.ranks.max(run.signals.received)):
                run.save()
                run.saver.finish()
                run.ranks.broadcast(None)  # a barrier: torchrun kills the remaining ranks once one exits
                raise SystemExit(128 + stop)

            # Save and evaluate. The weights are saved before an evaluation, so that one that fails loses nothing, and
            # its result after it.
            done = run.fraction_done()
            finished = done >= 1
            evaluates = finished or (progress.step and progress.step % config.eval_interval == 0)
            evaluates = evaluates and (progress.step > progress.evaluated or not progress.metrics)
            if evaluates or (progress.step and progress.step % config.checkpoint_interval == 0):
                run.save()
            if evaluates:
                with uncompiled(run.compiled):
                    targets = targets_scored(config, progress.step if finished else None)
                    result = evaluate_run(run, targets)
                    remember_evaluation(run, result, targets)
                    sample = write_sample(run)
                    if finished:
                        time_decoder(run)
                    with explain_out_of_memory_between_steps(run, "the measurement of the heads"):
                        loggers.on_evaluation(result, sample)
            if finished or (evaluates and run.saved == progress.step):
                run.save(finished=finished)
            if finished:
                break

            # Train: one optimizer step at this step's learning rate.
            factor = schedule_factor(config.schedule, progress.step, done, run.max_steps)
            set_learning_rate(run.optimizers, factor)
            with explain_out_of_memory(run):
                loss, grad_norm = train_step(run, progress.step)
            progress.step += 1
            run.start_clock()

            # Log.
            is_logged = progress.step % config.log_interval == 0 or progress.step == 1
            if is_logged or progress.step % config.max_skipped_steps == 0:
                run.check_numbers()
            if is_logged:
                loggers.on_step(loss=loss.item(), lr=factor * config.optimizer.lr, grad_norm=grad_norm.item())
            else:
                loggers.on_step()
        run.saver.finish()
    return progress.result


def train_step(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Take one optimizer step on global batch `step`; return its loss and the norm of its gradient.

    The loss is in nats per target, the norm is that before clipping. Both are tensors on the device: nothing waits for
    it here. If either is not finite the step is skipped.
    """
    # Forward and backward, one micro-batch after the other: gradients add up.
    batch_loss = torch.zeros((), device=run.device)
    first_rows = run.micro_batches()
    for first in first_rows:
        batch = run.batch(step, first, first + first_rows.step)
        inputs, targets, doc_starts = (to_device(part, run.device) for part in batch)  # (B, T); doc_starts or None
        run.seed_dropout(step, first)
        with sync_gradients(run.ddp_model, last=first == first_rows[-1]):
            with run.autocast:
                # A sum over targets, divided by those of the whole batch: micro-batches change nothing.
                loss = run.ddp_model(inputs, targets, doc_starts=doc_starts) / run.targets_per_step
            # DDP and FSDP average over the ranks, but each rank's loss is already its part of the sum.
            run.scaler.scale(loss * run.ranks.size).backward()
        batch_loss += loss.detach()
    run.ranks.sum_(batch_loss)

    # Clip: the optimizers divide the gradient by this.
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)  # type: ignore[arg-type]  # it needs param_groups only
    grad_norm = gradient_norm(run.model)
    clip_divisor = (grad_norm / (run.config.grad_clip or float("inf"))).clamp(min=1)

    # Update the weights, unless loss or gradient is not finite.
    skip = ~(batch_loss + grad_norm).isfinite()
    for optimizer in run.optimizers:
        optimizer.step(skip, clip_divisor)
    run.scaler.update()
    run.count_skipped(skip)
    # DDP's gradients are views of the buckets that are sent: the next step's first micro-batches would fill others.
    run.model.zero_grad(set_to_none=run.ddp_model is run.model)
    return batch_loss, grad_norm


def evaluate_run(run: Run, targets: int) -> Evaluation:
    """Score the model on the validation split, on at most so many `targets`."""
    config = run.config
    windows = config.eval_batch_size or run.micro_batch_size
    smaller = f"eval_batch_size={windows // 2}" if windows > 1 else ""
    with explain_out_of_memory_between_steps(run, "the evaluation", smaller):
        return evaluate(run.ddp_model, run.data, config.model.block_size, windows, run.autocast, run.ranks, targets)


def remember_evaluation(run: Run, result: Evaluation, targets: int) -> None:
    """Record the result of an evaluation on `targets`, and the step if it is the best.

    The last evaluation of a run may score more targets. Steps are compared on those that all evaluations score.
    """
    progress = run.progress
    common = targets_scored(run.config)
    block_size = run.config.model.block_size
    scored, common_scored = (run.data.validation_tokens(block_size, most) for most in (targets, common))
    is_comparable = scored == common_scored or not progress.metrics
    compared = result if is_comparable else evaluate_run(run, common)
    progress.evaluated = progress.step
    progress.metrics = result.figures
    progress.compare(compared.loss, compared.tokens)


def write_sample(run: Run) -> str:
    """Return how the model continues sample_prompt; "" if it is not asked to, or cannot."""
    config = run.config
    if not run.generates or not run.data.tokenizer:
        return ""
    with explain_out_of_memory_between_steps(run, "the sample", "sample_tokens=0"):
        text = generate_text(run.model, run.data.tokenizer, config.sample_prompt, max_new_tokens=config.sample_tokens)
        try:
            return "".join(text)
        except FloatingPointError as error:  # check_numbers ends the run if the weights stay like this
            log.warning("step %d: there is no sample (%s)", run.progress.step, error)
            return ""


def time_decoder(run: Run) -> None:
    """Measure how fast the finished model generates, if samples are asked for."""
    if run.generates:
        with explain_out_of_memory_between_steps(run, "the sample", "sample_tokens=0"):
            run.decode_rate = decode_rate(run.model)

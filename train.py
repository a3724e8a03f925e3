"""Train a GPT on text:  python train.py [NAME=VALUE ...]

python train.py model=small data.path=notes.txt max_steps=2000
python train.py -m model.n_head=2,4 seed=1,2   # a sweep: every combination of the values
"""

# Run as a script, this file reads the settings first: --help, completion and mistakes in settings do not wait for the
# imports below, which take a second. run_train_command() then imports it as the module `train`, and calls train().
if __name__ == "__main__":
    from cli.hydra_command import run_train_command

    run_train_command()
    raise SystemExit

import logging
from dataclasses import asdict

import torch
from torch import Tensor

from common.settings import build
from common.text import flat
from generation.generate import generate_text
from generation.speed import decode_rate
from pages.report import Report
from runs.metrics import Evaluation
from training.config import TrainConfig
from training.device import fast_products, run_eagerly, to_device
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
            signal = int(run.ranks.max(run.signals.received))
            if signal:
                run.save()
                run.checkpointer.finish()
                run.ranks.broadcast(None)  # a barrier: torchrun kills the remaining ranks once one exits
                raise SystemExit(128 + signal)

            # Save and evaluate. An evaluation that fails loses no step, for the weights are saved before it. Its
            # result is saved after it: then only meta.json is new.
            done = run.fraction_done()
            finished = done >= 1
            already_evaluated = bool(progress.metrics) and progress.evaluated == progress.step  # of a resumed run
            evaluates = finished or is_due(progress.step, config.eval_interval)
            evaluates = evaluates and not already_evaluated
            if evaluates or is_due(progress.step, config.checkpoint_interval):
                can_save = run.save()
            if evaluates:
                validate(run, loggers, finished)
            if finished or (evaluates and can_save):  # save() refuses weights that are not finite
                run.save(finished=finished)
            if finished:
                break

            # Train: one optimizer step at this step's learning rate.
            factor = schedule_factor(config.schedule, progress.step, done, run.max_steps)
            set_learning_rate(run.optimizers, factor)
            with explain_out_of_memory(run):
                loss, grad_norm = train_step(run, progress.step)
            progress.step += 1
            run.exclude_compile_time()

            # Read the loss back, which waits for the device, only where it is logged. Skipped steps are counted more
            # often, so that no more than max_skipped_steps pass unseen.
            is_logged = progress.step == 1 or is_due(progress.step, config.log_interval)
            if is_logged or is_due(progress.step, config.max_skipped_steps):
                run.check_numbers()
            if is_logged:
                loggers.on_step(loss=loss.item(), lr=factor * config.optimizer.lr, grad_norm=grad_norm.item())
            else:
                loggers.on_step()
        run.checkpointer.finish()
    return progress.result


def is_due(step: int, interval: int) -> bool:
    """Return whether `step` ends an interval; step 0 ends none."""
    return step > 0 and step % interval == 0


def train_step(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Take one optimizer step on global batch `step`; return its loss and its gradient's norm.

    The loss is in nats per target, the norm is that before clipping. Both are tensors on the device, for which nothing
    waits here. If either is not finite the step is skipped.
    """
    # Forward and backward, one micro-batch after the other: gradients add up.
    batch_loss = torch.zeros((), device=run.device)
    first_rows = run.micro_batches()
    for first in first_rows:
        batch = run.batch(step, first, first + run.micro_batch_size)
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

    # Clip: our optimizers divide the gradient by clip_divisor. In fp16 the loss was scaled; unscale_() takes that back.
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)  # type: ignore[arg-type]  # it needs param_groups only
    grad_norm = gradient_norm(run.model)
    clip_divisor = (grad_norm / (run.config.grad_clip or float("inf"))).clamp(min=1)

    # Update the weights, unless loss or gradient is not finite. Our optimizers take a flag on the device, where
    # scaler.step() would wait for it. scaler.update() lowers the next step's scale if unscale_() met an infinity.
    skip = ~(batch_loss + grad_norm).isfinite()
    for optimizer in run.optimizers:
        optimizer.step(skip, clip_divisor)
    run.scaler.update()
    run.count_skipped(skip)
    # DDP sums gradients in buckets, of which .grad are views. They are zeroed in place: after None, micro-batches that
    # are not synchronised would make gradients outside the buckets.
    run.model.zero_grad(set_to_none=run.ddp_model is run.model)
    return batch_loss, grad_norm


def validate(run: Run, loggers: Loggers, finished: bool) -> None:
    """Evaluate the model at this step, write a sample, and log both."""
    targets = targets_scored(run.config, run.progress.step if finished else None)
    with run_eagerly(run.compiled):
        result = evaluate_run(run, targets)
        record_evaluation(run, result, targets)
        sample = write_sample(run)
        if finished:
            time_decoder(run)
        with explain_out_of_memory_between_steps(run, "the measurement of the heads"):
            loggers.on_evaluation(result, sample)


def evaluate_run(run: Run, targets: int) -> Evaluation:
    """Score the model on the validation split, on at most so many `targets`."""
    config = run.config
    windows = config.eval_batch_size or run.micro_batch_size
    smaller = f"eval_batch_size={windows // 2}" if windows > 1 else ""
    with explain_out_of_memory_between_steps(run, "the evaluation", smaller):
        return evaluate(run.ddp_model, run.data, config.model.block_size, windows, run.autocast, run.ranks, targets)


def record_evaluation(run: Run, result: Evaluation, targets: int) -> None:
    """Record the result of an evaluation on `targets`, and the step if it is the best.

    The last evaluation of a run may score more targets than those before it. To compare it with them, the model is
    evaluated again on the smaller number.
    """
    progress = run.progress
    block_size = run.config.model.block_size
    usual = targets_scored(run.config)
    scores_more = run.data.validation_tokens(block_size, targets) > run.data.validation_tokens(block_size, usual)
    is_first = not progress.metrics
    compared = evaluate_run(run, usual) if scores_more and not is_first else result
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

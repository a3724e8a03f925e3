"""Train a GPT on text:  python train.py [NAME=VALUE ...]

python train.py model=small data.path=notes.txt max_steps=2000
python train.py -m model.n_head=2,4 seed=1,2   # a sweep: every combination of the values
"""

# Read the settings before the slow imports, so that --help and errors of settings are immediate.
# run_train_command() then imports this file as the module `train`, and calls train().
if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P leaves it out, for another clone perhaps
    from cli.hydra_command import run_train_command

    run_train_command()
    raise SystemExit

import logging

import torch
from torch import Tensor

from generation.generate import generate_text
from generation.speed import decode_rate
from pages.report import Report
from runs.metrics import Evaluation
from training.config import TrainConfig
from training.device import batch_to_device, fast_products, run_eagerly
from training.distributed import gradient_norm, sync_gradients
from training.evaluation import evaluate, evaluation_tokens
from training.failures import explain_failures
from training.log import Loggers
from training.optimizer import schedule_factor, set_learning_rate
from training.run import Run, is_due
from training.start import open_run, refuse_learned_leak

log = logging.getLogger("tinygpt")


def train(config: TrainConfig, threads: int | None = None) -> float:
    """Train one model and return its best validation loss in nats per token.

    Everything the run writes goes into config.run_dir; config itself is left as it is. A mistake in the settings
    raises a SettingsError that names it, before any long work. Ctrl-C and SIGTERM save and raise SystemExit.

    threads: those of a new run on a CPU, instead of as many as other programs leave.
    """
    with (
        open_run(config, threads) as run,  # data, model, optimizers and progress, new or resumed
        Loggers(run, Report) as loggers,  # the terminal, metrics.jsonl, the page (which training/ does not import)
        explain_failures(run),  # errors of the device, as sentences
        fast_products(run.device, run.dtype),  # the fastest float32 products that are exact enough
    ):
        config = run.config  # with the text's vocabulary
        progress = run.progress  # of runs/checkpoint.py: the numbers that a checkpoint keeps, such as the step
        while True:
            run.exit_on_signal()  # after Ctrl-C or SIGTERM; it saves first
            done = run.fraction_done()
            finished = done >= 1 or run.is_out_of_patience

            # Evaluate the model and save it, or only save it. A resumed run may begin at a step that it has evaluated.
            due = finished or progress.is_outdated or is_due(progress.step, config.eval_interval)
            if due and not progress.is_evaluated:
                finished = validate(run, loggers, finished)
            elif finished or is_due(progress.step, config.checkpoint_interval):
                run.save(finished=finished)
            if finished:
                break

            # Take a step at the learning rate of the schedule.
            factor = schedule_factor(config.schedule, progress.step, done, run.max_steps)
            set_learning_rate(run.optimizers, factor)
            loss, grad_norm = train_step(run, progress.step)
            run.after_step()

            # Log its loss.
            loggers.on_step(loss, grad_norm, lr=factor * config.optimizer.lr)
        run.checkpointer.finish()
    return progress.result


def train_step(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Take one optimizer step on global batch `step`; return its loss and its gradient's norm.

    In float32, one process and one micro-batch of a text it comes to this:

        inputs, targets, doc_starts = batch_to_device(data.train_batch(step, 0, batch_size), device)
        loss = model.loss(inputs, targets, doc_starts=doc_starts) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    The loss is in nats per target, the norm is that before clipping. Both stay on the device: nothing here waits for
    it, but on a Mac AdamW. If either is not finite, weights and optimizers stay as they are.
    """
    # Forward and backward, one micro-batch after the other: gradients add up.
    step_loss = torch.zeros((), device=run.device)
    starts = run.micro_batch_starts()
    for start in starts:
        batch = run.data.train_batch(step, start, start + run.micro_batch_size)
        # (B, T) each. doc_starts says where each token's document begins; it is None if documents are not masked.
        inputs, targets, doc_starts = batch_to_device(batch, run.device)
        run.seed_dropout(step, start)
        with sync_gradients(run.training_loss, last=(start == starts[-1])):
            with run.autocast:
                # Divide by the targets of the global batch, under torchrun by a rank's share of them: DDP averages over
                # the ranks. So the micro-batch size changes dropout and roundings alone.
                loss = run.training_loss(inputs, targets, doc_starts=doc_starts) / run.loss_divisor
            run.scaler.scale(loss).backward()  # fp16 needs a larger loss, for its gradients not to vanish
        step_loss += loss.detach()
    step_loss = run.ranks.mean_(step_loss)

    # Update the weights.
    grad_norm = clip_and_update(run, step_loss)

    # Set the gradients to None. But DDP's are views of its buckets, and None would detach them: zero them in place.
    run.model.zero_grad(set_to_none=not run.ranks.launched)
    return step_loss, grad_norm


def clip_and_update(run: Run, loss: Tensor) -> Tensor:
    """Clip the gradients and move the weights by them, unless loss or gradient is not finite.

    Returns the gradient's norm before clipping. torch's own order, clip_grad_norm_() and scaler.step(), would wait for
    the device: it needs to know whether a number is finite. As torch's fused optimizers do, ours take tensors instead:
    grad_scale, by which they divide the gradients, and the flag found_inf, with which they change nothing. An optimizer
    that ignores both is neither clipped nor skipped: optimizer.py has the contract.
    """
    # The norm. In fp16 unscale_() first undoes the loss's scale, and notes for update(), below, if it met an infinity.
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)  # type: ignore[arg-type]  # it needs param_groups only
    grad_norm = gradient_norm(run.model)

    # Clip and update.
    largest_norm = run.config.grad_clip or float("inf")  # grad_clip=0: no clipping
    skip = ~(loss + grad_norm).isfinite()
    for optimizer in run.optimizers:
        # A gradient of a larger norm is divided by norm / largest_norm, and then has the largest.
        optimizer.grad_scale = (grad_norm / largest_norm).clamp(min=1)
        optimizer.found_inf = skip.float()
        optimizer.step()
    run.scaler.update()  # lowers fp16's scale if unscale_() met an infinity
    run.count_skipped(skip)
    return grad_norm


def validate(run: Run, loggers: Loggers, finished: bool) -> bool:
    """Evaluate the model, write a sample, log both and save; at the end also measure decoding.

    finished: whether the run is at its last step. Returns whether it ends here, as it may for want of a better loss.
    """
    # Save the weights before the evaluation: if it fails, no step is lost. A thread writes them meanwhile.
    run.save()
    max_tokens = evaluation_tokens(run.config, run.progress.step if finished else None)
    with run_eagerly(run.compiled):  # each of the many shapes would compile
        refuse_learned_leak(run)  # a person's attention (code=FILE) may have learned to see later tokens
        result = evaluate_run(run, max_tokens)
        is_saved = run.is_saved()  # the thread may have failed
        record_evaluation(run, result, max_tokens, is_saved)
        finished = finished or run.is_out_of_patience
        sample = ""
        if run.ranks.is_first:  # which alone logs them
            sample = write_sample(run)
            if finished and run.config.sample_tokens:
                with run.memory_errors_of("the measurement of decoding", "sample_tokens=0"):
                    run.decode_rate = decode_rate(run.model)
        with run.memory_errors_of("the measurement of the heads"):  # by the loggers, for the page
            loggers.on_evaluation(result, sample)
    # Save the result: save() writes meta.json alone if this step's weights are on disk. At the last step it is called
    # in any case, and ends the run with the reason if they cannot be.
    if is_saved or finished:
        run.save(finished=finished)
    return finished


def evaluate_run(run: Run, max_tokens: int) -> Evaluation:
    """Score the model on at most `max_tokens` inputs of the validation split."""
    batch_size = run.config.eval_batch_size or run.micro_batch_size
    with run.memory_errors_of("the evaluation", f"eval_batch_size={batch_size // 2}" if batch_size > 1 else ""):
        return evaluate(run.model, run.data, batch_size, run.autocast, run.ranks, max_tokens)


def record_evaluation(run: Run, result: Evaluation, max_tokens: int, is_saved: bool) -> None:
    """Record the result of an evaluation on `max_tokens`, and the step if it is the best.

    is_saved: whether this step has a checkpoint; the best step has one.
    """
    progress = run.progress
    # The last evaluation may read more tokens than the earlier ones. To be compared with them, repeat it on as many.
    comparable = result
    usual = evaluation_tokens(run.config)
    if progress.metrics and run.data.validation_tokens(max_tokens) > run.data.validation_tokens(usual):
        comparable = evaluate_run(run, usual)
    progress.evaluated = progress.step
    progress.metrics = result.figures
    if is_saved:
        progress.compare(comparable.loss, comparable.tokens)


def write_sample(run: Run) -> str:
    """Return how the model continues sample_prompt; "" if it is not asked to, or cannot."""
    config = run.config
    if not config.sample_tokens or not run.data.tokenizer:
        return ""
    try:
        with run.memory_errors_of("the sample", "sample_tokens=0"):
            prompt = config.sample_prompt
            text = generate_text(run.model, run.data.tokenizer, prompt, max_new_tokens=config.sample_tokens)
            return "".join(text)
    except FloatingPointError as error:  # check_skipped_steps() ends the run if the weights stay like this
        log.warning("step %d: there is no sample (%s)", run.progress.step, error)
        return ""

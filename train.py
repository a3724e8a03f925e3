"""Train a GPT on text:  python train.py [NAME=VALUE ...]

python train.py model=small data.path=notes.txt max_steps=2000
python train.py -m model.n_head=2,4 seed=1,2   # a sweep: every combination of the values
"""

# Read the settings before the slow imports, so that --help, completion and errors of settings are immediate.
# run_train_command() then imports this file as the module `train`, and calls train().
if __name__ == "__main__":
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
from training.device import fast_products, run_eagerly, to_device
from training.distributed import gradient_norm, sync_gradients
from training.evaluation import evaluate, evaluation_tokens
from training.failures import explain_failures
from training.log import Loggers
from training.optimizer import schedule_factor, set_learning_rate
from training.run import Run
from training.start import open_run, try_trained

log = logging.getLogger("tinygpt")


def train(config: TrainConfig) -> float:
    """Train one model and return its best validation loss in nats per token.

    Everything the run writes goes into config.run_dir; config itself is left as it is. A mistake in the settings
    raises a SettingsError that names it, before any long work. Ctrl-C and SIGTERM save and raise SystemExit.
    """
    with (
        open_run(config) as run,  # data, model, optimizers and progress, new or resumed
        Loggers(run, Report) as loggers,  # the terminal, metrics.jsonl, the page
        explain_failures(run),  # errors of the device, as sentences
        fast_products(run.device, run.dtype),  # the fastest float32 products that are exact enough
    ):
        config = run.config  # with the text's vocabulary, and without auto
        progress = run.progress
        while True:
            run.exit_on_signal()  # after Ctrl-C or SIGTERM; it saves first

            # Once in a while and at the end: evaluate and save, or only save. A resumed run may begin at a step that
            # it has evaluated.
            done = run.fraction_done()
            finished = done >= 1 or run.is_out_of_patience
            if not progress.is_evaluated and (finished or is_due(progress.step, config.eval_interval)):
                finished = validate(run, loggers, finished)
            elif finished or is_due(progress.step, config.checkpoint_interval):
                run.save(finished=finished)
            if finished:
                break

            # One optimizer step at this step's learning rate. If memory runs out, the error names the activity.
            factor = schedule_factor(config.schedule, progress.step, done, run.max_steps)
            set_learning_rate(run.optimizers, factor)
            run.note_activity(f"micro_batch_size={run.micro_batch_size}", run.smaller_micro_batch())
            loss, grad_norm = train_step(run, progress.step)
            progress.step += 1
            run.exclude_compile_time()  # of a first step, which max_minutes does not count

            # Log. Reading a number waits for the device. So read the loss only if it is logged, and the count of
            # skipped steps only then or after max_skipped_steps.
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
    """Return whether `step` is a positive multiple of `interval`."""
    return step > 0 and step % interval == 0


def train_step(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Take one optimizer step on global batch `step`; return its loss and its gradient's norm.

    The loss is in nats per target, the norm is that before clipping. Both stay on the device: nothing here waits for
    it. If either is not finite, the step is skipped.
    """
    # Forward and backward, one micro-batch after the other: gradients add up.
    batch_loss = torch.zeros((), device=run.device)
    starts = run.micro_batch_starts()
    for start in starts:
        batch = run.data.train_batch(step, start, start + run.micro_batch_size)
        # (B, T) each. doc_starts says where each token's document begins; it is None if documents are not masked.
        inputs, targets, doc_starts = (to_device(part, run.device) for part in batch)
        run.seed_dropout(step, start)
        with sync_gradients(run.ddp_model, last=(start == starts[-1])):
            with run.autocast:
                # Divide by the targets of the global batch: the micro-batch size changes dropout and roundings alone.
                loss = run.ddp_model(inputs, targets, doc_starts=doc_starts) / run.targets_per_step
            # DDP averages gradients over the ranks; times the number of ranks, the mean is the sum.
            run.scaler.scale(loss * run.ranks.size).backward()
        batch_loss += loss.detach()
    run.ranks.sum_(batch_loss)

    # Clip, by a number that the optimizers divide the gradient by. In fp16 unscale_() first undoes the loss's scale.
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)  # type: ignore[arg-type]  # it needs param_groups only
    grad_norm = gradient_norm(run.model)
    largest_norm = run.config.grad_clip or float("inf")  # grad_clip=0: no clipping
    clip_divisor = (grad_norm / largest_norm).clamp(min=1)

    # Update the weights, unless loss or gradient is not finite. The optimizers take that flag as a tensor, so that
    # nothing waits for the device, as scaler.step() would. update() lowers the scale if unscale_() met an infinity.
    skip = ~(batch_loss + grad_norm).isfinite()
    for optimizer in run.optimizers:
        optimizer.step(skip, clip_divisor)
    run.scaler.update()
    run.count_skipped(skip)

    # Set the gradients to None. But DDP's are views of its buckets, and None would detach them: zero them in place.
    run.model.zero_grad(set_to_none=run.ddp_model is run.model)
    return batch_loss, grad_norm


def validate(run: Run, loggers: Loggers, finished: bool) -> bool:
    """Evaluate the model, write a sample, log both and save; at the end also measure decoding.

    finished: whether the run is at its last step. Returns whether it ends here, as it may for want of a better loss.
    """
    # Save before the evaluation too: if it fails, no step is lost.
    is_saved = run.save()  # False if the run diverges
    max_tokens = evaluation_tokens(run.config, run.progress.step if finished else None)
    with run_eagerly(run.compiled):  # each of the many shapes would compile
        try_trained(run)
        result = evaluate_run(run, max_tokens)
        record_evaluation(run, result, max_tokens)
        finished = finished or run.is_out_of_patience
        sample = write_sample(run)
        if finished and run.config.sample_tokens:
            run.note_activity("the measurement of decoding", "sample_tokens=0")
            run.decode_rate = decode_rate(run.model)
        run.note_activity("the measurement of the heads")  # by the loggers, for the page
        loggers.on_evaluation(result, sample)
    # Save the result. The checkpoint has the weights already: only its meta.json is written.
    if is_saved or finished:
        run.save(finished=finished)
    return finished


def evaluate_run(run: Run, max_tokens: int) -> Evaluation:
    """Score the model on at most `max_tokens` inputs of the validation split."""
    batch_size = run.config.eval_batch_size or run.micro_batch_size
    run.note_activity("the evaluation", f"eval_batch_size={batch_size // 2}" if batch_size > 1 else "")
    return evaluate(run.ddp_model, run.data, batch_size, run.autocast, run.ranks, max_tokens)


def record_evaluation(run: Run, result: Evaluation, max_tokens: int) -> None:
    """Record the result of an evaluation on at most `max_tokens`, and the step if it is the best."""
    progress = run.progress
    # The last evaluation may read more than the earlier ones: to compare them, evaluate as much as they did.
    compared = result
    usual = evaluation_tokens(run.config)
    if progress.metrics and run.data.validation_tokens(max_tokens) > run.data.validation_tokens(usual):
        compared = evaluate_run(run, usual)
    progress.evaluated = progress.step
    progress.metrics = result.figures
    progress.compare(compared.loss, compared.tokens)


def write_sample(run: Run) -> str:
    """Return how the model continues sample_prompt; "" if it is not asked to, or cannot."""
    config = run.config
    if not run.config.sample_tokens or not run.data.tokenizer:
        return ""
    run.note_activity("the sample", "sample_tokens=0")
    text = generate_text(run.model, run.data.tokenizer, config.sample_prompt, max_new_tokens=config.sample_tokens)
    try:
        return "".join(text)
    except FloatingPointError as error:  # check_numbers ends the run if the weights stay like this
        log.warning("step %d: there is no sample (%s)", run.progress.step, error)
        return ""

"""Train a GPT on text:  python train.py

Every setting is in conf/train.yaml and can be overridden:  python train.py model=small data.path=notes.txt
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from training.cli import command
from training.config import TrainConfig

if TYPE_CHECKING:  # torch is imported where it is used: --help and shell completion do not wait for it
    from torch import Tensor

    from training.run import Run

log = logging.getLogger("tinygpt")


def train(config: TrainConfig) -> float:
    """Train one model; returns the best validation loss in nats per token.

    Everything the run writes goes into config.run_dir. A mistake in the settings raises a ValueError
    that names it, before any long work.
    """
    from training.evaluation import evaluate
    from training.monitor import Monitor
    from training.optimizer import schedule_factor, set_learning_rate
    from training.run import start_run
    from training.sampling import continue_text

    run = start_run(config)
    log.info("%s", run.description())
    step, best, started = 0, float("inf"), time.perf_counter()

    with Monitor(config, run.directory) as monitor:
        while True:
            progress = step / config.max_steps
            if config.max_minutes is not None:
                progress = max(progress, (time.perf_counter() - started) / 60 / config.max_minutes)
            finished = progress >= 1

            if finished or (step > 0 and step % config.eval_interval == 0):
                result = evaluate(
                    run.forward,
                    run.data.val,
                    block_size=config.model.block_size,
                    batch_size=config.eval_batch_size,
                    autocast=run.autocast,
                )
                sample = continue_text(
                    run.model, run.data.tokenizer, config.sample_prompt, max_new_tokens=config.sample_tokens
                )
                monitor.evaluation(step, result, "".join(sample))
                if result.loss < best:
                    best = result.loss
                    run.save(step, "last", "best", val_loss=result.loss, val_bpb=result.bpb)
            if finished or (step > 0 and step % config.checkpoint_interval == 0):
                run.save(step, "last")
            if finished:
                break

            factor = schedule_factor(config.schedule, step, progress)
            set_learning_rate(run.optimizers, factor)
            loss, grad_norm = take_step(run, step)
            step += 1
            if step % config.log_interval == 0 or step == 1:
                monitor.step(step, loss=loss.item(), lr=factor * config.optimizer.lr, grad_norm=grad_norm.item())

        monitor.finish()
    log.info("%s", run.farewell(best))
    return best


def take_step(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Move the weights once, by the gradient of the global batch of `step`.

    Returns the batch's loss in nats per token and the gradient's norm before clipping, as tensors on
    the device, so that nothing waits for them here.
    """
    import torch
    import torch.nn.functional as F

    config = run.config
    tokens_in_batch = config.batch_size * config.model.block_size
    total_loss = torch.zeros((), device=run.device)

    for first in range(0, config.batch_size, config.micro_batch_size):
        windows = run.batches.batch(step, first, first + config.micro_batch_size)  # (B, T + 1)
        windows = torch.from_numpy(windows).to(run.device)
        inputs, targets = windows[:, :-1], windows[:, 1:]
        with run.autocast:
            logits = run.forward(inputs)  # (B, T, V)
        # A sum over tokens, divided by the tokens of the whole batch: micro-batches change nothing.
        nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        loss = nats / tokens_in_batch
        loss.backward()
        total_loss += loss.detach()

    grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.grad_clip or float("inf"))
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total_loss, grad_norm


@command("train", TrainConfig)
def main(config: TrainConfig) -> float:
    return train(config)


if __name__ == "__main__":
    main()

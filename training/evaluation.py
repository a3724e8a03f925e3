"""How well a model predicts a text: nats per token, perplexity, bits per byte."""

import itertools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from console import progress_bar
from data.prepare import PreparedData
from model.gpt import GPT
from model.loss import UNSCORED
from runs.metrics import Evaluation
from training.distributed import Ranks

if TYPE_CHECKING:
    from data.tasks import Data

ALONE = Ranks()
MEASURED_TOKENS = 512  # enough to tell heads apart, for a hundredth of an evaluation's time
SCORED_TOKENS = 1 << 19
"""Of a longer validation text only so many tokens are scored, the same at every evaluation; eval.py scores all."""


@torch.no_grad()
def evaluate(
    model: nn.Module, data: "Data", block_size: int, batch_size: int, autocast: torch.autocast, ranks: Ranks = ALONE
) -> Evaluation:
    """Score the validation text, in windows of block_size that cover it or are spread over it evenly, or a task.

    With several ranks each scores a share of the batches, and all return the figures of their sum. The model
    stays in its mode (train or eval).
    """
    device = next(model.parameters()).device
    was_training, is_task = model.training, not isinstance(data, PreparedData)
    model.eval()
    lengths = torch.from_numpy(data.token_bytes())
    figures, sizes = [], []  # of each target: its nats and, in a task, whether it is the likeliest; its bytes
    batches = data.held_out(block_size, batch_size, SCORED_TOKENS)
    total = data.held_out_tokens(block_size, SCORED_TOKENS)
    bar = progress_bar(
        ranks.is_first, total=total, desc="evaluating", unit="token", unit_scale=True, delay=2, leave=False
    )
    while turn := list(itertools.islice(batches, ranks.size)):
        # A rank without a batch runs another's: FSDP gathers weights from all ranks, so none may sit out.
        own = turn[min(ranks.rank, len(turn) - 1)]
        inputs, targets = torch.from_numpy(own.inputs).to(device), torch.from_numpy(own.targets).to(device).flatten()
        starts = None if own.starts is None else torch.from_numpy(own.starts).to(device)
        with autocast:
            logits = model(inputs, starts=starts).flatten(0, 1)
        scored = targets != UNSCORED
        nats = F.cross_entropy(logits.float(), targets, ignore_index=UNSCORED, reduction="none")[scored]
        right = [(logits.argmax(-1) == targets)[scored].to(nats)] if is_task else []
        found = torch.stack([nats, *right])
        for number, batch in enumerate(turn):
            wanted = torch.from_numpy(batch.targets[batch.targets != UNSCORED])
            figures.append(found if number == ranks.rank else found.new_zeros(len(found), len(wanted)))
            sizes.append(lengths[wanted])
            bar.update(batch.inputs.size)
    bar.close()
    model.train(was_training)
    all_nats, *hits = ranks.sum_(torch.cat(figures, dim=1)).cpu()
    return Evaluation.of_tokens(all_nats.numpy(), torch.cat(sizes).numpy(), hits[0].mean().item() if hits else None)


def first_windows(model: GPT, data: "Data") -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"] | None]:
    """Return the beginning of what evaluations read, in windows of up to block_size tokens, MEASURED_TOKENS in total,
    and where in them documents begin, if they are kept apart."""
    block_size = model.config.block_size
    T = min(block_size, MEASURED_TOKENS)
    batch = next(data.held_out(block_size, MEASURED_TOKENS // T))
    device, starts = next(model.parameters()).device, batch.starts
    tokens = torch.from_numpy(batch.inputs[:, :T]).to(device)
    return tokens, None if starts is None else torch.from_numpy(starts[:, :T]).to(device)

"""How well a model predicts a text: nats per token, perplexity, bits per byte."""

import itertools
from multiprocessing import parent_process

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn
from tqdm import tqdm

from data.batches import evaluation_batches
from data.prepare import PreparedData
from data.tokenizer import token_bytes
from model.gpt import GPT
from runs.metrics import Evaluation
from training.distributed import Ranks

ALONE = Ranks()
MEASURED_TOKENS = 512  # enough to tell heads apart, for a hundredth of an evaluation's time
SCORED_TOKENS = 1 << 19
"""Of a longer validation text only so many tokens are scored, the same at every evaluation; evaluate.py scores all."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: PreparedData,
    block_size: int,
    batch_size: int,
    autocast: torch.autocast,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Score the validation text, in windows of block_size that cover it or are spread over it evenly.

    With several ranks each scores a share of the batches, and all return the figures of their sum. The model
    stays in its mode (train or eval).
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    lengths = torch.from_numpy(token_bytes(data.tokenizer))
    nats, sizes = [], []  # of each target: its surprise, by this rank, and its bytes
    batches = evaluation_batches(data.val, block_size=block_size, batch_size=batch_size, most=SCORED_TOKENS)
    off = not ranks.is_first or parent_process() is not None or None  # None: no bar unless on a terminal
    total = min(SCORED_TOKENS, len(data.val))
    bar = tqdm(total=total, desc="evaluating", unit="token", unit_scale=True, delay=2, leave=False, disable=off)
    while turn := [torch.from_numpy(rows) for rows in itertools.islice(batches, ranks.size)]:
        own = min(ranks.rank, len(turn) - 1)
        # A rank without a batch runs another's: FSDP gathers weights from all ranks, so none may sit out.
        windows, starts = turn[own].to(device), data.starts(turn[own][:, :-1].numpy())
        with autocast:
            logits = model(windows[:, :-1], starts=None if starts is None else torch.from_numpy(starts).to(device))
        surprise = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="none")
        for number, targets in enumerate(rows[:, 1:].flatten() for rows in turn):
            nats.append(surprise if number == ranks.rank else surprise.new_zeros(len(targets)))
            sizes.append(lengths[targets])
            bar.update(len(targets))
    bar.close()
    model.train(was_training)
    return Evaluation.of_tokens(ranks.sum_(torch.cat(nats)).cpu().numpy(), torch.cat(sizes).numpy())


def first_windows(model: GPT, data: PreparedData) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"] | None]:
    """Return the beginning of the validation text, in windows of up to block_size tokens, MEASURED_TOKENS in total,
    and where in them documents begin, if they are kept apart."""
    T = min(model.config.block_size, MEASURED_TOKENS)
    windows = next(evaluation_batches(data.val, block_size=T, batch_size=MEASURED_TOKENS // T))[:, :-1]
    device, starts = next(model.parameters()).device, data.starts(windows)
    return torch.from_numpy(windows).to(device), None if starts is None else torch.from_numpy(starts).to(device)

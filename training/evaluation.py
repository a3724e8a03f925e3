"""How well a model predicts a text: nats per token, perplexity, bits per byte."""

import itertools

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from data.batches import evaluation_batches
from data.shards import Tokens
from model.gpt import GPT
from runs.metrics import Evaluation
from training.distributed import Ranks

ALONE = Ranks()
MEASURED_TOKENS = 512  # enough to tell heads apart, for a hundredth of an evaluation's time


@torch.no_grad()
def evaluate(
    model: nn.Module, tokens: Tokens, block_size: int, batch_size: int, autocast: torch.autocast, ranks: Ranks = ALONE
) -> Evaluation:
    """Score every token of a split once, in windows of block_size; the same figures every time.

    With several ranks each scores a share of the batches, and all return the figures of their sum. The model
    stays in its mode (train or eval).
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    # Nats and targets in one tensor, so that the ranks sum them at once.
    sums = torch.zeros(2, dtype=torch.float64, device=device if device.type != "mps" else "cpu")
    batches = evaluation_batches(tokens, block_size=block_size, batch_size=batch_size)
    while turn := list(itertools.islice(batches, ranks.size)):
        has_one = ranks.rank < len(turn)
        # A rank without a batch runs another's: FSDP gathers weights from all ranks, so none may sit out.
        windows = torch.from_numpy(turn[ranks.rank if has_one else 0]).to(device)
        inputs, targets = windows[:, :-1], windows[:, 1:]
        with autocast:
            logits = model(inputs)
        if has_one:
            nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            sums += torch.stack([nats.double(), nats.new_tensor(targets.numel()).double()]).to(sums.device)
    model.train(was_training)
    summed, scored = ranks.sum_(sums).tolist()
    return Evaluation(summed, int(scored), tokens.text_bytes)


def first_windows(model: GPT, tokens: Tokens) -> Int[Tensor, "B T"]:
    """Return the beginning of a split, in windows of up to block_size tokens, MEASURED_TOKENS in total."""
    T = min(model.config.block_size, MEASURED_TOKENS)
    windows = next(evaluation_batches(tokens, block_size=T, batch_size=MEASURED_TOKENS // T))
    return torch.from_numpy(windows[:, :-1]).to(next(model.parameters()).device)

"""How well a model predicts a text: nats per token, perplexity, bits per byte."""

import itertools
from multiprocessing import parent_process

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn
from tqdm import tqdm

from data.batches import evaluation_batches
from data.prepare import PreparedData
from data.shards import Tokens
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
    mark = data.tokenizer.eot_token
    begins, lengths = data.val.places_of(mark), token_bytes(data.tokenizer)
    sums = np.zeros((3, max(1, len(begins))))  # of each document: nats, targets, bytes
    batches = evaluation_batches(data.val, block_size=block_size, batch_size=batch_size, most=SCORED_TOKENS)
    off = not ranks.is_first or parent_process() is not None or None  # None: no bar unless on a terminal
    total = min(SCORED_TOKENS, len(data.val))
    bar = tqdm(total=total, desc="evaluating", unit="token", unit_scale=True, delay=2, leave=False, disable=off)
    while turn := list(itertools.islice(batches, ranks.size)):
        has_one = ranks.rank < len(turn)
        # A rank without a batch runs another's: FSDP gathers weights from all ranks, so none may sit out.
        places, rows = turn[ranks.rank if has_one else 0]
        windows = torch.from_numpy(rows).to(device)
        inputs, targets = windows[:, :-1], windows[:, 1:]
        with autocast:
            logits = model(inputs)
        if has_one:
            nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").cpu().numpy()
            where = (places[:, None] + np.arange(1, rows.shape[1])).ravel()
            document = np.maximum(np.searchsorted(begins, where, side="right") - 1, 0)
            for row, weights in zip(sums, (nats, np.ones(len(nats)), lengths[rows[:, 1:].ravel()]), strict=True):
                row += np.bincount(document, weights, minlength=len(row))
        bar.update(sum(rows.size - len(rows) for _, rows in turn))
    bar.close()
    model.train(was_training)
    summed = torch.from_numpy(sums).to(device if device.type != "mps" else "cpu")
    nats, scored, text_bytes = ranks.sum_(summed).cpu().numpy()
    return Evaluation.of_documents(nats, int(scored.sum()), text_bytes)


def first_windows(model: GPT, tokens: Tokens) -> Int[Tensor, "B T"]:
    """Return the beginning of a split, in windows of up to block_size tokens, MEASURED_TOKENS in total."""
    T = min(model.config.block_size, MEASURED_TOKENS)
    _, windows = next(evaluation_batches(tokens, block_size=T, batch_size=MEASURED_TOKENS // T))
    return torch.from_numpy(windows[:, :-1]).to(next(model.parameters()).device)

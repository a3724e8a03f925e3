"""Evaluation: the nats of a model on the validation text or a task."""

import torch
from jaxtyping import Float
from torch import Tensor

from data.batches import Batch, Dataset, TokenDataset
from model.cache import DocStarts, Tokens
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from model.modes import eval_mode
from runs.metrics import Evaluation
from training.config import TrainConfig
from training.device import batch_to_device
from training.distributed import Ranks

ALONE = Ranks()
MEASURED_TOKENS = 512  # for the page's maps of heads: enough to tell them apart, in a hundredth of an evaluation's time
# Inputs that an evaluation reads while training; eval.py reads all.
FEWEST_TOKENS = 1 << 14
MOST_TOKENS = 1 << 19


def evaluation_tokens(config: TrainConfig, steps: int | None = None) -> int:
    """Return the most inputs that an evaluation reads, a function of the settings.

    eval_tokens, or a fifth of the inputs of eval_interval steps; in the last evaluation, given the run's `steps`, a
    fifth of all; from FEWEST_TOKENS to MOST_TOKENS. Each input of a text has a target.
    """
    # A forward pass takes a third of a step: the evaluations take a fifteenth of the time of a run, and the last one as
    # much again.
    count = steps or config.eval_interval
    return config.eval_tokens or min(max(FEWEST_TOKENS, config.tokens_per_step * count // 5), MOST_TOKENS)


@torch.no_grad()
def evaluate(
    model: GPT,
    data: Dataset,
    batch_size: int,
    autocast: torch.autocast,
    ranks: Ranks = ALONE,
    max_tokens: int | None = None,
) -> Evaluation:
    """Return a model's nats on the validation text, or on the held-out sequences of a task.

    max_tokens: the most inputs to read, spread evenly over the text and always the same; all if None.

    The ranks divide the batches among them, and each returns the figures of the whole. Afterwards the model is in its
    mode (train or eval) again.
    """
    device = next(model.parameters()).device

    # The ranks take turns. Keep nats and hit of each target, and its bytes; zeros for the targets that another rank
    # scores.
    lengths = torch.from_numpy(data.token_bytes())
    figures = []
    sizes = []
    batches = data.validation_batches(batch_size, max_tokens)
    with eval_mode(model):
        for number, batch in enumerate(batches):
            targets = torch.from_numpy(batch.targets)
            scored = targets != IGNORE_INDEX
            if number % ranks.size == ranks.rank:
                figures.append(score_batch(model, batch, device, autocast)[:, scored.to(device)])
            else:
                figures.append(torch.zeros(2, int(scored.sum()), device=device))
            sizes.append(lengths[targets[scored]])

    # Sum over the ranks.
    nats, hits = ranks.sum_(torch.cat(figures, dim=1)).cpu()
    if isinstance(data, TokenDataset):
        documents = data.validation_documents(max_tokens)
        return Evaluation.of_tokens(nats.numpy(), torch.cat(sizes).numpy(), documents=documents)
    return Evaluation.of_tokens(nats.numpy(), torch.cat(sizes).numpy(), hits.mean().item())  # of a task


@torch.no_grad()
def score_batch(model: GPT, batch: Batch, device: torch.device, autocast: torch.autocast) -> Float[Tensor, "2 B T"]:
    """Return the nats of each target, and 1 if it is the likeliest id, else 0."""
    inputs, targets, doc_starts = batch_to_device(batch, device)
    with autocast:
        nats, hits = model.nats(inputs, targets, doc_starts=doc_starts)
    return torch.stack([nats, hits.to(nats)])


def first_sequences(model: GPT, data: Dataset) -> tuple[Tokens, DocStarts]:
    """Return about the first MEASURED_TOKENS of the validation data, and doc_starts or None."""
    T = min(data.block_size, MEASURED_TOKENS)
    batch = next(data.validation_batches(MEASURED_TOKENS // T))
    device = next(model.parameters()).device
    tokens = torch.from_numpy(batch.inputs[:, :T]).to(device)
    doc_starts = batch.doc_starts
    return tokens, None if doc_starts is None else torch.from_numpy(doc_starts[:, :T]).to(device)

"""How well a model predicts a text: nats per token, perplexity, bits per byte."""

import itertools

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from common.console import progress_bar
from data.batches import Batch
from data.prepare import TokenDataset
from data.tasks import Data
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from runs.metrics import Evaluation
from training.config import TrainConfig
from training.device import to_device
from training.distributed import Ranks

ALONE = Ranks()
MEASURED_TOKENS = 512  # enough to tell heads apart, for a hundredth of an evaluation's time
FEWEST_SCORED, MOST_SCORED = 1 << 14, 1 << 19  # targets; eval.py scores all


def targets_scored(config: TrainConfig, steps: int | None = None) -> int:
    """Return the most targets that an evaluation scores; all of a run's together take about a tenth of its time.

    They are a fifth of the targets of eval_interval steps or, in the last evaluation of a run of `steps` steps, of all
    steps; a forward pass takes a third of a step. The last one scores no fewer than those before it and, if it is the
    only one, at most half as many as the run was trained on. A resumed run scores the same.
    """
    tokens, interval = config.tokens_per_step, config.eval_interval
    between, last = (min(max(FEWEST_SCORED, tokens * n // 5), MOST_SCORED) for n in (interval, steps or 0))
    if steps is None:
        return between
    return max(between, last) if steps > interval else min(last, tokens * steps // 2)


@torch.no_grad()
def evaluate(
    model: nn.Module, data: Data, block_size: int, batch_size: int, autocast: torch.autocast, ranks: Ranks = ALONE,
    max_tokens: int | None = None,
) -> Evaluation:  # fmt: skip
    """Return a model's nats on the validation text, or on the held-out sequences of a task.

    max_tokens: the most tokens to read, spread evenly over the text and always the same; all if None. The ranks divide
    the batches among them, and each returns the figures of the whole. The model stays in its mode (train or eval).
    """
    device = next(model.parameters()).device
    is_task = not isinstance(data, TokenDataset)
    was_training = model.training
    model.eval()

    # Score batch after batch, as many at a time as there are ranks.
    lengths = torch.from_numpy(data.token_bytes())
    figures = []  # of each target: its nats and, in a task, whether it is the likeliest
    sizes = []  # its bytes
    batches = data.validation(block_size, batch_size, max_tokens)
    total = data.validation_tokens(block_size, max_tokens)
    bar = progress_bar(
        ranks.is_first, total=total, desc="evaluating", unit="token", unit_scale=True, delay=2, leave=False
    )
    while batch_of_ranks := list(itertools.islice(batches, ranks.size)):
        # A rank without a batch runs another's: FSDP gathers weights from all ranks, so none may sit out.
        own = batch_of_ranks[min(ranks.rank, len(batch_of_ranks) - 1)]
        scored = torch.from_numpy(own.targets != IGNORE_INDEX).to(device)
        own_figures = score_batch(model, own, device, autocast)[: 1 + is_task, scored]
        for rank, batch in enumerate(batch_of_ranks):
            targets = torch.from_numpy(batch.targets[batch.targets != IGNORE_INDEX])
            zeros = own_figures.new_zeros(len(own_figures), len(targets))
            figures.append(own_figures if rank == ranks.rank else zeros)
            sizes.append(lengths[targets])
            bar.update(batch.inputs.size)
    bar.close()
    model.train(was_training)

    # Sum over the ranks: each has zeros in place of the others' figures.
    all_nats, *hits = ranks.sum_(torch.cat(figures, dim=1)).cpu()
    return Evaluation.of_tokens(all_nats.numpy(), torch.cat(sizes).numpy(), hits[0].mean().item() if hits else None)


@torch.no_grad()
def score_batch(
    model: nn.Module, batch: Batch, device: torch.device, autocast: torch.autocast
) -> Float[Tensor, "2 B T"]:
    """Return each target's nats, and 1 if it is the likeliest id, else 0."""
    inputs, targets, doc_starts = (to_device(part, device) for part in batch)  # (B, T); doc_starts or None
    with autocast:
        nats, hits = model(inputs, targets, doc_starts=doc_starts, each=True)
    return torch.stack([nats, hits.to(nats)])


def first_windows(model: GPT, data: Data) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"] | None]:
    """Return the first MEASURED_TOKENS of the validation text, in windows, and their doc_starts, if any.

    Windows have up to block_size tokens.
    """
    block_size = model.config.block_size
    T = min(block_size, MEASURED_TOKENS)
    batch = next(data.validation(block_size, MEASURED_TOKENS // T))
    device, doc_starts = next(model.parameters()).device, batch.doc_starts
    tokens = torch.from_numpy(batch.inputs[:, :T]).to(device)
    return tokens, None if doc_starts is None else torch.from_numpy(doc_starts[:, :T]).to(device)

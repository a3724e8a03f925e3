"""Masks say which keys a query may see; ALiBi adds a penalty for their distance.

A mask is True where a query may attend. Queries are the last T of S positions, so query t stands at
position S - T + t: with T = S that is the usual lower triangle, with T = 1 (one new token, S cached)
the whole row. Aligned at the other corner, a cached token would see nothing but key 0.
"""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from model.cpu import is_eager

Device = torch.device | str | None


def causal_mask(
    T: int,
    S: int,
    device: Device = None,
    window: int | None = None,
) -> Bool[Tensor, "{T} {S}"]:
    """Show each query itself and the positions before it (Vaswani et al. 2017, section 3.2.3).

    window: itself and the `window` - 1 positions before it (Beltagy et al. 2020).
    """
    mask = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
    return mask if window is None else mask.triu(S - T - window + 1)


def shows_later(mask: Bool[Tensor, "*shape"], T: int, S: int) -> bool:
    """Return whether a mask shows a later key to a query.

    On a GPU, which would have to be waited for, nothing is checked.
    """
    if type(mask) is not Tensor or not mask.is_cpu or not is_eager():
        return False
    return bool((mask & ~causal_mask(T, S)).any())


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a nested tensor, whose texts have lengths of their own."""
    if tensor.is_nested:
        padded = f"torch.nested.to_padded_tensor({name}.contiguous(), 0)"
        raise ValueError(f"{name} is nested: pad its texts on the right, {padded}, and hide the padding by a mask.")


def padding_mask(attention_mask: Shaped[Tensor, "B S"]) -> Bool[Tensor, "B 1 1 S"]:
    """Shape a tokenizer's mask, 1 for a token and 0 for padding, for every head and query.

    Raises ValueError for a mask that is none of texts and tokens.
    """
    mask = as_bool(attention_mask)
    if mask.ndim != 2:
        remedy = "give one text's as mask[None], and a mask of queries and keys to the layer itself"
        raise ValueError(f"attention_mask {tuple(mask.shape)} needs the shape (B, S): {remedy}.")
    return mask[:, None, None, :]


def document_mask(doc_starts: Int[Tensor, "B T"], S: int) -> Bool[Tensor, "B 1 T S"]:
    """Hide from each of the last T of S tokens all tokens before its text.

    The text begins at `doc_starts`.
    """
    return torch.arange(S, device=doc_starts.device) >= doc_starts[:, None, :, None]


def check_starts(doc_starts: Int[Tensor, "B T"], past: int) -> None:
    """Raise ValueError unless doc_starts[doc_starts[t]] == doc_starts[t].

    It is not so where texts are numbered, 0 0 0 1 1, in place of 0 0 0 3 3. On a GPU, which would have to be waited
    for, nothing is checked.

    past: the position of the first of these tokens. Texts that begin before it are not checked.
    """
    if type(doc_starts) is not Tensor or not doc_starts.is_cpu or not is_eager() or doc_starts.ndim != 2:
        return
    T = doc_starts.shape[1]
    place = doc_starts.long() - past  # of each text's first token
    is_here = (place >= 0) & (place < T)
    starts_of_first = doc_starts.gather(1, place.clamp(0, T - 1)) if T else doc_starts
    wrong = is_here & (starts_of_first != doc_starts)
    if wrong.any():
        row, t = wrong.nonzero()[0].tolist()
        start = int(doc_starts[row, t])
        problem = f"doc_starts has {start} for token {past + t}, but {int(starts_of_first[row, t])} for token {start}"
        remedy = "of texts that are numbered by `ids` they are (ids[:, :, None] == ids[:, None]).int().argmax(-1)"
        raise ValueError(f"{problem}: they are the positions of the first tokens of texts; {remedy}.")


def as_bool(mask: Shaped[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Return True where the mask is True or 1.

    Raises ValueError for a number other than 0 and 1, and for floats that are all 0: an additive mask of 0 and −∞ means
    the opposite.
    """
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask is of type {type(mask).__name__}: make a tensor of it, torch.tensor(mask).")
    check_dense("mask", mask)
    if mask.dtype == torch.bool:
        return mask
    attend = mask == 1
    # The checks read values, which neither a compiler's trace nor a meta tensor has.
    reads_values = not torch.compiler.is_compiling() and not mask.is_meta
    if reads_values and not (attend | (mask == 0)).all():
        problem = f"mask {tuple(mask.shape)} has numbers other than 1 (may attend) and 0 (may not)"
        if mask.is_floating_point() and (mask <= torch.finfo(mask.dtype).min).any():
            raise ValueError(f"{problem}; of an additive mask pass mask > torch.finfo(mask.dtype).min.")
        raise ValueError(f"{problem}; pass what should be added to the scores as `bias`.")
    if mask.is_floating_point() and reads_values and mask.numel() and not attend.any():
        problem = f"mask {tuple(mask.shape)} of floats is 0 everywhere, which hides every key"
        raise ValueError(f"{problem}; pass an additive mask as `bias`, or one that hides all as mask.bool().")
    return attend


def check_bias(bias: Float[Tensor, "*shape"]) -> None:
    """Raise ValueError for a bias of no floats, or one that hides keys.

    These have −∞, or the smallest number of its type. A row of them would be 0/0, and code that counts visible keys
    counts by the mask. On a GPU, which would have to be waited for, nothing is checked.
    """
    if isinstance(bias, Tensor) and not bias.is_floating_point():
        remedy = "pass it as mask" if bias.dtype == torch.bool else "make floats of its numbers, bias.float()"
        raise ValueError(f"bias {tuple(bias.shape)} is {bias.dtype}: {remedy}.")
    if type(bias) is not Tensor or not bias.is_cpu or not is_eager() or not bias.numel():
        return
    least = bias.amin().item()
    if least <= torch.finfo(bias.dtype).min:
        problem = f"bias {tuple(bias.shape)} hides keys by {least:.3g}"
        remedy = "pass mask = bias > torch.finfo(bias.dtype).min, and bias.masked_fill(~mask, 0) for what is left"
        raise ValueError(f"{problem}: {remedy}.")


def alibi_slopes(n_head: int) -> list[float]:
    """Return each head's penalty per position: 2^(-8/H), 2^(-16/H), … 2^-8.

    (Press et al. 2022, section 3.) For H between powers of two, the authors' rule: the slopes of the power below, then
    every other slope of twice that power.
    """
    power = 1 << (n_head.bit_length() - 1)  # the largest power of two that is at most H
    slopes = [2 ** (-8 * n / power) for n in range(1, power + 1)]
    between = [2 ** (-4 * n / power) for n in range(1, 2 * power, 2)]
    return slopes + between[: n_head - power]


def alibi_sum(
    n_head: int,
    T: int,
    S: int,
    device: Device = None,
) -> tuple[Float[Tensor, "H T"], Float[Tensor, "H S"]]:
    """Return rows and columns that sum to minus slope × distance, to add to the scores.

    (Press et al. 2022.) In float64, where there is one: the two are large and nearly cancel at near positions.
    """
    dtype = torch.float32 if torch.device(device or "cpu").type == "mps" else torch.float64
    position = torch.arange(S, device=device)
    slopes = torch.tensor(alibi_slopes(n_head), dtype=dtype, device="cpu")
    slopes = slopes.to(position.device, non_blocking=position.is_cuda)  # else the CPU would wait for the GPU
    column = slopes[:, None] * position
    return -column[:, S - T :], column

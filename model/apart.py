"""Take a model apart: run it without some parts, replace their results, read what each adds.

A part is a head or an MLP. Each adds a vector to the residual stream, and all of them together with the embedding are
the stream (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"). A head's vector is its result
(B, T, D) times its D columns of o_proj.

    without(model, Part(0, 1))             a part that is off adds nothing: ablation
    edited(model, {Part(0, 1): edit})      another result in its place: activation patching (Wang et al. 2022)
    streams(model, tokens)                 the stream after each part: the logit lens (nostalgebraist 2020)
    contributions(model, tokens, targets)  the share of each part in a logit: direct logit attribution

All of it stands on torch's public hooks. They act in every forward pass within the `with` block, also while text is
written, and are gone after it. A gradient is computed within the block too: a block that recomputes its activations
(Chen et al. 2016) would else do so without the edits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from common.errors import SettingsError
from model.attention import MultiHeadAttention
from model.cache import DocStarts, Tokens
from model.gpt import GPT, Block, Stream, check_targets
from model.layers import LayerNorm, RMSNorm, upcast
from model.loss import scored_places
from model.modes import eval_mode, uncompiled_calls
from model.surgery import EDITS, embedded, one_module, read, uncompiled

Result = Float[Tensor, "B T _"]
Edit = Callable[[Result], Result]
"""Gets a copy of a part's result and returns what takes its place, of the same shape."""


class Part(NamedTuple):
    """A head of a layer or the layer's MLP, counted from 0.

    Its text is its name on the page of a model, which counts from 1: Part(0, 1) is L1 H2.
    """

    layer: int
    head: int | None = None
    """None is the MLP."""

    def __str__(self) -> str:
        return f"L{self.layer + 1} " + ("MLP" if self.head is None else f"H{self.head + 1}")


def parts(model: GPT) -> list[Part]:
    """Return all heads and MLPs, in the order of the forward pass.

    Forms with one head as wide as the model, such as average, have that one. Raises SettingsError for a form without
    heads, and for a module that stands in two places: its parts would be switched off in both.
    """
    for modules in ([block.attention for block in model.blocks], [block.mlp for block in model.blocks]):
        for layer, module in enumerate(modules):
            if (first := modules.index(module)) < layer:
                raise one_module(first, layer, "a part belongs to one layer")
    found = []
    for layer, block in enumerate(model.blocks):
        found += [Part(layer, head) for head in range(heads_of(block.attention))]
        found.append(Part(layer))
    return found


def part_of(known: list[Part], part: Part) -> Part:
    """Return the known part that equals `part`, which may be a plain tuple.

    Raises ValueError if none does.
    """
    if part in known:
        return known[known.index(part)]
    name = part if isinstance(part, Part) else repr(part)
    remedy = f"name each, such as Part(0, 0) for {known[0]}; the last is {known[-1]}, and *parts(model) are all"
    raise ValueError(f"{name} is no part of the model: {remedy}.")


def heads_of(attention: nn.Module) -> int:
    """Return the number of heads whose results o_proj joins.

    Modifiers that give each head several queries, as diff does, have combined them by then. Raises SettingsError for
    a module around the layer, and for a form without such heads.
    """
    layer = uncompiled(attention)
    if not isinstance(layer, MultiHeadAttention):
        problem = f"the {type(layer).__name__} in the place of an attention layer has no heads to take apart"
        raise SettingsError(problem, "put the layer itself there, and use hooks for what the module around it does")
    H = layer.n_head
    o_proj = getattr(layer, "o_proj", None)
    width = getattr(o_proj, "in_features", H * layer.head_dim)  # nn.Identity has none
    # A form that merges in another way may never call o_proj: its hook would then do nothing, and say nothing.
    if o_proj is None or type(layer).merge is not MultiHeadAttention.merge or width % H:
        problem = f"attention={layer.form} of layer {layer.layer_idx} has no heads to take apart"
        raise SettingsError(problem, "choose a form whose results o_proj joins, such as sdpa or delta")
    return H


@contextmanager
def edited(model: GPT, edits: Mapping[Part, Edit]) -> Iterator[None]:
    """Replace results of parts in the forward passes of a `with` block.

    A head's result is (B, T, D), before its columns of o_proj; an MLP's is (B, T, C). T counts the new tokens: one
    after the other while text is written with a cache. Blocks within blocks act in their order. A copy of the model
    keeps the edits; no file of weights has them, so a checkpoint or an export is refused within the block. Passes of
    other threads have them too. Raises ValueError for a part that the model lacks, and in a forward pass for a result
    of another shape.

    For example, patching takes the result of another text (Wang et al. 2022, "Interpretability in the Wild"):

        other = results(model, other_tokens)
        with edited(model, {part: lambda result: other[part]}):
            logits = model(tokens)
    """
    # Know the parts by their own class: a plain tuple equals one.
    known = parts(model)
    edits = {part_of(known, part): edit for part, edit in edits.items()}

    # Hook the MLP, and the input of o_proj, of each block with edits.
    with ExitStack() as stack:
        stack.enter_context(uncompiled_calls())
        for layer, block in enumerate(model.blocks):
            own = {part.head: edit for part, edit in edits.items() if part.layer == layer}
            if None in own:
                hook = mlp_hook(own.pop(None), Part(layer))
                EDITS.add(hook)
                stack.callback(block.mlp.register_forward_hook(hook).remove)
            if own:
                hook = heads_hook(own, layer, heads_of(block.attention))
                EDITS.add(hook)
                stack.callback(block.attention.o_proj.register_forward_pre_hook(hook).remove)
        yield


def mlp_hook(edit: Edit, part: Part) -> Callable[..., Any]:
    """Return a forward hook of an MLP that edits its result."""
    return lambda module, arguments, result: apply(edit, result, part)


def heads_hook(edits: dict[int | None, Edit], layer: int, H: int) -> Callable[..., Any]:
    """Return a forward pre-hook of o_proj that edits some of its H heads."""

    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
        heads = [*arguments[0].unflatten(-1, (H, -1)).unbind(-2)]  # (B, T, H·D) -> H times (B, T, D)
        for head, edit in edits.items():
            assert head is not None
            heads[head] = apply(edit, heads[head], Part(layer, head))
        return (torch.stack(heads, -2).flatten(-2),)  # (B, T, H·D)

    return hook


def apply(edit: Edit, result: Result, part: Part) -> Result:
    """Return an edit of a result; ValueError for another shape, which might broadcast unnoticed."""
    edit_result = edit(result.clone())  # an edit may write into its argument
    shape = getattr(edit_result, "shape", type(edit_result).__name__)
    if shape != result.shape:
        raise ValueError(f"the edit of {part} returned {shape}: a tensor {tuple(result.shape)} takes its place.")
    return edit_result.to(result.dtype)


def without(
    model: GPT,
    *off: Part,
    means: Mapping[Part, Float[Tensor, " _"]] | None = None,
) -> AbstractContextManager[None]:
    """Switch parts off for the forward passes of a `with` block: they add nothing to the stream.

    means: a vector for each part, (D,) or (C,), to take the place of its result instead of zeros. The mean over texts
    like these, of means(), keeps what a part adds to all of them (Wang et al. 2022). Zero needs no text.

    All heads of a layer off leave the bias of o_proj, if there is one, as its attention's change to the stream.
    """

    def edit(part: Part) -> Edit:
        if means is None:
            return torch.zeros_like
        if part not in means:
            raise ValueError(f"means lacks {part}: means(model, tokens) has all parts of a model.")
        mean = means[part]
        # The last axis stays, for apply() to check.
        return lambda result: mean.to(result).expand(*result.shape[:-1], -1)

    known = parts(model)
    return edited(model, {part: edit(part) for part in (part_of(known, given) for given in off)})


@torch.no_grad()
def results(model: GPT, tokens: Tokens, doc_starts: DocStarts = None) -> dict[Part, Result]:
    """Return the result of each part: of a head (B, T, D), of an MLP (B, T, C).

    They are those of eval mode. doc_starts keeps documents apart, as in GPT.forward().
    """
    found: dict[Part, Result] = {}
    recorded = of_this_thread(found.setdefault)

    def record(part: Part) -> Edit:
        def edit(result: Result) -> Result:
            recorded(part, result)
            return result

        return edit

    with eval_mode(model), edited(model, {part: record(part) for part in parts(model)}):
        read(model, tokens, doc_starts=doc_starts)
    return found


def of_this_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does nothing in other threads, which may read the model too."""
    thread = get_ident()
    return lambda *arguments: function(*arguments) if get_ident() == thread else None


def means(model: GPT, tokens: Tokens, doc_starts: DocStarts = None) -> dict[Part, Float[Tensor, " _"]]:
    """Return each part's mean result over all tokens of some texts, for without().

    doc_starts: as in head_statistics(), a token before the start of its document is padding, and does not count.
    """
    found = results(model, tokens, doc_starts)
    if doc_starts is None:
        return {part: result.mean((0, 1)) for part, result in found.items()}
    counted = torch.arange(tokens.size(1), device=tokens.device) >= doc_starts  # (B, T)
    return {part: result[counted].mean(0) for part, result in found.items()}


@torch.no_grad()
def streams(model: GPT, tokens: Tokens, doc_starts: DocStarts = None) -> list[Stream]:
    """Return the residual streams: as embedded, then after each attention and each MLP.

    There are 2 L + 1, each (B, T, C). model.logits() of one is what the model would predict if it ended there, for
    which it was not trained: the logit lens (nostalgebraist 2020, "interpreting GPT"). That of the last is the model's
    own prediction.

    Raises SettingsError for a block of one's own whose norms read something else, as norms after attention and MLP do.
    """
    found: list[Stream] = []
    begun: list[Stream] = []
    added: list[Stream] = []

    def recorder(record: list[Stream]) -> Callable[..., None]:
        return of_this_thread(lambda module, arguments: record.append(arguments[0]))

    with ExitStack() as stack, eval_mode(model), uncompiled_calls():
        # Each norm reads the stream before the next part. A module may stand in two places: one hook sees both calls.
        # Other hooks come later: they change what the norm reads, not the stream.
        norms = [getattr(block, name, None) for block in model.blocks for name in ("attention_norm", "mlp_norm")]
        for norm in dict.fromkeys(filter(None, norms)):
            stack.callback(norm.register_forward_pre_hook(recorder(found), prepend=True).remove)
        for block in dict.fromkeys(model.blocks):
            stack.callback(block.register_forward_pre_hook(recorder(begun)).remove)
        for attention in dict.fromkeys(model.attentions):
            hook = of_this_thread(lambda module, arguments, result: added.append(result))
            stack.callback(attention.register_forward_hook(hook).remove)
        if model.is_hooked:  # a hook on it may change the tokens
            stack.callback(model.final_norm.register_forward_pre_hook(recorder(found), prepend=True).remove)
            model(tokens, doc_starts=doc_starts)
        else:
            found.append(model.hidden(tokens, doc_starts=doc_starts))
    if len(found) == 2 * len(begun) + 1:
        read = zip(model.blocks, begun, added, found[::2], found[1::2], strict=False)
        strange = [block for block, *seen in read if not reads_the_stream(*seen)]
    else:
        strange = [block for block in model.blocks if not isinstance(uncompiled(block), Block)] or [*model.blocks]
    if strange:
        kind = type(uncompiled(strange[0])).__name__
        problem = f"the norms of a {kind} do not read the stream before attention and before the MLP"
        raise SettingsError(problem, "take its streams by hooks on its modules")
    return found


def reads_the_stream(begun: Stream, added: Stream, first: Stream, second: Stream) -> bool:
    """Return whether a block's norms read the stream at its beginning and after attention."""
    begins = torch.allclose(upcast(begun), upcast(first), rtol=0, atol=0, equal_nan=True)
    return begins and not (torch.equal(begun, second) and added.any())


@torch.no_grad()
def writes(model: GPT, tokens: Tokens, doc_starts: DocStarts = None) -> dict[Part | str, Stream]:
    """Return the vector that each part adds to the residual stream, (B, T, C).

    "embedding" is the stream before the first layer, "bias" the sum of the biases of o_proj. The sum of all is the
    stream after the last layer. o_proj may be an adapter, a quantised layer or another module in its place.

    Raises SettingsError if the sum is another, because a hook or a block of one's own changes the stream, or an o_proj
    is not linear.
    """
    all_streams = streams(model, tokens, doc_starts)
    every_result = results(model, tokens, doc_starts)
    found: dict[Part | str, Stream] = {"embedding": all_streams[0]}
    bias = torch.zeros_like(all_streams[0])
    with eval_mode(model):
        for layer, block in enumerate(model.blocks):
            # Project one head at a time. Call forward(): hooks before o_proj have changed the results already.
            project = block.attention.o_proj.forward
            heads = torch.stack([every_result[Part(layer, head)] for head in range(heads_of(block.attention))], -2)
            of_none = project(torch.zeros_like(heads).flatten(-2))  # its bias: (B, T, H·D) -> (B, T, C)
            bias = bias + of_none
            for head in range(heads.shape[-2]):
                alone = torch.zeros_like(heads)  # (B, T, H, D)
                alone[..., head, :] = heads[..., head, :]
                found[Part(layer, head)] = project(alone.flatten(-2)) - of_none
            found[Part(layer)] = every_result[Part(layer)]
    found["bias"] = bias

    vectors = torch.stack([*found.values()])
    rest = upcast(vectors).sum(0) - upcast(all_streams[-1])
    if (rest.norm(dim=-1) > rounding(vectors.dtype) * upcast(vectors).norm(dim=-1).amax(0)).any():
        causes = "a hook changes it, or an o_proj is not linear"
        remedy = "remove such hooks, and put a linear layer in place of such an o_proj"
        kinds = (type(uncompiled(block)) for block in model.blocks)
        own = next((kind.__name__ for kind in kinds if kind is not Block), None)
        if own:
            causes = f"a {own} or {causes}"
            remedy += f"; of a {own} that changes its sum, take the parts by hooks on its modules"
        raise SettingsError(f"the parts and the embedding do not sum to the stream: {causes}", remedy)
    return found


def rounding(dtype: torch.dtype) -> float:
    """Return the share by which a sum may differ: half precision rounds it at each part."""
    return max(1e-3, 8 * torch.finfo(dtype).eps)


@torch.no_grad()
def contributions(
    model: GPT,
    tokens: Tokens,
    targets: Tokens,
    doc_starts: DocStarts = None,
) -> dict[Part | str, Float[Tensor, "B T"]]:
    """Return what each part adds to the logit of each target, before logit_softcap.

    Direct logit attribution (Elhage et al. 2021): the final norm divides all vectors by the scale of the whole stream,
    so that their sum is the logit. "embedding" is the part of the embedding, "bias" that of all biases.

    A part's effect by way of later parts is not its own here but theirs: a late MLP that only makes a result louder
    takes the credit for it. Compare with without().

    targets: a token id for each position, (B, T); where it is -1 or -100, as for padding, all shares are 0.

    Raises ValueError for targets of another shape, and on a CPU for those that are not ids; SettingsError if lm_head is
    no matrix alone or final_norm no norm alone, whose logits would not be such sums, and as writes() does.
    """
    check_targets(tokens, targets)
    if not model.has_plain_head:
        problem = "lm_head has a bias, a hook or an adapter, or is another module, to which no part adds"
        raise SettingsError(problem, "remove it, or merge it into lm_head.weight, for contributions()")
    if model.is_hooked:
        raise SettingsError("the model has a hook, to whose change no part adds", "remove it, for contributions()")
    vectors = {part: upcast(vector) for part, vector in writes(model, tokens, doc_starts).items()}
    norm = model.final_norm
    other_norm = SettingsError(
        "final_norm has a hook, or is another module, through which the parts do not add to the logit",
        "remove the hook, or put back the norm, for contributions()",
    )
    if not isinstance(norm, RMSNorm | LayerNorm):
        raise other_norm
    if isinstance(norm, LayerNorm):
        vectors = {part: vector - vector.mean(-1, keepdim=True) for part, vector in vectors.items()}
    stream = torch.stack([*vectors.values()]).sum(0)  # (B, T, C)
    scale = torch.rsqrt(stream.square().mean(-1) + norm.eps)  # (B, T)

    scored = scored_places(targets)
    table = nn.Embedding.from_pretrained(model.lm_head.weight)
    rows = upcast(embedded(table, targets.masked_fill(~scored, 0))) * scored[..., None]  # (B, T, C)
    direction = scale[..., None] * upcast(norm.weight) * rows
    found = {part: (vector * direction).sum(-1) for part, vector in vectors.items()}
    bias: Any = getattr(norm, "bias", None)  # a LayerNorm's
    if bias is not None:
        found["bias"] = found["bias"] + rows @ upcast(bias)

    # A hook changes the result of the norm.
    dtype = model.lm_head.weight.dtype
    with eval_mode(model):
        normed = upcast(norm(stream.to(dtype)))
    rest = torch.stack([*found.values()]).sum(0) - (normed * rows).sum(-1)
    if (rest.abs() > rounding(dtype) * normed.norm(dim=-1) * rows.norm(dim=-1)).any():
        raise other_norm
    return found

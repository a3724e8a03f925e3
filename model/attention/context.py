"""The state of a forward pass, which a model's layers share."""

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from model.attention.masks import check_starts
from model.cache import DocStarts, KVCache, Tokens, check_rows, in_type_of
from model.cpu import is_eager
from model.rope import Rope, check_rotation


class AttentionContext:
    """The state of one forward pass, which the layers share.

    The GPT makes one for each pass; a layer alone may go without. It is no dataclass: torch's fully_shard() copies the
    dataclasses among a block's arguments and casts their tensors, and what a layer writes to a copy is lost.

    Of the modules named here some are forms and modifiers. Read the table again after layer.py.

    name          shape                       written by   read by                            default
    mask          broadcasts to (B, H, T, S)  a caller     make_call()                        causality alone
    doc_starts    (B, T)                      GPT          make_call(), places(), recurrent   all 0
    tokens        (B, T)                      GPT          value_embedding                    None
    cache         KVCache                     GPT          update_cache(), layer_cache(), …   None: T = S
    rotations     dict by Rope: (T, D/2, 2)   GPT          rotate()                           those of past … past+T-1
    shared        dict by name                layers       value_residual, in later layers    none
    loss          ()                          compute()    GPT.loss(), and the form index     None outside training
    weights_only  bool                        weights()    compute(), and attend() of forms   False
    device        str                         GPT          compute()                          None: that of x
    learns        bool                        GPT          check_gradient()                   False

    mask        True or 1 where a query may attend; S is T plus the positions in the cache. Causality and window hold in
                any case. Forms and modifiers that accumulate or shift the past accept doc_starts only.
    doc_starts  the position of the first token of each token's text, counted as the cache counts positions: from the
                first token that it has read. Earlier tokens are hidden: another document, or padding on the left.
    rotations   Rope.cos_sin() of the positions; (B, 1, T, D/2, 2) gives each text its own.
    loss        auxiliary, in nats summed over tokens; layers add to it.
    device      the type of device for which executors are chosen: dry_run plans for one that is not there.
    learns      whether the pass records gradients.
    """

    def __init__(
        self,
        mask: Tensor | None = None,
        doc_starts: DocStarts = None,
        tokens: Tokens | None = None,
        cache: KVCache | None = None,
        shared: dict[str, Tensor] | None = None,
        rotations: dict[Rope, Tensor] | None = None,
        loss: Float[Tensor, ""] | None = None,
        weights_only: bool = False,
        device: str | None = None,
        learns: bool = False,
    ) -> None:
        self.mask = mask
        self.doc_starts = doc_starts
        self.tokens = tokens
        self.cache = cache
        self.shared = {} if shared is None else shared
        self.rotations = {} if rotations is None else rotations
        self.loss = loss
        self.weights_only = weights_only
        self.device = device
        self.learns = learns
        if doc_starts is not None:
            check_starts(doc_starts, self.past)

    def changed(self, **values: Any) -> "AttentionContext":
        """Return a copy with these values in place of its own."""
        return AttentionContext(**vars(self) | values)

    def check_gradient(self) -> None:
        """Raise ValueError if what a layer leaves here gets no gradient, though the pass has one.

        torch's reentrant checkpoint runs a block without gradients, and later hands on that of its result alone.
        """
        if self.learns and not torch.is_grad_enabled():
            problem = "a block runs without gradients within a pass that has them, as in torch's reentrant checkpoint"
            remedy = "set use_reentrant=False (CheckpointImpl.NO_REENTRANT); freeze weights by requires_grad_(False)"
            raise ValueError(f"{problem}, and what it leaves for later layers or the loss would get none: {remedy}.")

    def check_new(self) -> None:
        """Raise ValueError for values that a pass of the GPT sets: they would be lost."""
        given = [name for name in ("doc_starts", "cache") if getattr(self, name) is not None]
        given += [name for name in ("rotations", "shared") if getattr(self, name)]
        if given:
            problem = f"ctx has {' and '.join(given)}, which a pass of the model sets anew"
            remedy = "give the model doc_starts and cache, set rotations in a hook on its first block"
            raise ValueError(f"{problem}: {remedy}, and make a new ctx for each pass.")

    @classmethod
    def with_loss(cls, device: torch.device) -> "AttentionContext":
        """Return a context in which layers may add to an auxiliary loss, which begins at 0."""
        # This matters to torch's compiler alone: skip it at first.
        # After the first layer the loss requires a gradient. Let it do so from the start: if torch compiles block by
        # block, all blocks then share one graph, which is valid for one requires_grad. If it compiles the whole model,
        # is_compiling() is true here: a graph cannot make a tensor that requires a gradient, and need not.
        return cls(loss=torch.zeros((), device=device, requires_grad=not torch.compiler.is_compiling()))

    @property
    def past(self) -> int:
        """The number of positions in the cache."""
        return 0 if self.cache is None else self.cache.position

    def rotation(self, rope: Rope, x: Tensor) -> Tensor:
        """Return Rope.cos_sin() of the present positions, (…, T, D/2, 2).

        They are in `rotations`, or made here. The GPT makes them once for all layers, but does not know a Rope that a
        person gives a layer later. Raises ValueError for rotations of other positions than the tokens'.
        """
        made = self.rotations.get(rope)
        if made is None:
            return rope.table(x, self.past)
        if x.ndim == 4 and is_eager():  # heads; the one token of model/row.py has the GPT's
            check_rotation(made, x)
        return made

    def has_own_positions(self, rope: Rope, x: Tensor) -> bool:
        """Return whether a person has set other rotations than those of the present positions."""
        made = self.rotations.get(rope)
        if made is None or not is_eager():
            return False
        table = rope.table(x, self.past)
        return made.data_ptr() != table.data_ptr() and not torch.equal(made, table)  # a GPU is rarely waited for

    def layer_cache(self, layer_idx: int) -> dict[str, Tensor]:
        """Return the cache's tensors of a layer, to read and to write.

        Without a cache it is an empty dictionary.
        """
        return {} if self.cache is None else self.cache.layers[layer_idx]

    def previous(
        self,
        layer_idx: int,
        name: str,
        new: Shaped[Tensor, "B n T D"],
        count: int,
    ) -> list[Tensor]:
        """Return the rows 1, 2, … `count` tokens before each row of `new`.

        They are zeros if they belong to another text. Raises ValueError if `new` has other axes.
        """
        check_rows(name, new)
        T = new.shape[2]
        kept = self.layer_cache(layer_idx)

        # The last `count` rows of earlier passes, then the new ones. Without a cache the kept rows are thrown away.
        before = kept.get(name, new.new_zeros(*new.shape[:2], count, new.shape[3]))
        before = in_type_of(new, before, name, layer_idx)
        rows = torch.cat((before, new), 2)  # (B, n, count + T, D)
        kept[name] = rows[:, :, T:].detach()
        shifted = [rows[:, :, count - back : count - back + T] for back in range(1, count + 1)]
        if self.doc_starts is None:
            return shifted

        # A token's place in its text says how many of them belong to it.
        place = self.places()  # (B, T)
        return [row.masked_fill((place < back)[:, None, :, None], 0) for back, row in enumerate(shifted, 1)]

    def places(self) -> Int[Tensor, "B T"]:
        """Return the place of each new token in its text, from 0 on; needs doc_starts."""
        assert self.doc_starts is not None
        T = self.doc_starts.shape[1]
        return torch.arange(self.past, self.past + T, device=self.doc_starts.device) - self.doc_starts

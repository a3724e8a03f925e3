"""The contract of every attention function, which people call and write.

    attend(q, k, v, *, mask=None, bias=None, is_causal=False, dropout_p=0.0, scale=None)

    q          (…, H, T, D)     queries; any number of leading dimensions, or none
    k          (…, Hkv, S, D)   keys; Hkv divides H, and H / Hkv query heads share a key head
    v          (…, Hkv, S, Dv)  values; Dv may differ from D
    mask       broadcasts to (…, H, T, S): True or 1 = may attend, False or 0 = may not
    bias       broadcasts to (…, H, T, S): finite, added to the scaled scores
    is_causal  no query sees a later key; the last query sees the last key, also where T ≠ S. Not beside a mask.
    dropout_p  probability of dropping a weight; the caller passes 0 outside training
    scale      factor on the products, 1/√D when None; a number. One that learns multiplies the queries
    returns    (…, H, T, Dv); a query that may attend nowhere gets zeros, and no gradient

Hidden keys and values must be finite too: their weight is 0, and 0 times NaN is NaN. Fill padding with zeros.

ValueError, naming the shapes or types, if the arguments do not fit together. Queries, keys and values have one type.
What hides a key goes into the mask: a bias of −∞ or of the smallest number of its type is refused where a CPU can look.

FORMS["sdpa"] and others are such functions. Each makes a Call of its arguments, as a layer does, and executors.py
computes it. One of a person's own is made by a decorator: from_weights of a function of scores, attention_function of a
function of a call. A plain function with these arguments will do too.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from common.errors import SettingsError
from model.attention.call import (
    Bias,
    Call,
    Key,
    Mask,
    Output,
    Query,
    Value,
    add_sink,
    check_broadcast,
    with_matrices,
)
from model.attention.choice import Scores
from model.attention.executors import (
    MATRICES,
    OF_WEIGHTING,
    Executor,
    Executors,
    of_steps,
    run_call,
)
from model.attention.masks import as_bool, check_bias, check_dense
from model.attention.registry import FORMS
from model.attention.weighting import Own, Unknown, Weighting

NUMBERS = {
    "dropout_p": "give a number, float(dropout_p)",
    "scale": "multiply the queries by it, q * scale (in a layer in a modifier's score()), and set scale=1.0",
}
"""What to do where a tensor is in the place of a number."""


class AttentionFunction:
    """A weighting, and the executors that may compute it, the fastest first."""

    def __init__(
        self,
        name: str,
        words: str | None,
        weighting: Weighting,
        executors: Executors,
        null_key: bool = False,
    ) -> None:
        """null_key: whether there is one more key, of score 0 and value zero."""
        self.__name__ = self.__qualname__ = name
        self.__doc__ = words
        self.weighting = weighting
        self.executors = executors
        self.null_key = null_key

    def __call__(
        self,
        q: Query,
        k: Key,
        v: Value,
        *,
        mask: Mask = None,
        bias: Bias = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> Output:
        check_arguments(q, k, v, mask, bias, is_causal, dropout_p)
        seen = None if mask is None else as_bool(mask)
        call = self.new_call(q, k, v, mask=seen, is_causal=is_causal, matrix=bias, dropout_p=dropout_p, scale=scale)
        return run_call(call, self.executors)[0]

    def new_call(self, q: Query, k: Key, v: Value, **fields: Any) -> Call:
        """Return a call of this function with some fields.

        Raises ValueError for a tensor in the place of a number, which would get no gradient in long texts.
        """
        for name, remedy in NUMBERS.items():
            if isinstance(fields.get(name), Tensor):
                raise ValueError(f"{name} is a tensor: {remedy}.")
        call = Call(q, k, v, self.weighting, **fields)
        return add_sink(call, q.new_zeros(q.shape[-3])) if self.null_key else call

    def by(self, *executors: Executor) -> "AttentionFunction":
        """Return the same function by other executors."""
        return AttentionFunction(self.__name__, self.__doc__, self.weighting, executors, self.null_key)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A form is pickled by its name, as functions are; softcap(2.0), which has none, by its content.
        if FORMS.get(self.__name__) is self:
            return form_named, (self.__name__, self.__module__)
        if getattr(sys.modules.get(self.__module__), self.__name__, None) is self:
            return self.__name__
        return super().__reduce_ex__(protocol)


def form_named(name: str, module: str) -> Any:
    """Return a form that was pickled; import the module that registers it, if that is not done."""
    if name not in FORMS:
        try:
            import_module(module)
        except ImportError:
            remedy = "run its file first, by code=FILE or run_code(FILE)"
            raise SettingsError(f"attention={name} is no form in this process", remedy) from None
    return FORMS[name]


def from_weights(weights: Callable[[Scores], Scores]) -> AttentionFunction:
    """Make an attention function of its weights, weights(scores).

    The scores are float32 or wider, with the bias, and −∞ for keys that are not allowed.
    """
    return named_as(weights, Own(weights), OF_WEIGHTING)


def attention_function(compute: Callable[[Call], Output]) -> AttentionFunction:
    """Make an attention function of its mathematics, compute(call): see functions.py."""
    return of_person(compute, of_steps(compute))


def as_attention_function(function: Callable[..., Output]) -> AttentionFunction:
    """Return an attention function, of a plain function if need be."""
    if isinstance(function, AttentionFunction):
        return function
    return of_person(function, Executor(function.__name__, partial(by_arguments, function), MATRICES - {"indexer"}))


def of_person(source: Callable[..., Output], executor: Executor) -> AttentionFunction:
    """Return an attention function that one executor computes: no other knows its weights."""
    return named_as(source, Unknown(source.__name__), (executor._replace(weightings=None),))


def by_arguments(function: Callable[..., Output], call: Call) -> Output:
    """Compute a call by a function with the arguments above."""
    laid = with_matrices(call, sink_in_front=True)
    more = {"mask": laid.mask, "bias": laid.matrix, "dropout_p": call.dropout_p, "scale": call.scale}
    return function(*laid[:3], is_causal=laid.is_causal, **more)


def named_as(source: Any, weighting: Weighting, executors: Executors, null_key: bool = False) -> AttentionFunction:
    """Return an attention function with the name and the words of a function."""
    made = AttentionFunction(source.__name__, source.__doc__, weighting, executors, null_key)
    made.__module__ = source.__module__
    return made


def of_weighting(weighting: Weighting) -> AttentionFunction:
    """Return the attention function of a weighting, such as Softcap(2.0)."""
    return AttentionFunction(weighting.name, weighting.__doc__, weighting, OF_WEIGHTING)


def check_arguments(
    q: Query,
    k: Key,
    v: Value,
    mask: Mask,
    bias: Bias,
    is_causal: bool,
    dropout_p: float,
) -> None:
    """Raise ValueError unless the arguments fit the contract; this takes a microsecond or two."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(name, tensor)
    qs, ks, vs = q.shape, k.shape, v.shape
    agree = len(qs) >= 3 and qs[:-3] == ks[:-3] and qs[-1] == ks[-1] and ks[:-1] == vs[:-1]
    if not agree or ks[-3] < 1 or qs[-3] % ks[-3]:
        wanted = "q must be (…, H, T, D), k (…, Hkv, S, D) and v (…, Hkv, S, Dv), where Hkv divides H"
        raise ValueError(f"{wanted}: q is {tuple(qs)}, k is {tuple(ks)}, v is {tuple(vs)}.")
    if not q.dtype == k.dtype == v.dtype and (q.is_meta or not torch.is_autocast_enabled(q.device.type)):
        given = f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}"
        raise ValueError(f"{given}: give them one type, such as k.to(q.dtype), or call the function within autocast.")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p} must lie in [0, 1): 1 would drop every weight of q {tuple(qs)}.")
    if mask is not None and is_causal:
        raise ValueError(f"mask {tuple(mask.shape)} together with is_causal=True: put causality into the mask.")
    for name, overlay in (("mask", mask), ("bias", bias)):
        if overlay is not None:
            check_broadcast(name, overlay, (*qs[:-1], ks[-2]))
    if bias is not None:
        check_bias(bias)

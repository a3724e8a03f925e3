"""Modes for a while: eval, also of a model that another thread trains, and uncompiled."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""A lock for each module whose mode is set for a while."""
UNCOMPILED: list[object] = []
"""The blocks of uncompiled_calls(), of all threads, that have not been left."""
STANCE = ExitStack()
"""Gives back the stance of torch's compiler from before the first of them."""
STANCE_LOCK = RLock()


def lock_of(module: nn.Module) -> Any:
    """Return the lock that a thread holds while it reads or sets the modes of a module's parts."""
    return LOCKS.setdefault(module, RLock())


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in eval mode, and afterwards it and each part of it in their former modes.

    Other threads that ask for the same wait: they would take eval mode for the former one.
    """
    with lock_of(module):
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        try:
            yield
        finally:
            module.train(modes[0][1])
            for part, was_training in modes:
                if part.training != was_training:
                    part.training = was_training


@contextmanager
def uncompiled_calls() -> Iterator[None]:
    """Leave out compiled code, which passes by hooks that come after it, in a `with` block.

    torch has one stance for all threads. Blocks may be left in another order than they were begun: the last gives it
    back.
    """
    # Without torch's compiler, which takes a second to import, nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    block = object()
    with STANCE_LOCK:
        if not UNCOMPILED:
            STANCE.enter_context(torch.compiler.set_stance("force_eager"))
        UNCOMPILED.append(block)
    try:
        yield
    finally:
        with STANCE_LOCK:
            UNCOMPILED.remove(block)
            if not UNCOMPILED:
                STANCE.close()


def eval_twin(module: nn.Module, twins: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Return a module of the same tensors in eval mode, whose former parts keep their modes.

    Attributes, hooks and parameters are shared, not copied. A part that stands in two places is one in the twin too.
    """
    twins = {} if twins is None else twins
    if module in twins:
        return twins[module]
    twin = twins[module] = module.__class__.__new__(module.__class__)
    vars(twin).update(vars(module))
    parts = module._modules.items()
    twin._modules = {name: None if part is None else eval_twin(part, twins) for name, part in parts}
    twin.training = False
    return twin

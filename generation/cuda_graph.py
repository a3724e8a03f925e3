"""A sequence of GPU kernels launched as one: where each is small, launching them is most of their time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CapturedCall:
    """Calls a function: the first time as it is, the second while capturing it as a CUDA graph, then by replaying that.

    The function takes no arguments. It reads and changes tensors in place, whose addresses the graph keeps; every
    size and number that Python knows stays what it was when captured, and nothing in it may wait for the GPU. Its
    result is the same tensors each time, which the next call overwrites. The first call is a rehearsal: libraries
    allocate and load what they need at their first use, which may not happen during a capture.

    Source: Gray 2019, "Getting Started with CUDA Graphs"; PyTorch's notes on CUDA semantics, "CUDA Graphs".
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.rehearsed = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None

    def __call__(self) -> Any:
        if not self.rehearsed:
            self.rehearsed = True
            return self.function()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # Records the kernels and runs none. What other threads ask of the GPU meanwhile, such as NCCL's watchdog
            # or a checkpoint on its way to the disk, is allowed.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.result = self.function()
        self.graph.replay()
        return self.result

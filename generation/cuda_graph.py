"""A sequence of GPU kernels launched as one: where each is small, launching them is most of their time."""

from collections.abc import Callable
from typing import Any

import torch


class CapturedCall:
    """Call a function: the first time as it is, the second while capturing it as a CUDA graph, then replay the graph.

    The function takes no arguments and works in place on tensors, whose addresses the graph keeps. Every size and
    number that Python knows stays what it was when captured, and nothing may wait for the GPU. The result is the
    same tensors each time, which the next call overwrites. The first call is a rehearsal: libraries allocate and
    load what they need at first use, which a capture does not allow.

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
            # Record the kernels, run none. Other threads may use the GPU meanwhile: NCCL's watchdog, a checkpoint.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.result = self.function()
        self.graph.replay()
        return self.result

"""The state of a process that a run changes, and gives back to the caller of train()."""

import logging
import os
import random
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from common.errors import SettingsError

log = logging.getLogger("tinygpt")
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
OPEN: dict[int, list[int]] = {}
"""The thread of the run that is open, by the number of its process: a fork inherits its parent's entry."""


@contextmanager
def process_kept() -> Iterator[None]:
    """Give back, also after an error, what a run sets for its whole process.

    These are the generators of torch's CPU, numpy and Python, the flags of determinism, CUDA's current device, the
    filters of warnings, whether the log is disabled, and the defaults_of_torch(). Signal handlers, float32 products, a
    GPU's generator and the handlers of the log have contexts of their own, where they are set.

    Raises SettingsError while another run is open, as in another thread: each would draw from the other's generators.
    """
    # Note them.
    drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
    determinism = torch.get_deterministic_debug_mode()  # 0 for none, 1 if it warns alone, 2 if it raises
    benchmark = torch.backends.cudnn.benchmark
    workspace = os.environ.get(WORKSPACE)
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    filters = warnings.filters[:]
    is_disabled = log.disabled

    # Let one thread in.
    process = os.getpid()
    this = [threading.get_ident()]
    other = OPEN.setdefault(process, this)
    if other is not this:
        place = "this thread" if other == this else "another thread of this process"
        problem = f"{place} has a run open, and both would draw from the same generators"
        remedy = "train one after the other (n_jobs=1), or each in a process of its own, by multiprocessing's spawn"
        if other == this:
            remedy = "leave the `with` in which that one is open, or restart the notebook's kernel"
        raise SettingsError(problem, remedy)
    try:
        with defaults_of_torch():
            yield
    finally:
        # Give them back, each only if it has changed: to set determinism imports torch's compiler, and to reset the
        # filters shows old warnings again.
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        if determinism != torch.get_deterministic_debug_mode():
            torch.use_deterministic_algorithms(determinism > 0, warn_only=determinism == 1)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
        else:
            os.environ[WORKSPACE] = workspace
        if device is not None:
            torch.cuda.set_device(device)
        if warnings.filters != filters:
            warnings.resetwarnings()  # Python caches what the filters say until one of these functions is called
            warnings.filters = filters
        log.disabled = is_disabled
        del OPEN[process]


@contextmanager
def defaults_of_torch() -> Iterator[None]:
    """Let torch compute, inside, as in a new process.

    That is with gradients, in float32, on the CPU and without autocast. An earlier cell of a notebook may have chosen
    otherwise, or the caller may be in a context that does.
    """
    dtype = torch.get_default_dtype()
    elsewhere = torch.get_default_device().type != "cpu"
    casts = [device for device in ("cpu", "cuda", "mps") if torch.is_autocast_enabled(device)]
    is_cached = torch.is_autocast_cache_enabled()
    is_within = torch.autocast_increment_nesting() > 1  # an autocast of the caller, which may be disabled
    torch.autocast_decrement_nesting()
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu") if elsewhere else nullcontext():
        try:
            torch.set_default_dtype(torch.float32)
            for device in casts:
                torch.set_autocast_enabled(device, False)
            # torch would keep the casts of the first step's weights until the caller's autocast ends.
            torch.set_autocast_cache_enabled(is_cached and not is_within)
            yield
        finally:
            torch.set_default_dtype(dtype)
            for device in casts:
                torch.set_autocast_enabled(device, True)
            torch.set_autocast_cache_enabled(is_cached)


@contextmanager
def generator_kept(device: torch.device) -> Iterator[None]:
    """Give back, also after an error, the state of the generator of a GPU."""
    if device.type == "cpu":
        yield
        return
    module = torch.get_device_module(device)
    before = module.get_rng_state()
    try:
        yield
    finally:
        module.set_rng_state(before)


def initial_seed(seed: int) -> int:
    """Return the seed of a run's first weights: its own, or a hash of one beyond 32 bits.

    torch's generator of the CPU takes the lowest 32 bits alone, so that seeds 1 and 2^32 + 1 would begin alike.
    """
    return seed if seed < 2**32 else zlib.crc32(str(seed).encode())


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of a run's device; no other device's."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)

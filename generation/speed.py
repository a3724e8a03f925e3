"""The speed of decoding, measured."""

import statistics
import time

import torch

from generation.generate import Decoder
from model.gpt import GPT
from model.modes import eval_mode


@torch.inference_mode()
def decode_rate(model: GPT, steps: int = 48) -> float:
    """Return the tokens per second of one text whose context is nearly full."""
    times = list[float]()
    with eval_mode(model):
        decoder = Decoder(model)
        prompt = [0] * max(1, model.config.block_size - steps)
        token = decoder.prefill([prompt], steps).argmax(-1).tolist()
        for _ in range(steps):
            started = time.perf_counter()
            token = decoder.step(token).argmax(-1).tolist()  # tolist waits for the device
            times.append(time.perf_counter() - started)
    return 1 / statistics.median(times)  # the first steps may allocate and compile

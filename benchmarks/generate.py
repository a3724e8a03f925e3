"""How fast is generation, beside nanoGPT's and Hugging Face's, at batch size 1?

    python benchmarks/generate.py PATH_OF_A_NANOGPT_CHECKOUT

Every shape is measured in rounds, each program once a round in a changing order, so that what slows the
machine down slows all of them; the ratios are medians of the rounds' own ratios. "gpt2" is the very
shape of the others, "qwen3" the same sizes with our default settings (rope, swiglu, rmsnorm, QK-norm).
The floor is the time of reading every weight once a token: a sum over as many bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model.config import GPTConfig
from model.generate import Controls, generate
from model.gpt import GPT

SHAPES = {  # n_layer, n_head, n_embd, block_size, vocab_size
    "4×128, T=64": (4, 4, 128, 64, 65),
    "6×384, T=256": (6, 6, 384, 256, 65),
    "12×768, T=1024": (12, 12, 768, 1024, 50304),
}
TOKENS = 200
TEMPERATURE = 0.8


def ours(settings: dict) -> Callable[[], None]:
    model = GPT(GPTConfig(**settings)).eval()

    def run() -> None:
        for _ in generate(model, [[0]], max_new_tokens=TOKENS, seeds=[0], controls=Controls(temperature=TEMPERATURE)):
            pass

    return run


def nanogpt(checkout: Path, n_layer: int, n_head: int, n_embd: int, block_size: int, vocab_size: int):
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size, vocab_size=vocab_size, dropout=0.0
    )
    model = module.GPT(config).eval()
    start = torch.zeros(1, 1, dtype=torch.long)
    return lambda: model.generate(start, TOKENS, temperature=TEMPERATURE)


def hugging_face(n_layer: int, n_head: int, n_embd: int, block_size: int, vocab_size: int):
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        n_layer=n_layer, n_head=n_head, n_embd=n_embd, n_positions=max(block_size, TOKENS + 1), vocab_size=vocab_size,
        bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    start = torch.zeros(1, 1, dtype=torch.long)
    mask = torch.ones_like(start)
    return lambda: model.generate(
        start, attention_mask=mask, max_new_tokens=TOKENS, do_sample=True, temperature=TEMPERATURE, top_k=0
    )


def floor(settings: dict) -> Callable[[], None]:
    size = sum(parameter.numel() for parameter in GPT(GPTConfig(**settings)).parameters())
    weights = torch.ones(size)

    def run() -> None:
        for _ in range(TOKENS // 10):
            weights.sum()

    return run


def measure(programs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each program in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    with torch.no_grad():
        for name in names:
            programs[name]()  # warm up
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                start = time.perf_counter()
                programs[name]()
                seconds[name].append(time.perf_counter() - start)
    seconds["floor"] = [10 * taken for taken in seconds["floor"]]  # it was measured on a tenth of the tokens
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nanogpt", type=Path, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help="only this one of the shapes")
    arguments = parser.parse_args()

    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{processor()}, {torch.get_num_threads()} threads, {versions}")
    print(f"{TOKENS} new tokens, batch 1, float32; medians of {arguments.rounds} rounds (slowest – fastest)\n")
    shapes = list(SHAPES.items())
    for shape, (n_layer, n_head, n_embd, block_size, vocab_size) in (
        shapes if arguments.shape is None else [shapes[arguments.shape]]
    ):
        sizes = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size, vocab_size=vocab_size)
        gpt2 = sizes | dict(
            position="learned", norm="layernorm", norm_eps=1e-5, mlp="gelu", bias=True, qkv_bias=True, qk_norm=False,
            tie_embeddings=True, zero_init=False,
        )  # fmt: skip
        programs = {
            "gpt2": ours(gpt2),
            "qwen3": ours(sizes | dict(zero_init=False)),
            "nanoGPT": nanogpt(arguments.nanogpt, *sizes.values()),
            "Hugging Face": hugging_face(*sizes.values()),
            "floor": floor(gpt2),
        }
        seconds = measure(programs, arguments.rounds)
        print(f"{shape:16}{'tokens/s':>10}{'':20}{'of gpt2':>8}{'of qwen3':>9}")
        for name, taken in seconds.items():
            rate = f"{TOKENS / statistics.median(taken):10.0f}"
            spread = f"({TOKENS / max(taken):.0f} – {TOKENS / min(taken):.0f})"
            ratios = [
                statistics.median(t / o for t, o in zip(taken, seconds[own], strict=True)) for own in ("gpt2", "qwen3")
            ]
            print(f"  {name:14}{rate} {spread:19}{ratios[0]:7.2f}×{ratios[1]:8.2f}×", flush=True)
        print()


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return f"{names[0]} × {len(names)}" if names else platform.processor()


if __name__ == "__main__":
    main()

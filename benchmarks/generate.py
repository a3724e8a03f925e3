"""How fast is generation, compared with nanoGPT and Hugging Face?

    python benchmarks/generate.py PATH_OF_A_NANOGPT_CHECKOUT [--shape N] [--batch N]

The programs take turns on every shape. A text ends where the context does, so that all programs attend to the same
tokens: to all that came before. A short text is written several times in a row. "GPT-2's shape" is exactly the others'
model, "default" the same sizes with our default settings (rope, swiglu, rmsnorm, QK-norm), in float32 on a CPU. On a
GPU all are bf16, and Hugging Face uses a static cache and is compiled. The floor is the time to read every weight once
per token: a sum over as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import nanogpt
import paired
import torch
from torch.nn.attention import sdpa_kernel

from generation.config import SamplingParams
from generation.generate import BACKENDS, Decoder, filter_logits, sample
from model.config import GPTConfig
from model.gpt import GPT

SHAPES = {  # n_layer, n_head, n_embd, block_size, vocab_size; a text begins with one token
    "4 × 128, T = 64": (4, 4, 128, 64, 65),
    "6 × 384, T = 256": (6, 6, 384, 256, 65),
    "12 × 768, T = 1024": (12, 12, 768, 1024, 50304),
}
GPT2_SHAPE = dict(
    position="learned", norm="layernorm", norm_eps=1e-5, mlp="gelu", bias=True, qkv_bias=True, qk_norm=False,
    tie_embeddings=True, zero_init=False,
)  # fmt: skip
TOKENS = 200  # in a text, where they fit into block_size
PARAMS = SamplingParams(temperature=0.8)


def main() -> None:
    parser = paired.parser(__doc__)
    parser.add_argument("nanogpt", type=nanogpt.checkout, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help="only this one of the shapes")
    parser.add_argument("--batch", type=int, default=1, help="samples at a time (1)")
    arguments = parser.parse_args()
    paired.header("transformers")
    for number, shape in enumerate(SHAPES):
        if arguments.shape in (None, number):
            speed(shape, arguments.nanogpt, arguments.batch, arguments.rounds)


def speed(shape: str, checkout: Path, batch: int, rounds: int) -> None:
    """Measure one shape and print its table."""
    names = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    sizes = dict(zip(names, SHAPES[shape], strict=True))
    new = min(TOKENS, sizes["block_size"] - 1)
    texts = math.ceil(TOKENS / new)
    programs: dict[str, Callable[[], object]] = {
        "nanoGPT": theirs(checkout, sizes, batch, new),
        "Hugging Face": hugging_face(sizes, batch, new),
    }
    peers = list(programs)
    programs["ours, GPT-2's shape"] = ours(sizes | GPT2_SHAPE, batch, new)
    programs["ours, default"] = ours(sizes | dict(zero_init=False), batch, new)
    programs["floor"] = floor(sizes | GPT2_SHAPE, new)
    with torch.no_grad():
        measured = {name: paired.timed(program, texts) for name, program in programs.items()}
        seconds = paired.interleave(measured, rounds)
    in_a_row = f", {texts} in a row" if texts > 1 else ""
    print(f"{shape}: texts of {1 + new} tokens, {new} of them new{in_a_row}, batch {batch}\n")
    rows = []
    for name, taken in seconds.items():
        rate = paired.spread([batch * new / one for one in taken], ",.0f")
        rows.append([name, rate, *(paired.ratio(seconds[peer], taken) for peer in peers)])
    paired.table(["", "tokens/s", *(f"of {peer}" for peer in peers)], rows)


def dtype() -> torch.dtype:
    return torch.bfloat16 if paired.device().type == "cuda" else torch.float32


def ours(settings: dict, batch: int, new: int) -> Callable[[], None]:
    model = GPT(GPTConfig(**settings)).to(paired.device(), dtype()).eval()

    @torch.inference_mode()
    def run() -> None:
        decoder, generators = Decoder(model), [torch.Generator().manual_seed(seed) for seed in range(batch)]
        logits = decoder.prefill([[0]] * batch, new)
        for _ in range(new):
            uniform = torch.cat([torch.rand(1, generator=generator) for generator in generators])
            logits = decoder.step(sample(filter_logits(logits, PARAMS), uniform).tolist())

    return run


def theirs(checkout: Path, sizes: dict[str, int], batch: int, new: int) -> Callable[[], object]:
    """nanoGPT's generate, as its sample.py calls it: bf16 is autocast's.

    Its attention backends are pinned as ours are:
    cuDNN's would plan anew for each length."""
    module = nanogpt.load(checkout)
    model = module.GPT(module.GPTConfig(**sizes, dropout=0.0)).to(paired.device()).eval()
    start = torch.zeros(batch, 1, dtype=torch.long, device=paired.device())
    autocast = torch.autocast(paired.device().type, torch.bfloat16, enabled=dtype() == torch.bfloat16)

    def run() -> None:
        with autocast, sdpa_kernel(BACKENDS):
            model.generate(start, new, temperature=PARAMS.temperature)

    return run


def hugging_face(sizes: dict[str, int], batch: int, new: int) -> Callable[[], object]:
    import transformers

    transformers.logging.set_verbosity_error()
    settings = {"n_positions" if name == "block_size" else name: size for name, size in sizes.items()}
    config = transformers.GPT2Config(
        **settings, activation_function="gelu", bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).to(paired.device(), dtype()).eval()
    start = torch.zeros(batch, 1, dtype=torch.long, device=paired.device())
    return lambda: model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=new, do_sample=True, top_k=0,
        temperature=PARAMS.temperature, cache_implementation="static" if torch.cuda.is_available() else None,
    )  # fmt: skip


def floor(settings: dict, tokens: int) -> Callable[[], None]:
    """Every weight read once for each token."""
    size = sum(parameter.numel() for parameter in GPT(GPTConfig(**settings)).parameters())
    weights = torch.ones(size, device=paired.device(), dtype=dtype())

    def run() -> None:
        for _ in range(tokens):
            weights.sum()

    return run


if __name__ == "__main__":
    main()

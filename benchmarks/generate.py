"""How fast is generation, compared with nanoGPT and Hugging Face?

    python benchmarks/generate.py PATH_OF_A_NANOGPT_CHECKOUT

The programs take turns on every shape, at batch 1 unless --batch says more. A text ends where the context does, so that
all programs attend to the same tokens: to all that came before. A short text is written several times in a row.
"GPT-2's shape" is exactly the others' model, "default" the same sizes with our default settings (rope, swiglu, rmsnorm,
QK-norm), in float32 and with int8 weights. --gguf adds llama.cpp, through llama-cpp-python and with its defaults, to
the shape that its files have: models of our default settings, exported and converted as docs/interop.md says, once
with --outtype f32 and once with q8_0. On a GPU Hugging Face uses a static cache and is compiled. The floor is the time
to read every weight once per token: a sum over as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import nanogpt
import paired
import torch

from generation.decoder import Decoder
from generation.sampling import Controls, generate
from model.config import GPTConfig
from model.gpt import GPT
from model.packed import to_int8

SHAPES = {  # n_layer, n_head, n_embd, block_size, vocab_size; a text begins with one token
    "4 × 128, T = 64": (4, 4, 128, 64, 65),
    "6 × 384, T = 256": (6, 6, 384, 256, 65),
    "12 × 768, T = 1024": (12, 12, 768, 1024, 50304),
}
GPT2_SHAPE = dict(
    position="learned", norm="layernorm", norm_eps=1e-5, mlp="gelu", bias=True, qkv_bias=True, qk_norm=False,
    tie_embeddings=True, zero_init=False,
)  # fmt: skip
TOKENS = 200
"""In a text, where they fit into block_size."""
TEMPERATURE = 0.8


def main() -> None:
    parser = paired.Parser(__doc__)
    parser.add_argument("nanogpt", type=nanogpt.checkout, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help="only this one of the shapes")
    parser.add_argument("--batch", type=paired.count, default=1, help="samples at a time (1)")
    parser.add_argument("--gguf", type=paired.file, nargs="+", default=[], help="models for llama.cpp, at batch 1")
    arguments = parser.parse_args()
    if arguments.gguf and (arguments.batch > 1 or not find_spec("llama_cpp")):
        parser.error("--gguf wants --batch 1 and llama.cpp: pip install llama-cpp-python")
    paired.header("transformers")
    for number, shape in enumerate(SHAPES):
        if arguments.shape in (None, number):
            speed(shape, arguments.nanogpt, arguments.batch, arguments.rounds, files=arguments.gguf)


def speed(
    shape: str,
    checkout: Path | None,
    batch: int,
    rounds: int,
    precision: torch.dtype = torch.float32,
    engine: bool = True,
    files: Sequence[Path] = (),
) -> None:
    """Measure one shape and print its table. engine: beside Hugging Face too, where it is installed."""
    n_layer, n_head, n_embd, block_size, vocab_size = SHAPES[shape]
    sizes = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size, vocab_size=vocab_size)
    new = min(TOKENS, block_size - 1)
    texts = math.ceil(TOKENS / new)
    programs: dict[str, Callable[[], object]] = {}
    if checkout:
        programs["nanoGPT"] = theirs(checkout, sizes, batch, new, precision)
    if engine and find_spec("transformers"):
        programs["Hugging Face"] = hugging_face(sizes, batch, new)
    for file in files:
        if program := llama_cpp(file, sizes, new):
            programs[f"llama.cpp, {file.stem}"] = program
    peers = list(programs)
    programs["ours, GPT-2's shape"] = ours(sizes | GPT2_SHAPE, batch, new, precision)
    programs["ours, default"] = ours(sizes | dict(zero_init=False), batch, new, precision)
    if paired.device().type == "cpu":
        programs["ours, default, int8"] = ours(sizes | dict(zero_init=False), batch, new, precision, int8=True)
    measured = {name: paired.timed(program, texts) for name, program in programs.items()}
    tenth = paired.timed(floor(sizes | GPT2_SHAPE, new // 10, precision))
    measured["floor"] = lambda: new / (new // 10) * tenth()
    with torch.no_grad():
        seconds = paired.interleave(measured, rounds)
    name = str(precision).removeprefix("torch.")
    in_a_row = f", {texts} in a row" if texts > 1 else ""
    print(f"{shape}: texts of {1 + new} tokens, {new} of them new{in_a_row}, batch {batch}, {name}\n")
    rows = []
    for name, taken in seconds.items():
        rate = paired.spread([batch * new / one for one in taken], ",.0f")
        ratios = (paired.ratio(seconds[peer], taken) for peer in (*peers, "ours, default"))
        rows.append([name, rate, *ratios])
    paired.table(["", "tokens/s", *(f"of {peer}" for peer in peers), "of our default"], rows)


def ours(settings: dict, batch: int, new: int, precision: torch.dtype, *, int8: bool = False) -> Callable[[], None]:
    model = GPT(GPTConfig(**settings)).to(paired.device(), precision).eval()
    if int8:
        to_int8(model)
    decoder = Decoder(model)
    controls, seeds = Controls(temperature=TEMPERATURE), list(range(batch))

    def run() -> None:
        for _ in generate(decoder, [[0]] * batch, max_new_tokens=new, seeds=seeds, controls=controls):
            pass

    return run


def theirs(checkout: Path, sizes: dict[str, int], batch: int, new: int, precision: torch.dtype) -> Callable[[], object]:
    """nanoGPT's generate, as its sample.py calls it: bf16 is autocast's."""
    module = nanogpt.load(checkout)
    model = module.GPT(module.GPTConfig(**sizes, dropout=0.0)).to(paired.device()).eval()
    start = torch.zeros(batch, 1, dtype=torch.long, device=paired.device())
    autocast = torch.autocast(paired.device().type, torch.bfloat16, enabled=precision == torch.bfloat16)

    def run() -> None:
        with autocast:
            model.generate(start, new, temperature=TEMPERATURE)

    return run


def hugging_face(sizes: dict[str, int], batch: int, new: int) -> Callable[[], object]:
    import transformers

    transformers.logging.set_verbosity_error()
    settings = {"n_positions" if name == "block_size" else name: size for name, size in sizes.items()}
    config = transformers.GPT2Config(
        **settings, activation_function="gelu", bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).to(paired.device()).eval()
    start = torch.zeros(batch, 1, dtype=torch.long, device=paired.device())
    return lambda: model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=new, do_sample=True, temperature=TEMPERATURE,
        top_k=0, cache_implementation="static" if torch.cuda.is_available() else None,
    )  # fmt: skip


def llama_cpp(file: Path, sizes: dict[str, int], new: int) -> Callable[[], object] | None:
    """llama.cpp's generation with a model in a GGUF file, None where that has another shape."""
    from llama_cpp import Llama

    model = Llama(
        str(file), n_ctx=sizes["block_size"], n_threads=torch.get_num_threads(), n_gpu_layers=-1, verbose=False
    )
    architecture = model.metadata["general.architecture"]
    if int(model.metadata[f"{architecture}.block_count"]) != sizes["n_layer"] or model.n_embd() != sizes["n_embd"]:
        return None

    def run() -> None:
        model.reset()
        tokens = model.generate([0], top_k=0, top_p=1.0, min_p=0.0, temp=TEMPERATURE, repeat_penalty=1.0)
        for _ in zip(range(new), tokens, strict=False):
            pass

    return run


def floor(settings: dict, tokens: int, precision: torch.dtype) -> Callable[[], None]:
    """Every weight read once for each token."""
    size = sum(parameter.numel() for parameter in GPT(GPTConfig(**settings)).parameters())
    weights = torch.ones(size, device=paired.device(), dtype=precision)

    def run() -> None:
        for _ in range(tokens):
            weights.sum()

    return run


if __name__ == "__main__":
    main()

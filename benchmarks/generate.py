"""How fast is generation, compared with nanoGPT, Hugging Face and llama.cpp?

    python benchmarks/generate.py PATH_OF_A_NANOGPT_CHECKOUT [--shape N] [--batch N]
    python benchmarks/generate.py --llama-cpp FOLDER [--shape N]

FOLDER is a checkout of github.com/ggml-org/llama.cpp, whose converter needs `pip install llama-cpp-python gguf
sentencepiece`. Then model=llama with random weights is exported and converted, and one text is decoded greedily in
float32 by llama.cpp, Hugging Face and us, each with torch's number of threads (OMP_NUM_THREADS). The command ends with
an error if their tokens differ.

The programs take turns on every shape. A text ends where the context does, so that all programs attend to the same
tokens: to all that came before. A short text is written several times in a row. "GPT-2's shape" is exactly the others'
model, "default" the same sizes with our default settings (rope, swiglu, rmsnorm, QK-norm), in float32 on a CPU. On a
GPU all are bf16, and Hugging Face uses a static cache and is compiled. The floor is the time to read every weight once
per token: a sum over as many bytes.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import nanogpt
import paired
import torch
from omegaconf import OmegaConf
from torch.nn.attention import sdpa_kernel

from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from export import ExportConfig, export
from generation.config import SamplingParams
from generation.generate import BACKENDS, Decoder, filter_logits, sample
from model.config import GPTConfig
from model.gpt import GPT
from runs.checkpoint import save_checkpoint
from training.config import TrainConfig

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
LLAMA_SHAPES = {  # of model=llama, with as many key heads as query heads
    "6 × 384": dict(n_layer=6, n_head=6, n_kv_head=6, n_embd=384, block_size=256, vocab_size=512),
    "12 × 768": dict(n_layer=12, n_head=12, n_kv_head=12, n_embd=768, block_size=256, vocab_size=512),
}
PROMPT = [1, 20, 30, 40]


def main() -> None:
    parser = paired.parser(__doc__)
    parser.add_argument("nanogpt", type=nanogpt.checkout, nargs="?", help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="a checkout of llama.cpp, to measure instead")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help="only this one of the shapes")
    parser.add_argument("--batch", type=int, default=1, help="samples at a time (1)")
    arguments = parser.parse_args()
    if (arguments.nanogpt is None) == (arguments.llama_cpp is None):
        parser.error("name a checkout: either nanoGPT's, or llama.cpp's with --llama-cpp FOLDER")
    if arguments.llama_cpp and not (arguments.llama_cpp / "convert_hf_to_gguf.py").is_file():
        parser.error(f"--llama-cpp {arguments.llama_cpp}: there is no convert_hf_to_gguf.py; name llama.cpp's checkout")
    if arguments.llama_cpp and arguments.batch != 1:
        parser.error(f"--batch {arguments.batch}: beside llama.cpp one text is decoded; leave --batch out")
    paired.header("transformers", *(["llama-cpp-python"] if arguments.llama_cpp else []))
    for number, shape in enumerate(LLAMA_SHAPES if arguments.llama_cpp else SHAPES):
        if arguments.shape not in (None, number):
            continue
        if arguments.llama_cpp:
            beside_llama_cpp(shape, arguments.llama_cpp, arguments.rounds)
        else:
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
    print_rates(seconds, batch * new, peers)


def print_rates(seconds: dict[str, list[float]], tokens: int, peers: list[str]) -> None:
    """Print the table of programs that write so many tokens, beside some of them."""
    rows = []
    for name, taken in seconds.items():
        rate = paired.spread([tokens / one for one in taken], ",.0f")
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


def beside_llama_cpp(shape: str, checkout: Path, rounds: int) -> None:
    """Export a model, decode with each program, compare their tokens, and print the table of one shape."""
    torch.manual_seed(0)
    settings = OmegaConf.to_container(OmegaConf.load(paired.ROOT / "conf" / "model" / "llama.yaml"))
    model = GPT(GPTConfig(**(settings | LLAMA_SHAPES[shape]))).eval()
    with tempfile.TemporaryDirectory() as folder:
        gguf = convert(model, checkout, Path(folder))
        programs = {
            "llama.cpp": llama_cpp(gguf),
            "Hugging Face": exported(Path(folder) / "exported"),
            "ours": greedy(model),
        }
    with torch.inference_mode():
        texts = {name: program() for name, program in programs.items()}
        different = [name for name, text in texts.items() if text != texts["ours"]]
        if different:
            raise SystemExit(f"{shape}: {', '.join(different)} wrote other tokens than we did")
        seconds = paired.interleave({name: paired.timed(program) for name, program in programs.items()}, rounds)
    print(f"model=llama, {shape}: the same {TOKENS} tokens after {len(PROMPT)}, float32\n")
    print_rates(seconds, TOKENS, ["llama.cpp", "Hugging Face"])


def convert(model: GPT, checkout: Path, folder: Path) -> Path:
    """Return a GGUF file of the model in float32, by export.py and the command of docs/interop.md."""
    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer = make_tokenizer(TokenizerConfig(name="bpe", vocab_size=model.config.vocab_size), [text])
    save_checkpoint(folder / "step_1", model=model, tokenizer=tokenizer, config=TrainConfig(model=model.config))
    export(ExportConfig(checkpoint=str(folder / "step_1"), to=str(folder / "exported")))
    page = (paired.ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"--outfile mymodel.gguf <<'EOF'\n(.*?)\nEOF", page, re.DOTALL)
    gguf = folder / "model.gguf"
    arguments = [sys.executable, "-", folder / "exported", "--outfile", gguf, "--outtype", "f32"]
    paired.run(arguments, input=command, cwd=checkout)
    return gguf


def llama_cpp(gguf: Path) -> Callable[[], list[int]]:
    """llama.cpp by its own Python package, with a cache in float32."""
    import llama_cpp as package
    import numpy as np

    threads = torch.get_num_threads()
    exact = dict(type_k=package.GGML_TYPE_F32, type_v=package.GGML_TYPE_F32)
    model = package.Llama(
        str(gguf), n_ctx=256, n_threads=threads, n_threads_batch=threads, use_mmap=False, verbose=False, **exact
    )

    def run() -> list[int]:
        model.reset()
        model.eval(PROMPT)
        tokens = []
        for _ in range(TOKENS):
            logits = np.ctypeslib.as_array(package.llama_get_logits(model.ctx), (model.n_vocab(),))
            tokens.append(int(logits.argmax()))
            model.eval(tokens[-1:])
        return tokens

    return run


def exported(folder: Path) -> Callable[[], list[int]]:
    """Hugging Face's generate, of the exported folder."""
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    start = torch.tensor([PROMPT])
    # A random model may write the end of the text, after which it goes on here.
    settings = dict(max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    return lambda: model.generate(start, attention_mask=torch.ones_like(start), **settings)[0, len(PROMPT) :].tolist()


def greedy(model: GPT) -> Callable[[], list[int]]:
    def run() -> list[int]:
        decoder = Decoder(model)
        logits = decoder.prefill([PROMPT], TOKENS)
        tokens = []
        for _ in range(TOKENS):
            tokens.append(int(logits.argmax()))
            logits = decoder.step(tokens[-1:])
        return tokens

    return run


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

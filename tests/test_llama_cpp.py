"""llama.cpp reads an exported folder, as docs/interop.md says: equal ids, equal log p.

LLAMA_CPP=FOLDER names llama.cpp's folder, for its converter; the package llama-cpp-python runs the file.
"""

import os
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import random_gpt
from test_huggingface import GPT2, LLAMA

from common.errors import DataError
from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from export import ExportConfig, export
from runs.checkpoint import save_checkpoint
from training.config import TrainConfig

ROOT = Path(__file__).parent.parent
CLASSES = {"gpt2": GPT2, "llama": LLAMA | {"n_kv_head": 2}, "qwen3": {"tie_embeddings": True}}
FOLDER = Path(os.environ.get("LLAMA_CPP", "/nowhere"))
TEXTS = (
    "The quick  brown fox,\n\njumps over\t12345 lazy dogs. ", "naïve café: 北京 2024 😀👍🏽", " leading 1 22 1234",
    "I've we've don't", "def f(x):\n    return x[1:-1] != 3.14e10  # no\n", "a\n\nb \n c",
)  # fmt: skip


def convert(*arguments: str | Path, cwd: Path) -> str:
    """Run the page's lines for llama.cpp's converter in its folder; return what it prints."""
    page = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"--outfile mymodel\.gguf[^\n]*<<'EOF'\n(.*?)\nEOF", page, re.DOTALL)
    done = subprocess.run([sys.executable, "-", *arguments], input=lines, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_lines_of_the_page_hand_the_converter_the_name_of_the_pattern(tmp_path):
    """The test below, which needs llama.cpp, no longer found them, and nobody saw it."""
    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion" / "base.py").write_text("class TextModel: ...\n")
    (tmp_path / "tokenizer_config.json").write_text('{"ggml_pre": "llama-bpe"}')
    stub = """import pathlib, sys
from conversion.base import TextModel

def main():
    model = TextModel()
    model.dir_model = pathlib.Path(sys.argv[1])
    print(model.get_vocab_base_pre(None))
"""
    (tmp_path / "convert_hf_to_gguf.py").write_text(stub)
    assert convert(tmp_path, cwd=tmp_path) == "llama-bpe\n"


@pytest.mark.slow
@pytest.mark.skipif(not (FOLDER / "convert_hf_to_gguf.py").is_file(), reason="LLAMA_CPP names no folder of llama.cpp")
@pytest.mark.parametrize("tokenizer", ["bpe", "gpt2", "cl100k_base", "o200k_base"])
@pytest.mark.parametrize("kind", CLASSES)
@torch.inference_mode()
def test_llama_cpp_gives_our_ids_and_log_probabilities(kind, tokenizer, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    try:
        text = Path(string.__file__).read_text(encoding="utf-8") + "".join(TEXTS) * 9
        encoding = make_tokenizer(TokenizerConfig(name=tokenizer, vocab_size=600), [text])
    except DataError as error:
        pytest.skip(str(error))
    model = random_gpt(vocab_size=encoding.n_vocab, block_size=128, **CLASSES[kind])
    save_checkpoint(tmp_path / "step_1", model=model, tokenizer=encoding, config=TrainConfig(model=model.config))
    export(ExportConfig(checkpoint=str(tmp_path / "step_1"), to=str(tmp_path / "theirs")))
    convert(tmp_path / "theirs", "--outfile", tmp_path / "a.gguf", "--outtype", "f32", cwd=FOLDER)
    exact = dict(type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)  # else its cache has half precision
    theirs = llama_cpp.Llama(str(tmp_path / "a.gguf"), n_ctx=128, logits_all=True, verbose=False, **exact)
    for text in TEXTS:
        ids = [encoding.eot_token, *encoding.encode_ordinary(text)]
        assert theirs.tokenize(text.encode(), add_bos=True) == ids
        theirs.reset()
        theirs.eval(ids)
        got = torch.tensor(theirs.scores[: len(ids)]).log_softmax(-1)
        difference = (got - model(torch.tensor([ids]))[0].log_softmax(-1)).abs().max()
        assert difference < (1e-2 if kind == "gpt2" else 1e-4), difference  # its GELU is a table in half precision

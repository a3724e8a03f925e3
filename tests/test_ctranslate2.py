"""CTranslate2 reads an exported folder: equal ids, equal log p."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import close, random_gpt
from test_huggingface import SHAPES

from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from generation.generate import encode_prompt
from interop.huggingface import to_huggingface
from interop.tokenizer import save_tokenizer_json

BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])
TEXT = "Once upon a"


def both_log_p(model, folder):
    """The log p of TEXT's tokens by CTranslate2, from an exported folder, and by the model."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    transformers = pytest.importorskip("transformers")
    to_huggingface(model, folder / "mymodel", BYTE.eot_token)
    save_tokenizer_json(BYTE, folder / "mymodel", 16)
    options = ["--model", str(folder / "mymodel"), "--output_dir", str(folder / "theirs")]
    command = [sys.executable, "-m", "ctranslate2.converters.transformers", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "mymodel")
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == encode_prompt(BYTE, TEXT)
    generator = ctranslate2.Generator(str(folder / "theirs"), device="cpu", intra_threads=1)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    theirs = np.array(generator.forward_batch([tokens], return_log_probs=True))
    return torch.from_numpy(theirs), model(torch.tensor([ids])).log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gpt2", "llama-grouped-tied", "qwen2", "qwen3"])
@torch.inference_mode()
def test_ctranslate2_gives_our_ids_and_log_probabilities(shape, tmp_path):
    theirs, ours = both_log_p(random_gpt(**SHAPES[shape] | {"vocab_size": 257}), tmp_path)
    close(theirs, ours, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "setting"),
    [
        ("qwen2", {"attention_window": 4}),
        ("qwen3", {"attention_window": 4}),
        ("gpt2", {"norm_eps": 1e-2}),
        ("llama", {"head_size": 16}),
    ],
)
@torch.inference_mode()
def test_ctranslate2_leaves_out_what_the_page_says(shape, setting, tmp_path):
    theirs, ours = both_log_p(random_gpt(**SHAPES[shape] | setting | {"vocab_size": 257}), tmp_path)
    assert (theirs - ours).abs().max() > 0.01

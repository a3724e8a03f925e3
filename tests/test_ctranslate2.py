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


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gpt2", "llama-grouped-tied", "qwen2", "qwen3"])
@torch.inference_mode()
def test_ctranslate2_gives_our_ids_and_log_probabilities(shape, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    transformers = pytest.importorskip("transformers")
    model = random_gpt(**SHAPES[shape] | {"vocab_size": 257})
    to_huggingface(model, tmp_path / "mymodel", BYTE.eot_token)
    save_tokenizer_json(BYTE, tmp_path / "mymodel", 16)
    options = ["--model", str(tmp_path / "mymodel"), "--output_dir", str(tmp_path / "theirs")]
    command = [sys.executable, "-m", "ctranslate2.converters.transformers", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "mymodel")
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == encode_prompt(BYTE, TEXT)
    generator = ctranslate2.Generator(str(tmp_path / "theirs"), device="cpu", intra_threads=1)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    theirs = np.array(generator.forward_batch([tokens], return_log_probs=True))
    close(torch.from_numpy(theirs), model(torch.tensor([ids])).log_softmax(-1), atol=1e-4)

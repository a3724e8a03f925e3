"""The sketches in the docstrings of the files that README names: each is the code below it, with the defaults."""

import math
import textwrap

import numpy as np
import torch
import torch.nn.functional as F
from conftest import close, random_gpt

import data.batches
import generation.generate
import model.attention.layer
import model.gpt
from data.batches import TokenDataset, draw_epoch
from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from generation.config import SamplingParams
from generation.generate import encode_prompt, filter_logits, generate, sample, uniform_number
from model.attention.call import repeat_heads
from model.attention.masks import causal_mask

BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])
TOKENS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))


def run(module, names):
    """Run the block of the docstring that assigns names, and return all names."""
    blocks = module.__doc__.split("\n\n")
    (sketch,) = (block for block in blocks if block.startswith("    ") and " = " in block)
    exec(textwrap.dedent(sketch), names)
    return names


def test_the_model():
    gpt = random_gpt(block_size=32)
    parts = dict(gpt.named_children())
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    found = run(model.gpt, {**parts, "F": F, "tokens": inputs, "targets": targets})
    close(gpt(inputs), found["logits"], atol=1e-4)
    close(gpt.loss(inputs, targets), found["loss"], atol=1e-2)


def test_the_layer():
    gpt = random_gpt(n_kv_head=2)
    layer = gpt.attentions[1]
    x = torch.randn(2, 24, gpt.config.n_embd)
    sizes = {"H": layer.n_head, "Hkv": layer.kv_heads, "D": layer.head_dim, "T": 24}
    parts = {name: getattr(layer, name) for name in ("qkv_proj", "q_norm", "k_norm", "o_proj")}
    functions = {"math": math, "causal_mask": causal_mask, "repeat_heads": repeat_heads}
    rotations = model.attention.layer.AttentionContext()
    names = {**sizes, **parts, **functions, "x": x, "rotate": lambda heads: layer.rotate(heads, rotations)}
    close(layer(x), run(model.attention.layer, names)["change"], atol=1e-5)


def test_a_batch():
    tokens = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    dataset = TokenDataset(BYTE, tokens, tokens, "", "", block_size=128, batch_size=2, seed=3)
    count = 6
    names = {"np": np, "draw_epoch": draw_epoch, "tokens": tokens.astype(np.int64), "block_size": 128, "seed": 3}
    for step in range(6):  # two epochs
        epoch, place = divmod(2 * step, count)
        more = {"epoch": epoch, "count": count, "room": 1000 - count * 128, "start": place, "stop": place + 2}
        found = run(data.batches, names | more)
        batch = dataset.train_batch(step, 0, 2)
        assert (batch.inputs == found["inputs"]).all() and (batch.targets == found["targets"]).all()


def test_the_loop_that_writes():
    gpt = random_gpt(block_size=64, vocab_size=257)
    params = SamplingParams(max_new_tokens=40, temperature=0.8, top_k=50)
    names = {
        "torch": torch,
        "model": gpt.eval(),
        "tokenizer": BYTE,
        "prompt": "Once upon",
        "params": params,
        "generator": torch.Generator().manual_seed(7),
        "encode_prompt": encode_prompt,
        "filter_logits": filter_logits,
        "sample": sample,
        "uniform_number": uniform_number,
    }
    with torch.no_grad():
        found = run(generation.generate, names)
    chunks = generate(gpt, BYTE, [encode_prompt(BYTE, "Once upon")], seeds=[7], params=params)
    assert found["text"].removeprefix("Once upon") == "".join(chunk.text for chunk in chunks)

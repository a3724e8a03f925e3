"""The sketches in the docstrings of the files that README names: each is the code below it, with the defaults."""

import inspect
import math
from copy import deepcopy

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
from model.config import GPTConfig
from train import train_step
from training.config import OptimizerConfig, TrainConfig
from training.device import batch_to_device
from training.optimizer import set_learning_rate
from training.plan import trial_run

BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])
TOKENS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))


def run(module, names):
    """Run the block of the docstring that assigns names, and return all names."""
    blocks = inspect.getdoc(module).split("\n\n")
    (sketch,) = (block for block in blocks if block.startswith("    ") and " = " in block)
    exec(inspect.cleandoc(sketch), names)
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
        more = {"epoch": epoch, "count": count, "room": 1000 - count * 128, "taken": place, "batch_size": 2}
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


def test_a_step():
    """The sketch with torch's own AdamW is our step with ours."""
    config = TrainConfig()
    config.model = GPTConfig(vocab_size=257, n_layer=1, n_head=2, n_embd=32, block_size=16, zero_init=False)
    config.optimizer = OptimizerConfig(name="adamw", lr=1e-2, embedding_lr=None, lm_head_lr=None, weight_decay=0.0)
    config.batch_size = 4
    config.grad_clip = 0.5
    cpu = torch.device("cpu")
    ours, theirs = (trial_run(config, cpu, torch.float32) for _ in range(2))
    theirs.model.load_state_dict(ours.model.state_dict())
    tokens = np.random.default_rng(0).integers(0, 256, 500).astype(np.uint16)
    ours.data = theirs.data = TokenDataset(BYTE, tokens, tokens, "", "", block_size=16, batch_size=4)
    before = deepcopy(ours.model.state_dict())
    set_learning_rate(ours.optimizers, 1.0)
    betas = config.optimizer.beta1, config.optimizer.beta2
    names = {
        "torch": torch,
        "batch_to_device": batch_to_device,
        "data": theirs.data,
        "model": theirs.model,
        "device": cpu,
        "batch_size": 4,
        "grad_clip": 0.5,
        "optimizer": torch.optim.AdamW(theirs.model.parameters(), lr=1e-2, betas=betas, eps=1e-10, weight_decay=0.0),
    }
    for step in range(3):
        loss, _ = train_step(ours, step)
        found = run(train_step, names | {"step": step})
        close(found["loss"], loss)
    for name, weight in theirs.model.state_dict().items():
        close(weight, ours.model.state_dict()[name], atol=1e-4)
        assert not torch.equal(weight, before[name])

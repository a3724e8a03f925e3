"""One text on a CPU: the steps beside the layers compute what the layers do, with all that is attached to them."""

import copy
import subprocess
import sys

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from conftest import close, first_of, random_gpt, some
from test_origin import copy_code
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from generation.generate import Decoder, generate_text
from model import row
from model.attention import AttentionContext, make_attention
from model.cache import KVCache
from model.config import AttentionConfig
from model.gpt import GPT, Block
from model.layers import Linear, RMSNorm
from model.row import DecodedModel, serves

PARTS = ("blocks.0", "blocks.0.attention", "blocks.0.attention.qkv_proj", "blocks.0.attention.q_norm")
PARTS += ("blocks.0.attention.o_proj", "blocks.0.attention_norm", "blocks.0.mlp", "blocks.0.mlp.down_proj")
PARTS += ("blocks.1.dropout", "token_embedding", "final_norm", "lm_head", "")


class Wrapped(nn.Module):
    """An adapter: a module around another one."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *given):
        return 1.5 * self.module(*given)


class Louder(nn.Module):
    def forward(self, weight):
        return 1.5 * weight


class Halving(TorchFunctionMode):
    """Halves the result of each linear layer."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        return y / 2 if func is F.linear else y


def replace_part(model, name, module):
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def patch(module, name, factor=1.5):
    method = getattr(module, name)
    setattr(module, name, lambda *given: factor * method(*given))


@torch.no_grad()
def averaged(model):
    for weight in model.parameters():
        weight.data = 0.5 * weight.data + 0.01


def subclassed(cls):
    class Changed(cls):
        def forward(self, *given, **named):
            return 1.5 * super().forward(*given, **named)

    return Changed


def recast(model, name, cls):
    model.get_submodule(name).__class__ = subclassed(cls)


DOWN, QKV, O_PROJ = "blocks.0.mlp.down_proj", "blocks.1.attention.qkv_proj", "blocks.0.attention.o_proj"
# Ways to attach code to a model, or to change it, that any torch module allows.
WAYS = {
    **{
        f"hook on {part or 'the model'}": lambda model, part=part: model.get_submodule(part).register_forward_hook(
            lambda module, given, y: y * 1.5
        )
        for part in PARTS
    },
    "pre-hook": lambda model: model.blocks[1].mlp.register_forward_pre_hook(lambda module, given: (given[0] * 1.5,)),
    "pre-hook with names": lambda model: model.blocks[0].attention.register_forward_pre_hook(
        lambda module, given, named: ((given[0] * 1.5, *given[1:]), named), with_kwargs=True
    ),
    "forward of an instance": lambda model: patch(model.blocks[0].mlp, "forward"),
    "forward of the model": lambda model: setattr(
        model, "forward", lambda *given, **named: 1.5 * GPT.forward(model, *given, **named)
    ),
    "a step of the attention": lambda model: patch(model.blocks[0].attention, "merge"),
    "how an instance is called": lambda model: patch(model.get_submodule(DOWN), "_call_impl"),
    "a static method": lambda model: patch(model.blocks[0].mlp, "activation"),
    "compiled in place": lambda model: setattr(
        model.get_submodule(DOWN), "_compiled_call_impl", lambda x: 2 * F.linear(x, model.get_submodule(DOWN).weight)
    ),
    "a subclass of a linear layer": lambda model: recast(model, QKV, Linear),
    "a subclass of a norm": lambda model: recast(model, "blocks.0.attention.k_norm", RMSNorm),
    "a subclass of a block": lambda model: recast(model, "blocks.0", Block),
    "a subclass of the model": lambda model: recast(model, "", GPT),
    "an adapter of a linear layer": lambda model: replace_part(model, O_PROJ, Wrapped(model.get_submodule(O_PROJ))),
    "an adapter of a norm": lambda model: replace_part(model, "blocks.0.mlp_norm", Wrapped(model.blocks[0].mlp_norm)),
    "an adapter of an MLP": lambda model: replace_part(model, "blocks.1.mlp", Wrapped(model.blocks[1].mlp)),
    "a norm left out": lambda model: replace_part(model, "blocks.0.attention.k_norm", nn.Identity()),
    "another eps": lambda model: setattr(model.blocks[0].attention.k_norm, "eps", 1.0),
    "another eps of a block's norm": lambda model: setattr(model.blocks[0].mlp_norm, "eps", 1.0),
    "a traced module": lambda model: replace_part(
        model, "blocks.0.mlp", torch.jit.trace(Wrapped(model.blocks[0].mlp).eval(), torch.randn(1, 3, 32))
    ),
    "a parametrisation": lambda model: parametrize.register_parametrization(
        model.get_submodule(DOWN), "weight", Louder()
    ),
    "a parametrisation of a norm": lambda model: parametrize.register_parametrization(
        model.blocks[0].attention.q_norm, "weight", Louder()
    ),
    "weight norm": lambda model: (
        parametrizations.weight_norm(model.get_submodule(DOWN))
        .parametrizations.weight[0]
        .register_forward_hook(lambda module, given, y: y * 1.5)
    ),
    "pruning": lambda model: prune.l1_unstructured(model.get_submodule(QKV), "weight", 0.5),
    "a weight that is no parameter": lambda model: (
        delattr(linear := model.get_submodule(DOWN), "weight"),
        setattr(linear, "weight", torch.ones(32, linear.in_features)),
    ),
    "another parameter": lambda model: setattr(
        model.get_submodule(DOWN), "weight", nn.Parameter(2 * model.get_submodule(DOWN).weight.detach())
    ),
    "a bias": lambda model: setattr(model.get_submodule(DOWN), "bias", nn.Parameter(torch.ones(32))),
    "weights of an average": averaged,
    "weights in place": lambda model: [weight.data.mul_(1.1) for weight in model.parameters()],
    "an optimizer's step": lambda model: step_of(model),
    "another window": lambda model: setattr(model.blocks[0].attention, "alibi", True),
    "another scale": lambda model: setattr(model.blocks[0].attention, "scale", 1.0),
}


def step_of(model):
    was_training = model.training
    model.eval()  # the same gradient with and without dropout
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    with torch.inference_mode(False), torch.enable_grad():
        tokens = torch.arange(8)[None]
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    model.train(was_training)


class ByModules(Decoder):
    """Decodes with a second, equal text: several rows never take the steps."""

    def prefill(self, texts, room):
        return super().prefill([*texts, [5] * len(texts[0])], room)[:1]

    def step(self, tokens):
        return super().step([*tokens, 1])[:1]


def logits(model, decoder_class, attach=lambda model: None, late=False):
    """Of eight tokens, one after the other; `attach` acts before the first, or between two."""
    if not late:
        attach(model)
    with torch.inference_mode():
        decoder = decoder_class(model)
        found = [decoder.prefill([[1, 2]], 8)]
        found += [decoder.step([token]) for token in range(3)]
    if late:
        attach(model)
    with torch.inference_mode():
        found += [decoder.step([token]) for token in range(4)]
    return torch.cat(found)


@pytest.mark.parametrize("late", some([True, False], 2), ids=["between two tokens", "before"])
@pytest.mark.parametrize("way", some(WAYS, 8))
@pytest.mark.parametrize("trains", some([False, True], 2), ids=["eval", "train"])
def test_code_that_is_attached_to_a_model_acts_while_one_text_is_written(way, late, trains):
    model = random_gpt(dropout=0.5 if trains else 0.0).train(trains)
    other = copy.deepcopy(model).eval()
    plain = logits(copy.deepcopy(model), Decoder)
    changed = logits(other, ByModules, WAYS[way], late)
    assert not torch.allclose(changed, plain, atol=1e-3)
    close(logits(model, Decoder, WAYS[way], late), changed, atol=1e-4, rtol=1e-4)
    assert model.training == trains


@pytest.mark.parametrize("name", ["_forward_hooks", "forward", "mode", "flops", "a class"])
def test_what_watches_all_modules_or_operators_sees_all_of_them(name, monkeypatch):
    model = random_gpt()
    calls = []
    handles = []
    if name == "_forward_hooks":
        handles = [nn.modules.module.register_module_forward_hook(lambda module, given, y: calls.append(type(module)))]
    elif name == "forward":
        forward = RMSNorm.forward
        monkeypatch.setattr(RMSNorm, "forward", lambda self, x: calls.append(type(self)) or forward(self, x))
    elif name == "a class":
        call = nn.Module.__call__
        monkeypatch.setattr(
            nn.Module, "__call__", lambda self, *a, **k: calls.append(type(self)) or call(self, *a, **k)
        )
    try:
        if name == "mode":
            plain = logits(copy.deepcopy(model), Decoder)
            with Halving():
                wanted = logits(model, ByModules)
                found = logits(model, Decoder)
            close(found, wanted)
            assert not torch.allclose(found, plain)
        elif name == "flops":
            with FlopCounterMode(display=False) as counter:
                logits(model, Decoder)
            weights = sum(weight.numel() for name, weight in model.named_parameters() if weight.ndim == 2)
            embedded = model.token_embedding.weight.numel()
            assert counter.get_total_flops() > 2 * 8 * (weights - embedded)
        else:
            logits(model, Decoder)
            norms = 2 * len(model.blocks) + 1 + 2 * len(model.blocks)
            assert calls.count(RMSNorm) == 8 * norms
    finally:
        for handle in handles:
            handle.remove()


def test_a_hook_that_is_removed_acts_no_more_and_its_module_is_the_models_own():
    model = random_gpt(dropout=0.2).train()
    plain = logits(model, Decoder)
    seen = []
    handles = [part.register_forward_hook(lambda module, given, y: seen.append(module)) for part in model.modules()]
    logits(model, Decoder)
    assert {id(module) for module in seen} <= {id(module) for module in model.modules()}
    assert sum(module is model.blocks[1].mlp for module in seen) == 8
    for handle in handles:
        handle.remove()
    assert torch.equal(logits(model, Decoder), plain) and all(part.training for part in model.modules())


def test_layers_that_get_rotations_of_their_own_later_write_what_they_read_at_once():
    model = random_gpt()
    before = logits(model, Decoder)
    for number, block in enumerate(model.blocks):
        block.attention.rope = block.attention.rope._replace(theta=50.0 + number)
    found = logits(model, Decoder)
    close(found, logits(model, ByModules))
    close(found[-1:], model(torch.tensor([[1, 2, 0, 1, 2, 0, 1, 2, 3]]))[:, -1].detach())
    assert not torch.allclose(found, before, atol=1e-2)


@torch.inference_mode()
def test_a_step_whose_logits_failed_leaves_the_cache_where_it_was(monkeypatch):
    """Ctrl-C or too little memory after the last layer: the same token is then read once, as without the failure."""
    model = random_gpt(n_layer=2, block_size=16, logit_softcap=5.0).eval()
    tokens, cache = torch.arange(12)[None], KVCache(16)
    decoded = DecodedModel(model)
    decoded.next_logits(tokens[:, :11], cache)
    decoded.refresh()
    assert decoded.steps is not None

    def fail(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("model.gpt.capped", fail)
        with pytest.raises(KeyboardInterrupt):
            decoded.next_logits(tokens[:, 11:], cache)
    assert cache.position == 11
    close(decoded.next_logits(tokens[:, 11:], cache), model(tokens)[:, -1])


@torch.inference_mode()
def test_steps_are_taken_where_they_serve_and_nowhere_else():
    model = random_gpt()
    decoded = DecodedModel(model)
    assert decoded.steps and not any(step in list(model.blocks) for step in decoded.steps)
    with torch.autocast("cpu", torch.bfloat16):
        assert decoded.steps is None
    model.bfloat16()
    assert decoded.steps is None
    model.float()
    handle = model.blocks[0].register_forward_hook(lambda module, given, y: None)
    decoded.refresh()
    assert decoded.steps[0] is model.blocks[0] and decoded.steps[1] is not model.blocks[1]
    handle.remove()
    model.train()
    decoded.refresh()
    assert decoded.steps and decoded.has_twin and model.training
    twins = dict(decoded.called.named_parameters())
    assert all(twins[name] is weight for name, weight in model.named_parameters())
    assert DecodedModel(random_gpt(norm="layernorm")).steps is not None


@pytest.mark.parametrize(
    ("attention", "settings", "served"),
    [
        *((form, {}, True) for form in ("matmul", "einsum", "bmm", "loop", "sdpa")),
        ("sdpa+window", {"attention_window": 3}, True),
        ("sdpa", {"n_kv_head": 2, "position": "learned", "qk_norm": False}, True),
        ("sdpa", {"position": "alibi"}, False),
        ("sdpa", {"rope_fraction": 0.5}, False),
        *((form, {}, False) for form in ("softmax1", "sigmoid", "softcap", "stacked", "mla", "index", "sdpa+gate")),
    ],
)
@torch.inference_mode()
def test_a_step_serves_softmax_with_nothing_over_its_scores_but_a_window(attention, settings, served):
    layer = make_attention(AttentionConfig(attention=attention, n_embd=32, **settings)).eval()
    assert serves(layer) == served


@torch.inference_mode()
def test_a_layer_whose_call_has_a_new_field_is_called_as_it_is():
    layer = make_attention(AttentionConfig(n_embd=32)).eval()
    assert serves(layer)

    class Sunk(type(layer)):
        def make_call(self, q, k, v, ctx):
            return super().make_call(q, k, v, ctx)._replace(sink=q.new_zeros(q.shape[1]))

    sunk = Sunk(AttentionConfig(n_embd=32)).eval()
    assert not serves(sunk)
    layer.make_call = sunk.make_call
    assert not serves(layer)
    layer(torch.randn(1, 1, 32), AttentionContext(cache=KVCache(2)))


def lbfgs(model):
    """A step of an optimizer that views all gradients and weights as one vector."""
    with torch.enable_grad():
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2)
        tokens = torch.arange(8)[None]

        def loss():
            optimizer.zero_grad()
            found = model.loss(tokens[:, :-1], tokens[:, 1:])
            found.backward()
            return found

        optimizer.step(loss)
        flat = torch.cat([weight.grad.view(-1) for weight in model.parameters()])
    return bool(flat.isfinite().all())


USES = {
    "safetensors": lambda model: len(safetensors.torch.save(model.state_dict())) > 1000,
    "one vector": lambda model: (
        torch.cat([weight.view(-1) for weight in model.parameters()]).shape
        == nn.utils.parameters_to_vector(model.parameters()).shape
    ),
    "a copy": lambda model: all(
        map(torch.equal, copy.deepcopy(model).state_dict().values(), model.state_dict().values())
    ),
    "LBFGS": lbfgs,
    "pruning": lambda model: prune.l1_unstructured(model.blocks[0].mlp.down_proj, "weight", 0.5) is not None,
    "numpy": lambda model: all(weight.detach().numpy().flags["C_CONTIGUOUS"] for weight in model.parameters()),
    "a cast": lambda model: model.double().float() is model,
    "a state that is loaded": lambda model: not any(model.load_state_dict(copy.deepcopy(model.state_dict()))),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("trains", some([False, True], 2))
def test_what_people_do_with_weights_works_before_and_while_a_text_is_written_and_after_it(use, trains):
    model = random_gpt(vocab_size=257, n_embd=128).train(trains)
    layout = {name: (id(weight), weight.stride()) for name, weight in model.named_parameters()}

    def assert_usable():
        assert {name: (id(weight), weight.stride()) for name, weight in model.named_parameters()} == layout
        assert USES[use](copy.deepcopy(model)) and not any(weight.is_inference() for weight in model.parameters())

    assert_usable()
    for _ in generate_text(model, make_tokenizer(TokenizerConfig(name="byte"), []), "a", max_new_tokens=3):
        assert_usable()
    assert_usable()
    assert USES[use](model)


def test_the_steps_repeat_the_present_code():
    found = row.digest_of(row.REPEATED)
    assert found == row.DIGEST, f'let the steps do what the code does, then write DIGEST = "{found}" in model/row.py'


EDITED = """
import sys
from pathlib import Path
import torch
from generation.generate import Decoder
from model.config import GPTConfig
from model.gpt import GPT
for old, new in zip(sys.argv[1::2], sys.argv[2::2]):  # an edit while the process runs
    for file in (Path("model/gpt.py"), Path("model/rope.py"), Path("model/attention/layer.py")):
        file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
torch.manual_seed(0)
model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=61, zero_init=False)).eval()
with torch.inference_mode():
    decoder = Decoder(model)
    decoder.prefill([[1, 2, 3]], 8)
    found = decoder.step([4])
    whole = model(torch.tensor([[1, 2, 3, 4]]))[:, -1]
    print(decoder.decoded.steps is not None, (found - whole).abs().max().item() < 1e-4)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "takes_steps"),
    [
        ("gpt.py", "# model/row.py has this loop for one token", "# Words that say it otherwise", True),
        *first_of(
            ("gpt.py", "return x + self.dropout(self.mlp(", "return x + 2 * self.dropout(self.mlp(", False),
            (
                "attention/layer.py",
                "return self.q_norm(q), self.k_norm(k), v",
                "return self.q_norm(q), k, 2 * v",
                False,
            ),
            ("rope.py", "pairs = wide.unflatten", "pairs = -wide.unflatten", False),
        ),
    ],
)
def test_an_edit_of_code_that_the_steps_repeat_is_computed_and_not_the_steps(file, old, new, takes_steps, tmp_path):
    place = copy_code(tmp_path / "code")
    edited = place / "model" / file
    source = edited.read_text(encoding="utf-8")
    assert source.count(old) == 1
    edited.write_text(source.replace(old, new), encoding="utf-8")
    run = subprocess.run([sys.executable, "-c", EDITED], cwd=place, capture_output=True, text=True)
    assert run.stdout == f"{takes_steps} True\n", run.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new"), first_of(("        ", "    "), ("def ", "async def "), ('"""', "'"), ("def ", "\n\ndef "))
)
def test_a_file_that_is_edited_while_a_process_runs_ends_no_text(old, new, tmp_path):
    place = copy_code(tmp_path / "code")
    run = subprocess.run([sys.executable, "-c", EDITED, old, new], cwd=place, capture_output=True, text=True)
    assert run.stdout == "False True\n", run.stderr

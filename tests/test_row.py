"""One text on a CPU: the steps beside the layers compute what the layers do, with all that hangs on them."""

import pytest
import torch
from conftest import close, random_gpt

from model.attention import AttentionContext, make_attention
from model.cache import KVCache
from model.config import AttentionConfig
from model.row import block_steps, serves

PARTS = ("blocks.0", "blocks.0.attention", "blocks.0.attention.qkv_proj", "blocks.0.attention.q_norm")
PARTS += ("blocks.0.attention.o_proj", "blocks.0.attention_norm", "blocks.0.mlp", "blocks.0.mlp.down_proj")


@torch.inference_mode()
def logits(model, by_steps):
    """Of six tokens, one after the other."""
    cache, found = KVCache(6), []
    for token in range(6):
        blocks = block_steps(model) if by_steps else None
        found.append(model.logits(model.hidden(torch.tensor([[token]]), cache=cache, blocks=blocks)))
    return torch.cat(found, 1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["hook", "pre-hook", "forward"])
def test_what_hangs_on_any_part_acts_while_one_text_is_written(part, kind):
    model = random_gpt()
    plain, module = logits(model, True), model.get_submodule(part)
    if kind == "hook":
        module.register_forward_hook(lambda module, given, y: y * 1.5)
    elif kind == "pre-hook":
        module.register_forward_pre_hook(lambda module, given: (given[0] * 1.5 + 0.1, *given[1:]))
    else:
        forward = module.forward
        module.forward = lambda *given: forward(*given) * 1.5
    changed = logits(model, False)
    assert not torch.allclose(changed, plain)
    close(logits(model, True), changed)


def test_a_hook_on_all_modules_acts_too():
    model = random_gpt()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, given, y: None)
    try:
        with torch.inference_mode():
            assert block_steps(model) is None
    finally:
        handle.remove()
    with torch.inference_mode():
        assert block_steps(model) is not None


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

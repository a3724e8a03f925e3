"""Decoding with the cache gives what the whole text at once gives."""

import copy

import pytest
import torch
from conftest import PRESETS, preset_settings, random_gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from generation.decoder import Decoder
from model.attention import ATTENTION_FUNCTIONS, forms
from model.attention.check import combinations
from model.config import POSITIONS
from model.gpt import GPT


def uncached(model: GPT, texts: list[list[int]]) -> torch.Tensor:
    """What follows each text (B, V), by reading from its beginning what the policy says it sees."""
    block = model.config.block_size
    if model.config.position == "learned":
        half = max(1, block // 2)
        tails = [half + (len(text) - block - 1) % (block - half + 1) for text in texts]
        texts = [text if len(text) <= block else text[-tail:] for text, tail in zip(texts, tails, strict=True)]
    else:
        model = copy.deepcopy(model)
        for layer in model.blocks:
            layer.attention.window = min(block, layer.attention.window or block)
    return torch.cat([model(torch.tensor([text]))[:, -1] for text in texts])


def close(got: torch.Tensor, wanted: torch.Tensor, near: float = 1e-5) -> None:
    torch.testing.assert_close(got, wanted, atol=near, rtol=near)


def check(model: GPT, texts: list[list[int]], steps: int) -> None:
    """Every step's logits, from prompts of any lengths, against the whole text's."""
    decoder, form = Decoder(model), model.config.attention  # what sorts or normalises magnifies rounding
    texts = [list(text) for text in texts]
    logits = decoder.read(texts, room=steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        close(logits, uncached(model, texts), 1e-5 if form in ATTENTION_FUNCTIONS else 1e-4)
        tokens = torch.randint(model.config.vocab_size, (len(texts),), generator=generator)
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
        logits = decoder.step(tokens)


def preset(name: str) -> dict:
    shape = preset_settings(name)
    small = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_inner": None, "block_size": 8}
    return shape | small | ({"n_kv_head": 2} if "n_kv_head" in shape else {})


CASES = [
    *({"attention": form} for form in forms()),
    *({"attention": form, "position": "alibi"} for form in ("sdpa", "softmax1", "stacked", "mla", "flex")),
    *({"attention": form, "position": "learned"} for form in ("sdpa", "average", "mla", "delta")),
    *({"attention": form, "position": "none"} for form in ("sdpa", "single_head")),
    *({"attention": form, "attention_window": 3} for form in ("sdpa", "average", "softmax1", "mla")),
    {"attention": "sdpa+value_residual+key_offset+logn+forget+sink+diff+xsa+gate", "n_kv_head": 2},
    {"attention": "sdpa+window+forget/delta+key_offset/mla+sink", "n_layer": 3, "attention_window": 3},
    {"attention": "sdpa+window/sdpa+nope", "attention_window": 3, "rope_fraction": 0.5},
    {"attention": "linear+key_offset/sdpa", "position": "learned"},
    *map(preset, PRESETS),
    {"n_kv_head": 1},
    {"n_head": 6, "head_size": 10, "n_kv_head": 3},
    {"head_size": 16, "position": "alibi"},
    {"n_kv_head": 2, "qkv_bias": True, "bias": True, "norm": "layernorm"},
    {"attention_window": 3, "position": "alibi"},
    {"attention_window": 3, "position": "learned"},
    {"rope_scaling": "linear", "rope_scaling_factor": 2.0},
    {"rope_scaling": "ntk", "rope_scaling_factor": 4.0},
    {"logit_softcap": 5.0, "tie_embeddings": True},
    {"mlp": "relu2", "qk_norm": False},
    {"block_size": 1},
    {"block_size": 1, "position": "learned"},
    {"block_size": 2, "position": "learned"},
]


@pytest.mark.usefixtures("unchecked")  # the checks of annotations take longer than the rest
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.inference_mode()
def test_cached_logits_equal_uncached_ones_in_every_form_before_and_past_the_block(case):
    model = random_gpt(**{"block_size": 8} | case)
    longest = min(5, model.config.block_size)
    check(model, [[1, 2, 3][:longest], [4], [5, 6, 7, 8, 9][:longest]], 11 if case.get("attention") == "flex" else 24)


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize(("position", "window"), [*((position, None) for position in POSITIONS), ("alibi", 3)])
@torch.inference_mode()
def test_a_padded_prefill_in_chunks_gives_the_logits_of_each_text_alone(form, position, window):
    if form == "flex" and (position, window) != ("alibi", None):
        pytest.skip("flex traces each of its shapes anew: one case is enough")
    model, tokens = random_gpt(attention=form, position=position, attention_window=window), torch.randint(61, (2, 9))
    real = torch.ones(2, 9)
    real[1, :3] = 0
    positions, pieces = (real.cumsum(-1) - 1).clamp(min=0).long(), []
    cache = model.make_cache(2, 9)
    for size in (4, 2, 1, 2):
        new, end = slice(cache.position, cache.position + size), cache.position + size
        pieces.append(model(tokens[:, new], attention_mask=real[:, :end], positions=positions[:, new], cache=cache))
    logits = torch.cat(pieces, dim=1)
    close(logits[:1], model(tokens[:1]))
    close(logits[1:, 3:], model(tokens[1:, 3:]))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
@torch.inference_mode()
def test_any_batch_of_prompts_is_decoded_as_each_would_be_alone(data):
    position = data.draw(st.sampled_from(["rope", "learned", "alibi"]))
    texts = data.draw(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=8), min_size=1, max_size=4))
    check(random_gpt(position=position, block_size=8), texts, steps=data.draw(st.integers(1, 20)))


@pytest.mark.parametrize("position", ["rope", "learned", "alibi"])
@torch.inference_mode()
def test_rows_can_be_doubled_and_dropped_on_the_way(position):
    model, texts = random_gpt(position=position, block_size=8), [[1, 2, 3, 4, 5], [6, 7]]
    decoder = Decoder(model)
    decoder.read(texts, room=30)
    decoder.take([1, 0, 1])
    texts = [[6, 7], [1, 2, 3, 4, 5], [6, 7]]
    for step in range(20):
        tokens = [step, 2 * step % 61, 3 * step % 61][: len(texts)]
        texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
        close(decoder.step(torch.tensor(tokens)), uncached(model, texts))
        if step == 9:
            decoder.take([0, 2])
            texts = [texts[0], texts[2]]


# What is out of a window of 7 is not read; the padding of one slot is out of it from position 7 on.
@pytest.mark.parametrize(("texts", "masked"), [([[1, 2]], []), ([[1, 2], [3]], [2, 3, 4, 5, 6])])
@torch.inference_mode()
def test_a_mask_is_made_only_while_padding_is_in_sight(texts, masked, monkeypatch):
    hidden, made = GPT.hidden, []

    def note(model, tokens, *, attention_mask, cache, **arguments):
        if attention_mask is not None:
            made.append(cache.position)
        return hidden(model, tokens, attention_mask=attention_mask, cache=cache, **arguments)

    decoder = Decoder(random_gpt(position="alibi", block_size=7))
    decoder.read(texts, room=20)
    monkeypatch.setattr(GPT, "hidden", note)
    for _ in range(10):
        decoder.step(torch.ones(len(texts), dtype=torch.long))
    assert made == masked


@torch.inference_mode()
def test_the_cache_is_no_larger_than_what_is_asked_or_seen():
    decoder = Decoder(random_gpt(block_size=16))
    decoder.read([[1, 2, 3]], room=5)
    assert decoder.cache.layers[0].size == 8
    decoder.read([[1, 2, 3]], room=10**9)
    assert decoder.cache.layers[0].size == 16 + 4 + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case", [{}, {"position": "learned", "norm": "layernorm", "bias": True, "mlp": "gelu"}], ids=str
)
@torch.inference_mode()
def test_half_precision_decodes_within_its_rounding_of_float32(case, dtype):
    model, texts = random_gpt(**case), [[1, 2, 3, 4, 5], [6, 7]]
    decoder, half = Decoder(model), Decoder(copy.deepcopy(model).to(dtype))
    exact, rounded = decoder.read(texts, room=20), half.read(texts, room=20)
    for step in range(20):
        assert rounded.dtype == half.cache.layers[0].rows["kv"].dtype == dtype
        # Each of about 20 roundings on the way moves a logit by up to eps / 2 of the logits' size; they add up as √20.
        bound = 3 * torch.finfo(dtype).eps * exact.abs().max().item()
        assert (exact.log_softmax(-1) - rounded.float().log_softmax(-1)).abs().max() < 2 * bound
        tokens = torch.tensor([step, 60 - step])
        exact, rounded = decoder.step(tokens), half.step(tokens)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("n_head", [1, 2])
@pytest.mark.parametrize("attention", [*forms(), *combinations()])
@torch.inference_mode()
def test_a_single_text_in_chunks_and_token_by_token_gives_the_logits_of_one_pass(attention, n_head):
    window = 5 if "window" in attention else None
    settings = {"attention": attention, "n_head": n_head, "attention_window": window, "n_embd": 16}
    model = random_gpt(**settings).double()  # float64: what a cache keeps in less is seen
    tokens = torch.randint(61, (1, 11))
    whole = model(tokens)
    for sizes in [(1,) * 11, (4, 1, 3, 1, 1, 1)]:
        cache = model.make_cache(1, 11)
        pieces = [model(part, cache=cache) for part in tokens.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-9, atol=1e-9)

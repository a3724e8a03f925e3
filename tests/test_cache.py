"""A cache, filled in chunks or token by token, gives the result of one pass over all tokens."""

import copy
import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import close, layer, marked, random_gpt, some
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

from generation.generate import Decoder
from model.attention import FORMS, MODIFIERS, SETTINGS, AttentionContext
from model.cache import KVCache
from model.config import POSITIONS

PADDED = ["sdpa", "softmax1", "mla", "delta", "linear", "sdpa+key_offset+forget", "sdpa+window+sink+logn/retention"]
PADDED += ["sdpa+value_residual+diff+xsa+gate/average/stacked", "sdpa+" + "+".join(MODIFIERS), "mla+diff+sink+gate"]
PADDED += ["delta+value_residual+key_offset+xsa+gate_element"]
TEXTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11]]
# Two of the forms, each with a position, and sdpa with each; the others are slow.
FEW = [(form, POSITIONS[number % len(POSITIONS)]) for number, form in enumerate(PADDED[::9])]
FEW += [("sdpa", position) for position in POSITIONS[1:]]
FEW = [(form, "rope" if position == "pope" and "mla" in form else position) for form, position in FEW]  # it refuses it
SLOW = [
    marked(case, pytest.mark.long if number % 8 else pytest.mark.slow)
    for number, case in enumerate(product(PADDED, POSITIONS))
    if case not in FEW and not (case[1] == "pope" and "mla" in case[0])
]
padded_forms = pytest.mark.parametrize(("attention", "position"), [*FEW, *SLOW])


def padded_gpt(attention, position, **settings):
    window = 3 if "window" in attention else None
    settings |= {"attention_window": window, "ngrams": [2, 4], "ngram_rows": 53}
    return random_gpt(attention=attention, position=position, n_layer=3, **settings).double()


def in_chunks(model, tokens, sizes, doc_starts=None):
    cache, pieces = KVCache(tokens.size(1)), []
    begun = [None] * len(sizes) if doc_starts is None else doc_starts.split(sizes, 1)
    for piece, begins in zip(tokens.split(sizes, 1), begun, strict=True):
        pieces.append(model(piece, doc_starts=begins, cache=cache))
    assert cache.position == tokens.size(1)
    return torch.cat(pieces, 1)


@pytest.mark.usefixtures("unchecked")
@padded_forms
@torch.inference_mode()
def test_each_text_of_a_left_padded_batch_is_as_alone_in_one_pass_and_in_chunks(attention, position):
    model, padding = padded_gpt(attention, position), torch.tensor([0, 4, 6])
    doc_starts = padding[:, None] * (torch.arange(7) >= padding[:, None])
    tokens = torch.tensor([[0] * (7 - len(text)) + text for text in TEXTS])
    other = torch.where(doc_starts < padding[:, None], 60, tokens)  # another padding
    whole, alone = model(tokens, doc_starts=doc_starts), [model(torch.tensor([text]))[0] for text in TEXTS]
    real = doc_starts == padding[:, None]
    for starts in (doc_starts, padding[:, None].expand(3, 7)):  # the padding's own value does not matter
        close(model(other, doc_starts=starts)[real], whole[real], rtol=0, atol=1e-12)
    for logits in (whole, *(in_chunks(model, tokens, sizes, doc_starts) for sizes in ((7,), (2, 3, 2), (1,) * 7))):
        for row, wanted in zip(logits, alone, strict=True):
            near = 1e-5 if position in ("rope", "pope") else 1e-9  # whose angles are float32, at other positions
            close(row[-len(wanted) :], wanted, rtol=near, atol=near)


@pytest.mark.usefixtures("unchecked")
@padded_forms
@torch.inference_mode()
def test_texts_decoded_beside_others_are_as_alone_and_past_the_block_as_begun_anew_from_their_latest_half(
    attention, position
):
    """Rows are doubled, swapped and dropped on the way."""
    model = padded_gpt(attention, position, block_size=8)
    limit, decoder = model.longest_context, Decoder(model)
    assert limit == (None if attention.split("+")[0] in ("delta", "linear") and position != "learned" else 8)
    logits, seen = decoder.prefill(TEXTS, room=30), [list(text) for text in TEXTS]
    for step in range(24):
        for row, text in enumerate(seen if step % 3 < 2 else []):
            close(logits[row], model(torch.tensor([text]))[0, -1].float())
        if step in (3, 13):
            rows = [2, 0, 1, 2, 2] if step == 3 else [4, 1]
            decoder.take(rows)
            seen = [list(seen[row]) for row in rows]
        tokens = [(7 * step + row) % 61 for row in range(len(seen))]
        logits = decoder.step(tokens)
        for text, token in zip(seen, tokens, strict=True):
            text.append(token)
            if limit and len(text) > limit:
                text[:] = text[-limit // 2 :]


LOCAL = ["sdpa+window/sdpa", "mla+window/gta+window", "index+window/moba+window", "softcap/stick+window"]
LOCAL += ["sdpa+window+forget+sink+logn/sdpa+window+conv+diff"]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("attention", LOCAL)
@pytest.mark.parametrize(("position", "window"), some([("rope", 5), ("alibi", 2), ("rope", 1)], 3))
@torch.inference_mode()
def test_a_layer_with_a_window_keeps_its_reach_and_gives_what_one_pass_over_all_gives(attention, position, window):
    """In parts longer and shorter than the window, with padding, and with documents that begin in a part."""
    model = random_gpt(attention=attention, position=position, attention_window=window, block_size=40).double()
    tokens = torch.randint(60, (2, 40))
    begins = torch.tensor([[0, 7, 15, 31], [3, 3, 22, 23]])
    each = begins[..., None] * (torch.arange(40) >= begins[..., None])  # (B, documents, T)
    real = torch.arange(40) >= begins[:, :1]
    for doc_starts in (None, each.amax(1)):
        cached = in_chunks(model, tokens, (13, *[1] * 10, 4, 3, 10), doc_starts)
        close(cached[real], model(tokens, doc_starts=doc_starts)[real], rtol=1e-9, atol=1e-9)
    cache = KVCache(40)
    model(tokens[:, :1], cache=cache)
    for number, kept in cache.layers.items():
        rows = {tensor.shape[2] for name, tensor in kept.items() if name != "conv"}
        local = "window" in model.config.at(number).modifiers
        assert rows == {window + -(-window // 4) if local else 40}


@pytest.mark.slow
@torch.inference_mode()
def test_texts_taken_from_a_cache_of_windows_go_on_as_they_would_have():
    model = random_gpt(attention="sdpa+window/sdpa", attention_window=5, block_size=64)
    texts = [[token % 61 for token in range(start, start + 30)] for start in (1, 9)]
    decoder = Decoder(model)
    decoder.prefill(texts, room=30)
    decoder.take([1, 0, 1])
    texts = [list(texts[row]) for row in (1, 0, 1)]
    for step in range(20):
        for text in texts:
            text.append(step)
        logits = decoder.step([step] * 3)
        for row, text in enumerate(texts):
            close(logits[row], model(torch.tensor([text]))[0, -1])


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
@torch.inference_mode()
def test_the_smallest_blocks_begin_anew_too(block_size):
    model, text = random_gpt(block_size=block_size, position="learned"), [1]
    decoder = Decoder(model)
    logits = decoder.prefill([text], room=12)
    for token in range(12):
        close(logits, model(torch.tensor([text]))[:, -1])
        text.append(token)
        text = text if len(text) <= block_size else text[-max(1, block_size // 2) :]
        logits = decoder.step([token])
        assert decoder.texts == [text]


@torch.inference_mode()
def test_a_cache_is_no_larger_than_what_is_asked_or_may_be_seen():
    sizes = []
    for settings, room in (({}, 5), ({}, 10**9), ({"attention": "delta"}, 100)):
        decoder = Decoder(random_gpt(block_size=16, **settings))
        decoder.prefill([[1, 2, 3], [4]], room)
        sizes.append(decoder.cache.size)
    assert sizes == [8, 16, 103]


# Going back.

# Every form and modifier, and stacks of several; those without a state or a window go back anywhere.
CROPPED = [*FORMS, *(f"sdpa+{name}" for name in (*SETTINGS, *MODIFIERS)), "mla+window/gta+window", "sdpa+window/sdpa"]
CROPPED += ["sdpa/sdpa+conv", "delta/sdpa", "softmax1+forget/mla+diff+sink", "index/moba+window", "stick+window/gta"]
KEEPS_A_STATE = ("linear", "retention", "delta", "kda", "gdn2", "short_conv", "conv", "key_offset")


def cropped_gpt(attention, **settings):
    window = 5 if "window" in attention else None
    return random_gpt(attention=attention, attention_window=window, block_size=40, **settings).double()


def goes_back_anywhere(attention):
    return not any(name in KEEPS_A_STATE or name == "window" for name in attention.replace("/", "+").split("+"))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("attention", some(CROPPED, 20))
@torch.inference_mode()
def test_a_cache_that_went_back_goes_on_as_if_it_had_never_gone_further_or_refuses_and_stays(attention):
    """At random places, with padding and documents and without."""
    generator = torch.Generator().manual_seed(sum(map(ord, attention)))
    draw = lambda low, high: torch.randint(low, high, (), generator=generator).item()  # noqa: E731
    positions = [position for position in POSITIONS if position != "pope"]  # which some forms refuse
    position = "rope" if "nope" in attention else positions[draw(0, len(positions))]
    model = cropped_gpt(attention, position=position)
    refused = 0
    for trial in range(6):
        tokens = torch.randint(60, (2, 40), generator=generator)
        begins = torch.tensor([[0, 9], [3, 20]])
        starts = (begins[..., None] * (torch.arange(40) >= begins[..., None])).amax(1) if trial % 2 else None
        cache = KVCache(40)
        for _ in range(4):
            end = cache.position + draw(1, 9)
            piece = slice(cache.position, end)
            model(tokens[:, piece], doc_starts=None if starts is None else starts[:, piece], cache=cache)
            n = draw(end // 2, end + 1) if draw(0, 9) else 0
            before = cache.take(torch.arange(2))
            try:
                cache.crop(n)
            except ValueError as error:
                refused += 1
                assert "take()" in str(error) and cache.position == end
                assert all(
                    torch.equal(tensor, before.layers[layer][name])
                    for layer, kept in cache.layers.items()
                    for name, tensor in kept.items()
                )
                n = end
            assert cache.position == n
            # A few other tokens, which continue the document.
            tokens = torch.cat((tokens[:, :n], torch.randint(60, (2, 40 - n), generator=generator)), 1)
            if starts is not None:
                last = starts[:, n - 1 : n] if n else starts.new_zeros(2, 1)
                starts = torch.cat((starts[:, :n], last.expand(2, 40 - n)), 1)
            there = cache.take(torch.arange(2))
            new = slice(n, n + 4)
            given = None if starts is None else starts[:, : n + 4]
            wanted = model(tokens[:, : n + 4], doc_starts=given)[:, n:]
            real = torch.ones(2, 4, dtype=torch.bool) if starts is None else torch.arange(n, n + 4) >= begins[:, :1]
            close(model(tokens[:, new], cache=there)[real], wanted[real], rtol=1e-8, atol=1e-8)
    assert not refused if goes_back_anywhere(attention) else refused


def test_a_position_is_set_to_what_the_rows_hold_and_to_nothing_else():
    model = random_gpt(block_size=16)
    cache = KVCache(16)
    with pytest.raises(ValueError, match="position=5 of a cache whose rows end at 0: let a layer read them first"):
        cache.position = 5
    tokens = torch.arange(12)[None]
    whole = model(tokens)
    with torch.no_grad():
        model(tokens[:, :8], cache=cache)
        for wrong in (9, -1, 100):
            with pytest.raises(ValueError, match=f"{wrong}"):
                cache.position = wrong
        cache.position = 5  # as crop(5)
        with pytest.raises(ValueError, match="rows end at 5"):
            cache.position = 8
        close(model(tokens[:, 5:], cache=cache), whole[:, 5:])
        with pytest.raises(ValueError, match=r"crop\(13\) of a cache of 12 positions"):
            cache.crop(13)
        cache.crop(0)
        assert cache.nbytes == 0
        close(model(tokens, cache=cache), whole)


@pytest.mark.parametrize("failing", ["blocks.1", "lm_head"])
@pytest.mark.parametrize("attention", some(["sdpa", "mla", "sdpa+window", "delta", "sdpa/delta", "sdpa+key_offset"], 3))
@torch.no_grad()
def test_a_pass_that_failed_is_repeated_as_if_nothing_had_been_or_refused(attention, failing):
    """A hook, Ctrl-C or too little memory ends it, when some layers have read its tokens or all."""
    model = cropped_gpt(attention, n_layer=2)
    tokens = torch.arange(21)[None]
    tokens, targets = tokens[:, :-1], tokens[:, 1:]

    def fail(module, arguments):
        raise KeyboardInterrupt

    nats = F.cross_entropy(model(tokens).mT, targets, reduction="none")
    ways = (
        (lambda part, cache: model(tokens[:, part], cache=cache), model(tokens)[:, 12:]),
        (lambda part, cache: model.loss(tokens[:, part], targets[:, part], cache=cache), nats[:, 12:].sum()),
        (lambda part, cache: model.nats(tokens[:, part], targets[:, part], cache=cache)[0], nats[:, 12:]),
    )
    for way, wanted in ways:
        cache = KVCache(20)
        way(slice(0, 12), cache)
        before = cache.take(torch.arange(1))
        hook = model.get_submodule(failing).register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            way(slice(12, 20), cache)
        hook.remove()
        assert cache.position == 12
        if attention not in ("sdpa", "mla"):
            with pytest.raises(ValueError, match="a pass with this cache failed: .*; begin a new cache, or copy one"):
                way(slice(12, 20), cache)
            cache.crop(0)  # a new one
            way(slice(0, 12), cache)
            close(way(slice(12, 20), before), wanted)
        close(way(slice(12, 20), cache), wanted)


@pytest.mark.usefixtures("unchecked")
@torch.no_grad()
def test_tokens_that_are_refused_leave_a_state_as_it_was():
    model = cropped_gpt("delta+key_offset", n_layer=2, position="learned", ngrams=[2], ngram_rows=53)
    tokens, cache = torch.arange(30)[None], KVCache(50)
    model(tokens[:, :20], cache=cache)
    for wrong in (torch.full((1, 2), 99), torch.zeros(1, 30, dtype=torch.long), tokens.expand(2, 30), tokens[0]):
        with pytest.raises(ValueError, match="vocabulary|learned embeddings|texts|need the shape"):
            model(wrong, cache=cache)
    with pytest.raises(ValueError, match=r"doc_starts \(1, 3\) need the shape \(B, T\) of tokens \(1, 2\)"):
        model(tokens[:, 20:22], doc_starts=torch.zeros(1, 3, dtype=torch.long), cache=cache)
    close(model(tokens[:, 20:], cache=cache), model(tokens)[:, 20:])


def test_a_layer_that_did_not_read_a_token_is_not_asked_for_the_next():
    cache, rows = KVCache(8), torch.randn(1, 1, 1, 4)
    cache.append(0, "k", rows)
    cache.append(1, "k", rows)
    cache.position = 1
    cache.append(0, "k", rows)
    cache.position = 2
    with pytest.raises(ValueError, match="layer 1 has rows of the positions from 0 to before 1, not all before 2"):
        cache.append(1, "k", rows)


# The cache by itself.


@pytest.fixture
def filled():
    """A cache of 8 positions with 3 rows in two layers, and these rows: (layers, B, H, 3, D)."""
    cache, rows = KVCache(8), torch.randn(2, 2, 3, 3, 4)
    assert cache.nbytes == 0
    for number in (0, 1):
        cache.append(number, "k", rows[number])
    cache.position = 3
    return cache, rows


def test_layers_read_back_what_all_passes_wrote_each_its_own_without_copies(filled):
    cache, rows = filled
    new = torch.randn(2, 3, 2, 4)
    for number in (1, 0, 1):  # however often, at the same positions
        got = cache.append(number, "k", new)
        assert torch.equal(got, torch.cat((rows[number], new), -2))
        assert got.data_ptr() == cache.layers[number]["k"].data_ptr()
    assert cache.position == 3 and cache.nbytes == 2 * 4 * 2 * 3 * 8 * 4
    with pytest.raises(ValueError, match="not all before 3: every layer has to read every token, once"):
        cache.append(1, "v", new)
    assert set(cache.layers[1]) == {"k"}


def test_rows_before_a_window_leave_the_cache_and_those_in_reach_do_not():
    """Parts of any length, whatever the room; a window of the whole cache keeps all."""
    rows = torch.randn(2, 3, 40, 4)
    for window in (1, 4, 8, 39, 40, 100):
        for part in (1, 3, 7, 40):
            cache = KVCache(40)
            for new in rows.split(part, 2):
                end = cache.position + new.shape[2]
                got = cache.append(0, "k", new, window)
                reach = min(end, window + new.shape[2] - 1)
                assert torch.equal(got[:, :, -reach:], rows[:, :, end - reach : end])
                cache.position = end
            room = min(40, window + -(-window // 4))
            assert cache.nbytes == 2 * 3 * room * 4 * 4


def test_rows_taken_several_times_or_not_at_all_are_copies(filled):
    cache, rows = filled
    cache.layers[0]["state"], cache.doc_starts = torch.tensor([1.0, 2.0]), torch.tensor([0, 2])
    taken = cache.take(torch.tensor([1, 1, 0]))
    assert (taken.position, taken.size, taken.doc_starts.tolist()) == (3, 8, [2, 2, 0])
    assert torch.equal(taken.append(0, "k", torch.ones(3, 3, 1, 4))[..., :3, :], rows[0][[1, 1, 0]])
    assert taken.layers[0]["state"].tolist() == [2, 2, 1] and not cache.layers[0]["k"][:, :, 3:].any()
    cache.doc_starts = None
    assert cache.take(torch.tensor([0])).doc_starts is None


@pytest.mark.parametrize("attention", ["sdpa+window", "delta+key_offset"])
@torch.no_grad()
def test_a_cache_that_was_copied_and_its_copies_go_on_apart(attention):
    """By copy.copy(), whose attributes are else those of the original: here rows that are written in place."""
    model, tokens = cropped_gpt(attention), torch.randint(11, (2, 9))
    cache, ends = KVCache(24), [tokens[:, 7:], tokens[:, 7:].flip(1), (tokens[:, 7:] + 1) % 11]
    model(tokens[:, :7], cache=cache, doc_starts=torch.tensor([[0] * 7, [0] * 5 + [5] * 2]))
    branches = [cache, copy.copy(cache), copy.copy(cache)]
    logits = [[] for _ in ends]
    for t in range(2):  # in turns
        for branch, end, rows in zip(branches, ends, logits, strict=True):
            rows.append(model(end[:, t : t + 1], cache=branch))
    starts = torch.tensor([[0] * 9, [0] * 5 + [5] * 4])
    for end, rows in zip(ends, logits, strict=True):
        whole = model(torch.cat((tokens[:, :7], end), 1), doc_starts=starts)
        close(torch.cat(rows, 1), whole[:, 7:])


class Rounded(KVCache):
    """Keeps rows of 8 bits with a scale each."""

    def append(self, layer, name, new, window=None):
        scale = new.abs().amax(-1, keepdim=True) / 127
        return super().append(layer, name, (new / scale).round() * scale, window)


@torch.no_grad()
@pytest.mark.parametrize(
    "attention", some(["sdpa", "linear", "delta", "kda", "short_conv", "sdpa+conv", "mla", "average"], 3)
)
@pytest.mark.parametrize(("read", "more"), [(1, 4), (4, 1), (4, 2)])
@torch.no_grad()
def test_another_number_of_texts_is_refused_with_the_line_that_goes_on(read, more, attention):
    """A state of four texts made four rows of one token."""
    model, cache = random_gpt(attention=attention), KVCache(16)
    tokens = torch.randint(61, (read, 6))
    new = torch.randint(61, (more, 2))
    assert cache.texts is None
    model(tokens, cache=cache)
    with pytest.raises(
        ValueError, match=f"tokens of {more} texts do not continue a cache of {read}: cache.take"
    ) as told:
        model(new[:, :1], cache=cache)
    (line,) = re.findall(r"cache\.take\(.*?\)\)", str(told.value))
    cache = eval(line)
    assert cache.texts == more
    close(model(new, cache=cache), model(torch.cat((tokens[:1].expand(more, -1), new), 1))[:, 6:], atol=1e-5)


@pytest.mark.parametrize("attention", ["linear", "retention", "delta", "kda", "gdn2"])
@torch.no_grad()
def test_a_layer_alone_refuses_another_number_of_texts_than_its_state_has(attention):
    recurrent, cache = layer(attention), KVCache(16)
    recurrent(torch.randn(4, 3, 16), AttentionContext(cache=cache))
    cache.position = 3
    with pytest.raises(ValueError, match="queries of 1 texts do not continue a state of 4: number"):
        recurrent(torch.randn(1, 1, 16), AttentionContext(cache=cache))
    taken = cache.take(torch.tensor([3, 0]))
    assert recurrent(torch.randn(2, 1, 16), AttentionContext(cache=taken)).shape == (2, 1, 16)


def test_texts_taken_from_a_cache_of_ones_own_class_go_on_in_it():
    model, tokens = random_gpt(), torch.randint(61, (2, 9))
    first, second = Rounded(9), Rounded(9)
    first.bits = 8
    assert type(copy.copy(first)) is Rounded and copy.copy(first).bits == 8
    model(tokens[:, :6], cache=first)
    model(tokens.flip(0)[:, :6], cache=second)
    taken = first.take(torch.tensor([1, 0]))
    assert type(taken) is Rounded and taken.bits == 8 and taken.layers is not first.layers
    rounded = model(tokens.flip(0)[:, 6:], cache=taken)
    close(rounded, model(tokens.flip(0)[:, 6:], cache=second))
    assert (rounded - model(tokens.flip(0))[:, 6:]).abs().max() > 1e-3  # it rounds
    assert first.position == 6


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "sdpa+window", "mla", "sdpa+forget", "linear", "sdpa+conv"])
@pytest.mark.parametrize("recomputes", some([False, True], 2))
def test_a_pass_with_a_cache_has_the_gradient_of_its_own_tokens(attention, recomputes):
    """By differences in float64: the earlier rows are constants, those of the pass are not."""
    model = cropped_gpt(attention, n_layer=2).double().train()
    for block in model.blocks:
        block.activation_checkpointing = recomputes
    tokens, targets = torch.randint(11, (2, 2, 12)).unbind()
    with torch.no_grad():
        before = KVCache(24)
        model(tokens[:, :7], cache=before)

    def loss():
        return F.cross_entropy(model(tokens[:, 7:], cache=before.take(torch.arange(2))).mT, targets[:, 7:])

    loss().backward()
    step = 1e-5
    for name, weight in model.named_parameters():
        if name.endswith(("qkv_proj.weight", "kv_proj.weight", "o_proj.weight")):
            way = torch.randn_like(weight)
            with torch.no_grad():
                weight += step * way
                more = loss()
                weight -= 2 * step * way
                less = loss()
                weight += step * way
            slope = (weight.grad * way).sum()
            assert abs((more - less) / (2 * step) - slope) < 1e-5 * max(1, abs(slope)), name


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["einsum+window", "stacked", "einsum+key_offset+forget"])
def test_a_pass_with_a_cache_has_the_tangent_of_its_own_tokens(attention):
    """Forward mode against differences: of a new token's keys and values too, which came back as constants."""
    model, tokens = cropped_gpt(attention, n_layer=2).double(), torch.randint(11, (2, 10))
    before = KVCache(24)
    with torch.no_grad():
        model(tokens[:, :7], cache=before)
    weights = dict(model.named_parameters())
    ways = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def logits(changed):
        return functional_call(model, changed, (tokens[:, 7:],), {"cache": copy.copy(before)})

    def moved(step):
        return logits({name: weight + step * ways[name] for name, weight in weights.items()})

    with torch.no_grad():
        slopes = (moved(1e-6) - moved(-1e-6)) / 2e-6
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(weight.detach(), ways[name]) for name, weight in weights.items()}
            tangents = forward_ad.unpack_dual(logits(duals)).tangent
    close(tangents, slopes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "sdpa+window"])
def test_a_cache_that_inference_mode_filled_goes_on_outside_of_it(attention, learns):
    model, tokens = cropped_gpt(attention, n_layer=2), torch.randint(11, (2, 12))
    whole = model(tokens)
    with torch.inference_mode():
        cache = KVCache(24)
        model(tokens[:, :7], cache=cache)
        taken = cache.take(torch.tensor([1, 0]))
    with torch.set_grad_enabled(learns):
        close(model(tokens[:, 7:], cache=cache), whole[:, 7:])
        close(model(tokens.flip(0)[:, 7:], cache=taken), whole.flip(0)[:, 7:])


@torch.no_grad()
@pytest.mark.parametrize(
    "attention", ["sdpa", "sdpa+window", "mla", "sdpa+key_offset", "sdpa+conv/linear", "short_conv"]
)
def test_the_type_may_change_between_two_passes_of_a_cache(attention):
    """A prefill under autocast, and a model that is converted: near float32, and in the type of the latest pass."""
    model, tokens = cropped_gpt(attention, n_layer=2).float(), torch.randint(11, (2, 12))
    whole = model(tokens)
    for first, then in ((True, False), (False, True)):
        cache = KVCache(24)
        with torch.autocast("cpu", torch.bfloat16, enabled=first):
            model(tokens[:, :7], cache=cache)
        with torch.autocast("cpu", torch.bfloat16, enabled=then):
            y = model(tokens[:, 7:], cache=cache)
        assert y.dtype == (torch.bfloat16 if then else torch.float32)
        assert (y - whole[:, 7:]).abs().max() < 0.05 * whole.abs().max()
    cache = KVCache(24)
    model(tokens[:, :7], cache=cache)
    taken = cache.take(torch.arange(2))
    y = model.double()(tokens[:, 7:], cache=cache)
    assert y.dtype == torch.float64 and (y - whole[:, 7:]).abs().max() < 1e-4
    y = model.bfloat16()(tokens[:, 7:], cache=taken)
    assert y.dtype == torch.bfloat16 and (y - whole[:, 7:]).abs().max() < 0.05 * whole.abs().max()


@pytest.mark.slow
@torch.no_grad()
def test_copies_of_a_block_are_given_places_of_their_own_in_a_cache():
    """Or they would write over each other's keys. With forms whose modifiers and states have a place too."""
    tokens = torch.randint(11, (2, 12))
    for attention in ("sdpa", "sdpa+forget+conv", "delta", "mla"):
        model = cropped_gpt(attention, n_layer=2)
        model.blocks = nn.ModuleList([model.blocks[0], model.blocks[1], copy.deepcopy(model.blocks[1])])
        whole = model(tokens)
        with pytest.raises(
            ValueError, match=r"blocks 1 and 2 have one place .*: number them by model.number_layers\(\)"
        ):
            model(tokens, cache=KVCache(24))
        model.number_layers()
        cache = KVCache(24)
        close(torch.cat([model(part, cache=cache) for part in tokens.split(5, 1)], 1), whole)
        model.blocks[0] = model.blocks[2]
        with pytest.raises(ValueError, match="blocks 0 and 2 are one module"):
            model(tokens, cache=KVCache(24))


@pytest.mark.parametrize("attention", some(["sdpa", "sdpa+value_residual", "delta", "mla"], 2))
@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_layers_that_share_their_weights_write_as_the_remedy_says(attention, training):
    """One block at three places; the decoder's own view of a model in training mode keeps it one."""
    tokens = torch.randint(11, (2, 12))
    model = cropped_gpt(attention, n_layer=3).train(training)
    block = model.blocks[0]
    model.blocks = nn.ModuleList([block] * 3)
    whole = model(tokens)
    with pytest.raises(ValueError, match=r"blocks 0 and 1 are one module, .*: put a copy with the same weights in"):
        Decoder(model).prefill([[1, 2]], room=3)
    copies = [copy.deepcopy(block, {id(weight): weight for weight in block.parameters()}) for _ in range(2)]
    model.blocks = nn.ModuleList([block, *copies])
    model.number_layers()
    assert len([*model.blocks.parameters()]) == len([*block.parameters()])
    cache = KVCache(24)
    close(torch.cat([model(part, cache=cache) for part in tokens.split(5, 1)], 1), whole)
    Decoder(model).prefill([[1, 2]], room=3)


@pytest.mark.parametrize("window", [6, 9, None])
def test_a_window_that_is_enlarged_on_a_cache_in_use_sees_what_is_kept_or_is_refused(window):
    x = torch.randn(2, 16, 16)
    for read in (3, 5, 12):  # from 5 on rows of a window of 4 have left
        attention = layer("sdpa+window", attention_window=4)
        cache = KVCache(16)
        attention(x[:, :read], AttentionContext(cache=cache))
        cache.advance(read)
        attention.window = window
        wanted = attention(x)
        for t in range(read, 16):
            try:
                found = attention(x[:, t : t + 1], AttentionContext(cache=cache))
            except ValueError as error:
                assert "not all before" in str(error) and read > 4
                break
            close(found, wanted[:, t : t + 1])
            cache.advance(1)
        else:
            assert read < 12


def test_what_a_person_puts_into_a_cache_is_what_the_next_pass_reads():
    """A state of zeros has read nothing, and values that are halved count half for the tokens after them alone."""
    tokens = torch.randint(61, (2, 12))
    states, cache = random_gpt(attention="delta/kda").double(), KVCache(12)
    states(tokens[:, :7], cache=cache)
    for number, kept in cache.layers.items():
        cache.layers[number] = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
    close(states(tokens[:, 7:], cache=cache), states(tokens[:, 7:]))

    gpt, cache = random_gpt(n_layer=1, n_kv_head=1).double(), KVCache(12)
    gpt(tokens[:, :7], cache=cache)
    cache.layers[0] = {name: rows[:, :, :7].clone() for name, rows in cache.layers[0].items()}  # without room
    cache.layers[0]["v"][:, :, :3] *= 0.5
    found = torch.cat([gpt(piece, cache=cache) for piece in tokens[:, 7:].split([3, 1, 1], 1)], 1)
    (attention,) = gpt.attentions

    def halve(module, arguments, qkv):
        *_, v = qkv.split(module.parts, -1)
        v[:, :3] *= 0.5

    attention.qkv_proj.register_forward_hook(halve)
    with torch.no_grad():
        close(found, gpt(tokens)[:, 7:])


@pytest.mark.parametrize("attention", ["sdpa", "mla", "sdpa+key_offset", "delta", "short_conv"])
def test_integers_and_too_few_rows_are_refused_in_a_cache(attention):
    """They were read as numbers without a scale, and as followed by rows of zeros."""
    gpt, tokens = random_gpt(attention=attention), torch.randint(61, (1, 9))
    for name in ("k", "latent", "last_key", "state", "written"):
        cache = KVCache(9)
        gpt(tokens[:, :6], cache=cache)
        if name not in cache.layers[0]:
            continue
        kept = cache.layers[0][name]
        cache.layers[0][name] = (kept * 20).to(torch.int8)
        with pytest.raises(ValueError, match=f"layer 0 has {name} as torch.int8, without a scale: "):
            gpt(tokens[:, 6:], cache=cache)
        if (0, name) in cache.spans:
            cache.layers[0][name] = kept[:, :, 1:5]
            cache.is_amid_pass = False
            with pytest.raises(ValueError, match=f"layer 0 has 4 rows of {name} for 6 positions: none may be left out"):
                gpt(tokens[:, 6:], cache=cache)

"""From logits to text: the filters, the draw, what a sample may depend on, where it ends."""

import copy
from fractions import Fraction

import numpy as np
import pytest
import tiktoken
import torch
from conftest import close, random_gpt, some, tokens_drawn
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import model.cpu
from common.errors import SettingsError
from data.config import TokenizerConfig
from data.tokenizer import END_OF_TEXT, make_tokenizer
from generation.config import SamplingParams
from generation.generate import (
    Decoder,
    Detokenizer,
    allowed_ids,
    encode_prompt,
    filter_logits,
    generate,
    generate_text,
    sample,
)
from generation.speed import decode_rate
from model.attention import FORMS, MODIFIERS
from model.config import GPTConfig
from model.gpt import GPT
from runs.checkpoint import open_checkpoint, save_checkpoint
from training.config import TrainConfig

BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])


def texts_of(model, prompts, seeds, *, new=30, stop=(), **params):
    """The tokens that follow each prompt."""
    return tokens_drawn(model, BYTE, prompts, seeds, SamplingParams(max_new_tokens=new, stop=list(stop), **params))


def byte_gpt(**settings):
    """Writes bytes, never the end of the document."""
    gpt = random_gpt(vocab_size=257, **settings)
    gpt.lm_head.weight.data[256] = 0
    gpt.final_norm.weight.data *= 3
    return gpt


def random_logits(seed, B=3, V=30):
    return 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))


# The filters and the draw.


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.integers(0, 10**6), st.floats(0.1, 3), st.integers(1, 40), st.floats(0.05, 1), st.floats(0, 0.5),
)  # fmt: skip
def test_the_filters_in_their_order_equal_hugging_faces_and_change_no_input(seed, temperature, k, p, m):
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = random_logits(seed)
    before = logits.clone()
    theirs = logits.clone()
    names = {"Temperature": temperature, "TopK": k, "TopP": p, "MinP": m}
    for processor in (getattr(processors, f"{name}LogitsWarper")(value) for name, value in names.items()):
        theirs = processor(None, theirs)
    # They sum probabilities from the small end, we from the large one: at the very edge rounding decides.
    likeliest = filter_logits(logits, SamplingParams(top_k=k, temperature=temperature)).double()
    nucleus = filter_logits(likeliest, SamplingParams(top_p=p)).softmax(-1)
    sums = likeliest.softmax(-1).sort(descending=True).values.cumsum(-1)
    assume((sums - p).abs().min() > 1e-6 and (nucleus - m * nucleus.amax(-1, keepdim=True)).abs().min() > 1e-6)
    close(filter_logits(logits, SamplingParams(top_k=k, top_p=p, min_p=m, temperature=temperature)), theirs)
    alone = filter_logits(logits, SamplingParams(temperature=0, top_k=k, top_p=p))
    likeliest = logits.argmax(-1)
    assert torch.equal(alone.isfinite().nonzero()[:, 1], likeliest)
    assert torch.equal(sample(alone, torch.rand(len(alone))), likeliest)
    assert torch.equal(logits, before)
    tied = filter_logits(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), SamplingParams(top_k=2))
    assert tied.isfinite().tolist() == [[True, True, True, False]]  # what ties with the last of them stays


def kept(probabilities, p):
    logits = torch.tensor([probabilities]).log()
    return (filter_logits(logits, SamplingParams(top_p=float(p), temperature=1.0)) > -torch.inf)[0].tolist()


def kept_exactly(probabilities, p):
    """In fractions: the fewest of the likeliest that reach p, of equal ones the first."""
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    found = [False] * len(probabilities)
    total = Fraction(0)
    for token in order:
        if total >= p:
            break
        found[token] = True
        total += probabilities[token]
    return found


@pytest.mark.long
@settings(max_examples=60)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=12), st.data())
def test_a_nucleus_is_that_of_exact_arithmetic_where_probabilities_are_binary_fractions(counts, data):
    """p is a sum of the likeliest, a tie that a rounding more would miss; Hugging Face keeps the same."""
    total = 1 << sum(counts).bit_length()
    probabilities = [Fraction(count, total) for count in (*counts, total - sum(counts))]
    likeliest = sorted(probabilities, reverse=True)
    p = sum(likeliest[: data.draw(st.integers(1, len(counts)))])
    floats = [float(probability) for probability in probabilities]
    for ordered in (torch.tensor(floats).sort(descending=True).values, torch.tensor(floats).sort().values):
        assume(torch.equal(ordered.log().softmax(-1), ordered))  # or the logits do not stand for these
    assert kept(floats, p) == kept_exactly(probabilities, p)
    if len({*probabilities}) == len(probabilities):  # of equal ones they keep the last
        processors = pytest.importorskip("transformers.generation.logits_process")
        theirs = processors.TopPLogitsWarper(float(p))(None, torch.tensor([floats]).log())
        assert kept(floats, p) == (theirs > -torch.inf)[0].tolist()


@pytest.mark.parametrize(
    ("probabilities", "p", "count"),
    [
        ([0.5, 0.25, 0.25], 0.5, 1),
        ([0.5, 0.25, 0.125, 0.125], 0.75, 2),
        ([0.4, 0.3, 0.2, 0.1], 0.7, 2),
        ([0.4, 0.3, 0.2, 0.1], 0.9, 3),
        ([0.7, 0.3], 0.7, 1),
        ([0.1] * 10, 0.3, 3),
        ([0.1] * 10, 0.8, 8),
        ([0.6, 0.2, 0.1, 0.1], 0.61, 2),
        ([1.0], 0.1, 1),
        ([0.5, 0.5], 1e-46, 1),  # float32 rounds p to 0
        ([0.1, 0.6, 0.3], 5e-324, 1),
    ],
)
def test_a_nucleus_ends_where_the_likeliest_tokens_reach_p(probabilities, p, count):
    assert sum(kept(probabilities, p)) == count


def test_a_number_draws_the_token_whose_share_of_the_line_it_falls_in():
    logits = torch.tensor([[0.1, 0.0, 0.6, 0.3]]).log()
    numbers = [0.0, 0.099, 0.101, 0.699, 0.701, 1 - 2**-24]
    assert [sample(logits, torch.tensor([u])).item() for u in numbers] == [0, 0, 2, 2, 3, 3]
    logits, n = random_logits(1, B=1, V=8), 200_000
    drawn = sample(logits.expand(n, 8), torch.rand(n, generator=torch.Generator().manual_seed(0)))
    shares = torch.bincount(drawn, minlength=8) / n
    close(shares, logits[0].softmax(-1), atol=0.004, rtol=0)  # 3.6 standard errors


@pytest.mark.parametrize(
    "params", [dict(temperature=0), dict(top_k=1), dict(top_k=7), dict(top_p=0.6), dict(min_p=0.1)]
)
def test_the_logits_of_every_place_are_filtered_as_those_of_one_alone(params):
    """top_k=1 of logits (B, T, V) took the threshold of the last place for all, without a word."""
    logits, filters = random_logits(2, B=6), SamplingParams(**params)
    wanted = torch.cat([filter_logits(row[None], filters) for row in logits])
    assert torch.equal(filter_logits(logits.unflatten(0, (2, 3)), filters), wanted.unflatten(0, (2, 3)))
    assert torch.equal(filter_logits(logits[0], filters), wanted[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", [dict(), dict(temperature=0.7), dict(top_p=0.9), dict(top_k=40), dict(min_p=0.1)])
def test_logits_of_half_precision_are_filtered_and_drawn_as_the_same_numbers_in_float64(params, dtype):
    logits = (1.5 * random_logits(0, B=1, V=2000)).to(dtype)
    filtered, exact = (filter_logits(each, SamplingParams(**params)) for each in (logits, logits.double()))
    close(filtered, exact.float())

    u = (torch.arange(500) + 0.5) / 500
    line = exact.softmax(-1).cumsum(-1)[0]  # where a number falls between two sums, its token is drawn
    drawn = torch.searchsorted(line, u.double(), right=True)
    for each in (filtered, exact) if params else (logits, filtered, exact):
        assert (sample(each.expand(500, -1), u) == drawn).float().mean() > 0.99  # but for rounding


@given(seed=st.integers(0, 10**6), u=st.sampled_from([0.0, 2**-24, 0.5, 1 - 2**-24]))
def test_a_token_without_probability_is_never_drawn(seed, u):
    allowed = torch.rand(1000, generator=torch.Generator().manual_seed(seed)) < 0.01
    allowed[seed % 1000] = True
    assert allowed[sample(random_logits(seed, V=1000).masked_fill(~allowed, -torch.inf), torch.full((3,), u))].all()


# What a sample depends on.


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kept", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_logits_that_leave_no_token_are_refused_by_a_loop_of_ones_own(temperature, kept):
    """As those of a constraint that allows none: id 2 was drawn, of 4."""
    params = SamplingParams(temperature=temperature, **kept)
    u = torch.rand(2)
    some_left = [0.0, -torch.inf, 1.0, -torch.inf]
    assert {*sample(filter_logits(torch.tensor([some_left, some_left]), params), u).tolist()} <= {0, 2}
    for none_left in ([-torch.inf] * 4, [0.0, torch.nan, 1.0, 0.0], [0.0, torch.inf, 1.0, 0.0]):
        with pytest.raises(FloatingPointError, match="logits leave no token to draw"):
            sample(filter_logits(torch.tensor([some_left, none_left]), params), u)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "params"),
    [
        *(({}, params) for params in ({}, {"temperature": 0}, {"top_p": 0.9, "top_k": 20})),
        ({"position": "learned"}, {}),
        ({"attention": "delta/sdpa"}, {"top_p": 0.9, "top_k": 20}),
    ],
    ids=str,
)
def test_a_sample_depends_on_its_prompt_and_seed_and_on_nothing_else_in_the_batch(shape, params):
    gpt = byte_gpt(block_size=8, **shape)
    prompts, seeds = [[1, 2, 3], [4], [1, 2, 3], [5, 6]], [11, 12, 13, 11]
    together = texts_of(gpt, prompts, seeds, **params)
    alone = [texts_of(gpt, [prompt], [seed], **params)[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert together == alone and (together[0] == together[2]) == (params == {"temperature": 0})
    assert together == texts_of(gpt, prompts, seeds, **params) and {len(text) for text in together} == {30}
    assert [text[:9] for text in together] == texts_of(gpt, prompts, seeds, new=9, **params)


def test_a_step_reads_its_tokens_back_from_the_device_once_and_nothing_else(device_reads):
    """Each read makes a GPU wait; the cache and the filters are to do without."""
    params, counts = dict(top_k=20, top_p=0.9, min_p=0.01), []
    for new in (4, 12):
        device_reads.clear()
        list(generate(byte_gpt(), BYTE, [[5], [7]], seeds=[1, 2], params=SamplingParams(max_new_tokens=new, **params)))
        counts.append(len(device_reads))
    assert device_reads.count("tolist") >= 12 and counts[1] - counts[0] == 12 - 4


@pytest.mark.slow
def test_a_sample_that_ends_leaves_the_others_as_they_would_be():
    gpt, prompts, seeds = byte_gpt(block_size=8), [[1], [2, 3], [1], [4]], [1, 2, 3, 4]
    whole = texts_of(gpt, prompts, seeds)
    stop = [chr(byte) for text, place in zip(whole, (20, 5, 11), strict=False) for byte in text[place : place + 1]]
    cut = texts_of(gpt, prompts, seeds, stop=[s for s in stop if ord(s) < 128] or ["\0"])
    assert all(text[: len(part)] == part for text, part in zip(whole, cut, strict=True))
    assert len({len(part) for part in cut}) > 2


@pytest.mark.slow
def test_equal_prompts_are_read_once_and_of_a_long_one_the_tail_counts(monkeypatch):
    gpt, sizes, forward = byte_gpt(block_size=8), [], Decoder._forward
    note = lambda self, tokens, *given: sizes.append(len(tokens)) or forward(self, tokens, *given)  # noqa: E731
    monkeypatch.setattr(Decoder, "_forward", note)
    texts_of(gpt, [[1, 2], [3, 4], [1, 2], [1, 2]], [1, 2, 3, 4], new=2)
    assert sizes == [2, 4]
    assert texts_of(gpt, [[*range(30)]], [1]) == texts_of(gpt, [[*range(22, 30)]], [1])


OTHERS = [
    dict(position="alibi"),
    dict(position="learned", norm="layernorm", mlp="gelu", bias=True, qkv_bias=True, qk_norm=False),
    dict(rope_fraction=0.5),
    dict(attention="sdpa+window/sdpa", attention_window=5, mlp="relu2"),
    dict(ngrams=[2], logit_softcap=10.0, tie_embeddings=True, dropout=0.5),
]


def test_a_model_of_states_reads_a_prompt_longer_than_its_block_whole():
    model = random_gpt(attention="linear", vocab_size=257)
    text = list(range(65, 65 + model.config.block_size))  # of which the first token alone differs
    prompts = [[first, *text] for first in range(70, 90)]
    with torch.inference_mode():
        wanted = [model(torch.tensor([prompt]))[0, -1].argmax().item() for prompt in prompts]
    assert len({*wanted}) > 1
    found = tokens_drawn(model, BYTE, prompts, [0] * 20, SamplingParams(temperature=0, max_new_tokens=1))
    assert [tokens for (tokens,) in found] == wanted


@pytest.mark.parametrize(
    "model_settings",
    some(
        (dict(attention=name) for name in [*FORMS, *(f"sdpa+{name}" for name in MODIFIERS), "delta+conv/sdpa+gate"]), 15
    )
    + OTHERS,
    ids=lambda one: one.get("attention") or "+".join(one),
)
@pytest.mark.parametrize("batch", [1, 3])
@torch.inference_mode()
def test_decoding_in_float32_is_the_full_pass(model_settings, batch, monkeypatch):
    """Several rows are multiplied by the way of large weights."""
    monkeypatch.setattr(model.cpu, "LARGE", 1)
    window = dict(attention_window=5) if "window" in model_settings.get("attention", "") else {}
    gpt = random_gpt(**(dict(n_kv_head=2, block_size=24) | window | model_settings))
    exact = copy.deepcopy(gpt).double()
    tokens = torch.randint(61, (batch, 24), generator=torch.Generator().manual_seed(1))
    decoder = Decoder(gpt)
    steps = [decoder.prefill(tokens[:, :9].tolist(), room=15)]
    steps += [decoder.step(tokens[:, t].tolist()) for t in range(9, 24)]
    got = torch.stack(steps, 1).log_softmax(-1)
    wanted = exact(tokens)[:, 8:].log_softmax(-1).float()
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    close(got, wanted, rtol=0, atol=3e-4)  # the delta rule's states lose 1.3e-4 with AVX2
    steps = decoder.decoded.steps
    assert steps and all(step not in gpt.blocks for step in steps)


def test_a_model_that_has_decoded_is_saved_opened_and_trained_as_before(tmp_path):
    gpt = byte_gpt().eval()
    before = copy.deepcopy(gpt)
    list(generate_text(gpt, BYTE, "a", max_new_tokens=2))
    save_checkpoint(tmp_path / "step_1", model=gpt, tokenizer=BYTE, config=TrainConfig(model=gpt.config))
    opened = open_checkpoint(tmp_path / "step_1").model
    tokens = torch.arange(20).view(2, 10)
    for each in gpt, before, opened:
        each.train().loss(tokens, tokens).backward()
    for name, weight in before.named_parameters():
        for each in gpt, opened:
            other = each.get_parameter(name)
            assert torch.equal(other, weight)
            close(other.grad, weight.grad)


@pytest.mark.slow
def test_nothing_but_the_tokens_is_changed():
    gpt = byte_gpt(dropout=0.5).train()
    state, weights = torch.get_rng_state(), copy.deepcopy(gpt.state_dict())
    parts = list(generate_text(gpt, BYTE, "hi", max_new_tokens=40))
    assert "".join(parts) == "".join(generate_text(gpt, BYTE, "hi", max_new_tokens=40)) and len(parts) > 1
    assert gpt.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in gpt.state_dict().items())
    next(parts := generate(gpt, BYTE, [[1]], seeds=[0], params=SamplingParams()))
    parts.close()
    assert gpt.training and decode_rate(gpt, steps=3) > 0 and gpt.training


@pytest.mark.slow
def test_padding_and_unused_ids_are_not_drawn():
    ranks = {bytes([byte]): byte for byte in range(256)}
    gaps = tiktoken.Encoding("gaps", pat_str=".", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 260})
    assert allowed_ids(gaps, torch.zeros(1, 300)).nonzero().flatten().tolist() == [*range(256), 260]
    assert allowed_ids(BYTE, torch.zeros(1, 257)) is None
    assert allowed_ids(gaps, torch.zeros(1, 100)) is None  # of an id beyond the model nothing is known
    gpt = random_gpt(vocab_size=300)
    gpt.lm_head.weight.data[256:260] *= 100
    for temperature in (0, 5.0):
        params = SamplingParams(temperature=temperature, max_new_tokens=20)
        drawn = tokens_drawn(gpt, gaps, [[260]] * 8, [*range(8)], params)
        assert {token for text in drawn for token in text} <= {*range(256), 260}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_tokens_that_a_hook_on_lm_head_bans_are_never_drawn_and_the_others_as_without_them(count):
    gpt = byte_gpt()
    prompts = [[256, 65 + number] for number in range(count)]
    free = {token for text in texts_of(gpt, prompts, range(count), temperature=0) for token in text}
    banned = torch.tensor(sorted(free)[::2])
    hook = gpt.lm_head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, banned, -1e9))
    drawn = texts_of(gpt, prompts, range(count), temperature=5.0)
    assert not {token for text in drawn for token in text} & {*banned.tolist()}
    likeliest = texts_of(gpt, prompts, range(count), new=10, temperature=0)
    hook.remove()
    # The whole text once more for each token, and the likeliest of those that may be.
    others = [token for token in range(257) if token not in banned]
    for prompt, text in zip(prompts, likeliest, strict=True):
        tokens = list(prompt)
        for _ in text:
            tokens.append(others[gpt(torch.tensor([tokens]))[0, -1, others].argmax()])
        assert text == tokens[2:]


# Where a text ends, and what of it is shown.


class Scripted(GPT):
    """A model that writes the given tokens, whatever it has read."""

    def __init__(self, script):
        super().__init__(GPTConfig(n_layer=1, n_head=1, n_embd=2, block_size=100, vocab_size=257))
        self.script = iter(script)

    def logits(self, x):
        return torch.nn.functional.one_hot(torch.tensor([[next(self.script)]]), 257).float() * 100


def written(script, **params):
    params = SamplingParams(**{"max_new_tokens": 50} | params)
    parts = generate(Scripted(script), BYTE, [[256]], seeds=[0], params=params)
    return [(part.text, part.finish) for part in parts]


def test_a_sample_ends_where_the_model_ends_the_document_or_the_limit_is_reached():
    script = [*b"abc", BYTE.eot_token, *b"def"]
    assert written(script) == [("a", None), ("b", None), ("c", None), ("", "end")]
    assert written(script, max_new_tokens=2) == [("a", None), ("b", "length")]
    assert written([*"aé".encode()[:2], BYTE.eot_token])[-1] == ("\ufffd", "end")  # half a character
    assert [text for text, _ in written([*"é".encode(), *b"a"], max_new_tokens=3)] == ["é", "a"]


def test_chunks_have_every_id_that_was_drawn_and_no_other():
    script = [*"é<ab".encode(), BYTE.eot_token, 7]
    params = SamplingParams(max_new_tokens=50, stop=["<abc"])
    chunks = [*generate(Scripted(script), BYTE, [[256]], seeds=[0], params=params)]
    assert [chunk.tokens for chunk in chunks] == [tuple("é".encode()), (*b"<ab", BYTE.eot_token)]
    assert [chunk.text for chunk in chunks] == ["é", "<ab"]


@pytest.mark.parametrize("stop", [[], ["é漢x"]], ids=str)
def test_a_character_that_the_length_limit_cuts_is_left_out(stop):
    text = "aé漢😀b"
    for length in range(1, len(text.encode()) + 1):
        parts = written(text.encode(), max_new_tokens=length, stop=stop)
        fits = max((text[:n] for n in range(len(text) + 1) if len(text[:n].encode()) <= length), key=len)
        assert ("".join(part for part, _ in parts), parts[-1][1]) == (fits, "length"), length
    for length, shown in enumerate(
        ["a", "a", "a", "a\ufffdb", "a\ufffdb\ufffd"], start=1
    ):  # bytes that no later one mends
        assert "".join(part for part, _ in written(b"a\xe6\xbcb\xff", max_new_tokens=length)) == shown


@pytest.mark.slow
def test_a_sample_ends_before_the_first_of_several_stop_strings_and_shows_nothing_of_it():
    left = {"d": "abc", "bcd cde": "a", "cde bcd": "a", "cd abcd": "", "efg": "abcdef", "\n f": "abcde", "a": ""}
    for stop, text in (left | {"abcdef": "", "f cdef": "ab", "fgh fg": "abcdef"}).items():
        parts = written([*b"abcdef"], stop=stop.split(" "), max_new_tokens=6)
        ends = "length" if text == "abcdef" else "stop"
        assert ("".join(part for part, _ in parts), parts[-1][1]) == (text, ends), stop
    parts = written([*"né → ok".encode()], stop=["→ "], max_new_tokens=9)  # characters of several bytes
    assert ("".join(part for part, _ in parts), parts[-1][1]) == ("né ", "stop")
    words = Detokenizer(
        tiktoken.Encoding("w", pat_str=".", mergeable_ranks={b"x b a c": 0}, special_tokens={END_OF_TEXT: 1}),
        ("a", "b"),
    )
    assert words.feed(0) == ("x ", "stop")  # both in one token: the earlier one


UNICODE = st.text(st.sampled_from("aé漢字😀👩\u200d🚀e\u0301\ufffd🇫🇷ञि") | st.characters(codec="utf-8"), max_size=40)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    content=UNICODE.map(str.encode) | st.binary(max_size=30),
    stop=st.lists(st.text("aé漢😀x", min_size=1, max_size=3), max_size=2),
)
def test_what_is_streamed_is_what_the_whole_is_decoded_to_up_to_a_stop_string(content, stop):
    stream, shown, text = Detokenizer(BYTE, tuple(stop)), "", content.decode(errors="replace")
    for token in (*content, BYTE.eot_token):
        part, finish = stream.feed(token)
        shown += part
        if finish:
            break
    assert text.startswith(shown) and (shown == text or any(word in text for word in stop))
    assert not any(word in shown for word in stop)


def test_a_prompt_begins_a_document_and_its_special_tokens_are_text():
    end = BYTE.eot_token
    assert encode_prompt(BYTE, "") == [end]
    assert encode_prompt(BYTE, END_OF_TEXT) == [end, *END_OF_TEXT.encode()]


def test_a_text_without_a_token_cannot_be_continued():
    for empty in ([[]], [[1], []]):
        with pytest.raises(ValueError, match="a text to continue needs at least one token"):
            list(generate(byte_gpt(), BYTE, empty, seeds=[0] * len(empty), params=SamplingParams()))


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("first", [1, 3])
def test_logits_that_are_not_finite_are_an_error_whenever_they_come(first, params, monkeypatch):
    gpt, logits, calls = byte_gpt(), GPT.logits, []
    bad = lambda self, x: logits(self, x) * (torch.nan if calls.append(1) or len(calls) >= first else 1)  # noqa: E731
    monkeypatch.setattr(GPT, "logits", bad)
    with pytest.raises(FloatingPointError, match="its logits are not finite"):
        texts_of(gpt, [[1]], [0], new=5, **params)
    assert len(calls) == first


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", "alibi", "learned"])
@pytest.mark.parametrize("default", some([torch.bfloat16, torch.float64, "meta"], 3), ids=str)
def test_a_text_does_not_depend_on_torchs_default_type_and_device(default, position):
    """Random numbers in bf16 would be multiples of 1/256; a default of "cuda" would put small tensors beside a CPU's.

    "meta" stands for it: it cannot be mixed either.
    """
    encoding = BYTE
    model = random_gpt(vocab_size=encoding.n_vocab, position=position, block_size=64)
    prompts = [encode_prompt(encoding, text) for text in ("ab", "the fox")]

    def texts():
        chunks = [
            *generate(model, encoding, prompts, seeds=[3, 4], params=SamplingParams(max_new_tokens=30, top_p=0.9))
        ]
        alone = [*generate(model, encoding, prompts[:1], seeds=[3], params=SamplingParams(max_new_tokens=30))]
        return chunks, alone

    usual = texts()
    try:
        if default == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(default)
        assert texts() == usual
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def offload(module):
    """Keep a module's weights beside it, and on the meta device between two calls, as accelerate's cpu_offload()."""
    held = {name: weight.detach() for name, weight in module.named_parameters(recurse=False)}
    away = {name: nn.Parameter(weight.to("meta"), requires_grad=False) for name, weight in held.items()}
    forward = module.forward

    def with_weights(*given, **named):
        module._parameters |= {name: nn.Parameter(weight, requires_grad=False) for name, weight in held.items()}
        try:
            return forward(*given, **named)
        finally:
            module._parameters |= away

    if held:
        module._parameters |= away
        module.forward = with_weights


@pytest.mark.parametrize("attention", some(["sdpa", "mla", "delta", "index"], 2))
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_whose_weights_are_offloaded_writes_and_is_scored(attention, tied):
    model = random_gpt(vocab_size=257, block_size=32, attention=attention, tie_embeddings=tied)
    offloaded = copy.deepcopy(model)
    offloaded.apply(offload)
    assert offloaded.device.type == "meta"
    text, other = ("".join(generate_text(each, BYTE, "ab", max_new_tokens=20)) for each in (model, offloaded))
    assert other == text
    tokens = torch.randint(257, (2, 9))
    with torch.no_grad():
        close(offloaded.loss(tokens, tokens), model.loss(tokens, tokens), rtol=1e-5)


@pytest.mark.parametrize("texts", [["ab"], ["ab", "the fox"]])
def test_a_compiled_model_writes_what_the_model_writes(texts):
    encoding = BYTE
    model = random_gpt(vocab_size=encoding.n_vocab)
    prompts, seeds = [encode_prompt(encoding, text) for text in texts], [*range(len(texts))]
    params = SamplingParams(max_new_tokens=12)
    compiled = torch.compile(model, backend="eager")
    assert [*generate(compiled, encoding, prompts, seeds=seeds, params=params)] == [
        *generate(model, encoding, prompts, seeds=seeds, params=params)
    ]


@pytest.mark.parametrize("is_training", [False, True])
def test_a_model_with_compiled_parts_writes_what_the_model_writes(is_training):
    model = random_gpt(vocab_size=257, dropout=0.5).train(is_training)
    wanted = "".join(generate_text(model, BYTE, "ab", max_new_tokens=5))
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.blocks[1].attention = torch.compile(model.blocks[1].attention, backend="eager")
    with torch.compiler.set_stance("force_eager"):  # to trace them takes seconds
        assert "".join(generate_text(model, BYTE, "ab", max_new_tokens=5)) == wanted
    assert all(part.training == is_training for part in model.modules())


@pytest.mark.usefixtures("unchecked")
def test_prompts_and_seeds_may_be_tensors_arrays_and_tuples():
    model, ids, params = random_gpt(vocab_size=257), encode_prompt(BYTE, "the fox"), SamplingParams(max_new_tokens=8)
    wanted = [*generate(model, BYTE, [ids, ids], seeds=[1, 2], params=params)]
    array = np.array(ids, dtype=np.uint16)
    for prompts in (torch.tensor([ids, ids]), [torch.tensor(ids), array], np.stack((array, array)), [tuple(ids)] * 2):
        assert [*generate(model, BYTE, prompts, seeds=np.array([1, 2]), params=params)] == wanted


@pytest.mark.parametrize(
    ("prompts", "seeds", "message"),
    [
        (["abc"], [1], r"prompts are lists of token ids, not texts: make one by encode_prompt\(tokenizer, text\)"),
        ([1, 2], [1, 2], r"prompts are a list of token ids for each text, not the ids of one: give \[ids\]"),
        (torch.tensor([1, 2]), [1, 2], r"not the ids of one: give \[ids\]"),
        ([[1], [2]], [1], "1 seeds for 2 prompts: give one for each"),
        ([[1]], [1, 2], "2 seeds for 1 prompts"),
        ([[1, 999]], [1], "token id 999 is not in the vocabulary of 257 ids"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_prompts_that_are_none_are_refused_in_a_sentence(prompts, seeds, message):
    encoding = BYTE
    model = random_gpt(vocab_size=encoding.n_vocab)
    with pytest.raises(ValueError, match=message):
        next(generate(model, encoding, prompts, seeds=seeds, params=SamplingParams()))
    nothing = generate(random_gpt(vocab_size=257), BYTE, [], seeds=[], params=SamplingParams())
    assert [*nothing] == []


def test_one_string_stops_a_text_as_a_list_of_it_does():
    assert SamplingParams(stop="\n\n").stop == ["\n\n"]
    assert SamplingParams(stop=None).stop == []  # as JSON of others has it
    with pytest.raises(SettingsError, match="stop has an empty string"):
        SamplingParams(stop="")


@pytest.mark.parametrize(("name", "text"), [("temperature", "0.8"), ("top_k", "5"), ("top_p", "0.9")])
def test_a_text_for_a_number_of_sampling_is_refused_by_its_name(name, text):
    with pytest.raises(SettingsError, match=f"{name}={text} is a text: give a number, without quotes"):
        SamplingParams(**{name: text})


@pytest.mark.parametrize("number", [1.5, 1.0, np.float32(1), torch.tensor(1.5)])
def test_ids_and_seeds_are_whole_numbers(number):
    """1.5 was read as 1."""
    model = random_gpt(vocab_size=257)
    for ids, seed in (([number], 1), ([1], number)):
        with pytest.raises(TypeError):
            next(generate(model, BYTE, [ids], seeds=[seed], params=SamplingParams()))


@pytest.mark.parametrize("seed", [-1, 2**32, 2**32 + 1, 2**53 + 1, 2**63 - 1])
def test_a_seed_whose_numbers_are_those_of_another_is_refused(seed):
    """2^32 + 1 wrote the text of seed 1."""
    torchs = [torch.Generator().manual_seed(each) for each in (seed, seed % 2**32)]
    assert len({torch.rand(1, generator=generator).item() for generator in torchs}) == 1
    model = random_gpt(vocab_size=257)
    with pytest.raises(ValueError, match=f"seed {seed} must be from 0 to 2\\^32 - 1"):
        next(generate(model, BYTE, [[1], [1]], seeds=[1, seed], params=SamplingParams()))
    last = generate(model, BYTE, [[1]], seeds=[2**32 - 1], params=SamplingParams(max_new_tokens=1))
    assert len([*last]) == 1


@pytest.mark.slow
def test_a_call_keeps_its_arguments_whatever_becomes_of_them_before_it_is_read():
    """Objects that served two calls had the values of the latter in both."""
    model = byte_gpt()

    def written(chunks):
        return [token for chunk in chunks for token in chunk.tokens]

    for change in (
        lambda prompts, seeds, params: setattr(params, "temperature", 0.0),
        lambda prompts, seeds, params: setattr(params, "max_new_tokens", 3),
        lambda prompts, seeds, params: params.stop.extend(map(chr, range(128))),
        lambda prompts, seeds, params: prompts[0].append(7),
        lambda prompts, seeds, params: prompts.append([7]),
        lambda prompts, seeds, params: seeds.__setitem__(0, 5),
    ):
        for begun in (0, 1):  # chunks that were read before the change
            given = [[256, 97]], [1], SamplingParams(max_new_tokens=12)
            wanted = written(generate(model, BYTE, given[0], seeds=given[1], params=given[2]))
            chunks = generate(model, BYTE, given[0], seeds=given[1], params=given[2])
            read = [next(chunks) for _ in range(begun)]
            change(*given)
            assert written([*read, *chunks]) == wanted
    array = np.array([[256, 97]])
    chunks = generate(model, BYTE, array, seeds=[1], params=SamplingParams(max_new_tokens=12))
    array[:] = 5
    assert written(chunks) == wanted


@pytest.mark.parametrize(("name", "value"), [("top_p", 5), ("temperature", -1.5), ("top_k", 0), ("max_new_tokens", 0)])
def test_params_that_are_set_after_they_were_made_are_checked_by_the_call(name, value):
    """top_p=5 was no filter; a string to stop at was its letters."""
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(SettingsError, match=f"{name}={value}"):
        generate(random_gpt(vocab_size=257), BYTE, [[1]], seeds=[1], params=params)
    params = SamplingParams(max_new_tokens=12)
    params.stop = bytes(range(128)).decode()
    wanted = texts_of(byte_gpt(), [[256, 97]], [1], new=12)
    assert tokens_drawn(byte_gpt(), BYTE, [[256, 97]], [1], params) == wanted


@pytest.mark.parametrize("none", [0, -1])
def test_what_others_write_for_no_top_k_is_told_how_to_write_it_here(none):
    with pytest.raises(SettingsError, match=f"top_k={none} must be at least 1: leave it out to sample from all tokens"):
        SamplingParams(top_k=none)

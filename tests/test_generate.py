"""From logits to text."""

from __future__ import annotations

import pytest
import tiktoken
import torch
from conftest import random_gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import TokenizerConfig
from data.tokenizer import end_of_text, make_tokenizer
from model.config import GPTConfig
from model.generate import generate, next_token_probabilities
from training.sampling import continue_text, decode_stream


@pytest.fixture(scope="module")
def byte() -> tiktoken.Encoding:
    return make_tokenizer(TokenizerConfig(name="byte"), [])


def test_temperature_zero_takes_the_likeliest_token():
    probabilities = next_token_probabilities(torch.tensor([[1.0, 3.0, 2.0]]), temperature=0, top_k=2, top_p=0.5)
    assert probabilities.tolist() == [[0, 1, 0]]


def test_temperature_divides_the_logits():
    logits = torch.randn(2, 7)
    torch.testing.assert_close(next_token_probabilities(logits, temperature=2.0), (logits / 2).softmax(-1))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 40), p=st.floats(0.01, 1.0))
def test_the_filters_keep_exactly_the_tokens_their_definitions_name(seed, k, p):
    logits = 3 * torch.randn(1, 30, generator=torch.Generator().manual_seed(seed))
    kept = set(next_token_probabilities(logits, top_k=k, top_p=p)[0].nonzero().flatten().tolist())
    likeliest = logits[0].argsort(descending=True).tolist()[:k]
    probabilities = dict(zip(likeliest, logits[0][likeliest].double().softmax(-1).tolist(), strict=True))
    expected, total = set(), 0.0
    for token in likeliest:
        if total >= p - 1e-6:
            break
        expected.add(token)
        total += probabilities[token]
    boundary = any(abs(sum(list(probabilities.values())[: i + 1]) - p) < 1e-5 for i in range(len(likeliest)))
    assert kept == expected or boundary


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    model, prompt = random_gpt(), torch.tensor([[1, 2, 3]])

    def draw(seed):
        drawn = generate(model, prompt, max_new_tokens=30, n_vocab=61, generator=torch.Generator().manual_seed(seed))
        return torch.stack(list(drawn)).tolist()

    assert draw(0) == draw(0) != draw(1)


def test_ids_the_tokenizer_does_not_have_are_never_drawn():
    model = random_gpt()
    with torch.no_grad():
        model.head.weight[50:] *= 100
    drawn = generate(model, torch.zeros(64, 1, dtype=torch.long), max_new_tokens=8, n_vocab=50, temperature=5.0)
    assert torch.stack(list(drawn)).max() < 50


def test_generation_goes_on_past_the_block():
    for position in ("rope", "learned"):
        drawn = list(generate(random_gpt(position=position), torch.tensor([[1]]), max_new_tokens=40, n_vocab=61))
        assert len(drawn) == 40


def test_sampling_leaves_the_global_generator_and_the_mode_alone(byte):
    model = random_gpt(vocab_size=257).train()
    before = torch.get_rng_state()
    "".join(continue_text(model, byte, "hi", max_new_tokens=5))
    assert torch.equal(torch.get_rng_state(), before) and model.training


class Scripted(torch.nn.Module):
    """A model that writes the given tokens after a prompt of one token."""

    def __init__(self, script: list[int]) -> None:
        super().__init__()
        self.script, self.anchor = script, torch.nn.Parameter(torch.zeros(()))
        self.config = GPTConfig(block_size=100)

    def forward(self, tokens, **_):
        next_token = self.script[tokens.size(1) - 1]
        return torch.nn.functional.one_hot(torch.full_like(tokens, next_token), 257).float() * 100


def test_a_sample_ends_where_the_model_ends_the_document(byte):
    model = Scripted([*b"abc", end_of_text(byte), *b"def"])
    assert "".join(continue_text(model, byte, "", max_new_tokens=7)) == "abc"
    assert "".join(continue_text(model, byte, "", max_new_tokens=2)) == "ab"


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_streamed_text_is_the_text_and_never_a_broken_character(byte, text):
    text = text.encode("utf-8", "replace").decode()
    chunks = list(decode_stream(byte, byte.encode_ordinary(text)))
    assert "".join(chunks) == text
    assert sum(chunk.count("\ufffd") for chunk in chunks) == text.count("\ufffd")


def test_bytes_that_are_no_text_are_replaced_at_the_end(byte):
    assert "".join(decode_stream(byte, [0x61, 0xE2, 0x82])) == "a\ufffd"

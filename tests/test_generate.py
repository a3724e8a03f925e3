"""From logits to tokens: the controls, the draw, and what a sample may depend on."""

import copy

import pytest
import torch
from conftest import random_gpt
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from generation.decoder import Decoder
from generation.sampling import DRAWS, Controls, apply_controls, draw, generate, penalize_repetition


def tokens_of(model, prompts, seeds, *, new=30, decoder=Decoder, finished=frozenset(), **controls) -> list[list[int]]:
    texts = [[] for _ in prompts]
    steps = generate(
        decoder(model), prompts, seeds=seeds, max_new_tokens=new, controls=Controls(**controls), finished=finished
    )  # fmt: skip
    for step in steps:
        for drawn in step:
            texts[drawn.sample].append(drawn.token)
    return texts


def random_logits(seed: int, B: int = 3, V: int = 30) -> torch.Tensor:
    return 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))


# The controls


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 40), p=st.floats(0.01, 0.99), m=st.floats(0.001, 1))
def test_each_filter_keeps_exactly_the_tokens_its_definition_names(seed, k, p, m):
    logits = random_logits(seed, B=1)
    probabilities = logits[0].double().softmax(-1).tolist()
    likeliest = sorted(range(30), key=lambda token: -probabilities[token])

    def kept(**control):
        return set(apply_controls(logits, Controls(**control))[0].isfinite().nonzero().flatten().tolist())

    assert kept(top_k=k) == set(likeliest[:k])
    sums = [sum(probabilities[token] for token in likeliest[:n]) for n in range(30)]  # before each token
    if min(abs(total - p) for total in sums) > 1e-5:  # else rounding decides
        assert kept(top_p=p) == {likeliest[n] for n in range(30) if n == 0 or sums[n] < p}
    floor = m * max(probabilities)
    if min(abs(probability - floor) for probability in probabilities) > 1e-7:
        assert kept(min_p=m) == {token for token in range(30) if probabilities[token] >= floor}


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.1, 3),
    k=st.integers(1, 40),
    p=st.floats(0.05, 1),
    m=st.floats(0, 0.5),
    penalty=st.floats(0.5, 2),
)
def test_the_controls_in_their_order_equal_hugging_faces_processors(seed, temperature, k, p, m, penalty):
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = random_logits(seed)
    text = torch.randint(30, (3, 8), generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros(3, 30, dtype=torch.bool).scatter(1, text, True)
    ours = penalize_repetition(logits, seen, penalty)
    ours = apply_controls(ours, Controls(temperature=temperature, top_k=k, top_p=p, min_p=m))
    theirs = logits
    for processor in (
        processors.RepetitionPenaltyLogitsProcessor(penalty),
        processors.TemperatureLogitsWarper(temperature),
        processors.TopKLogitsWarper(k),
        processors.TopPLogitsWarper(p),
        processors.MinPLogitsWarper(m),
    ):
        theirs = processor(text, theirs)
    # They sum probabilities from the small end, we from the large one: at the very edge rounding decides.
    assume(not at_edge(penalize_repetition(logits, seen, penalty) / temperature, k, p, m))
    torch.testing.assert_close(ours, theirs)


def at_edge(logits: torch.Tensor, k: int, p: float, m: float) -> bool:
    """Whether a sum of probabilities lies so near p, or a probability so near m's floor, that rounding decides."""
    likeliest = apply_controls(logits, Controls(top_k=k)).double()
    sums = likeliest.softmax(-1).sort(descending=True).values.cumsum(-1)
    nucleus = apply_controls(likeliest, Controls(top_p=p)).softmax(-1)
    near_floor = (nucleus - m * nucleus.amax(-1, keepdim=True)).abs().min() < 1e-6
    return bool((sums - p).abs().min() < 1e-6 or near_floor)


@given(seed=st.integers(0, 10**6), k=st.integers(1, 40), p=st.floats(1e-6, 1), m=st.floats(0, 1))
def test_the_likeliest_token_survives_every_filter(seed, k, p, m):
    logits = random_logits(seed)
    kept = apply_controls(logits, Controls(top_k=k, top_p=p, min_p=m))
    assert kept.gather(-1, logits.argmax(-1, keepdim=True)).isfinite().all()


def test_the_controls_are_pure():
    logits = random_logits(0)
    before, seen = logits.clone(), torch.ones(3, 30, dtype=torch.bool)
    for changed in (
        penalize_repetition(logits, seen, 2.0),
        apply_controls(logits, Controls(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)),
    ):
        assert not torch.equal(changed, logits)
    assert torch.equal(logits, before)


# The draw


def test_a_number_draws_the_token_whose_share_of_the_line_it_falls_in():
    logits = torch.tensor([[0.1, 0.0, 0.6, 0.3]]).log()
    numbers = torch.tensor([0.0, 0.099, 0.101, 0.699, 0.701, 1 - 2**-24])
    assert [draw(logits, u.view(1, 1)).item() for u in numbers] == [0, 0, 2, 2, 3, 3]


@given(seed=st.integers(0, 10**6), u=st.sampled_from([0.0, 2**-24, 0.5, 1 - 2**-24]))
def test_a_token_without_probability_is_never_drawn(seed, u):
    logits = random_logits(seed, V=1000)
    allowed = torch.rand(1000, generator=torch.Generator().manual_seed(seed)) < 0.01
    allowed[seed % 1000] = True
    assert allowed[draw(logits.masked_fill(~allowed, -torch.inf), torch.full((3, 1), u))].all()


def test_tokens_come_as_often_as_they_are_probable():
    logits, n = random_logits(1, B=1, V=8), 200_000
    drawn = draw(logits.expand(n, 8), torch.rand(n, 1, generator=torch.Generator().manual_seed(0)))
    shares = torch.bincount(drawn, minlength=8) / n
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.004, rtol=0)  # 3.6 standard errors


# The loop


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_sample_depends_on_its_prompt_and_seed_and_on_nothing_else_in_the_batch(position):
    model = random_gpt(position=position, block_size=8)
    prompts, seeds = [[1, 2, 3], [4], [1, 2, 3], [5, 6]], [11, 12, 13, 11]
    together = tokens_of(model, prompts, seeds)
    alone = [tokens_of(model, [prompt], [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert together == alone and together[0] != together[2]


def test_a_longer_limit_goes_on_with_the_same_text():
    model = random_gpt()
    short, long = (tokens_of(model, [[1]], [7], new=new)[0] for new in (DRAWS - 3, DRAWS + 40))
    assert long[: len(short)] == short


def test_the_seed_decides():
    model = random_gpt()
    assert tokens_of(model, [[1]], [3]) == tokens_of(model, [[1]], [3]) != tokens_of(model, [[1]], [4])
    greedy = {str(tokens_of(model, [[1]], [seed], temperature=0)) for seed in range(5)}
    assert len(greedy) == 1


def test_a_finished_sample_is_not_drawn_again_and_the_others_go_on_as_they_would(monkeypatch):
    monkeypatch.setattr("generation.sampling.DRAWS", 4)  # so that numbers are made anew after one is finished
    model, prompts, seeds = random_gpt(block_size=8), [[1], [2, 3], [4]], [1, 2, 3]
    whole = tokens_of(model, prompts, seeds, repetition_penalty=3.0)
    finished, texts, controls = set(), [[], [], []], Controls(repetition_penalty=3.0)
    steps = generate(Decoder(model), prompts, seeds=seeds, max_new_tokens=30, controls=controls, finished=finished)
    for number, step in enumerate(steps, start=1):
        for drawn in step:
            texts[drawn.sample].append(drawn.token)
        finished |= {5: {1}, 9: {0, 2}}.get(number, set())
    assert texts == [whole[0][:9], whole[1][:5], whole[2][:9]]


def test_equal_prompts_are_read_once(monkeypatch):
    model, sizes = random_gpt(), []
    read = Decoder.read
    monkeypatch.setattr(Decoder, "read", lambda self, texts, room: sizes.append(len(texts)) or read(self, texts, room))
    tokens_of(model, [[1, 2], [3, 4], [1, 2], [1, 2]], [1, 2, 3, 4], new=2)
    assert sizes == [2]


def test_of_a_long_prompt_the_tail_counts():
    model, prompt = random_gpt(block_size=8), list(range(30))
    assert tokens_of(model, [prompt], [1]) == tokens_of(model, [prompt[-8:]], [1])


def test_ids_that_are_not_allowed_are_never_drawn():
    model, allowed = random_gpt(), torch.arange(61) % 2 == 0
    with torch.no_grad():
        model.lm_head.weight[1::2] *= 100
    for temperature in (0, 5.0):
        steps = generate(
            Decoder(model), [[1]] * 16, seeds=list(range(16)), max_new_tokens=8,
            allowed=allowed, controls=Controls(temperature=temperature, repetition_penalty=3.0),
        )  # fmt: skip
        assert {drawn.token % 2 for step in steps for drawn in step} == {0}


def test_logprobs_are_the_models_own_before_any_control():
    model = random_gpt()
    steps = generate(
        Decoder(model), [[1, 2]], seeds=[0], max_new_tokens=6, logprobs=True,
        controls=Controls(temperature=0.3, top_k=2, repetition_penalty=2.0),
    )  # fmt: skip
    drawn = [drawn for step in steps for drawn in step]
    text = torch.tensor([[1, 2, *(d.token for d in drawn)]])
    expected = model(text).log_softmax(-1)[0, 1:-1].gather(-1, text[0, 2:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([d.logprob for d in drawn]), expected.detach(), atol=1e-5, rtol=1e-5)


def test_a_repetition_penalty_keeps_a_greedy_text_from_repeating():
    model = random_gpt(block_size=64)
    plain, penalized = (
        tokens_of(model, [[1]], [0], temperature=0, repetition_penalty=p, new=40)[0] for p in (1.0, 1e6)
    )
    assert len(set(plain)) < 20 and len(set(penalized)) == 40 and 1 not in penalized


def test_nothing_but_the_tokens_is_changed():
    model = random_gpt()
    state, weights = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    tokens_of(model, [[1]], [0])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

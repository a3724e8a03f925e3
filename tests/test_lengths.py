"""A model that torch traces, exports or compiles at one length is right at every other, or refuses it."""

import pytest
import torch
from conftest import close, first_of, random_gpt, some

from model.attention import FORMS, MODIFIERS, SETTINGS

LENGTHS = (1, 2, 256, 257, 400)  # around 1, for which nothing is hidden, and around 256, up to which a text is short
STATES = ("linear", "retention", "delta", "kda", "gdn2")
OF_STATES = (1, 2, 32, 70)  # a chunk is 32 tokens; a graph has each chunk of a text, so that long texts compile slowly
SOME = ("sdpa", "sigmoid", "softmax1+window", "mla", "index", "moba", "loop", "sdpa+forget+sink", "sdpa+logn", "alibi")
EVERY = [*FORMS, *(f"sdpa+{name}" for name in (*SETTINGS, *MODIFIERS)), "softmax1+window", "sdpa+forget+sink", "alibi"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("unchecked"),
]


def some_and_slow_others(some, every):
    return [*some, *(pytest.param(name, marks=pytest.mark.slow) for name in every if name not in some)]


def made(name):
    """A model, and texts of each length."""
    settings = {"position": "alibi"} if name == "alibi" else {"attention": name}
    window = {"attention_window": 40} if "window" in name else {}
    return random_gpt(**settings, **window, n_layer=1, n_kv_head=2, block_size=400), {
        T: torch.randint(61, (2, T)) for T in (OF_STATES if name in STATES else LENGTHS)
    }


@pytest.mark.parametrize(
    ("name", "T"),
    [
        *some([(name, 257) for name in SOME], 5),
        *(
            pytest.param(name, T, marks=pytest.mark.long if T == 1 or number % 2 else pytest.mark.slow)
            for number, name in enumerate(EVERY)
            if name not in STATES
            for T in (1, 257)
            if T == 1 or name not in SOME
        ),
        *(pytest.param("sdpa", T, marks=pytest.mark.slow) for T in (2, 256, 400)),
    ],
)
@torch.no_grad()
def test_a_trace_of_any_length_reads_texts_of_every_length(name, T):
    gpt, texts = made(name)
    traced = torch.jit.trace(gpt, texts[T], check_trace=False)
    for tokens in texts.values():
        close(traced(tokens), gpt(tokens), atol=1e-4)


@pytest.mark.parametrize("form", some_and_slow_others(["delta"], STATES))
@pytest.mark.parametrize("T", [1, 2, 40])
@torch.no_grad()
def test_a_trace_of_a_form_with_a_state_reads_texts_of_its_own_length_and_refuses_others(form, T):
    gpt, _ = made(form)
    tokens = torch.randint(61, (2, 41))
    traced = torch.jit.trace(gpt, tokens[:, :T], check_trace=False)
    close(traced(tokens[:, -T:]), gpt(tokens[:, -T:]))
    for other in {1, 2, 39, 40, 41} - {T}:
        with pytest.raises(
            RuntimeError, match=f"this trace serves texts of {T} tokens: trace a form with a state at the"
        ):
            traced(tokens[:, :other])


@torch.no_grad()
def test_a_trace_of_a_token_with_a_cache_sees_all_keys():
    """One query and five keys: the kernel's own causality would show it the first key alone."""
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    sdpa = lambda *qkv: FORMS["sdpa"](*qkv, is_causal=True)  # noqa: E731
    traced = torch.jit.trace(sdpa, (q, k, v), check_trace=False)
    close(traced(q, k, v), sdpa(q, k, v))
    q = torch.randn(2, 4, 3, 8)
    close(traced(q, k, v), sdpa(q, k, v))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "T"),
    [
        *first_of(("matmul", 300), ("sigmoid", 2), ("mla", 300)),
        *first_of(("sdpa", 2), ("sdpa", 300), ("mla", 2), ("sdpa+window", 2), ("sdpa+forget+sink", 300)),
        *first_of(("sdpa+logn", 2), ("alibi", 300)),
    ],
)
@torch.no_grad()
def test_an_export_of_two_tokens_or_more_reads_texts_of_every_length(name, T):
    gpt, texts = made(name)
    shapes = {"tokens": {1: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(gpt, (torch.randint(61, (2, T)),), dynamic_shapes=shapes).module()
    for tokens in texts.values():
        close(exported(tokens), gpt(tokens), atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", first_of("sdpa+sink", "sdpa+token_sink", "sdpa+forget+sink"))
@torch.no_grad()
def test_an_export_with_bounds_takes_grouped_keys_and_a_sink(name):
    """torch could not prove its guards for the repeated heads of T + 1 keys."""
    gpt, texts = made(name)
    T = torch.export.Dim("T", min=2, max=400)
    shapes = {"tokens": {0: torch.export.Dim("B"), 1: T}}
    exported = torch.export.export(gpt, (torch.randint(61, (2, 20)),), dynamic_shapes=shapes).module()
    example = torch.randint(61, (2, 400))[:, :20].contiguous()
    last = torch.export.export(gpt, (example,), {"last": True}, dynamic_shapes=shapes | {"last": None}).module()
    for tokens in texts.values():
        if tokens.shape[1] > 1:
            close(last(tokens, last=True), gpt(tokens)[:, -1:], atol=1e-4)
            close(exported(tokens), gpt(tokens), atol=1e-4)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", first_of("index", "delta", "moba"))
@torch.no_grad()
def test_an_export_that_is_bound_to_lengths_is_right_or_refuses(name):
    gpt, texts = made(name)
    for T in (2, 50 if name in STATES else 300):
        shapes = {"tokens": {1: torch.export.Dim.AUTO}}
        exported = torch.export.export(gpt, (torch.randint(61, (2, T)),), dynamic_shapes=shapes).module()
        served = []
        for tokens in texts.values():
            try:
                close(exported(tokens), gpt(tokens), atol=1e-4)
                served.append(tokens.shape[1])
            except AssertionError as error:
                assert "Guard failed: " in str(error)
        assert len(served) < len(texts)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sdpa", "sigmoid", "mla", "delta"])
@torch.no_grad()
def test_a_compiled_model_reads_texts_of_every_length(name):
    gpt, texts = made(name)
    torch._dynamo.reset()
    compiled = torch.compile(gpt, backend="eager")  # what a graph is bound to is decided before it is lowered
    for tokens in texts.values():
        close(compiled(tokens), gpt(tokens), atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_of_a_pipeline_compute_the_model_and_a_tied_weight_is_two_of_them(tied):
    from torch.distributed import pipelining  # takes longer than torch itself

    gpt, tokens = random_gpt(tie_embeddings=tied), torch.randint(61, (2, 30))
    cut = pipelining.pipeline(gpt, mb_args=(tokens,), split_spec={"blocks.1": pipelining.SplitPoint.BEGINNING})
    first, last = cut.get_stage_module(0), cut.get_stage_module(1)
    logits = last(*first(tokens))
    close(logits, gpt(tokens))

    logits.square().mean().backward()
    gpt(tokens).square().mean().backward()
    embedding, head = first.token_embedding.weight.grad, last.lm_head.weight.grad
    if tied:
        close(embedding + head, gpt.lm_head.weight.grad)
    else:
        close(embedding, gpt.token_embedding.weight.grad)
        close(head, gpt.lm_head.weight.grad)

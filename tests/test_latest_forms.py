"""The forms and modifiers of late 2026: each against its formula in float64, and as it begins.

test_families.py compares layers of published models that have them.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import close, layer
from test_field_2026 import LATE, B, C, D, H, T, random_layer

from common.errors import SettingsError
from model.attention import AttentionContext
from model.attention.call import Call, add_sink
from model.attention.contract import of_weighting
from model.attention.executors import attend
from model.attention.recurrent import in_chunks, token_by_token
from model.attention.weighting import PLAIN, Softcap, Sparsemax

HIDDEN = torch.ones(T, T).triu(1) > 0


def exact(tensor, wanted):
    close(tensor, wanted, rtol=1e-9, atol=1e-9)


def heads_of(made, x):
    """The results of each head before its finishing modifiers, by the definition, and the other parts."""
    q, k, v = (t.double() for t in made.project(x))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(HIDDEN, -math.inf)
    return scores, v


def begins_as(plain, attention, **settings):
    """A modified layer begins as another one with its weights."""
    modified, other = layer(attention, **settings), layer(plain, **settings)
    other.load_state_dict(modified.state_dict(), strict=False)
    x = torch.randn(B, 9, 16)
    close(modified(x), other(x))


# Gates, and what stands in for one.


@torch.no_grad()
def test_out_norm_is_each_heads_result_at_the_length_of_one_per_channel_before_any_gate():
    made, x = random_layer("sdpa+gate_element+out_norm", position="none"), torch.randn(B, T, C).double()
    scores, v = heads_of(made, x)
    y = scores.softmax(-1) @ v
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gate = 2 * torch.sigmoid(x @ made.modifiers["gate_element"].gate.weight.T)
    exact(made(x), made.merge(y * gate.view(B, T, H, D).transpose(1, 2)))
    assert not [*made.modifiers["out_norm"].parameters()]


@pytest.mark.parametrize("name", ["gate_biased", "gate_softplus"])
@torch.no_grad()
def test_a_gate_has_a_bias_a_head_or_no_upper_bound_and_begins_open(name):
    made, x = random_layer(f"sdpa+{name}", position="none"), torch.randn(B, T, C).double()
    scores, v = heads_of(made, x)
    modifier = made.modifiers[name]
    logits = x @ modifier.gate.weight.T
    if name == "gate_biased":
        gate = 2 / (1 + torch.exp(-logits.view(B, T, H, D) - modifier.bias[:, None]))
    else:
        gate = torch.log1p(logits.exp())[..., None] / math.log(2)
    exact(made(x), made.merge(scores.softmax(-1) @ v * gate.transpose(1, 2)))
    begins_as("sdpa", f"sdpa+{name}")


# Sinks of each query's own.


@pytest.mark.parametrize("others", ["", "+sink", "+forget", "+diff"])
@torch.no_grad()
def test_a_token_asks_its_heads_to_attend_to_nothing_by_a_score_of_its_own(others):
    made, x = random_layer(f"sdpa+token_sink{others}", position="none"), torch.randn(B, T, C).double()
    scores, v = heads_of(made, x)
    sink = (x @ made.modifiers["token_sink"].weight.weight.T).mT[..., None].repeat_interleave(scores.shape[1] // H, 1)
    nothing = sink.exp()
    if others == "+sink":
        nothing = nothing + made.modifiers["sink"].bias.exp()[:, None, None]
    if others == "+forget":
        gates = made.modifiers["forget"].gate
        total = F.logsigmoid(x @ gates.weight.T + gates.bias).cumsum(1).mT
        scores = scores + total[..., None] - total[..., None, :]
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + nothing)
    y = weights @ v
    if others == "+diff":
        y = y[:, 0::2] - torch.sigmoid(x @ made.modifiers["diff"].weight.weight.T).mT[..., None] * y[:, 1::2]
    exact(made(x), made.merge(y))


def test_a_token_sink_begins_as_softmax1_and_needs_weights_that_no_shift_changes():
    begins_as("softmax1", "sdpa+token_sink")
    for form, reason in (("sigmoid", "no key takes weight"), ("stick", "a share that no key takes")):
        with pytest.raises(SettingsError, match=rf"attention={form}\+token_sink: {reason}.*leave out token_sink"):
            layer(f"{form}+token_sink")


@pytest.mark.parametrize("weighting", [PLAIN, Softcap(3.0), Sparsemax()], ids=lambda weighting: weighting.name)
@pytest.mark.parametrize("T", [7, 300])
def test_a_sink_of_each_query_is_one_more_key_of_its_score_in_value_and_gradient(weighting, T):
    q, k, v = torch.randn(3, B, H, T, D).double().requires_grad_().unbind()
    sink, constant = torch.randn(B, H, T).double().requires_grad_(), torch.randn(H).double().requires_grad_()
    call = add_sink(add_sink(Call(q, k, v, weighting), constant), sink)
    found = attend(call, of_weighting(weighting).executors)[0]
    scores = weighting.squashed(q @ k.mT / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1) > 0, -math.inf)
    both = torch.logaddexp(constant[:, None], sink)[..., None]
    wanted = weighting.weights(torch.cat((scores, both), -1))[..., :-1] @ v
    exact(found, wanted)
    g = torch.randn_like(wanted)
    for got, gradient in zip(*(torch.autograd.grad(y, (sink, constant), g) for y in (found, wanted)), strict=True):
        close(got, gradient, rtol=1e-8, atol=1e-8)


# Rotation and state.


def test_proportional_rope_is_gemma_4s():
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    parameters = {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    shape = dict(hidden_size=64, num_attention_heads=1, rope_parameters=parameters)
    wanted, _ = utilities.ROPE_INIT_FUNCTIONS["proportional"](LlamaConfig(**shape), torch.device("cpu"))
    settings = dict(n_embd=64, n_head=1, rope_theta=500.0, rope_fraction=0.25)
    proportional, plain = (layer("sdpa", **settings, rope_proportional=yes).rope for yes in (True, False))
    assert not wanted[8:].any()
    close(proportional.frequencies()[0], wanted[:8])
    assert (proportional.frequencies()[0][1:] > plain.frequencies()[0][1:]).all()
    whole = [layer("sdpa", rope_proportional=yes).rope.frequencies()[0] for yes in (True, False)]
    assert torch.equal(*whole)


@pytest.mark.parametrize("form", ["delta", "kda"])
@torch.no_grad()
def test_beta_reaches_two_where_a_state_may_change_its_sign(form):
    plain, made = (random_layer(form, allow_neg_eigval=yes) for yes in (False, True))
    plain.load_state_dict(made.state_dict())
    x = torch.randn(B, T, C).double()
    exact(made.rates(x)[1], 2 * plain.rates(x)[1])
    assert made.rates(x)[1].max() > 1
    decay, beta = torch.zeros(1, 1, 40, 1).double(), torch.full((1, 1, 40), 2.0).double()
    q = k = F.normalize(torch.ones(1, 1, 40, D), dim=-1).double()
    v, state = torch.zeros(1, 1, 40, D).double(), torch.ones(1, 1, D, D).double()
    for scan in (token_by_token, in_chunks):
        y, last = scan(q, k, v, decay, beta, state)  # a write of zero at β = 2 turns the state at its key
        exact(y[0, 0, :, 0] / y[0, 0, 1, 0], (-1.0) ** torch.arange(1, 41).double())
        exact(last, state)


@pytest.mark.parametrize("attention", ["sdpa+out_norm", "sdpa+token_sink", "sdpa+gate_biased", "sdpa+gate_softplus"])
@torch.no_grad()
def test_documents_are_apart(attention):
    made, x = random_layer(attention), torch.randn(B, T, C).double()
    y = made(x, AttentionContext(doc_starts=LATE))
    close(y[1, 5:], made(x[1:, 5:])[0], rtol=1e-5, atol=1e-5)

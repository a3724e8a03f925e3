"""The forms and modifiers of late 2026: each against its formula in float64, and as it begins.

test_families.py compares layers of published models that have them.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import close, layer, random_gpt, some
from test_field_2026 import LATE, B, C, D, H, T, random_layer

from common.errors import SettingsError
from model.attention import AttentionContext
from model.attention.call import Call, add_sink
from model.attention.contract import of_weighting
from model.attention.executors import run_call
from model.attention.fading import faded_scores
from model.attention.recurrent import in_chunks, token_by_token
from model.attention.weighting import PLAIN, Softcap, Sparsemax
from model.cache import KVCache
from model.config import GPTConfig
from model.gpt import GPT
from model.rope import rotate
from model.row import DecodedModel, serves

DISTANCE = torch.arange(T)[:, None] - torch.arange(T)
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
    found = run_call(call, of_weighting(weighting).executors)[0]
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


# More in a weight, and more in a score.


@pytest.mark.parametrize("settings", [{}, {"n_kv_head": 2}, {"attention_window": 4}], ids=str)
@pytest.mark.parametrize("position", ["none", "rope"])
@torch.no_grad()
def test_parallax_fits_a_line_to_the_values_around_a_query(settings, position):
    made, x = random_layer("parallax", position=position, **settings), torch.randn(B, T, C).double()
    scores, v = heads_of(made, x)
    q, k, _ = made.project(x)
    r = (x @ made.r_proj.weight.T).view(B, T, H, D).transpose(1, 2)
    k = k.repeat_interleave(H // k.shape[1], 1)
    if position == "rope":
        q, k, r = (rotate(t, made.rope.table(t)) for t in (q, k, r))
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(HIDDEN, -math.inf)
    if "attention_window" in settings:
        scores = scores.masked_fill(torch.ones(T, T).tril(-4) > 0, -math.inf)
    p = scores.softmax(-1)[..., None]  # (B, H, T, S, 1)
    along = torch.einsum("bhtd,bhsd->bhts", r, k)[..., None]
    mean = (p * v[:, :, None]).sum(3, keepdim=True)
    covariance = (p * (along - (p * along).sum(3, keepdim=True)) * (v[:, :, None] - mean)).sum(3)
    y = mean[..., 0, :] - covariance
    close(made(x), made.merge(y), rtol=1e-5, atol=1e-5)  # RoPE's angles are float32
    close(made.weights(x) @ v, y, rtol=1e-5, atol=1e-5)


def test_parallax_begins_as_sdpa_also_in_a_gpt_and_of_a_line_returns_its_value():
    begins_as("sdpa", "parallax")
    fresh = GPT(GPTConfig(attention="parallax", vocab_size=9, n_layer=2, n_embd=16, n_head=2))
    assert not any(attention.r_proj.weight.any() for attention in fresh.attentions)
    # Of values that are a line of one channel of the keys, v = a + b k, any slope gives y = E[v] - r Var[k] b.
    made = random_layer("parallax", position="none", n_head=1, n_embd=1, head_size=1, qk_norm=False)
    for weight in made.parameters():
        weight.data.fill_(1.0)
    x = torch.randn(1, T, 1).double()
    p = (x @ x.mT).masked_fill(HIDDEN, -math.inf).softmax(-1)
    mean, square = p @ x, p @ x**2
    exact(made(x), mean - x * (square - mean**2))


@pytest.mark.parametrize("settings", [{}, {"n_kv_head": 2}, {"position": "alibi"}], ids=str)
@torch.no_grad()
def test_walls_keys_fade_channel_by_channel_on_their_way_to_a_query(settings):
    made, x = random_layer("wall", **settings), torch.randn(B, T, C).double()
    made.fade.bias.sub_(0.5)
    q, k, v = made.project(x)
    gate = torch.sigmoid(x @ made.fade.weight.T + made.fade.bias).view(B, T, -1, D).transpose(1, 2)
    k, v, gate = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v, gate))
    scores = torch.full((B, H, T, T), -math.inf).double()
    for t in range(T):
        left = torch.ones(B, H, D).double()
        for s in reversed(range(t + 1)):
            scores[:, :, t, s] = (q[:, :, t] * k[:, :, s] * left).sum(-1) / math.sqrt(D)
            left = left * gate[:, :, s]
    if made.alibi:
        scores = scores - torch.tensor([2.0 ** (-8 * h / H) for h in range(1, H + 1)])[:, None, None] * DISTANCE
    exact(made(x), made.merge(scores.softmax(-1) @ v))


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 4.0, -4.0])
@pytest.mark.parametrize("T", some([1, 5, 31, 129, 300], 2))
def test_products_that_fade_are_their_definition_in_any_length_however_strong_the_decay(T, shift):
    S = T + 70
    q, k = torch.randn(2, H, T, D).double().requires_grad_(), torch.randn(2, H, S, D).double().requires_grad_()
    gates = (torch.randn(2, H, S, D).double() + shift).requires_grad_()
    total = F.logsigmoid(gates).cumsum(-2)
    key, query = torch.arange(S), torch.arange(70, S)[:, None]
    left = (total[:, :, 70:, None] - total[:, :, None]).masked_fill((key > query)[..., None], -math.inf).exp()
    wanted = torch.einsum("bhtd,bhsd,bhtsd->bhts", q, k, left)
    found = faded_scores(q, k, total).masked_fill(key > query, 0)
    exact(found, wanted)
    g = torch.randn_like(wanted)
    both = (torch.autograd.grad(y, (q, k, gates), g, retain_graph=True) for y in (found, wanted))
    for gradients in zip(*both, strict=True):
        exact(*gradients)


def test_wall_with_equal_channels_multiplies_a_score_by_what_forget_adds_to_it_as_a_logarithm():
    wall = random_layer("wall", n_head=1, head_size=2, qk_norm=False)
    wall.fade.weight.data[1], wall.fade.bias.data[1] = wall.fade.weight.data[0], wall.fade.bias.data[0]
    x = torch.randn(1, T, C).double()
    q, k, v = wall.project(x)
    total = F.logsigmoid(x @ wall.fade.weight[0] + wall.fade.bias[0]).cumsum(-1)
    scores = (q @ k.mT)[0, 0] / math.sqrt(2) * (total.mT - total).exp()
    exact(wall(x), wall.merge(scores.masked_fill(HIDDEN, -math.inf).softmax(-1) @ v))


@pytest.mark.parametrize("block_size", [24, 5])
@torch.no_grad()
def test_a_relative_bias_is_inklings(block_size):
    modeling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    made = random_layer("sdpa+relative", position="none", block_size=block_size, n_kv_head=2)
    x, modifier = torch.randn(B, T, C).double(), made.modifiers["relative"]
    assert modifier.profiles.shape == (16, block_size)
    theirs = modeling.InklingRelativeLogits(16, block_size).double()
    theirs.proj.copy_(modifier.profiles)
    place = torch.arange(T)
    bias = theirs((x @ modifier.r_proj.weight.T).view(B, T, H, 16), place, place)
    scores, v = heads_of(made, x)
    exact(made(x), made.merge((scores + bias).softmax(-1) @ v))
    far = made(torch.cat((x, x, x), 1))  # beyond the farthest distance there is no bias
    assert far.isfinite().all()
    begins_as("sdpa", "sdpa+relative")


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention", ["parallax", "wall", "sdpa+relative", "wall+relative+sink+window", "parallax+diff"]
)
def test_long_texts_go_by_rows_as_short_ones_by_matrices_with_their_gradients(attention):
    window = {"attention_window": 50} if "window" in attention else {}
    made = random_layer(attention, **window, n_kv_head=2, block_size=300)
    x = torch.randn(2, 300, C).double().requires_grad_()
    inputs = [x, *made.parameters()]
    long = made(x)
    made.function = made.function.by(*(e for e in made.function.executors if e.name in ("weighted", "fused_matrix")))
    short = made(x)
    exact(long, short)
    g = torch.randn_like(long)
    for pair in zip(*(torch.autograd.grad(y, inputs, g) for y in (long, short)), strict=True):
        close(*pair, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("attention", ["parallax", "wall+relative+window", "k_eq_v+relative"])
def test_second_derivatives_of_a_long_text_are_differences_of_the_first(attention):
    window = {"attention_window": 50} if "window" in attention else {}
    made = random_layer(attention, **window, block_size=260)
    x, g, along, step = torch.randn(4, 1, 260, C).double().unbind()

    def slope(at, **more):
        x = at.clone().requires_grad_()
        (of_x,) = torch.autograd.grad((made(x) * g).sum(), x, **more)
        return x, (of_x * along).sum()

    at, first = slope(x, create_graph=True)
    (second,) = torch.autograd.grad(first, at)
    difference = (slope(x + 1e-5 * step)[1] - slope(x - 1e-5 * step)[1]) / 2e-5
    close((second * step).sum(), difference, rtol=1e-5, atol=1e-5)


# States that erase and write by channel; mla whose keys are chosen.


@pytest.mark.parametrize("negative", [False, True])
@torch.no_grad()
def test_gdn2_erases_and_writes_by_channel(negative):
    made, x = random_layer("gdn2", n_kv_head=2, allow_neg_eigval=negative), torch.randn(B, T, C).double()
    q, k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in made.project(x))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))

    def of_channels(gate):
        return torch.sigmoid(x @ gate.weight.T).view(B, T, H, D).transpose(1, 2)

    b, w = (1 + negative) * of_channels(made.erase), of_channels(made.write)
    rate = F.softplus(x @ made.fade.weight.T + made.fade.bias).view(B, T, H, D).transpose(1, 2)
    alpha = torch.exp(-made.log_rate.exp()[:, None, None] * rate)
    state, y = torch.zeros(B, H, D, D).double(), torch.zeros(B, H, T, D).double()
    for t in range(T):
        key = k[:, :, t, :, None]
        erase = torch.eye(D).double() - key * (b[:, :, t] * k[:, :, t])[:, :, None]  # I - k (b k)ᵀ
        state = erase @ (alpha[:, :, t, :, None] * state) + key * (w[:, :, t] * v[:, :, t])[:, :, None]
        y[:, :, t] = (q[:, :, t, None] @ state)[:, :, 0] / math.sqrt(D)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * made.out_norm.weight
    exact(made(x), made.merge(y))


@torch.no_grad()
def test_gdn2_is_kda_where_all_channels_have_one_beta():
    kda, made = random_layer("kda"), random_layer("gdn2")
    made.load_state_dict(kda.state_dict(), strict=False)
    for gate in (made.erase, made.write):
        gate.weight.copy_(kda.beta.weight.repeat_interleave(D, 0))
    for length in (T, 70):  # within a chunk, and over several
        x = torch.randn(B, length, C).double()
        close(made(x), kda(x), rtol=1e-7, atol=1e-7)


def test_chunks_of_a_state_that_erases_by_channel_are_its_definition_with_gradients():
    shape = 2, 3, 75, D
    q, k, v, b = (torch.randn(shape).double().requires_grad_() for _ in range(4))
    decay = (-torch.rand(shape).double()).requires_grad_()
    inputs = q, k, v, decay, b
    state = torch.randn(2, 3, D, D).double()
    key = F.normalize(k, dim=-1)
    found, wanted = (
        torch.cat([part.flatten() for part in scan(q, key, v, decay, None, state, 2 * torch.sigmoid(b) * key)])
        for scan in (in_chunks, token_by_token)
    )
    close(found, wanted, rtol=1e-8, atol=1e-8)
    g = torch.randn_like(found)
    for pair in zip(*(torch.autograd.grad(y, inputs, g, retain_graph=True) for y in (found, wanted)), strict=True):
        close(*pair, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("others", ["", "+sink+window"])
@torch.no_grad()
def test_dsa_is_mla_over_the_keys_that_an_indexer_chooses(others):
    settings = {"attention_window": 6} if others else {}
    made, mla = (random_layer(name + others, block_size=16, **settings) for name in ("dsa", "mla"))  # 4 keys
    mla.load_state_dict(made.state_dict(), strict=False)
    x = torch.randn(B, T, C).double()
    asks, key, share = (x @ made.index_proj.weight.T).split((2 * D, D, 2), -1)
    key = F.layer_norm(key, [D], made.index_norm.weight, made.index_norm.bias, 1e-6)
    table = made.rope.table(x)  # of the first channels of an index head, as many as mla rotates
    asks, key = rotate(asks.view(B, T, 2, D).transpose(1, 2), table), rotate(key[:, None], table)
    index = (share.mT[..., None] * F.relu(asks @ key.mT)).sum(1)
    chosen = torch.zeros(B, 1, T, T, dtype=torch.bool)
    for b, t in [(b, t) for b in range(B) for t in range(T)]:
        seen = range(max(0, t - 5) if others else 0, t + 1)
        best = sorted(seen, key=lambda s: (s == t, round(index[b, t, s].item(), 9), s))[-4:]
        chosen[b, 0, t, best] = True
    close(made(x), mla(x, AttentionContext(mask=chosen)), rtol=1e-9, atol=1e-9)


# Keys that are the values.


@pytest.mark.parametrize("settings", [{}, {"qk_norm": False}, {"n_kv_head": 2, "attention_window": 5}], ids=str)
@torch.no_grad()
def test_keys_are_values_and_half_a_cache_is_kept(settings):
    made, x = random_layer("k_eq_v", **settings), torch.randn(B, T, C).double()
    heads = settings.get("n_kv_head", H)
    u = (x @ made.kv_proj.weight.T).view(B, T, heads, D).transpose(1, 2)
    q = (x @ made.q_proj.weight.T).view(B, T, H, D).transpose(1, 2)
    k = v = u
    if "qk_norm" not in settings:
        v = u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        k = v * made.k_scale
        q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * made.q_norm.weight
    q, k = (rotate(t, made.rope.table(t)) for t in (q, k))
    k, v = (t.repeat_interleave(H // heads, 1) for t in (k, v))
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(HIDDEN, -math.inf)
    if "attention_window" in settings:
        scores = scores.masked_fill(DISTANCE >= 5, -math.inf)
    y = made.merge(scores.softmax(-1) @ v)
    exact(made(x), y)
    cache, pieces = KVCache(T), []
    for piece in x.split((5, 3, 1, 1, 1, 1), 1):
        pieces.append(made(piece, AttentionContext(cache=cache)))
        cache.position += piece.shape[1]
    exact(torch.cat(pieces, 1), y)
    assert cache.nbytes == 8 * B * heads * D * cache.layers[0]["tied"].shape[2]  # one row a token


@torch.no_grad()
def test_k_eq_v_is_gemma_4s_full_layer():
    pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    from transformers import Gemma4TextConfig

    shape = dict(hidden_size=C, num_attention_heads=H, num_key_value_heads=2, num_global_key_value_heads=2, head_dim=D)
    shape |= dict(global_head_dim=D, num_hidden_layers=1, layer_types=["full_attention"], attention_k_eq_v=True)
    shape |= dict(num_kv_shared_layers=0, attn_implementation="eager", rms_norm_eps=1e-6)
    config = Gemma4TextConfig(**shape)
    theirs = modeling.Gemma4TextAttention(config, 0).double().eval()
    for parameter in theirs.parameters():
        parameter.copy_(0.5 * torch.randn_like(parameter) + (parameter.ndim == 1))
    made = random_layer("k_eq_v", n_kv_head=2, head_size=D)

    def neighbours(rows):  # ours turns channels 2i and 2i + 1, theirs i and i + D / 2
        return rows.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).flatten(0, 2)

    made.q_proj.weight.copy_(neighbours(theirs.q_proj.weight))
    made.q_norm.weight.copy_(math.sqrt(D) * neighbours(theirs.q_norm.weight))  # their scale is 1
    made.kv_proj.weight.copy_(neighbours(theirs.k_proj.weight))
    made.k_scale.copy_(neighbours(theirs.k_norm.weight))
    out = theirs.o_proj.weight.unflatten(1, (H, 2, D // 2)).transpose(2, 3).flatten(1)  # of values in our order
    made.o_proj.weight.copy_(out)
    x, angles = torch.randn(B, T, C).double(), torch.arange(T)[:, None] * 10_000.0 ** (-torch.arange(0, D, 2) / D)
    angles = torch.cat((angles, angles), -1)[None].double()
    mask = torch.zeros(T, T).double().masked_fill(HIDDEN, -1e30)[None, None]
    wanted = theirs(x, (angles.cos(), angles.sin()), mask, {})[0]
    close(made(x), wanted, rtol=1e-5, atol=1e-5)


# Content as a length, position as an angle.


@pytest.mark.parametrize("settings", [{}, {"n_kv_head": 2, "rope_theta": 50.0}], ids=str)
@torch.no_grad()
def test_pope_is_a_sum_of_lengths_by_the_cosine_of_their_angles(settings):
    made, x = random_layer("sdpa", position="pope", **settings), torch.randn(B, T, C).double()
    made.pope.phase.copy_(-7 * torch.rand_like(made.pope.phase))  # beyond -2π it stays there
    q, k, v = made.project(x)
    delta = made.pope.phase.clamp(-2 * math.pi, 0).repeat_interleave(H // len(made.pope.phase), 0)
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    frequency = settings.get("rope_theta", 10_000.0) ** (-torch.arange(D).double() / D)
    angle = DISTANCE[..., None] * frequency + delta[:, :, None]  # (H, T, S, D)
    lengths = (1 + q.exp()).log()[:, :, :, None] * (1 + k.exp()).log()[:, :, None]
    scores = (lengths * angle.cos()).sum(-1) / math.sqrt(D)
    wanted = made.merge(scores.masked_fill(HIDDEN, -math.inf).softmax(-1) @ v)
    close(made(x), wanted, rtol=1e-5, atol=1e-5)  # its angles are float32
    close(made.rotate(q, AttentionContext()), made.pope.of_lengths(q))  # for layers of one's own, and indexers
    far = made.pope.of_lengths(q[..., :1, :], 5000) * made.pope.of_lengths(
        k[..., :1, :], 4990, made.pope.phase.repeat_interleave(H // len(made.pope.phase), 0)
    )
    near = made.pope.of_lengths(q[..., :1, :], 10) * made.pope.of_lengths(
        k[..., :1, :], 0, made.pope.phase.repeat_interleave(H // len(made.pope.phase), 0)
    )
    close(far.sum(-1), near.sum(-1), rtol=1e-2, atol=1e-2)  # by the distance alone


@torch.no_grad()
def test_pope_keeps_documents_apart_and_decodes_as_it_reads_also_where_a_layer_leaves_it_out():
    for attention in ("sdpa", "sdpa+window/sdpa+nope", "parallax", "index/softmax1"):
        window = {"attention_window": 4} if "window" in attention else {}
        gpt = random_gpt(attention=attention, position="pope", n_kv_head=2, **window)
        tokens, cache = torch.randint(61, (2, 12)), KVCache(12)
        whole = gpt(tokens)
        with torch.inference_mode():
            steps = [gpt(piece, cache=cache) for piece in tokens.split((6, 1, 1, 4), 1)]
        close(torch.cat(steps, 1), whole)
        starts = torch.tensor([[0] * 5 + [5] * 7]).expand(2, -1)
        close(gpt(tokens, doc_starts=starts), torch.cat((gpt(tokens[:, :5]), gpt(tokens[:, 5:])), 1), atol=1e-4)
    # One text is decoded by a faster way, which does not know it.
    gpt = random_gpt(position="pope")
    with torch.inference_mode():
        assert DecodedModel(gpt).steps is not None
    assert not serves(gpt.attentions[0]) and serves(random_gpt().attentions[0])


# No attention at all.


@torch.no_grad()
def test_a_short_convolution_is_lfm3s_in_one_pass_and_cached():
    modeling = pytest.importorskip("transformers.models.lfm3.modeling_lfm3")
    from transformers import Lfm3Config

    config = Lfm3Config(hidden_size=C, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=3, conv_bias=False)
    theirs = modeling.Lfm3ShortConv(config, 0).double().eval()
    made, x = random_layer("short_conv"), torch.randn(B, T, C).double()
    b, c, content = theirs.in_proj.weight.chunk(3)
    made.qkv_proj.weight.copy_(torch.cat((c, b, content)))
    made.taps.copy_(theirs.conv.weight[:, 0])
    made.o_proj.weight.copy_(theirs.out_proj.weight)
    wanted = theirs(x)
    close(made(x), wanted, rtol=1e-5, atol=1e-5)
    cache, pieces = KVCache(T), []
    for piece in x.split((1, 1, 7, 1, 2), 1):
        pieces.append(made(piece, AttentionContext(cache=cache)))
        cache.position += piece.shape[1]
    close(torch.cat(pieces, 1), wanted, rtol=1e-5, atol=1e-5)
    assert cache.nbytes == 8 * B * C * 2  # two tokens, in any text
    both = made(x, AttentionContext(doc_starts=LATE))
    exact(both[1, 5:], made(x[1:, 5:])[0])


@torch.no_grad()
def test_the_weights_of_a_short_convolution_are_the_mean_of_its_channels():
    made, x = random_layer("short_conv"), torch.randn(B, T, C).double()
    weights = made.weights(x, AttentionContext(doc_starts=LATE))
    c, b, _ = made.project(x)
    taps = made.taps.view(H, D, 3)
    for t, s in [(t, s) for t in range(T) for s in range(T)]:
        wanted = torch.zeros(H).double()
        if 0 <= t - s < 3 and s >= LATE[1, t]:
            wanted = (c[1, :, t] * taps[..., 2 - (t - s)] * b[1, :, s]).mean(-1)
        exact(weights[1, :, t, s], wanted)

"""RoPE: the rotation of the paper, by distance only, in float32, for any positions."""

import math
import re

import numpy as np
import pytest
import torch
from conftest import close, layer, random_gpt, some

from common.errors import SettingsError
from model.attention import AttentionContext
from model.rope import Rope, rotate


def turned(rope, x, positions=None):
    """x, (…, T, D), at positions 0, 1, … or at those given."""
    return rotate(x, rope.table(x) if positions is None else rope.cos_sin(positions))


def by_hand(x, position, base):
    """RoFormer eq. 34 for one vector, in Python floats."""
    out = list(x)
    for i in range(len(x) // 2):
        angle = position * base ** (-2 * i / len(x))
        a, b = x[2 * i], x[2 * i + 1]
        out[2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out


def test_adjacent_pairs_turn_by_the_angles_of_the_paper_and_products_depend_on_the_distance_alone():
    x, rope = torch.randn(1, 5, 8), Rope(8, theta=100.0)
    y = turned(rope, x)
    for m in range(5):
        close(y[0, m].tolist(), by_hand(x[0, m].tolist(), m, 100.0))
    q, k = torch.randn(2, 1, 1, 8)
    near, far, other = (
        (turned(rope, q, torch.tensor([m])) * turned(rope, k, torch.tensor([n]))).sum()
        for m, n in ((7, 3), (107, 103), (7, 4))
    )
    close(near, far, atol=1e-4)
    assert abs(near - other) > 1e-2


@pytest.mark.parametrize("T", [1, 1024, 1025, 2048, 2049])
def test_positions_count_on_from_the_past_up_to_the_last_of_any_length(T):
    rope, x = Rope(4), torch.randn(1, T, 4)
    for past in (0, 1, 1023, 3000):
        close(rope.table(x, past), rope.cos_sin(torch.arange(past, past + T)), rtol=0, atol=0)
    close(turned(rope, x), turned(rope, x, torch.arange(T)))


FLOAT64 = {
    "rope": {},
    "yarn": {"rope_scaling": "yarn", "rope_scaling_factor": 4.0},
    "llama3": {"rope_scaling": "llama3", "rope_scaling_factor": 8.0, "rope_trained_length": 12, "rope_theta": 20.0},
    "a part": {"rope_fraction": 0.5},
    "pope": {"position": "pope"},
    "mla": {"attention": "mla"},
    "parallax": {"attention": "parallax"},
    "retention": {"attention": "retention"},
    "logn": {"attention": "sdpa+logn"},
}


@pytest.mark.parametrize("settings", some(FLOAT64.values(), 3), ids=FLOAT64)
@torch.no_grad()
def test_a_text_in_float64_is_the_same_at_any_place_to_the_bits_of_float64(settings):
    """Angles in float32 were 1e-5 beside, growing with the position, so a reference was none."""
    model = random_gpt(block_size=4096, **settings).double()
    tokens = torch.randint(61, (1, 1012))
    starts = torch.tensor([[0] * 1000 + [1000] * 12])
    close(model(tokens, doc_starts=starts)[:, -12:], model(tokens[:, -12:]), atol=1e-11, rtol=1e-11)


@torch.no_grad()
def test_angles_rates_and_logarithms_in_float64_are_those_of_numpy():
    rope, position = Rope(8, theta=500.0), np.arange(70_000, 70_003)
    angle = position[:, None] * 500.0 ** (-np.arange(0, 8, 2) / 8)
    table = rope.table(torch.zeros(1, 3, 8, dtype=torch.float64), 70_000)
    np.testing.assert_allclose(table, np.stack((np.cos(angle), np.sin(angle)), -1), rtol=0, atol=1e-10)
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    rates = layer("retention").double().rates(x)[0][:, 0, 0]
    np.testing.assert_allclose(rates, np.log1p(-(2.0 ** (-5 - np.arange(4)))), rtol=1e-14)
    scaled = layer("sdpa+logn").double()
    call = scaled.make_call(*scaled.queries_keys_values(x, AttentionContext()), AttentionContext())
    changed = scaled.modifiers["logn"].score(call, x, AttentionContext())
    factor = scaled.modifiers["logn"].factor.numpy()
    wanted = call.q.numpy() * (factor[:, None] * np.log([1, 2, 3]))[None, :, :, None]
    np.testing.assert_allclose(changed.q, wanted, rtol=1e-14)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_angles_are_float32_and_half_precision_is_rounded_once_and_after_the_rotation(dtype, step):
    """In bfloat16 positions 1,000 and 1,001 would be the same number."""
    rope, x, positions = layer(n_head=2).to(dtype).rope, torch.randn(3, 50, 8).to(dtype), torch.arange(980, 1030)
    assert rope.table(x).dtype == rope.cos_sin(positions).dtype == torch.float32
    for turn in (rotate, torch.compile(rotate, backend="aot_eager")):
        y = turn(x, rope.cos_sin(positions))
        assert y.dtype == dtype
        close(y.float(), turned(rope, x.float(), positions), rtol=step, atol=1e-6)


def test_linear_scaling_divides_positions():
    x, stretched = torch.randn(1, 9, 8), Rope(8, stretch=4.0)
    close(turned(stretched, x, torch.arange(9) * 4), turned(Rope(8), x))


@pytest.mark.parametrize("scaling", ["yarn", "llama3"])
@pytest.mark.parametrize(("factor", "length"), [(4.0, 512), (16.0, 32_768), (2.0, 64), (1.0, 64)])
@pytest.mark.parametrize("trained", [None, 100])
def test_yarn_and_llama3_are_those_of_transformers(scaling, factor, length, trained):
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    parameters = {"rope_type": scaling, "rope_theta": 10_000.0, "factor": factor}
    parameters |= {"original_max_position_embeddings": trained or int(length / factor)}
    parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling == "llama3" else {}
    shape = dict(hidden_size=64, num_attention_heads=1, max_position_embeddings=length)
    frequencies, temperature = utilities.ROPE_INIT_FUNCTIONS[scaling](
        LlamaConfig(**shape, rope_parameters=parameters), torch.device("cpu")
    )
    settings = {"rope_scaling": scaling, "rope_scaling_factor": factor, "rope_trained_length": trained}
    rope = layer(n_embd=64, n_head=1, **settings, block_size=length, qk_norm=False).rope
    angles = torch.arange(12)[:, None] * frequencies
    close(rope.cos_sin(torch.arange(12)), temperature * torch.stack((angles.cos(), angles.sin()), -1))


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_any_memory_layout_gives_the_same_compiled_or_not_with_exact_gradients_in_float64():
    rope, x = Rope(8, theta=12345.0), torch.randn(2, 5, 3, 8)
    with torch.inference_mode():
        rope.table(x)  # a table first needed there serves training too
    wanted = turned(rope, x.transpose(1, 2).contiguous())
    backwards = x.transpose(1, 2).transpose(-2, -1).contiguous().transpose(-2, -1)
    odd_offset = torch.cat((torch.zeros(2, 3, 5, 1), x.transpose(1, 2)), -1)[..., 1:]
    odd_step = torch.cat((x.transpose(1, 2), torch.zeros(2, 3, 5, 1)), -1)[..., :8]
    plain = x.transpose(1, 2).contiguous()
    odd_start = torch.cat((torch.zeros(1), plain.flatten()))[1:].view(plain.shape)
    for same in (plain, odd_start, x.transpose(1, 2), backwards, odd_offset, odd_step):
        close(turned(rope, same), wanted)
        with torch.inference_mode():
            close(turned(rope, same), wanted)
    compiled = torch.compile(lambda x: rotate(x, rope.table(x, 70)), backend="aot_eager", fullgraph=True)
    close(compiled(x), turned(rope, x, torch.arange(3) + 70))
    exact = x[0, :2].double().requires_grad_()
    assert turned(rope, exact).dtype == torch.float64 and torch.autograd.gradcheck(lambda x: turned(rope, x), exact)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"head_size": 7}, "but model.head_size=7 makes 7 channels: set model.head_size=8, or another model.position"),
        ({"n_embd": 12}, "but model.n_embd=12 / model.n_head=4 makes 3 channels: set model.head_size=4, or"),
        (
            {"head_size": 8, "rope_fraction": 0.3},
            "fraction=0.3 of model.head_size=8 makes 2.4 channels: set .*=0.25, or",
        ),
        (
            {"head_size": 6, "rope_fraction": 0.5},
            "fraction=0.5 of model.head_size=6 makes 3 channels: set .*=0.666667,",
        ),
        (
            {"head_size": 8, "rope_fraction": 1e-6},
            "fraction=1e-06 of model.head_size=8 makes 8e-06 channels: set .*=0.25",
        ),
        (
            {"attention": "gta", "n_embd": 120},
            "half of model.n_embd=120 / model.n_head=4, which attention=gta rotates, "
            "makes 15 channels: set model.head_size=32, or",
        ),
        (
            {"attention": "single_head", "n_embd": 15, "n_head": 1},
            "but model.n_embd=15 makes 15 channels: set model.n_embd=16, or",
        ),
    ],
    ids=str,
)
def test_half_a_pair_of_channels_is_refused_but_where_nothing_rotates(settings, words):
    with pytest.raises(SettingsError, match=words) as refused:
        layer(**settings)
    layer(**settings, position="alibi")
    name, value = re.search(r"set model\.(\w+)=(\S+?),? ", str(refused.value)).groups()
    assert layer(**settings | {name: float(value) if "fraction" in name else int(value)}).rope is not None
    assert layer(rope_scaling="none", rope_scaling_factor=4.0).rope == layer().rope != layer(rope_theta=5.0).rope


@pytest.mark.parametrize(("fraction", "head_size"), [(0.58, 100), (0.14, 100), (0.28, 100), (0.56, 100), (0.07, 200)])
def test_a_fraction_that_floats_round_rotates_the_channels_that_it_means(fraction, head_size):
    assert layer(head_size=head_size, rope_fraction=fraction).rope.channels == round(fraction * head_size)

"""RoPE: the rotation of the paper, by distance only, in float32, for any positions."""

import math

import pytest
import torch

from model.rope import RotaryEmbedding, rotate


def by_hand(x, position, base):
    """RoFormer eq. 34 for one vector, in Python floats."""
    out = list(x)
    for i in range(len(x) // 2):
        angle = position * base ** (-2 * i / len(x))
        a, b = x[2 * i], x[2 * i + 1]
        out[2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out


def test_adjacent_pairs_turn_by_the_angles_of_the_paper():
    x = torch.randn(1, 5, 8)
    y = RotaryEmbedding(8, theta=100.0)(x)
    for m in range(5):
        torch.testing.assert_close(y[0, m].tolist(), by_hand(x[0, m].tolist(), m, 100.0), rtol=1e-5, atol=1e-6)


def test_products_depend_on_the_distance_alone():
    rope, q, k = RotaryEmbedding(16), torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def product(m, n):
        return (rope(q, torch.tensor([m])) * rope(k, torch.tensor([n]))).sum()

    torch.testing.assert_close(product(7, 3), product(107, 103), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(product(7, 3), product(7, 4), atol=1e-2)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_explicit_positions_of_any_leading_shape_equal_the_default_ones(lead):
    rope, x = RotaryEmbedding(8), torch.randn(*lead, 4, 6, 8)
    wanted = rope(x)
    torch.testing.assert_close(rope(x, torch.arange(6)), wanted)
    torch.testing.assert_close(rope(x, torch.arange(6).expand(*lead, 6)), wanted)
    if lead:  # one row of positions a text
        shifted = torch.stack([torch.arange(6), torch.arange(6) + 9]).view(2, *[1] * (len(lead) - 1), 6)
        got = rope(x, shifted.expand(*lead, 6))
        torch.testing.assert_close(got[0], wanted[0])
        torch.testing.assert_close(got[1], rope(x[1], torch.arange(6) + 9))


def test_a_text_longer_than_any_before_continues_the_same_angles():
    rope = RotaryEmbedding(8)
    x = torch.randn(1, 5000, 8)
    y = rope(x)
    torch.testing.assert_close(y[:, :10], rope(x[:, :10]))
    torch.testing.assert_close(y[:, 4990:], rope(x[:, 4990:], torch.arange(4990, 5000)))
    start = rotate(x[:, 3000:3002], rope.rotation(x[0, 3000:3002], start=3000))
    torch.testing.assert_close(start, y[:, 3000:3002])


@pytest.mark.parametrize("length", [1, 1024, 1025, 2048, 2049])
def test_default_positions_are_right_up_to_the_last_of_any_length(length):
    rope, x = RotaryEmbedding(4), torch.randn(1, length, 4)
    torch.testing.assert_close(rope(x), rope(x, torch.arange(length)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_is_rounded_once_and_after_the_rotation(dtype, step):
    rope, x, positions = RotaryEmbedding(8), torch.randn(3, 50, 8).to(dtype), torch.arange(900, 950)
    for turn in (rope, torch.compile(rope, backend="aot_eager")):
        y = turn(x, positions)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), rope(x.float(), positions), rtol=step, atol=1e-6)


def test_angles_stay_float32_in_a_bfloat16_model():
    """In bfloat16 positions 1,000 and 1,001 would be the same number."""
    rope = RotaryEmbedding(8).to(torch.bfloat16).bfloat16()
    assert rope.rotation(torch.randn(4, 8).bfloat16()).dtype == torch.float32
    x = torch.randn(1, 2, 8).bfloat16()
    positions = torch.tensor([1000, 1001])
    same = rope(x[:, :1].expand(1, 2, 8), positions)
    assert not torch.equal(same[:, 0], same[:, 1])


def test_float64_inputs_keep_their_gradients_exact():
    rope, x = RotaryEmbedding(6), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert rope(x).dtype == torch.float64
    assert torch.autograd.gradcheck(rope, x)


def test_linear_scaling_divides_positions():
    x = torch.randn(1, 9, 8)
    stretched, plain = RotaryEmbedding(8, scaling="linear", factor=4.0), RotaryEmbedding(8)
    torch.testing.assert_close(stretched(x, torch.arange(9) * 4), plain(x, torch.arange(9)))
    torch.testing.assert_close(stretched(x)[:, ::4], plain(x[:, ::4]))


def test_ntk_scaling_slows_the_last_plane_by_the_factor_and_leaves_the_first():
    D, factor = 8, 4.0
    x = torch.ones(1, 1, D)
    ntk, plain = RotaryEmbedding(D, scaling="ntk", factor=factor), RotaryEmbedding(D)
    position = torch.tensor([40])
    torch.testing.assert_close(ntk(x, position)[..., :2], plain(x, position)[..., :2])
    torch.testing.assert_close(ntk(x, position * 4)[..., -2:], plain(x, position)[..., -2:])
    pair = torch.ones(1, 1, 2)  # a single plane: nothing to slow, and no division by zero
    torch.testing.assert_close(
        RotaryEmbedding(2, scaling="ntk", factor=2.0)(pair, position), RotaryEmbedding(2)(pair, position)
    )


def test_a_factor_of_one_scales_nothing():
    x = torch.randn(1, 9, 8)
    for scaling in ("linear", "ntk"):
        assert torch.equal(RotaryEmbedding(8, scaling=scaling)(x), RotaryEmbedding(8)(x))


def test_any_memory_layout_gives_the_same():
    rope, x = RotaryEmbedding(8), torch.randn(2, 5, 3, 8)
    wanted = rope(x.transpose(1, 2).contiguous())
    torch.testing.assert_close(rope(x.transpose(1, 2)), wanted)
    backwards = x.transpose(1, 2).transpose(-2, -1).contiguous().transpose(-2, -1)
    torch.testing.assert_close(rope(backwards), wanted)
    odd = torch.cat((torch.zeros(2, 3, 5, 1), x.transpose(1, 2)), -1)[..., 1:]
    torch.testing.assert_close(rope(odd), wanted)


@pytest.mark.usefixtures("unchecked")
def test_compiled_and_eager_turn_alike():
    rope, x = RotaryEmbedding(8), torch.randn(2, 5, 8)
    compiled = torch.compile(rope, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), rope(x))
    torch.testing.assert_close(compiled(x, torch.arange(5) + 70), rope(x, torch.arange(5) + 70))


def test_nothing_of_it_is_saved():
    assert RotaryEmbedding(8).state_dict() == {}
    assert not list(RotaryEmbedding(8).parameters())


def test_angles_first_needed_in_inference_serve_training():
    rope = RotaryEmbedding(8, theta=12345.0)  # no other test has made these
    with torch.inference_mode():
        rope(torch.randn(1, 4, 8))
    x = torch.randn(1, 4, 8, requires_grad=True)
    rope(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RotaryEmbedding(7), "but 7 is odd"),
        (lambda: RotaryEmbedding(8, scaling="xarn"), "'xarn' is not known"),
        (lambda: RotaryEmbedding(8)(torch.randn(1, 4, 8), torch.arange(5)), r"positions \(5,\)"),
    ],
)
def test_bad_input_is_an_error(make, message):
    with pytest.raises((ValueError, AssertionError), match=message):
        make()

"""Masks: the corner they are aligned at, how they combine, and ALiBi's slopes."""

import pytest
import torch

from model.masks import (
    alibi_bias,
    alibi_slopes,
    as_bool,
    causal_mask,
    causal_with,
    check_broadcast,
    combine,
    padding_mask,
    sliding_window_mask,
)


def test_the_causal_mask_is_the_lower_triangle():
    assert torch.equal(causal_mask(4, 4), torch.ones(4, 4).tril().bool())


@pytest.mark.parametrize(("T", "S"), [(1, 5), (2, 5), (5, 5), (5, 2), (1, 1)])
def test_query_t_sees_the_keys_up_to_its_own_position_from_the_end(T, S):
    mask = causal_mask(T, S)
    for t in range(T):
        for s in range(S):
            assert mask[t, s].item() == (s <= S - T + t)


@pytest.mark.parametrize(("T", "S", "window"), [(5, 5, 2), (2, 6, 3), (1, 6, 1), (4, 4, 9), (5, 3, 2)])
def test_a_window_sees_that_many_positions_the_own_one_counted(T, S, window):
    mask = sliding_window_mask(T, S, window)
    for t in range(T):
        for s in range(S):
            assert mask[t, s].item() == (0 <= S - T + t - s < window)


def test_a_window_of_no_positions_is_an_error():
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        sliding_window_mask(3, 3, 0)


@pytest.mark.usefixtures("unchecked")
def test_padding_is_the_same_for_every_head_and_query():
    mask = padding_mask(torch.tensor([[1, 1], [1, 0], [1, 0]]))
    assert mask.shape == (3, 1, 1, 2)
    assert mask.expand(3, 8, 2, 2)[1, 5].tolist() == [[True, False], [True, False]]
    with pytest.raises(ValueError, match=r"\(B, S\).*\(3,\)"):
        padding_mask(torch.ones(3))


def test_combined_masks_allow_what_all_allow_and_nothing_means_everything():
    assert combine() is None
    assert combine(None, None) is None
    real = padding_mask(torch.tensor([[0, 1, 1]]))
    joined = combine(None, real, causal_mask(3, 3))
    assert joined.squeeze().int().tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_true_and_one_attend_false_and_zero_do_not(dtype):
    assert as_bool(torch.tensor([1, 0]).to(dtype)).tolist() == [True, False]


@pytest.mark.parametrize("value", [-torch.inf, 0.5, torch.nan])
def test_a_mask_of_other_numbers_is_refused(value):
    with pytest.raises(ValueError, match=r"mask \(3,\) has numbers other than 1"):
        as_bool(torch.tensor([1.0, 0.0, value]))


def test_a_causal_layer_without_more_to_hide_makes_no_mask():
    assert causal_with(None, 5, 5) == (None, True)
    assert causal_with(None, 2, 5, window=5) == (None, True)  # a window that reaches every key hides none


def test_a_causal_layer_puts_everything_it_hides_into_one_mask():
    real = padding_mask(torch.tensor([[0, 1, 1, 1]]))
    mask, is_causal = causal_with(real, 4, 4, window=2)
    assert not is_causal
    assert mask.squeeze().int().tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    mask, is_causal = causal_with(real, 1, 4)
    assert not is_causal
    assert torch.equal(mask, real)


@pytest.mark.parametrize("shape", [(), (5,), (1, 5), (3, 5), (4, 3, 5), (1, 1, 5), (2, 4, 3, 5), (2, 1, 1, 1)])
def test_what_broadcasts_passes(shape):
    check_broadcast("mask", torch.ones(shape), (2, 4, 3, 5))


@pytest.mark.parametrize("shape", [(4,), (5, 3), (2, 3, 5), (1, 2, 4, 3, 5), (2, 4, 3, 4), (3, 4, 3, 5)])
def test_what_does_not_broadcast_is_named(shape):
    with pytest.raises(ValueError, match=f"mask {shape}".replace("(", r"\(").replace(")", r"\)")):
        check_broadcast("mask", torch.ones(shape), (2, 4, 3, 5))


def test_alibi_slopes_of_eight_heads_halve_from_a_half():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]


def test_alibi_slopes_between_powers_of_two_take_every_other_slope_of_the_next():
    twelve = alibi_slopes(12)
    assert torch.equal(twelve[:8], alibi_slopes(8))
    torch.testing.assert_close(twelve[8:], alibi_slopes(16)[::2][:4])
    assert alibi_slopes(1).tolist() == [2.0**-8]


def test_alibi_is_minus_slope_times_distance_from_the_end():
    bias = alibi_bias(2, 2, 4)
    slope = 2.0**-4
    assert bias.shape == (2, 2, 4)
    torch.testing.assert_close(bias[0, 1], torch.tensor([-3.0, -2.0, -1.0, 0.0]) * slope)
    torch.testing.assert_close(bias[0, 0, :3], torch.tensor([-2.0, -1.0, 0.0]) * slope)

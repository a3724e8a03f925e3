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


@pytest.mark.parametrize(("T", "S"), [(1, 5), (2, 5), (4, 4), (5, 2), (1, 1)])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 9])
def test_query_t_sees_the_window_of_keys_that_ends_at_its_own_position_from_the_end(T, S, window):
    mask = causal_mask(T, S) if window is None else sliding_window_mask(T, S, window)
    wanted = [[0 <= S - T + t - s < (window or S + T) for s in range(S)] for t in range(T)]
    laid_over, is_causal = causal_with(None, T, S, window)
    assert mask.tolist() == wanted == (causal_mask(T, S) if is_causal else laid_over).tolist()


@pytest.mark.usefixtures("unchecked")
def test_padding_is_the_same_for_every_head_and_query():
    mask = padding_mask(torch.tensor([[1, 1], [1, 0], [1, 0]]))
    assert mask.shape == (3, 1, 1, 2)
    assert mask.expand(3, 8, 2, 2)[1, 5].tolist() == [[True, False], [True, False]]
    with pytest.raises(AssertionError, match=r"\(B, S\).*\(3,\)"):
        padding_mask(torch.ones(3))


def test_combined_masks_allow_what_all_allow_and_nothing_means_everything():
    assert combine() is None and combine(None, None) is None
    real = padding_mask(torch.tensor([[0, 1, 1]]))
    assert combine(None, real, causal_mask(3, 3)).squeeze().int().tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_true_and_one_attend_false_and_zero_do_not(dtype):
    assert as_bool(torch.tensor([1, 0]).to(dtype)).tolist() == [True, False]


@pytest.mark.parametrize("value", [-torch.inf, 0.5, torch.nan])
def test_a_mask_of_other_numbers_is_refused(value):
    with pytest.raises(ValueError, match=r"mask \(3,\) has numbers other than 1"):
        as_bool(torch.tensor([1.0, 0.0, value]))


def test_a_causal_layer_makes_one_mask_of_everything_it_hides_and_none_for_causality_alone():
    assert causal_with(None, 5, 5) == (None, True)
    assert causal_with(None, 2, 5, window=5) == (None, True)  # a window that reaches every key hides none
    real = padding_mask(torch.tensor([[0, 1, 1, 1]]))
    mask, is_causal = causal_with(real, 4, 4, window=2)
    assert not is_causal
    assert mask.squeeze().int().tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    mask, is_causal = causal_with(real, 1, 4)
    assert not is_causal and torch.equal(mask, real)


@pytest.mark.parametrize("shape", [(), (5,), (1, 5), (3, 5), (4, 3, 5), (1, 1, 5), (2, 4, 3, 5), (2, 1, 1, 1)])
def test_what_broadcasts_passes(shape):
    check_broadcast("mask", torch.ones(shape), (2, 4, 3, 5))


@pytest.mark.parametrize("shape", [(4,), (5, 3), (2, 3, 5), (1, 2, 4, 3, 5), (2, 4, 3, 4), (3, 4, 3, 5)])
def test_what_does_not_broadcast_is_named(shape):
    with pytest.raises(ValueError, match=f"mask {shape}".replace("(", r"\(").replace(")", r"\)")):
        check_broadcast("mask", torch.ones(shape), (2, 4, 3, 5))


def test_alibi_slopes_halve_from_a_half_and_between_powers_of_two_take_every_other_of_the_next():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]
    torch.testing.assert_close(alibi_slopes(12), torch.cat((alibi_slopes(8), alibi_slopes(16)[:8:2])), rtol=0, atol=0)


def test_alibi_is_minus_slope_times_distance_from_the_end():
    wanted = -torch.tensor([[2.0, 1, 0, 1], [3, 2, 1, 0]]) * torch.tensor([2.0**-4, 2.0**-8])[:, None, None]
    assert torch.equal(alibi_bias(2, 2, 4), wanted)

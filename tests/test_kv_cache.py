"""The KV cache: filled by the layers, moved by the caller."""

import re

import pytest
import torch

from model.kv_cache import KVCache


def filled(n, size=8, batch=2, n_layer=2):
    """A cache with n slots written in every layer, and what was written: (n_layer, B, Hkv, n, D)."""
    cache = KVCache(n_layer, batch, 3, size, 4)
    k, v = torch.randn(2, n_layer, batch, 3, n, 4).unbind()
    for layer in range(n_layer):
        cache.write(layer, k[layer], v[layer])
    cache.advance(n)
    return cache, k, v


def test_layers_read_back_what_all_passes_wrote():
    cache, k, v = filled(3)
    k2, v2 = torch.randn(2, 2, 3, 2, 4).unbind()
    got_k, got_v = cache.write(1, k2, v2)
    assert torch.equal(got_k, torch.cat((k[1], k2), -2))
    assert torch.equal(got_v, torch.cat((v[1], v2), -2))


def test_only_the_caller_moves_the_cache():
    cache, k, _ = filled(3)
    for layer in (0, 1, 0):  # every layer writes to the same slots, however often
        assert cache.write(layer, *torch.randn(2, 2, 3, 2, 4).unbind())[0].shape == (2, 3, 5, 4)
    assert cache.length == 3
    # A pass that was never advanced over leaves no trace.
    again, _ = cache.write(0, *torch.zeros(2, 2, 3, 1, 4).unbind())
    assert torch.equal(again[..., :3, :], k[0])
    assert again[..., 3:, :].abs().max() == 0


def test_it_allocates_once():
    cache, _, _ = filled(3)
    address = cache.keys.data_ptr()
    k, v = cache.write(0, *torch.randn(2, 2, 3, 5, 4).unbind())
    cache.advance(5)
    assert k.data_ptr() == cache.keys.data_ptr() == address
    assert v.data_ptr() == cache.values.data_ptr()  # what is read is not a copy


@pytest.mark.parametrize("first", [0, 2, 5])
def test_dropping_the_oldest_makes_room_and_goes_on_counting_positions_and_hides_what_was_out_of_sight(first):
    cache, k, v = filled(8)
    cache.first = first
    cache.drop_oldest(3)
    assert (cache.length, cache.start, cache.position) == (5, 3, 8)
    new = torch.randn(2, 3, 1, 4)
    got_k, got_v = cache.write(1, new, new)
    assert torch.equal(got_k, torch.cat((k[1, ..., max(3, first) :, :], new), -2))
    assert torch.equal(got_v, torch.cat((v[1, ..., max(3, first) :, :], new), -2))


def test_rows_can_be_taken_several_times_or_not_at_all():
    cache, k, _ = filled(4)
    taken = cache.take(torch.tensor([1, 1, 0]))
    assert (taken.length, taken.size, taken.keys.shape[1]) == (4, 8, 3)
    new = torch.randn(3, 3, 1, 4)
    assert torch.equal(taken.write(0, new, new)[0][..., :4, :], k[0][[1, 1, 0]])
    assert torch.equal(cache.keys[0, ..., 4:, :], torch.zeros(2, 3, 4, 4))  # a copy: the first cache is untouched


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("k", "v"),
    [
        (torch.zeros(2, 3, 5, 4), None),  # 3 slots are left
        (torch.zeros(2, 2, 1, 4), None),
        (torch.zeros(1, 3, 1, 4), None),
        (torch.zeros(3, 1, 4), None),
        (torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 2, 4)),
        (torch.zeros(2, 3, 1, 4).bfloat16(), None),
        (torch.zeros(2, 3, 1, 4, requires_grad=True), None),
    ],
)
def test_what_does_not_fit_is_a_value_error_that_names_the_shapes_and_changes_nothing(k, v):
    cache, _, _ = filled(5)
    before = cache.keys.clone()
    v = k if v is None else v
    shapes = f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit a cache of (2, 3, 8, 4) with 5 slots filled"
    with pytest.raises(ValueError, match=re.escape(shapes) + r".*torch\.float32, made under torch\.no_grad"):
        cache.write(0, k, v)
    assert torch.equal(cache.keys, before)


@pytest.mark.parametrize("act", [lambda cache: cache.advance(4), lambda cache: cache.drop_oldest(6)])
def test_neither_more_than_is_free_is_filled_nor_more_than_is_filled_dropped(act):
    with pytest.raises(AssertionError):
        act(filled(5)[0])

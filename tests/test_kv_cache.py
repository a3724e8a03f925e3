"""What layers keep of the tokens they have read: written by the layers, moved by the caller."""

import re

import pytest
import torch

from model.kv_cache import KVCache, LayerCache


def filled(n, size=8, sight=None, batch=2, n_layer=2):
    """A cache with n positions written in every layer, and what was written: (n_layer, B, Hkv, n, D)."""
    cache = KVCache([LayerCache(size, sight, {"kv": torch.zeros(batch, 6, size, 4)}, {}) for _ in range(n_layer)])
    k, v = torch.randn(2, n_layer, batch, 3, n, 4).unbind()
    for layer in range(n_layer):
        write(cache, layer, k[layer], v[layer])
    cache.advance(n)
    return cache, k, v


def write(cache, layer, k, v):
    cache.layers[layer].make_room(k.shape[-2])
    return cache.layers[layer].write("kv", k, v).chunk(2, 1)


def test_layers_read_back_what_all_passes_wrote():
    cache, k, v = filled(3)
    k2, v2 = torch.randn(2, 2, 3, 2, 4).unbind()
    got_k, got_v = write(cache, 1, k2, v2)
    assert torch.equal(got_k, torch.cat((k[1], k2), -2))
    assert torch.equal(got_v, torch.cat((v[1], v2), -2))


def test_only_the_caller_moves_the_cache():
    cache, k, _ = filled(3)
    for layer in (0, 1, 0):  # every layer writes to the same positions, however often
        assert write(cache, layer, *torch.randn(2, 2, 3, 2, 4).unbind())[0].shape == (2, 3, 5, 4)
    assert cache.position == cache.layers[0].filled == 3
    # A pass that was never advanced over leaves no trace.
    again, _ = write(cache, 0, *torch.zeros(2, 2, 3, 1, 4).unbind())
    assert torch.equal(again[..., :3, :], k[0])
    assert again[..., 3:, :].abs().max() == 0


def test_it_allocates_once():
    cache, _, _ = filled(3)
    address = cache.layers[0].rows["kv"].data_ptr()
    k, v = write(cache, 0, *torch.randn(2, 2, 3, 5, 4).unbind())
    cache.advance(5)
    assert k.data_ptr() == cache.layers[0].rows["kv"].data_ptr() == address
    assert v.data_ptr() == k[:, 2].data_ptr() + k[0, 0].nbytes  # what is read is not a copy


@pytest.mark.parametrize("sight", [3, 6, 7])
def test_what_is_out_of_sight_is_neither_returned_nor_kept_where_room_is_needed(sight):
    cache, _k, _v = filled(0, sight=sight)
    everything = torch.zeros(2, 3, 0, 4)
    for T in (5, 1, 1, 1, 4, 1, 20, 1, 1, 1, 2, 1):  # 20 are more than the slots
        new = torch.randn(2, 3, T, 4)
        everything = torch.cat((everything, new), -2)
        for layer in (0, 1):
            got_k, got_v = write(cache, layer, new, -new)
            assert torch.equal(got_k, everything[..., -min(everything.size(2), sight + T - 1) :, :])
            assert torch.equal(got_v, -got_k)
        cache.advance(T)
        start, slots = cache.layers[1].start, cache.layers[1].filled
        assert start + slots == cache.position == everything.size(2)
    assert cache.layers[0].rows["kv"].shape == (2, 6, 8, 4)  # the long chunk's slots are given back


def test_rows_can_be_taken_several_times_or_not_at_all():
    cache, k, _ = filled(4)
    cache.layers[0].state["sum"] = torch.tensor([1.0, 2.0])
    taken = cache.take(torch.tensor([1, 1, 0]))
    assert (taken.position, taken.layers[0].size, len(taken.layers[0].rows["kv"])) == (4, 8, 3)
    new = torch.randn(3, 3, 1, 4)
    assert torch.equal(write(taken, 0, new, new)[0][..., :4, :], k[0][[1, 1, 0]])
    assert taken.layers[0].state["sum"].tolist() == [2, 2, 1]
    untouched = cache.layers[0].rows["kv"][..., 4:, :]
    assert torch.equal(untouched, torch.zeros(2, 6, 4, 4))  # a copy: the first cache is as it was


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
    before = cache.layers[0].rows["kv"].clone()
    v = k if v is None else v
    shapes = f"{tuple(k.shape)} and {tuple(v.shape)} do not fit a cache of (2, 6, 8, 4) with 5 slots filled"
    with pytest.raises(ValueError, match=re.escape(shapes) + r".*torch\.float32, made under torch\.no_grad"):
        write(cache, 0, k, v)
    assert torch.equal(cache.layers[0].rows["kv"], before)


def test_no_more_than_is_free_is_filled():
    with pytest.raises(AssertionError):
        filled(5)[0].advance(4)

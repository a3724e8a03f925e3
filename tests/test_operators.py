"""The equivalent operators of the tutorials give the same numbers."""

import pytest
import torch
from einops import rearrange

from model.attention import attention_weights
from model.masks import causal_mask


def test_four_products_are_one():
    weights, v = torch.rand(2, 3, 5, 5), torch.randn(2, 3, 5, 4)
    product = torch.matmul(weights, v)
    assert torch.equal(product, weights @ v)
    torch.testing.assert_close(product, torch.einsum("bhij,bhjd->bhid", weights, v))
    torch.testing.assert_close(product, torch.bmm(weights.view(6, 5, 5), v.view(6, 5, 4)).view(2, 3, 5, 4))


def test_three_ways_to_swap_axes_are_one():
    x = torch.randn(2, 5, 3, 4)
    assert torch.equal(x.transpose(1, 2), x.permute(0, 2, 1, 3))
    assert torch.equal(x.transpose(1, 2), x.swapaxes(1, 2))


def test_four_ways_to_join_heads_are_one():
    y = torch.randn(2, 3, 5, 4).transpose(1, 2)  # (B, T, H, D), not contiguous
    joined = y.contiguous().view(2, 5, 12)
    assert torch.equal(joined, y.reshape(2, 5, 12))
    assert torch.equal(joined, y.flatten(2))
    assert torch.equal(joined, rearrange(y.transpose(1, 2), "b h t d -> b t (h d)"))
    with pytest.raises(RuntimeError):
        y.view(2, 5, 12)


def test_masking_before_the_softmax_equals_renormalising_after_it():
    mask = causal_mask(5, 5)
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    after = attention_weights(q, k) * mask
    torch.testing.assert_close(attention_weights(q, k, mask=mask), after / after.sum(-1, keepdim=True))

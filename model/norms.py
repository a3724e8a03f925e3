"""Normalisation in the input's type: FSDP may gather the weights in another, autocast leaves them in float32, and
torch's fused kernels want all alike."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """torch's, with its weight in x's type."""

    def forward(self, x: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """torch's, with weight and bias in x's type."""

    def forward(self, x: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)

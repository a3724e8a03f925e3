"""Rotary position embedding: queries and keys turned by an angle that grows with their position.

Channels (2i, 2i+1) of a head are the two coordinates of a point in a plane. At position m the point is
turned by m·θᵢ, with θᵢ = base^(-2i/D): the first planes spin fast and tell neighbours apart, the last
ones hardly move and tell far from near. A product of a query at m and a key at n then depends on m - n
alone, because turning both by the same angle changes no product (Su et al. 2021, RoFormer, eq. 34).
"""

from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Rotates (…, H, T, D) by position; it has no weights and leaves nothing in the state dict.

    `scaling` stretches a model to texts `factor` times longer than it was trained on:
    "linear" divides positions by the factor (Chen et al. 2023, eq. 4), "ntk" raises the base to
    base · factor^(D/(D-2)), which slows the last plane by the factor and leaves the first as it was
    (bloc97 2023; Peng et al. 2023, YaRN, eq. 16).

    Angles, sines and cosines are float32 in a model of any type: bfloat16 cannot count past 256.
    """

    def __init__(self, head_size: int, theta: float = 10_000.0, scaling: str = "none", factor: float = 1.0):
        super().__init__()
        assert head_size % 2 == 0, f"RoPE turns pairs of channels, but D={head_size} is odd"
        assert scaling in ("none", "linear", "ntk"), f"{scaling!r} is not known: choose none, linear or ntk"
        self.head_size = head_size
        if scaling == "ntk" and head_size > 2:  # a single plane has θ = 1 whatever the base
            theta = theta * factor ** (head_size / (head_size - 2))
        self.theta = theta
        self.stretch = factor if scaling == "linear" else 1.0

    def forward(
        self, x: Float[Tensor, "... H T D"], positions: Int[Tensor, "... T"] | None = None
    ) -> Float[Tensor, "... H T D"]:
        """Turn x by its positions, 0 … T-1 by default; ValueError when they do not fit x."""
        return rotate(x, self.rotation(x[..., 0, :, :], positions))

    def rotation(
        self, x: Float[Tensor, "... T C"], positions: Int[Tensor, "... T"] | None = None, start: int = 0
    ) -> Float[Tensor, "... T half 2"]:
        """Return (cos, sin) of every plane for x's `positions`, or for start … start+T-1: made once for q and k.

        Raises ValueError when the positions are neither (T,) nor (…, T).
        """
        lead = x.shape[:-1]  # (…, T)
        if positions is None:
            end = start + lead[-1]
            if not torch.compiler.is_compiling() and type(x) is Tensor:  # no trace, no fake tensor
                size = max(1024, 1 << (end - 1).bit_length())  # grows by doubling
                return _table(size, self.head_size, self.theta, self.stretch, x.device)[start:end]
            positions = torch.arange(start, end, device=x.device)
        if positions.shape != lead and positions.shape != lead[-1:]:
            raise ValueError(f"positions {tuple(positions.shape)} must be (T,) or (…, T) for x {tuple(x.shape)}.")
        rotation = _cos_sin(positions, self.head_size, self.theta, self.stretch)
        # The same for every head: (…, T, D/2, 2) -> (…, 1, T, D/2, 2)
        return rotation if positions.ndim == 1 else rotation.unsqueeze(-4)


def rotate(x: Float[Tensor, "... H T D"], rotation: Float[Tensor, "... T half 2"]) -> Float[Tensor, "... H T D"]:
    """Turn every pair of channels of x: (a, b) -> (a cos - b sin, a sin + b cos), in float32 or wider."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    pairs = wide.unflatten(-1, (-1, 2))  # (…, H, T, D) -> (…, H, T, D/2, 2)
    if torch.compiler.is_compiling():  # inductor fuses real arithmetic, but has no complex numbers
        (a, b), (cos, sin) = pairs.unbind(-1), rotation.unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
    else:  # a + ib times cos + i·sin: the same four products in one pass, 5 to 10 times faster in eager mode
        try:
            points = torch.view_as_complex(pairs)
        except RuntimeError:  # pairs that do not lie next to each other in memory
            points = torch.view_as_complex(pairs.contiguous())
        turned = torch.view_as_real(points * torch.view_as_complex(rotation))
    turned = turned.flatten(-2)  # (…, H, T, D/2, 2) -> (…, H, T, D)
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)


def _cos_sin(positions: Int[Tensor, "*lead"], D: int, theta: float, stretch: float) -> Float[Tensor, "*lead half 2"]:
    plane = torch.arange(0, D, 2, dtype=torch.float32, device=positions.device)  # 2i
    frequency = theta ** (-plane / D)
    angle = positions.to(torch.float32).unsqueeze(-1) / stretch * frequency
    return torch.stack((angle.cos(), angle.sin()), -1)


@lru_cache(maxsize=16)
def _table(size: int, D: int, theta: float, stretch: float, device: torch.device) -> Float[Tensor, "{size} half 2"]:
    # Not a buffer: all layers share it, a cast to bfloat16 or a move does not touch it, and a model built on the
    # meta device has nothing to fill in. A table first needed in inference mode must serve training afterwards.
    with torch.inference_mode(False):
        return _cos_sin(torch.arange(size, device=device), D, theta, stretch)

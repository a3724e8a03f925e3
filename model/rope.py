"""Rotary position embedding: queries and keys turned by an angle that grows with their position.

Channels (2i, 2i+1) of a head are the two coordinates of a point in a plane. At position m the point is
turned by m·θᵢ, with θᵢ = base^(-2i/D): the first planes spin fast and tell neighbours apart, the last
ones hardly move and tell far from near. A product of a query at m and a key at n then depends on m - n
alone, because turning both by the same angle changes no product (Su et al. 2021, RoFormer, eq. 34).
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from model.config import ROPE_SCALINGS

YARN_FAST, YARN_SLOW = 32.0, 1.0  # turns in the trained length, between which YaRN mixes (β and α)


class RotaryEmbedding(nn.Module):
    """Rotates the first `channels` of (…, H, T, D) by position; it has no weights, and nothing in the state dict.

    `scaling` stretches a model to texts `factor` times longer than it was trained on, to `length`:
    "linear" divides positions by the factor (Chen et al. 2023, eq. 4), "ntk" raises the base to
    base · factor^(D/(D-2)), which slows the last plane by the factor and leaves the first as it was
    (bloc97 2023; Peng et al. 2023, YaRN, eq. 16). "yarn" divides the frequency of planes that turn less than once in
    the trained length, leaves those that turn 32 times or more, and mixes between; and it lengthens queries and keys
    by 0.1 ln factor + 1, because a softmax over more keys is flatter (Peng et al. 2023, YaRN).

    Angles, sines and cosines are float32 in a model of any type: bfloat16 cannot count past 256.
    """

    def __init__(
        self, channels: int, theta: float = 10_000.0, scaling: str = "none", factor: float = 1.0, length: int = 128
    ):
        super().__init__()
        assert channels % 2 == 0, f"RoPE turns pairs of channels, but {channels} is odd"
        assert scaling in ROPE_SCALINGS, f"{scaling!r} is not known"
        if scaling == "ntk" and channels > 2:  # a single plane has θ = 1 whatever the base
            theta = theta * factor ** (channels / (channels - 2))
        yarn = length / factor if scaling == "yarn" else None
        self.planes = Planes(channels, theta, factor if scaling in ("linear", "yarn") else 1.0, yarn)

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
                return _table(size, self.planes, x.device)[start:end]
            positions = torch.arange(start, end, device=x.device)
        if positions.shape != lead and positions.shape != lead[-1:]:
            raise ValueError(f"positions {tuple(positions.shape)} must be (T,) or (…, T) for x {tuple(x.shape)}.")
        rotation = self.planes.cos_sin(positions)
        # The same for every head: (…, T, D/2, 2) -> (…, 1, T, D/2, 2)
        return rotation if positions.ndim == 1 else rotation.unsqueeze(-4)


class Planes(NamedTuple):
    """What the angles of a rotation follow from."""

    channels: int
    theta: float
    stretch: float
    yarn_length: float | None

    def cos_sin(self, positions: Int[Tensor, "*lead"]) -> Float[Tensor, "*lead half 2"]:
        """Return (cos, sin) of every plane's angle at each position; with YaRN both are longer than 1."""
        plane = torch.arange(0, self.channels, 2, dtype=torch.float32, device=positions.device)  # 2i
        frequency, temperature = self.theta ** (-plane / self.channels), 1.0
        stretched = frequency / self.stretch
        if self.yarn_length is not None:
            low, high = (self._plane_that_turns(times) for times in (YARN_FAST, YARN_SLOW))
            low, high = max(math.floor(low), 0), min(math.ceil(high), self.channels - 1)
            slow = ((plane / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
            stretched = slow * stretched + (1 - slow) * frequency
            temperature = 0.1 * math.log(self.stretch) + 1
        angle = positions.to(torch.float32).unsqueeze(-1) * stretched
        return torch.stack((angle.cos(), angle.sin()), -1) * temperature

    def _plane_that_turns(self, times: float) -> float:
        """Return the number, not rounded, of the plane that turns so often in yarn_length."""
        assert self.yarn_length is not None
        return self.channels * math.log(self.yarn_length / (times * 2 * math.pi)) / (2 * math.log(self.theta))


def rotate(x: Float[Tensor, "... H T D"], rotation: Float[Tensor, "... T half 2"]) -> Float[Tensor, "... H T D"]:
    """Turn pairs of channels of x, the first ones: (a, b) -> (a cos - b sin, a sin + b cos), in float32 or wider."""
    if (channels := 2 * rotation.shape[-2]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :channels], rotation), x[..., channels:]), -1)
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


@lru_cache(maxsize=16)
def _table(size: int, planes: Planes, device: torch.device) -> Float[Tensor, "{size} half 2"]:
    # Not a buffer: all layers share it, a cast to bfloat16 or a move does not touch it, and a model built on the
    # meta device has nothing to fill in. A table first needed in inference mode must serve training afterwards.
    with torch.inference_mode(False):
        return planes.cos_sin(torch.arange(size, device=device))

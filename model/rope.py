"""Rotary position embedding: queries and keys rotate by an angle set by their position.

Channels (2i, 2i+1) of a head are the two coordinates of a point in a plane. At position m the point is
rotated by m·θᵢ, with θᵢ = base^(-2i/D): the first planes spin fast and tell neighbours apart, the last
ones hardly move and tell far from near. Rotating two vectors by the same angle does not change their
product: the product of a query at m and a key at n depends on m - n alone (Su et al. 2021, RoFormer,
eq. 34).
"""

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus

from common.errors import SettingsError
from model.config import AttentionConfig
from model.layers import upcast

YARN_TURNS = 32.0, 1.0  # in the trained length: YaRN interpolates between these (β and α)
LLAMA3_TURNS = 4.0, 1.0  # as Llama 3 does between these
Pairs = Float[Tensor, "*lead H T half 2"]


class Rope(NamedTuple):
    """The rotation of a head's first `channels`.

    It has no weights; layers with equal settings share their tables.

    Skip the rest at first: three ways to read texts `stretch` times longer than `trained`, all by turning more slowly:

    linear  divides the positions (Chen et al. 2023, eq. 4)
    yarn    divides the frequency of planes that turn less than once in the trained length, leaves planes of 32 turns or
            more, and mixes between. It lengthens queries and keys by 0.1 ln stretch + 1, because a softmax over more
            keys is flatter (Peng et al. 2023, eqs. 19 to 25). As in the paper, bounds are rounded outwards; gpt-oss
            does not.
    llama3  mixes between 1 and 4 turns, and lengthens nothing (Llama 3.1, 2024)

    Angles, sines and cosines are float32 at least, in a model of any type: bfloat16 cannot count past 256.
    """

    channels: int
    theta: float = 10_000.0
    scaling: str = "linear"
    stretch: float = 1.0
    trained: float = 0.0
    whole: int = 0
    """The D of the frequencies θ^(-2i/D): a head's channels for rope_proportional; 0 stands for `channels`."""

    @classmethod
    def of(cls, config: AttentionConfig, head_dim: int) -> "Rope":
        """Return the Rope of some settings, for `head_dim` channels of a head.

        Raises SettingsError if they would rotate half a pair of channels.
        """
        wanted = config.rope_fraction * head_dim
        channels = round(wanted)
        # As floats multiply, 0.58 of 100 channels is not quite 58.
        if channels < 2 or channels % 2 or abs(wanted - channels) > 1e-4:
            raise half_a_pair(config, head_dim, wanted)
        factor = 1.0 if config.rope_scaling == "none" else config.rope_scaling_factor
        trained = config.rope_trained_length or config.block_size / factor
        whole = head_dim if config.rope_proportional else 0
        return shared(cls(channels, config.rope_theta, config.rope_scaling, factor, trained, whole))

    def table(self, x: Float[Tensor, "... T C"], past: int = 0) -> Float[Tensor, "T half 2"]:
        """Return (cos, sin) of every plane at the positions past … past+T-1 of x."""
        end = past + x.shape[-2]
        # A compiled or traced length is no number. A fake tensor has a shape and no numbers: its table must not be
        # cached.
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or type(x) is not Tensor:
            return self.cos_sin(torch.arange(past, end, device=x.device), angles_of(x))
        # Tables grow by doubling: decoding does not make one for each length.
        size = max(1024, 1 << (end - 1).bit_length())
        return _table(size, self, x.device, angles_of(x))[past:end]

    def cos_sin(
        self,
        positions: Int[Tensor, "*lead"],
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "*lead half 2"]:
        """Return (cos, sin) of every plane's angle at each position.

        YaRN scales both beyond length 1.
        """
        frequency, temperature = self.frequencies(positions.device, dtype)
        angle = positions.to(dtype).unsqueeze(-1) * frequency
        return torch.stack((angle.cos(), angle.sin()), -1) * temperature

    def frequencies(
        self,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Float[Tensor, " half"], float]:
        """Return every plane's angle at position 1, and the length of its (cos, sin)."""
        plane = torch.arange(0, self.channels, 2, dtype=dtype, device=device)  # 2i
        whole = self.whole or self.channels
        frequency = self.theta ** (-plane / whole)
        # Mix each frequency with the slowed one; `slow` is the share of the latter.
        temperature = 1.0
        slow: Tensor | float = 1.0
        if self.scaling == "llama3":
            fast, once = LLAMA3_TURNS
            turns = self.trained * frequency / (2 * math.pi)
            slow = ((fast - turns) / (fast - once)).clamp(0, 1)
        if self.scaling == "yarn":
            # Find the planes with so many turns in the trained length: solve trained θ^(-2i/D) / 2π = turns for i. The
            # rounded indices bound the mixture.
            scale = whole / (2 * math.log(self.theta))
            first, last = (scale * math.log(self.trained / (turns * 2 * math.pi)) for turns in YARN_TURNS)
            low = max(math.floor(first), 0)
            high = min(math.ceil(last), self.channels - 1)  # as the authors' code has it; no plane is so high
            slow = ((plane / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
            temperature = 0.1 * math.log(self.stretch) + 1
        return slow * frequency / self.stretch + (1 - slow) * frequency, temperature


class Pope(nn.Module):
    """PoPE: the length of a channel is content, its angle position (Gopalakrishnan et al. 2025).

        score_ts = Σ_c softplus(q_tc) softplus(k_sc) cos((t - s) θ_c + δ_c),  θ_c = theta^(-c/D)

    RoPE turns pairs of channels, whose direction is content too: a query cannot ask for a position without regard to
    what is there. Here each of D channels is a point of a plane, so that queries and keys become 2 D wide. δ, the
    parameter `phase`, is learned, from -2π to 0.
    """

    def __init__(self, kv_heads: int, channels: int, theta: float) -> None:
        super().__init__()
        self.channels = channels
        self.theta = theta
        self.phase = nn.Parameter(torch.zeros(kv_heads, 1, channels))

    def forward(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B Hkv T D"],
        first: int = 0,
    ) -> tuple[Float[Tensor, "B H T both"], Float[Tensor, "B Hkv T both"]]:
        """Return queries and keys at the positions first … first+T-1."""
        return self.of_lengths(q, first), self.of_lengths(k, first, self.phase.clamp(-2 * math.pi, 0.0))

    def of_lengths(
        self,
        x: Float[Tensor, "*lead T D"],
        first: int = 0,
        phase: Float[Tensor, "n 1 D"] | float = 0.0,
    ) -> Float[Tensor, "*lead T both"]:
        """Return the points whose lengths are softplus(x)."""
        return self.place(softplus(upcast(x)), first, phase).to(x.dtype)

    def place(
        self,
        length: Float[Tensor, "*lead T D"],
        first: int = 0,
        phase: Float[Tensor, "n 1 D"] | float = 0.0,
    ) -> Float[Tensor, "*lead T both"]:
        """Return points at the positions first … first+T-1, the cosines of all before the sines."""
        dtype = angles_of(length)
        position = torch.arange(first, first + length.shape[-2], dtype=dtype, device=length.device)
        angle = position[:, None] * self.frequencies(length.device, dtype) - phase  # (T, D), or (n, T, D)
        return torch.cat((length * angle.cos(), length * angle.sin()), -1)

    def frequencies(
        self,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, " D"]:
        """Return every channel's angle at position 1."""
        channel = torch.arange(self.channels, dtype=dtype, device=device)
        return self.theta ** (-channel / self.channels)


def angles_of(x: Tensor) -> torch.dtype:
    """Return the type of the angles that turn x: float32, or for float64 its own."""
    return torch.promote_types(x.dtype, torch.float32)


@cache
def shared(rope: Rope) -> Rope:
    """Return the first Rope that equals this one.

    torch.compile would compile a block again for a second object.
    """
    return rope


def rotate(x: Float[Tensor, "... H T D"], rotation: Float[Tensor, "... T half 2"]) -> Float[Tensor, "... H T D"]:
    """Rotate the first pairs of channels: (a, b) -> (a cos - b sin, a sin + b cos).

    The products are in float32 or wider.
    """
    # The channels after them stay as they are.
    channels = 2 * rotation.shape[-2]
    if channels < x.shape[-1]:
        return torch.cat((rotate(x[..., :channels], rotation), x[..., channels:]), -1)
    wide = x.float() if x.dtype.itemsize < 4 else x
    pairs = wide.unflatten(-1, (-1, 2))  # (…, H, T, D) -> (…, H, T, D/2, 2)
    turned = turn_compiled(pairs, rotation) if torch.compiler.is_compiling() else turn(pairs, rotation)
    turned = turned.flatten(-2)  # (…, H, T, D/2, 2) -> (…, H, T, D)
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)


def check_rotation(rotation: Float[Tensor, "*lead half 2"], x: Float[Tensor, "B H T D"]) -> None:
    """Raise ValueError unless the rotations are of positions (T,) or (B, 1, T).

    Others would be broadcast: (B, T) is (H, T) where there are as many texts as heads.
    """
    B, H, T, _ = x.shape
    *lead, tokens = rotation.shape[:-2]
    if tokens != T or lead not in ([], [1, 1], [1, H], [B, 1], [B, H]):
        problem = f"rotations of positions {(*lead, tokens)} do not fit {B} x {T} tokens"
        raise ValueError(f"{problem}: make them of positions ({T},), or of ({B}, 1, {T}), anew for each pass.")


def turn(pairs: Pairs, rotation: Float[Tensor, "... T half 2"]) -> Pairs:
    """Multiply a + ib by cos + i·sin, which has the four products of rotate().

    It takes one pass, and is 5 to 8 times faster in eager mode.
    """
    # A view as complex numbers needs pairs that are adjacent, at even addresses.
    starts = (pairs.storage_offset(), *pairs.stride()[:-1])
    is_viewable = pairs.stride(-1) == 1 and all(start % 2 == 0 for start in starts)
    if not is_viewable:  # contiguous() would keep an odd address
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation))


def turn_compiled(pairs: Pairs, rotation: Float[Tensor, "... T half 2"]) -> Pairs:
    """Compute the products of rotate() one by one.

    torch's compiler fuses them, but has no complex numbers.
    """
    if pairs.is_cuda:
        # The heads of a token come to lie side by side in memory, as they do in the projections. FlashAttention returns
        # its result in the order of the queries, so that merge() of the layer need not copy.
        pairs = pairs.transpose(-4, -3)  # (…, H, T, D/2, 2) -> (…, T, H, D/2, 2)
        rotation = rotation.unsqueeze(-3) if rotation.ndim == 3 else rotation.transpose(-4, -3)
    a, b = pairs.unbind(-1)
    cos, sin = rotation.unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
    return turned.transpose(-4, -3) if pairs.is_cuda else turned


@lru_cache(maxsize=16)
def _table(size: int, rope: Rope, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "{size} half 2"]:
    # Not a buffer: all layers share it, no cast to bfloat16 or move touches it, and a model built on the meta device
    # has nothing to fill in. A cached table must serve training, even if inference mode made it.
    with torch.inference_mode(False):
        return rope.cos_sin(torch.arange(size, device=device), dtype)


def half_a_pair(config: AttentionConfig, head_dim: int, wanted: float) -> SettingsError:
    """Return the error for settings that rotate `wanted` of head_dim channels, no even number."""
    # Name the settings that were given, with a value that makes pairs. The form gta rotates half of a head.
    D = config.head_channels
    parts = 1 if head_dim == D else 2  # of an odd D the half is rounded down
    even = 2 * parts * -(-D // (2 * parts))
    given = f"model.n_embd={config.n_embd} / model.n_head={config.n_head}"
    remedy = f"set model.head_size={even}"
    if config.head_size is not None:
        given = f"model.head_size={D}"
    elif config.n_head == 1:  # also of a form with one head, which has no head_size
        given = f"model.n_embd={D}"
        remedy = f"set model.n_embd={even}"

    # Name what takes a share of them.
    if parts > 1:
        given = f"half of {given}, which attention={config.attention} rotates,"
    if config.rope_fraction < 1:
        given = f"model.rope_fraction={config.rope_fraction} of {given}"
        remedy = f"set model.rope_fraction={max(2, 2 * round(wanted / 2)) / head_dim:.6g}"
    problem = f"model.position=rope rotates pairs of channels, but {given} makes {wanted:g} channels"
    return SettingsError(problem, f"{remedy}, or another model.position")

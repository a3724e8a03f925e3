"""What a model is made of: every setting of the attention and of the GPT around it, checked when made."""

from __future__ import annotations

import math
from dataclasses import dataclass

# The forms of attention that `attention=NAME` selects. Their names are here, and not beside the code in
# model/attention, so that settings are checked without waiting for torch.
ATTENTION_FUNCTIONS = ("sdpa", "matmul", "einsum", "bmm", "loop", "flex")  # functional.py: one function, in six ways
ATTENTION_VARIANTS = ("softmax1",)  # variants.py: other functions in its place
ATTENTION_RUNGS = ("average", "simple", "single_head", "stacked")  # ladder.py: what leads to it
ONE_HEAD = ("average", "simple", "single_head")  # the rungs with one, of width n_embd, whatever is set for heads
ATTENTION_FORMS = ATTENTION_FUNCTIONS + ATTENTION_VARIANTS + ATTENTION_RUNGS

POSITIONS = ("rope", "learned", "alibi", "none")
ROPE_SCALINGS = ("none", "linear", "ntk")
NORMS = ("rmsnorm", "layernorm")
MLPS = ("swiglu", "relu2", "gelu", "gelu_tanh")


@dataclass(kw_only=True)
class AttentionConfig:
    """The settings of one attention layer.

    Raises ValueError, naming the setting, its value and a remedy, when they do not fit together.
    """

    attention: str = "sdpa"
    """Which form computes the attention: one of ATTENTION_FORMS."""
    n_embd: int = 128
    """Width C of the residual stream."""
    n_head: int = 4
    """Number of query heads H; average, simple and single_head have one of width n_embd whatever this says."""
    head_size: int | None = None
    """Channels D of each head: n_embd / n_head when null. Anything else sets the attention's width H·D apart
    from that of the residual stream, as in Qwen3."""
    n_kv_head: int | None = None
    """Number of key/value heads Hkv: n_head when null, 1 is multi-query attention (Shazeer 2019),
    a divisor of n_head is grouped-query attention (Ainslie et al. 2023)."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight, in training only."""
    attention_window: int | None = None
    """Sliding window: a query sees itself and the attention_window - 1 positions before it."""
    position: str = "rope"
    """How the model learns order: rope rotates queries and keys (Su et al. 2021), alibi adds a
    distance penalty to the scores (Press et al. 2022), learned adds a position embedding to the
    tokens (in the GPT, not here), none leaves it to the causal mask."""
    rope_theta: float = 10_000.0
    """Base of RoPE's geometric series of frequencies."""
    rope_scaling: str = "none"
    """Stretches RoPE to longer texts: linear divides the positions, ntk raises the base."""
    rope_scaling_factor: float = 1.0
    """How many times longer than the trained text the stretched positions reach."""
    qk_norm: bool = True
    """RMS-normalise queries and keys in each head, with learned weights, before RoPE."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    bias: bool = False
    """Biases on every other linear layer and in layernorm."""

    def __post_init__(self) -> None:
        _positive(self, "n_embd", "n_head")
        _one_of(self, "attention", ATTENTION_FORMS)
        _one_of(self, "position", POSITIONS)
        _one_of(self, "rope_scaling", ROPE_SCALINGS)
        _probability(self, "attention_dropout")
        if self.attention == "flex" and self.attention_dropout > 0:
            raise ValueError(
                f"attention=flex has no dropout, but attention_dropout={self.attention_dropout}: "
                "set attention_dropout=0, or choose attention=sdpa."
            )
        if self.head_size is not None and self.head_size < 1:
            raise ValueError(f"head_size={self.head_size} must be at least 1, or null for n_embd / n_head.")
        if self.head_size is None and self.n_embd % self.n_head:
            raise ValueError(
                f"n_head={self.n_head} does not divide n_embd={self.n_embd}: "
                f"choose n_head from {_divisors(self.n_embd)}, or another n_embd."
            )
        if self.n_kv_head is not None and (self.n_kv_head < 1 or self.n_head % self.n_kv_head):
            raise ValueError(
                f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}: "
                f"choose n_kv_head from {_divisors(self.n_head)}, or null for one per query head."
            )
        channels, given = self.head_channels, f"n_embd={self.n_embd} over n_head={self.n_head}"
        if self.attention in ONE_HEAD:
            channels, given = self.n_embd, f"n_embd={self.n_embd} for the one head of attention={self.attention}"
        elif self.head_size is not None:
            given = f"head_size={self.head_size}"
        if self.position == "rope" and self.attention != "average" and channels % 2:
            raise ValueError(
                f"position=rope rotates pairs of channels, but {given} gives an odd head size of "
                f"{channels}: choose an even one, or another position."
            )
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta={self.rope_theta} must be a positive number; 10000 is the usual base.")
        if not 1 <= self.rope_scaling_factor < math.inf:
            raise ValueError(
                f"rope_scaling_factor={self.rope_scaling_factor} must be a number from 1 on: it is how many times "
                "longer the text may grow."
            )
        if self.attention_window is not None and self.attention_window < 1:
            raise ValueError(
                f"attention_window={self.attention_window} must be at least 1 (a position sees itself), "
                "or null for no window."
            )

    @property
    def head_channels(self) -> int:
        """Channels D of one head, with the default of head_size resolved."""
        return self.head_size or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads Hkv, with the default resolved."""
        return self.n_kv_head or self.n_head


@dataclass(kw_only=True)
class GPTConfig(AttentionConfig):
    """The settings of a GPT: those of its attention layers, and the rest of the network.

    A block hands this same object to its attention, so a setting is written once.
    """

    n_layer: int = 4
    """Number of blocks."""
    block_size: int = 256
    """Longest training window, in tokens."""
    vocab_size: int | None = None
    """Number of token ids V; the tokenizer's when null."""
    norm: str = "rmsnorm"
    """Normalisation before attention, MLP and lm_head: one of NORMS."""
    norm_eps: float = 1e-6
    """Added to the mean square (or variance) before the root."""
    mlp: str = "swiglu"
    """The feed-forward network: swiglu (Shazeer 2020), relu2 (So et al. 2021), gelu (Hendrycks & Gimpel 2016),
    or gelu_tanh, the approximation of it that GPT-2 was trained with; on a CPU that takes six times as long."""
    n_inner: int | None = None
    """Hidden width of the MLP; when null 4 × n_embd, or for swiglu the multiple of 64 next above
    8/3 × n_embd, which has as many weights."""
    dropout: float = 0.0
    """Probability of dropping an embedding, or a channel of what a layer adds to the residual stream."""
    tie_embeddings: bool = False
    """Use the token embedding as the language-model head, lm_head."""
    logit_softcap: float | None = None
    """Squash logits smoothly into ± this value: cap × tanh(logits / cap)."""
    zero_init: bool = True
    """Start the output projections and an untied lm_head at zero, so that every block begins as the
    identity; otherwise GPT-2's initialisation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "n_layer", "block_size")
        _one_of(self, "norm", NORMS)
        _one_of(self, "mlp", MLPS)
        _probability(self, "dropout")
        for name in ("vocab_size", "n_inner", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be a positive number, or null for the default.")
        if not 0 < self.norm_eps < math.inf:
            raise ValueError(f"norm_eps={self.norm_eps} must be a positive number, e.g. 1e-6.")

    @property
    def inner(self) -> int:
        """Hidden width of the MLP, with the default resolved."""
        if self.n_inner is not None:
            return self.n_inner
        return 64 * -(-8 * self.n_embd // 192) if self.mlp == "swiglu" else 4 * self.n_embd


def _positive(config: AttentionConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")


def _one_of(config: AttentionConfig, name: str, known: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in known:
        raise ValueError(f"{name}={value} is not known: choose one of {', '.join(known)}.")


def _probability(config: AttentionConfig, name: str) -> None:
    value = getattr(config, name)
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} is not a probability below 1: choose from 0 (off) to, say, 0.2.")


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)

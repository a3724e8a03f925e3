"""The settings of a model: its attention and the GPT around it, checked when made."""

from dataclasses import dataclass, replace

from errors import SettingsError, at_least, fraction, one_of, positive

POSITIONS = ("rope", "learned", "alibi", "none")
ROPE_SCALINGS = ("none", "linear", "ntk", "yarn")
NORMS = ("rmsnorm", "layernorm")
MLPS = ("swiglu", "relu2", "gelu", "gelu_tanh")


@dataclass(kw_only=True)
class AttentionConfig:
    """The settings of one attention layer; SettingsError when they do not fit together."""

    attention: str = "sdpa"
    """Form of attention, for which attention=NAME is short, with modifiers after +: sdpa+gate+sink. In a GPT also a
    pattern of these over the layers, repeated: delta/delta/delta/sdpa. sdpa is the fast form of what a GPT uses;
    docs/attention.md has all, and python -m model.attention.check lists them."""
    n_embd: int = 128
    """Width C of the residual stream."""
    n_head: int = 4
    """Number of query heads H. The forms average, simple and single_head have one of width n_embd."""
    head_size: int | None = None
    """Channels D of each head; n_embd / n_head when null. Anything else makes the attention's width H·D differ
    from that of the residual stream, as in Qwen3."""
    n_kv_head: int | None = None
    """Number of key/value heads Hkv; n_head when null. 1 is multi-query attention (Shazeer 2019), another
    divisor of n_head grouped-query attention (Ainslie et al. 2023)."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight in training."""
    attention_window: int | None = None
    """Sliding window: a query sees itself and the attention_window - 1 positions before it; all when null. Where a
    pattern says window, as sdpa+window/sdpa, only those layers have it."""
    score_softcap: float = 50.0
    """For attention=softcap: squash scores into ± this value, as cap × tanh(score / cap)."""
    latent_size: int | None = None
    """For attention=mla: width of the vector from which all heads' keys and values are made; 4 × head size when
    null, as in DeepSeek-V2."""
    block_size: int = 128
    """Longest training window, in tokens."""
    position: str = "rope"
    """How the model learns order: rope, learned, alibi or none. RoPE rotates queries and keys (Su et al. 2021),
    alibi adds a distance penalty to the scores (Press et al. 2022), learned adds a position embedding to the
    tokens (in the GPT, not here), none leaves order to the causal mask."""
    rope_theta: float = 10_000.0
    """Base of RoPE's geometric series of frequencies."""
    rope_fraction: float = 1.0
    """Share of a head's channels that RoPE rotates, the first ones; the others tell no order (GPT-NeoX)."""
    rope_scaling: str = "none"
    """How RoPE is stretched to longer texts: none, linear (divides the positions), ntk (raises the base) or yarn
    (divides those of slow planes, and sharpens the scores)."""
    rope_scaling_factor: float = 1.0
    """How many times the trained length the stretched positions reach. yarn takes that length to be block_size
    divided by it."""
    qk_norm: bool = True
    """RMS-normalise queries and keys per head, with learned weights, before RoPE."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    bias: bool = False
    """Biases on every other linear layer and in layernorm."""

    def __post_init__(self) -> None:
        one_of("model.position", self.position, POSITIONS)
        one_of("model.rope_scaling", self.rope_scaling, ROPE_SCALINGS)
        for name in ("n_embd", "n_head", "head_size", "n_kv_head", "attention_window", "latent_size", "block_size"):
            at_least(f"model.{name}", getattr(self, name), 1)
        fraction("model.attention_dropout", self.attention_dropout, below=1)
        fraction("model.rope_fraction", self.rope_fraction, above=0)
        positive("model.rope_theta", self.rope_theta)
        positive("model.score_softcap", self.score_softcap)
        at_least("model.rope_scaling_factor", self.rope_scaling_factor, 1.0)
        if "flex" in self.forms and self.attention_dropout > 0:
            problem = f"attention=flex has no dropout, but model.attention_dropout={self.attention_dropout}"
            raise SettingsError(f"{problem}: set model.attention_dropout=0, or choose attention=sdpa.")
        if self.head_size is None:
            _must_divide("n_head", self.n_head, "n_embd", self.n_embd, "another model.n_embd")
        _must_divide("n_kv_head", self.kv_heads, "n_head", self.n_head, "null for one per query head")

    @property
    def forms(self) -> list[str]:
        """The forms of the pattern, without modifiers."""
        return [layer.split("+")[0] for layer in self.attention.split("/")]

    @property
    def form(self) -> str:
        """The form of one layer's attention."""
        return self.forms[0]

    @property
    def modifiers(self) -> list[str]:
        """The modifiers of one layer's attention."""
        return self.attention.split("+")[1:]

    def rotated(self, head_size: int) -> int:
        """Return how many channels of a head RoPE rotates; SettingsError when they are not pairs."""
        channels = self.rope_fraction * head_size
        if channels != int(channels) or channels % 2:
            given, what = f"a head size of {head_size}", "odd"
            if self.rope_fraction < 1:
                given, what = f"model.rope_fraction={self.rope_fraction} of {given}", f"{channels:g}"
            problem = f"model.position=rope rotates pairs of channels, but {given} is {what}"
            raise SettingsError(f"{problem}: choose an even one, or another model.position.")
        return int(channels)

    @property
    def head_channels(self) -> int:
        """Channels D of one head, with the default resolved."""
        return self.head_size or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads Hkv, with the default resolved."""
        return self.n_kv_head or self.n_head


@dataclass(kw_only=True)
class GPTConfig(AttentionConfig):
    """The settings of a GPT: those of its attention layers, which read this same object, and of everything else."""

    n_layer: int = 4
    """Number of blocks."""
    vocab_size: int | None = None
    """Number of token ids V; the tokenizer's when null."""
    norm: str = "rmsnorm"
    """Normalisation before attention, MLP and lm_head: rmsnorm or layernorm."""
    norm_eps: float = 1e-6
    """Added to the mean square (or variance) before the square root."""
    mlp: str = "swiglu"
    """The feed-forward network: swiglu (Shazeer 2020), relu2 (So et al. 2021), gelu (Hendrycks & Gimpel 2016) or
    gelu_tanh, the approximation GPT-2 was trained with (on a CPU it takes six times as long)."""
    n_inner: int | None = None
    """Hidden width of the MLP; when null 4 × n_embd, or for swiglu 8/3 × n_embd rounded up to a multiple of 64,
    which has as many weights."""
    dropout: float = 0.0
    """Probability of dropping an embedding, or a channel that a layer adds to the residual stream, in training."""
    tie_embeddings: bool = False
    """Use the token embedding as lm_head too."""
    logit_softcap: float | None = None
    """Squash logits into ± this value, as cap × tanh(logits / cap)."""
    zero_init: bool = True
    """Start the output projections and an untied lm_head at zero, so that every block begins as the identity;
    false is GPT-2's initialisation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model.norm", self.norm, NORMS)
        one_of("model.mlp", self.mlp, MLPS)
        for name in ("n_layer", "vocab_size", "n_inner"):
            at_least(f"model.{name}", getattr(self, name), 1)
        fraction("model.dropout", self.dropout, below=1)
        positive("model.logit_softcap", self.logit_softcap, "or null for none")
        positive("model.norm_eps", self.norm_eps)

    def at(self, layer: int) -> AttentionConfig:
        """Return the settings of one layer's attention: its part of the pattern."""
        parts = self.attention.split("/")
        own = parts[layer % len(parts)]
        names = self.attention.replace("/", "+").split("+")
        window = None if "window" in names and "window" not in own.split("+") else self.attention_window
        return replace(self, attention=own, attention_window=window)

    @property
    def inner(self) -> int:
        """Hidden width of the MLP, with the default resolved."""
        if self.n_inner is not None:
            return self.n_inner
        return 64 * -(-8 * self.n_embd // 192) if self.mlp == "swiglu" else 4 * self.n_embd


def _must_divide(part: str, count: int, whole: str, size: int, other: str) -> None:
    if size % count:
        choices = ", ".join(str(n) for n in range(1, min(size, 1024) + 1) if size % n == 0)
        problem = f"model.{part}={count} does not divide model.{whole}={size}"
        raise SettingsError(f"{problem}: choose model.{part} from {choices}, or {other}.")

"""The settings of a model: its attention and the GPT around it, checked when made."""

from dataclasses import dataclass, replace

from common.errors import SettingsError, at_least, check_types, format_value, fraction, one_of, positive

POSITIONS = ("rope", "pope", "learned", "alibi", "none")
TURNING = ("rope", "pope")
"""Positions that turn queries and keys, which nope leaves out."""
ROPE_SCALINGS = ("none", "linear", "yarn", "llama3")
NORMS = ("rmsnorm", "layernorm")
MLPS = ("swiglu", "relu2", "gelu", "gelu_tanh")
# Settings without meaning for a form that knows no order.
POSITION_SETTINGS = (
    "position",
    "rope_theta",
    "rope_fraction",
    "rope_proportional",
    "rope_scaling",
    "rope_scaling_factor",
    "rope_trained_length",
)


@dataclass(kw_only=True)
class AttentionConfig:
    """The settings of one attention layer; SettingsError when they do not fit together."""

    attention: str = "sdpa"
    """Form of attention, with modifiers after +: sdpa+gate+sink. attention=NAME is short for it.
    In a GPT also a pattern of these over the layers, repeated: delta/delta/delta/sdpa. sdpa is fast softmax
    attention; docs/attention_field.md lists all forms and docs/attention.md explains the first."""
    n_embd: int = 128
    """Width C of the residual stream."""
    n_head: int = 4
    """Number of query heads H.
    The forms average, simple and single_head have one head of width n_embd."""
    head_size: int | None = None
    """Channels D of each head; n_embd / n_head when null.
    Another D gives the attention a width H·D other than the residual stream's, as in Qwen3."""
    n_kv_head: int | None = None
    """Number of key/value heads Hkv; n_head when null.
    1 is multi-query attention (Shazeer 2019), another divisor of n_head grouped-query attention (Ainslie et al.
    2023)."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight in training."""
    attention_window: int | None = None
    """Sliding window: the number of positions that a query sees, its own among them.
    All when null. If a pattern says window, as sdpa+window/sdpa, only those layers have it."""
    score_softcap: float = 50.0
    """For attention=softcap: squash scores into ± this value, as cap × tanh(score / cap)."""
    latent_size: int | None = None
    """For attention=mla: width of the vector from which all heads' keys and values are made.
    When null 4 × head size, as in DeepSeek-V2, but at most n_head × head size."""
    allow_neg_eigval: bool = False
    """For attention=delta and kda: let β reach 2, not 1, so that a state may change its sign (Grazzi et al. 2025).
    A state can then count modulo 2. OLMo Hybrid (2026) has it."""
    block_size: int = 128
    """Longest training window, in tokens."""
    position: str = "rope"
    """How the model learns order: rope, pope, learned, alibi or none.
    rope rotates queries and keys (Su et al. 2021). pope makes positive lengths of their channels, and turns each of
    them (Gopalakrishnan et al. 2025). alibi adds a distance penalty to the scores (Press et al. 2022).
    learned adds a position embedding to the tokens (in the GPT, not here). none leaves order to the causal mask."""
    rope_theta: float = 10_000.0
    """Base of RoPE's geometric series of frequencies."""
    rope_fraction: float = 1.0
    """Share of a head's channels that RoPE rotates, from the first on (GPT-NeoX).
    The other channels carry no position."""
    rope_proportional: bool = False
    """Below a rope_fraction of 1: rotate by the first frequencies of a whole head (Gemma 4), not by all from fast to
    slow."""
    rope_scaling: str = "none"
    """How RoPE is stretched to longer texts: none, linear, yarn or llama3.
    linear divides the positions. yarn divides the frequencies of slow planes, and sharpens the scores. llama3
    divides the frequencies of slow planes."""
    rope_scaling_factor: float = 1.0
    """How many times the trained length the stretched positions reach."""
    rope_trained_length: int | None = None
    """The trained length, by which yarn and llama3 tell slow planes. When null: that of the weights of
    init_from, and for new ones block_size / rope_scaling_factor."""
    qk_norm: bool = True
    """RMS-normalise queries and keys per head, with learned weights, before RoPE."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    bias: bool = False
    """Biases on every other linear layer and in layernorm."""

    def __post_init__(self) -> None:
        check_types(self, "model.")
        self.attention = "".join(self.attention.split())
        # Check each setting alone.
        one_of("model.position", self.position, POSITIONS)
        one_of("model.rope_scaling", self.rope_scaling, ROPE_SCALINGS)
        for name in ("n_embd", "n_head", "head_size", "n_kv_head", "attention_window", "latent_size", "block_size",
                     "rope_trained_length"):  # fmt: skip
            at_least(f"model.{name}", getattr(self, name), 1)
        if (self.attention_window or 0) >= 2**63:  # torch's positions have 64 bits
            remedy = "leave it out for all positions"
            raise SettingsError(
                "must be below 2^63", remedy, setting="model.attention_window", value=self.attention_window
            )
        fraction("model.attention_dropout", self.attention_dropout, below=1)
        fraction("model.rope_fraction", self.rope_fraction, above=0)
        positive("model.rope_theta", self.rope_theta)
        positive("model.score_softcap", self.score_softcap)
        at_least("model.rope_scaling_factor", self.rope_scaling_factor, 1.0)
        # Check them together.
        given = [name for layer in self.attention.split("/") for name in layer.split("+")[1:]]
        if "window" in given and self.attention_window is None:
            raise SettingsError(f"attention={self.attention} needs a window", "set model.attention_window=POSITIONS")
        if "nope" in given and self.position not in TURNING:
            problem = f"attention={self.attention}: nope leaves out the rotation of model.position=rope"
            raise SettingsError(f"{problem}, not of {self.position}", "leave out nope, or set model.position=rope")
        if self.head_size is None and self.n_embd % self.n_head:
            # Numbers of heads that the other settings take too: key/value heads divide them, RoPE turns pairs.
            share = (self.n_kv_head or 1, 2 if self.position == "rope" and self.rope_fraction == 1 else 1)
            fit = [n for n in _divisors(self.n_embd) if n % share[0] == 0 and self.n_embd // n % share[1] == 0]
            raise _indivisible("n_head", self.n_head, "n_embd", self.n_embd, fit, "another model.n_embd")
        if self.n_head % self.kv_heads:
            fit = _divisors(self.n_head)
            raise _indivisible("n_kv_head", self.kv_heads, "n_head", self.n_head, fit, "null for one per query head")

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
        """The modifiers of one layer's attention, window and nope among them."""
        return self.attention.split("/")[0].split("+")[1:]

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
    """The settings of a GPT and of its attention layers, which read this same object."""

    n_layer: int = 4
    """Number of blocks."""
    vocab_size: int | None = None
    """Number of token ids V; the tokenizer's when null."""
    ngrams: list[int] | None = None
    """Sizes n of the n-grams that are embedded too, each at least 2, as in '[2,3,4]'.
    Each n has a table; its row at the hash of the last n ids is added to the token's embedding. See
    docs/training.md."""
    ngram_rows: int = 16_384
    """Rows of each of these tables; n-grams of the same hash share one."""
    norm: str = "rmsnorm"
    """Normalisation before attention, MLP and lm_head: rmsnorm or layernorm."""
    norm_eps: float = 1e-6
    """Added to the mean square (or variance) before the square root."""
    mlp: str = "swiglu"
    """The feed-forward network: swiglu, relu2, gelu or gelu_tanh.
    swiglu is by Shazeer (2020), relu2 by So et al. (2021), gelu by Hendrycks & Gimpel (2016). gelu_tanh is the
    approximation that GPT-2 was trained with; on a CPU it takes six times as long. A model has one in each block;
    docs/apart.md freezes them at zero, so that attention alone is left."""
    n_inner: int | None = None
    """Hidden width of the MLP, taken as it is typed; when null 4 × n_embd, or for swiglu about 8/3 × n_embd.
    That is rounded up to a multiple of 64: its three matrices hold about as many weights as the two of another MLP."""
    dropout: float = 0.0
    """Probability of dropping a channel of an embedding or of a layer's output, in training.
    A layer adds its output to the residual stream."""
    tie_embeddings: bool = False
    """Use the token embedding as lm_head too."""
    logit_softcap: float | None = None
    """Squash logits into ± this value, as cap × tanh(logits / cap)."""
    zero_init: bool = True
    """Start the output projections and an untied lm_head at zero.
    Every block then begins as the identity. false is GPT-2's initialisation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model.norm", self.norm, NORMS)
        one_of("model.mlp", self.mlp, MLPS)
        for name in ("n_layer", "vocab_size", "n_inner", "ngram_rows"):
            at_least(f"model.{name}", getattr(self, name), 1)
        self.ngrams = self.ngrams or None
        for n in self.ngrams or ():
            at_least("each of model.ngrams", n, 2)
        ngrams = f"model.ngrams={format_value(self.ngrams)}"
        if self.ngrams and len(set(self.ngrams)) < len(self.ngrams):
            raise SettingsError(f"{ngrams} has a size twice", "give each once")
        if self.ngrams and max(self.ngrams) > self.block_size:
            raise SettingsError(f"{ngrams} has a size above model.block_size={self.block_size}", "give smaller ones")
        fraction("model.dropout", self.dropout, below=1)
        positive("model.logit_softcap", self.logit_softcap)
        positive("model.norm_eps", self.norm_eps)

    def at(self, layer: int) -> "GPTConfig":
        """Return the settings of one layer's attention.

        They have its part of the pattern, and its window.
        """
        # If some layers have +window, the window is theirs alone; else all layers have it.
        parts = self.attention.split("/")
        own = parts[layer % len(parts)]
        some_have_it = "window" in self.attention.replace("/", "+").split("+")
        window = None if some_have_it and "window" not in own.split("+") else self.attention_window
        return replace(self, attention=own, attention_window=window)

    @property
    def inner(self) -> int:
        """Hidden width of the MLP, with the default resolved."""
        if self.n_inner is not None:
            return self.n_inner
        # swiglu has three matrices for the others' two: 8/3 of the width, in multiples of 64, costs as much as 4.
        return 64 * -(-8 * self.n_embd // 192) if self.mlp == "swiglu" else 4 * self.n_embd


def _divisors(size: int) -> list[int]:
    """Return the divisors of a size up to 1,024."""
    return [n for n in range(1, min(size, 1024) + 1) if size % n == 0]


def _indivisible(part: str, count: int, whole: str, size: int, fit: list[int], other: str) -> SettingsError:
    """Return the error for a count that does not divide a size.

    fit: counts in its place. other: another remedy.
    """
    problem = f"model.{part}={count} does not divide model.{whole}={size}"
    choices = f"model.{part} from {', '.join(map(str, fit))}, or " if fit else ""
    return SettingsError(problem, f"choose {choices}{other}")

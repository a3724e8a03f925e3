"""Which text, and which tokens: the settings of the data, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

TOKENIZERS = ("bpe", "byte", "gpt2", "cl100k_base", "o200k_base")

# The sources of text, each with the share of it that is held out when val_fraction is null: the
# larger the usual text, the smaller the share that makes a steady validation loss.
VAL_FRACTIONS = {"stdlib": 0.02, "shakespeare": 0.1, "text": 0.1, "jsonl": 0.01, "hf": 0.001}
SOURCES = tuple(VAL_FRACTIONS)


@dataclass(kw_only=True)
class DataConfig:
    """Where the documents come from and how they are split."""

    source: str = "stdlib"
    """One of SOURCES."""
    path: str | None = None
    """For text and jsonl: a file, a folder (searched deeply) or a glob; .gz files are unpacked.
    Giving a path with source=stdlib or shakespeare means source=text."""
    text_field: str = "text"
    """For jsonl and hf: the field that holds a document's text."""
    name: str | None = None
    """For hf: the dataset's name on the Hugging Face hub, or a local folder."""
    subset: str | None = None
    """For hf: the dataset's configuration, where it has several."""
    split: str = "train"
    """For hf: the split that is read."""
    val_fraction: float | None = None
    """Share of the text held out for validation; when null the source's own in VAL_FRACTIONS."""
    cache_dir: str = "~/.cache/tinygpt"
    """Where downloads and token shards are kept."""

    def __post_init__(self) -> None:
        if self.path is not None and self.source in ("stdlib", "shakespeare"):
            self.source = "text"
        if self.source not in SOURCES:
            raise ValueError(f"data.source={self.source} is not known: choose one of {', '.join(SOURCES)}.")
        if self.val_fraction is not None and not 0 < self.val_fraction <= 0.5:
            raise ValueError(f"data.val_fraction={self.val_fraction} must be above 0 and at most 0.5, e.g. 0.1.")
        if self.source in ("text", "jsonl") and not self.path:
            raise ValueError(f"data={self.source} needs data.path=..., a file, a folder or a glob.")
        if self.source == "hf" and not self.name:
            raise ValueError("data=hf needs data.name=..., a dataset of the Hugging Face hub.")
        if not self.cache_dir:
            raise ValueError("data.cache_dir is empty: give a folder for downloads and token shards.")

    @property
    def held_out(self) -> float:
        """Share of the text held out for validation, with the default resolved."""
        return VAL_FRACTIONS[self.source] if self.val_fraction is None else self.val_fraction


@dataclass(kw_only=True)
class TokenizerConfig:
    """Which tiktoken encoding turns text into tokens."""

    name: str = "bpe"
    """One of TOKENIZERS: bpe is trained on the corpus, byte has one token a byte, the others are
    published by OpenAI and downloaded once by tiktoken."""
    vocab_size: int = 2048
    """For bpe: number of tokens, the 256 bytes and <|endoftext|> among them."""

    def __post_init__(self) -> None:
        if self.name not in TOKENIZERS:
            raise ValueError(f"tokenizer.name={self.name} is not known: choose one of {', '.join(TOKENIZERS)}.")
        if self.name == "bpe" and not 257 <= self.vocab_size <= 1_000_000:
            raise ValueError(
                f"tokenizer.vocab_size={self.vocab_size} must be from 257 (256 bytes and <|endoftext|>) to 1,000,000."
            )

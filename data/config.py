"""The settings of the text and its tokens, checked when made."""

from dataclasses import dataclass

from errors import SettingsError, fraction, one_of

TOKENIZERS = ("bpe", "byte", "gpt2", "cl100k_base", "o200k_base")

# The sources of text, each with the share of it that is held out when val_fraction is null: a larger text
# needs a smaller share for a steady validation loss.
VAL_FRACTIONS = {"stdlib": 0.04, "shakespeare": 0.1, "text": 0.1, "jsonl": 0.01, "hf": 0.01}
SOURCES = tuple(VAL_FRACTIONS)


@dataclass(kw_only=True)
class DataConfig:
    """Where the documents come from and how they are split."""

    source: str = "stdlib"
    """stdlib (the running Python's standard library, no download), shakespeare (1.1 MB, downloaded), text, jsonl
    (one JSON object a line) or hf (a Hugging Face dataset, streamed)."""
    path: str | None = None
    """For text and jsonl: a file, a folder (searched at any depth) or a glob; .gz files are unpacked. With
    source=stdlib or shakespeare a path means source=text."""
    text_field: str = "text"
    """For jsonl and hf: the field that holds a document's text."""
    name: str | None = None
    """For hf: the dataset's name on the hub, or a local folder."""
    subset: str | None = None
    """For hf: the dataset's configuration, where it has several."""
    split: str = "train"
    """For hf: the split that is read."""
    val_fraction: float | None = None
    """Share of the text held out for validation; when null 0.04 for stdlib, 0.1 for shakespeare and text, 0.01 for
    jsonl and hf."""
    document_mask: bool = False
    """Keep the documents of a window apart: attention, and whatever else looks back, ends where a document begins."""
    cache_dir: str = "~/.cache/tinygpt"
    """Where downloads and token shards are kept."""

    def __post_init__(self) -> None:
        if self.path is not None and self.source in ("stdlib", "shakespeare"):
            self.source = "text"
        one_of("data.source", self.source, SOURCES)
        fraction("data.val_fraction", self.val_fraction, above=0, most=0.5)
        if self.source in ("text", "jsonl") and not self.path:
            raise SettingsError(f"data={self.source} needs data.path=..., a file, a folder or a glob.")
        if self.source == "hf" and not self.name:
            raise SettingsError("data=hf needs data.name=..., a dataset of the Hugging Face hub.")
        if not self.cache_dir:
            raise SettingsError("data.cache_dir is empty: give a folder for downloads and token shards.")

    @property
    def held_out(self) -> float:
        """Share of the text held out for validation, with the default resolved."""
        return VAL_FRACTIONS[self.source] if self.val_fraction is None else self.val_fraction


@dataclass(kw_only=True)
class TokenizerConfig:
    """Which tiktoken encoding turns text into tokens."""

    name: str = "bpe"
    """bpe (trained on the text), byte (one token a byte), gpt2, cl100k_base or o200k_base (published by OpenAI,
    downloaded once by tiktoken)."""
    vocab_size: int = 2048
    """For bpe: number of tokens, including the 256 bytes and <|endoftext|>."""

    def __post_init__(self) -> None:
        one_of("tokenizer.name", self.name, TOKENIZERS)
        if self.name == "bpe" and not 257 <= self.vocab_size <= 1_000_000:
            least = "257 (256 bytes and <|endoftext|>)"
            raise SettingsError(f"tokenizer.vocab_size={self.vocab_size} must be from {least} to 1,000,000.")

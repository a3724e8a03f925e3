"""The settings of the text and its tokens, checked when made."""

import math
from dataclasses import dataclass, field, replace

from errors import SettingsError, at_least, fraction, one_of, positive

TOKENIZERS = ("bpe", "byte", "gpt2", "cl100k_base", "o200k_base")

# The sources of text, each with the share of it that is held out when val_fraction is null: a larger text
# needs a smaller share for a steady validation loss.
VAL_FRACTIONS = {"stdlib": 0.04, "shakespeare": 0.1, "text": 0.1, "jsonl": 0.01, "parquet": 0.01, "hf": 0.01}
# The synthetic tasks, each with its number of ids when data.task.vocab_size is null.
VOCABULARIES = {"recall": 1024, "copy": 32, "selective_copy": 16, "induction": 16}
SOURCES = (*VAL_FRACTIONS, "mix", "nanogpt", *VOCABULARIES)
BUILT_IN = ("stdlib", "shakespeare")  # the texts that need neither a path nor a name
ENDINGS = {"jsonl": (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz"), "parquet": (".parquet",)}  # of their files
WITH_ITEMS = ("recall", "selective_copy")  # the tasks that data.task.items is for


@dataclass(kw_only=True)
class TaskConfig:
    """The sizes of a synthetic task; its length is model.block_size."""

    items: int = 8
    """What a window asks for: key-value pairs of recall, ids of selective_copy."""
    vocab_size: int | None = None
    """Number of ids; when null 1024 for recall, 32 for copy, 16 for selective_copy and induction."""
    power_a: float = 0.01
    """For recall: exponent a of the gaps' power law, p(gap) ∝ gap^(a - 1); 1 is uniform."""
    random_non_queries: bool = True
    """For recall: random ids between the queries, instead of 0."""

    def __post_init__(self) -> None:
        at_least("data.task.items", self.items, 1)
        at_least("data.task.vocab_size", self.vocab_size, 3)
        positive("data.task.power_a", self.power_a)

    def ids(self, name: str) -> int:
        """Return the number of ids of the task `name`, with the default resolved."""
        return self.vocab_size or VOCABULARIES[name]


@dataclass(kw_only=True)
class DataConfig:
    """Where the documents come from and how they are split."""

    source: str = "stdlib"
    """stdlib (the running Python's standard library, no download), shakespeare (1.1 MB, downloaded), text, jsonl
    (one JSON object a line), parquet, hf (a Hugging Face dataset, streamed), mix (several of these) or nanogpt (its
    train.bin and val.bin); or a synthetic task without text: recall, copy, selective_copy or induction."""
    path: str | None = None
    """For text, jsonl and parquet: a file, a folder (searched at any depth) or a glob; .gz files are unpacked. For
    nanogpt: the folder of its files. With source=stdlib or shakespeare a path means source=text, or parquet where it
    ends in .parquet."""
    mix: list[str] = field(default_factory=list)
    """For mix, which it implies: texts with their weights, as in [notes.txt:0.7,stdlib:0.2,pages.jsonl:0.1], relative
    shares of the training windows. A text is stdlib, shakespeare, or a path as in data.path, whose ending tells jsonl
    and parquet from text."""
    text_field: str = "text"
    """For jsonl, parquet and hf: the field that holds a document's text."""
    name: str | None = None
    """For hf: the dataset's name on the hub, or a local folder."""
    subset: str | None = None
    """For hf: the dataset's configuration, where it has several."""
    split: str = "train"
    """For hf: the split that is read."""
    val_fraction: float | None = None
    """Share of the text, in a mix of each, held out for validation; when null 0.04 for stdlib, 0.1 for shakespeare and
    text, 0.01 for jsonl, parquet and hf."""
    document_mask: bool = False
    """Keep the documents of a window apart: attention, and whatever else looks back, ends where a document begins."""
    cache_dir: str = "~/.cache/tinygpt"
    """Where downloads and token shards are kept."""
    task: TaskConfig = field(default_factory=TaskConfig)

    def __post_init__(self) -> None:
        if self.path is not None and self.mix:
            raise SettingsError(f"data.path={self.path} and data.mix are both given: choose one.")
        if (self.path is not None or self.mix) and self.source in BUILT_IN:
            self.source = "mix" if self.mix else "parquet" if str(self.path).endswith(ENDINGS["parquet"]) else "text"
        one_of("data.source", self.source, SOURCES)
        fraction("data.val_fraction", self.val_fraction, above=0, most=0.5)
        if self.source in ("text", *ENDINGS) and not self.path:
            raise SettingsError(f"data={self.source} needs data.path=..., a file, a folder or a glob.")
        if self.source == "nanogpt" and not self.path:
            raise SettingsError("data=nanogpt needs data.path=..., the folder of train.bin and val.bin.")
        if self.source == "mix" and not self.mixed():
            raise SettingsError("data=mix needs data.mix=[PATH:WEIGHT,...], texts with their shares.")
        if self.source == "hf" and not self.name:
            raise SettingsError("data=hf needs data.name=..., a dataset of the Hugging Face hub.")
        if not self.cache_dir:
            raise SettingsError("data.cache_dir is empty: give a folder for downloads and token shards.")

    @property
    def is_task(self) -> bool:
        """Whether the source is a synthetic task instead of text."""
        return self.source in VOCABULARIES

    @property
    def held_out(self) -> float:
        """Share of the text held out for validation, with the default resolved."""
        return VAL_FRACTIONS[self.source] if self.val_fraction is None else self.val_fraction

    def mixed(self) -> "dict[str, tuple[DataConfig, float]]":
        """Return the settings and weight of each text of data.mix by its name; SettingsError for what is none."""
        found: dict[str, tuple[DataConfig, float]] = {}
        for entry in self.mix:
            name, _, number = entry.rpartition(":")
            try:
                weight = float(number)
            except ValueError:
                weight = math.nan
            if not name or not 0 < weight < math.inf:
                raise SettingsError(f"data.mix={entry} must be PATH:WEIGHT, with a finite weight above 0.")
            if name in found:
                raise SettingsError(f"data.mix={entry} names a text again: give each one weight.")
            if name in BUILT_IN:
                source = name
            elif name in SOURCES:
                problem = f"data.mix={entry}: data={name} cannot be a part of a mix"
                raise SettingsError(f"{problem}: name a path, stdlib or shakespeare (a folder as ./{name}).")
            else:
                source = next((source for source, endings in ENDINGS.items() if name.endswith(endings)), "text")
            path = None if source == name else name
            found[name] = replace(self, mix=[], source=source, path=path), weight
        return found


@dataclass(kw_only=True)
class TokenizerConfig:
    """Which tiktoken encoding turns text into tokens."""

    name: str = "bpe"
    """bpe (trained on the text, of a large one on an even sample of 2,000 characters a token), byte (one token a byte),
    gpt2, cl100k_base or o200k_base (published by OpenAI, downloaded once by tiktoken)."""
    vocab_size: int = 2048
    """For bpe: number of tokens, including the 256 bytes and <|endoftext|>."""

    def __post_init__(self) -> None:
        one_of("tokenizer.name", self.name, TOKENIZERS)
        if self.name == "bpe" and not 257 <= self.vocab_size <= 1_000_000:
            least = "257 (256 bytes and <|endoftext|>)"
            raise SettingsError(f"tokenizer.vocab_size={self.vocab_size} must be from {least} to 1,000,000.")

"""Settings of the text and its tokenizer, checked when made."""

from dataclasses import dataclass, field

from common.errors import SettingsError, at_least, check_types, fraction, one_of

TOKENIZERS = ("bpe", "byte", "gpt2", "cl100k_base", "o200k_base")

# The sources of text, with the default of val_fraction. A larger text needs a smaller share for a steady loss.
VAL_FRACTIONS = {
    "stdlib": 0.04,
    "tales": 0.04,
    "shakespeare": 0.1,
    "files": 0.1,
    "text": 0.1,
    "jsonl": 0.1,
    "csv": 0.1,
    "hf": 0.01,  # of a dataset; of Parquet files that data.path names 0.1
}
MOST_HELD_OUT = 0.5
"""The largest val_fraction."""
# The synthetic tasks, with the default of data.task.vocab_size.
VOCABULARIES = {"recall": 1024, "copy": 32, "induction": 16}
SOURCES = (*VAL_FRACTIONS, "nanogpt", *VOCABULARIES)
"""The built-in sources; VOCABULARIES may get more from code=FILE."""
RECORDS = ("files", "jsonl", "csv", "hf")
"""The sources of which data.text_field names the field that holds the text."""
DIVISIBLE = ("text", *RECORDS)
"""The sources that data.separator divides into documents."""
WITH_PATH = ("files", "text", "jsonl", "csv")
"""The sources that read data.path and nothing else."""


def check_source(name: str) -> None:
    """Refuse an unknown source of data."""
    one_of("data.source", name, dict.fromkeys((*SOURCES, *VOCABULARIES)))


@dataclass(kw_only=True)
class TaskConfig:
    """The sizes of a synthetic task; its length is model.block_size."""

    items: int = 8
    """Number of answers in a sequence: the key-value pairs of recall."""
    vocab_size: int | None = None
    """Number of ids; when null 1024 for recall, 32 for copy, 16 for induction."""
    random_non_queries: bool = True
    """For recall: put random ids between the queries instead of 0."""

    def __post_init__(self) -> None:
        check_types(self, "data.task.")
        at_least("data.task.items", self.items, 1)
        at_least("data.task.vocab_size", self.vocab_size, 3)

    def ids(self, name: str) -> int:
        """Return the number of ids of the task `name`, with the default resolved."""
        return self.vocab_size or VOCABULARIES[name]


@dataclass(kw_only=True)
class TalesConfig:
    """The stories of data=tales."""

    count: int = 7_000
    """Number of stories, of about 580 bytes each."""
    seed: int = 1
    """Seed of the stories."""

    def __post_init__(self) -> None:
        check_types(self, "data.tales.")
        at_least("data.tales.count", self.count, 1)
        at_least("data.tales.seed", self.seed, 0)


@dataclass(kw_only=True)
class DataConfig:
    """The source of the documents, and their split into training and validation text."""

    source: str = "stdlib"
    """Source of the text: stdlib (the running Python's standard library), tales (stories from a
    grammar), shakespeare (downloads 1.1 MB), files, text, jsonl, csv, hf, nanogpt, recall, copy or
    induction (synthetic tasks). files reads each file of data.path in its format: text, JSON lines, a
    JSON array, CSV or Parquet. text, jsonl and csv read all of them in one. hf is a Hugging Face dataset,
    streamed, or Parquet files. nanogpt is a folder with train.bin and val.bin."""
    path: str | None = None
    """A file, a folder (searched at any depth) or a quoted glob; files packed by gzip, bzip2, xz or
    Zstandard are unpacked. For nanogpt: the folder. With source=stdlib, tales or shakespeare a path
    means source=files."""
    val_path: str | None = None
    """Your own validation text, in full: a file, a folder or a quoted glob. Then nothing is held out
    of the other text, unless val_fraction asks for it."""
    separator: str | None = "<|endoftext|>"
    """For files, text, jsonl, csv and hf: the text that separates documents; when null each file or
    record is one document. \\n is a line end. Line ends right after a separator are dropped."""
    text_field: str = "text"
    """For files, jsonl, csv and hf: the field or column that holds a document's text; in JSON and
    Parquet also a field within one, as in content.text."""
    name: str | None = None
    """For hf: the dataset's name on the hub, or a local folder."""
    subset: str | None = None
    """For hf: the dataset's configuration, if it has several."""
    split: str = "train"
    """For hf: the split to read."""
    val_fraction: float | None = None
    """Share of the text held out for validation.
    If null: 0 with val_path, otherwise 0.04 for stdlib and tales, 0.01 for a dataset, 0.1 for others."""
    document_mask: bool = False
    """Confine attention to each token's own document."""
    cache_dir: str = "~/.cache/tinygpt"
    """Folder for downloads and prepared tokens."""
    task: TaskConfig = field(default_factory=TaskConfig)
    tales: TalesConfig = field(default_factory=TalesConfig)

    def __post_init__(self) -> None:
        check_types(self, "data.")
        if self.path is not None and self.source in ("stdlib", "tales", "shakespeare"):
            self.source = "files"
        check_source(self.source)
        if self.val_fraction == 0 and self.val_path:
            self.val_fraction = None  # the default beside a text for validation
        if self.val_fraction is not None and self.val_fraction <= 0:
            remedy = "to train on the whole text, give another for validation by data.val_path=FILE instead"
            if self.val_path or self.source not in VAL_FRACTIONS:
                remedy = ""
            raise SettingsError("must be above 0", remedy, setting="data.val_fraction", value=self.val_fraction)
        fraction("data.val_fraction", self.val_fraction, above=0, most=MOST_HELD_OUT)
        needs_path = self.source in (*WITH_PATH, "nanogpt") or (self.source == "hf" and not self.name)
        if needs_path and not self.path:
            remedy = "give data.path=..., a file or folder (to a moved run, too), or for hf data.name=..., a dataset"
            raise SettingsError(f"data={self.source} has nothing to read", remedy)

    @property
    def is_task(self) -> bool:
        """Whether the source is a synthetic task."""
        return self.source in VOCABULARIES

    @property
    def validation_fraction(self) -> float:
        """Share of the text held out for validation, with the default resolved."""
        if self.val_fraction is not None:
            return self.val_fraction
        if self.val_path:
            return 0.0
        return VAL_FRACTIONS["files" if self.source == "hf" and self.path else self.source]


@dataclass(kw_only=True)
class TokenizerConfig:
    """The tiktoken encoding that turns text into tokens."""

    name: str = "bpe"
    """bpe (trained on the text), byte (one token a byte), gpt2, cl100k_base or o200k_base
    (OpenAI's, downloaded once). bpe is trained on a sample of 2,000 characters a token."""
    vocab_size: int = 2048
    """For bpe: number of tokens, the 256 bytes and <|endoftext|> included."""

    def __post_init__(self) -> None:
        check_types(self, "tokenizer.")
        one_of("tokenizer.name", self.name, TOKENIZERS)
        if self.name == "bpe" and not 257 <= self.vocab_size <= 1_000_000:
            problem = f"tokenizer.vocab_size={self.vocab_size} is out of range"
            raise SettingsError(problem, "choose from 257 (256 bytes and <|endoftext|>) to 1,000,000")

"""metrics.jsonl: a run's measurements, one JSON object a line."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

LARGEST = 1e30  # figures in a file are smaller: pages and tables add up their squares
# What may be null in a row with a figure that is always finite, as it was not.
MAY_BE_NULL = {
    "lr": {"loss", "grad_norm", "tokens_per_s"},
    "val_tokens": {"val_loss", "val_bpb", "val_bpb_stderr", "val_accuracy"},
}
Row = dict[str, Any]
"""A line of metrics.jsonl: `step`, `tokens` and `seconds` so far, and measurements."""


@dataclass(frozen=True)
class Evaluation:
    """The nats of a model over a text, or over the answers of a synthetic task."""

    nats: float
    """-log p(token | context), summed over the tokens."""
    tokens: int
    text_bytes: int
    """Length of the original text in UTF-8, in bytes."""
    bpb_stderr: float | None = None
    """Standard error of bpb over documents; None if nearly all of the text is one document."""
    accuracy: float | None = None
    """Share of a synthetic task's answers that are right; None for a text."""

    @classmethod
    def of_tokens(
        cls,
        nats: np.ndarray,
        sizes: np.ndarray,
        accuracy: float | None = None,
        documents: np.ndarray | None = None,
    ) -> Self:
        """Return the evaluation of tokens (N,) with these nats and bytes.

        documents: the number of each token's document; by default a token of 0 bytes, <|endoftext|>, begins one.
        """
        doc_nats, doc_bytes = by_document(nats, sizes, documents)
        stderr = ratio_error(doc_nats, doc_bytes)
        bpb_stderr = None if stderr is None else stderr / math.log(2)
        return cls(float(doc_nats.sum()), len(nats), int(sizes.sum()), bpb_stderr, accuracy)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bpb(self) -> float:
        """Bits per byte of text, which can be compared between tokenizers."""
        return self.nats / math.log(2) / self.text_bytes

    @property
    def figures(self) -> dict[str, float]:
        if self.accuracy is not None:
            return {"val_loss": self.loss, "val_accuracy": self.accuracy, "val_tokens": self.tokens}
        stderr = {} if self.bpb_stderr is None else {"val_bpb_stderr": self.bpb_stderr}
        return {"val_loss": self.loss, "val_bpb": self.bpb, "val_tokens": self.tokens} | stderr


def by_document(
    nats: np.ndarray,
    sizes: np.ndarray,
    documents: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of nats and bytes of each document.

    documents: the number of each token's; by default a token of 0 bytes, <|endoftext|>, begins one.
    """
    numbers = np.cumsum(sizes == 0) if documents is None else documents
    return np.bincount(numbers, nats), np.bincount(numbers, sizes)


def ratio_error(sums: np.ndarray, sizes: np.ndarray) -> float | None:
    """Return the standard error of sums.sum() / sizes.sum() over documents.

    It comes from their residuals from the ratio. None if a document has more than three quarters of the text: the ratio
    is nearly its own, and its residual says little.
    """
    total = int(sizes.sum())
    count = np.count_nonzero(sizes)
    if count < 2 or 4 * int(sizes.max()) > 3 * total:
        return None
    residuals = sums - float(sums.sum()) / total * sizes
    return math.sqrt(float((residuals**2).sum()) * count / (count - 1)) / total


def read_metrics(path: Path | str) -> list[Row]:
    """Return the rows of a metrics.jsonl, without truncated lines; [] if it is unreadable."""
    file = Path(path)
    content = b""
    with suppress(OSError):
        content = file.read_bytes() if file.is_file() else b""
    rows = map(read_row, content.splitlines())
    return [row for row in rows if row is not None]


def read_row(line: bytes) -> Row | None:
    """Return a line of metrics.jsonl; None for another one, such as a truncated one.

    A program that has read the rows as a table, such as pandas, writes each with every name, and null where it has
    none. These nulls are left out: ours are of figures that were not finite.
    """
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and is_number(row.get("step")) and row["step"] % 1 == 0:
            row["step"] = int(row["step"])  # such a program may write 3.0
            if row.keys() >= MAY_BE_NULL.keys():  # rows of steps and of evaluations have one of these each
                ours = {name for mark, names in MAY_BE_NULL.items() if row[mark] is not None for name in names}
                return {name: value for name, value in row.items() if value is not None or name in ours}
            return row
    return None


def scalars(row: Row, levels: Sequence[str] = ("/layer_", "_head_")) -> Iterator[tuple[str, Any]]:
    """Yield the (name, value) pairs of a row except its step.

    A list gives one pair for each layer, a list of lists one for each layer and head.
    """
    for name, value in row.items():
        if isinstance(value, list):
            yield from scalars({f"{name}{levels[0]}{number}": item for number, item in enumerate(value)}, levels[1:])
        elif name != "step":
            yield name, value


def is_number(value: Any) -> bool:
    """Return whether a value from a file is a number, below LARGEST in magnitude."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def finite(value: Any) -> Any:
    """Replace NaN, infinity and floats beyond LARGEST by None, at any depth: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) < LARGEST else value

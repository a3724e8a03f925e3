"""How fast does text become token shards, compared with tiktoken itself?

    python benchmarks/tokenization.py [TEXT_FILE]

The text (by default the standard library's) goes through data.prepare, as in train.py: read, split, encoded on all
cores, written to shards and read back. Beside it is tiktoken's `encode_ordinary` of the same text in memory, on one
thread, with the same encoding: bpe trained on it, and gpt2 if TIKTOKEN_CACHE_DIR has it. The same follows for its
first million characters, if it has more. Then 100,000 small documents of about 200 characters, beside tiktoken's
`encode_ordinary_batch`, which also takes several threads and writes nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import paired
import tiktoken

from data.config import DataConfig, TokenizerConfig
from data.corpus import open_corpus
from data.prepare import prepare
from data.shards import encode_splits
from data.split import SplitPiece
from data.tokenizer import make_tokenizer
from errors import DataError

DOCUMENTS = 100_000
CHARACTERS = 200
SHORT = 1_000_000


def main() -> None:
    parser = paired.Parser(__doc__)
    parser.add_argument("text", nargs="?", type=paired.file, help="a text file in UTF-8")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = read_text(arguments.text)
        if not text.strip():
            parser.error(f"{arguments.text} has no text: give a file that has some")
        paired.header("tiktoken")
        one_file(text, folder, arguments.rounds)
        if len(text) > SHORT:
            one_file(text[:SHORT], folder, arguments.rounds)
        small_documents(text, folder, arguments.rounds)


def read_text(path: Path | None) -> str:
    corpus = open_corpus(DataConfig(path=str(path)) if path else DataConfig())
    return "".join(piece for document in corpus.documents() for piece in document)


def encodings(text: str) -> dict[str, tiktoken.Encoding]:
    found = {"bpe": make_tokenizer(TokenizerConfig(name="bpe"), [text])}
    if "TIKTOKEN_CACHE_DIR" in os.environ:
        try:
            found["gpt2"] = make_tokenizer(TokenizerConfig(name="gpt2"), [])
        except DataError as error:
            print(f"Without gpt2: {error}\n")
    return found


def one_file(text: str, folder: Path, rounds: int) -> None:
    """Print how fast one text file is prepared."""
    file = folder / "text.txt"
    file.write_text(text, encoding="utf-8")
    found = encodings(text)
    programs: dict[str, Callable[[], float]] = {}
    for name, encoding in found.items():
        programs[f"data.prepare, {name}"] = prepared(DataConfig(path=str(file)), encoding, folder)
        programs[f"tiktoken, one thread, {name}"] = paired.timed(lambda one=encoding: one.encode_ordinary(text))
    programs["data.prepare, bpe, and its training"] = prepared(DataConfig(path=str(file)), None, folder)
    seconds = paired.interleave(programs, rounds)
    of = {name: "tiktoken, one thread, " + name.split(", ")[-1] for name in programs}
    of["data.prepare, bpe, and its training"] = "tiktoken, one thread, bpe"
    report("One text file", file.stat().st_size, seconds, of)


def small_documents(text: str, folder: Path, rounds: int) -> None:
    """Print how fast many small documents are encoded."""
    documents = list(islice(cycle(cut(text)), DOCUMENTS))
    file, size = folder / "documents.jsonl", sum(len(document.encode()) for document in documents)
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": document}) + "\n" for document in documents)
    found = encodings(text)
    programs: dict[str, Callable[[], float]] = {}
    of = {}
    for name, encoding in found.items():
        tiktokens = f"tiktoken, encode_ordinary_batch, {name}"
        programs[f"encode_splits, {name}"] = encoded(documents, encoding, folder)
        programs[f"data.prepare of JSON lines, {name}"] = prepared(
            DataConfig(source="jsonl", path=str(file)), encoding, folder
        )
        programs[tiktokens] = paired.timed(lambda one=encoding: one.encode_ordinary_batch(documents))
        of |= {label: tiktokens for label in programs if label.endswith(f", {name}")}
    report(f"{len(documents):,} small documents", size, paired.interleave(programs, rounds), of)


def report(what: str, size: int, seconds: dict[str, list[float]], of: dict[str, str]) -> None:
    print(f"{what}, {size / 1e6:.1f} MB\n")
    rows = []
    for name, taken in seconds.items():
        rate = paired.spread([size / 1e6 / one for one in taken], ".1f")
        rows.append([name, rate, paired.ratio(seconds[of[name]], taken)])
    paired.table(["", "MB/s", "of tiktoken's"], rows)


def cut(text: str) -> Iterator[str]:
    """Lines gathered until they have CHARACTERS, or the text itself where it is shorter."""
    gathered = ""
    for line in text.splitlines(keepends=True):
        gathered += line
        if len(gathered) >= CHARACTERS:
            yield gathered
            gathered = ""
    if gathered.strip():
        yield gathered


def prepared(data: DataConfig, encoding: tiktoken.Encoding | None, folder: Path) -> Callable[[], float]:
    def program() -> float:
        data.cache_dir = tempfile.mkdtemp(dir=folder)
        started = time.perf_counter()
        prepare(data, TokenizerConfig(), encoding=encoding, log=lambda _: None)
        return time.perf_counter() - started

    return program


def encoded(documents: list[str], encoding: tiktoken.Encoding, folder: Path) -> Callable[[], float]:
    def program() -> float:
        shards = Path(tempfile.mkdtemp(dir=folder))
        pieces = (SplitPiece("train", True, document) for document in documents)
        started = time.perf_counter()
        encode_splits(pieces, encoding, shards, size=None)
        return time.perf_counter() - started

    return program


if __name__ == "__main__":
    main()

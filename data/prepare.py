"""Documents to tokens, once for each corpus, tokenizer and split: the cache and its lock."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tiktoken
from filelock import FileLock, Timeout

from data.config import DataConfig, TokenizerConfig
from data.corpus import Corpus, open_corpus
from data.encode import encode_splits
from data.files import flush_to_disk
from data.shards import Tokens, open_tokens, token_dtype
from data.split import SPLITS, split_corpus
from data.tokenizer import make_tokenizer, read_tokenizer, save_tokenizer, tokenizer_content
from errors import DataError

FORMAT = 2
_PARTIAL = ".partial"

Log = Callable[[str], None]


@dataclass(frozen=True)
class PreparedData:
    """A corpus as tokens. `len(data.train)`, `.documents` and `.text_bytes` count a split's contents."""

    tokenizer: tiktoken.Encoding
    train: Tokens
    val: Tokens
    directory: Path
    """Where the shards lie."""
    description: str
    """The corpus in words."""


def prepare(
    data: DataConfig, tokenizer: TokenizerConfig, *, encoding: tiktoken.Encoding | None = None, log: Log = print
) -> PreparedData:
    """The tokens of a corpus, from the cache or else made now, in parallel and in bounded memory.

    encoding: used instead of the one that `tokenizer` names, such as that of the model to be fine-tuned.
    Two runs that start at once do it once. Raises DataError when the text, the tokenizer or the
    cache folder cannot be had.
    """
    corpus = open_corpus(data)
    root = Path(data.cache_dir).expanduser() / "tokens"
    directory = root / _directory_name(corpus, data, tokenizer, encoding)
    with _cache_errors(data):
        prepared = _open(directory, corpus, log)
        if prepared:
            return prepared
        root.mkdir(parents=True, exist_ok=True)
        with _lock(directory, log):
            prepared = _open(directory, corpus, log=lambda _: None)
            if not prepared:
                _remove_leftovers(root, directory)
                _make(directory, corpus, data, tokenizer, encoding, log)
                prepared = _open(directory, corpus, log)
    assert prepared, "what was just written can be read"
    return prepared


def _directory_name(
    corpus: Corpus, data: DataConfig, tokenizer: TokenizerConfig, encoding: tiktoken.Encoding | None
) -> str:
    if encoding is not None:
        content = json.dumps(tokenizer_content(encoding), sort_keys=True).encode()
        key = [FORMAT, corpus.fingerprint, hashlib.sha256(content).hexdigest(), data.held_out]
        return f"{data.source}-given-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    vocab_size = tokenizer.vocab_size if tokenizer.name == "bpe" else None
    key = [FORMAT, corpus.fingerprint, tokenizer.name, vocab_size, data.held_out]
    return f"{data.source}-{tokenizer.name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"


def _open(directory: Path, corpus: Corpus, log: Log) -> PreparedData | None:
    """What lies ready in `directory`; None, with a line to the log if it is damaged, when it must be made."""
    if not directory.exists():
        return None
    try:
        meta = json.loads((directory / "meta.json").read_bytes())
        dtype = np.dtype(meta["dtype"])
        train, val = (open_tokens(directory, split, dtype, meta[split]) for split in SPLITS)
        encoding = read_tokenizer(directory / "tokenizer.json")
        if encoding.n_vocab != meta["n_vocab"] or token_dtype(encoding.n_vocab) != dtype:
            raise ValueError("tokenizer.json is another one's")
        if meta["tokenizer_crc32"] != zlib.crc32((directory / "tokenizer.json").read_bytes()):
            raise ValueError("tokenizer.json is not what was written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        log(f"The prepared tokens in {directory} are damaged ({error}); preparing them again.")
        return None
    return PreparedData(encoding, train, val, directory, corpus.description)


@contextmanager
def _cache_errors(data: DataConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"data.cache_dir={data.cache_dir} cannot be written ({error.strerror or error}): "
            "give a folder on a disk with room that you may write to."
        ) from error


@contextmanager
def _lock(directory: Path, log: Log) -> Iterator[None]:
    lock = FileLock(_lock_path(directory))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log(f"Another run is preparing the same tokens; waiting for it ({directory}).")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _lock_path(directory: Path) -> Path:
    return directory.with_name(directory.name + ".lock")


def _remove_leftovers(root: Path, directory: Path) -> None:
    """Delete a damaged `directory`, which we hold the lock of, and what runs that died left behind."""
    shutil.rmtree(directory, ignore_errors=True)
    for partial in root.glob("*" + _PARTIAL):
        owner = partial.with_name(partial.name.removesuffix(_PARTIAL))
        if owner == directory:
            shutil.rmtree(partial)
            continue
        try:
            with FileLock(_lock_path(owner), timeout=0):
                shutil.rmtree(partial, ignore_errors=True)
        except Timeout:
            pass  # its run is alive


def _make(
    directory: Path,
    corpus: Corpus,
    data: DataConfig,
    config: TokenizerConfig,
    encoding: tiktoken.Encoding | None,
    log: Log,
) -> None:
    """Write tokenizer, shards and meta.json beside `directory`, then move them there in one step."""
    log(f"Preparing {corpus.description} with tokenizer={encoding.name if encoding else config.name}, once.")
    partial = directory.with_name(directory.name + _PARTIAL)
    partial.mkdir()
    try:
        if encoding is None:
            training_text = (piece.text for piece in split_corpus(corpus, data.held_out) if piece.split == "train")
            encoding = make_tokenizer(config, training_text)
        save_tokenizer(encoding, partial / "tokenizer.json")
        pieces = split_corpus(corpus, data.held_out)
        summaries = encode_splits(pieces, encoding, partial, size=corpus.size)
        if not any(summary["documents"] for summary in summaries.values()):
            raise DataError(
                f"data={data.source} gave no text ({corpus.description}; empty and binary files are left out): "
                "choose another data.path or data source."
            )
        meta = {
            "format": FORMAT,
            "corpus": corpus.description,
            "fingerprint": corpus.fingerprint,
            "tokenizer": encoding.name,
            "n_vocab": encoding.n_vocab,
            "tokenizer_crc32": zlib.crc32((partial / "tokenizer.json").read_bytes()),
            "dtype": token_dtype(encoding.n_vocab).str,
            "val_fraction": data.held_out,
            "versions": {name: version(name) for name in ("tiktoken", "rustbpe", "numpy")},
            **summaries,
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        for path in (partial / "tokenizer.json", partial / "meta.json", partial):
            flush_to_disk(path)
        partial.rename(directory)
        flush_to_disk(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    log(_counts(summaries))


def _counts(summaries: dict[str, dict]) -> str:
    train, val = (summaries[split] for split in SPLITS)
    per_token = (train["bytes"] + val["bytes"]) / max(train["tokens"] + val["tokens"], 1)
    return (
        f"{train['tokens']:,} tokens to train on, {val['tokens']:,} held out, {per_token:.2f} bytes a token "
        f"({train['documents']:,} and {val['documents']:,} documents)."
    )

"""Documents to tokens, once for each corpus, tokenizer and split: the cache and its lock."""

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tiktoken import Encoding

from data.config import DataConfig, TokenizerConfig
from data.corpus import Corpus, open_corpus
from data.files import UNFINISHED, Losses, remove, replacing
from data.mix import mix_texts, naming
from data.nanogpt import open_nanogpt
from data.prepared import PreparedData
from data.shards import encode_splits, open_tokens, token_dtype
from data.split import SPLITS, Split
from data.tokenizer import BPE_CHARACTERS, make_tokenizer, read_tokenizer, save_tokenizer, tokenizer_content
from errors import DataError

FORMAT = 4
_NAMED = 5  # files with losses that are named

Log = Callable[[str], None]
Wanted = TokenizerConfig | Encoding  # a tokenizer to make, or one that is there already
Others = Sequence[tuple[Corpus, float]]  # texts that a bpe is trained on too, and what is held out of each


def prepare(
    data: DataConfig, tokenizer: TokenizerConfig, *, encoding: Encoding | None = None, log: Log = print
) -> PreparedData:
    """Return the tokens of a text or a mixture from the cache, or make them now in parallel and in bounded memory.

    encoding: replaces the one that `tokenizer` names, e.g. by that of the model to fine-tune.
    Of two runs that start at once one does the work. Raises DataError when the text, the tokenizer or the cache folder
    cannot be used.
    """
    if data.source == "mix":
        prepared = _prepare_mix(data, encoding or tokenizer, log)
    elif data.source == "nanogpt":
        assert data.path, "DataConfig requires it"
        prepared = open_nanogpt(data.path, encoding or make_tokenizer(tokenizer, ()))
    else:
        prepared = _prepare_text(open_corpus(data), data, encoding or tokenizer, log)
    return replace(prepared, document_mask=data.document_mask)


def _prepare_mix(data: DataConfig, tokenizer: Wanted, log: Log) -> PreparedData:
    """Prepare the texts of data.mix one after the other. A bpe is trained with the first, on as much of each."""
    mix, corpora, texts = data.mixed(), dict[str, Corpus](), dict[str, PreparedData]()
    for name, (config, _) in mix.items():
        with naming(name):
            corpora[name] = open_corpus(config)
    others = [(corpora[name], config.held_out) for name, (config, _) in mix.items()][1:]
    for name, (config, _) in mix.items():
        with naming(name):
            text = _prepare_text(corpora[name], config, tokenizer, log, others)
            texts[name] = replace(text, document_mask=data.document_mask)
        if tokenizer.name == "bpe":
            tokenizer = texts[name].tokenizer
    return mix_texts(texts, [weight for _, weight in mix.values()])


def _prepare_text(corpus: Corpus, data: DataConfig, tokenizer: Wanted, log: Log, others: Others = ()) -> PreparedData:
    root = Path(data.cache_dir).expanduser() / "tokens"
    directory = root / _directory_name(corpus, data, tokenizer, others)
    try:
        prepared = _open(directory, corpus, tokenizer, log)
        if prepared is None:
            root.mkdir(parents=True, exist_ok=True)
            for leftover in root.glob(f".*{UNFINISHED}"):  # of killed runs: nobody holds its lock
                with suppress(Timeout), _lock(root / leftover.name.split(".")[1], timeout=0):
                    remove(leftover)
            try:
                lock = _lock(directory, timeout=0)
            except Timeout:
                log(f"Another run is preparing the same tokens; waiting for it ({directory}).")
                lock = _lock(directory, timeout=-1)
            with lock:
                prepared = _open(directory, corpus, tokenizer, log=lambda _: None)
                if prepared is None:
                    encoding = _make(directory, corpus, data, tokenizer, log, others)
                    prepared = _open(directory, corpus, encoding, log)
    except OSError as error:
        why = f"data.cache_dir={data.cache_dir} cannot be written ({error.strerror or error})"
        raise DataError(f"{why}: give a writable folder on a disk with room.") from error
    assert prepared, "what was just written can be read"
    return prepared


def _lock(directory: Path, timeout: float) -> AbstractContextManager:
    return FileLock(f"{directory}.lock").acquire(timeout)


def _directory_name(corpus: Corpus, data: DataConfig, tokenizer: Wanted, others: Others) -> str:
    kind: str = tokenizer.name
    parts: list[Any] = [kind, None]
    if isinstance(tokenizer, Encoding):
        content = json.dumps(tokenizer_content(tokenizer), sort_keys=True).encode()
        kind, parts = "given", [hashlib.sha256(content).hexdigest()]
    elif kind == "bpe":
        parts = [kind, tokenizer.vocab_size, *(f"{other.fingerprint} {held_out}" for other, held_out in others)]
    key = json.dumps([FORMAT, corpus.fingerprint, *parts, data.held_out])
    return f"{data.source}-{kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _open(directory: Path, corpus: Corpus, tokenizer: Wanted, log: Log) -> PreparedData | None:
    """Return what `directory` holds; None when it is missing or, which is logged, damaged."""
    if not directory.exists():
        return None
    try:
        meta = json.loads((directory / "meta.json").read_bytes())
        if meta.pop("crc32") != _checksum(meta):
            raise ValueError("meta.json is not what was written")
        if meta["tokenizer_crc32"] != zlib.crc32((directory / "tokenizer.json").read_bytes()):
            raise ValueError("tokenizer.json is not what was written")
        train, val = (open_tokens(directory, split, np.dtype(meta["dtype"]), meta[split]) for split in SPLITS)
        encoding = tokenizer if isinstance(tokenizer, Encoding) else read_tokenizer(directory / "tokenizer.json")
        return PreparedData(encoding, train, val, directory, corpus.description)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log(f"The prepared tokens in {directory} are damaged ({error}); preparing them again.")
        return None


def _checksum(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _report_losses(losses: Losses, log: Log) -> None:
    """Say what of the text was not read as it is."""
    replaced = [(name, count) for name, count in losses.items() if count]
    for name, count in replaced[:_NAMED]:
        log(f"{name} is not all UTF-8: {count:,} character{'s' * (count > 1)} became U+FFFD.")
    if more := replaced[_NAMED:]:
        log(f"{len(more):,} more files have {sum(count for _, count in more):,} such characters.")
    if binary := [name for name, count in losses.items() if not count]:
        log(f"{len(binary):,} binary file{'s' * (len(binary) > 1)} left out, first {binary[0]}.")


def _make(directory: Path, corpus: Corpus, data: DataConfig, tokenizer: Wanted, log: Log, others: Others) -> Encoding:
    """Write tokenizer, shards and meta.json, put them in the place of `directory` in one step, return the encoding."""
    log(f"Preparing {corpus.description} with tokenizer={tokenizer.name}, once.")
    remove(directory)  # a damaged one
    with replacing(directory) as unfinished:
        unfinished.mkdir()
        split = Split(corpus, data.held_out)
        if isinstance(tokenizer, Encoding):
            encoding = tokenizer
        else:
            most = BPE_CHARACTERS * tokenizer.vocab_size // (1 + len(others))
            splits = chain([split], (Split(*other) for other in others))
            encoding = make_tokenizer(tokenizer, chain.from_iterable(each.sample(most) for each in splits))
        save_tokenizer(encoding, unfinished / "tokenizer.json")
        summaries = encode_splits(split, encoding, unfinished, size=corpus.size)
        _report_losses(corpus.losses, log)  # now that all is read: of a large corpus Split reads the beginning only
        if not any(summary["documents"] for summary in summaries.values()):
            raise DataError(
                f"data={data.source} gave no text ({corpus.description}; empty and binary files are left out): "
                "choose another data.path or data source."
            )
        checksum = zlib.crc32((unfinished / "tokenizer.json").read_bytes())
        dtype = token_dtype(encoding.n_vocab).str
        meta = {"corpus": corpus.description, "tokenizer_crc32": checksum, "dtype": dtype, **summaries}
        text = json.dumps({**meta, "crc32": _checksum(meta)}, indent=1)
        (unfinished / "meta.json").write_text(text, encoding="utf-8")
    train, val = (summaries[split] for split in SPLITS)
    per_token = (train["bytes"] + val["bytes"]) / (train["tokens"] + val["tokens"])
    log(
        f"{train['tokens']:,} tokens to train on, {val['tokens']:,} held out, {per_token:.2f} bytes a token "
        f"({train['documents']:,} and {val['documents']:,} documents)."
    )
    return encoding

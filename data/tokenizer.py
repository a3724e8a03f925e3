"""Text to token ids by tiktoken Encodings, all with the special token <|endoftext|>."""

import gzip
import hashlib
import json
import logging
import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import rustbpe  # type: ignore[import-untyped]
import tiktoken

from common.errors import DataError, SettingsError, damage_named, first_line
from common.files import read_foreign
from data.config import TokenizerConfig

END_OF_TEXT = "<|endoftext|>"
_SERVER = "https://openaipublic.blob.core.windows.net"
PUBLISHED = {
    "gpt2": (f"{_SERVER}/gpt-2/encodings/main/vocab.bpe", f"{_SERVER}/gpt-2/encodings/main/encoder.json"),
    "cl100k_base": (f"{_SERVER}/encodings/cl100k_base.tiktoken",),
    "o200k_base": (f"{_SERVER}/encodings/o200k_base.tiktoken",),
}
"""The addresses from which tiktoken downloads the files of an encoding."""
LONGEST = 1 << 18
"""Most characters of a piece: tiktoken's regex engine fails on a million spaces in a row."""
UP_TO_LAST_WORD = re.compile(r"(?s).*\S(?= )")

# bpe merges within the matches of Llama 3's pattern, but a word has the marks of its letters, such as the vowels of
# Hindi, which that pattern cuts off. A word takes the sign or space before it. Signs take the line ends after them.
# Spaces before a word stay together except the last. A number has up to three digits a token.
BPE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)"
    r"|[^\r\n\p{L}\p{N}]?+\p{L}[\p{L}\p{M}]*+"
    r"|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# byte merges nothing, so its pattern only sets the speed: 64 characters at a time are 5x as fast as one.
BYTE_PATTERN = r"(?s:.){1,64}"


def make_tokenizer(config: TokenizerConfig, training_text: Iterable[str]) -> tiktoken.Encoding:
    """Return the encoding that `config` names, for bpe trained on `training_text`.

    Raises DataError if a published encoding cannot be downloaded.
    """
    if config.name == "bpe":
        return train_bpe(training_text, config.vocab_size)
    if config.name == "byte":
        return _encoding("byte", {bytes([byte]): byte for byte in range(256)}, BYTE_PATTERN)
    try:
        return tiktoken.get_encoding(config.name)
    except Exception as error:  # of requests, the disk or a damaged download
        problem = f"tokenizer={config.name} could not be downloaded ({first_line(error)})"
        files = " ".join(f"-o FOLDER/{cached_name(address)} {address}" for address in PUBLISHED[config.name])
        place = f"set TIKTOKEN_CACHE_DIR=FOLDER to a folder with its files, which curl -f --create-dirs {files} fetches"
        other = "" if training_text == () else "; or choose tokenizer=bpe, which needs none"  # () with nanoGPT's ids
        raise DataError(problem, f"{place} on any machine{other}") from error


def cached_name(address: str) -> str:
    """Return the name that the file of an address has in TIKTOKEN_CACHE_DIR."""
    return hashlib.sha1(address.encode()).hexdigest()


def train_bpe(training_text: Iterable[str], vocab_size: int, pattern: str = BPE_PATTERN) -> tiktoken.Encoding:
    """Train a byte-pair encoding of `vocab_size` tokens, <|endoftext|> included.

    A text with too few pairs to merge gives a smaller vocabulary.
    """
    # Train in this thread, although Ctrl-C then waits: 0.3 s for 2,048 tokens of 4 MB, 2.7 s for 32,000 of 62 MB.
    # Another thread would keep this process from ending; another process would survive a kill.
    trainer = rustbpe.Tokenizer()
    logging.getLogger("rustbpe").setLevel(logging.WARNING)  # at INFO it logs each percent
    trainer.train_from_iterator(iter(training_text), vocab_size - 1, pattern=pattern)
    return _encoding("bpe", {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}, pattern)


def _encoding(name: str, ranks: dict[bytes, int], pattern: str) -> tiktoken.Encoding:
    special = {END_OF_TEXT: len(ranks)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def special_names(encoding: tiktoken.Encoding) -> list[str]:
    """Return the special tokens besides <|endoftext|>, whose names in a text are letters here."""
    return [name for name in encoding._special_tokens if name != END_OF_TEXT]


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """Return each id's length in bytes, int64 (V,): 0 for special and unused ids.

    Published encodings have unused ids, which cannot be decoded and must not be sampled.
    """
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def pieces(blocks: Iterable[str]) -> Iterator[str]:
    """Yield the text of `blocks`, of any size, as pieces of at most LONGEST characters.

    A piece ends before a space that follows a non-space. There all patterns in use end a token, so the cut changes no
    token.
    """
    # Add a block in steps of LONGEST: `pending` so never holds more than two pieces.
    pending = ""
    for block in blocks:
        for start in range(0, len(block), LONGEST):
            pending += block[start : start + LONGEST]
            while len(pending) > LONGEST:
                found = UP_TO_LAST_WORD.match(pending, 0, LONGEST + 1)
                end = found.end() if found else LONGEST
                yield pending[:end]
                pending = pending[end:]
    if pending:
        yield pending


def replace_surrogates(text: str) -> tuple[str, int]:
    """Return the text with U+FFFD for lone surrogates, which UTF-8 lacks, and their number."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return re.subn("[\ud800-\udfff]", "\ufffd", text)
    return text, 0


def encode_text(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """Return a text's tokens, uint32 (T,); a literal <|endoftext|> is ordinary text."""
    encoded = [np.empty(0, np.uint32)]  # for an empty text, which has no pieces
    for piece in pieces([replace_surrogates(text)[0]]):
        encoded.append(encoding.encode_to_numpy(piece, disallowed_special=()))
    return np.concatenate(encoded)


def decode_documents(encoding: tiktoken.Encoding, tokens: np.ndarray) -> Iterator[str]:
    """Yield the documents of a text of tokens (N,), where <|endoftext|> begins each."""
    marks = np.flatnonzero(tokens == encoding.eot_token)
    for part in np.split(tokens, marks):
        if len(part):
            yield encoding.decode(part[part != encoding.eot_token].tolist())


def gzip_bits(encoding: tiktoken.Encoding, tokens: np.ndarray) -> float:
    """Return the bits per byte of gzip -9 for a text, or for pieces from all over a long one.

    Line ends stand between its documents, for the bits of a model have those of their ends.
    """
    sample = np.concatenate([piece[:10_000] for piece in np.array_split(tokens, 100)])
    begins = np.flatnonzero(sample == encoding.eot_token)
    documents = np.split(sample, begins[begins > 0])
    texts = [encoding.decode_bytes(document[document != encoding.eot_token].tolist()) for document in documents]
    return 8 * len(gzip.compress(b"\n".join(texts), 9)) / max(1, sum(map(len, texts)))


def save_tokenizer(encoding: tiktoken.Encoding, path: Path) -> None:
    """Write an encoding to `path` as JSON, for read_tokenizer()."""
    path.write_text(json.dumps(tokenizer_content(encoding)))


@lru_cache(maxsize=1)
def tokenizer_content(encoding: tiktoken.Encoding) -> dict[str, Any]:
    """Return an encoding's JSON: tokens by rank in base64, None for an unused rank."""
    by_rank = {rank: b2a_base64(token, newline=False).decode() for token, rank in encoding._mergeable_ranks.items()}
    return {
        "name": encoding.name,
        "pat_str": encoding._pat_str,
        "special_tokens": encoding._special_tokens,
        "mergeable_ranks": [by_rank.get(rank) for rank in range(max(by_rank) + 1)],
    }


def same_tokens(one: tiktoken.Encoding, other: tiktoken.Encoding) -> bool:
    """Return whether two encodings are equal, except for their names."""
    return one is other or tokenizer_content(one) | {"name": ""} == tokenizer_content(other) | {"name": ""}


def same_ids(one: tiktoken.Encoding, other: tiktoken.Encoding) -> bool:
    """Return whether two encodings have the same tokens.

    They may divide a text otherwise: one from an exported folder has its pattern in other words.
    """
    names = ("mergeable_ranks", "special_tokens")
    return all(tokenizer_content(one)[name] == tokenizer_content(other)[name] for name in names)


def read_tokenizer(path: Path) -> tiktoken.Encoding:
    """Return the encoding that save_tokenizer() wrote.

    Raises DataError if the file is missing or damaged, or the encoding loses text.
    """
    remedy = "restore it from a copy, or prepare the data again"
    with damage_named(DataError, "is not a tokenizer that this version can read", remedy, value=path):
        return from_content(json.loads(read_foreign(path)))


def from_content(content: dict[str, Any]) -> tiktoken.Encoding:
    """Return the encoding of tokenizer_content().

    Raises ValueError, or another error, if it is damaged or the encoding loses text.
    """
    tokens = enumerate(content["mergeable_ranks"])
    ranks = {a2b_base64(token, strict_mode=True): rank for rank, token in tokens if token is not None}
    if not content["pat_str"] or content["special_tokens"][END_OF_TEXT] in ranks.values():
        raise ValueError(f"it has no pattern, or {END_OF_TEXT} has a token's id")
    encoding = tiktoken.Encoding(**content | {"mergeable_ranks": ranks})
    check_lossless(encoding)
    return encoding


def check_kept(encoding: Any, vocab_size: int) -> None:
    """Raise SettingsError unless an encoding fits a model and read_tokenizer() would read it."""
    if not isinstance(encoding, tiktoken.Encoding):
        problem = f"the tokenizer is of type {type(encoding).__name__}, and a checkpoint keeps a tiktoken.Encoding"
        raise SettingsError(problem, "make one of its tokens, or leave it out by tokenizer=None")
    if encoding.n_vocab > vocab_size:
        problem = f"the tokenizer has {encoding.n_vocab} ids, and the model {vocab_size}"
        raise SettingsError(problem, "give the tokenizer with which the model was trained")
    remedy = f"give one with the special token {END_OF_TEXT} and all 256 bytes, whose pattern leaves out no letter"
    with damage_named(SettingsError, "cannot be kept in a checkpoint", remedy, value=f"tokenizer {encoding.name}"):
        from_content(tokenizer_content(encoding))


def check_lossless(encoding: tiktoken.Encoding) -> None:
    """Raise ValueError if an encoding loses text."""
    # Try all bytes of UTF-8, and the characters that patterns tell apart.
    sample = "".join(map(chr, [*range(192), *range(192, 0xD800, 64), *range(0xE000, 0x110000, 64)]))
    if encoding.decode(encoding.encode_ordinary(sample)) != sample:
        raise ValueError("it loses text")

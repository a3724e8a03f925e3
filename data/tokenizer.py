"""Text to token ids: every tokenizer is a tiktoken Encoding with the special token <|endoftext|>."""

import hashlib
import json
import pickle
import sys
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import tiktoken
from tqdm import tqdm

from data.config import TokenizerConfig
from data.pieces import pieces, replace_surrogates
from errors import DataError

END_OF_TEXT = "<|endoftext|>"
FORMAT = 1

# bpe merges within the matches of Llama 3's pattern: a word takes the sign or space before it, signs take the line
# ends after them, spaces before a word stay together except the last, and numbers go up to three digits a token.
BPE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)"
    r"|[^\r\n\p{L}\p{N}]?+\p{L}++"
    r"|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# With nothing to merge the pattern sets only the speed: 64 characters at a time is 5x one at a time.
BYTE_PATTERN = r"(?s:.){1,64}"

# bpe learns from so many characters for each token: the default text has 0.03% fewer tokens when it learns from all.
BPE_CHARACTERS = 2_000

_SERVER = "https://openaipublic.blob.core.windows.net/"
_FILES = {
    "gpt2": ("gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"),
    "cl100k_base": ("encodings/cl100k_base.tiktoken",),
    "o200k_base": ("encodings/o200k_base.tiktoken",),
}


# In a process of its own: rustbpe keeps Python's lock for many seconds, in which Ctrl-C would do nothing.
_TRAINER = """
import pickle, sys, rustbpe
size, pattern = pickle.load(sys.stdin.buffer)
trainer = rustbpe.Tokenizer()
trainer.train_from_iterator(iter(lambda: pickle.load(sys.stdin.buffer), ""), size, pattern=pattern)
pickle.dump(trainer.get_mergeable_ranks(), sys.stdout.buffer)
"""


def make_tokenizer(config: TokenizerConfig, training_text: Iterable[str]) -> tiktoken.Encoding:
    """Return the encoding that `config` names. Only bpe reads `training_text`, texts of bounded length.

    Raises DataError when a published encoding cannot be downloaded.
    """
    if config.name == "bpe":
        return train_bpe(training_text, config.vocab_size)
    if config.name == "byte":
        ranks = {bytes([byte]): byte for byte in range(256)}
        return tiktoken.Encoding("byte", pat_str=BYTE_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256})
    try:
        return tiktoken.get_encoding(config.name)
    except Exception as error:  # whatever requests, the disk or a bad download raises
        urls = [_SERVER + file for file in _FILES[config.name]]
        files = " and ".join(f"{url} (as {hashlib.sha1(url.encode()).hexdigest()})" for url in urls)
        raise DataError(
            f"tokenizer={config.name} could not be downloaded ({type(error).__name__}): put a copy of {files} into a "
            "folder and set TIKTOKEN_CACHE_DIR to it, or choose tokenizer=bpe, which needs no download."
        ) from error


def train_bpe(training_text: Iterable[str], vocab_size: int, pattern: str = BPE_PATTERN) -> tiktoken.Encoding:
    """Learn a byte-pair encoding of `vocab_size` tokens, <|endoftext|> included, from texts of bounded length.

    A text with too few pairs to merge gives a smaller vocabulary.
    """
    command = [sys.executable, "-c", _TRAINER]
    bar = tqdm(desc="training the tokenizer", unit="B", unit_scale=True, disable=None)
    with bar, Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True) as process:
        assert process.stdin and process.stdout
        try:
            pickle.dump((vocab_size - 1, pattern), process.stdin)
            for text in training_text:
                pickle.dump(text, process.stdin)
                bar.update(len(text.encode()))
            pickle.dump("", process.stdin)
            process.stdin.flush()
            merged = pickle.load(process.stdout)
        except BaseException:
            process.kill()
            raise
    ranks = {bytes(token): rank for token, rank in merged}
    return tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)})


def copy_encoding(encoding: tiktoken.Encoding) -> tiktoken.Encoding:
    """Return another encoding with the same tokens."""
    ranks, special = encoding._mergeable_ranks, encoding._special_tokens
    return tiktoken.Encoding(encoding.name, pat_str=encoding._pat_str, mergeable_ranks=ranks, special_tokens=special)


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """Return the length in bytes of each id's text, int64 [n_vocab]: 0 for special tokens and for unused ids.

    Published encodings leave ids unused. They cannot be decoded and must never be sampled.
    """
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def encode_text(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """Return the ordinary tokens of any text, uint32 [T]. A literal <|endoftext|> in it is text like any other."""
    parts = [encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces([replace_surrogates(text)])]
    return np.concatenate([np.zeros(0, dtype=np.uint32), *parts])


def encode_documents(encoding: tiktoken.Encoding, texts: list[str], *, continued: bool = False) -> np.ndarray:
    """Return the tokens of documents of bounded length, each after its <|endoftext|>, uint32 [T].

    When `continued`, the first text continues an earlier document and gets no <|endoftext|>. The documents are joined
    and encoded in one call, which is several times faster than a call for each and gives the same tokens, because
    tiktoken never merges across a special token.
    """
    if any(END_OF_TEXT in text for text in texts):
        special = np.array([encoding.eot_token], dtype=np.uint32)
        parts = [part for text in texts for part in (special, encoding.encode_to_numpy(text, disallowed_special=()))]
        return np.concatenate(parts[1:] if continued else parts)
    joined = END_OF_TEXT.join(texts if continued else ["", *texts])
    return encoding.encode_to_numpy(joined, allowed_special={END_OF_TEXT}, disallowed_special=())


def save_tokenizer(encoding: tiktoken.Encoding, path: Path) -> None:
    """Write all that `read_tokenizer` needs to `path`, as JSON."""
    path.write_text(json.dumps(tokenizer_content(encoding)), encoding="utf-8")


@lru_cache(maxsize=1)
def tokenizer_content(encoding: tiktoken.Encoding) -> dict[str, Any]:
    """Return an encoding as plain types: tokens in order of rank, as base64, None for an unused rank."""
    by_rank = {rank: b2a_base64(token, newline=False).decode() for token, rank in encoding._mergeable_ranks.items()}
    return {
        "format": FORMAT,
        "name": encoding.name,
        "pat_str": encoding._pat_str,
        "special_tokens": encoding._special_tokens,
        "mergeable_ranks": [by_rank.get(rank) for rank in range(max(by_rank) + 1)],
    }


def read_tokenizer(path: Path) -> tiktoken.Encoding:
    """Return the encoding that `save_tokenizer` wrote. Raises DataError when the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']}, not {FORMAT}")
        tokens = content["mergeable_ranks"]
        ranks = {a2b_base64(token, strict_mode=True): rank for rank, token in enumerate(tokens) if token is not None}
        special = {str(token): int(rank) for token, rank in content["special_tokens"].items()}
        if len(ranks) != len(tokens) - tokens.count(None) or not all(bytes([byte]) in ranks for byte in range(256)):
            raise ValueError("it lacks a byte or has a token twice")
        if END_OF_TEXT not in special or set(special.values()) & set(ranks.values()):
            raise ValueError(f"it has no id of its own for {END_OF_TEXT}")
        name, pattern = content["name"], content["pat_str"]
        return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a tokenizer this version can read ({type(error).__name__}: {error}): "
            "restore it from a copy, or prepare the data again."
        ) from error

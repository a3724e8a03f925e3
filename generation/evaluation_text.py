"""The text that evaluate.py scores, in the tokens of each checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

import numpy as np
import tiktoken

from data.config import DataConfig, TokenizerConfig
from data.corpus import open_corpus
from data.prepare import prepare
from data.tokenizer import encode_text, tokenizer_content
from errors import DataError
from runs.checkpoint import Checkpoint

Settings = TypeVar("Settings")


def load_text(path: str | None, checkpoints: list[Checkpoint]) -> tuple[str, list[np.ndarray]]:
    """Return what the text is, in words, and its tokens for each checkpoint.

    path: as data.path; None means the validation split of the first checkpoint's run. Raises DataError when there is
    no such text any more, or too little of it.
    """
    tokenizers = [checkpoint.tokenizer for checkpoint in checkpoints]
    if path is not None:
        corpus = open_corpus(DataConfig(source="text", path=path))
        description, documents = corpus.description, ["".join(document) for document in corpus.documents()]
        texts = [_encode(tokenizer, documents) for tokenizer in tokenizers]
    else:
        description, tokens = _validation_split(checkpoints[0])
        texts = [
            tokens if _same(other, tokenizers[0]) else _encode(other, _documents(tokenizers[0], tokens))
            for other in tokenizers
        ]
    if min(map(len, texts)) < 2:
        raise DataError(f"{description} has nothing to score: give a longer text with data.path=...")
    return description, texts


def _validation_split(checkpoint: Checkpoint) -> tuple[str, np.ndarray]:
    settings, remedy = checkpoint.meta["config"], "give a text with data.path=..."
    if "data" not in checkpoint.meta:
        raise DataError(f"{checkpoint.path} was not trained here and has no validation split: {remedy}")
    encoding = checkpoint.tokenizer if checkpoint.meta["own_tokenizer"] else None
    config, tokenizer = _restore(DataConfig, settings["data"]), _restore(TokenizerConfig, settings["tokenizer"])
    try:
        data = prepare(config, tokenizer, encoding=encoding)
    except DataError as error:
        raise DataError(f"the validation split of {checkpoint.path} cannot be read ({error}): {remedy}") from error
    if not _same(data.tokenizer, checkpoint.tokenizer):
        raise DataError(
            f"the text of {checkpoint.path} ({data.description}) has changed and gives other tokens than those it was "
            f"trained on, so there is no validation split to score: {remedy}"
        )
    return f"validation split of {data.description}", np.asarray(data.val[:])


def _restore(schema: Callable[..., Settings], settings: dict[str, Any]) -> Settings:
    """Return saved settings as the dataclass they were, without those that it has no more."""
    known = signature(schema).parameters
    return schema(**{name: value for name, value in settings.items() if name in known})


def _same(one: tiktoken.Encoding, other: tiktoken.Encoding) -> bool:
    return one is other or tokenizer_content(one) | {"name": ""} == tokenizer_content(other) | {"name": ""}


def _encode(tokenizer: tiktoken.Encoding, documents: list[str]) -> np.ndarray:
    """Return the tokens of each document after its <|endoftext|>, as in training."""
    mark = np.array([tokenizer.eot_token], dtype=np.uint32)
    return np.concatenate([mark, *(part for text in documents for part in (encode_text(tokenizer, text), mark))][:-1])


def _documents(tokenizer: tiktoken.Encoding, tokens: np.ndarray) -> list[str]:
    """Return the texts between the <|endoftext|>."""
    parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.eot_token))
    return [tokenizer.decode(part[part != tokenizer.eot_token].tolist()) for part in parts if len(part) > 1]

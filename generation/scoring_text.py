"""The text that checkpoints are judged by, in the tokens of each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import tiktoken

from data.config import DataConfig, TokenizerConfig
from data.corpus import open_corpus
from data.prepare import prepare
from data.tokenizer import encode_text
from errors import DataError
from runs.checkpoint import Checkpoint


def load_text(path: str | None, checkpoints: list[Checkpoint]) -> tuple[str, list[np.ndarray]]:
    """What the text is, in words, and its tokens for each checkpoint.

    path: as data.path; None means the validation split of the first checkpoint's run. Raises
    DataError when there is no such text any more, or too little of it.
    """
    tokenizers = [checkpoint.tokenizer for checkpoint in checkpoints]
    if path is not None:
        corpus = open_corpus(DataConfig(source="text", path=path))
        description, documents = corpus.description, ["".join(document) for document in corpus.documents()]
        texts = [_encode(tokenizer, documents) for tokenizer in tokenizers]
    else:
        description, tokens = _validation_split(checkpoints[0])
        first, *others = tokenizers
        texts = [tokens]
        for other in others:
            texts.append(tokens if _same(other, first) else _encode(other, _documents(first, tokens)))
    if min(map(len, texts)) < 2:
        raise DataError(f"{description} has nothing to score: give a longer text with data.path=...")
    return description, texts


def _validation_split(checkpoint: Checkpoint) -> tuple[str, np.ndarray]:
    settings = checkpoint.meta["config"]
    if "data" not in checkpoint.meta:
        raise DataError(
            f"{checkpoint.path} was not trained here, so it has no validation split: give a text with data.path=..."
        )
    encoding = checkpoint.tokenizer if checkpoint.meta["own_tokenizer"] else None
    try:
        data = prepare(
            _restore(DataConfig, settings["data"]), _restore(TokenizerConfig, settings["tokenizer"]), encoding=encoding
        )
    except DataError as error:
        raise DataError(
            f"the validation split of {checkpoint.path} cannot be had ({error}): give a text with data.path=..."
        ) from error
    if not _same(data.tokenizer, checkpoint.tokenizer):
        raise DataError(
            f"the text of {checkpoint.path} ({data.description}) gives other tokens now than those it was trained on, "
            "so there is no validation split to score: give a text with data.path=..."
        )
    return f"validation split of {data.description}", np.asarray(data.val[:])


def _restore(schema: type, settings: dict[str, Any]) -> Any:
    known = {field.name for field in fields(schema)}
    return schema(**{name: value for name, value in settings.items() if name in known})


def _same(one: tiktoken.Encoding, other: tiktoken.Encoding) -> bool:
    return (one._pat_str, one._mergeable_ranks, one._special_tokens) == (
        other._pat_str,
        other._mergeable_ranks,
        other._special_tokens,
    )


def _encode(tokenizer: tiktoken.Encoding, documents: list[str]) -> np.ndarray:
    """Each document after its <|endoftext|>, as in training."""
    mark = np.array([tokenizer.eot_token], dtype=np.uint32)
    return np.concatenate([mark, *(part for text in documents for part in (encode_text(tokenizer, text), mark))][:-1])


def _documents(tokenizer: tiktoken.Encoding, tokens: np.ndarray) -> list[str]:
    """The texts between the <|endoftext|>."""
    places = np.flatnonzero(tokens == tokenizer.eot_token)
    parts = np.split(tokens, places)
    return [tokenizer.decode(part[part != tokenizer.eot_token].tolist()) for part in parts if len(part) > 1]

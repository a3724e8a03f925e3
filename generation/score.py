"""Scoring: the surprise of a model at each token of a text, and a paired comparison."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from jaxtyping import Float, Int

from common.console import progress_bar
from common.errors import DataError, SettingsError
from common.settings import build
from common.text import flat
from data.batches import Batch, sequences_at
from data.config import DataConfig, TokenizerConfig, check_source
from data.prepare import FOLDER, TOLD_SHARE, has_hash, learned_share, prepare, prepared
from data.tasks import TaskData
from data.texts import Source
from data.tokenizer import decode_documents, encode_text, same_tokens, special_names, token_bytes
from generation.config import AS_TRAINED, TextConfig
from model.gpt import GPT
from runs.checkpoint import TOKENIZER, Checkpoint, code_wanted, readable
from runs.metrics import Evaluation, by_document, ratio_error

PASS_TOKENS = 16_384  # in one forward pass
# The settings that name a text, and those that choose the part of it that is held out.
OF_TEXT = ("source", "path", "name", "subset", "split", "tales")
OF_SPLIT = ("val_fraction", "val_path", "separator", "text_field")
BLOCK_BYTES = 1000  # of text in a block of the comparison: enough for blocks to be nearly independent


@dataclass(frozen=True)
class Scores:
    """A model's surprise at each token of a text except the first, which has no context."""

    nats: Float[np.ndarray, " N"]
    """-log p(token | the tokens before it)."""
    bytes: Int[np.ndarray, " N"]
    """Length of each token's text in UTF-8; 0 for <|endoftext|>."""

    @property
    def total(self) -> Evaluation:
        """The figures of the whole text."""
        return Evaluation.of_tokens(self.nats, self.bytes)


class ScoringParams(NamedTuple):
    """Parameters of scoring.

    Sequences of block_size tokens begin `stride` apart, and each scores only its last `stride` targets. So every token
    past the first sequence is predicted from at least block_size - stride others. None: an eighth of block_size.
    """

    autocast: torch.autocast
    stride: int | None = None
    separator: int | None = None
    """The id of <|endoftext|>, if the model keeps documents apart."""


def score(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    tokens: Int[np.ndarray, " N"],
    params: ScoringParams,
) -> Scores:
    """Return the scores of every token except the first; show a progress bar.

    Raises FloatingPointError if they are not finite.
    """
    # Every pass scores some targets that no other one does, so that each has its nats in the end.
    targets = len(tokens) - 1
    length = min(model.config.block_size, targets)
    batch_size = max(1, PASS_TOKENS // length)
    nats = np.empty(targets, dtype=np.float32)
    with progress_bar(total=targets, desc="scoring", unit="token", unit_scale=True) as bar:
        for starts, scored in passes(targets, length, params.stride, batch_size):
            # A sequence has `length` inputs and one more token, the target of the last.
            sequences = sequences_at(tokens, starts, length + 1)  # (B, length + 1)
            rows = token_nats(model, sequences, scored, params)  # (B, scored)
            for start, row in zip(starts, rows, strict=True):
                end = start + length
                nats[end - scored : end] = row
            bar.update(scored * len(starts))
    if not np.isfinite(nats).all():
        raise FloatingPointError("its logits are not finite")
    return Scores(nats, token_bytes(tokenizer)[tokens[1:]])


def passes(
    targets: int,
    length: int,
    stride: int | None,
    batch_size: int,
) -> Iterator[tuple[Sequence[int], int]]:
    """Yield each forward pass: the starts of its sequences, and how many targets to score.

    Each sequence scores its last targets: the sequences before it have scored the others. stride: the distance between
    starts, at most `length`; None is an eighth of it.
    """
    # The first sequence scores all its targets: no other one has more context for them.
    yield [0], length
    stride = min(stride or max(1, length // 8), length)
    starts = range(stride, targets - length + 1, stride)
    for first in range(0, len(starts), batch_size):
        yield starts[first : first + batch_size], stride
    # The last sequence ends with the text, and overlaps the one before it by more than the others.
    done = len(starts) * stride + length
    if done < targets:
        yield [targets - length], targets - done


@torch.inference_mode()
def token_nats(
    model: GPT, sequences: Int[np.ndarray, "B T1"], scored: int, params: ScoringParams
) -> Float[np.ndarray, "B scored"]:
    """Return the nats of the last `scored` targets of each sequence.

    A sequence may be longer than block_size.
    """
    device = model.device
    batch = Batch.of(sequences.astype(np.int64), params.separator)
    inputs, targets = (torch.from_numpy(ids).to(device) for ids in batch[:2])  # (B, T)
    doc_starts = None if batch.doc_starts is None else torch.from_numpy(batch.doc_starts).to(device)
    with params.autocast:
        if model.is_hooked:
            return model.nats(inputs, targets, doc_starts=doc_starts)[0][:, -scored:].cpu().numpy()
        x = model.hidden(inputs, doc_starts=doc_starts)[:, -scored:]  # (B, scored, C)
        nats, _ = model.nats_of(x, targets[:, -scored:])
    return nats.cpu().numpy()


def compare(first: Scores, second: Scores) -> tuple[float, float | None]:
    """Return the second model's bits per byte minus the first's, and the standard error.

    A text that is hard for one model is hard for the other too, so the error comes from differences. It is the larger
    of two: over documents, whose stretches may be alike, and over blocks of about BLOCK_BYTES, because a document may
    be the whole text. None for a single document and block.
    """
    total = int(first.bytes.sum())
    errors = [document_error(first, second)]

    # The tokenizers may differ, so a token counts for the block in which it begins.
    blocks = max(1, total // BLOCK_BYTES)
    bits = []
    for scores in (first, second):
        begins = np.cumsum(scores.bytes) - scores.bytes  # the first byte of each token
        # Empty tokens at the end count for the last block.
        block = np.minimum(begins * blocks // max(total, 1), blocks - 1)
        bits.append(np.bincount(block, weights=scores.nats, minlength=blocks) / math.log(2))
    differences = (bits[1] - bits[0]) * blocks / total  # bits per byte of each block
    if blocks > 1:
        errors.append(float(differences.std(ddof=1)) / math.sqrt(blocks))
    return float(differences.mean()), max((error for error in errors if error is not None), default=None)


def document_error(first: Scores, second: Scores) -> float | None:
    """Return the standard error over documents of the difference in bits per byte.

    None for a single document, or if the tokenizers divide the text into others.
    """
    (nats, sizes), (others, other_sizes) = (by_document(scores.nats, scores.bytes) for scores in (first, second))
    if not np.array_equal(sizes, other_sizes):
        return None
    error = ratio_error(others - nats, sizes)
    return None if error is None else error / math.log(2)


class Text(NamedTuple):
    """A text to score."""

    description: str
    tokens: list[np.ndarray]
    """Its tokens for each checkpoint."""
    notes: list[str]
    """Facts about its reading: files left out, letters replaced."""


def load_text(text: TextConfig, checkpoints: list[Checkpoint]) -> Text:
    """Return a text to score, its documents each after an <|endoftext|>, as in training.

    It is read as the run of the first checkpoint would. If `text` names none, it is the validation split of that run,
    or of the second one's if the first has none, as a model that was changed and saved. Raises DataError if it is
    gone, or too short.
    """
    owner = checkpoints[0]  # of the validation split
    first = owner.tokenizer
    split = None  # the tokens of the validation split, in the ids of `first`
    notes: list[str] = []
    remedy = "give a longer text with data.path=..."
    if text.is_given:
        source = text_source(text, checkpoints[0])
        source.special = special_names(first)
        documents = ["".join(pieces) for pieces in source.documents()]
        if text.separator != AS_TRAINED:
            source.refuse_idle_separator()
        description = source.describe()
        notes = source.note_lines(is_learned=False)
        remedy = remedy if documents else source.step_to_text(remedy)
    else:
        owner = next((each for each in checkpoints if has_split(each)), owner)
        first = owner.tokenizer
        description, split, notes = validation_split(owner)
        if owner is checkpoints[0]:
            notes += split_notes(checkpoints)
        else:
            notes.append(f"{checkpoints[0].path} has no validation split: this one is of {owner.path}")
        documents = list(decode_documents(first, split))
    # An equal tokenizer takes the tokens of the split as they are: decoded and encoded again they may be others.
    tokens = [
        split
        if split is not None and same_tokens(each.tokenizer, first)
        else encode_documents(each.tokenizer, documents)
        for each in checkpoints
    ]
    if min(map(len, tokens)) < 2:
        raise DataError(f"{description} has nothing to score", remedy)
    # A run's own validation split was compared with its text when that was prepared.
    own = None if text.is_given else owner.meta.data
    for checkpoint, ids in zip(checkpoints, tokens, strict=True):
        share = share_learned_by(checkpoint, ids, own)
        if share >= TOLD_SHARE:
            notes.append(f"{share:.0%} of this text is in the text that {checkpoint.path} has learned")
    return Text(description, tokens, notes)


def text_source(text: TextConfig, checkpoint: Checkpoint) -> Source:
    """Return the source of a text; what it leaves open is as in a checkpoint's run."""
    trained = checkpoint.meta.config.get("data") or {}
    with readable(checkpoint.path):
        of_run = {name: trained[name] for name in ("text_field", "separator") if name in trained}
        config = build(DataConfig, of_run)
    return Source(
        DataConfig(
            source=text.source or "files",
            path=text.path,
            text_field=text.text_field or config.text_field,
            separator=config.separator if text.separator == AS_TRAINED else text.separator,
        )
    )


def share_learned_by(checkpoint: Checkpoint, tokens: np.ndarray, own: str | None) -> float:
    """Return the share of a text, tokens (N,), that a checkpoint's weights have learned, or 0.

    own: the fingerprint of a text whose held-out part it is, which does not count.
    """
    others = [text for text in checkpoint.meta.texts if text != own]
    with suppress(SettingsError):
        return learned_share(data_config(checkpoint), others, tokens, checkpoint.tokenizer)
    return 0.0


def trained_here(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is of a run on text that is where it was trained."""
    path = checkpoint.path
    run = path.parents[1] if path.parent.name == "checkpoints" else path
    return bool(checkpoint.meta.data) and checkpoint.meta.home == str(run.resolve())


def data_config(checkpoint: Checkpoint) -> DataConfig:
    """Return the settings of a checkpoint's text, or the default ones.

    A checkpoint from elsewhere has these. It must not choose which files of this machine are read: of its text there
    are only the tokens, if the cache of this machine has them.
    """
    if not trained_here(checkpoint):
        return DataConfig()
    with readable(checkpoint.path):
        return build(DataConfig, flat(checkpoint.meta.config["data"]))


def has_split(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint's run has a validation split here, as one that was moved may."""
    return trained_here(checkpoint) or prepared(DataConfig(), checkpoint.meta.data) is not None


def validation_split(checkpoint: Checkpoint) -> tuple[str, np.ndarray, list[str]]:
    """Return the description and the tokens of a run's validation split, and notes about them.

    They are the tokens that the run prepared, also if its text has changed since. If these are gone, the text is
    prepared again. Raises DataError if it is gone too, or if it gives other tokens.
    """
    meta = checkpoint.meta
    path = checkpoint.path
    remedy = "give a text with data.path=..."
    if not has_split(checkpoint):
        remedy += ", or with against=... a run trained here"
        fault = "was not trained here and has no validation split"
        if FOLDER.fullmatch(meta.data):  # its own data.cache_dir may have the tokens
            cache = Path(DataConfig().cache_dir, "tokens")
            fault = f"is not where it was trained, and its validation split is not in {cache}"
            remedy = f"copy {meta.data} there from the folder tokens of its data.cache_dir, {remedy}"
        raise DataError(f"{path} {fault}", remedy)
    source = data_config(checkpoint)
    with readable(path):
        tokenizer = build(TokenizerConfig, meta.config["tokenizer"])
    try:
        # Prepared tokens have the checkpoint's ids: its tokenizer saves a download.
        given = meta.own_tokenizer or source.source == "nanogpt"
        data = prepared(source, meta.data) or prepare(
            source, tokenizer, encoding=checkpoint.tokenizer if given else None
        )
        if data.fingerprint == meta.data and not same_tokens(data.tokenizer, checkpoint.tokenizer):
            # Another version has made the tokens of the text anew, by a tokenizer of its own.
            data = replace(prepare(source, tokenizer, encoding=checkpoint.tokenizer), fingerprint=meta.data)
    except DataError as error:
        raise DataError(f"the validation split of {path} cannot be read ({error.problem})", remedy) from error
    if not same_tokens(data.tokenizer, checkpoint.tokenizer):
        problem = f"the text of {path} ({data.description}) has changed and gives other tokens than those it learned"
        raise DataError(f"{problem}, so there is no validation split to score", remedy)
    notes = []
    if data.fingerprint != meta.data and not has_hash(data, meta.text_hash):
        notes.append(
            "the text or its modification time has changed since training, and the tokens of then are gone: "
            "the run may have trained on a part of this split"
        )
    return f"validation split of {data.description}", np.asarray(data.val[:]), notes


def split_notes(checkpoints: list[Checkpoint]) -> list[str]:
    """Return a note if the last checkpoint's run held out another part of the first one's text."""
    with readable(checkpoints[-1].path):
        first, other = (dict(checkpoint.meta.config["data"]) for checkpoint in (checkpoints[0], checkpoints[-1]))
    texts = [{name: data.get(name) for name in OF_TEXT} for data in (first, other)]
    splits = [{name: data.get(name) for name in OF_SPLIT} for data in (first, other)]
    if texts[0] != texts[1] or splits[0] == splits[1]:
        return []
    changed = ", ".join(f"data.{name}" for name in OF_SPLIT if splits[0][name] != splits[1][name])
    return [f"{checkpoints[-1].path} has another {changed}: it may have trained on a part of this split"]


def learned_task(checkpoint: Checkpoint) -> TaskData:
    """Return the synthetic task that a checkpoint has learned."""
    with readable(checkpoint.path):
        settings = checkpoint.meta.config
        source = str(settings["data"]["source"])
    # A task of somebody's own file is no damage: ask for the file.
    with code_wanted(checkpoint.path, checkpoint.meta):
        check_source(source)
    # A text without a tokenizer is: name the missing file.
    with readable(checkpoint.path):
        data = build(DataConfig, flat(settings["data"]))
        if not data.is_task:
            raise KeyError(TOKENIZER)
        block_size = checkpoint.model.config.block_size
        return TaskData(data.source, data.task, block_size, settings["batch_size"], settings["seed"])


def encode_documents(tokenizer: tiktoken.Encoding, documents: list[str]) -> np.ndarray:
    """Return the tokens of all documents, each after an <|endoftext|>, as in training."""
    separator = np.array([tokenizer.eot_token], dtype=np.uint32)
    parts = [separator[:0]]  # concatenate needs an array, even without a document
    for text in documents:
        parts += [separator, encode_text(tokenizer, text)]
    return np.concatenate(parts)

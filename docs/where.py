"""Tell where in a window, and on which text, forms of attention differ.

    python docs/where.py FOLDER

FOLDER holds runs of one text with one tokenizer and one block_size, for example a sweep. For each variant of attention,
at the learning rate whose mean loss is lowest, the table has the bits per byte of the validation text:

- in each quarter of a window. Windows do not overlap, so a token of the first quarter has few tokens before it;
- on repeated text and on the rest. A token is repeated if it ends within a run of 16 words that the training text has
  too. Words are separated by white space;
- on known and on new pairs. A token's pair is known if the same two tokens, the one before it and it, occur earlier in
  the window, so that a head can find it there.

The mean is over seeds, and ± is the standard error of the difference from attention=sdpa, paired by seed. Writes
FOLDER/where.csv.
"""

import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import tiktoken
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.errors import SettingsError
from common.files import from_json, replace_text
from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from data.tokenizer import token_bytes
from generation.score import ScoringParams, token_nats
from runs.checkpoint import Checkpoint, open_checkpoint
from sweeps.leaderboard import csv_text, read_jobs

WORDS = 16
QUARTERS = 4
COLUMNS = (
    "quarter 1",
    "quarter 2",
    "quarter 3",
    "quarter 4",
    "repeated",
    "not repeated",
    "pair known",
    "pair new",
    "all",
)


def main(folder: Path) -> None:
    # Group the finished runs by variant and learning rate.
    runs: dict[tuple[str, float], dict[int, Path]] = defaultdict(dict)
    losses: dict[tuple[str, float], list[float]] = defaultdict(list)
    for job in read_jobs(folder):
        if job.status == "finished" and job.summary.val_loss is not None:
            config = open_checkpoint(str(job.directory)).meta.config
            key = (variant_of(config), config["optimizer"]["lr"])
            runs[key][config["seed"]] = job.directory
            losses[key].append(job.summary.val_loss)
    if not runs:
        raise SettingsError(f"{folder} has no finished run", "give the folder of a sweep")

    # Choose each variant's rate among those with the most seeds.
    best: dict[str, tuple[str, float]] = {}
    for key in sorted(losses, key=lambda each: (-len(losses[each]), statistics.mean(losses[each]))):
        best.setdefault(key[0], key)

    # Compare each seed of a variant with the same seed of the baseline.
    marks: np.ndarray | None = None
    figures: dict[str, dict[int, list[float]]] = {}
    for variant, key in best.items():
        figures[variant] = {}
        for seed, run in runs[key].items():
            checkpoint = open_checkpoint(str(run))
            tokens, trained = splits(checkpoint)
            if marks is None:
                marks = repeated(checkpoint.tokenizer, trained, tokens)
                print(f"{marks.mean():.2%} of the validation tokens end in a run of {WORDS} words of the training text")
                windows = windows_of(tokens, checkpoint.model.config.block_size)
                share = np.mean([known_pairs(window).mean() for window in windows])
                print(f"{share:.2%} of them and the token before occur in this order earlier in their window")
            figures[variant][seed] = bits(checkpoint, tokens, marks)
    base = figures["sdpa"]
    table = [["variant", "lr", "seeds", *(cell for name in COLUMNS for cell in (name, f"± {name}"))]]
    for variant, by_seed in sorted(figures.items(), key=lambda item: np.mean([each[-1] for each in item[1].values()])):
        row = [variant, f"{best[variant][1]:g}", str(len(by_seed))]
        for column in range(len(COLUMNS)):
            row.append(f"{statistics.mean(each[column] for each in by_seed.values()):.4f}")
            differences = [by_seed[seed][column] - base[seed][column] for seed in by_seed if seed in base]
            row.append(error_of(differences) if variant != "sdpa" else "–")
        table.append(row)
        print(*row, sep="  ", flush=True)
    replace_text(folder / "where.csv", csv_text(table))


def variant_of(config: dict) -> str:
    """Return the attention and what else of the model a comparison of forms varies."""
    model = config["model"]
    extra = "" if model["position"] == "rope" else f" model.position={model['position']}"
    return f"{model['attention']}{extra}"


def splits(checkpoint: Checkpoint) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the validation and of the training split, (N,) each."""
    config = checkpoint.meta.config
    data = prepare(from_json(DataConfig, config["data"]), from_json(TokenizerConfig, config["tokenizer"]))
    return np.asarray(data.val[:]), np.asarray(data.train[:])


def repeated(tokenizer: tiktoken.Encoding, trained: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return whether each of the N tokens ends within a run of WORDS words that `trained` has too, bool (N,)."""
    seen = {tuple(run) for run in runs_of(text_of(tokenizer, trained).split())}
    text = text_of(tokenizer, tokens)
    words = text.split()
    is_repeated = np.zeros(len(words), dtype=bool)
    for start, run in enumerate(runs_of(words)):
        if tuple(run) in seen:
            is_repeated[start : start + WORDS] = True

    # The word of each byte, by the starts of the words; the last byte of a token gives its word.
    data = np.frombuffer(text, dtype=np.uint8)
    is_space = np.isin(data, np.frombuffer(b" \t\n\r\x0b\x0c", dtype=np.uint8))
    begins = ~is_space & np.concatenate([[True], is_space[:-1]])
    word = np.maximum(np.cumsum(begins) - 1, 0)
    ends = np.cumsum([len(tokenizer.decode_single_token_bytes(token)) for token in tokens.tolist()])
    return is_repeated[word[ends - 1]]


def text_of(tokenizer: tiktoken.Encoding, tokens: np.ndarray) -> bytes:
    return tokenizer.decode_bytes(tokens.tolist())


def runs_of(words: list[bytes]) -> list[list[bytes]]:
    """Return each run of WORDS words."""
    return [words[start : start + WORDS] for start in range(len(words) - WORDS + 1)]


@torch.inference_mode()
def bits(checkpoint: Checkpoint, tokens: np.ndarray, marks: np.ndarray) -> list[float]:
    """Return the bits per byte of each of COLUMNS, over whole windows that do not overlap."""
    length = checkpoint.model.config.block_size
    params = ScoringParams(torch.autocast("cpu", enabled=False))
    windows = windows_of(tokens, length)
    nats = np.concatenate([token_nats(checkpoint.model, window[None], length, params) for window in windows])
    sizes = token_bytes(checkpoint.tokenizer)[windows[:, 1:]]
    targets = marks[1 : nats.size + 1].reshape(nats.shape)
    quarter = np.arange(length) * QUARTERS // length
    masks = [np.broadcast_to(quarter == index, nats.shape) for index in range(QUARTERS)]
    known = np.stack([known_pairs(window) for window in windows])
    masks += [targets, ~targets, known, ~known, np.ones_like(targets)]
    return [float(nats[mask].sum() / sizes[mask].sum() / math.log(2)) if mask.any() else math.nan for mask in masks]


def windows_of(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the whole windows that do not overlap but for a target, (windows, length + 1)."""
    starts = range(0, len(tokens) - length, length)
    return np.stack([tokens[start : start + length + 1] for start in starts])


def known_pairs(window: np.ndarray) -> np.ndarray:
    """Return whether each target and the token before it occur earlier in the window (T + 1,), bool (T,)."""
    seen: set[tuple[int, int]] = set()
    known = []
    for pair in zip(window[:-1].tolist(), window[1:].tolist(), strict=True):
        known.append(pair in seen)
        seen.add(pair)
    return np.array(known)


def error_of(differences: list[float]) -> str:
    """Return the mean difference and its standard error."""
    if len(differences) < 2:
        return f"{statistics.mean(differences):+.4f}" if differences else "–"
    return f"{statistics.mean(differences):+.4f} ± {statistics.stdev(differences) / math.sqrt(len(differences)):.4f}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/where.py FOLDER")
    try:
        main(Path(sys.argv[1]))
    except SettingsError as error:
        sys.exit(f"error: {error}")

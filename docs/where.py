"""Tell where in a window, and on which text, forms of attention differ.

    python docs/where.py FOLDER [code=FILE]

FOLDER holds runs of one text, tokenizer, block_size, width and length, for example a sweep. For each variant of
attention, at the learning rate whose mean loss is lowest, the table has the bits per byte of the validation text:

- in each quarter of a window. Windows do not overlap, so a token of the first quarter has few tokens before it;
- on repeated text and on the rest. A token is repeated if it ends within a run of 16 words that the training text has
  too. Words are separated by white space;
- on known and on new pairs. A token's pair is known if the same two tokens, the one before it and it, occur earlier in
  the window, so that a head can find it there.

The mean is over seeds, and ± is the standard error of the difference from the first variant, paired by seed.
Writes FOLDER/where.csv.
"""

import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import tiktoken

sys.path.insert(0, str(Path(__file__).parents[1]))
from cli.eval import scoring_params
from common.console import progress_bar
from common.errors import SettingsError
from common.files import replace_text
from common.mistakes import mistakes_explained
from common.settings import build
from common.text import flat
from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare, prepared
from data.tokenizer import token_bytes
from docs.command import arguments_asked, existing
from docs.compare import RATE, SIZE, refuse_several, variants
from docs.recorded import baseline_first
from generation.config import EvalConfig
from generation.score import token_nats
from runs.checkpoint import Checkpoint, open_checkpoint
from sweeps.leaderboard import Job, csv_text

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
    jobs = [job for job in baseline_first(folder) if job.status == "finished" and job.summary.val_loss is not None]
    if not jobs:
        raise SettingsError(f"{folder} has no finished run", "give the folder of a sweep")
    refuse_others(folder, jobs)
    runs: dict[tuple[str, str], list[Job]] = defaultdict(list)
    for variant, job in zip(variants(jobs), jobs, strict=True):
        runs[variant, job.settings.get(RATE, "")].append(job)

    # Choose each variant's rate among those with the most seeds.
    best: dict[str, tuple[str, list[Job]]] = {}
    for (variant, rate), group in sorted(runs.items(), key=lambda item: (-len(item[1]), mean_loss(item[1]))):
        best.setdefault(variant, (rate, group))

    # Tell the tokens apart, which all runs have.
    baseline = variants(jobs)[0]
    windows, masks = read_tokens(open_checkpoint(str(jobs[0].directory)))

    # Compare each seed of a variant with the same seed of the baseline.
    figures: dict[str, dict[int | None, list[float]]] = defaultdict(dict)
    with progress_bar(total=sum(len(group) for _, group in best.values()), desc="scoring", unit="run") as bar:
        for variant, (_, group) in best.items():
            for job in group:
                figures[variant][job.summary.seed] = bits(open_checkpoint(str(job.directory)), windows, masks)
                bar.update()
    base = figures[baseline]
    table = [["variant", "lr", "seeds", *(cell for name in COLUMNS for cell in (name, f"± {name}"))]]
    for variant, by_seed in sorted(figures.items(), key=lambda item: np.mean([each[-1] for each in item[1].values()])):
        row = [variant, best[variant][0], str(len(by_seed))]
        for column in range(len(COLUMNS)):
            row.append(f"{statistics.mean(each[column] for each in by_seed.values()):.4f}")
            differences = [by_seed[seed][column] - base[seed][column] for seed in by_seed if seed in base]
            row.append(error_of(differences) if variant != baseline else "–")
        table.append(row)
        print(*row, sep="  ", flush=True)
    replace_text(folder / "where.csv", csv_text(table))


def refuse_others(folder: Path, jobs: list[Job]) -> None:
    """Raise SettingsError for runs of other tokens, windows, widths or lengths: they would count as seeds of one."""
    if len({job.summary.text_hash for job in jobs} - {None}) > 1:
        problem = f"{folder} has runs of several texts or tokenizers"
        raise SettingsError(problem, "give a folder whose runs have one of each")
    refuse_several(folder, jobs, "model.block_size", SIZE, "max_steps")


def mean_loss(jobs: list[Job]) -> float:
    return statistics.mean(job.summary.val_loss or 0 for job in jobs)


def read_tokens(checkpoint: Checkpoint) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the windows of the validation text (W, T + 1), and a mask of the targets (W, T) for each of COLUMNS.

    Prints the shares of repeated tokens and of known pairs.
    """
    # Take the tokens that the run has read, also if its text has changed since; a model of init_from has its own ids.
    settings = checkpoint.meta.config
    config, tokenizer = build(DataConfig, flat(settings["data"])), build(TokenizerConfig, settings["tokenizer"])
    data = prepared(config, checkpoint.meta.data)
    if data is None:
        print("The tokens of the run are no longer in the cache: these are of its text as it is now.")
        data = prepare(config, tokenizer, encoding=checkpoint.encoding)
    tokens = np.asarray(data.val[:])
    marks = repeated(checkpoint.tokenizer, np.asarray(data.train[:]), tokens)
    print(f"{marks.mean():.2%} of the validation tokens end in a run of {WORDS} words of the training text")

    length = checkpoint.model.config.block_size
    windows = windows_of(tokens, length)
    known = np.stack([known_pairs(window) for window in windows])
    print(f"{known.mean():.2%} of them and the token before occur in this order earlier in their window")
    targets = marks[1 : known.size + 1].reshape(known.shape)
    quarter = np.arange(length) * QUARTERS // length
    quarters = [np.broadcast_to(quarter == index, known.shape) for index in range(QUARTERS)]
    return windows, [*quarters, targets, ~targets, known, ~known, np.ones_like(known)]


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


def bits(checkpoint: Checkpoint, windows: np.ndarray, masks: list[np.ndarray]) -> list[float]:
    """Return the bits per byte of each of COLUMNS."""
    length = windows.shape[1] - 1
    params = scoring_params(checkpoint, EvalConfig(precision="fp32"))
    nats = np.concatenate([token_nats(checkpoint.model, window[None], length, params) for window in windows])
    sizes = token_bytes(checkpoint.tokenizer)[windows[:, 1:]]
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
    """Return the mean difference and its standard error; – for a share without tokens."""
    if any(map(math.isnan, differences)):
        return "–"
    if len(differences) < 2:
        return f"{statistics.mean(differences):+.4f}" if differences else "–"
    return f"{statistics.mean(differences):+.4f} ± {statistics.stdev(differences) / math.sqrt(len(differences)):.4f}"


if __name__ == "__main__":
    with mistakes_explained():
        (folder,) = arguments_asked(__doc__, "FOLDER")
        main(existing(folder))

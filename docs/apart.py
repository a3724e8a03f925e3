"""Take a trained model apart: the cost of each head and MLP that is off, and its role.

    python docs/apart.py [RUN [TEXT]] [code=FILE]
    python docs/apart.py FILE.json …

RUN is a run's folder or a checkpoint, the newest run by default, and TEXT a file or a folder, by default the run's
validation text. Prints tables with a row or a column for each part, and for all heads of each layer together:

- the bits per byte that the text needs more without it, at all tokens and at those that the window has shown before, ±
  the standard error of the difference over documents; and the bits per byte if the model ended after each layer. Of a
  long text windows of 16,384 tokens are read, evenly spaced;
- for a model of data=tales without TEXT, by kind of word: the bits that a word needs more which the tale has named
  before, ± over tales; the share of the answer that the part carries from one tale to another; the chance of the word
  after each layer; and each head's attention to the earlier mentions;
- for a model of a synthetic task the nats per answer, and for data=induction the share of the answer that it carries.

Parts are named as on a model's page: L1 H2 is layer 0, head 1. The figures are written beside the checkpoint, to
step_N.apart.json, those of a TEXT to a file of its own. Given such files, prints their tables; of several, the part
that carries each kind of word.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from cli.eval import scoring_params
from common.errors import SettingsError, first_line
from common.files import replace_text
from common.mistakes import answer_help, mistakes_explained
from common.text import seen_from_here, visible
from data.batches import Batch, sequences_at
from data.tales import GRAMMAR, WORDS
from data.tokenizer import encode_text, token_bytes
from docs.probes import figures_file, run_and_text, source_line
from generation.config import EvalConfig, TextConfig
from generation.score import ScoringParams, learned_task, load_text, token_nats
from model.apart import Edit, Part, edited, parts, results, streams, without
from model.attention.code import run_codes
from model.gpt import GPT
from model.heads import for_each_layer
from runs.checkpoint import Checkpoint, open_checkpoint
from runs.metrics import finite

SCORED = 1 << 14  # tokens of text
BATCH = 32  # sequences in a forward pass
TALES = 250  # whole tales, for the kinds of words
PAIRS = 80  # pairs of tales or of sequences, for patching
KINDS = {
    "colour": "colour",
    "toy": "toy",
    "elder": "parent",
    "treasure": "treasure",
    "name1": "hero",
    "name2": "friend",
}
"""The words of a tale that return, by their slots in the grammar."""
Figures = dict[str, Any]
Figure = tuple[float, float]
"""A mean and its standard error."""


def take_apart(checkpoint: Checkpoint, path: str | None = None) -> Figures:
    """Return all figures of a model; path: a text, as in load_text()."""
    model = checkpoint.model.eval()
    figures: Figures = {
        "parts": [str(part) for part in parts(model)],
        "heads": [len(heads) for heads in by_layer(model)],
    }
    params = scoring_params(checkpoint, EvalConfig())._replace(autocast=torch.autocast("cpu", enabled=False))
    if checkpoint.encoding is None and path is None:
        task = learned_task(checkpoint)
        batches = [*task.validation_batches(BATCH)]
        inputs, targets = (
            torch.from_numpy(np.concatenate(each)) for each in zip(*(b[:2] for b in batches), strict=True)
        )
        figures |= {"task": task.name} | task_figures(model, inputs, targets)
        if task.name == "induction":
            figures |= induction_figures(model, inputs[:PAIRS])
        return figures

    text = load_text(TextConfig(path=path), [checkpoint])
    figures |= {"text": text.description} | text_figures(model, checkpoint.tokenizer, text.tokens[0], params)
    source = checkpoint.meta.config.get("data", {}).get("source")
    if source == "tales" and path is None:
        figures |= tales_figures(model, checkpoint.tokenizer, text.tokens[0], params)
    return figures


def by_layer(model: GPT) -> list[list[Part]]:
    """Return the heads of each layer."""
    return [
        [part for part in parts(model) if part.layer == layer and part.head is not None]
        for layer in range(len(model.blocks))
    ]


def variants(model: GPT) -> dict[str, list[Part]]:
    """Return the parts that are off together, by name."""
    found: dict[str, list[Part]] = {"all": []} | {str(part): [part] for part in parts(model)}
    return found | {f"L{layer + 1} heads": heads for layer, heads in enumerate(by_layer(model)) if len(heads) > 1}


# Without a part.


def text_figures(model: GPT, tokenizer: tiktoken.Encoding, tokens: np.ndarray, params: ScoringParams) -> Figures:
    """Return the bits per byte that a text needs more without each part.

    Of a long text evenly spaced windows are read."""
    # Choose the windows, and tell for each target its bytes, its document, and whether its window has shown it.
    T = min(model.config.block_size, len(tokens) - 1)
    windows = (len(tokens) - 1) // T
    count = min(windows, max(1, SCORED // T))
    starts = [number * windows // count * T for number in range(count)]
    rows = sequences_at(tokens, starts, T + 1)  # (W, T + 1)
    sizes = token_bytes(tokenizer)[rows[:, 1:]]  # (W, T)
    document = np.cumsum(tokens == tokenizer.eot_token)
    documents = np.stack([document[start + 1 : start + T + 1] for start in starts])
    seen = shown_before(rows, Batch.of(rows, params.separator).doc_starts)

    # Read them with each variant.
    nats = {}
    for name, off in variants(model).items():
        with without(model, *off):
            nats[name] = np.concatenate(
                [token_nats(model, rows[i : i + BATCH], T, params) for i in range(0, count, BATCH)]
            )
    whole = nats.pop("all")
    masks = {"all tokens": np.ones_like(seen), "seen before": seen}
    loss = {name: ratio(whole / math.log(2), sizes, documents, mask) for name, mask in masks.items()}
    change = {
        part: {name: ratio((each - whole) / math.log(2), sizes, documents, mask) for name, mask in masks.items()}
        for part, each in nats.items()
    }

    # Rank the parts by one window, as a page shows one text, and by all.
    single = [str(part) for part in parts(model)]
    effects = np.stack([(nats[name] - whole).mean(1) for name in single], 1)  # (W, parts)
    correlations = [rank_correlation(window, effects.mean(0)) for window in effects]
    quantiles = np.quantile(correlations, (0.5, 0.05)).tolist() if len(single) > 2 and count > 1 else None
    return {
        "tokens": int(whole.size),
        "loss": loss,
        "change": change,
        "rank_correlation": quantiles,
        "lens": lens_of_text(model, rows, sizes, documents, params),
    }


def shown_before(rows: np.ndarray, doc_starts: np.ndarray | None) -> np.ndarray:
    """Return whether each target (W, T) occurs among the inputs that its query sees."""
    found = np.zeros((len(rows), rows.shape[1] - 1), dtype=bool)
    for window, row in enumerate(rows):
        last: dict[int, int] = {}  # the latest place of each id
        for place, (token, target) in enumerate(zip(row[:-1].tolist(), row[1:].tolist(), strict=True)):
            last[token] = place
            start = 0 if doc_starts is None else doc_starts[window, place]
            found[window, place] = last.get(target, -1) >= start
    return found


def ratio(values: np.ndarray, sizes: np.ndarray, clusters: np.ndarray, mask: np.ndarray) -> Figure:
    """Return Σ values / Σ sizes over a mask, and its standard error over clusters.

    The error is NaN for a single cluster."""
    _, cluster = np.unique(clusters[mask], return_inverse=True)
    totals = np.bincount(cluster, values[mask])
    weights = np.bincount(cluster, sizes[mask])
    count = np.count_nonzero(weights)
    if not count:
        return math.nan, math.nan
    mean = totals.sum() / weights.sum()
    if count < 2:
        return float(mean), math.nan
    residuals = totals - mean * weights
    error = math.sqrt((residuals**2).sum() * count / (count - 1)) / abs(weights.sum())
    return float(mean), float(error)


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's correlation of two lists without ties."""
    return float(np.corrcoef(x.argsort().argsort(), y.argsort().argsort())[0, 1])


@torch.no_grad()
def lens_of_text(
    model: GPT, rows: np.ndarray, sizes: np.ndarray, documents: np.ndarray, params: ScoringParams
) -> Figures:
    """Return the bits per byte of the logit lens after each stage."""
    found = defaultdict(list)
    for first in range(0, len(rows), BATCH):
        batch = Batch.of(rows[first : first + BATCH], params.separator)
        inputs, targets, starts = (None if ids is None else torch.from_numpy(ids) for ids in batch)
        for stage, stream in zip(stages(model), streams(model, inputs, starts), strict=True):
            nats = F.cross_entropy(model.logits(stream).transpose(1, 2), targets, reduction="none")
            found[stage].append(nats.numpy())
    everywhere = np.ones_like(sizes, dtype=bool)
    return {
        stage: ratio(np.concatenate(nats) / math.log(2), sizes, documents, everywhere) for stage, nats in found.items()
    }


def stages(model: GPT) -> list[str]:
    """Return the names of the streams."""
    return [
        "embedding",
        *(f"L{layer + 1} {part}" for layer in range(len(model.blocks)) for part in ("attention", "MLP")),
    ]


@torch.no_grad()
def task_figures(model: GPT, inputs: Tensor, targets: Tensor) -> Figures:
    """Return the nats per answer of a task, and those that it needs more without each part.

    The errors are over sequences."""
    found = {}
    for name, off in variants(model).items():
        with without(model, *off):
            logits = torch.cat([model(each) for each in inputs.split(BATCH)])  # (B, T, V)
        nats = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1, reduction="none")
        found[name] = nats.sum(1).numpy() / (targets != -1).sum(1).numpy()
    whole = found.pop("all")
    return {
        "loss": {"answers": mean_of(whole)},
        "change": {name: {"answers": mean_of(nats - whole)} for name, nats in found.items()},
    }


def mean_of(values: np.ndarray | Tensor) -> Figure:
    """Return the mean of independent values, and its standard error."""
    values = np.asarray(values, dtype=np.float64)
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


# Patching.


class Pairs(NamedTuple):
    """Sequences in pairs, equal but for one fact. The model answers each at one position."""

    ids: Tensor
    """(N, T)"""
    other: Tensor
    """(N, T)"""
    places: Tensor
    """The positions whose results go from `other` into `ids`, (N, n)."""
    answers: Tensor
    """The position that predicts the answer, (N)."""
    own_answer: Tensor
    """(N)"""
    other_answer: Tensor
    """(N)"""


@torch.no_grad()
def carried(model: GPT, pairs: Pairs) -> dict[str, Figure]:
    """Return the share of the answer that each part carries: activation patching.

    (Wang et al. 2022.) The sequence gets the part's result of the other one, at some positions. The share is that of
    the difference in logit(other answer) - logit(own answer) between the two sequences: 0 if the answer stays, 1 if it
    is the other's. It is NaN if the model does not tell the two apart, to three standard errors.
    """
    N = torch.arange(len(pairs.ids))

    def difference(ids: Tensor) -> Tensor:
        logits = model(ids)[N, pairs.answers]  # (N, V)
        return (logits.gather(1, pairs.other_answer[:, None]) - logits.gather(1, pairs.own_answer[:, None]))[:, 0]

    own = difference(pairs.ids)
    gap = (difference(pairs.other) - own).double().numpy()
    mean_gap, error = mean_of(gap)
    if not mean_gap > 3 * error:
        return {name: (math.nan, math.nan) for name in variants(model) if name != "all"}
    replacements = results(model, pairs.other)

    def patch(part: Part) -> Edit:
        def edit(result: Tensor) -> Tensor:
            result[N[:, None], pairs.places] = replacements[part][N[:, None], pairs.places]
            return result

        return edit

    found = {}
    for name, together in variants(model).items():
        with edited(model, {part: patch(part) for part in together}):
            moved = (difference(pairs.ids) - own).double().numpy()
        found[name] = ratio(moved, gap, np.arange(len(gap)), np.ones(len(gap), dtype=bool))
    found.pop("all")
    return found


def induction_figures(model: GPT, inputs: Tensor) -> Figures:
    """Return the share of each part in both steps of data=induction, and each head's weights.

    which id           the id after the first mark is another one; results of the last position go over
    where the mark is  the first mark stands elsewhere; results of the two positions after these places go over, no id
                       does. The other answer is the id after the other place

    These are the two steps of induction heads (Olsson et al. 2022): a token learns which one is before it, and the
    later mark finds the token that has a mark before it.
    """
    random = Random(1)
    N, T = inputs.shape
    last = torch.full((N,), T - 1)
    mark = (inputs[:, :-1] == 0).int().argmax(1)  # of the first mark
    answer = inputs[torch.arange(N), mark + 1]

    # Which id: replace the id after the mark.
    other_answer = torch.tensor(
        [random.choice([i for i in range(1, model.config.vocab_size) if i != a]) for a in answer.tolist()]
    )
    changed = inputs.clone()
    changed[torch.arange(N), mark + 1] = other_answer
    which = Pairs(inputs, changed, last[:, None], last, answer, other_answer)

    # Where: move the mark, at least two places away, so that neither mark follows the other's place.
    places = [random.choice([p for p in range(T - 2) if abs(p - m) > 1]) for m in mark.tolist()]
    elsewhere = torch.tensor(places)
    moved = inputs.clone()
    moved[torch.arange(N), mark] = inputs[torch.arange(N), elsewhere]
    moved[torch.arange(N), elsewhere] = 0
    after = torch.stack((mark + 1, elsewhere + 1), 1)
    where = Pairs(inputs, moved, after, last, answer, inputs[torch.arange(N), elsewhere + 1])
    share = {"which id": carried(model, which), "where the mark is": carried(model, where)}
    weights = {
        "which id": looks(model, which, mark[:, None] + 1),
        "where the mark is": looks(model, which._replace(answers=mark + 1), mark[:, None]),
    }
    return {"carried": share, "looks": weights}


# Tales.


class Mention(NamedTuple):
    """A word of a tale that returns."""

    kind: str
    start: int
    end: int
    """Its place among the letters of the tale."""


def mentions(tale: str) -> list[Mention]:
    """Return the mentions of the words of KINDS in a tale of the grammar, in their order."""
    found = []
    state, position = "start", 0
    while state != "end":
        matches = [(rule, rule.pattern.match(tale.lower(), position)) for rule in GRAMMAR[state]]
        rule, match = next((rule, match) for rule, match in matches if match)
        for number, slot in enumerate(rule.slots, 1):
            if slot in KINDS:
                found.append(Mention(KINDS[slot], *match.span(number)))
        state, position = rule.next_state, match.end()
    return sorted(found, key=lambda mention: mention.start)


def tokens_of(tokenizer: tiktoken.Encoding, ids: Sequence[int], mention: Mention) -> list[int]:
    """Return the places of a mention's tokens in a tale's ids, which begin with <|endoftext|>."""
    ends = np.cumsum([0, *(len(tokenizer.decode_single_token_bytes(token)) for token in ids[1:])])
    return [place for place in range(1, len(ids)) if ends[place - 1] < mention.end and ends[place] > mention.start]


def tales_figures(model: GPT, tokenizer: tiktoken.Encoding, tokens: np.ndarray, params: ScoringParams) -> Figures:
    """Return the figures by kind of word."""
    # Read the whole tales of the text.
    borders = np.flatnonzero(tokens == tokenizer.eot_token)
    whole = [tokens[start:end].tolist() for start, end in pairwise(borders)]
    whole = [ids for ids in whole if len(ids) <= model.config.block_size + 1][:TALES]
    if not whole:
        return {"tales": 0}
    tales = [tokenizer.decode(ids[1:]) for ids in whole]
    figures: Figures = {"tales": len(tales), "words": words_without(model, tokenizer, whole, tales, params)}

    # Compare tales that are equal but for one word.
    for name in ("carried", "known", "looks"):
        figures[name] = {}
    for kind in KINDS.values():
        pairs, earlier = pairs_of(tokenizer, tales, kind, model.config.block_size)
        if len(pairs.ids) < 2:
            continue  # a tokenizer or a window that has no such pairs
        figures["carried"][kind] = carried(model, pairs)
        figures["known"][kind] = known(model, pairs)
        figures["looks"][kind] = looks(model, pairs, earlier)
    return figures


def words_without(
    model: GPT, tokenizer: tiktoken.Encoding, whole: list[list[int]], tales: list[str], params: ScoringParams
) -> dict[str, Any]:
    """Return by kind of word the bits that a word needs more without each part.

    A word counts if its tale has named it before."""
    # The places of these words, as (tale, target, kind).
    rows = pad(whole, tokenizer.eot_token).numpy()
    kind_of = np.full((len(whole), rows.shape[1] - 1), "", dtype=object)
    counts = dict.fromkeys(KINDS.values(), 0)
    for number, (ids, tale) in enumerate(zip(whole, tales, strict=True)):
        seen = set()
        for mention in mentions(tale):
            if mention.kind in seen:
                counts[mention.kind] += 1
                kind_of[number, [place - 1 for place in tokens_of(tokenizer, ids, mention)]] = mention.kind
            seen.add(mention.kind)

    # The bits of each, with each variant.
    T = rows.shape[1] - 1
    bits = {}
    for name, off in variants(model).items():
        with without(model, *off):
            nats = [token_nats(model, rows[i : i + BATCH], T, params) for i in range(0, len(rows), BATCH)]
        bits[name] = np.concatenate(nats) / math.log(2)
    all_parts = bits.pop("all")
    tale_of = np.broadcast_to(np.arange(len(whole))[:, None], kind_of.shape)

    def a_word(values: np.ndarray, kind: str) -> Figure:
        # The mean over words, whose tokens are summed: each word counts once, at its share of tokens.
        mask = kind_of == kind
        share = np.full(kind_of.shape, counts[kind] / max(1, mask.sum()))
        return ratio(values, share, tale_of, mask)

    return {
        kind: {"count": counts[kind], "bits": a_word(all_parts, kind)}
        | {"change": {name: a_word(each - all_parts, kind) for name, each in bits.items()}}
        for kind in counts
    }


def pad(sequences: list[list[int]], padding: int) -> Tensor:
    """Return sequences of ids as one tensor, (N, T)."""
    if not sequences:
        return torch.zeros(0, 0, dtype=torch.int64)
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sequences], True, padding)


def pairs_of(
    tokenizer: tiktoken.Encoding, tales: list[str], kind: str, block_size: int
) -> tuple[Pairs, list[list[int]]]:
    """Return up to PAIRS pairs of tales until the last mention of a word, equal but for that word.

    Also returns the places of the earlier mentions. Names change within girls or boys, so that pronouns stay.
    """
    random = Random(1)
    kept = []  # (ids, other ids, places of the tokens that differ)
    for tale in tales:
        own = [mention for mention in mentions(tale) if mention.kind == kind]
        if len(own) < 2 or len(kept) == PAIRS:
            continue
        word = tale[own[0].start : own[0].end].lower()
        words = next(words for name, words in WORDS.items() if name != "name" and word in map(str.lower, words))
        ids = with_border(tokenizer, tale)
        for other_word in random.sample(words, len(words)):
            # Both need the same tokens but for the word's, and the same first tokens of the word's last mention.
            other = with_border(tokenizer, replaced(tale, own, other_word))
            differing = [place for place, (one, another) in enumerate(zip(ids, other, strict=False)) if one != another]
            last = next((place for place in tokens_of(tokenizer, ids, own[-1]) if place in differing), None)
            if other_word.lower() != word and len(ids) == len(other) and last is not None and last <= block_size:
                kept.append((ids, other, [place for place in differing if place <= last]))
                break

    answers = [places[-1] for *_, places in kept]
    return Pairs(
        ids=pad([ids[:last] for (ids, _, _), last in zip(kept, answers, strict=True)], tokenizer.eot_token),
        other=pad([other[:last] for (_, other, _), last in zip(kept, answers, strict=True)], tokenizer.eot_token),
        places=torch.tensor(answers)[:, None] - 1,
        answers=torch.tensor(answers) - 1,
        own_answer=torch.tensor([ids[last] for (ids, _, _), last in zip(kept, answers, strict=True)]),
        other_answer=torch.tensor([other[last] for (_, other, _), last in zip(kept, answers, strict=True)]),
    ), [places[:-1] for *_, places in kept]


def with_border(tokenizer: tiktoken.Encoding, tale: str) -> list[int]:
    return [tokenizer.eot_token, *encode_text(tokenizer, tale).tolist()]


def replaced(tale: str, own: list[Mention], word: str) -> str:
    """Return a tale with another word at some mentions, in upper case where they are."""
    pieces, done = [], 0
    for mention in own:
        pieces += [tale[done : mention.start], word.capitalize() if tale[mention.start].isupper() else word.lower()]
        done = mention.end
    return "".join(pieces) + tale[done:]


@torch.no_grad()
def known(model: GPT, pairs: Pairs) -> dict[str, Figure]:
    """Return the mean chance of the right word after each stage: the logit lens (nostalgebraist 2020)."""
    N = torch.arange(len(pairs.ids))
    return {
        stage: mean_of(model.logits(stream[N, pairs.answers]).softmax(-1)[N, pairs.own_answer])
        for stage, stream in zip(stages(model), streams(model, pairs.ids), strict=True)
    }


def looks(model: GPT, pairs: Pairs, keys: Iterable[Any]) -> dict[str, Figure]:
    """Return each head's mean weight on some keys of each sequence, from the position that predicts its answer.

    Forms with a state have no weights of keys.
    """

    def on_keys(weights: Tensor) -> Tensor:
        rows = enumerate(zip(pairs.answers.tolist(), keys, strict=True))
        return torch.stack([weights[row, :, query, places].sum(-1) for row, (query, places) in rows])  # (N, H)

    found = {}
    for layer, each in enumerate(for_each_layer(model, pairs.ids, on_keys)):
        if model.attentions[layer].has_kv_cache:
            found |= {str(Part(layer, head)): mean_of(each[:, head]) for head in range(each.shape[1])}
    return found


# Tables.


def report(figures: Figures) -> Iterator[str]:
    """Yield the text or the task of some figures, and their tables, line by line."""
    yield source_line(figures)
    yield ""
    yield from tables(figures)


def tables(figures: Figures) -> Iterator[str]:
    """Yield the tables of a model, line by line."""
    unit = "nats/answer" if "task" in figures else "bits/byte"
    columns = [*figures["loss"]]
    yield from table(
        [f"{unit} more without", *columns],
        [["(all parts)", *(plain(figures["loss"][column]) for column in columns)]]
        + [[name, *(signed(change[column]) for column in columns)] for name, change in figures["change"].items()],
    )
    if figures.get("rank_correlation"):
        median, low = figures["rank_correlation"]
        correlation = f"{median:.2f} in the median, {low:.2f} in the worst 5% of windows"
        yield f"rank correlation of the parts by one window with those by all: {correlation}"
        yield ""
    if "lens" in figures:
        rows = [[stage, plain(value)] for stage, value in figures["lens"].items()]
        yield from table(["if the model ended after", "bits/byte"], rows)
    names = [*figures["change"]]
    if figures.get("tales") == 0:
        yield "No whole tale of the text fits model.block_size, so there is no table by kind of word."
        yield ""
    if "words" in figures:
        words = figures["words"]
        rows = [
            [kind, f"{each['count']:,}", plain(each["bits"], 2), *(signed(each["change"][name], 2) for name in names)]
            for kind, each in words.items()
        ]
        yield from table(["bits/word more without", "words", "(all parts)", *names], rows)
    if figures.get("carried"):
        rows = [[fact, *(plain(each[name], 2) for name in names)] for fact, each in figures["carried"].items()]
        yield from table(["share of the answer carried by", *names], rows)
    where = "the earlier mentions" if "words" in figures else "the id, and on the mark from the id after it"
    for title, name in (("chance of the word after", "known"), (f"weight on {where}, of", "looks")):
        found = figures.get(name, {})
        columns = [*next(iter(found.values()), ())]
        if columns:
            rows = [[fact, *(plain(each[column], 2) for column in columns)] for fact, each in found.items()]
            yield from table([title, *columns], rows)


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, and an empty one."""
    yield f"| {' | '.join(head)} |"
    yield f"|---{'|---:' * (len(head) - 1)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def plain(figure: Sequence[float | None], digits: int = 4) -> str:
    mean, error = (math.nan if each is None else each for each in figure)
    if math.isnan(mean):
        return "–"
    shown = f"{mean:.{digits}f}".replace(f"-{0:.{digits}f}", f"{0:.{digits}f}").replace("-", "−")
    return shown if math.isnan(error) else f"{shown} ± {error:.{digits}f}"


def signed(figure: Sequence[float | None], digits: int = 4) -> str:
    shown = plain(figure, digits)
    return (
        shown
        if shown.startswith("−") or not any(digit in shown.split(" ")[0] for digit in "123456789")
        else f"+{shown}"
    )


def read_figures(file: Path) -> Figures:
    """Return the figures of a file that a run of this command wrote; SettingsError for another file."""
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
        figures["loss"], figures["change"], source_line(figures)
    except (OSError, ValueError, LookupError, TypeError) as error:
        problem = f"{visible(str(file))} has no figures of docs/apart.py ({first_line(error)})"
        raise SettingsError(problem, "give a run's folder, or a step_N.apart.json in its checkpoints/") from error
    return figures


def roles(files: list[Path]) -> Iterator[str]:
    """Yield a table of the head that carries most of each fact, for each file that has facts."""
    found = [(file, read_figures(file)) for file in files]
    found = [(file, figures) for file, figures in found if figures.get("carried")]
    facts = [*dict.fromkeys(fact for _, figures in found for fact in figures["carried"])]
    rows = []
    for file, figures in found:
        run = file.parents[1] if file.parent.name == "checkpoints" else file
        row = [run.stem]
        for fact in facts:
            shares = figures["carried"].get(fact, {})
            heads = {part: each for part, each in shares.items() if " H" in part and finite(each[0]) is not None}
            best = max(heads, key=lambda part: heads[part][0], default="")
            row.append(f"{best} {plain(heads[best], 2)}" if best else "–")
        rows.append(row)
    yield from table(["run", *facts], rows)


def main(*arguments: str) -> None:
    """Print the tables of a run, or of files with figures."""
    if arguments and all(argument.endswith(".json") for argument in arguments):
        files = [Path(argument) for argument in arguments]
        lines = roles(files) if len(files) > 1 else report(read_figures(files[0]))
        print(visible("\n".join(lines)))
        return
    where, path = run_and_text(arguments, "python docs/apart.py [RUN [TEXT]]")
    checkpoint = open_checkpoint(where)
    print("The tables come at the end, after two minutes of a core or more.", file=sys.stderr, flush=True)
    figures = take_apart(checkpoint, path)
    print(visible("\n".join(report(figures))), flush=True)
    file = figures_file(checkpoint, "apart", path)
    replace_text(file, json.dumps(finite(figures), indent=1) + "\n")
    print(visible(f"figures     {seen_from_here(file)}"))


if __name__ == "__main__":
    with mistakes_explained():
        answer_help(__doc__)
        arguments = run_codes(sys.argv[1:])
        if any("=" in argument.removeprefix("data.path=") for argument in arguments):
            raise SettingsError("python docs/apart.py [RUN [TEXT]] is wanted", "a run's folder, a text, or FILE.json …")
        main(*arguments)

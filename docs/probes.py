"""Probe a trained model: induction, loss by position, attention sinks.

    python docs/probes.py [CHECKPOINT [TEXT]] [code=FILE]

CHECKPOINT is a run's folder or a checkpoint, the newest run by default, and TEXT a file or a folder, by default the
run's validation text. Prints a summary, and writes the figures beside the checkpoint, to step_N.probes.json, those of a
TEXT to a file of its own. Figures of heads are lists by layer, then head; a layer without a score matrix has None. The
summary counts both from 1.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from cli.eval import scoring_params
from common.errors import SettingsError
from common.files import replace_text
from common.mistakes import answer_help, mistakes_explained
from common.text import seen_from_here, visible
from data.batches import document_starts
from generation.config import EvalConfig, TextConfig
from generation.score import ScoringParams, learned_task, load_text, token_nats
from model.apart import Part
from model.attention.code import run_codes
from model.gpt import GPT
from model.heads import Weights, for_each_layer
from runs.checkpoint import Checkpoint, open_checkpoint
from runs.metrics import finite

SINK = 0.3  # a head is a sink if its mean weight on the first token is above this
FARTHEST = 16  # longest sequence, in trained lengths
READ_TOKENS = 1 << 17  # of text for the loss by position
HEAD_TOKENS = 512  # of text for the figures of heads
BLOCKS = 8  # random blocks for induction


class Probes:
    """The probes of one model, in eval mode."""

    def __init__(self, model: GPT, params: ScoringParams) -> None:
        self.model = model.eval()
        self.params = params
        self.block_size = model.config.block_size
        # Learned positions end at block_size.
        self.longest = self.block_size * (1 if model.config.position == "learned" else FARTHEST)

    def nats(self, rows: Int[np.ndarray, "B T1"]) -> Float[np.ndarray, "B T"]:
        """Return the nats of each row's tokens except the first, given all tokens before."""
        return token_nats(self.model, rows, rows.shape[1] - 1, self.params)

    def by_head(self, rows: Int[np.ndarray, "B T"], function: Callable[[Weights], Tensor]) -> list[list[float] | None]:
        """Return `function` of each layer's weights, a number for each of its heads."""
        device = self.model.device
        tokens = torch.from_numpy(rows.astype(np.int64)).to(device)
        doc_starts = torch.from_numpy(self.starts(rows)).to(device)
        with self.params.autocast:
            figures = for_each_layer(self.model, tokens, function, doc_starts)
        layers = zip(self.model.attentions, figures, strict=True)
        return [each.tolist() if attention.has_kv_cache else None for attention, each in layers]

    def starts(self, rows: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
        """Return the first position that each token may see: its document's, or 0 without data.document_mask."""
        if self.params.separator is None:
            return np.zeros_like(rows, dtype=np.int64)
        return document_starts(rows, self.params.separator)

    def induction(self, ids: int, separator: int | None = None) -> dict[str, Any]:
        """Probe for induction heads (Olsson et al. 2022) with a random block that is repeated once.

        Returns the mean nats of either copy, and the score of each head: its mean weight from a token of the second
        copy to the one that followed it in the first. ids: random ids are below this. separator: the id that is left
        out, of <|endoftext|>; it would begin a document between the copies.
        """
        L = min(self.block_size, HEAD_TOKENS) // 2
        generator = np.random.Generator(np.random.PCG64(1))
        block = generator.integers(0, ids - (separator is not None), (BLOCKS, L))
        if separator is not None:
            block += block >= separator
        rows = np.tile(block, 2)  # (BLOCKS, 2 L)
        nats = self.nats(rows)  # (BLOCKS, 2 L - 1)
        query = torch.arange(L, 2 * L)  # the second copy
        key = query - L + 1

        def score(weights: Weights) -> Tensor:
            return weights[..., query, key].float().mean((0, -1))  # (B, H, T, T) -> (H,)

        return {
            "block": L,
            "first_copy": float(nats[:, : L - 1].mean()),
            "second_copy": float(nats[:, L:].mean()),
            "score": self.by_head(rows, score),
        }

    def by_position(self, tokens: Int[np.ndarray, " N"]) -> dict[str, Any]:
        """Return the mean nats at each position of sequences of up to FARTHEST × block_size."""
        T = min(self.longest, len(tokens) - 1)
        whole = (len(tokens) - 1) // T
        count = min(whole, max(1, READ_TOKENS // T))
        losses = []
        for number in range(count):
            start = number * whole // count * T  # sequences do not overlap, and are spread over the text
            sequence = tokens[None, start : start + T + 1]  # (1, T + 1)
            losses.append(self.nats(sequence)[0])
        return {
            "trained": self.block_size,
            "windows": count,
            "documents": self.params.separator is not None,
            "nats": np.mean(losses, axis=0).tolist(),
        }

    def heads(self, rows: Int[np.ndarray, "B T"]) -> dict[str, Any]:
        """Return figures of sinks (Gu et al. 2025) on held-out sequences.

        first: each head's mean weight on the first token that a query sees, that of its window if the layer has one,
        over the queries after it; 0 if there are none. sink_mass: the mean over heads. sink_share: the share of heads
        above SINK.
        """
        starts = torch.from_numpy(self.starts(rows))  # (B, T)
        T = rows.shape[1]
        windows = iter([layer.window or T for layer in self.model.attentions])

        def on_first(weights: Weights) -> Tensor:
            place = torch.arange(T, device=weights.device)
            first = torch.maximum(starts.to(weights.device), place - next(windows) + 1)  # (B, T)
            key = first[:, None, :, None].expand(*weights.shape[:3], 1)
            by_query = weights.gather(-1, key).squeeze(-1).transpose(1, 2)  # (B, H, T, T) -> (B, T, H)
            return by_query[place > first].float().mean(0).nan_to_num()

        first = self.by_head(rows, on_first)
        figures: dict[str, Any] = {"first": first}
        masses = np.array([mass for layer in first for mass in layer or ()])
        if len(masses):
            figures["sink_mass"] = float(masses.mean())
            figures["sink_share"] = float((masses > SINK).mean())
        return figures


def probe(checkpoint: Checkpoint, params: ScoringParams, path: str | None = None) -> dict[str, Any]:
    """Return the figures of all probes that apply to the model.

    path: a text, as in load_text(). Probes of a synthetic task use its held-out sequences, and leave out loss by
    position, which needs text.
    """
    model = checkpoint.model
    probes = Probes(model, params)
    T = min(model.config.block_size, HEAD_TOKENS)
    if checkpoint.encoding is None and path is None:
        task = learned_task(checkpoint)
        rows = next(task.validation_batches(HEAD_TOKENS // T)).inputs[:, :T]
        return {
            "task": task.name,
            "induction": probes.induction(task.vocab_size),
            "heads": probes.heads(rows),
        }
    text = load_text(TextConfig(path=path), [checkpoint])
    (tokens,) = text.tokens
    T = min(T, len(tokens))
    rows = tokens[: min(HEAD_TOKENS, len(tokens)) // T * T].reshape(-1, T)
    return {
        "text": text.description,
        "induction": probes.induction(checkpoint.tokenizer.n_vocab, checkpoint.tokenizer.eot_token),
        "heads": probes.heads(rows),
        "by_position": probes.by_position(tokens),
    }


def probe_lines(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the summary of the probes, line by line."""
    induction = figures["induction"]
    heads = figures["heads"]
    # Summarize induction and sinks. The highest score is that of the head most like an induction head.
    scores = {
        (layer, head): score for layer, row in enumerate(induction["score"]) for head, score in enumerate(row or ())
    }
    copies = f"{induction['first_copy']:.3f} nats/token in {induction['block']} random ids"
    yield f"induction   {copies}, {induction['second_copy']:.3f} when they are repeated"
    if scores:
        highest = max(scores, key=scores.__getitem__)
        yield f"            highest score {scores[highest]:.3f}, {Part(*highest)}"
        share = f"{heads['sink_share']:.0%} of the heads have more than {SINK}"
        yield f"sinks       {heads['sink_mass']:.3f} of the weight is on the first token; {share}"
    # Summarize the loss by position, which only text has.
    if "by_position" in figures:
        nats = figures["by_position"]["nats"]
        trained = figures["by_position"]["trained"]
        lengths = [trained * 2**n for n in range(5)]
        ends = [length for length in lengths if length <= len(nats)] or [len(nats)]
        means = "  ".join(f"{end:,}: {np.mean(nats[end // 2 : end]):.3f}" for end in ends)
        yield f"positions   {means} nats/token, the mean of each length's second half"
        if figures["by_position"]["documents"]:
            yield "note        a token sees its own document alone: a position in the window says nothing about length"
    else:
        yield "note        the model knows its task alone, not repeated ids: docs/apart.py has its heads at the answers"
    if None in induction["score"]:
        without = ", ".join(str(layer) for layer, row in enumerate(induction["score"], 1) if row is None)
        yield f"note        layer {without} keeps a state and has no score matrix: its heads are left out"


def run_and_text(arguments: Sequence[str], usage: str) -> tuple[str | None, str | None]:
    """Return RUN and TEXT of a command line; the latter may be data.path=TEXT, as the remedies of a text have it."""
    texts = [argument.removeprefix("data.path=") for argument in arguments if argument.startswith("data.path=")]
    others = [argument for argument in arguments if not argument.startswith("data.path=")]
    if len(arguments) > 2 or len(texts) > 1 or any(argument.startswith("-") for argument in arguments):
        raise SettingsError(f"{usage} is wanted", "a run's folder, a text")
    return (others[0] if others else None), [*others[1:], *texts, None][0]


def source_line(figures: dict[str, Any]) -> str:
    """Return the line that names the text or the task of some figures."""
    name = "task" if "task" in figures else "text"
    return f"{name:12}{figures[name]}"


def figures_file(checkpoint: Checkpoint, kind: str, path: str | None) -> Path:
    """Return the file for a checkpoint's figures on its own text, or on another one.

    Each text has its file, so that none takes the place of another's figures. kind: apart or probes.
    """
    digest = "" if path is None else f".{hashlib.sha256(os.fsencode(Path(path).resolve())).hexdigest()[:8]}"
    return checkpoint.path.with_name(f"{checkpoint.path.name}.{kind}{digest}.json")


def main(where: str | None = None, path: str | None = None) -> None:
    """Print the results of the probes, and write them beside the checkpoint."""
    checkpoint = open_checkpoint(where)
    figures = probe(checkpoint, scoring_params(checkpoint, EvalConfig()), path)
    file = figures_file(checkpoint, "probes", path)
    print(visible("\n".join([source_line(figures), *probe_lines(figures)])), flush=True)
    replace_text(file, json.dumps(finite(figures), indent=1) + "\n")
    print(visible(f"figures     {seen_from_here(file)}"))


if __name__ == "__main__":
    with mistakes_explained():
        answer_help(__doc__)
        main(*run_and_text(run_codes(sys.argv[1:]), "python docs/probes.py [CHECKPOINT [TEXT]]"))

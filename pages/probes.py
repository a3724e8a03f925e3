"""Probes of a trained model beside its mean loss: induction, lengths beyond the trained one, sinks, gates, a needle.

Figures of heads are lists by layer, then head; None stands for a layer that has no score matrix.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import tiktoken
import torch
from jaxtyping import Float, Int
from torch import Tensor

from data.tokenizer import encode_text
from generation.score import ScoringParams, learned_task, load_text, model_inputs, token_nats
from model.gpt import GPT
from model.heads import Weights, for_each_layer
from runs.checkpoint import Checkpoint

SINK = 0.3  # a head whose mean weight on the first token is above this is a sink
CLOSED = 0.05  # a gate below this lets nothing through
GATES = {"gate": 2, "gate_element": 2, "forget": 1}  # the modifiers with a gate, and its largest factor
FARTHEST = 16  # times the trained length
READ_TOKENS = 1 << 17  # of the text, for the loss by position
HEAD_TOKENS = 512  # of the text, for the figures of the heads
BLOCKS = 8  # random blocks that are repeated
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TRIALS = 4  # needles of each length and depth
NAMES = ("apple", "river", "stone", "cloud", "tiger", "piano", "lemon", "robot")


class Probes:
    """Measures one model, in eval mode."""

    def __init__(self, model: GPT, params: ScoringParams) -> None:
        self.model = model.eval()
        self.params = params
        self.block_size = model.config.block_size
        self.longest = self.block_size * (1 if model.config.position == "learned" else FARTHEST)

    def nats(self, rows: Int[np.ndarray, "B T1"]) -> Float[np.ndarray, "B T"]:
        """Return the nats of every token but the first of each row, given all before it."""
        return token_nats(self.model, rows, rows.shape[1] - 1, self.params)

    def by_head(self, rows: Int[np.ndarray, "B T"], function: Callable[[Weights], Tensor]) -> list[list[float] | None]:
        """Return `function` of each layer's weights, one number a head; None for a layer without a score matrix."""
        tokens, doc_starts = model_inputs(self.model, rows, self.params.separator)
        with self.params.autocast:
            figures = for_each_layer(self.model, tokens, function, doc_starts)
        layers = zip(self.model.attentions, figures, strict=True)
        return [each.tolist() if attention.has_kv_cache else None for attention, each in layers]

    def induction(self, ids: int) -> dict[str, Any]:
        """Probe for induction heads (Olsson et al. 2022): a block of random ids, and the same again.

        Returns the mean nats of the first copy and of the second, and for each head the score: the mean weight from
        a token of the second copy to the one that followed it in the first. ids: how many there are to draw from,
        without <|endoftext|>, which would begin a document between the copies.
        """
        L = min(self.block_size, HEAD_TOKENS) // 2
        rows = np.tile(np.random.Generator(np.random.PCG64(1)).integers(0, ids, (BLOCKS, L)), 2)
        nats = self.nats(rows)
        second = torch.arange(L, 2 * L)  # places of the second copy
        score = self.by_head(rows, lambda weights: weights[..., second, second - L + 1].float().mean((0, -1)))
        figures = {"first_copy": float(nats[:, : L - 1].mean()), "second_copy": float(nats[:, L:].mean())}
        return {"block": L, **figures, "score": score}

    def by_position(self, tokens: Int[np.ndarray, " N"]) -> dict[str, Any]:
        """Return the mean nats at each position of sequences of up to FARTHEST times block_size, apart from each other.

        With learned positions, sequences are no longer than block_size.
        """
        T = min(self.longest, len(tokens) - 1)
        whole = (len(tokens) - 1) // T
        count = min(whole, max(1, READ_TOKENS // T))
        starts = [number * whole // count * T for number in range(count)]  # spread evenly
        loss = np.mean([self.nats(tokens[None, start : start + T + 1])[0] for start in starts], axis=0)
        return {"trained": self.block_size, "windows": count, "nats": loss.tolist()}

    def heads(self, rows: Int[np.ndarray, "B T"]) -> dict[str, Any]:
        """Return figures of the weights on held-out sequences, means over queries, and of the gates.

        first: the weight on the first token, of queries after it; sink_mass: its mean over heads; sink_share: the
        share of heads above SINK (Gu et al. 2025). gates: of each the mean of its factor and the share below CLOSED.
        """
        gates: dict[str, list[float]] = {}

        def note(gate: str, most: int, _: object, __: object, y: Tensor) -> None:
            factor = most * torch.sigmoid(y.float())
            gates[gate] = [factor.mean().item(), (factor < CLOSED).float().mean().item()]

        with ExitStack() as stack:
            for layer, attention in enumerate(self.model.attentions):
                for name in filter(GATES.get, attention.modifiers):
                    gate = attention.modifiers[name].get_submodule("gate")
                    hook = gate.register_forward_hook(partial(note, f"layer {layer} {name}", GATES[name]))
                    stack.callback(hook.remove)
            first = self.by_head(rows, lambda weights: weights[:, :, 1:, 0].float().mean((0, 2)))
        masses = np.array([mass for layer in first for mass in layer or ()])
        sinks = {"sink_mass": float(masses.mean()), "sink_share": float((masses > SINK).mean())} if len(masses) else {}
        return {"first": first, **sinks, "gates": gates}

    def needle(self, tokenizer: tiktoken.Encoding, tokens: Int[np.ndarray, " N"]) -> dict[str, Any]:
        """Probe for a line "name = 1234" in held-out text that the end asks for (as RULER, Hsieh et al. 2024).

        Returns by length, then depth, ln p(the number | "name =") - ln p(the number | "other ="), the mean of TRIALS
        in nats, with a name that the text does not have: 0 without retrieval, however likely numbers are.
        """
        lengths = [self.block_size * n // 2 for n in (1, 2, 4, 8)]
        lengths = [n for n in lengths if 64 <= n <= min(self.longest, len(tokens))]
        generator = random.Random(1)

        def log_ratio(length: int, depth: float) -> float:
            # The needle, and the questions for it and for a name that the text does not have.
            name, other = generator.sample(NAMES, 2)
            number = f" {generator.randrange(1000, 10_000)}"
            texts = (f"\n{name} ={number}\n", number, f"\n{name} =", f"\n{other} =")
            line, answer, asked, wrong = (encode_text(tokenizer, text) for text in texts)
            # Held-out text around the needle.
            room = length + 1 - len(line) - len(answer) - max(len(asked), len(wrong))
            begin = generator.randrange(len(tokens) - room + 1)
            cut = begin + round(depth * room)
            before = np.concatenate((tokens[begin:cut], line, tokens[cut : begin + room]))
            # The nats of the number after each question.
            rows = [np.concatenate((before, question, answer))[None] for question in (asked, wrong)]
            known, guessed = (self.nats(row)[0, -len(answer) :].sum() for row in rows)
            return float(guessed - known)

        nats = [[float(np.mean([log_ratio(n, depth) for _ in range(TRIALS)])) for depth in DEPTHS] for n in lengths]
        return {"lengths": lengths, "depths": list(DEPTHS), "nats": nats}


def probe(checkpoint: Checkpoint, params: ScoringParams, path: str | None = None) -> dict[str, Any]:
    """Return the figures of every probe that fits the model.

    path: as load_text()'s. A model of a synthetic task is probed on the task's held-out sequences, without loss by
    position and needle.
    """
    model = checkpoint.model
    probes = Probes(model, params)
    T = min(model.config.block_size, HEAD_TOKENS)
    if checkpoint.encoding is None and path is None:
        task = learned_task(checkpoint)
        rows = next(task.validation(model.config.block_size, HEAD_TOKENS // T)).inputs[:, :T]
        return {"induction": probes.induction(task.vocab_size), "heads": probes.heads(rows)}
    _, (tokens,) = load_text(path, [checkpoint])
    tokenizer = checkpoint.tokenizer
    T = min(T, len(tokens))
    rows = tokens[: min(HEAD_TOKENS, len(tokens)) // T * T].reshape(-1, T)
    return {
        "induction": probes.induction(tokenizer.eot_token),
        "heads": probes.heads(rows),
        "by_position": probes.by_position(tokens),
        "needle": probes.needle(tokenizer, tokens),
    }


def probe_lines(figures: dict[str, Any]) -> Iterator[str]:
    """Yield lines that sum the figures of the probes up."""
    induction = figures["induction"]
    heads = figures["heads"]
    # Induction and sinks.
    scores = {(layer, head): x for layer, row in enumerate(induction["score"]) for head, x in enumerate(row or ())}
    copies = f"{induction['first_copy']:.3f} nats/token in {induction['block']} random ids"
    yield f"induction   {copies}, {induction['second_copy']:.3f} when they come again"
    if scores:
        layer, head = max(scores, key=scores.__getitem__)
        yield f"            highest score {scores[layer, head]:.3f}, layer {layer} head {head}"
        share = f"{heads['sink_share']:.0%} of the heads have more than {SINK}"
        yield f"sinks       {heads['sink_mass']:.3f} of the weight is on the first token; {share}"
    for name, (mean, closed) in heads["gates"].items():
        yield f"gate        {name}: mean {mean:.3f}, {closed:.1%} below {CLOSED}"
    # Loss by position, and the needle: of texts alone.
    if "by_position" in figures:
        nats = figures["by_position"]["nats"]
        trained = figures["by_position"]["trained"]
        ends = [trained * 2**n for n in range(5) if trained * 2**n <= len(nats)] or [len(nats)]
        means = "  ".join(f"{end:,}: {np.mean(nats[end // 2 : end]):.3f}" for end in ends)
        yield f"positions   {means} nats/token in the second half of so many"
        for length, ratios in zip(figures["needle"]["lengths"], figures["needle"]["nats"], strict=True):
            by_depth = "  ".join(f"{depth:.0%}: {nats:+.2f}" for depth, nats in zip(DEPTHS, ratios, strict=True))
            yield f"needle      {length:,} tokens, by depth  {by_depth} nats"
    if None in induction["score"]:
        without = ", ".join(str(layer) for layer, row in enumerate(induction["score"]) if row is None)
        yield f"note        layer {without} keeps a state and has no score matrix: its heads are left out"

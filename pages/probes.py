"""What a trained model can do beside its mean loss: look back, go on past its trained length, attend to nothing.

Figures of layers and heads are lists by layer, then head; None stands for a layer that has no score matrix.
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
from generation.score import How, inputs_of, learned_task, load_text, nats_of
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
    """Measures one model, in eval mode, which reads as `how` says."""

    def __init__(self, model: GPT, how: How) -> None:
        self.model, self.how, self.block_size = model.eval(), how, model.config.block_size
        self.longest = self.block_size * (1 if model.config.position == "learned" else FARTHEST)

    def nats(self, rows: Int[np.ndarray, "B T1"]) -> Float[np.ndarray, "B T"]:
        """Return the surprise of every token but the first of each row, all of it in sight."""
        return nats_of(self.model, rows, rows.shape[1] - 1, self.how)

    def by_head(self, rows: Int[np.ndarray, "B T"], function: Callable[[Weights], Tensor]) -> list[list[float] | None]:
        """Return `function` of each layer's weights, one number a head; None for a layer without a score matrix."""
        tokens, doc_starts = inputs_of(self.model, rows, self.how.separator)
        with self.how.autocast:
            found = for_each_layer(self.model, tokens, function, doc_starts)
        return [each.tolist() if a.has_kv_cache else None for a, each in zip(self.model.attentions, found, strict=True)]

    def induction(self, ids: int) -> dict[str, Any]:
        """Probe for induction heads (Olsson et al. 2022): a block of random ids, and the same again.

        Returns the mean nats of the first copy and of the second, and for each head the score: the mean weight from
        a token of the second copy to the one that followed it in the first. ids: how many there are to draw from,
        without <|endoftext|>, which would begin a document between the copies.
        """
        L = min(self.block_size, HEAD_TOKENS) // 2
        rows = np.tile(np.random.Generator(np.random.PCG64(1)).integers(0, ids, (BLOCKS, L)), 2)
        nats, second = self.nats(rows), torch.arange(L, 2 * L)
        score = self.by_head(rows, lambda weights: weights[..., second, second - L + 1].float().mean((0, -1)))
        figures = {"first_copy": float(nats[:, : L - 1].mean()), "second_copy": float(nats[:, L:].mean())}
        return {"block": L, **figures, "score": score}

    def by_position(self, tokens: Int[np.ndarray, " N"]) -> dict[str, Any]:
        """Return the mean nats at each position of windows of up to FARTHEST times block_size, which do not slide.

        Learned positions end at block_size, and so do the windows.
        """
        T = min(self.longest, len(tokens) - 1)
        windows = (len(tokens) - 1) // T
        kept = min(windows, max(1, READ_TOKENS // T))
        places = [number * windows // kept * T for number in range(kept)]
        loss = np.mean([self.nats(tokens[None, place : place + T + 1])[0] for place in places], axis=0)
        return {"trained": self.block_size, "windows": kept, "nats": loss.tolist()}

    def heads(self, rows: Int[np.ndarray, "B T"]) -> dict[str, Any]:
        """Return figures of the weights of held-out windows, means over queries, and of the gates.

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
        known = np.array([head for one in first for head in one or ()])
        sinks = {"sink_mass": float(known.mean()), "sink_share": float((known > SINK).mean())} if len(known) else {}
        return {"first": first, **sinks, "gates": gates}

    def needle(self, tokenizer: tiktoken.Encoding, tokens: Int[np.ndarray, " N"]) -> dict[str, Any]:
        """Probe for a line "name = 1234" in held-out text that the end asks for (as RULER, Hsieh et al. 2024).

        Returns by length, then depth, ln p(the number | "name =") - ln p(the number | "other ="), the mean of TRIALS
        in nats, with a name that the text does not have: 0 without retrieval, however likely numbers are.
        """
        lengths = [self.block_size * n // 2 for n in (1, 2, 4, 8)]
        lengths = [n for n in lengths if 64 <= n <= min(self.longest, len(tokens))]
        drawn = random.Random(1)

        def ratio(length: int, depth: float) -> float:
            (name, other), number = drawn.sample(NAMES, 2), f" {drawn.randrange(1000, 10_000)}"
            texts = (f"\n{name} ={number}\n", number, f"\n{name} =", f"\n{other} =")
            line, answer, asked, wrong = (encode_text(tokenizer, text) for text in texts)
            room = length + 1 - len(line) - len(answer) - max(len(asked), len(wrong))
            begin, cut = drawn.randrange(len(tokens) - room + 1), round(depth * room)
            before = np.concatenate((tokens[begin : begin + cut], line, tokens[begin + cut : begin + room]))
            rows = [np.concatenate((before, question, answer))[None] for question in (asked, wrong)]
            known, guessed = (self.nats(row)[0, -len(answer) :].sum() for row in rows)
            return float(guessed - known)

        nats = [[float(np.mean([ratio(n, depth) for _ in range(TRIALS)])) for depth in DEPTHS] for n in lengths]
        return {"lengths": lengths, "depths": list(DEPTHS), "nats": nats}


def probe(checkpoint: Checkpoint, how: How, path: str | None = None) -> dict[str, Any]:
    """Return the figures of every probe that fits the model.

    path: of the text, as load_text() has it. A model of a synthetic task is probed on the task's held-out windows,
    without loss by position and needle.
    """
    model, probes = checkpoint.model, Probes(checkpoint.model, how)
    T = min(model.config.block_size, HEAD_TOKENS)
    if checkpoint.encoding is None and path is None:
        task = learned_task(checkpoint)
        rows = next(task.validation(model.config.block_size, HEAD_TOKENS // T)).inputs[:, :T]
        return {"induction": probes.induction(task.vocab_size), "heads": probes.heads(rows)}
    _, (tokens,) = load_text(path, [checkpoint])
    tokenizer, T = checkpoint.tokenizer, min(T, len(tokens))
    rows = tokens[: min(HEAD_TOKENS, len(tokens)) // T * T].reshape(-1, T)
    found = {"induction": probes.induction(tokenizer.eot_token), "heads": probes.heads(rows)}
    return found | {"by_position": probes.by_position(tokens), "needle": probes.needle(tokenizer, tokens)}


def summary(found: dict[str, Any]) -> Iterator[str]:
    """Yield lines that tell what the probes have found."""
    induction, heads = found["induction"], found["heads"]
    scores = {(layer, head): x for layer, one in enumerate(induction["score"]) for head, x in enumerate(one or ())}
    copies = f"{induction['first_copy']:.3f} nats/token in {induction['block']} random ids"
    yield f"induction   {copies}, {induction['second_copy']:.3f} when they come again"
    if scores:
        layer, head = max(scores, key=scores.__getitem__)
        yield f"            highest score {scores[layer, head]:.3f}, layer {layer} head {head}"
        share = f"{heads['sink_share']:.0%} of the heads have more than {SINK}"
        yield f"sinks       {heads['sink_mass']:.3f} of the weight is on the first token; {share}"
    for name, (mean, closed) in heads["gates"].items():
        yield f"gate        {name}: mean {mean:.3f}, {closed:.1%} below {CLOSED}"
    if "by_position" in found:
        nats, trained = found["by_position"]["nats"], found["by_position"]["trained"]
        ends = [trained * 2**n for n in range(5) if trained * 2**n <= len(nats)] or [len(nats)]
        shown = "  ".join(f"{end:,}: {np.mean(nats[end // 2 : end]):.3f}" for end in ends)
        yield f"positions   {shown} nats/token in the second half of so many"
        for length, ratio in zip(found["needle"]["lengths"], found["needle"]["nats"], strict=True):
            shown = "  ".join(f"{depth:.0%}: {nats:+.2f}" for depth, nats in zip(DEPTHS, ratio, strict=True))
            yield f"needle      {length:,} tokens, by depth  {shown} nats"
    if None in induction["score"]:
        without = ", ".join(str(layer) for layer, one in enumerate(induction["score"]) if one is None)
        yield f"note        layer {without} keeps a state and has no score matrix: its heads are left out"

"""Random strings of attention, in a GPT of random settings: each is refused in a sentence, or right."""

import random

import pytest
import torch
from conftest import random_gpt, some

from common.errors import SettingsError
from model.attention import FORMS, MODIFIERS, SETTINGS
from model.cache import KVCache
from model.config import POSITIONS

CHANGES = SETTINGS | {name: kind.changes for name, kind in MODIFIERS.items()}
LONG = 257  # whose pairs are more than a matrix takes: the layers go by chunks


def stack(generator: random.Random) -> str:
    """One to three layers, of any form, with modifiers that mostly suit it."""
    layers = []
    for _ in range(generator.choice((1, 1, 2, 3))):
        form = generator.choice([*FORMS])
        takes = getattr(FORMS[form], "modifiable", CHANGES.values())
        suited = [name for name, what in CHANGES.items() if what in takes or generator.random() < 0.02]
        layers.append("+".join([form, *generator.sample(suited, min(len(suited), generator.choice((0, 1, 2, 2, 3))))]))
    return "/".join(layers)


def settings(generator: random.Random) -> dict:
    attention = stack(generator)
    chosen = dict(
        attention=attention,
        n_layer=len(attention.split("/")),
        n_embd=16,
        n_kv_head=generator.choice((None, 1, 2)),
        block_size=generator.choice((8, 24, 64)),
        qk_norm=generator.random() < 0.6,
        qkv_bias=generator.random() < 0.3,
        position="rope" if "nope" in attention else generator.choice((*POSITIONS, "rope", "none", "alibi")),
        allow_neg_eigval=generator.random() < 0.3,
        rope_fraction=generator.choice((1.0, 1.0, 0.5)),
    )
    if "window" in attention or generator.random() < 0.2:
        chosen["attention_window"] = generator.choice((1, 2, 5, 9))
    return chosen


def in_pieces(model, tokens, generator, doc_starts=None):
    """The logits with a cache, in steps of one token and in chunks."""
    cache, pieces = KVCache(tokens.shape[1]), []
    while (first := cache.position) < tokens.shape[1]:
        new = slice(first, first + generator.choice((1, 1, 2, 3, 17, 200)))
        starts = None if doc_starts is None else doc_starts[:, new]
        pieces.append(model(tokens[:, new], cache=cache, doc_starts=starts))
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("seed", some(range(200), 100))
@torch.no_grad()
def test_a_random_stack_is_refused_in_a_sentence_or_right(seed):
    generator = random.Random(seed)
    chosen = settings(generator)
    try:
        model = random_gpt(seed, **chosen).double()
    except SettingsError as refused:
        assert ": " in str(refused) and "\n" not in str(refused), chosen
        return

    def near(found, wanted, what):
        # Angles are in float32, so another position of the same text rounds anew.
        error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1)
        assert error < 2e-5, f"{what}: {error:.1e}, {chosen}"

    learned = chosen["position"] == "learned"
    T = chosen["block_size"] if learned else generator.choice((20, 33, LONG))
    first = generator.randrange(1, T)
    tokens = torch.randint(61, (3, T))
    whole = model(tokens)
    near(whole[:1], model(tokens[:1]), "a row of a batch alone")
    near(in_pieces(model, tokens, generator), whole, "with a cache")
    near(model(tokens[:, :first]), whole[:, :first], "without what comes later")

    # Two documents in the first row, and padding before the second row's text.
    doc_starts = torch.zeros(3, T, dtype=torch.long)
    doc_starts[0, first:] = first
    doc_starts[1] = first
    parts = model(tokens, doc_starts=doc_starts)
    second = model(tokens[:2, first:])
    near(parts[0, :first], whole[0, :first], "the first of two documents")
    near(parts[:2, first:], second, "the second document, and a text after padding")
    near(parts[2], whole[2], "a row beside them")
    pieces = in_pieces(model, tokens, generator, doc_starts)
    near(pieces[0], parts[0], "two documents with a cache")
    near(pieces[1, first:], second[1], "a text after padding with a cache")

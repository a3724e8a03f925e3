"""The same GPT for longer or shorter texts, or for more or fewer tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from model.gpt import GPT


def resize_block(model: GPT, block_size: int) -> GPT:
    """A copy for texts of block_size tokens.

    Learned positions are cropped, or continued by new ones as at the beginning of a training, N(0, 0.02)
    from torch's generator; every other kind of position reaches as far as it is asked to.
    """
    resized = GPT(replace(model.config, block_size=block_size))
    weights = model.state_dict()
    if model.config.position == "learned":
        known = weights["position_embedding.weight"][:block_size]
        new = torch.randn(block_size - len(known), known.shape[1]) * 0.02
        weights["position_embedding.weight"] = torch.cat((known, new.to(known)))
    resized.load_state_dict(weights)
    return resized.to(model.token_embedding.weight.device).train(model.training)


def resize_vocabulary(model: GPT, vocab_size: int) -> GPT:
    """A copy with vocab_size token ids: the last ones dropped, or new ones added.

    A new token starts as the mean of all known ones, in the embedding and in the head, so that it is as
    likely as an average token and moves the others' probabilities little (Hewitt 2021).
    """
    resized = GPT(replace(model.config, vocab_size=vocab_size))
    weights = model.state_dict()
    for name in ("token_embedding.weight", "head.weight"):
        known = weights[name][:vocab_size]
        new = weights[name].mean(0, keepdim=True).expand(vocab_size - len(known), -1)
        weights[name] = torch.cat((known, new))
    resized.load_state_dict(weights)
    return resized.to(model.token_embedding.weight.device).train(model.training)

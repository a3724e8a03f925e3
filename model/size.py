"""The costs of a model: parameters by part, floating-point operations, cache."""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from common.errors import SettingsError
from model.cache import KVCache
from model.config import GPTConfig
from model.gpt import GPT
from model.modes import eval_mode

# Settings by which the sides of weights grow.
SIZES = ("n_embd", "vocab_size", "block_size", "n_inner", "n_head", "head_size", "latent_size", "ngram_rows")


class DrawNothing(TorchFunctionMode):
    """Skips normal_(): on the meta device torch would import 800 modules for it."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if function is nn.init.normal_ else function(*args, **kwargs)


def without_weights(config: GPTConfig) -> GPT:
    """Make the model as shapes alone, on torch's meta device, where it takes no memory."""
    with torch.device("meta"), DrawNothing():
        return GPT(config)


def count_weights(config: GPTConfig) -> int:
    """Return the number of weights of a model.

    Only one block per layer of the pattern is made. Raises SettingsError if torch cannot count a weight's numbers.
    """
    kinds = config.attention.count("/") + 1
    small = replace(config, n_layer=min(kinds, config.n_layer))
    try:
        weights = dict(without_weights(small).named_parameters())
    except (RuntimeError, OverflowError, TypeError) as error:
        if "overflow" not in str(error).lower():
            raise  # of a form or modifier that reads numbers as it is made; there are none here
        largest = max(SIZES, key=lambda name: getattr(config, name) or 0)
        remedy = f"lower model.{largest}={getattr(config, largest)}"
        raise SettingsError("a weight would have more than 2^63 numbers", remedy) from None
    # Multiply the tensors of a block: block i stands for blocks i, i + kinds, …, below n_layer.
    numbers = 0
    for name, tensor in weights.items():
        times = 1
        if name.startswith("blocks."):
            block = int(name.split(".")[1])
            times = -((block - config.n_layer) // kinds)
        numbers += times * tensor.numel()
    return numbers


def count_parameters(model: GPT) -> Counter[str]:
    """Count weights by part: embedding, ngrams, attention, mlp, norms, lm_head."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        path = name.split(".")
        # In a block the third word is the part, as in blocks.3.mlp.up_proj.weight.
        part = path[2] if path[0] == "blocks" else path[0]
        if part.endswith("norm"):
            part = "norms"
        elif path[-2].endswith("embedding"):
            part = "embedding"
        parts[part] += parameter.numel()
    return parts


def flops_per_token(model: GPT) -> float:
    """Return the floating-point operations per token of a forward and a backward pass.

    They are 6 for each weight that multiplies the token (Kaplan et al. 2020), and 3 times MultiHeadAttention.flops()
    for each layer, in texts of block_size tokens.
    """
    parts = count_parameters(model)
    multiplied = parts["attention"] + parts["mlp"] + model.lm_head.weight.numel()
    attended = sum(attention.flops(model.config.block_size) for attention in model.attentions)
    # The backward pass has two products for each one of the forward pass.
    return 6 * multiplied + 3 * attended


@torch.no_grad()
def cache_bytes_per_token(model: GPT) -> float:
    """Return the cache's bytes per token of a text of block_size tokens.

    It is measured by reading one token: the first one allocates the rows of all.
    """
    cache = KVCache(model.config.block_size)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with eval_mode(model):
        model.hidden(token, cache=cache)
    return cache.nbytes / cache.size

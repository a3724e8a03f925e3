"""The weights of a model in files: under their plain names, in safetensors."""

import os
import re
from pathlib import Path

import safetensors.torch
from torch import Tensor

from model.gpt import GPT


def plain_weights(model: GPT) -> dict[str, Tensor]:
    """Return the weights under their plain names, without an lm_head tied to the embedding."""
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del weights["lm_head.weight"]
    return weights


def load_weights(model: GPT, weights: dict[str, Tensor]) -> None:
    """Copy the weights of `plain_weights` into a model.

    Raises ValueError, naming a weight, if they do not fit.
    """
    if model.config.tie_embeddings:
        weights = weights | {"lm_head.weight": weights["token_embedding.weight"]}
    wanted = {(name, tensor.shape) for name, tensor in model.state_dict().items()}
    given = {(name, tensor.shape) for name, tensor in weights.items()}
    if wanted != given:
        wrong = min(name for name, shape in wanted ^ given)
        raise ValueError(f"the weight {wrong} is missing, or does not fit the settings")
    model.load_state_dict(weights)


def save_file(weights: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file whose mode follows the umask.

    The library makes files that their owner alone may read. Raises OSError if the disk is full.
    """
    file.touch()
    mode = file.stat().st_mode
    try:
        safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        # The library raises no OSError, even if the disk is full: read the system's number in its message.
        system = re.search(r"\(os error (\d+)\)", str(error))
        if not system:
            raise
        number = int(system[1])
        raise OSError(number, os.strerror(number), str(file)) from error
    # Only if they differ: a file system with one mode for all files refuses any change.
    if file.stat().st_mode != mode:
        file.chmod(mode)

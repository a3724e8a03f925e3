"""The weights of a model in files: under their plain names, in safetensors."""

import inspect
import os
import re
from collections.abc import Container
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from common.errors import SettingsError
from model.attention import SOFTMAX
from model.attention.layer import MultiHeadAttention
from model.gpt import GPT, MLP, Block, SwiGLU
from model.ngrams import NGrams
from model.rope import Pope
from model.size import without_weights
from model.surgery import EDITS, PLAIN_TYPES, check_gpt, plain_name, uncompiled, under_all_names


def plain_weights(model: GPT) -> dict[str, Tensor]:
    """Return the weights under their plain names, without an lm_head tied to the embedding.

    model: also one that torch.compile() returned, or with such blocks.
    """
    model = uncompiled(model)
    weights = {plain_name(name): tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del weights["lm_head.weight"]
    return weights


def check_weights(model: GPT) -> None:
    """Raise SettingsError unless a model has the weights that its settings ask for.

    A file of them would be read by the settings. Layers may have been dropped or copied, an adapter or a pruning mask
    attached, a tied lm_head replaced, or a part edited for a while.
    """
    model = uncompiled(model)
    check_gpt(model)
    config = model.config
    check_unedited(model)
    if len(model.blocks) != config.n_layer:
        problem = f"the model has {len(model.blocks)} blocks, where its settings say n_layer={config.n_layer}"
        raise SettingsError(problem, f"set model.config.n_layer = {len(model.blocks)}")

    # Plain numbers: quantised weights have others beside them, sharded ones are elsewhere.
    weights = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        if type(tensor) not in PLAIN_TYPES:
            problem = f"the model's {name} is of type {type(tensor).__name__}, for which a file of weights has no place"
            remedy = "torch.save(model.state_dict(), FILE) keeps it, and load_state_dict(…, assign=True) takes it"
            raise SettingsError(problem, f"write the model before it is quantised or sharded; {remedy}")

    # Names and shapes: those of a model that is built by the settings.
    wanted = {name: (*tensor.shape,) for name, tensor in without_weights(config).state_dict().items()}
    given = {name: (*tensor.shape,) for name, tensor in weights.items()}
    changed = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
    if changed:
        name = changed[0]
        problem = f"the model's {name} is {given.get(name)}, where its settings ask for {wanted.get(name)}"
        if name not in wanted:
            problem = f"the model has {name}, which its settings do not ask for"
        elif name not in given:
            problem = f"the model has no {name}, which its settings ask for"
        remedy = "set model.config to what the model is, and merge or remove what was attached to its weights"
        remedy += "; torch.save(model.state_dict(), FILE) keeps one with other parts"
        raise SettingsError(problem, remedy_by_pattern(model) or remedy)

    # A tied head is not written.
    head, embedding = (weights[f"{name}.weight"] for name in ("lm_head", "token_embedding"))
    if config.tie_embeddings and not torch.equal(head.nan_to_num(), embedding.nan_to_num()):  # no NaN is a NaN
        problem = "lm_head and the token embedding differ, where the model's settings say tie_embeddings=true"
        raise SettingsError(problem, "set model.config.tie_embeddings = False, or tie them again")


def check_unedited(model: GPT) -> None:
    """Raise SettingsError within a block of without() or edited(), whose edits are in no weight."""
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(hook is edit for hook in hooks for edit in EDITS):
            problem = f"the model's {plain_name(name)} is edited by without() or edited(), which no file of weights has"
            remedy = "write the model after the block; docs/library.md has the lines that switch a part off for good"
            raise SettingsError(problem, remedy)


def check_choices(model: GPT, but: Container[str] = ()) -> None:
    """Raise SettingsError if a setting without weights was changed in a made model.

    Such a setting had its effect then: the model computes as before, and one that is built by the settings otherwise.
    The same is true of a block, a layer or an MLP in whose place one of another class has weights of the same names. A
    layer's scale has no setting: it may not be set by hand either. but: settings that a file takes from the layers.
    """
    model = uncompiled(model)
    made = {plain_name(name): module for name, module in model.named_modules()}
    for name, module in without_weights(model.config).named_modules():
        # Such as a block whose norms come after attention and MLP.
        given = made.get(name, module)
        form = getattr(module, "form", None)  # two forms may compute the same
        if getattr(given, "form", form) == form and _has_other_functions(given, module):
            problem = f"the model's {name} is a {type(given).__name__}, which no setting of a model makes"
            raise SettingsError(problem, "torch.save(model.state_dict(), FILE) keeps a model with parts of one's own")
        choices = _choices(made[name]) if name in made else {}
        for setting, choice in _choices(module).items():
            if setting not in but and choices.get(setting, choice) != choice:
                problem = f"the model's {name} has {setting}={choices[setting]}, which no setting of a model says"
                remedy = "set it back"
                if hasattr(model.config, setting):
                    value = getattr(model.config, setting)
                    problem = f"model.config.{setting} is {value}, and the model's {name} computes with another"
                    remedy += ", or build a GPT with it and load the weights, as docs/library.md does"
                    remedy = remedy_by_pattern(model) or remedy
                raise SettingsError(problem, remedy)


def remedy_by_pattern(model: GPT) -> str | None:
    """Return the remedy for blocks that stand in another order than the settings say.

    None if their order is that, or a layer is as no part of the pattern in the settings.
    """
    parts = model.config.attention.split("/")
    made = without_weights(replace(model.config, n_layer=max(len(parts), len(model.blocks)))).attentions
    wanted = [_choices(attention) for attention in made]
    own = [_choices(attention) for attention in model.attentions]
    if own == wanted[: len(own)] or not all(each in wanted[: len(parts)] for each in own):
        return None
    pattern = "/".join(parts[wanted.index(each)] for each in own)
    return f"set model.config.attention = {pattern!r}, as its blocks have it"


def _has_other_functions(given: nn.Module, module: nn.Module) -> bool:
    """Return whether a block, a layer or an MLP has other functions than that of the settings.

    module: that of the settings. A class that is defined again has functions of the same names; one of FSDP inherits
    ours.
    """
    if not isinstance(module, (Block, MultiHeadAttention, MLP, SwiGLU)):
        return False
    functions = inspect.getmembers(type(module), inspect.isfunction)
    own = [(name, function) for name, function in functions if getattr(nn.Module, name, None) is not function]
    return any(_place(getattr(type(given), name, None)) != _place(function) for name, function in own)


def _place(function: Any) -> tuple[str | None, str | None]:
    """Return the module and the full name of a function."""
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def _choices(module: nn.Module) -> dict[str, Any]:
    """Return what a module computes with besides weights, by the setting that chose it."""
    if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):  # ours or torch's
        return {"norm": isinstance(module, nn.RMSNorm), "norm_eps": module.eps}
    if isinstance(module, MLP):
        return {"mlp": repr(module.activation)}  # a partial that was copied is no longer equal
    if isinstance(module, Pope):
        return {"rope_theta": module.theta}
    if isinstance(module, NGrams):
        return {"ngrams": module.sizes}
    if not isinstance(module, MultiHeadAttention):
        return {}
    weighting = module.function.weighting
    form = "sdpa" if module.form in (*SOFTMAX, "stacked") else module.form  # these compute the same
    choices = {
        "n_head": [module.n_head, module.kv_heads, module.head_dim],
        "scale": module.scale,
        "block_size": [getattr(module, name, None) for name in ("block", "best")],  # of moba, index and dsa
        "score_softcap": weighting.options,
        "attention": [form, weighting.name, module.function.null_key, *module.modifiers],
        "attention_window": module.window,
        "allow_neg_eigval": getattr(module, "largest_beta", None),
        "position": [module.rope is None, module.pope is None, module.alibi],
    }
    if module.rope is not None:
        rope = module.rope
        trained = None if rope.scaling == "linear" else rope.trained  # which reads it not
        scaling = "none" if rope.stretch == 1 else [rope.scaling, rope.stretch, trained]
        choices |= {"rope_fraction": rope.channels, "rope_proportional": rope.whole, "rope_theta": rope.theta}
        choices["rope_scaling"] = scaling
    return choices


def load_weights(model: GPT, weights: dict[str, Tensor]) -> None:
    """Copy the weights of `plain_weights`, or of a state_dict(), into a model.

    Raises ValueError, naming a weight, if they do not fit.
    """
    weights = under_all_names(model, weights)
    wanted = {(name, tensor.shape) for name, tensor in model.state_dict().items()}
    given = {(name, tensor.shape) for name, tensor in weights.items()}
    if wanted != given:
        wrong = min(name for name, shape in wanted ^ given)
        raise ValueError(f"the weight {wrong} is missing, or does not fit the settings")
    model.load_state_dict(weights)


def save_file(weights: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file whose mode follows the umask.

    The library makes files that their owner alone may read. Weights that several layers share are written for each.
    Raises OSError if the disk is full.
    """
    places = set[int]()
    for name, tensor in weights.items():
        if tensor.data_ptr() in places:  # the library refuses two names for one memory
            weights = weights | {name: tensor.clone()}
        places.add(tensor.data_ptr())
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
    with suppress(OSError):  # of a disk without permissions, which refuses any change
        file.chmod(mode)

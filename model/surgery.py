"""A model that a person has changed: parts hooked, wrapped, replaced, copied or dropped.

Code may read the weight of a module, or stand for its forward(), only while the module is as its class made it. The
loss by chunks, for example, reads lm_head.weight, and would leave out an adapter of LoRA.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from common.errors import SettingsError
from model.layers import Linear

Module = TypeVar("Module", bound=nn.Module)

PLAIN_NUMBERS = (nn.Parameter, Tensor)
"""The types of weights that are numbers alone; quantised ones have others."""
PLAIN_TYPES = (*PLAIN_NUMBERS, FakeTensor)
"""The types of weights that are numbers alone, or their shapes."""
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
EDITS: WeakSet[Any] = WeakSet()
"""The hooks of model/apart.py, by which a part is another one for a while."""
CALL = ("__call__", "_call_impl", "_wrapped_call_impl", "_compiled_call_impl")
"""By which torch calls a module: those of an instance or a class may be replaced."""
Method = tuple[type, str, Any]
"""A class, the name of one of its functions, and the function that it has at first."""
LINEAR: list[Method] = [(owner, "forward", owner.forward) for owner in (Linear, nn.Linear)]
LINEAR += [(nn.Module, name, getattr(nn.Module, name)) for name in CALL]


def is_watched(methods: Sequence[Method]) -> bool:
    """Return whether a hook is on all modules, or one of these classes has another function."""
    if torch.nn.modules.module._has_any_global_hook():
        return True
    return any(getattr(owner, name) is not method for owner, name, method in methods)


def is_untouched(module: nn.Module, cls: type[Module]) -> TypeGuard[Module]:
    """Return whether a module is of a class, without hooks and replaced methods."""
    # An attribute of the object that has the name of a method takes its place.
    has_hooks = any(getattr(module, hooks) for hooks in HOOKS)
    is_patched = any(name in CALL or callable(getattr(cls, name, None)) for name in vars(module))
    return type(module) is cls and not has_hooks and not is_patched


def is_replaced(module: nn.Module, cls: type[nn.Module], name: str) -> bool:
    """Return whether a method of a class is another one in a module, or in the module's class."""
    return name in vars(module) or getattr(type(module), name) is not getattr(cls, name)


def is_matrix(layer: nn.Module) -> TypeGuard[Linear]:
    """Return whether a layer is its weight and bias alone, which code may then read.

    A hook, an adapter, a quantised weight or another module has to be called; so has each layer where a hook is on all
    modules, or the class has another function.
    """
    return is_untouched(layer, Linear) and type(layer.weight) in PLAIN_TYPES and not is_watched(LINEAR)


def uncompiled(model: Any) -> Any:
    """Return the model that torch.compile() was given, or the model itself."""
    return getattr(model, "_orig_mod", model)


def plain_name(name: str) -> str:
    """Return the name of a weight or module without the parts that torch.compile() puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def saved_name(name: str) -> str:
    """Return the plain name of a saved weight, also of DistributedDataParallel."""
    return plain_name(name).removeprefix("module.")


def fit_names(model: Any, weights: dict[str, Tensor], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Give weights the names of the model, before load_state_dict() compares them.

    metadata: torch's, which says if the weights are assigned: then they are shared no more, and each name gets one.
    Raises ValueError as check_shared() does.
    """
    rename_wrapped(model, weights, prefix)
    if metadata.get("assign_to_params_buffers", False):
        name_shared(model, weights, prefix)
    else:
        check_shared(model, weights, prefix)


def under_all_names(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with the names of the model, those that modules share under all of theirs."""
    named = copy.copy(weights) if isinstance(weights, dict) else dict(weights)  # a state_dict() keeps its versions
    rename_wrapped(model, named, "")
    name_shared(model, named, "")
    return named


def rename_wrapped(model: Any, weights: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Rename weights of a model that torch.compile() or DistributedDataParallel returned.

    Their names have more parts; so may those of this one. A model that an earlier version pickled has this hook alone.
    """
    names = model.state_dict().keys()
    own = {plain_name(name): name for name in names}
    for key in [key for key in weights if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if name not in names and saved_name(name) in own:
            weights[prefix + own[saved_name(name)]] = weights.pop(key)


def name_shared(model: Any, weights: dict[str, Tensor], prefix: str) -> None:
    """Give a weight that modules share all its names, where one of them is loaded.

    A tied lm_head has two; safetensors' save_model() keeps one.
    """
    for shared in shared_names(model, prefix):
        given = [name for name in shared if name in weights]
        if given:
            weights.update({name: weights[given[0]] for name in shared if name not in weights})


def check_shared(model: Any, weights: dict[str, Tensor], prefix: str) -> None:
    """Raise ValueError if two names of one weight have different numbers.

    torch would keep those of the later name.
    """
    for shared in shared_names(model, prefix):
        given = [name for name in shared if name in weights]
        for name in given[1:]:
            if differ(weights[given[0]], weights[name]):
                problem = f"{given[0]} and {name} are one weight of the model, and differ in what is loaded"
                remedy = "load them into a model where they are two, as with tie_embeddings=False, or leave one out"
                raise ValueError(f"{problem}: {remedy}.")


def shared_names(model: Any, prefix: str) -> list[list[str]]:
    """Return the names of each weight that modules share."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(prefix + name)
    return [each for each in names.values() if len(each) > 1]


def differ(a: Tensor, b: Tensor) -> bool:
    """Return whether two weights of one kind have different numbers; NaN is equal to NaN."""
    if a is b or not (type(a) in PLAIN_NUMBERS and type(b) in PLAIN_NUMBERS) or a.is_meta:
        return False
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False  # torch tells, or converts
    return not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def tie_again(model: Any, keys: Any) -> None:
    """Tie lm_head to the embedding after weights were loaded, if the settings still say so.

    load_state_dict(assign=True) unties them: two equal weights, which would then be trained apart.
    """
    if not model.config.tie_embeddings:
        return
    embedding = getattr(model.token_embedding, "weight", None)  # a module around it may have none
    if embedding is None or type(model.lm_head) is not Linear or model.lm_head.weight is embedding:
        return
    if type(embedding) not in PLAIN_TYPES or type(model.lm_head.weight) not in PLAIN_TYPES:
        return  # a quantised one is apart
    if embedding.is_meta or torch.equal(model.lm_head.weight, embedding):
        model.lm_head.weight = embedding


def read(model: Any, tokens: Any, **given: Any) -> None:
    """Let the layers of a GPT read tokens, which a hook on the model may change."""
    called = model if model.is_hooked else model.hidden
    called(tokens, **given)


def check_gpt(model: Any) -> None:
    """Raise ValueError for a module around a GPT, such as torch's average of the weights.

    So it does for a hook on what torch.compile() returned: the model that it was given is read, which has no such hook.
    """
    if uncompiled(model) is not model and any(getattr(model, hooks) for hooks in HOOKS):
        raise ValueError("a hook is on what torch.compile() returned: set it on the model that was compiled.")
    model = uncompiled(model)
    if not hasattr(model, "lm_head"):
        name = type(model).__name__
        raise ValueError(f"the model is of type {name}: give the GPT in it, such as its module or its model.")


def check_input(model: Any, tokens: Tensor, doc_starts: Tensor | None, cache: Any) -> None:
    """Raise ValueError for tokens that are no ids (B, T) or do not fit doc_starts or the cache."""
    check_type("tokens", tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens {(*tokens.shape,)} need the shape (B, T): tokens[None] is a batch of one text.")
    if doc_starts is not None and doc_starts.shape != tokens.shape:
        raise ValueError(f"doc_starts {(*doc_starts.shape,)} need the shape (B, T) of tokens {(*tokens.shape,)}.")
    if cache is not None and cache.position == 0:
        check_places(model.attentions)
    B = tokens.size(0)
    if cache is not None and cache.texts not in (None, B):
        problem = f"tokens of {B} texts do not continue a cache of {cache.texts}"
        raise ValueError(f"{problem}: cache.take(torch.tensor([0] * {B})) has the first of them as often.")


def check_type(name: str, ids: Any) -> None:
    """Raise ValueError unless ids are a tensor of a type that torch looks up in a table."""
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"{name} are of type {type(ids).__name__}: make a tensor of them, torch.tensor({name}).long()."
        )
    if ids.is_nested:
        padded = "torch.nested.to_padded_tensor(tokens, 0), and targets with -100"
        raise ValueError(f"{name} are nested: pad the texts on the right, {padded}.")
    if ids.ndim == 3 and ids.is_floating_point():
        problem = f"{name} {(*ids.shape,)} are {ids.dtype}, and ids (B, T) are needed"
        of_tokens = "a hook on model.token_embedding gives embeddings of your own (docs/library.md)"
        of_targets = "F.cross_entropy(model(tokens).mT, targets.mT) takes probabilities"
        raise ValueError(f"{problem}: {of_tokens if name == 'tokens' else of_targets}.")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} are {ids.dtype}: make int64 of them, {name}.long().")


def check_places(layers: Sequence[Any]) -> None:
    """Raise ValueError if two layers have one place in a cache, as copies of a block do."""
    places = [layer.layer_idx for layer in layers]
    for number, place in enumerate(places):
        first = places.index(place)
        if layers[first] is layers[number] and first < number:
            raise one_module(first, number, "a cache has a place for each layer")
        if first < number:
            problem = f"blocks {first} and {number} have one place in a cache, layer_idx={place}"
            raise ValueError(f"{problem}: number them by model.number_layers().")


def one_module(first: int, second: int, needs: str) -> SettingsError:
    """Return the error for two blocks that are one module, or have one."""
    copied = "copy.deepcopy(block, {id(weight): weight for weight in block.parameters()})"
    problem = f"blocks {first} and {second} are one module, or have one, and {needs}"
    return SettingsError(problem, f"put a copy with the same weights in place, {copied}, then model.number_layers()")


def embedded(embedding: nn.Module, tokens: Tensor) -> Tensor:
    """Return the embeddings of token ids (B, T), by a table or a module in its place.

    Raises ValueError that names an unknown id, where torch's IndexError does not, and for rows of another number.
    """
    try:
        x = embedding(tokens)
    except IndexError:
        check_ids(embedding, tokens)
        raise
    if x.shape[:2] != tokens.shape:
        problem = f"token_embedding returned {(*x.shape,)} for tokens {(*tokens.shape,)}"
        raise ValueError(f"{problem}: it has to return a row for each token, also for one that is decoded.")
    return x


def check_head(logits: Tensor, vocab_size: int | None) -> None:
    """Raise ValueError if logits are fewer than the ids, as those of a classifier."""
    if vocab_size is not None and logits.shape[-1] < vocab_size:
        problem = f"lm_head returned {logits.shape[-1]} logits for a vocabulary of {vocab_size} ids, vocab_size"
        raise ValueError(f"{problem}: a classifier writes no text, and its logits are model(tokens, last=True).")


def check_ids(embedding: nn.Module, tokens: Tensor) -> None:
    """Raise ValueError for an id that the vocabulary does not have."""
    # A person may have put a module around the embedding, such as one that learns a soft prompt.
    table = next((part for part in embedding.modules() if isinstance(part, nn.Embedding)), None)
    if table is None:
        return
    V = table.num_embeddings
    wrong = tokens[(tokens < 0) | (tokens >= V)]
    if len(wrong):
        problem = f"token id {wrong[0].item()} is not in the vocabulary of {V} ids, 0 to {V - 1}"
        raise ValueError(f"{problem}: encode the text by the model's own tokenizer.") from None

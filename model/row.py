"""Decoding: the model in eval mode, and on a CPU a token's short way through its blocks.

A token computes little: besides the weights that it reads, calls of modules and operators set its time. A step here
computes the same as the layer's forward(), for one token of a single text. Like an executor of attention it declares
what it serves: RMSNorm, linear layers, both MLPs, and softmax attention with nothing over its scores but a window. Any
other module is called as it is: one with modifiers or with RoPE on a part of its channels, and one to which code is
attached, such as a hook, an adapter, a parametrisation or another forward(). All are called if a function that the
steps repeat was edited: an edit of gpt.py or layer.py alone is slower here, never wrong.

The default model writes 1.5 times as many tokens a second, with 6 layers of 384 channels 1.3 times
(benchmarks/RESULTS.md).
"""

import ast
import hashlib
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import chain
from operator import call, itemgetter
from textwrap import dedent
from tokenize import TokenError
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model.attention.call import features
from model.attention.context import AttentionContext
from model.attention.layer import MultiHeadAttention
from model.attention.weighting import PLAIN
from model.cache import DocStarts, KVCache, Tokens
from model.cpu import decodes, multiply, normalize
from model.gpt import GPT, MLP, Block, SwiGLU
from model.layers import Linear, RMSNorm
from model.modes import eval_mode, eval_twin, lock_of
from model.rope import rotate, turn
from model.surgery import CALL, HOOKS, Method, is_untouched, is_watched

Token = Float[Tensor, "1 1 C"]
Step = Callable[[Token], Token]
AttentionStep = Callable[[Token, AttentionContext], Token]
FIELDS = {"window", "scale"}
"""The fields of a call that an attention step serves: the cache is cut to the window."""
OF_TORCH = vars(nn.Module()).keys() - {"training", "_modules"}
"""The attributes of torch's own that each module has, but its mode and its parts."""


class DecodedModel:
    """A model as it is decoded, in eval mode.

    Its owner may train it and change it between two tokens. Nothing of the model is changed or copied: a step reads
    the weights that it has at that moment.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        with lock_of(model):
            self.prepare()

    def prepare(self) -> None:
        """Choose the modules to call, and make the steps, for the model as it is now."""
        modules = list(self.model.modules())
        # A traced module is closed: nothing is attached to it, or replaced in it.
        self.modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        hooks = [[getattr(module, name) for name in HOOKS] for module in self.modules]
        self.no_hooks = [each for of_module in hooks if not any(of_module) for each in of_module]
        self.attributes = [vars(module) for module in self.modules]
        self.parts = [module._modules for module in self.modules]
        self.weights = [module._parameters for module in self.modules]
        # A part that torch.compile() returned has no mode of its own.
        self.getters = [itemgetter(*(vars(module).keys() - OF_TORCH)) for module in self.modules]
        self.state = self.current_state()
        self.weight = next(self.model.parameters())  # any one: all have its type and device

        # A twin in eval mode spares the model a change of its mode. Code that is attached to a module may know it by
        # its identity, or belong to it: then the module itself has to be called.
        self.trains = any(module.training for module in modules)
        is_bare = all(is_untouched(module, type(module)) and is_known(type(module)) for module in modules)
        self.has_twin = self.trains and is_bare
        self.called: Any = eval_twin(self.model) if self.has_twin else self.model
        self.blocks = None
        if not self.called.training and is_untouched(self.called, GPT) and repeats_present_code():
            self.blocks = [block_step(block) for block in self.called.blocks]

    def current_state(self) -> list[Any]:
        """Return what a step may depend on, besides the numbers in the weights.

        These are the classes, attributes and parameters of all parts. In few calls, for it is asked before each token.
        """
        return [
            *map(type, self.modules),
            *map(len, self.attributes),
            *map(call, self.getters, self.attributes),
            *chain.from_iterable(map(dict.values, self.parts)),
            *map(id, chain.from_iterable(map(dict.values, self.weights))),
        ]

    def refresh(self) -> None:
        """Prepare anew if anything was attached to the model, or replaced in it."""
        with lock_of(self.model):  # another thread may set its mode for a while
            try:
                is_same = not any(self.no_hooks) and self.current_state() == self.state
            except (RuntimeError, ValueError):  # tensors and arrays do not compare to one truth
                is_same = False
            if not is_same:
                self.prepare()

    def next_logits(self, tokens: Tokens, cache: KVCache, doc_starts: DocStarts = None) -> Float[Tensor, "B V"]:
        """Return the logits after the last token, in eval mode.

        They are those of model(tokens, doc_starts=doc_starts, cache=cache, last=True). The model keeps its mode, for a
        caller may train it between two tokens.
        """
        self.refresh()
        model = self.called
        with eval_mode(model) if self.needs_eval_mode else nullcontext():
            is_row = tokens.numel() == 1 and doc_starts is None and cache.doc_starts is None
            steps = self.steps if is_row else None
            if steps is None:
                return model(tokens, doc_starts=doc_starts, cache=cache, last=True)[:, 0]
            # As GPT.hidden() does.
            x, ctx = model.embed(tokens, doc_starts, cache, AttentionContext())
            for step in steps:
                x = step(x, ctx)
            logits = model.logits(x[:, -1])
            cache.advance(1)  # last, so that a failure leaves the cache where it was
            return logits

    @property
    def needs_eval_mode(self) -> bool:
        """Whether parts of the called model are in training mode."""
        return self.trains and not self.has_twin

    @property
    def steps(self) -> list[AttentionStep] | None:
        """The steps of the blocks; None if modules have to be called.

        They have to on a GPU and in other types than float32 too.
        """
        if self.blocks is None or is_watched(METHODS) or not decodes(self.weight.data):
            return None
        return self.blocks


def is_known(cls: type) -> bool:
    """Return whether modules of a class, which is torch's or ours, may have a twin."""
    return cls.__module__.startswith(("torch.nn.modules.", "model."))


# The functions of classes that the steps stand for.
OWNERS: list[type] = [Block, MultiHeadAttention, MLP, SwiGLU, Linear, RMSNorm, nn.Linear, nn.Identity, nn.Dropout]
NAMES = [(owner, name) for owner in OWNERS for name, value in vars(owner).items() if callable(value) and name[0] != "_"]
NAMES += [(Block, "_forward"), (GPT, "hidden"), (GPT, "embed"), (GPT, "logits"), (GPT, "forward")]
NAMES += [(nn.Module, name) for name in CALL]
METHODS: list[Method] = [(owner, name, getattr(owner, name)) for owner, name in NAMES]


LAYER = "forward head_outputs queries_keys_values project rotate make_call attend compute merge"
REPEATED: list[Any] = [GPT.hidden, Block.forward, Block._forward, MLP.forward, SwiGLU.forward, Linear.forward]
REPEATED += [RMSNorm.forward, rotate, turn, *(getattr(MultiHeadAttention, name) for name in LAYER.split())]
DIGEST = "a9961c66c0d2b384"
"""That of the code which the steps below repeat. Where it was edited, they are not taken: the modules are called, and a
test fails. Let the steps do the same, and write the digest that the test names.
"""


@cache
def repeats_present_code() -> bool:
    """Return whether the functions that the steps repeat are those for which they were written.

    Their files are read now: one that is being edited while this process runs may have anything in their lines.
    """
    try:
        return digest_of(REPEATED) == DIGEST
    except (OSError, TypeError):  # without their source nobody has edited them
        return True
    except (SyntaxError, ValueError, TokenError):
        return False


def digest_of(functions: list[Any]) -> str:
    """Return a digest of functions' statements, whatever their comments and docstrings."""
    digest = hashlib.sha256()
    for function in functions:
        (tree,) = ast.parse(dedent(inspect.getsource(inspect.unwrap(function)))).body
        if not isinstance(tree, ast.FunctionDef):
            raise ValueError(f"the lines of {function.__qualname__} are no function any more")
        statements = tree.body[ast.get_docstring(tree) is not None :]
        digest.update("\n".join(map(ast.unparse, statements)).encode())
    return digest.hexdigest()[:16]


def block_step(block: nn.Module) -> Any:
    if not is_untouched(block, Block) or not is_identity(block.dropout):
        return block
    attention_norm = norm_step(block.attention_norm)
    attention = attention_step(block.attention)
    mlp_norm = norm_step(block.mlp_norm)
    mlp = mlp_step(block.mlp)

    def step(x: Token, ctx: AttentionContext) -> Token:
        x = x + attention(attention_norm(x), ctx)
        return x + mlp(mlp_norm(x))

    return step


def is_identity(dropout: nn.Module) -> bool:
    return is_untouched(dropout, nn.Identity) or (is_untouched(dropout, nn.Dropout) and not dropout.training)


def norm_step(norm: nn.Module) -> Step:
    if not is_untouched(norm, RMSNorm) or not has_plain(norm, "weight"):
        return norm
    weight = norm.weight
    eps = norm.eps
    return lambda x: normalize(x, weight, eps)


def linear_step(linear: nn.Module) -> Step:
    if not is_untouched(linear, Linear) or not has_plain(linear, "weight", "bias"):
        return linear
    weight = linear.weight
    bias = linear.bias
    return lambda x: multiply(x, weight, bias)


def has_plain(module: nn.Module, *names: str) -> bool:
    """Return whether these are None or float32 parameters on a CPU, not quantised ones."""
    weights = [module._parameters.get(name, ()) for name in names]  # () of a weight that is computed, or a buffer
    return all(
        weight is None or (type(weight) is nn.Parameter and weight.is_cpu and weight.dtype == torch.float32)
        for weight in weights
    )


def mlp_step(mlp: nn.Module) -> Step:
    if is_untouched(mlp, SwiGLU):
        up = linear_step(mlp.gate_up_proj)
    elif is_untouched(mlp, MLP):
        up = linear_step(mlp.up_proj)
    else:
        return mlp
    activation = mlp.activation
    down = linear_step(mlp.down_proj)
    return lambda x: down(activation(up(x)))


def serves(layer: MultiHeadAttention) -> bool:
    """Return whether attention_step() knows all that a layer does."""
    if not is_untouched(layer, MultiHeadAttention) or layer.modifiers or layer.pope is not None:
        return False
    norms = layer.q_norm, layer.k_norm
    is_normed = all(is_untouched(norm, RMSNorm) and has_plain(norm, "weight") for norm in norms)
    is_bare = all(is_untouched(norm, nn.Identity) for norm in norms)
    if not is_bare and not (is_normed and layer.q_norm.eps == layer.k_norm.eps):
        return False
    if layer.rope is not None and layer.rope.channels < layer.head_dim:
        return False
    # Its call says what lies over the scores.
    q = torch.zeros(1, layer.query_heads, 1, layer.head_dim, device="cpu")
    k = torch.zeros(1, layer.kv_heads, 1, layer.head_dim, device="cpu")
    made = layer.make_call(q, k, k, AttentionContext())
    return made.weighting is PLAIN and FIELDS.issuperset(features(made))


def attention_step(layer: MultiHeadAttention) -> AttentionStep:
    if not serves(layer):
        return layer
    H = layer.query_heads
    Hkv = layer.kv_heads
    D = layer.head_dim
    rope = layer.rope
    project = linear_step(layer.qkv_proj)
    merge = linear_step(layer.o_proj)
    scale = D**-0.5 if layer.scale is None else layer.scale
    q_norm = layer.q_norm if isinstance(layer.q_norm, RMSNorm) else None
    k_norm: Any = layer.k_norm

    def step(x: Token, ctx: AttentionContext) -> Token:
        # Project, normalise and rotate: a row of D channels for each head.
        qk, v = project(x).view(-1, D).split((H + Hkv, Hkv))
        if q_norm is not None:  # one for the rows of all heads
            weights = torch.cat((q_norm.weight.expand(H, D), k_norm.weight.expand(Hkv, D)))
            qk = normalize(qk, weights, q_norm.eps)
        if rope is not None:
            points = qk.view(torch.complex64)  # (n, D/2): a pair of channels is a number
            qk = (points * torch.view_as_complex(ctx.rotation(rope, x))).view(qk.dtype)
        q, k = qk.split((H, Hkv))

        # Cache, and take the keys in the window.
        keys, values = layer.update_cache(k.view(1, Hkv, 1, D), v.view(1, Hkv, 1, D), ctx)
        first = -(layer.window or 0)
        keys = keys[0, :, first:]  # (Hkv, S, D)
        values = values[0, :, first:]

        # Attend: the queries that share a key are the rows of one product.
        scores = torch.bmm(q.view(Hkv, -1, D) * scale, keys.mT)  # (Hkv, H / Hkv, S)
        y = torch.bmm(scores.softmax(-1), values)
        return merge(y.view(1, 1, H * D))

    return step

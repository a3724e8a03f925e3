"""A model taken apart: parts off or replaced, and what each adds to the stream and to a logit."""

from __future__ import annotations

import copy
import pickle
from contextlib import ExitStack, contextmanager
from threading import Thread, get_ident
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import close, random_gpt, some, tokens_drawn
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from common.errors import SettingsError
from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from generation.config import SamplingParams
from interop.huggingface import to_huggingface
from model.apart import Part, contributions, edited, means, parts, results, streams, without, writes
from model.attention import FORMS, MODIFIERS, MultiHeadAttention
from model.attention import SETTINGS as ATTENTION_SETTINGS
from model.gpt import GPT
from model.heads import for_each_layer
from pages.demo import demo_page
from runs.checkpoint import Checkpoint, Meta, open_checkpoint, save_checkpoint
from training.config import TrainConfig

BYTE = make_tokenizer(TokenizerConfig(name="byte"), ())
TOKENS = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(1))
OTHER = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(2))
SETTINGS = {
    "default": {},
    "biases": dict(bias=True, qkv_bias=True, norm="layernorm", mlp="gelu", position="learned"),
    "grouped": dict(n_kv_head=1, attention="sdpa+gate+sink+value_residual+diff", tie_embeddings=True),
    "narrow": dict(head_size=6, mlp="relu2", logit_softcap=5.0, attention="sdpa+window/delta", attention_window=5),
    "n-grams": dict(ngrams=[2], ngram_rows=50, position="alibi", norm="layernorm", bias=True),
}
BESIDE_SDPA = [f"sdpa+{modifier}" for modifier in (*ATTENTION_SETTINGS, *MODIFIERS)]
EVERY = [*SETTINGS, *FORMS, *BESIDE_SDPA]
"""The settings above, every form, and every modifier beside sdpa."""
of_every = pytest.mark.parametrize("name", [*some(SETTINGS, 2), *some([*FORMS, *BESIDE_SDPA], 28)])


def model_of(name: str) -> GPT:
    settings = SETTINGS.get(name, {"attention": name})
    if "window" in settings.get("attention", ""):
        settings = {"attention_window": 5} | settings
    return random_gpt(**settings)


def heads(model: GPT, layer: int) -> list[Part]:
    return [part for part in parts(model) if part.layer == layer and part.head is not None]


def hooks(model: GPT) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@of_every
@torch.no_grad()
def test_a_part_that_is_off_is_one_whose_output_weights_are_zero(name):
    model = model_of(name)
    own = model(TOKENS)
    for part in (parts(model)[0], Part(1)):
        with without(model, part):
            found = model(TOKENS)
        block = model.blocks[part.layer]
        if part.head is None:
            names = dict(block.mlp.down_proj.named_parameters())  # weight, and bias if there is one
        else:
            o_proj = block.attention.o_proj
            names = {"weight": o_proj.weight[:, : block.attention.head_dim]} if hasattr(o_proj, "weight") else {}
        kept = [(each, each.clone()) for each in names.values()]
        for each, _ in kept:
            each.zero_()
        if names:
            close(found, model(TOKENS))
        for each, before in kept:
            each.copy_(before)
        assert not torch.allclose(found, own, atol=1e-3)
        assert torch.equal(model(TOKENS), own) and not hooks(model)


@torch.no_grad()
def test_what_is_read_of_a_model_is_of_this_thread_and_a_copy_with_its_weights_lacks_the_edits():
    """Another thread reads other tokens with the model within the first block of this one's pass."""
    model = model_of("default")
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    alone = results(model, TOKENS), streams(model, TOKENS)
    plain = model(OTHER)
    main = get_ident()
    read: list[torch.Tensor] = []

    def interrupt(module, arguments, result):
        if get_ident() == main:
            other = Thread(target=lambda: read.append(model(OTHER)))
            other.start()
            other.join()

    hook = model.blocks[0].mlp.register_forward_hook(interrupt)
    found = results(model, TOKENS), streams(model, TOKENS)
    hook.remove()
    assert all(torch.equal(found[0][part], result) for part, result in alone[0].items())
    assert all(torch.equal(*pair) for pair in zip(found[1], alone[1], strict=True))
    assert read
    for each in read:
        close(each, plain)

    with without(model, Part(0, 1)):
        off = model(OTHER)
        reader = Thread(target=lambda: read.append(twin(OTHER)))
        reader.start()
        reader.join()
    close(read[-1], plain)
    assert not torch.allclose(off, plain, atol=1e-3)


def test_the_compiler_has_its_stance_back_after_edits_that_are_left_in_another_order(monkeypatch):
    stances = ["default"]

    @contextmanager
    def set_stance(stance: str):  # each gives back the one before, as torch's
        before = stances[-1]
        stances.append(stance)
        yield
        stances.append(before)

    monkeypatch.setattr("model.modes.sys", SimpleNamespace(modules={"torch._dynamo": None}))
    monkeypatch.setattr(torch.compiler, "set_stance", set_stance)
    model = model_of("default")
    one, other = without(model, Part(0, 1)), without(model, Part(1))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert stances[-1] == "force_eager"
    other.__exit__(None, None, None)
    assert stances[-1] == "default"


class Silent(torch.nn.Module):
    """Attention that adds nothing but a bias."""

    def __init__(self, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x, ctx):
        return torch.zeros_like(x) if self.bias is None else self.bias.expand_as(x)


@of_every
@torch.no_grad()
def test_all_heads_of_a_layer_off_are_its_attention_removed(name):
    model = model_of(name)
    for block in model.blocks:
        if "value_residual" in block.attention.modifiers:
            # Later layers take the values of an attention that is off, but not of one that is gone.
            block.attention.modifiers["value_residual"].mixture[1] = 0
    with without(model, *heads(model, 0)):
        found = model(TOKENS)
    bias = getattr(model.blocks[0].attention.o_proj, "bias", None)
    model.blocks[0].attention = Silent(bias)
    close(found, model(TOKENS))


@torch.no_grad()
def test_the_values_of_a_head_that_is_off_still_reach_later_layers():
    model = random_gpt(attention="sdpa+value_residual")
    with without(model, *heads(model, 0)):
        found = model(TOKENS)
    model.blocks[0].attention.o_proj.weight.zero_()
    close(found, model(TOKENS))


@of_every
@torch.no_grad()
def test_contributions_sum_to_the_logit_and_writes_to_the_stream(name):
    model = model_of(name)
    targets = OTHER
    found = contributions(model, TOKENS, targets)
    assert [*found] == ["embedding", *parts(model), "bias"]
    logits = model.lm_head(model.final_norm(model.hidden(TOKENS)))  # before logit_softcap
    close(sum(found.values()), logits.gather(-1, targets[..., None])[..., 0], atol=1e-4)
    close(sum(writes(model, TOKENS).values()), model.hidden(TOKENS), atol=1e-4)


@torch.no_grad()
def test_contributions_to_an_ignored_target_are_nothing_and_to_no_id_refused(unchecked):
    model = model_of("sdpa")
    logits = model(TOKENS).gather(-1, OTHER[..., None])[..., 0]
    for ignored in (-1, -100):
        targets = OTHER.clone()
        targets[:, 3:5] = ignored
        wanted = logits * (targets >= 0)
        close(sum(contributions(model, TOKENS, targets).values()), wanted, atol=1e-4)
    for wrong in (-2, -101, 10**6):
        targets[0, 0] = wrong
        with pytest.raises(ValueError, match=f"token id {wrong} is not in the vocabulary"):
            contributions(model, TOKENS, targets)
    with pytest.raises(ValueError, match="need the shape of tokens"):
        contributions(model, TOKENS, OTHER[:, 1:])


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


NORMS_OF_ONES_OWN = {
    "hook": lambda model: model.final_norm.register_forward_hook(lambda module, given, result: 2 * result),
    "hook before": lambda model: model.final_norm.register_forward_pre_hook(lambda module, given: (given[0].abs(),)),
    "forward": lambda model: setattr(model.final_norm, "forward", lambda x: x),
    "module": lambda model: setattr(model, "final_norm", Doubled()),
    "sequence": lambda model: setattr(model, "final_norm", nn.Sequential(model.final_norm, Doubled())),
}


@pytest.mark.parametrize("change", some(NORMS_OF_ONES_OWN.values(), 2), ids=NORMS_OF_ONES_OWN)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_contributions_through_another_norm_are_refused(change, norm):
    """They were those of its weight, up to 12 beside the logit."""
    model = random_gpt(norm=norm)
    contributions(model, TOKENS, TOKENS)
    contributions(copy.deepcopy(model).bfloat16(), TOKENS, TOKENS)
    change(model)
    with pytest.raises(SettingsError, match=r"final_norm has a hook, or is another module, .*: remove the hook, or"):
        contributions(model, TOKENS, TOKENS)


def factors(layer: nn.Linear) -> nn.Module:
    """Return two layers whose product is the weight, as a singular value decomposition leaves them."""
    u, s, v = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    first = nn.Linear(layer.in_features, len(s), bias=False)
    second = nn.Linear(len(s), layer.out_features, bias=layer.bias is not None)
    first.weight.data, second.weight.data = s[:, None] * v, u
    if layer.bias is not None:
        second.bias.data = layer.bias.data
    return nn.Sequential(first, second)


class Adapted(nn.Module):
    """A layer and an adapter with dropout, as LoRA's; `weight` is that of the layer alone."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.weight = layer, layer.weight
        down, up = nn.Linear(layer.in_features, 2), nn.Linear(2, layer.out_features)
        self.adapter = nn.Sequential(nn.Dropout(0.5), down, up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.adapter(x)


@pytest.mark.slow
@pytest.mark.parametrize("replace", some([factors, Adapted, weight_norm], 2))
@pytest.mark.parametrize("name", ["default", "biases", "grouped"])
@torch.no_grad()
def test_heads_write_through_the_module_that_takes_the_place_of_o_proj(name, replace):
    model = model_of(name)
    for block in model.blocks:
        block.attention.o_proj = replace(block.attention.o_proj)
    model.train()
    found, whole = writes(model, TOKENS), streams(model, TOKENS)[1]
    for part in heads(model, 0):  # a head that is off takes what it writes from the stream
        with without(model, part):
            close(found[part], whole - streams(model, TOKENS)[1], atol=1e-4)
    shares = sum(contributions(model, TOKENS, OTHER).values())
    model.eval()
    logits = model.lm_head(model.final_norm(model.hidden(TOKENS)))
    close(shares, logits.gather(-1, OTHER[..., None])[..., 0], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["blocks.0", "blocks.1.attention", "blocks.0.attention.o_proj"])
@torch.no_grad()
def test_a_stream_that_a_hook_changes_is_no_sum_of_parts(place):
    model = random_gpt().to(torch.bfloat16)
    writes(model, TOKENS)  # rounded sums are sums
    module = model.get_submodule(place)
    watch = module.register_forward_hook(lambda module, inputs, result: None)
    writes(model, TOKENS)
    watch.remove()
    steer = module.register_forward_hook(lambda module, inputs, result: result + 5)
    with pytest.raises(SettingsError, match="do not sum to the stream: .*remove such hooks"):
        contributions(model, TOKENS, TOKENS)
    steer.remove()
    contributions(model, TOKENS, TOKENS)


@of_every
@torch.no_grad()
def test_a_run_patched_with_itself_is_unchanged_and_with_another_adds_what_that_one_adds(name):
    model = model_of(name)
    wanted = model(TOKENS)
    own, other = results(model, TOKENS), results(model, OTHER)
    with edited(model, {part: lambda _, part=part: own[part] for part in parts(model)}):
        assert torch.equal(model(TOKENS), wanted)
    with edited(model, {part: lambda _, part=part: other[part] for part in parts(model)}):
        found = model.hidden(TOKENS)
    # Each part adds the same vector as in the other run, and the embedding stays.
    close(found, streams(model, TOKENS)[0] + model.hidden(OTHER) - streams(model, OTHER)[0], atol=1e-4)
    assert not hooks(model)


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_the_streams_begin_with_the_embedding_end_with_the_prediction_and_differ_by_what_is_added(name):
    model = model_of(name)
    found, added = streams(model, TOKENS), writes(model, TOKENS)
    assert len(found) == 1 + 2 * len(model.blocks)
    close(model.logits(found[-1]), model(TOKENS))
    with without(model, *parts(model)):
        assert torch.equal(streams(model, TOKENS)[0], found[0])
    for layer in range(len(model.blocks)):
        before, after, last = found[2 * layer : 2 * layer + 3]
        of_heads = sum(added[part] for part in heads(model, layer))
        bias = getattr(model.blocks[layer].attention.o_proj, "bias", None)
        close(after - before, of_heads if bias is None else of_heads + bias, atol=1e-4)
        close(last - after, added[Part(layer)], atol=1e-4)


@pytest.mark.parametrize("name", some(SETTINGS, 2))
def test_a_loss_after_every_block_has_the_gradient_of_its_differences_and_the_first_blocks_write_it(name):
    """docs/library.md's early exit: hooks, for streams() has no gradient."""
    model = random_gpt(**SETTINGS[name]).double()
    assert not any(stream.requires_grad for stream in streams(model, TOKENS))

    def loss():
        after = []
        hooks = [block.register_forward_hook(lambda block, arguments, x: after.append(x)) for block in model.blocks]
        model(TOKENS)
        for hook in hooks:
            hook.remove()
        return sum(model.logits(x).log_softmax(-1)[:, :-1, 7].sum() for x in after), after

    total, after = loss()
    for x, stream in zip(after, streams(model, TOKENS)[2::2], strict=True):
        close(x, stream)
    weight = model.blocks[0].mlp.down_proj.weight
    (gradient,) = torch.autograd.grad(total, weight)
    direction = torch.randn_like(weight)
    with torch.no_grad():
        values = []
        for step in (1e-5, -2e-5):
            weight += step * direction
            values.append(loss()[0])
        weight += 1e-5 * direction
        close((gradient * direction).sum(), (values[0] - values[1]) / 2e-5, rtol=1e-5, atol=1e-6)
        short = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        short.blocks = short.blocks[:1]
        short.config.n_layer = 1
        short.number_layers()
        assert short.blocks[0].mlp.down_proj.weight is weight
        close(short(TOKENS), model.logits(after[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", some(["default", "biases", "grouped", "narrow", "softmax1", "mla", "gta", "delta+conv", "linear"], 3)
)
def test_a_text_is_written_without_the_parts_that_are_off_and_afterwards_with_all(name):
    settings = SETTINGS.get(name, {"attention": name})
    model = random_gpt(vocab_size=270, **settings)
    prompt, params = [256, 5, 6], SamplingParams(max_new_tokens=5, temperature=0)
    for others in ([], [[256, 9, 9, 7]]):  # one text on a CPU takes another way than two
        prompts = [prompt, *others]
        seeds = [1] * len(prompts)
        whole = tokens_drawn(model, BYTE, prompts, seeds, params)
        with torch.no_grad(), without(model, Part(0, 2), Part(1)):
            found = tokens_drawn(model, BYTE, prompts, seeds, params)
            for begun, drawn in zip(prompts, found, strict=True):
                ids = [*begun]
                for _ in drawn:
                    ids.append(int(model(torch.tensor([ids]))[0, -1, :257].argmax()))
                assert begun + drawn == ids
        assert found != whole == tokens_drawn(model, BYTE, prompts, seeds, params)


@torch.no_grad()
def test_means_are_over_all_tokens_and_take_the_place_of_a_part():
    model = random_gpt()
    found = means(model, TOKENS)
    part = Part(0, 1)
    close(found[part], results(model, TOKENS)[part].flatten(0, 1).mean(0))
    with without(model, part, means=found):
        stream = streams(model, TOKENS)[1]
    D = model.attentions[0].head_dim
    columns = model.blocks[0].attention.o_proj.weight[:, D : 2 * D]
    others = streams(model, TOKENS)[1] - results(model, TOKENS)[part] @ columns.T
    close(stream, others + columns @ found[part])


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "delta"])
def test_means_leave_out_padding_on_either_side(attention):
    """A padded token has a start behind it."""
    model = random_gpt(attention=attention)
    texts = [TOKENS[:1, :9], TOKENS[1:, :4]]
    alone = [results(model, text) for text in texts]
    left = torch.cat((texts[0], nn.functional.pad(texts[1], (5, 0))))
    right = torch.cat((texts[0], nn.functional.pad(texts[1], (0, 5))))
    for padded, starts in ((left, [5] * 9), (right, [0] * 4 + [9] * 5)):
        found = means(model, padded, torch.tensor([[0] * 9, starts]))
        for part in parts(model):
            close(found[part], torch.cat([each[part][0] for each in alone]).mean(0))


@pytest.mark.slow
@torch.no_grad()
def test_documents_are_kept_apart():
    model = random_gpt(attention="sdpa/delta")
    packed = torch.cat((TOKENS[:1, :5], TOKENS[1:, :7]), 1)
    starts = torch.tensor([[0] * 5 + [5] * 7])
    for part, result in results(model, packed, starts).items():
        close(result[:, 5:], results(model, TOKENS[1:, :7])[part])
    close(streams(model, packed, starts)[-1][:, 5:], streams(model, TOKENS[1:, :7])[-1])
    found = contributions(model, packed, packed, starts)
    close(found[Part(1)][:, 5:], contributions(model, TOKENS[1:, :7], TOKENS[1:, :7])[Part(1)])


@torch.no_grad()
def test_blocks_within_blocks_act_in_their_order():
    model = random_gpt()
    part = Part(0, 1)
    with without(model, part):
        assert not results(model, TOKENS)[part].any()
        inner = model(TOKENS)
        with edited(model, {part: lambda result: result + 1}):
            assert torch.equal(results(model, TOKENS)[part], torch.ones_like(results(model, TOKENS)[part]))
        assert torch.equal(model(TOKENS), inner)


@torch.no_grad()
def test_an_edit_may_write_into_its_argument_at_some_tokens():
    model = random_gpt()
    other = results(model, OTHER)
    for part in (Part(0, 1), Part(0)):

        def last(result, part=part):
            result[:, -1] = other[part][:, -1]
            return result

        wanted = model(TOKENS)
        with edited(model, {part: last}):
            found = model(TOKENS)
        assert torch.equal(found[:, :-1], wanted[:, :-1]) and not torch.allclose(found[:, -1], wanted[:, -1])


@pytest.mark.slow
@torch.no_grad()
def test_parts_of_a_block_at_two_places_are_refused_and_of_its_copies_are_those_of_one_layer():
    model = random_gpt(n_layer=3)
    block = model.blocks[0]
    model.blocks = nn.ModuleList([block, model.blocks[1], block])
    wanted = model(TOKENS)
    for call in (lambda: parts(model), lambda: contributions(model, TOKENS, TOKENS), lambda: results(model, TOKENS)):
        with pytest.raises(
            SettingsError, match=r"blocks 0 and 2 are one module, or have one, and a part .* model.number_layers"
        ):
            call()
    with pytest.raises(SettingsError, match="blocks 0 and 2 are one module"), without(model, Part(0, 1)):
        pass
    for name in ("attention", "mlp"):  # or have one
        other = random_gpt(n_layer=3)
        setattr(other.blocks[2], name, getattr(other.blocks[1], name))
        with pytest.raises(SettingsError, match="blocks 1 and 2 are one module, or have one, and a part"):
            parts(other)
    model.blocks[2] = copy.deepcopy(block, {id(weight): weight for weight in block.parameters()})
    model.number_layers()
    assert torch.equal(model(TOKENS), wanted)
    close(sum(contributions(model, TOKENS, TOKENS).values()), wanted.gather(-1, TOKENS[..., None])[..., 0])
    off = copy.deepcopy(model)  # the first layer alone, by a matrix of its own without the head's columns
    off.blocks[0] = copy.deepcopy(block)
    off.blocks[0].attention.o_proj.weight[:, 8:16] = 0
    with without(model, Part(0, 1)):
        close(model(TOKENS), off(TOKENS))


@pytest.mark.slow
def test_nothing_stays_after_an_error_in_a_checkpoint_or_in_training(tmp_path):
    model = random_gpt(vocab_size=257)
    config = TrainConfig(model=model.config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def saved(name: str) -> bytes:
        save_checkpoint(tmp_path / name, model=model, tokenizer=BYTE, config=config)
        return (tmp_path / name / "model.safetensors").read_bytes()

    def gradients() -> list[torch.Tensor]:
        model.train()
        loss = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        found = torch.autograd.grad(loss, [*model.parameters()])
        model.eval()
        return [*found]

    wanted, weights = gradients(), saved("before")
    with pytest.raises(RuntimeError, match="stop"), without(model, *parts(model)):
        weights_within = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        raise RuntimeError("stop")
    results(model, TOKENS), streams(model, TOKENS), contributions(model, TOKENS, TOKENS)
    assert not hooks(model) and saved("after") == weights
    for weights in (weights_within, model.state_dict()):
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights.items())
    assert all(map(torch.equal, gradients(), wanted))
    assert torch.equal(pickle.loads(pickle.dumps(model))(TOKENS), model(TOKENS))


def test_the_modes_of_a_model_and_its_parts_stay():
    model = random_gpt(dropout=0.5)
    model.train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    assert all(map(torch.equal, streams(model, TOKENS), streams(model, TOKENS)))  # without dropout
    contributions(model, TOKENS, TOKENS)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_pass_through_edits(recomputes):
    model = random_gpt()
    model.train()
    for block in model.blocks:
        block.activation_checkpointing = recomputes
    with without(model, Part(0, 1)):
        model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    D = model.attentions[0].head_dim
    gradient = model.blocks[0].attention.o_proj.weight.grad
    assert not gradient[:, D : 2 * D].any() and gradient[:, :D].any()


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("is_replaced", [False, True])
def test_parts_of_a_compiled_model_are_off_too(is_replaced):
    model = random_gpt()
    own = model(TOKENS)
    with without(model, Part(0, 1)):
        wanted = model(TOKENS)
    weights = for_each_layer(model, TOKENS, lambda weights: weights)
    for block in model.blocks:
        if is_replaced:
            block.attention = torch.compile(block.attention, backend="eager")
        else:
            block.compile(backend="eager")
    close(model(TOKENS), own)
    close(for_each_layer(model, TOKENS, lambda weights: weights), weights)
    with without(model, Part(0, 1)):
        close(model(TOKENS), wanted)
    assert len(streams(model, TOKENS)) == 5
    close(model(TOKENS), own)


def test_a_part_has_the_name_that_the_page_gives_it():
    assert [str(part) for part in parts(random_gpt(n_head=2))] == [
        "L1 H1",
        "L1 H2",
        "L1 MLP",
        "L2 H1",
        "L2 H2",
        "L2 MLP",
    ]
    one = random_gpt(attention="average/sdpa+diff")
    assert [str(part) for part in parts(one)] == ["L1 H1", "L1 MLP", *(f"L2 H{h}" for h in (1, 2, 3, 4)), "L2 MLP"]


@pytest.mark.usefixtures("unchecked")
def test_a_part_or_a_result_that_does_not_fit_is_refused_in_a_sentence():
    model = random_gpt()
    named = {str(part): part for part in (Part(2, 0), Part(0, 4), Part(-1, 0), Part(0, -1), Part(9))}
    for name, wrong in (named | {"'L1 H2'": "L1 H2"}).items():
        told = rf"{name} is no part of the model: name each, such as Part\(0, 0\) for L1 H1; the last is L2 MLP"
        with pytest.raises(ValueError, match=told):
            without(model, wrong)
        with pytest.raises(ValueError, match=told), edited(model, {wrong: abs}):
            pass
    with pytest.raises(ValueError, match=r"\*parts\(model\) are all"):
        without(model, parts(model))
    for edit, told in (
        (lambda result: result[:1], r"returned torch.Size\(\[1, 12, 8\]\): a tensor \(2, 12, 8\) takes its place"),
        (lambda result: None, "the edit of L1 H2 returned NoneType"),
    ):
        with edited(model, {Part(0, 1): edit}), pytest.raises(ValueError, match=told):
            model(TOKENS)
    for size in (1, 5):  # one number would broadcast
        with without(model, Part(0, 1), means={Part(0, 1): torch.ones(size)}), pytest.raises(ValueError, match="takes"):
            model(TOKENS)
    assert not hooks(model)


@pytest.mark.usefixtures("unchecked")
@torch.no_grad()
def test_a_part_may_be_a_plain_tuple_or_one_of_torchs_numbers():
    model = random_gpt()
    off = copy.deepcopy(model)
    off.blocks[0].attention.o_proj.weight[:, 8:16] = 0
    mean = {Part(0, 1): torch.zeros(8)}
    for part in ((0, 1), torch.tensor([0, 1]).unbind(), Part(*torch.tensor([0, 1]))):
        with without(model, part):
            close(model(TOKENS), off(TOKENS))
        with edited(model, {part: torch.zeros_like}):
            close(model(TOKENS), off(TOKENS))
        with without(model, part, means=mean):
            close(model(TOKENS), off(TOKENS))
    off.blocks[1].mlp.down_proj.weight.zero_()
    with without(model, (0, 1), (1, None)):
        close(model(TOKENS), off(TOKENS))


def test_a_form_without_heads_is_refused_in_a_sentence():
    class Summed(MultiHeadAttention):
        def merge(self, y):
            return y.sum(1)

    class Renamed(MultiHeadAttention):
        def make_projections(self, config):
            super().make_projections(config)
            self.out = self.o_proj
            del self.o_proj

    with mock.patch.dict(FORMS, {"summed": Summed, "renamed": Renamed}):
        for form in ("summed", "renamed"):
            model = random_gpt(attention=f"sdpa/{form}", n_layer=2)
            told = f"attention={form} of layer 1 has no heads to take apart: choose a form"
            for call in (lambda m: parts(m), lambda m: without(m, Part(0)), lambda m: results(m, TOKENS)):
                with pytest.raises(SettingsError, match=told):
                    call(model)


@pytest.mark.parametrize("read", [results, writes, means, lambda model, tokens: without(model, Part(1))])
def test_a_module_around_an_attention_layer_is_named(read):
    """It was an AttributeError about n_head."""

    class Around(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, *given, **named):
            return self.inner(*given, **named)

    model = random_gpt(n_layer=2)
    model.blocks[1].attention = Around(model.blocks[1].attention)
    with pytest.raises(SettingsError, match="the Around in the place of an attention layer has no heads to take apart"):
        read(model, TOKENS)


def test_every_form_and_modifier_is_among_the_tested():
    assert {part for name in EVERY for part in name.split("+")} >= {*FORMS, *MODIFIERS}


def test_two_models_are_taken_apart_by_themselves():
    one, other = random_gpt(0), random_gpt(1)
    with torch.no_grad(), ExitStack() as stack:
        wanted = other(TOKENS)
        stack.enter_context(without(one, *parts(one)))
        assert torch.equal(other(TOKENS), wanted)


def test_no_file_has_an_edit_so_a_model_is_written_after_its_block(tmp_path):
    """A checkpoint and a folder written within the block had all parts, without a word."""
    model, part = random_gpt(), Part(0, 1)
    D = model.config.head_channels
    off = copy.deepcopy(model)
    off.blocks[0].attention.o_proj.weight.data[:, D : 2 * D] = 0

    def write(model, name):
        save_checkpoint(tmp_path / name, model=model, tokenizer=None, config=TrainConfig(model=model.config))
        return open_checkpoint(tmp_path / name).model

    for edit, name in ((without(model, part), "attention.o_proj"), (edited(model, {Part(0): torch.neg}), "mlp")):
        told = (
            rf"the model's blocks.0.{name} is edited by without\(\) or edited\(\), which no .*: write the model after"
        )
        with edit:
            copied = copy.deepcopy(model)
            for each in (model, copied):
                with pytest.raises(SettingsError, match=told):
                    write(each, "no")
                with pytest.raises(SettingsError, match=told):
                    to_huggingface(each, tmp_path / "no")
                with pytest.raises(SettingsError, match=told):
                    demo_page(Checkpoint(tmp_path, each, BYTE, Meta({})), "no.html", "float32")
        assert not (tmp_path / "no").exists()
    with torch.no_grad():
        with without(model, part):
            copied = copy.deepcopy(model)
            close(model(TOKENS), off(TOKENS), atol=1e-5)
        close(copied(TOKENS), off(TOKENS), atol=1e-5)
        close(write(off, "off")(TOKENS), off(TOKENS), atol=1e-5)
        model.blocks[0].mlp.register_forward_hook(lambda *_: None)  # of a person, such as wandb.watch()
        assert torch.equal(write(model, "whole")(TOKENS), model(TOKENS))


class OtherBlock(nn.Module):
    """The parts of a block in another order."""

    def __init__(self, block):
        super().__init__()
        self.attention_norm, self.attention = block.attention_norm, block.attention
        self.mlp_norm, self.mlp = block.mlp_norm, block.mlp


class PostNorm(OtherBlock):
    def forward(self, x, ctx):
        x = self.attention_norm(x + self.attention(x, ctx))
        return self.mlp_norm(x + self.mlp(x))


class Parallel(OtherBlock):
    def forward(self, x, ctx):
        return x + self.attention(self.attention_norm(x), ctx) + self.mlp(self.mlp_norm(x))


class OneNorm(OtherBlock):
    def forward(self, x, ctx):
        x = self.attention_norm(x)
        return x + self.attention(x, ctx) + self.mlp(x)


class Sandwich(OtherBlock):
    def forward(self, x, ctx):
        x = x + 0.5 * self.attention(self.attention_norm(x), ctx)
        return x + 0.5 * self.mlp(self.mlp_norm(x))


@pytest.mark.parametrize("kind", [PostNorm, Parallel, OneNorm])
def test_streams_of_blocks_whose_norms_read_something_else_are_refused(kind):
    """The first stream of a post-norm model was the embedding with what attention adds, without a word."""
    model = random_gpt()
    model.blocks[1] = kind(model.blocks[1])
    with pytest.raises(SettingsError, match=f"the norms of a {kind.__name__} do not read .*take its streams by hooks"):
        streams(model, TOKENS)
    with pytest.raises(SettingsError):
        contributions(model, TOKENS, TOKENS)


def test_streams_of_other_blocks_that_are_pre_norm_are_those_of_hooks():
    model, found = random_gpt(), []
    model.blocks = nn.ModuleList(map(Sandwich, model.blocks))
    for block in model.blocks:
        for norm in (block.attention_norm, block.mlp_norm):
            norm.register_forward_pre_hook(lambda module, arguments: found.append(arguments[0]))
    last = model.hidden(TOKENS)
    wanted = [*found, last]
    for stream, read in zip(streams(model, TOKENS), wanted, strict=True):
        close(stream, read)
    with pytest.raises(SettingsError, match="sum to the stream: a Sandwich or a hook .*; of a Sandwich that changes"):
        contributions(model, TOKENS, TOKENS)  # which halves what its parts give


def test_streams_have_what_hooks_add_to_the_stream_and_not_what_they_change_before_a_norm():
    model = random_gpt()
    found = streams(model, TOKENS)
    model.blocks[1].attention_norm.register_forward_pre_hook(lambda module, arguments: (0.5 * arguments[0],))
    for stream, before in zip(streams(model, TOKENS)[:3], found[:3], strict=True):
        close(stream, before)
    model.blocks[0].register_forward_hook(lambda module, arguments, result: result + 1)
    close(streams(model, TOKENS)[2], found[2] + 1)
    model.token_embedding.weight.data.fill_(torch.nan)
    assert all(stream.isnan().all() for stream in streams(model, TOKENS))


def test_one_block_at_two_places_has_a_stream_after_each_of_its_parts():
    """Each of its streams came twice, without a word."""
    model = random_gpt()
    apart = copy.deepcopy(model)
    model.blocks[1] = model.blocks[0]
    apart.blocks[1] = copy.deepcopy(apart.blocks[0])
    found, wanted = streams(model, TOKENS), streams(apart, TOKENS)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


def test_a_mean_is_that_of_the_call_whatever_becomes_of_the_means():
    """A dict that was changed before its block began changed what took the part's place."""
    model, part = random_gpt(), Part(0, 1)
    given = means(model, TOKENS)
    with torch.no_grad(), without(model, part, means=dict(given)):
        wanted = model(TOKENS)
    block = without(model, part, means=given)
    given[part] = 5 * given[part]
    with torch.no_grad(), block:
        assert torch.equal(model(TOKENS), wanted)
    del given[part]
    with pytest.raises(ValueError, match=r"means lacks L1 H2: means\(model, tokens\) has all parts"):
        without(model, part, means=given)

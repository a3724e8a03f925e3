"""Models that a person has changed: layers dropped, copied or replaced, weights pruned, resized, untied or compiled."""

import contextlib
import copy
import dataclasses
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import close, random_gpt, some
from safetensors.torch import load_file, load_model, save_model
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common.errors import SettingsError
from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from generation.config import SamplingParams
from generation.generate import generate, generate_text
from generation.score import ScoringParams, token_nats
from interop.huggingface import from_huggingface, to_huggingface
from model.apart import contributions
from model.attention import FORMS, MODIFIERS, AttentionContext, make_attention
from model.attention.layer import MultiHeadAttention
from model.cache import KVCache
from model.config import GPTConfig
from model.gpt import GPT, Block, SwiGLU
from model.heads import for_each_layer
from model.layers import Linear
from model.surgery import rename_wrapped
from model.weights import check_choices, check_weights, load_weights, plain_weights, save_file
from runs.checkpoint import open_checkpoint, save_checkpoint
from training.config import TrainConfig


def keep(model, *blocks):
    model.blocks = nn.ModuleList([copy.deepcopy(model.blocks[number]) for number in blocks])


def resize(model):
    model.token_embedding = nn.Embedding(70, model.config.n_embd)
    model.lm_head = nn.Linear(model.config.n_embd, 70, bias=False)


def set_bias(model):
    model.lm_head = nn.Linear(model.config.n_embd, model.config.vocab_size)


CHANGES = {
    "fewer blocks": (
        lambda model: keep(model, 0),
        "has 1 blocks, where its settings say n_layer=2: set model.config.n_",
    ),
    "more blocks": (lambda model: keep(model, 0, 1, 1), "has 3 blocks, where its settings say n_layer=2"),
    "larger embedding": (
        resize,
        r"lm_head.weight is \(70, 32\), where its settings ask for \(61, 32\): set model.conf",
    ),
    "a bias": (set_bias, "has lm_head.bias, which its settings do not ask for"),
    "a pruning mask": (
        lambda model: prune.l1_unstructured(model.blocks[0].attention.qkv_proj, "weight", 0.5),
        "has no blocks.0.attention.qkv_proj.weight, which its settings ask for: .*remove what was attached",
    ),
    "a parametrization": (
        lambda model: parametrizations.weight_norm(model.blocks[1].mlp.down_proj),
        "has blocks.1.mlp.down_proj.parametrizations.weight.original0, which its settings do not ask for",
    ),
    "another MLP": (
        lambda model: setattr(model.blocks[1], "mlp", nn.Sequential(nn.Linear(32, 32), nn.GELU())),
        r"has blocks.1.mlp.0.bias, which .*; torch.save\(model.state_dict\(\), FILE\) keeps one with other parts",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_its_settings_do_not_describe_is_not_written(change, tmp_path):
    model = random_gpt()
    CHANGES[change][0](model)
    with pytest.raises(SettingsError, match=CHANGES[change][1]):
        to_huggingface(model, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_what_the_remedies_say_makes_the_model_one_that_can_be_written(tmp_path):
    """Its logits come back."""
    tokens = torch.randint(61, (2, 6))
    model = random_gpt(n_layer=3)
    keep(model, 0, 2)
    model.config.n_layer = 2
    prune.l1_unstructured(model.blocks[0].attention.qkv_proj, "weight", 0.5)
    prune.remove(model.blocks[0].attention.qkv_proj, "weight")
    to_huggingface(model, tmp_path / "theirs")
    close(from_huggingface(str(tmp_path / "theirs"))(tokens), model(tokens))


def test_a_compiled_model_is_written_as_the_model_that_it_is(tmp_path):
    model, tokens = random_gpt(), torch.randint(61, (2, 6))
    compiled = torch.compile(model, backend="eager")
    assert plain_weights(compiled).keys() == plain_weights(model).keys()
    to_huggingface(compiled, tmp_path / "theirs")
    close(from_huggingface(str(tmp_path / "theirs"))(tokens), model(tokens))


def test_a_hook_on_a_compiled_model_is_refused_where_a_text_is_written_and_on_the_model_itself_is_in_it():
    tokenizer = make_tokenizer(TokenizerConfig(name="byte"), [])
    model = random_gpt(vocab_size=tokenizer.n_vocab)
    compiled = torch.compile(model, backend="eager")
    for hooked in (compiled, model):
        hook = hooked.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, torch.tensor(65), 1e4))
        if hooked is compiled:
            with pytest.raises(ValueError, match="set it on the model that was compiled"):
                next(generate_text(compiled, tokenizer, "A", max_new_tokens=3))
        else:
            assert "".join(generate_text(compiled, tokenizer, "A", max_new_tokens=3)) == "AAA"
        hook.remove()
    assert "".join(generate_text(compiled, tokenizer, "A", max_new_tokens=3)) != "AAA"


def compile_parts(model):
    """Put what torch.compile() returns in the place of a block, an attention, an MLP and the head."""
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    for parent, name in ((model.blocks[1], "attention"), (model.blocks[1], "mlp"), (model, "lm_head")):
        setattr(parent, name, torch.compile(getattr(parent, name), backend="eager"))


def test_a_model_with_compiled_parts_is_written_as_the_model_that_it_is(tmp_path):
    model, tokens = random_gpt(), torch.randint(61, (2, 6))
    logits = model(tokens)
    compile_parts(model)
    assert "blocks.1.mlp._orig_mod.down_proj.weight" in model.state_dict()
    assert plain_weights(model).keys() == plain_weights(random_gpt()).keys()
    to_huggingface(model, tmp_path / "theirs")
    close(from_huggingface(str(tmp_path / "theirs"))(tokens), logits)
    model.config.rope_theta = 5.0
    with pytest.raises(SettingsError, match=r"blocks.0.attention computes with another"):
        to_huggingface(model, tmp_path / "others")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}])
def test_the_weights_of_a_wrapped_model_are_loaded(prefix, options):
    """torch.compile() and DistributedDataParallel put these before each name."""
    model, other, tokens = random_gpt(tie_embeddings=True), random_gpt(1, tie_embeddings=True), torch.arange(6)[None]
    weights = {prefix + name: weight for name, weight in model.state_dict().items()}
    assert not any(other.load_state_dict(weights, **options))
    assert torch.equal(other(tokens), model(tokens)) and other.lm_head.weight is other.token_embedding.weight
    assert next(iter(weights)).startswith(prefix)  # the caller's own dictionary stays

    outer = nn.ModuleDict({"model": random_gpt(2, tie_embeddings=True)})  # such as a module for the loss
    outer.load_state_dict({f"model.{name}": weight for name, weight in weights.items()})
    assert torch.equal(outer["model"](tokens), model(tokens))


def test_weights_are_loaded_into_compiled_parts_and_out_of_them():
    model, other, third = random_gpt(), random_gpt(1), random_gpt(2)
    compile_parts(other)
    other.load_state_dict(model.state_dict())
    third.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), third.parameters(), strict=True))


@pytest.mark.parametrize("load", [load_weights, GPT.load_state_dict], ids=["load_weights", "load_state_dict"])
@pytest.mark.parametrize("left_out", ["lm_head.weight", "token_embedding.weight"])
@pytest.mark.parametrize("prefix", ["", "module._orig_mod."])
def test_a_tied_weight_is_loaded_by_either_of_its_names(load, left_out, prefix):
    model, other, tokens = random_gpt(tie_embeddings=True), random_gpt(1, tie_embeddings=True), torch.arange(6)[None]
    weights = {prefix + name: weight.clone() for name, weight in model.state_dict().items() if name != left_out}
    load(other, weights)
    assert torch.equal(other(tokens), model(tokens)) and other.lm_head.weight is other.token_embedding.weight
    assert prefix + left_out not in weights  # the caller's own dictionary stays


def test_what_safetensors_keeps_of_a_tied_model_is_loaded(tmp_path):
    """Its save_file() refuses two names for one weight, and names save_model(), which keeps the second."""
    model, other, tokens = random_gpt(tie_embeddings=True), random_gpt(1, tie_embeddings=True), torch.arange(6)[None]
    save_model(model, str(tmp_path / "model.safetensors"))
    weights = load_file(tmp_path / "model.safetensors")
    assert "token_embedding.weight" not in weights
    load_weights(other, weights)
    assert torch.equal(other(tokens), model(tokens))
    del weights["lm_head.weight"]
    with pytest.raises(ValueError, match="the weight lm_head.weight is missing, or does not fit the settings"):
        load_weights(other, weights)


def around(model):
    """Return a module with a model in it, as the class Loss of docs/library.md."""
    module = nn.Module()
    module.model = model
    return module


def sharing(model):
    """Return a model whose second layer has the weights of the first."""
    shared = {id(weight): weight for weight in model.blocks[0].parameters()}
    model.blocks[1] = copy.deepcopy(model.blocks[0], shared)
    return model


@pytest.mark.parametrize("made", [lambda model: model, around, sharing], ids=["alone", "around", "sharing"])
def test_safetensors_load_model_reads_what_its_save_model_kept(made, tmp_path):
    """It looks for the left out names of shared weights among the missing ones; so does Accelerate's load_state()."""
    saved, model = random_gpt(tie_embeddings=True), random_gpt(1, tie_embeddings=True)
    tokens = torch.arange(6)[None]
    save_model(made(saved), str(tmp_path / "model.safetensors"))
    assert load_model(made(model), tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(model(tokens), saved(tokens)) and model.lm_head.weight is model.token_embedding.weight


@pytest.mark.parametrize("kept", ["lm_head.weight", "token_embedding.weight"])
def test_a_tied_weight_that_is_assigned_under_one_name_stays_tied(kept):
    """Also where names may be missing: the other name kept the numbers of before."""
    model, other, tokens = random_gpt(tie_embeddings=True), random_gpt(1, tie_embeddings=True), torch.arange(6)[None]
    left_out = ({"lm_head.weight", "token_embedding.weight"} - {kept}).pop()
    weights = {name: weight for name, weight in model.state_dict().items() if name != left_out}
    other.load_state_dict(weights, strict=False, assign=True)
    assert torch.equal(other(tokens), model(tokens)) and other.lm_head.weight is other.token_embedding.weight


@pytest.mark.parametrize("load", [load_weights, GPT.load_state_dict], ids=["load_weights", "load_state_dict"])
def test_two_weights_are_not_loaded_into_one(load):
    """An untied model's into a tied one, and those of two layers into layers that share theirs."""
    model, other, tokens = random_gpt(tie_embeddings=True), random_gpt(1), torch.arange(6)[None]
    looped, before = sharing(random_gpt()), model(tokens)
    for wrong, names in ((model, "token_embedding.weight and lm_head.weight"), (looped, "blocks.0.* and blocks.1.*")):
        with pytest.raises(ValueError, match=f"{names} are one weight of the model, and differ in what is loaded"):
            load(wrong, other.state_dict())
    assert torch.equal(model(tokens), before)
    alone = {name: weight for name, weight in other.state_dict().items() if name != "lm_head.weight"}
    load(model, alone)  # the remedies: leave one out, or load both into a model that has two
    assert torch.equal(model.lm_head.weight, other.token_embedding.weight)
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(model(tokens), other(tokens))


def test_a_weight_that_is_not_a_number_is_loaded_under_both_names():
    """A model whose training failed is to be looked at; NaN is not equal to itself."""
    model, other = random_gpt(tie_embeddings=True), random_gpt(1, tie_embeddings=True)
    model.token_embedding.weight.data.fill_(torch.nan)
    other.load_state_dict({name: weight.clone() for name, weight in model.state_dict().items()})
    assert other.lm_head.weight.isnan().all()


def test_a_wrapper_that_is_called_module_keeps_its_names():
    """Two weights, one of which has the name of the other but for `module`."""

    class Both(nn.Linear):
        def __init__(self):
            super().__init__(32, 61, bias=False)
            self.module = nn.Linear(32, 61, bias=False)

    model, other = random_gpt(), random_gpt(1)
    model.lm_head, other.lm_head = Both(), Both()
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "lm_head.module.weight"'):
        random_gpt().load_state_dict(model.state_dict())


def test_weights_that_layers_share_are_written_for_each(tmp_path):
    """safetensors refuses two names for one memory."""
    model, tokens = random_gpt(), torch.randint(61, (2, 6))
    model.blocks = nn.ModuleList([model.blocks[0]] * 2)
    to_huggingface(model, tmp_path / "theirs")
    close(from_huggingface(str(tmp_path / "theirs"))(tokens), model(tokens))
    save_file(plain_weights(model), tmp_path / "ours.safetensors")
    apart = random_gpt(seed=1)
    load_weights(apart, load_file(tmp_path / "ours.safetensors"))
    assert torch.equal(apart(tokens), model(tokens))


def test_windows_are_written_as_the_layers_have_them(tmp_path):
    """Set by hand, in the layers alone; two widths have no setting there."""
    model, tokens = random_gpt(), torch.randint(61, (2, 12))
    model.attentions[1].window = 3
    whole = model(tokens)
    to_huggingface(model, tmp_path / "theirs")
    close(from_huggingface(str(tmp_path / "theirs"))(tokens), whole)
    model.attentions[0].window = 4
    with pytest.raises(SettingsError, match="attention_window"):
        to_huggingface(model, tmp_path / "others")


CHOICES = {
    "n_head": (2, {"attention": "linear", "qk_norm": False}),
    "ngrams": ([3], {"ngrams": [2]}),
    "rope_theta": (500.0, {}),
    "rope_scaling": ("linear", {"rope_scaling_factor": 2.0}),
    "rope_fraction": (0.5, {}),
    "position": ("none", {}),
    "norm": ("layernorm", {}),
    "norm_eps": (0.01, {}),
    "attention_window": (3, {"attention": "sdpa+window", "attention_window": 5}),
    "attention": ("softmax1", {}),
    "score_softcap": (1.0, {"attention": "softcap"}),
    "allow_neg_eigval": (True, {"attention": "delta"}),
    "block_size": (32, {"attention": "moba"}),
    "mlp": ("gelu", {"mlp": "gelu_tanh"}),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_setting_that_is_changed_after_the_model_was_made_is_not_written(name, tmp_path):
    """It changes no logit, but those of a model that is built by the settings."""
    value, settings = CHOICES[name]
    model, tokens = random_gpt(**settings), torch.randint(61, (1, 16))
    check_choices(copy.deepcopy(model))
    logits = model(tokens)
    setattr(model.config, name, value)
    assert torch.equal(model(tokens), logits)
    built = GPT(model.config).eval()
    built.load_state_dict(model.state_dict())
    check_choices(built)
    assert not torch.allclose(built(tokens), logits, atol=1e-4)
    told = rf"model.config.{name} is {re.escape(str(value))}, and the model's .* computes with another"
    with pytest.raises(SettingsError, match=told):
        save_checkpoint(tmp_path / "changed", model=model, tokenizer=None, config={"model": {}})
    assert not (tmp_path / "changed").exists()


class PostNorm(nn.Module):
    """A block as in Vaswani et al. 2017, with the weights' names of ours."""

    def __init__(self, block):
        super().__init__()
        self.attention_norm, self.attention = block.attention_norm, block.attention
        self.mlp_norm, self.mlp = block.mlp_norm, block.mlp

    def forward(self, x, ctx):
        x = self.attention_norm(x + self.attention(x, ctx))
        return self.mlp_norm(x + self.mlp(x))


class PostNormBlock(Block):
    def _forward(self, x, ctx):
        return PostNorm.forward(self, x, ctx)


class Doubled(SwiGLU):
    def forward(self, x):
        return 2 * super().forward(x)


class Halved(MultiHeadAttention):
    def attend(self, call, x, ctx):
        return super().attend(call, x, ctx) / 2


class Bare(nn.Module):
    """A layer of torch's alone."""

    def __init__(self, layer):
        super().__init__()
        self.__dict__["_modules"] |= dict(layer.named_children())
        self.layer_idx = layer.layer_idx

    def forward(self, x, ctx):
        return self.o_proj(x)


def bare_attention(block):
    block.attention = Bare(block.attention)
    return block


def own_attention(block):
    block.attention.__class__ = Halved
    return block


def own_block(block):
    block.__class__ = PostNormBlock
    return block


def own_mlp(block):
    block.mlp.__class__ = Doubled
    return block


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (PostNorm, "s.1"),
        (own_block, "s.1"),
        (own_attention, "s.1.attention"),
        (bare_attention, "s.1.attention"),
        (own_mlp, "s.1.mlp"),
    ],
)
def test_a_block_layer_or_mlp_of_ones_own_with_the_same_weights_is_not_written_as_ours(change, part, tmp_path):
    model, tokens = random_gpt(), torch.randint(61, (1, 16))
    before = model(tokens)
    model.blocks[1] = change(model.blocks[1])
    assert not torch.allclose(model(tokens), before, atol=1e-3)
    told = (
        f"the model's block{part} is a (PostNorm|PostNormBlock|Halved|Bare|Doubled), which no setting of a model makes"
    )
    with pytest.raises(SettingsError, match=told):
        save_checkpoint(tmp_path / "own", model=model, tokenizer=None, config={"model": {}})
    with pytest.raises(SettingsError, match=told):
        to_huggingface(model, tmp_path / "folder")


def test_a_norm_of_torchs_own_is_written_if_it_is_the_one_of_the_settings(tmp_path):
    model, tokens = random_gpt(norm="rmsnorm"), torch.randint(61, (1, 16))
    weight = model.blocks[1].mlp_norm.weight
    for number, norm in enumerate((nn.RMSNorm(32, eps=1e-2), nn.LayerNorm(32, bias=False), nn.RMSNorm(32, eps=1e-6))):
        norm.weight = weight
        model.blocks[1].mlp_norm = norm
        if number < 2:
            with pytest.raises(
                SettingsError, match=r"config.norm\w* is .*, and the model's blocks.1.mlp_norm computes with"
            ):
                to_huggingface(model, tmp_path / str(number))
    to_huggingface(model, tmp_path / "same")
    close(from_huggingface(str(tmp_path / "same"))(tokens), model(tokens))


def test_models_of_one_config_that_is_changed_between_have_each_their_own_settings(tmp_path):
    """They shared it: a cap on the logits was that of the last one for all, and a remedy for one undid another's."""
    config, tokens = GPTConfig(vocab_size=61, n_embd=32, zero_init=False), torch.randint(61, (1, 16))
    models, wanted = [], []
    for settings in ({}, {"logit_softcap": 0.1}, {"rope_theta": 500.0}, {"n_layer": 2}, {"block_size": 64}):
        for name, value in settings.items():
            setattr(config, name, value)
        models.append(GPT(config).eval())
        wanted.append(models[-1](tokens))
    models[-1].blocks = models[-1].blocks[:1]
    models[-1].config.n_layer = 1
    wanted[-1] = models[-1](tokens)
    assert wanted[1].abs().max() < 0.1 < wanted[0].abs().max() and config.n_layer == 2
    for number, (model, logits) in enumerate(zip(models, wanted, strict=True)):
        assert torch.equal(model(tokens), logits)
        save_checkpoint(tmp_path / str(number), model=model, tokenizer=None, config={"model": {}})
        close(open_checkpoint(tmp_path / str(number)).model(tokens), logits)


# The other settings: they shape a weight, or change no logit, or are read whenever the model runs.
SHAPING = {"n_embd": 64, "n_kv_head": 2, "head_size": 4, "n_layer": 3, "vocab_size": 64, "n_inner": 40}
SHAPING |= {"qk_norm": False, "qkv_bias": True, "bias": True, "latent_size": 4, "ngram_rows": 100}
WITHOUT_EFFECT = {"dropout": 0.5, "attention_dropout": 0.5, "zero_init": False, "logit_softcap": 1.0}
REFUSED = {"tie_embeddings": True, "rope_scaling_factor": 4.0, "rope_trained_length": 4, "rope_proportional": True}
WITH = {"latent_size": {"attention": "mla", "latent_size": 8}, "ngram_rows": {"ngrams": [2]}}
WITH |= {"rope_scaling_factor": {"rope_scaling": "linear", "rope_scaling_factor": 2.0}}
WITH |= {"rope_trained_length": {"rope_scaling": "llama3", "rope_scaling_factor": 2.0, "rope_trained_length": 8}}
WITH |= {"rope_proportional": {"rope_fraction": 0.5}}


def test_every_setting_is_refused_when_it_was_changed_or_needs_no_refusal():
    """A new setting needs its place here, and in model/weights.py unless it shapes a weight or is read later."""
    others = SHAPING | WITHOUT_EFFECT | REFUSED
    assert {field.name for field in dataclasses.fields(GPTConfig)} == {*CHOICES, *others}
    for name, value in others.items():
        model, tokens = random_gpt(**WITH.get(name, {})), torch.randint(61, (1, 16))
        setattr(model.config, name, value)
        weights = model.state_dict()
        built = GPT(model.config).eval()
        has_shapes = [(key, each.shape) for key, each in built.state_dict().items()]
        assert (has_shapes == [(key, each.shape) for key, each in weights.items()]) == (name not in SHAPING), name
        if name in REFUSED:
            with pytest.raises(SettingsError, match=f"{name.split('_')[0]}.*(computes with another|tie them again)"):
                check_weights(model)
                check_choices(model)
        if name in WITHOUT_EFFECT:
            built.load_state_dict(weights)
            close(built(tokens), model(tokens))
            check_choices(model)


@pytest.mark.parametrize("settings", [{}, {"position": "pope"}, {"attention": "sdpa+window", "attention_window": 5}])
def test_a_scale_that_was_set_by_hand_is_not_lost(settings, tmp_path):
    model, tokens = random_gpt(**settings), torch.randint(61, (1, 16))
    before = model(tokens)
    model.attentions[1].scale = 0.1
    assert not torch.allclose(model(tokens), before, atol=1e-3)
    told = "the model's blocks.1.attention has scale=0.1, which no setting of a model says: set it back"
    with pytest.raises(SettingsError, match=told):
        save_checkpoint(tmp_path / "changed", model=model, tokenizer=None, config={"model": {}})


def test_a_folder_has_no_setting_that_the_model_was_not_made_with(tmp_path):
    model = random_gpt(qk_norm=False)
    model.config.norm_eps = 0.01
    with pytest.raises(SettingsError, match="model.config.norm_eps is 0.01"):
        to_huggingface(model, tmp_path / "theirs")


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_heads_that_were_cut_out_are_gone_also_in_the_folder(kv_heads, tmp_path):
    """torch's own linear layers without the rows of some heads, against columns of zeros in o_proj."""
    model, tokens = random_gpt(n_kv_head=kv_heads), torch.randint(61, (2, 12))
    ablated = copy.deepcopy(model)
    kept = [2, 3] if kv_heads == 2 else [0, 2, 3]  # with groups the first group goes
    keys = [1] if kv_heads == 2 else kept
    for attention, whole in zip(model.attentions, ablated.attentions, strict=True):
        for head in {*range(4)} - {*kept}:
            whole.o_proj.weight.data[:, head * 8 : head * 8 + 8] = 0
        first = [*kept, *(4 + head for head in keys), *(4 + kv_heads + head for head in keys)]
        rows = [8 * head + channel for head in first for channel in range(8)]
        qkv, out = nn.Linear(32, len(rows), bias=False), nn.Linear(8 * len(kept), 32, bias=False)
        qkv.weight.data = attention.qkv_proj.weight.data[rows]
        out.weight.data = attention.o_proj.weight.data[:, rows[: 8 * len(kept)]]
        attention.qkv_proj, attention.o_proj = qkv, out
        attention.n_head = attention.query_heads = len(kept)
        attention.kv_heads = len(keys)
    close(model(tokens), ablated(tokens))
    model.config.n_head, model.config.n_kv_head, model.config.head_size = len(kept), len(keys), 8
    to_huggingface(model, tmp_path / "theirs")
    close(from_huggingface(str(tmp_path / "theirs"))(tokens), ablated(tokens))


def test_a_module_around_learned_positions_gets_those_of_each_text():
    """What computes gradients of each sample, as Opacus, reads the first axis as the samples."""
    model = random_gpt(position="learned")
    shapes = []
    model.position_embedding.register_forward_hook(lambda module, arguments, result: shapes.append(result.shape[:2]))
    model(torch.randint(61, (3, 7)))
    cache = KVCache(7)
    for _ in range(2):
        model(torch.randint(61, (3, 2)), cache=cache)
    assert shapes == [(3, 7), (3, 2), (3, 2)]


@pytest.mark.parametrize("inside", [False, True])
def test_a_tied_head_stays_tied_when_weights_are_assigned(inside):
    """Also in a module of somebody else's; one step moves both."""
    source = random_gpt(tie_embeddings=True)
    with torch.device("meta"):
        model = GPT(source.config)
    whole, weights = model, source.state_dict()
    if inside:
        whole, weights = nn.ModuleDict({"gpt": model}), {f"gpt.{name}": weight for name, weight in weights.items()}
    whole.load_state_dict({name: weight.clone() for name, weight in weights.items()}, assign=True)
    assert model.lm_head.weight is model.token_embedding.weight
    assert len([*model.parameters()]) == len([*source.parameters()])
    check_weights(model)
    tokens = torch.randint(61, (2, 6))
    close(model(tokens), source(tokens))


def test_a_head_that_was_tied_by_hand_stays_tied_when_weights_are_assigned():
    model = random_gpt()
    model.lm_head.weight = model.token_embedding.weight
    model.config.tie_embeddings = True
    model.load_state_dict({name: weight.clone() for name, weight in model.state_dict().items()}, assign=True)
    assert model.lm_head.weight is model.token_embedding.weight


@pytest.mark.parametrize("assign", [False, True])
def test_a_head_that_begins_as_the_embedding_stays_its_own_when_weights_are_loaded(assign):
    model, tokens = random_gpt(tie_embeddings=True), torch.arange(6)[None]
    embedding, before = model.token_embedding.weight.clone(), model(tokens)
    model.lm_head = copy.deepcopy(model.lm_head)
    model.config.tie_embeddings = False
    model.load_state_dict({name: weight.clone() for name, weight in model.state_dict().items()}, assign=assign)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(model.token_embedding.weight, embedding)
    close(model(tokens), 2 * before)


def test_a_head_that_was_untied_by_hand_is_not_dropped(tmp_path):
    model = random_gpt(tie_embeddings=True)
    model.lm_head.weight = nn.Parameter(torch.randn(61, 32))
    tokens = torch.randint(61, (2, 6))
    with pytest.raises(SettingsError, match="tie_embeddings=true: set model.config.tie_embeddings = False"):
        to_huggingface(model, tmp_path / "theirs")
    model.config.tie_embeddings = False
    to_huggingface(model, tmp_path / "theirs")
    close(from_huggingface(str(tmp_path / "theirs"))(tokens), model(tokens))


def test_weights_are_read_of_the_layers_that_a_model_has_now():
    """Dropped, replaced and repeated layers; each by its own formula: a softmax of q k, row by row."""
    model, tokens = random_gpt(n_layer=3, position="none", qk_norm=False), torch.randint(61, (2, 6))
    model.blocks[1].attention = make_attention(model.config, 1)
    nn.init.normal_(model.blocks[1].attention.qkv_proj.weight)
    model.blocks = nn.ModuleList([model.blocks[1], model.blocks[2], model.blocks[1]])
    found = for_each_layer(model, tokens, lambda weights: weights)
    x = model.token_embedding(tokens)
    for block, weights in zip(model.blocks, found, strict=True):
        q, k, _ = block.attention.project(block.attention_norm(x))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf)
        close(weights, F.softmax(scores, -1))
        x = block(x, AttentionContext())


class SoftPrompt(nn.Module):
    """Learned vectors for the ids from V on, and the embedding of the others."""

    def __init__(self, embedding: nn.Module, vectors: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.vectors = nn.Parameter(torch.randn(vectors, 32))

    def forward(self, tokens):
        V = 257
        learned = self.vectors[(tokens - V).clamp(min=0)]
        return torch.where(tokens[..., None] < V, self.embedding(tokens.clamp(max=V - 1)), learned)


def larger(model):
    """The same model with the vectors as rows of its embedding alone: lm_head stays."""
    vectors = model.token_embedding.vectors
    rows = torch.cat((model.token_embedding.embedding.weight, vectors)).detach()
    other = copy.deepcopy(model)
    other.token_embedding = nn.Embedding.from_pretrained(rows)
    return other


@pytest.mark.parametrize("training", [False, True])
def test_a_module_around_the_embedding_is_read_written_with_and_scored(training):
    """A soft prompt: its vectors alone get a gradient, and the text is that of a model with more rows."""
    tokenizer = make_tokenizer(TokenizerConfig(name="byte"), None)
    model = random_gpt(vocab_size=257).requires_grad_(False).train(training)
    model.token_embedding = SoftPrompt(model.token_embedding, 3)
    prompt = [257, 258, 259, 65, 66]
    tokens = torch.tensor([prompt])

    params = SamplingParams(max_new_tokens=6)
    wanted = larger(model)
    texts = [list(generate(each, tokenizer, [prompt], seeds=[1], params=params)) for each in (model, wanted)]
    assert texts[0] == texts[1]

    scoring = ScoringParams(torch.autocast("cpu", enabled=False))
    nats = [token_nats(each, tokens.numpy().clip(max=255), 2, scoring) for each in (model, wanted)]
    assert nats[0].tolist() == nats[1].tolist()

    model.loss(tokens, tokens.clamp(max=256)).backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is not None] == ["token_embedding.vectors"]


def test_an_embedding_of_another_length_or_an_id_that_it_lacks_is_named():
    """Vectors in front of the text would give a decoded token several rows."""

    class InFront(SoftPrompt):
        def forward(self, tokens):
            return torch.cat((self.vectors.expand(len(tokens), -1, -1), self.embedding(tokens[:, 3:])), 1)

    model = random_gpt(vocab_size=257)
    model.token_embedding = InFront(model.token_embedding, 3)
    model(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match=r"returned \(1, 3, 32\) for tokens \(1, 1\): it has to return a row for each"):
        model(torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="token id 300 is not in the vocabulary of 257 ids"):
        model(torch.full((1, 5), 300))


def test_weights_are_loaded_into_a_tied_model_whose_embedding_was_wrapped():
    model = random_gpt(vocab_size=257, tie_embeddings=True)
    model.token_embedding = SoftPrompt(model.token_embedding, 3)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.token_embedding.vectors)
    other.load_state_dict(model.state_dict())
    tokens = torch.tensor([[257, 259, 5, 6]])
    close(other(tokens), model(tokens))


@pytest.mark.parametrize("attached", ["hook", "module"])
def test_what_is_attached_to_learned_positions_is_in_the_logits(attached):
    """Each position once and decoded one by one, against a model whose weights are twice as large."""
    model = random_gpt(position="learned")
    doubled = copy.deepcopy(model)
    doubled.position_embedding.weight.data.mul_(2)
    if attached == "hook":
        model.position_embedding.register_forward_hook(lambda module, arguments, result: 2 * result)
    else:

        class Twice(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, positions):
                return 2 * self.inner(positions)

        model.position_embedding = Twice(model.position_embedding)
    tokens = torch.randint(61, (2, 7))
    close(model(tokens), doubled(tokens))
    starts = torch.tensor([[0] * 7, [0] * 3 + [3] * 4])
    close(model(tokens, doc_starts=starts), doubled(tokens, doc_starts=starts))
    cache = KVCache(7)
    with torch.no_grad():
        decoded = torch.cat([model(tokens[:, i : i + 1], cache=cache) for i in range(7)], 1)
    close(decoded, doubled(tokens))


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention", some(["sdpa", "stacked", "mla", "dsa", "mla+diff", "gta", "k_eq_v", "delta", "index"], 4)
)
@torch.no_grad()
def test_a_hook_on_any_projection_is_in_the_logits_also_while_decoding(attention):
    """A linear layer's result turned round is that of its rows turned round."""
    model, tokens = random_gpt(attention=attention, block_size=16), torch.randint(61, (1, 9))
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and ".attention." in name]
    for name in names:
        hooked, turned = copy.deepcopy(model), copy.deepcopy(model)
        hooked.get_submodule(name).register_forward_hook(lambda module, arguments, result: result.flip(-1))
        for weight in turned.get_submodule(name).parameters():
            weight.copy_(weight.flip(0))
        wanted = turned(tokens)
        close(hooked(tokens), wanted)
        cache = KVCache(9)
        decoded = [hooked(part, cache=cache) for part in tokens.split((4, 1, 1, 2, 1), 1)]
        close(torch.cat(decoded, 1), wanted, atol=1e-4)


@contextlib.contextmanager
def all_doubled(way):
    """Every linear layer returns twice its product, by torch's hooks for all modules or by the code of a class."""
    forward = Linear.forward
    of_torch = nn.Linear.forward
    handle = None
    if way == "a hook":
        hook = nn.modules.module.register_module_forward_hook
        handle = hook(lambda module, given, y: 2 * y if isinstance(module, nn.Linear) else None)
    elif way == "a hook before":
        hook = nn.modules.module.register_module_forward_pre_hook
        handle = hook(lambda module, given: (2 * given[0],) if isinstance(module, nn.Linear) else None)
    elif way == "our class":
        Linear.forward = lambda self, x: 2 * forward(self, x)
    else:
        nn.Linear.forward = lambda self, x: 2 * of_torch(self, x)
    try:
        yield
    finally:
        Linear.forward = forward
        nn.Linear.forward = of_torch
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize("way", ["a hook", "a hook before", "our class", "torch's class"])
@pytest.mark.parametrize("attention", ["sdpa", "mla", "stacked"])
def test_what_acts_on_all_modules_is_in_the_logits_the_loss_and_decoding(attention, way):
    model, doubled = random_gpt(attention=attention), random_gpt(attention=attention)
    tokens = torch.randint(61, (2, 9))
    given, targets = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        for part in doubled.modules():
            if isinstance(part, nn.Linear):
                part.weight.mul_(2)
        wanted = doubled(given)
    nats = F.cross_entropy(wanted.flatten(0, 1), targets.flatten(), reduction="none")
    with all_doubled(way):
        model.loss(given, targets).backward()
        with torch.no_grad():
            close(model.loss(given, targets), nats.sum(), rtol=1e-5)
            close(model.nats(given, targets)[0].flatten(), nats, atol=1e-4, rtol=1e-5)
            cache = KVCache(8)
            close(torch.cat([model(part, cache=cache) for part in given.split((4, 1, 3), 1)], 1), wanted, atol=1e-4)
        with pytest.raises(SettingsError, match="lm_head has a bias, a hook or an adapter"):
            contributions(model, given, targets)
    doubled.loss(given, targets).backward()
    close(model.lm_head.weight.grad, 2 * doubled.lm_head.weight.grad, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("attention", "remedy"),
    [
        ("sdpa/linear", "linear/sdpa/linear"),
        ("sdpa+window/sdpa", "sdpa/sdpa+window/sdpa"),
        ("sdpa/sdpa+nope", "sdpa+nope/sdpa/sdpa+nope"),
        ("sdpa+gate/sdpa", "sdpa/sdpa+gate/sdpa"),  # its weights have other names too
    ],
)
@torch.no_grad()
def test_layers_in_turns_that_lost_the_first_are_written_by_the_pattern_that_is_named(attention, remedy, tmp_path):
    """A GPT with the settings, as the other remedy has it, would have the weights at the other layers."""
    window = {"attention_window": 3} if "window" in attention else {}
    model = random_gpt(n_layer=4, attention=attention, **window)
    keep(model, 1, 2, 3)
    model.config.n_layer = 3
    model.number_layers()
    tokens = torch.arange(24).reshape(2, 12)
    whole = model(tokens)
    config = dataclasses.asdict(TrainConfig())
    with pytest.raises(SettingsError, match=f"set model.config.attention = '{re.escape(remedy)}', as its blocks have"):
        save_checkpoint(tmp_path / "one", model=model, tokenizer=None, config=config)
    model.config.attention = remedy
    save_checkpoint(tmp_path / "one", model=model, tokenizer=None, config=config)
    assert torch.equal(open_checkpoint(tmp_path / "one").model(tokens), whole)


@pytest.mark.slow
@torch.no_grad()
def test_a_taller_model_of_the_hubs_class_is_kept_with_its_own_settings(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    mine = type("Mine", (GPT, hub.PyTorchModelHubMixin), {})
    settings = dict(vocab_size=61, n_layer=2, n_embd=32, n_head=2, block_size=32, dropout=0.5, tie_embeddings=True)
    model = mine(GPTConfig(**settings, zero_init=False)).eval()
    keep(model, 0, 1, 1)
    model.config.n_layer = 3
    model.number_layers()
    tokens = torch.arange(24).reshape(2, 12)
    model.save_pretrained(tmp_path / "made")
    assert len(mine.from_pretrained(tmp_path / "made").blocks) == 2
    model.save_pretrained(tmp_path / "present", config=model.config)
    opened = mine.from_pretrained(tmp_path / "present")
    assert opened.config == model.config and torch.equal(opened.eval()(tokens), model(tokens))


@pytest.mark.parametrize("change", ["loaded", "zeroed", "trained", "decoded"])
def test_weights_that_change_within_one_autocast_are_those_of_the_next_pass(change):
    """torch's own casts of weights are kept until the outermost autocast ends."""
    tokens = torch.arange(26).reshape(2, 13)

    def figures(autocast, own):
        """Return the losses before and after the change, in one autocast or in one for each pass."""
        model = random_gpt(vocab_size=61, attention="sdpa/linear", tie_embeddings=True)
        found = []
        with autocast():
            for _ in range(2):
                with own():
                    cache = KVCache(12) if change == "decoded" else None
                    found.append(model.loss(tokens[:, :-1], tokens[:, 1:], cache=cache))
                    found.append(model(tokens).float().std())
                if change == "trained":
                    with torch.no_grad():
                        for weight in model.parameters():
                            weight -= 0.01
                elif change == "zeroed":
                    model.blocks[0].mlp.down_proj.weight.data.zero_()
                else:
                    model.load_state_dict({name: 2 * weight for name, weight in model.state_dict().items()})
        return [each.item() for each in found]

    bf16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    in_one = figures(bf16, contextlib.nullcontext)
    assert in_one == figures(contextlib.nullcontext, bf16)
    assert in_one[0] != in_one[2] and in_one[1] != in_one[3]


def test_an_average_of_weights_is_written_with_and_kept_by_its_module(tmp_path):
    model, tokenizer = random_gpt(vocab_size=257, tie_embeddings=True), make_tokenizer(TokenizerConfig(name="byte"), ())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    first = {name: weight.clone() for name, weight in model.state_dict().items()}
    average.update_parameters(model)  # the first is copied
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    average.update_parameters(model)
    wanted = {name: 0.75 * weight + 0.25 * 3 * weight for name, weight in first.items()}
    config = TrainConfig(model=model.config)
    for given in (average, nn.DataParallel(model)):
        fault = f"is of type {type(given).__name__}: give the GPT in it, such as its module"
        with pytest.raises(ValueError, match=fault):
            save_checkpoint(tmp_path / "average", model=given, tokenizer=tokenizer, config=config)
        with pytest.raises(ValueError, match=fault):
            next(generate_text(given, tokenizer, "a", max_new_tokens=1))
    save_checkpoint(tmp_path / "average", model=average.module, tokenizer=tokenizer, config=config)
    kept = open_checkpoint(tmp_path / "average").model.state_dict()
    for name, weight in wanted.items():
        close(kept[name], weight)


class HalvedLogits(GPT):
    """A model whose logits are halved, as for a temperature of 2."""

    def logits(self, x):
        return super().logits(x) / 2


def halved(logits):
    return lambda x: logits(x) / 2


ON_THE_MODEL = {
    "a hook": lambda model: model.register_forward_hook(lambda module, given, logits: logits / 2),
    "a hook before": lambda model: model.register_forward_pre_hook(lambda module, given: (given[0].flip(1),)),
    "logits of an object": lambda model: setattr(model, "logits", halved(model.logits)),
    "logits of a class": lambda model: setattr(model, "__class__", HalvedLogits),
}


@pytest.mark.parametrize("name", ON_THE_MODEL)
@pytest.mark.parametrize("attention", ["sdpa", "index"])
def test_what_is_attached_to_the_model_itself_is_in_the_loss(attention, name):
    model, tokens = random_gpt(attention=attention), torch.randint(61, (2, 9))
    given, targets = tokens[:, :-1], tokens[:, 1:]
    model.train().loss(given, targets).backward()
    indexers = [name for name, weight in model.named_parameters() if "index" in name and weight.grad.any()]
    assert bool(indexers) == (attention == "index")  # which learn by the loss of the layers alone
    plain = F.cross_entropy(model(given).mT, targets, reduction="none")
    ON_THE_MODEL[name](model)
    nats = F.cross_entropy(model(given).mT, targets, reduction="none")
    assert (abs(nats - plain) > 0.01).any()
    wanted = torch.autograd.grad(nats.sum(), model.lm_head.weight)[0]
    model.zero_grad()
    loss = model.loss(given, targets)
    loss.backward()
    close(loss, nats.sum(), rtol=1e-5)
    close(model.nats(given, targets)[0], nats, atol=1e-5)
    scoring = ScoringParams(torch.autocast("cpu", enabled=False))
    scored = torch.from_numpy(token_nats(model, tokens.numpy(), 3, scoring))
    close(scored, nats[:, -3:].detach(), atol=1e-5)
    with pytest.raises(SettingsError, match=r"has a (bias, a )?hook.*: remove it"):
        contributions(model, given, targets)
    close(model.lm_head.weight.grad, wanted, atol=1e-5)
    weights = dict(model.named_parameters())
    assert all(weights[name].grad.any() for name in indexers)


class Quantised(torch.Tensor):
    """A weight whose product is twice that of its numbers: quantised ones need a scale."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [arg.as_subclass(torch.Tensor) if isinstance(arg, cls) else arg for arg in args]
        if function is F.linear:
            plain[1] = 2 * plain[1]
        return function(*plain, **kwargs or {})


@pytest.mark.parametrize(
    ("attention", "place"),
    [("mla", "k_up"), ("mla", "v_up"), ("dsa", "k_up"), ("stacked", "qkv_proj"), ("sdpa", "lm_head")],
)
@torch.no_grad()
def test_a_quantised_weight_is_called_wherever_its_numbers_might_be_read(attention, place):
    """In a whole pass, with a cache and in the loss, as a model whose weight has the doubled numbers."""
    model, doubled = random_gpt(attention=attention), random_gpt(attention=attention)
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    for gpt in (model, doubled):
        layer = gpt.lm_head if place == "lm_head" else gpt.blocks[0].attention.get_submodule(place)
        if gpt is doubled:
            layer.weight.mul_(2)
        else:
            weight = layer.weight.detach().as_subclass(Quantised)
            del layer._parameters["weight"]
            layer._parameters["weight"] = weight
    close(model(tokens), doubled(tokens), atol=1e-5, rtol=1e-5)
    close(model.loss(tokens, tokens), doubled.loss(tokens, tokens), atol=1e-3, rtol=1e-5)
    cache = KVCache(9)
    found = [model(tokens[:, :5], cache=cache), *(model(tokens[:, t : t + 1], cache=cache) for t in range(5, 9))]
    close(torch.cat(found, 1), doubled(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("place", ["lm_head", "token_embedding"])
@torch.no_grad()
def test_a_quantised_model_is_kept_by_its_own_file_and_by_no_other(place, tmp_path):
    """torch's comparison of two weights, by which a tied head is told, has no such type, and files have no scales."""

    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.equal:
                raise NotImplementedError
            return super().__torch_function__(function, types, args, kwargs)

    model, tokens = random_gpt(tie_embeddings=True), torch.randint(61, (1, 9))
    layer = model.get_submodule(place)
    odd = layer.weight.detach().clone().as_subclass(Odd)
    del layer._parameters["weight"]
    layer._parameters["weight"] = odd
    other = random_gpt(tie_embeddings=True)
    other.load_state_dict(model.state_dict(), assign=True)
    assert type(other.get_submodule(place).weight) is Odd
    close(other(tokens).as_subclass(torch.Tensor), model(tokens).as_subclass(torch.Tensor))
    told = (
        rf"the model's {place}.weight is of type Odd, .*: write the model before it is quantised or sharded; torch.save"
    )
    for write in (
        lambda: save_checkpoint(tmp_path / "kept", model=model, tokenizer=None, config={"model": {}}),
        lambda: to_huggingface(model, tmp_path / "theirs"),
    ):
        with pytest.raises(SettingsError, match=told):
            write()


@pytest.mark.parametrize("outputs", [2, 256])
def test_a_classifier_in_the_place_of_lm_head_learns_and_writes_no_text(outputs):
    """Its loss is that of the last token; frozen parts stay, and the text would be of the first ids alone."""
    model = random_gpt(vocab_size=257)
    tokens = torch.randint(257, (4, 8))
    classes = torch.tensor([0, 1, 1, 0])
    model.requires_grad_(False)
    model.lm_head = nn.Linear(32, outputs)
    F.cross_entropy(model.train()(tokens, last=True)[:, -1], classes).backward()
    stream = model.eval().final_norm(model.hidden(tokens))[:, -1]
    wrong = (stream @ model.lm_head.weight.mT + model.lm_head.bias).softmax(-1) - F.one_hot(classes, outputs)
    close(model.lm_head.weight.grad, wrong.mT @ stream / 4)
    assert {name for name, weight in model.named_parameters() if weight.grad is not None} == {
        "lm_head.weight",
        "lm_head.bias",
    }
    encoding = make_tokenizer(TokenizerConfig(name="byte"), [])
    with pytest.raises(ValueError, match=rf"lm_head returned {outputs} logits for a vocabulary of 257 ids"):
        list(generate(model, encoding, [[256, 97]], seeds=[0], params=SamplingParams(max_new_tokens=2)))


OTHERS = [name for name in (*FORMS, *(f"sdpa+{each}" for each in MODIFIERS)) if name not in ("index", "dsa")]


@pytest.mark.parametrize("attention", ["index", "dsa", *some(OTHERS, 8)])  # those two split what a second layer returns
def test_modules_in_the_place_of_all_linear_layers_are_called(attention):
    """As quantisers and adapters put them there: with a forward() alone, and no attribute of a layer."""
    tokens = torch.randint(61, (2, 8))
    model = random_gpt(attention=attention)
    edited = copy.deepcopy(model)
    for block in edited.blocks:
        for name, layer in [*block.named_modules()]:
            if isinstance(layer, nn.Linear):
                block.set_submodule(name, nn.Sequential(layer))
    with torch.inference_mode():
        wanted = model(tokens)
        close(edited(tokens), wanted, atol=1e-4)
        cache = KVCache(8)
        rows = [edited(tokens[:1, t : t + 1], cache=cache) for t in range(8)]
        close(torch.cat(rows, 1), wanted[:1], atol=1e-4)
    for each in (model, edited):
        each.train().loss(tokens[:, :-1], tokens[:, 1:]).backward()
    gradients = (parameter.grad for parameter in edited.parameters())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            close(gradient, parameter.grad, atol=1e-3)


def test_a_hook_on_the_model_that_removes_itself_is_in_the_loss():
    """It is gone when the logits are there, and these are as wide as the residual stream."""
    model = random_gpt(vocab_size=32, n_embd=32)
    tokens = torch.randint(32, (2, 9))
    wanted = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1) / 2, tokens[:, 1:].flatten(), reduction="sum")

    def halve(module, given, logits):
        hook.remove()
        return logits / 2

    hook = model.register_forward_hook(halve)
    close(model.loss(tokens[:, :-1], tokens[:, 1:]), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "settings", [{"position": "learned"}, {"attention": "linear"}, {"attention": "sdpa+window"}], ids=str
)
@torch.inference_mode()
def test_a_hook_finds_the_first_places_of_each_text_of_a_batch_in_doc_starts(settings):
    """The lines of library.md, beside a loop without a cache that reads each text alone."""
    window = {"attention_window": 4} if "window" in str(settings) else {}
    tokenizer = make_tokenizer(TokenizerConfig(name="byte"), [])
    model = random_gpt(vocab_size=tokenizer.n_vocab, block_size=32, **settings, **window)
    vectors = 3 * torch.randn(4, 32)

    def add(block, arguments):
        x, ctx = arguments
        place = torch.arange(ctx.past, ctx.past + x.size(1)).expand(x.shape[:2])
        if ctx.doc_starts is not None:
            place = place - ctx.doc_starts
        is_first = (place >= 0) & (place < len(vectors))
        return x + vectors[place.clamp(0, len(vectors) - 1)] * is_first[..., None], ctx

    def add_to_a_text(block, arguments):
        return torch.cat((arguments[0][:, :4] + vectors, arguments[0][:, 4:]), 1), arguments[1]

    def written(prompts):
        new = [[] for _ in prompts]
        for chunk in generate(model, tokenizer, prompts, seeds=[1, 1], params=params):
            new[chunk.sample] += chunk.tokens
        return new

    prompts, params = [[7, 1, 8, 2, 8, 1, 8], [3, 1, 4, 1]], SamplingParams(temperature=0, max_new_tokens=8)
    plain = written(prompts)
    hook = model.blocks[1].register_forward_pre_hook(add)
    new = written(prompts)
    hook.remove()
    assert all(steered != unchanged for steered, unchanged in zip(new, plain, strict=True))
    hook = model.blocks[1].register_forward_pre_hook(add_to_a_text)
    for prompt, tokens in zip(prompts, new, strict=True):
        text = list(prompt)
        for token in tokens:
            assert token == model(torch.tensor([text]))[0, -1].argmax()
            text.append(token)
    hook.remove()


@pytest.mark.parametrize("attention", some(["sdpa+conv+forget", "mla", "delta", "k_eq_v", "sdpa+gate"], 5))
@torch.no_grad()
def test_hooks_on_all_modules_but_modifiers_and_dropout_are_called_and_are_in_decoded_logits(attention):
    model, tokens = random_gpt(attention=attention), torch.randint(61, (2, 6))
    silent = {"dropout", *(f"modifiers.{name}" for name in MODIFIERS)}
    for name, module in model.blocks[0].attention.named_modules():
        if type(module) is nn.ModuleDict:
            continue
        called = []

        def changed(module, arguments, result, called=called):
            called.append(module)
            return result * 1.2

        hook = module.register_forward_hook(changed)
        whole, cache = model(tokens), KVCache(6)
        close(torch.cat([model(token, cache=cache) for token in tokens.split(1, 1)], 1), whole, atol=1e-4)
        hook.remove()
        assert bool(called) != (name in silent), name


def test_a_model_that_an_earlier_version_pickled_loads_weights():
    """Its hook has the name by which pickles know it, and gets all that torch gives a hook."""
    model = random_gpt(tie_embeddings=True)
    weights = {name: torch.full_like(weight, 0.5) for name, weight in model.state_dict().items()}
    model._load_state_dict_pre_hooks.clear()
    model.register_load_state_dict_pre_hook(rename_wrapped)
    loaded = model.load_state_dict({f"_orig_mod.{name}": weight for name, weight in weights.items()})
    assert not loaded.missing_keys and all((weight == 0.5).all() for weight in model.state_dict().values())


@pytest.mark.slow  # imports torch.ao.quantization
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize(
    "settings", [{"tie_embeddings": True}, {"position": "learned", "ngrams": [2], "ngram_rows": 61}]
)
def test_tables_that_torch_quantises_are_read_as_their_rounded_rows_of_slices_of_ids_too(settings):
    model = random_gpt(zero_init=False, **settings)
    mapping = {nn.Embedding: torch.ao.quantization.float_qparams_weight_only_qconfig}
    quantised = torch.ao.quantization.quantize_dynamic(model, mapping)
    for table in [module for module in model.modules() if isinstance(module, nn.Embedding)]:
        rows = table.weight.detach()
        least = rows.min(1, keepdim=True).values.clamp(max=0)
        step = (rows.max(1, keepdim=True).values.clamp(min=0) - least) / 255
        table.weight = nn.Parameter(((rows - least) / step).round() * step + least)
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        close(quantised(tokens), model(tokens))
        close(quantised(tokens.mT[:2]), model(tokens.mT[:2]))
        nats = F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="sum")
        close(quantised.loss(tokens[:, :-1], tokens[:, 1:]), nats)

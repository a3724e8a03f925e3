"""The attention layer: what every form keeps, whatever it computes, and what is refused."""

import functools
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import close, layer, leaky_attention, some
from torch import nn

from common.errors import SettingsError
from model.attention import (
    FORMS,
    MODIFIERS,
    SETTINGS,
    SOFTMAX,
    AttentionContext,
    MultiHeadAttention,
    check,
    check_names,
    make_attention,
    unused_settings,
)
from model.attention.check import main as check_command
from model.attention.masks import causal_mask, document_mask
from model.attention.modifiers import Modifier
from model.attention.recurrent import Recurrent
from model.cache import KVCache
from model.config import POSITIONS, AttentionConfig, GPTConfig
from model.gpt import GPT
from model.layers import Linear, RMSNorm

matmul = FORMS["matmul"]
C, CPU = 16, torch.device("cpu")
STATES = [name for name, kind in FORMS.items() if isinstance(kind, type) and issubclass(kind, Recurrent)]
ROWS = [name for name in FORMS if name not in STATES]
SUM_TO_ONE = (
    *SOFTMAX,
    "softcap",
    "average",
    "simple",
    "single_head",
    "stacked",
    "mla",
    "gta",
    "moba",
    "index",
    "parallax",
    "wall",
    "dsa",
    "k_eq_v",
)
some_forms = pytest.mark.parametrize("form", some(FORMS, 3))
every_form, form_of_rows = pytest.mark.parametrize("form", FORMS), pytest.mark.parametrize("form", ROWS)
every_position = pytest.mark.parametrize("position", POSITIONS)


# The check that a person can run: values, gradients, future, padding, documents, cache, rotation of every form.


@functools.cache
def combinations() -> list[str]:
    return [*check.combinations()]


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("each", [30, 3])
def test_every_check_of_every_form_and_modifier_passes_and_says_so(each, monkeypatch, capsys):
    """Some modifiers stand beside sdpa, and one in `each` of them beside the other forms."""
    assert {"sdpa+window", "sdpa+forget", "mla+sink", "delta+key_offset", "simple+nope"} <= {*combinations()}
    numbered = enumerate(combinations())
    few = {f"sdpa+{name}" for name in ("key_offset", "forget", "fade", "conv", "nope", "diff", "sink", "parallax")}
    tested = [name for number, name in numbered if name in few or number % each == 0]
    monkeypatch.setattr(check, "combinations", lambda: tested)
    assert check.main([]) == 0
    printed = capsys.readouterr().out
    table = [line for line in printed.splitlines() if re.split(r"[+ ]", line)[0] in FORMS]
    names = [line.split()[0] for line in table]
    assert names == [*FORMS, *FORMS, *tested]  # float32 and bfloat16, then modifiers
    assert "every check passed" in printed and "FAIL" not in printed
    layers = {name: check.make_layer(name) for name in set(names)}
    needless = {name for name, layer in layers.items() if not layer.accepts_mask}
    assert {"sdpa+key_offset", "sdpa+forget", "sdpa+fade", "sdpa+conv", *STATES} <= needless
    assert not {"sdpa", "average", "sdpa+nope"} & needless
    chooses = {name for name in FORMS if layers[name].is_sparse}  # in bfloat16 a rounding may choose others
    assert {line.split()[0] for line in table if "n/a" in line} == needless | chooses
    assert chooses >= {"moba", "index"}


@pytest.mark.slow
def test_a_check_of_some_names_is_of_these_alone_and_refuses_others(capsys):
    assert check.main(["sdpa+gate", "delta"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(sdpa|delta)(\S*)", printed, re.M) == [("sdpa", "+gate"), ("delta", "")] * 2
    with pytest.raises(SettingsError, match="'spda' is no form"):
        check.main(["spda"])


def broken(**changes):
    return lambda q, k, v, **arguments: matmul(q, k, v, **arguments | changes)


def longer(attend):
    """Broken in texts of more than the three tokens of the trial."""
    return lambda q, k, v, **arguments: (attend if k.shape[-2] > 3 else matmul)(q, k, v, **arguments)


def top_left(q, k, v, **arguments):
    if arguments["is_causal"]:
        arguments |= {"mask": torch.ones(q.shape[-2], k.shape[-2]).tril(), "is_causal": False}
    return matmul(q, k, v, **arguments)


@pytest.mark.parametrize(
    ("attend", "noticed_by"),
    some(
        [
            (broken(scale=0.9 / 8**0.5), "value+grad"),
            (lambda q, k, v, **arguments: matmul(q, k, v.detach(), **arguments), "value+grad"),
            (longer(lambda *qkv, **arguments: matmul(*qkv, **arguments) * torch.nan), "value+grad"),
            (broken(is_causal=False), "future"),
            *((broken(is_causal=True, mask=None), check) for check in ("padding", "document")),
            (top_left, "cache"),
            (longer(broken(dropout_p=0.1)), "cache"),
        ],
        2,
    ),
)
def test_a_broken_attention_is_noticed_and_one_with_a_kink_passes(monkeypatch, attend, noticed_by):
    monkeypatch.setitem(FORMS, "sdpa", attend)
    assert check.run(noticed_by, "sdpa", CPU, torch.float32).startswith("FAIL")
    monkeypatch.setitem(FORMS, "softmax1", leaky_attention)
    for dtype in (torch.float32, torch.bfloat16):
        assert check.run(noticed_by, "softmax1", CPU, dtype).startswith("ok")


@pytest.mark.parametrize(
    ("attend", "sentence"),
    [
        (lambda *qkv, **arguments: matmul(*qkv, **arguments) * torch.nan, "attention=sdpa gives infinity or NaN: look"),
        (
            broken(dropout_p=0.1),
            r"attention=sdpa gives two results for the same tokens: keep state in ctx\.layer_cache",
        ),
    ],
)
def test_a_layer_that_is_not_finite_or_not_repeatable_is_refused(monkeypatch, attend, sentence):
    monkeypatch.setitem(FORMS, "sdpa", attend)
    with pytest.raises(SettingsError, match=sentence):
        check.make_layer("sdpa")


@pytest.mark.slow
def test_failures_are_counted_and_become_the_exit_status(monkeypatch, capsys):
    monkeypatch.setitem(FORMS, "sdpa", broken(is_causal=False))
    assert check.main(["sdpa"]) == 1
    assert re.search(r"FAIL(?s:.*)\d of the checks failed", capsys.readouterr().out)


# Masks, positions, leading dimensions, windows.


@some_forms
@torch.no_grad()
def test_any_number_of_leading_dimensions_are_as_one_and_starts_are_a_mask(form):
    attention, x = layer(form, n_kv_head=2), torch.randn(3, 2, 5, C)
    H, doc_starts = attention.n_head, torch.tensor([[0, 0, 0, 0, 0], [0, 0, 2, 2, 2]])
    close(attention(x), torch.stack([attention(each) for each in x]))
    close(attention(x[0, 0]), attention(x)[0, 0])
    close(
        attention(x, AttentionContext(doc_starts=doc_starts.repeat(3, 1)))[1],
        attention(x[1], AttentionContext(doc_starts=doc_starts)),
    )
    for shape in ((2, 1, 1, 5), (H, 1, 5), (2, H, 5, 5)) if attention.accepts_mask else ():
        mask = torch.rand(shape) > 0.3
        close(
            attention(x[0], AttentionContext(mask=mask, doc_starts=doc_starts)),
            attention(x[0], AttentionContext(mask=mask & document_mask(doc_starts, 5))),
        )
        close(
            attention(x[0], AttentionContext(mask=mask))[1],
            attention(x[0, 1], AttentionContext(mask=mask[1] if len(shape) > 3 else mask)),
        )


EVERY = [*FORMS, *(f"sdpa+{name}" for name in ("window", *MODIFIERS) if name != "value_embedding"), "delta+conv"]


@pytest.mark.parametrize("attention", some(EVERY, 6))
def test_no_texts_and_no_tokens_have_results_of_their_shape(attention):
    """As torch's own attention; a rank may have an empty batch, and a prompt no token beyond a cached one."""
    form = layer(attention, position="none", attention_window=4 if "window" in attention else None)
    for shape in ((0, 5, C), (0, 300, C), (2, 0, C), (2, 3, 0, C)):
        x = torch.randn(shape, requires_grad=True)
        y = form(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == x.shape
    x, cache, parts = torch.randn(2, 9, C), KVCache(9), []
    with torch.no_grad():
        for part in x.split([0, 5, 0, 1, 3], 1):
            parts.append(form(part, AttentionContext(cache=cache)))
            cache.position += part.shape[1]
        close(torch.cat(parts, 1), form(x))


@form_of_rows
@torch.no_grad()
def test_a_window_sees_itself_and_the_positions_just_before(form):
    attention, x = layer(form, attention_window=3, n_kv_head=2), torch.randn(1, 9, C)
    weights, inside = attention.weights(x), causal_mask(9, 9).triu(-2)
    assert not weights[..., ~inside].any() and (form not in SUM_TO_ONE or (weights[..., inside] > 0).all())
    far = torch.cat((torch.randn(1, 4, C), x[:, 4:]), 1)
    close(attention(far)[:, 6:], attention(x)[:, 6:])


@some_forms
@every_position
@torch.no_grad()
def test_the_weights_of_the_picture_are_those_of_the_layer(form, position):
    """Rows sum to 1 in the forms that normalise, and weigh the values to the layer's output."""
    if position == "pope" and form in ("mla", "gta", "dsa", "k_eq_v"):
        with pytest.raises(SettingsError, match=rf"attention={form}: model.position=pope doubles the width of keys"):
            layer(form, position=position)
        return
    attention, x = layer(form, position=position, attention_dropout=0.5, n_kv_head=2).train(), torch.randn(2, 6, C)
    ctx = AttentionContext(doc_starts=torch.tensor([[0] * 6, [0, 0, 2, 2, 2, 5]]), cache=KVCache(3))
    weights = attention.weights(x, ctx)  # of all at once, without dropout and without a cache
    if form in SUM_TO_ONE:
        close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    values, ctx.cache = attention.project(x)[2], None
    if form == "short_conv":  # whose weights differ between channels
        return
    values = values.repeat_interleave(weights.shape[1] // values.shape[1], dim=1)
    if form == "gdn2":
        values = attention.written(values, x)
    gathered = weights @ values
    if form in ("retention", "delta", "kda", "gdn2"):  # which normalise it
        gathered = getattr(attention, "out_norm", RMSNorm(gathered.shape[-1], eps=1e-6))(gathered)
    close(attention.merge(gathered), attention.eval()(x, ctx))


# Names on disk: a checkpoint has them.


PROJECTIONS = ("qkv_proj.weight", "o_proj.weight")
QK_NORM = ("q_norm.weight", "k_norm.weight")
DELTA = ("log_rate", *PROJECTIONS, "beta.weight", "fade.weight", "fade.bias", "out_norm.weight")
WEIGHTS = {
    "average": ("v_proj.weight", "o_proj.weight"),
    "simple": (),
    "mla": tuple(f"{name}.weight" for name in ("q_proj", "k_proj", "c_proj", "c_norm", "k_up", "v_up", "o_proj")),
    "gta": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"),
    "delta": DELTA,
    "kda": DELTA,
    "parallax": ("qkv_proj.weight", "o_proj.weight", *QK_NORM, "r_proj.weight"),
    "wall": (*PROJECTIONS, *QK_NORM, "fade.weight", "fade.bias"),
    "short_conv": ("taps", *PROJECTIONS),
    "gdn2": (*(name for name in DELTA if name != "beta.weight"), "erase.weight", "write.weight"),
    "k_eq_v": ("k_scale", "q_proj.weight", "kv_proj.weight", "o_proj.weight", "q_norm.weight"),
    "dsa": (
        *(f"{name}.weight" for name in ("q_proj", "k_proj", "c_proj", "c_norm", "k_up", "v_up", "o_proj")),
        *("index_proj.weight", "index_norm.weight", "index_norm.bias"),
    ),
    "index": (*PROJECTIONS, *QK_NORM, "index_proj.weight", "index_norm.weight", "index_norm.bias"),
}
WEIGHTS_OF_MODIFIERS = {
    "value_residual": ("mixture",), "key_offset": (), "logn": ("factor",), "forget": ("gate.weight", "gate.bias"),
    "fade": ("rate",), "sink": ("bias",), "diff": ("weight.weight",), "xsa": ("strength",), "gate": ("gate.weight",),
    "gate_element": ("gate.weight",), "gate_silu": ("gate_proj.weight",), "joint_norm": QK_NORM, "conv": ("weight",),
    "value_embedding": ("gate.weight", "embedding.weight"), "relative": ("profiles", "r_proj.weight"),
    "token_sink": ("weight.weight",), "out_norm": (),
    "gate_biased": ("bias", "gate.weight"), "gate_softplus": ("gate.weight",),
}  # fmt: skip


@every_form
def test_a_forms_weights_keep_their_names_and_their_order(form):
    assert tuple(check.make_layer(form).state_dict()) == WEIGHTS.get(form, (*PROJECTIONS, *QK_NORM))


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_a_modifiers_weights_keep_their_names_and_follow_those_of_the_layer(modifier):
    assert modifier in WEIGHTS_OF_MODIFIERS, "add its weights' names above: checkpoints have them"
    norms = () if modifier == "joint_norm" else QK_NORM
    own = tuple(f"modifiers.{modifier}.{name}" for name in WEIGHTS_OF_MODIFIERS[modifier])
    assert tuple(check.make_layer(f"sdpa+{modifier}").state_dict()) == (*PROJECTIONS, *norms, *own)


def test_a_seed_draws_the_projections_of_two_queries_a_head_after_those_of_one():
    """A run with diff is made again from its seed, as in earlier versions."""
    torch.manual_seed(0)
    drawn = layer("sdpa+diff").qkv_proj.weight
    torch.manual_seed(0)
    layer()
    assert torch.equal(Linear(C, 2 * C, C, C, bias=False).weight, drawn)


# Training, precision, devices.


@form_of_rows
def test_dropout_acts_in_training_only(form):
    attention, x = layer(form, attention_dropout=0.5).train(), torch.randn(2, 9, C)
    assert not torch.equal(attention(x), attention(x)) and torch.equal(attention.eval()(x), attention(x))


@form_of_rows
def test_dropout_of_weights_is_found_by_its_class(form):
    """As for Monte Carlo dropout, whose only modules in training mode are these, or by those who turn it off."""
    attention, x = layer(form, attention_dropout=0.5).train(), torch.randn(2, 9, C)
    without = attention.eval()(x)
    torch.manual_seed(3)
    dropped = attention.train()(x)
    attention.eval()
    found = [module for module in attention.modules() if isinstance(module, nn.Dropout)]
    for module in found:
        module.train()
    torch.manual_seed(3)
    assert torch.equal(attention(x), dropped) and not torch.equal(dropped, without)
    for module in found:
        module.p = 0.0
    close(attention.train()(x), without)


class Shared(nn.Dropout):
    """Drops the same weights in all heads."""

    def forward(self, weights):
        return weights * nn.functional.dropout(torch.ones_like(weights[:, :1]), self.p, self.training)


@pytest.mark.parametrize("own", [Shared(0.5), nn.AlphaDropout(0.5), nn.Linear(4, 4), nn.Dropout(1.0)])
def test_a_module_in_the_place_of_dropout_is_no_dropout_or_refused(own):
    """Its probability was read and its code never run: by the kernel's dropout, without a word."""
    attention, x = layer("sdpa", attention_dropout=0.5).train(), torch.randn(2, 9, C)
    without = attention.eval()(x)
    attention.train().dropout = nn.Identity()
    assert torch.equal(attention(x), without)
    attention.dropout = own
    told = "p=1.0" if type(own) is nn.Dropout else f"{type(own).__name__}, and weights pass"
    with pytest.raises(ValueError, match=rf"{told}.*: put nn.Dropout\(p\) or nn.Identity\(\) in place"):
        attention(x)
    attention.dropout = nn.Dropout(0.5)
    assert not torch.equal(attention(x), without)


@every_form
@pytest.mark.filterwarnings("error")
@torch.no_grad()
def test_bfloat16_and_autocast_stay_close_to_float32(form):
    attention, x = layer(form), torch.randn(2, 9, C)
    wanted = attention(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(attention(x).float(), wanted, rtol=2e-2, atol=3e-2)
    got = attention.bfloat16()(x.bfloat16())
    assert got.dtype == torch.bfloat16
    close(got.float(), wanted, rtol=2e-2, atol=3e-2)


# What a person may get wrong.


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        ("sdap", r"attention=sdap: 'sdap' is no form: did you mean sdpa\? Else choose one of matmul, "),
        ("gate", r"'gate' is no form: add it to a form, as in sdpa\+gate"),
        ("sdpa+delta", r"'delta' is no modifier: it is a form, and sdpa/delta has the two in turns, layer by layer"),
        ("sdpa+rank", r"'rank' is no modifier: choose one of window, nope, value_residual"),
        ("sdpa/", r"'' is no form: leave out the \+ or / beside it"),
        ("sdpa/window", r"'window' is no form: add it to a form, as in sdpa\+window"),
        ("sdpa+gaet", r"'gaet' is no modifier: did you mean gate\?"),
        ("sdpa+", r"'' is no modifier: leave out the \+ or / beside it"),
        ("sdpa//sdpa", r"'' is no form: leave out"),
        ("sdpa+gate+gate", r"has gate twice in one layer: leave one out"),
        ("sdpa/delta+sink", r"attention=delta\+sink: delta has no scores for sink to change: leave out sink, or"),
        ("sigmoid+sink", r"attention=sigmoid\+sink: no key takes weight from others under sigmoid: leave out sink"),
    ],
)
def test_names_that_mean_nothing_together_are_refused_in_a_sentence(attention, words):
    with pytest.raises(SettingsError, match=words):
        check_names(attention)
        for each in attention.split("/"):
            layer(each, attention_window=3 if "window" in each else None)


@pytest.mark.slow
@some_forms
def test_a_form_refuses_what_would_change_something_that_it_has_not(form):
    lacks = {"average": "rotation queries keys values scores result", "simple": "queries keys values scores result"}
    lacks |= dict.fromkeys(STATES, "window rotation queries scores") | dict.fromkeys(
        ("mla", "gta", "dsa", "k_eq_v"), "keys values"
    )
    changed = SETTINGS | {name: kind.changes for name, kind in MODIFIERS.items()}
    refused = {name for name, what in changed.items() if what in lacks.get(form, "").split()}
    refused |= {"nope"} if form == "wall" else set()
    refused |= {"sink", "token_sink"} if form in ("sigmoid", "stick", "moba") else set()
    taken = {name.split("+")[1] for name in combinations() if name.startswith(f"{form}+")}
    assert form in SOFTMAX or taken == changed.keys() - refused


@some_forms
def test_settings_that_change_nothing_are_known_and_change_nothing(form):
    values = {"n_kv_head": 1, "qk_norm": False, "position": "alibi", "latent_size": 6, "attention_window": 2}
    values |= {"score_softcap": 1.0, "rope_fraction": 0.5, "qkv_bias": True, "head_size": 8, "n_head": 2}
    values |= {"allow_neg_eigval": True}
    idle, x, plain = unused_settings(AttentionConfig(attention=form)), torch.randn(1, 6, C), layer(form)
    for name, value in values.items():
        other = layer(form, **{name: value})
        if same := other.state_dict().keys() == plain.state_dict().keys() and all(
            a.shape == b.shape for a, b in zip(other.parameters(), plain.parameters(), strict=True)
        ):
            other.load_state_dict(plain.state_dict())
            same = torch.equal(other(x), plain(x))
        assert same == (name in idle), name
    mla, both = (unused_settings(AttentionConfig(attention=attention)) for attention in ("mla", "mla/delta"))
    assert both == mla & unused_settings(AttentionConfig(attention="delta")) != mla
    assert {"n_head", "head_size", "n_kv_head"} <= unused_settings(AttentionConfig(attention="simple/single_head"))
    assert {"rope_theta", "rope_scaling", "rope_scaling_factor"} <= unused_settings(
        AttentionConfig(attention="average/linear")
    )


@pytest.mark.parametrize("attention", ["sdpa+nope", "wall", "linear", "average"])
def test_a_layer_that_turns_nothing_computes_the_same_under_every_rotation(attention):
    plain, x = layer(attention), torch.randn(1, 6, C)
    for settings in ({"position": "pope"}, {"rope_theta": 5.0}, {"rope_fraction": 0.5}):
        other = layer(attention, **settings)
        other.load_state_dict(plain.state_dict())
        assert torch.equal(other(x), plain(x))
        assert settings.keys() <= unused_settings(AttentionConfig(attention=attention, **settings))
    assert "position" not in unused_settings(AttentionConfig(attention="wall", position="alibi"))
    mixed = unused_settings(AttentionConfig(attention="sdpa+nope/sdpa", position="pope"))
    assert not mixed & {"position", "rope_theta"}


@pytest.mark.parametrize("attention", [*STATES, "wall", "sdpa+key_offset", "sdpa+forget"])
def test_what_sums_up_or_shifts_the_past_takes_starts_and_refuses_a_mask(attention):
    for call in (layer(attention), layer(attention).weights):  # F4
        with pytest.raises(ValueError, match=r"takes no mask: pass doc_starts"):
            call(torch.randn(2, 5, C), AttentionContext(mask=torch.ones(2, 1, 1, 5)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("mask", shape) for shape in ((3, 5), (2, 1, 1, 4), (3, 1, 1, 5), (1, 1, 2, 1, 1, 5))),
        *(("doc_starts", shape) for shape in ((5,), (2, 4), (3, 5))),
    ],
)
@torch.no_grad()
def test_a_pass_that_does_not_fit_is_a_value_error_that_names_the_shapes(name, shape):
    for form in ("sdpa", "mla", *(["delta"] if name != "mask" else [])):
        for x in (torch.randn(2, 5, C), torch.randn(1, 2, 5, C)):
            with pytest.raises(ValueError, match=re.escape(f"{name} {shape}")):
                layer(form)(x, AttentionContext(**{name: torch.zeros(shape).long()}))


@torch.no_grad()
def test_a_cache_without_room_or_of_other_shapes_is_a_value_error_that_names_the_shapes():
    cache, x = KVCache(6), torch.randn(2, 5, C)
    layer()(x, AttentionContext(cache=cache))
    cache.position = 5
    with pytest.raises(ValueError, match="the cache has room for 6 positions, not for 10"):
        layer()(x, AttentionContext(cache=cache))
    for other, batch in ((layer(n_kv_head=2), 2), (layer(head_size=8), 2), (layer(), 1)):
        with pytest.raises(ValueError, match=r"do not fit a cache of \(2, 4, 6, 4\)"):
            other(x[:batch, :1], AttentionContext(cache=cache))


def test_modifiers_act_in_the_order_of_their_registration_with_those_that_add_a_key_last():
    one, other = layer("sdpa+gate+sink+forget+diff"), layer("sdpa+sink+diff+forget+gate")
    assert [*one.modifiers] == ["forget", "diff", "gate", "sink"] and list(one.state_dict()) == list(other.state_dict())
    assert [*MODIFIERS].index("sink") < [*MODIFIERS].index("diff")
    assert {"modifiers.gate.gate.weight", "modifiers.sink.bias"} < one.state_dict().keys()


def test_a_pattern_is_refused_for_one_layer_which_would_have_its_first_part_alone():
    config = GPTConfig(attention="delta/sdpa", vocab_size=7)
    with pytest.raises(SettingsError, match=r"attention=delta/sdpa is of several .*: give that of one layer, such as"):
        make_attention(config)
    assert make_attention(config.at(1)).form == "sdpa"


def test_the_check_tests_each_layer_of_a_pattern(monkeypatch):
    tested: list[str] = []
    monkeypatch.setattr("model.attention.check.check_all", lambda attentions: tested.extend(attentions) or 0)
    assert check_command(["attention=sdpa/delta/sdpa", "stick"]) == 0 and tested == ["sdpa", "delta", "stick"]


@every_form
def test_a_layer_gets_its_number_when_it_is_made_and_gives_it_to_its_modifiers(form):
    config = AttentionConfig(
        attention=f"{form}+conv" if form not in ("average", "simple", "mla", "gta", "dsa", "k_eq_v") else form
    )
    made = make_attention(config, 3)
    assert made.layer_idx == 3 and all(modifier.layer_idx == 3 for modifier in made.modifiers.values())
    assert make_attention(config).layer_idx == 0


@pytest.mark.parametrize("arguments", ["config", "config, **given", "config, layer_idx=0"])
def test_the_constructor_of_a_form_of_ones_own_may_take_the_settings_alone(arguments, monkeypatch):
    passed = arguments.replace("=0", "=layer_idx")
    scope = {"MultiHeadAttention": MultiHeadAttention}
    exec(
        f"class Own(MultiHeadAttention):\n    def __init__(self, {arguments}):\n        super().__init__({passed})\n",
        scope,
    )
    monkeypatch.setitem(FORMS, "own", scope["Own"])
    gpt = GPT(GPTConfig(attention="own+conv", n_embd=16, n_head=2, vocab_size=7, n_layer=3))
    assert [layer.layer_idx for layer in gpt.attentions] == [0, 1, 2]
    assert [layer.modifiers["conv"].layer_idx for layer in gpt.attentions] == [0, 1, 2]


@pytest.mark.slow
@torch.no_grad()
def test_index_chooses_the_nearer_of_equal_keys_however_the_text_is_read():
    torch.manual_seed(0)
    T, width = 48, 128
    index = layer("index", n_embd=width, position="alibi", block_size=32).eval()  # the indexer sees no position
    for weight in index.parameters():
        weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    x = torch.randn(6, width)[torch.randint(6, (4, T))]  # six tokens, again and again
    whole, padded = index(x), torch.cat((torch.randn(4, 5, width), x), 1)
    close(index(padded, AttentionContext(doc_starts=torch.full((4, T + 5), 5)))[:, 5:], whole, atol=1e-5)
    for ends in (range(1, T + 1), (7, 8, 19, T)):
        cache, parts = KVCache(T), []
        for end in ends:
            parts.append(index(x[:, cache.position : end], AttentionContext(cache=cache)))
            cache.position = end
        close(torch.cat(parts, 1), whole, atol=1e-5)


@pytest.mark.parametrize("others", ["", "+forget", "+joint_norm"])
def test_several_queries_of_a_head_in_a_modifier_of_ones_own_share_its_bias(others, monkeypatch):
    class Twice(Modifier):
        """The mean of two results, from two queries a head."""

        queries_per_head = 2

        def finish(self, y, v, x, ctx):
            return y.unflatten(1, (-1, 2)).mean(2)

    Twice.changes = "queries"
    monkeypatch.setitem(MODIFIERS, "twice", Twice)
    settings = {"position": "alibi", "n_kv_head": 2}
    torch.manual_seed(0)
    one, two = layer(f"sdpa{others}", **settings), layer(f"sdpa{others}+twice", **settings)
    weights = one.state_dict()
    # Both queries of a head are the one that it had.
    q, kv = weights["qkv_proj.weight"].split((C, C))
    weights["qkv_proj.weight"] = torch.cat((q.unflatten(0, (4, -1)).repeat_interleave(2, 0).flatten(0, 1), kv))
    if others == "+joint_norm":
        weights["modifiers.joint_norm.q_norm.weight"] = torch.ones(2 * C)
    two.load_state_dict(weights)
    x = torch.randn(2, 300, C)
    for T in (12, 300):  # also by chunks
        close(two(x[:, :T]), one(x[:, :T]))


def test_a_mask_of_no_axes_hides_everywhere_or_nowhere_also_beyond_a_window():
    seen = torch.tensor(True)
    windowed, x = layer(attention_window=4), torch.randn(1, 12, C)
    cache = KVCache(size=12)
    read = []
    for part in x.split(3, 1):
        read.append(windowed(part, AttentionContext(cache=cache, mask=seen)))
        close(windowed.weights(part, AttentionContext(cache=cache, mask=seen)), windowed.weights(part))
        cache.advance(3)
    close(torch.cat(read, 1), windowed(x))


@pytest.mark.parametrize("name", ["forget", "token_sink", "relative"])
def test_vmap_of_long_texts_has_the_values_and_gradients_of_their_batch(name):
    made = layer(f"sdpa+{name}").double()
    for weight in made.parameters():
        weight.data = torch.randn_like(weight) / 4
    x, g = torch.randn(2, 2, 260, C).double()
    found = made(x), torch.func.vmap(lambda text: made(text[None])[0])(x)
    close(*found)
    for pair in zip(*(torch.autograd.grad(y, [*made.parameters()], g) for y in found), strict=True):
        close(*pair)


CELL = """
from model.attention.contract import from_weights
from model.attention.modifiers import Modifier
from model.attention.registry import form, modifier


@form("warm")
@from_weights
def warm(scores):
    return (SCALE * scores).softmax(-1)


@modifier("scaled", changes="result")
class Scaled(Modifier):
    def finish(self, y, v, x, ctx):
        return SCALE * y
"""


@mock.patch.dict(FORMS)
@mock.patch.dict(MODIFIERS)
def test_a_cell_that_runs_again_takes_the_place_of_what_it_defined():
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    x = torch.randn(2, 6, 32)
    config = AttentionConfig(attention="warm+scaled", n_embd=32, n_head=2)
    made = []
    for scale in (1.0, 2.0):
        exec(CELL.replace("SCALE", str(scale)), {"__name__": "__main__"})
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale * 8**-0.5)
        close(FORMS["warm"](q, k, v, is_causal=True), wanted, atol=1e-5)
        made.append(make_attention(config))
    made[1].load_state_dict(made[0].state_dict())
    plain = make_attention(replace(config, attention="sdpa"))
    plain.load_state_dict(made[0].state_dict())
    close(made[0](x), plain(x), atol=1e-5)  # a layer keeps the form and the modifier with which it was made
    plain.scale = 2 * 16**-0.5
    close(made[1](x), 2 * plain(x), atol=1e-5)

    # Another function is refused under this name, and a person's own under one of ours.
    for name, source in (("warm", "hot"), ("sdpa", "sdpa"), ("scaled", "warm")):
        with pytest.raises(SettingsError, match=f"the name '{name}' is taken: choose another one"):
            exec(CELL.replace('"warm"', f'"{name}"').replace("def warm", f"def {source}"), {"__name__": "__main__"})

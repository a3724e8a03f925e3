"""Published models' attention, with random weights, equals ours under its string."""

import importlib
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import close, some

from model.attention import AttentionContext, check_names, make_attention
from model.cache import KVCache
from model.config import GPTConfig

transformers = pytest.importorskip("transformers")

C, H, HKV, D, T, WINDOW = 32, 4, 2, 8, 70, 5
SHAPE = dict(
    hidden_size=C, num_attention_heads=H, num_key_value_heads=HKV, head_dim=D, intermediate_size=C, vocab_size=61,
    max_position_embeddings=128, rms_norm_eps=1e-6, pad_token_id=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GPT2 = dict(n_embd=C, n_head=H, n_layer=1, n_inner=C, vocab_size=61, bos_token_id=None, eos_token_id=None)
MPT = dict(d_model=C, n_heads=H, n_layers=1, expansion_ratio=1, vocab_size=61)
FALCON = dict(hidden_size=C, num_attention_heads=H, num_hidden_layers=1, multi_query=True, vocab_size=61)
MOE = dict(num_experts=2, num_local_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, n_shared_experts=1)
LATENT = dict(
    q_lora_rank=None, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=D, v_head_dim=D, num_key_value_heads=H
)
DELTA = dict(
    linear_num_key_heads=H, linear_num_value_heads=H, linear_key_head_dim=D, linear_value_head_dim=D,
    mlp_only_layers=[0, 1], num_key_value_heads=H,
)  # fmt: skip
KIMI = dict(linear_num_heads=H, linear_head_dim=D, mlp_layer_types=["dense", "dense"])
LAYERS = {"window": "sliding_attention", "full": "full_attention", "state": "linear_attention"}
PLAIN, BIASED, ALL = {"qk_norm": False}, {"qk_norm": False, "qkv_bias": True}, {"n_kv_head": H}
EVERY = BIASED | {"bias": True}


def rope(fraction=1.0, theta=10_000.0):
    return {"rope_parameters": dict(rope_theta=theta, rope_type="default", partial_rotary_factor=fraction)}


def types(*layers):
    return {"layer_types": [LAYERS[layer] for layer in layers], "sliding_window": WINDOW}


TWO = types("window", "full") | {"query_pre_attn_scalar": D}
BOTH = {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), *rope().values())}
QUARTER = dict(rope_theta=10_000.0, rope_type="proportional", partial_rotary_factor=0.25)
PROPORTIONAL = {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), QUARTER)}
FAMILIES = {  # their name: our string, our settings, theirs, beside SHAPE where they have its names
    "gpt2": ("sdpa", EVERY | ALL | {"position": "learned"}, GPT2),
    "gpt_neox": ("sdpa", EVERY | ALL | {"rope_fraction": 0.25}, rope(0.25) | {"head_dim": None}),
    "mpt": ("sdpa", PLAIN | ALL | {"position": "alibi"}, MPT),
    "falcon": ("sdpa", PLAIN | {"n_kv_head": 1}, FALCON),
    "llama": ("sdpa", PLAIN | {"rope_theta": 5e5}, rope(theta=5e5)),
    "mistral": ("sdpa+window", PLAIN, {"sliding_window": WINDOW}),
    "qwen2": ("sdpa", BIASED, {}),
    "qwen3": ("sdpa", {}, {}),
    "olmo2": ("sdpa+joint_norm", {}, {}),
    "olmo3": ("sdpa+joint_norm+window/sdpa+joint_norm", {}, TWO | BOTH),
    "minimax_m2": ("sdpa+joint_norm", {"rope_fraction": 0.5}, MOE | rope(0.5)),
    "smollm3": ("sdpa/sdpa/sdpa/sdpa+nope", PLAIN, rope()),
    "gemma2": ("softcap+window/softcap", PLAIN, TWO),
    "gemma3_text": ("sdpa+window/sdpa", {}, TWO | BOTH),
    "glm4": ("sdpa", BIASED | {"rope_fraction": 0.5}, {"attention_bias": True} | rope(0.5)),
    "cohere": ("sdpa", PLAIN, rope()),
    "gpt_oss": ("sdpa+window+sink/sdpa+sink", EVERY, MOE | TWO | rope()),
    "afmoe": ("sdpa+window+gate_element/sdpa+nope+gate_element", {}, MOE | TWO | {"num_dense_layers": 2}),
    "qwen3_next": (
        "delta+conv+gate_silu/sdpa+gate_element", ALL | {"rope_fraction": 0.25},
        MOE | types("state", "full") | DELTA | rope(0.25),
    ),
    # RoPE inside the windows and no positions in the full layers, the pattern of 2026.
    "exaone_moe": ("sdpa+window/sdpa+nope", {}, MOE | TWO | {"first_k_dense_replace": 2}),
    "cohere2_moe": ("sdpa+window/sdpa+nope", PLAIN, MOE | TWO | rope()),
    "kolibri1": ("sdpa+window/sdpa+nope", {}, MOE | TWO | rope()),
    "muse_glimmer_text": (
        "sdpa+window+gate_element/sdpa+nope+gate_element", {},
        MOE | TWO | rope() | {"qk_scale_factor": 1.3, "layer_rope_theta": [1e4, 0.0]},
    ),
    "muse_spark_text": (
        "sdpa+window+out_norm+gate_element/sdpa+nope+out_norm+gate_element", {},
        MOE | TWO | rope() | {"qk_scale_factor": 1.3, "layer_rope_theta": [1e4, 0.0], "moe_hidden_size": C},
    ),
    "beam": (
        "sdpa+window+gate_biased/sdpa+nope+gate_biased", {},
        MOE | TWO | {"n_routed_experts": 2, "mlp_layer_types": ["dense", "dense"]},
    ),
    "laguna": (
        "sdpa+window+gate_softplus/sdpa+gate_softplus", {},
        MOE | TWO | BOTH | {"mlp_layer_types": ["dense", "dense"]},
    ),
    "lfm3": (
        "sdpa+window+gate/sdpa+gate", {"rope_fraction": 0.25, "rope_proportional": True},
        TWO | PROPORTIONAL | {"use_attention_gate": True},
    ),
    "olmo_hybrid": (
        "delta+conv+gate_silu/sdpa+joint_norm", ALL | {"allow_neg_eigval": True},
        types("state", "full") | DELTA | rope() | {"linear_allow_neg_eigval": True},
    ),
    "flint": ("sdpa+nope+sink/sdpa+window+sink", {}, MOE | types("full", "window") | rope()),
    "granite_swa": (
        "sdpa+sink/sdpa+window+sink/sdpa+window+sink+nope", PLAIN,
        types("full", "window", "window")
        | rope()
        | {"layer_rope_theta": [1e4, 1e4, 0.0], "attention_multiplier": D**-0.5},
    ),
    "qwen3_5_text": (
        "delta+conv+gate_silu/sdpa+gate_element", ALL | {"rope_fraction": 0.25},
        types("state", "full") | DELTA | rope(0.25),
    ),
    "hrm_text": ("sdpa+gate_element", PLAIN | ALL, {"num_key_value_heads": H, "H_cycles": 1, "L_cycles": 1}),
    "nanochat": ("sdpa", {}, rope()),
    "hy_v3": ("sdpa", {}, MOE | rope()),
    "jais2": ("sdpa", EVERY, rope()),
    "solar_open": ("sdpa", PLAIN, MOE | rope()),
    "apertus": ("sdpa", {}, rope()),
    "deepseek_v3": ("mla", {"latent_size": 12}, LATENT | {"first_k_dense_replace": 9, "head_dim": 4}),
    "kimi_linear": (
        "kda+conv+gate_element/mla+nope", ALL | {"latent_size": 12}, MOE | types("state", "full") | KIMI | LATENT,
    ),
}  # fmt: skip
ONE_MORE = ("gemma3_text", "qwen3_next", "qwen3_5_text")  # whose norms multiply by 1 + weight
INTERLEAVED = ("glm4", "cohere", "cohere2_moe", "deepseek_v3")  # whose rotation turns neighbours, as ours


def turned(rows, channels, backwards=False):
    """Reorder the rotated rows of each head, (x0, x1, …, y0, y1, …) to (x0, y0, x1, y1, …).

    backwards: to (y0, x0, …), of a rotation by minus the angle.
    """
    first, still = rows[:, :channels], rows[:, channels:]
    if backwards:
        first = first.roll(channels // 2, 1)
    return torch.cat((first.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), still), 1).flatten(0, 1)


def rows_of(theirs, kind, D):
    """The weight or bias of queries, keys, values and a gate in q_proj, by heads: (n, D, …)."""
    fused = next((name for name in ("c_attn", "query_key_value", "Wqkv") if hasattr(theirs, name)), None)
    if fused is None:
        q, k, v = (getattr(getattr(theirs, f"{part}_proj"), kind).unflatten(0, (-1, D)) for part in "qkv")
        if type(theirs).__name__ in ("Qwen3NextAttention", "Qwen3_5Attention"):
            q, gate = q[0::2], q[1::2]
            return q, k, v, gate.flatten(0, 1)
        return q, k, v, None
    rows = getattr(getattr(theirs, fused), kind)
    rows = (rows.t() if fused == "c_attn" and kind == "weight" else rows).unflatten(0, (-1, D))
    if type(theirs).__name__ == "GPTNeoXAttention":
        return *rows.unflatten(0, (H, 3)).unbind(1), None
    return *rows.split((H, (len(rows) - H) // 2, (len(rows) - H) // 2)), None


def copy_heads(ours, theirs, name):
    D = ours.head_dim
    channels = 0 if ours.rope is None or name in INTERLEAVED else ours.rope.whole or ours.rope.channels
    for kind in ("weight", "bias") if ours.qkv_proj.bias is not None else ("weight",):
        q, k, v, gate = rows_of(theirs, kind, D)
        backwards = name == "nanochat"
        parts = (turned(q, channels, backwards), turned(k, channels, backwards), v.flatten(0, 1))
        getattr(ours.qkv_proj, kind).copy_(torch.cat(parts))
    norms = dict(ours.modifiers).get("joint_norm", ours)
    if hasattr(theirs, "qk_scale_factor"):  # a constant in place of weights
        norms.q_norm.weight.fill_(theirs.qk_scale_factor)
        norms.k_norm.weight.fill_(1.0)
    elif hasattr(norms.q_norm, "weight") and name != "nanochat":  # which has none, and where ours begin at 1
        for norm, other in ((norms.q_norm, theirs.q_norm), (norms.k_norm, theirs.k_norm)):
            weight = other.weight + (1 if name in ONE_MORE else 0)
            norm.weight.copy_(turned(weight.unflatten(0, (-1, D)), channels))
    if "sink" in ours.modifiers:
        ours.modifiers["sink"].bias.copy_(theirs.sinks)
    if "gate_biased" in ours.modifiers:
        ours.modifiers["gate_biased"].gate.weight.copy_(theirs.gate_proj.weight)
        ours.modifiers["gate_biased"].bias.copy_(theirs.gate_bias)
    for per_head in {"gate", "gate_softplus"} & {*ours.modifiers}:
        ours.modifiers[per_head].gate.weight.copy_(theirs.g_proj.weight)
    if "gate_element" in ours.modifiers:
        ours.modifiers["gate_element"].gate.weight.copy_(theirs.gate_proj.weight if gate is None else gate)


def copy_latent(ours, theirs, name):
    D, turned_, latent = ours.head_dim, ours.turned, ours.latent
    q = theirs.q_proj.weight.unflatten(0, (H, D + turned_))  # ours has the rotated channels in front
    ours.q_proj.weight.copy_(torch.cat((q[:, D:], q[:, :D]), 1).flatten(0, 1))
    ours.c_proj.weight.copy_(theirs.kv_a_proj_with_mqa.weight[:latent])
    ours.k_proj.weight.copy_(theirs.kv_a_proj_with_mqa.weight[latent:])
    ours.c_norm.weight.copy_(theirs.kv_a_layernorm.weight)
    k, v = theirs.kv_b_proj.weight.unflatten(0, (H, 2, D)).unbind(1)
    ours.k_up.weight.copy_(k.flatten(0, 1))
    ours.v_up.weight.copy_(v.flatten(0, 1))


def copy_state(ours, theirs, name):
    if name == "qwen3_5_text":
        qkv, gate = [theirs.in_proj_qkv.weight], theirs.in_proj_z.weight
        beta, fade = theirs.in_proj_b.weight, theirs.in_proj_a.weight
        ours.modifiers["gate_silu"].gate_proj.weight.copy_(gate)
        bias, rate, norm = theirs.dt_bias, theirs.A_log, theirs.norm
    elif name == "olmo_hybrid":
        qkv = [getattr(theirs, f"{part}_proj").weight for part in "qkv"]
        beta, fade = theirs.b_proj.weight, theirs.a_proj.weight
        ours.modifiers["gate_silu"].gate_proj.weight.copy_(theirs.g_proj.weight)
        bias, rate, norm = theirs.dt_bias, theirs.A_log, theirs.o_norm
        ours.out_norm.eps = norm.variance_epsilon  # 1e-5
    elif name == "qwen3_next":
        parts = theirs.in_proj_qkvz.weight.unflatten(0, (H, 4, D)).unbind(1)  # theirs has head after head
        *qkv, gate = (part.flatten(0, 1) for part in parts)
        beta, fade = theirs.in_proj_ba.weight.unflatten(0, (H, 2)).unbind(1)
        ours.modifiers["gate_silu"].gate_proj.weight.copy_(gate)
        bias, rate, norm = theirs.dt_bias, theirs.A_log, theirs.norm
    else:  # theirs are narrow matrices, two for one of ours
        qkv, forget = [getattr(theirs, f"{part}_proj").weight for part in "qkv"], theirs.forget_gate
        beta, fade = theirs.b_proj.weight, forget.f_b_proj.weight @ forget.f_a_proj.weight
        bias, rate, norm = forget.dt_bias, forget.A_log.flatten(), theirs.o_norm
        ours.modifiers["gate_element"].gate.weight.copy_(theirs.g_b_proj.weight @ theirs.g_a_proj.weight)
    ours.qkv_proj.weight.copy_(torch.cat(qkv))
    ours.modifiers["conv"].weight.copy_(theirs.conv1d.weight[:, 0])
    ours.beta.weight.copy_(beta)
    ours.fade.weight.copy_(fade)
    ours.fade.bias.copy_(bias)
    ours.log_rate.copy_(rate)
    ours.out_norm.weight.copy_(norm.weight)


def in_pieces(attention, x):
    """What a layer gives with a cache, in chunks and single tokens."""
    cache, pieces = KVCache(x.shape[1]), []
    for piece in x.split((40, T - 44, 1, 1, 1, 1), 1):
        pieces.append(attention(piece, AttentionContext(cache=cache)))
        cache.position += piece.size(1)
    return torch.cat(pieces, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(FAMILIES, 12))
@torch.no_grad()
def test_the_attention_of_a_family_is_ours_in_one_pass_and_cached(name, monkeypatch):
    string, settings, given = FAMILIES[name]
    if name == "beam":  # its full layers also scale queries by their positions
        modeling = importlib.import_module("transformers.models.beam.modeling_beam")
        monkeypatch.setattr(modeling, "compute_attention_scaling", lambda positions: None)
    n_layer = string.count("/") + 1
    given = given if "vocab_size" in given else SHAPE | {"num_hidden_layers": n_layer} | given
    config = transformers.AutoConfig.for_model(name, **given)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModel.from_config(config, **eager).eval().double()
    for key, parameter in model.named_parameters():
        parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
        if key.endswith("A_log"):
            parameter.sub_(4)  # what fades at once leaves results so small that their float32 shows
    layers = [m for m in model.modules() if type(m).__name__.endswith(("Attention", "DeltaNet"))]
    seen = []

    def keep(module, arguments, named, output):
        x = arguments[0] if arguments else named["hidden_states"]
        seen.append((module, x, output[0] if isinstance(output, tuple) else output))

    for module in layers[:n_layer]:
        module.register_forward_hook(keep, with_kwargs=True)
    model(torch.randint(1, 61, (2, T)))
    assert len(seen) == n_layer
    window = WINDOW if "window" in string else None
    shape = dict(n_embd=C, n_head=H, n_kv_head=HKV, head_size=D, vocab_size=61, attention_window=window)
    ours = GPTConfig(attention=string, **shape | settings)
    for number, (theirs, x, expected) in enumerate(seen):
        made = make_attention(ours.at(number), number).eval().double()
        copy = copy_latent if "mla" in ours.at(number).form else copy_heads if made.has_kv_cache else copy_state
        copy(made, theirs, name)
        out = next(getattr(theirs, o) for o in ("o_proj", "out_proj", "c_proj", "dense") if hasattr(theirs, o))
        weight = out.weight.T if name == "gpt2" else out.weight
        factors = {"gate": 0.5, "gate_element": 0.5, "gate_biased": 0.5, "gate_softplus": math.log(2)}  # at 0 ours is 1
        made.o_proj.weight.copy_(weight * math.prod(factors.get(name, 1) for name in made.modifiers))
        if made.o_proj.bias is not None:
            made.o_proj.bias.copy_(out.bias)
        for got in (made(x), in_pieces(made, x)):
            close(got, expected, rtol=1e-5, atol=1e-5)


def test_each_kind_of_layer_that_transformers_knows_is_in_the_pages_table():
    kinds = pytest.importorskip("transformers.configuration_utils").ALLOWED_ATTN_LAYER_TYPES
    page = (Path(__file__).parent.parent / "docs/attention_field.md").read_text(encoding="utf-8")
    table = page.split("## Which kind of layer is which string")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    named = {name: ours for theirs, ours in rows for name in re.findall(r"`(\w+)`", theirs)}
    assert {*kinds} == {*named}
    for ours in named.values():  # what is said to be here is
        if not ours.startswith("no"):
            check_names("/".join(re.findall(r"`([\w+]+)`", ours.split(";")[0])))

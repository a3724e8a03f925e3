"""To Hugging Face and back, from Python and by commands: equal bits, logits and texts."""

import errno
import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import PRESETS, close, preset_settings, random_gpt, some
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cli.export import changed_settings
from common.errors import HuggingFaceError, SettingsError
from common.files import writing
from data.config import DataConfig, TokenizerConfig
from data.tokenizer import make_tokenizer
from export import ExportConfig, export
from interop.huggingface import LACKING, find_folder, from_huggingface, read_config, to_huggingface
from interop.tokenizer import read_tokenizer_json
from model.cache import KVCache
from runs.checkpoint import Meta, Progress, load_checkpoint, save_checkpoint
from training.config import TrainConfig

GPT2 = {"position": "learned", "norm": "layernorm", "norm_eps": 1e-5, "mlp": "gelu_tanh"}
GPT2 |= {"bias": True, "qkv_bias": True, "qk_norm": False}
LLAMA = {"qk_norm": False, "norm_eps": 1e-5}
SHAPES = {
    "gpt2": GPT2,
    "gpt2-exact-gelu": GPT2 | {"mlp": "gelu"},
    "gpt2-tied": GPT2 | {"tie_embeddings": True, "n_inner": 48},
    "llama": LLAMA,
    "llama-grouped-tied": LLAMA | {"n_kv_head": 2, "tie_embeddings": True},
    "llama-stretched": LLAMA | {"rope_scaling": "linear", "rope_scaling_factor": 2.0, "rope_theta": 5e5},
    "llama-3.1": LLAMA | dict(rope_scaling="llama3", rope_scaling_factor=8.0, rope_trained_length=12, rope_theta=20.0),
    "llama-yarn": LLAMA | {"rope_scaling": "yarn", "rope_scaling_factor": 4.0},
    "llama-narrow-heads": LLAMA | {"head_size": 4},
    "mistral-three-heads": LLAMA | {"n_head": 3, "head_size": 8},
    "mistral": LLAMA | {"attention_window": 4, "n_kv_head": 2},
    "qwen2": LLAMA | {"qkv_bias": True, "n_kv_head": 2, "tie_embeddings": True},
    "qwen2-windows": LLAMA | {"qkv_bias": True, "attention": "sdpa/sdpa+window", "attention_window": 4},
    "smollm3": LLAMA | {"attention": "sdpa/sdpa+nope", "n_kv_head": 2, "n_layer": 3},
    "smollm3-windows": LLAMA | {"attention": "sdpa/sdpa+window+nope/sdpa+window", "attention_window": 4, "n_layer": 4},
    "smollm3-llamas-windows": LLAMA | {"attention": "sdpa+window/sdpa", "attention_window": 4, "head_size": 6},
    "smollm3-yarn": LLAMA | {"attention": "sdpa+nope/sdpa", "rope_scaling": "yarn", "rope_scaling_factor": 4.0},
    "smollm3-no-positions": LLAMA | {"attention": "sdpa+nope"},
    "arcee": LLAMA | {"mlp": "relu2", "n_kv_head": 2},
    "qwen3": {},
    "qwen3-wide-heads": {"head_size": 16, "n_kv_head": 2},
    "qwen3-three-heads": {"n_head": 3, "head_size": 16},
    "qwen3-multi-query": {"n_kv_head": 1, "n_inner": 40},
    "qwen3-single-head": {"attention": "single_head"},
    "qwen3-windows": {"attention": "sdpa+window/sdpa", "attention_window": 4, "n_layer": 5},
    "qwen3-late-windows": {"attention": "stacked" + "/sdpa+window" * 3, "attention_window": 4, "n_layer": 4},
    "qwen3-all-windows": {"attention_window": 4},
}


@pytest.mark.parametrize("shape", some(SHAPES, 10))
@torch.inference_mode()
def test_their_model_gives_our_logits_and_back_come_the_same_bits(shape, tmp_path):
    model = random_gpt(**SHAPES[shape])
    to_huggingface(model, str(tmp_path), end_of_text=60)
    back = from_huggingface(str(tmp_path))
    state, tokens = back.state_dict(), torch.randint(61, (3, 16))
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert (back.config.tie_embeddings, back.config.block_size) == (model.config.tie_embeddings, 16)
    close(back(tokens), model(tokens), rtol=1e-5)
    theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    close(theirs(tokens).logits, model(tokens), atol=1e-4, rtol=0)
    assert theirs.config.eos_token_id == 60


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen3", "Qwen2", "Mistral", "SmolLM3", "Arcee"])
@torch.no_grad()
def test_what_transformers_saves_gives_our_gpt_its_logits(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    if kind == "GPT2":
        config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=61)
    else:
        shape = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, head_dim=16)
        shape |= dict(intermediate_size=48, max_position_embeddings=16, vocab_size=61)
        if kind in ("Qwen2", "Mistral"):
            shape |= dict(sliding_window=5, use_sliding_window=True, max_window_layers=1)
        if kind == "SmolLM3":  # the second layer has no positions, and so a window
            shape |= dict(sliding_window=5, use_sliding_window=True, no_rope_layer_interval=2, pad_token_id=None)
        config = getattr(transformers, f"{kind}Config")(**shape)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in theirs.named_parameters():
        if name.endswith("bias"):  # which begin at 0
            torch.nn.init.normal_(weight)
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    if kind == "GPT2":  # whose embeddings are tied where nothing is said
        saved.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(saved))
    tokens, model, cache = torch.randint(61, (2, 16)), from_huggingface(str(tmp_path)), KVCache(16)
    expected = theirs(tokens).logits
    close(model(tokens), expected, atol=1e-5, rtol=1e-5)
    close(torch.cat([model(piece, cache=cache) for piece in tokens.split((9, 1, 1, 5), 1)], 1), expected)


def test_layers_of_a_smollm3_are_as_its_config_says(tmp_path):
    to_huggingface(random_gpt(**LLAMA, attention="sdpa/sdpa+nope", n_layer=4), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    full, sliding, on = "full_attention", "sliding_attention", {"use_sliding_window": True, "sliding_window": 4}
    for change, attention in (
        ({}, "sdpa/sdpa+nope/sdpa/sdpa+nope"),
        ({"no_rope_layers": None}, "sdpa/sdpa/sdpa/sdpa+nope"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 3}, "sdpa/sdpa/sdpa+nope/sdpa"),
        ({"no_rope_layers": [1, 1, 1, 1, 0]}, "sdpa"),
        ({"no_rope_layers": [1, 0, 0, 1], "no_rope_layer_interval": None}, "sdpa/sdpa+nope/sdpa+nope/sdpa"),
        ({"no_rope_layers": [0] * 4}, "sdpa+nope/sdpa+nope/sdpa+nope/sdpa+nope"),
        (on | {"layer_types": None}, "sdpa/sdpa+window+nope/sdpa/sdpa+window+nope"),
        (on | {"layer_types": [sliding, full] * 2}, "sdpa+window/sdpa+nope/sdpa+window/sdpa+nope"),
        ({"layer_types": [sliding] * 4}, "sdpa/sdpa+nope/sdpa/sdpa+nope"),
        ({"num_hidden_layers": 4.0}, "sdpa/sdpa+nope/sdpa/sdpa+nope"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert read_config(str(tmp_path)).attention == attention
    for wrong in ([1, 0], ["1", "0", "1", "0"]):
        (tmp_path / "config.json").write_text(json.dumps(config | {"no_rope_layers": wrong}))
        with pytest.raises(HuggingFaceError, match="no_rope_layers=.* for 4 layers: choose a model with 0 or 1 for"):
            read_config(str(tmp_path))


def test_a_family_is_refused_with_what_it_has_and_a_gpt_has_not(tmp_path):
    """The page has the same sentence of each."""
    to_huggingface(random_gpt(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    page = (Path(__file__).parent.parent / "docs/interop.md").read_text(encoding="utf-8")
    for model_type, lacking in LACKING.items():
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
        sentence = (
            f"is a {model_type}, and a GPT here has no {lacking}: choose a model of arcee, gpt2, llama, mistral, "
        )
        with pytest.raises(HuggingFaceError, match=re.escape(sentence)):
            read_config(str(tmp_path))
        assert f"`{model_type}`" in page, model_type


def test_windows_of_a_qwen3_are_where_its_layer_types_say(tmp_path):
    to_huggingface(random_gpt(n_layer=3), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    full, sliding, on = "full_attention", "sliding_attention", {"use_sliding_window": True, "sliding_window": 4}
    for change, windows in (
        (on | {"layer_types": [sliding, full, sliding]}, [4, None, 4]),
        (on | {"layer_types": [full] * 3}, [None] * 3),
        (on | {"sliding_window": None}, [None] * 3),
        (on | {"use_sliding_window": False, "layer_types": [sliding] * 3}, [None] * 3),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert [attention.window for attention in from_huggingface(str(tmp_path)).attentions] == windows


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_exported(preset, tmp_path):
    small = {"n_layer": 1, "n_head": 4, "n_embd": 32, "n_inner": None, "block_size": 8}
    expected = {"gpt2": "GPT2LMHeadModel", "llam": "LlamaForCausalLM"}.get(preset[:4], "Qwen3ForCausalLM")
    assert to_huggingface(random_gpt(**preset_settings(preset) | small), tmp_path) == expected


def test_a_setting_that_no_class_has_beside_the_others_is_told_with_each_class_that_is_as_near(tmp_path):
    with pytest.raises(
        HuggingFaceError, match=r"Qwen3ForCausalLM has no qkv_bias=true; Qwen2ForCausalLM has no qk_norm=t"
    ):
        to_huggingface(random_gpt(qkv_bias=True), tmp_path / "out")
    to_huggingface(random_gpt(qkv_bias=True, qk_norm=False), tmp_path / "out")  # either remedy


@pytest.mark.parametrize(
    ("settings", "obstacle", "preset"),
    [
        ({"position": "alibi"}, "position=alibi", "tiny"),
        ({"mlp": "relu2"}, "mlp=relu2", "tiny"),
        *(({"attention": name}, f"attention={name}", "tiny") for name in ("average", "softmax1", "sdpa+nope/sdpa")),
        (LLAMA | {"attention_window": 4, "bias": True}, "bias=true", "llama"),
        (LLAMA | {"attention_window": 1}, "attention_window=1", "llama"),
        (LLAMA | {"attention": "sdpa+gate/sdpa+nope"}, "attention=sdpa+gate/sdpa+nope", "llama"),
        (LLAMA | {"mlp": "relu2", "n_head": 3, "head_size": 8}, "mlp=relu2", "llama"),
        ({"logit_softcap": 30.0}, "logit_softcap=30", "tiny"),
        ({"norm_eps": 1e-5}, "norm_eps=1e-05", "tiny"),
        (LLAMA | {"qkv_bias": True, "bias": True}, "bias=true", "llama"),
        (LLAMA | {"rope_scaling": "llama3", "rope_scaling_factor": 3.0}, "rope_trained_length=5.33", "llama"),
        (GPT2 | {"norm": "rmsnorm"}, "norm=rmsnorm", "gpt2"),
        (GPT2 | {"n_kv_head": 2}, "n_kv_head=2", "gpt2"),
        (GPT2 | {"head_size": 16}, "head_size=16", "gpt2"),
        (LLAMA | {"attention": "single_head/sdpa"}, "attention=single_head/sdpa", "llama"),  # F5
        ({"attention": "sdpa/single_head"}, "attention=sdpa/single_head", "tiny"),  # F5
    ],
    ids=str,
)
def test_what_they_cannot_express_names_the_setting_and_a_preset_that_can(settings, obstacle, preset, tmp_path):
    with pytest.raises(HuggingFaceError) as refused:
        to_huggingface(random_gpt(**settings), tmp_path / "out")
    assert f" no {obstacle}" in str(refused.value)
    assert f"as with model={preset} alone" in str(refused.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("bias", "qkv_bias"), [(False, False), (True, False), (False, True)])
def test_a_gpt_2_without_biases_has_zeros_in_their_place_there(bias, qkv_bias, tmp_path):
    """As nanoGPT trains them; in half precision too."""
    gpt, tokens = random_gpt(**GPT2 | {"bias": bias, "qkv_bias": qkv_bias}), torch.randint(61, (2, 12))
    to_huggingface(gpt, tmp_path)
    close(from_huggingface(str(tmp_path))(tokens), gpt(tokens))
    theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    close(theirs(tokens).logits, gpt(tokens))
    to_huggingface(gpt, tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_weights_in_several_files_and_in_half_precision_are_read(tmp_path):
    model = random_gpt()
    to_huggingface(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts = {"a.safetensors": list(weights)[::2], "b.safetensors": list(weights)[1::2]}
    for file, names in parts.items():
        save_file({name: weights[name].bfloat16() for name in names}, tmp_path / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    back = from_huggingface(str(tmp_path)).state_dict()
    assert all(torch.equal(back[name], tensor.bfloat16().float()) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function=relu: choose a model with"),
        ({"model_type": "mamba"}, "is a mamba: choose a model of arcee, gpt2, llama, mistral, qwen2, qwen3, smollm3."),
        ({"auto_map": {"AutoModelForCausalLM": "mine.Mine"}}, "own .mine.Mine., .*: choose a Qwen3ForCausalLM"),
        ({"auto_map": {"AutoModel": "mine.Body"}}, "code of its own .mine.Body., which is not run"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05: choose a model with rms_norm_eps=1e-06"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type=dynamic is not known"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "yarn with {'truncate': False}"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 2.0}}, "llama3 with {'low_freq"),
        ({"head_dim": 16}, "has model.layers.0.self_attn.q_proj.weight of 32 × 32 numbers, where its config.json"),
        ({"vocab_size": 62}, "of 61 × 32 numbers, .* asks for 62 × 32: put the config.json of these weights beside"),
        ({"vocab_size": 60}, "has model.embed_tokens.weight of 61 × 32 numbers, .* asks for 60 × 32"),
        ({"intermediate_size": 160}, "gate_proj.weight of .* × 32 numbers, where its config.json asks for 160 × 32"),
        ({"num_hidden_layers": 3}, "has 2 layers, and its config.json 3: set num_hidden_layers .* to 2 there"),
        ({"num_hidden_layers": 1}, "has 2 layers, and its config.json 1: set num_hidden_layers .* to 2 there"),
        ({"num_hidden_layers": 10**9}, "has 2 layers, and its config.json 1,000,000,000"),
        ({"num_hidden_layers": 10**9, "use_sliding_window": True}, "has 2 layers, and its config.json 1,000,000,000"),
        ({"num_hidden_layers": None}, "cannot be read .n_layer=null is not a whole number"),
        ({"num_hidden_layers": 2.5, "use_sliding_window": True}, "cannot be read .n_layer=2.5 is not a whole number"),
        (
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 2},
            "layer_types=.*for 2 layers: choose a",
        ),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 3}, "layer_types=.*for 2 layers: choose a"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type=yarn has no factor"),
        ({"hidden_size": None}, "cannot be read .n_embd=null is not a whole number"),
        ({"max_position_embeddings": 1.5}, "cannot be read .block_size=1.5 is not a whole number"),
        ({"max_position_embeddings": None}, "cannot be read .block_size=null is not a whole number"),
        ({"rms_norm_eps": 1e-6, "num_attention_heads": 0}, "cannot be read .model.n_head=0 must be at least 1"),
    ],
    ids=str,
)
def test_a_model_that_ours_cannot_express_or_that_is_damaged_is_refused_in_a_sentence(change, message, tmp_path):
    to_huggingface(random_gpt(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(HuggingFaceError, match=message) as refused:
        from_huggingface(str(tmp_path))
    assert "\n" not in str(refused.value) and refused.value.remedy


def test_a_file_without_layers_is_refused_at_once_whatever_its_config_json_says(tmp_path):
    to_huggingface(random_gpt(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    outside = {name: each for name, each in load_file(tmp_path / "model.safetensors").items() if "layers" not in name}
    save_file(outside, tmp_path / "model.safetensors")
    with pytest.raises(HuggingFaceError, match="it has 3 weights for the 1,000,000,000 layers of its config.json"):
        from_huggingface(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ({}, {"hidden_act": "swish"}),
        (GPT2, {"activation_function": "gelu_pytorch_tanh"}),
        (SHAPES["llama-yarn"], {"beta_fast": 32.0, "beta_slow": 1, "truncate": True}),
    ],
    ids=str,
)
def test_other_spellings_of_the_same_model_come_in(settings, other, tmp_path):
    to_huggingface(random_gpt(**settings), tmp_path)
    before, config = read_config(str(tmp_path)), json.loads((tmp_path / "config.json").read_text())
    (config["rope_scaling"] if "beta_fast" in other else config).update(other)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(str(tmp_path)) == before


def test_dropouts_go_over_and_come_back(tmp_path):
    """As transformers computes them: GPT-2 has both, 0.1 if its config.json names none, the others one."""
    for settings, kept in ((GPT2, (0.2, 0.3)), (LLAMA, (0.0, 0.3)), ({}, (0.0, 0.3))):
        to_huggingface(random_gpt(**settings, dropout=0.2, attention_dropout=0.3), tmp_path)
        back = read_config(str(tmp_path))
        assert (back.dropout, back.attention_dropout) == kept
        file = tmp_path / "config.json"
        named = {name: value for name, value in json.loads(file.read_text()).items() if "drop" in name}
        wanted = {"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.2}
        assert named == (wanted if settings is GPT2 else {"attention_dropout": 0.3})
        file.write_text(json.dumps({n: v for n, v in json.loads(file.read_text()).items() if n not in named}))
        bare = read_config(str(tmp_path))
        assert (bare.dropout, bare.attention_dropout) == ((0.1, 0.1) if settings is GPT2 else (0.0, 0.0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.inference_mode()
def test_a_folder_in_half_precision_has_the_rounded_weights_and_says_so(dtype, tmp_path):
    model, kind = random_gpt(tie_embeddings=True), getattr(torch, dtype)
    to_huggingface(model, tmp_path, 60, kind)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {kind}
    back, tokens = from_huggingface(str(tmp_path)), torch.randint(61, (2, 9))
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.to(kind).float()) and tensor.dtype == torch.float32
    theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.dtype == kind
    close(theirs.float()(tokens).logits, back(tokens), atol=1e-4, rtol=0)


def test_a_weight_beyond_float16_is_refused_before_anything_is_written(tmp_path):
    model = random_gpt()
    model.lm_head.weight.data[3, 5] = 70_000.0
    with pytest.raises(SettingsError, match="ends at 65,504, and lm_head.weight has larger .*: set dtype=bfloat16"):
        to_huggingface(model, tmp_path / "half", dtype=torch.float16)
    assert not (tmp_path / "half").exists()
    model.lm_head.weight.data[3, 5] = 3.4e38
    with pytest.raises(SettingsError, match=r"dtype=bfloat16 ends at 3.38953e\+38, .*: set dtype=float32"):
        to_huggingface(model, tmp_path / "half", dtype=torch.bfloat16)
    model.lm_head.weight.data[3, 5] = 70_000.0
    to_huggingface(model, tmp_path / "brain", dtype=torch.bfloat16)


def test_rope_scaling_that_was_added_by_hand_goes_before_rope_parameters(tmp_path):
    """As in transformers, also where neither has the base; each against RoPE's own angles."""
    to_huggingface(random_gpt(**LLAMA), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    given = {"rope_type": "default", "rope_theta": 500.0}
    linear = {"rope_type": "linear", "factor": 2.0}
    for change, base, factor in (
        ({"rope_parameters": given, "rope_scaling": linear, "rope_theta": 300.0}, 300.0, 2.0),
        ({"rope_parameters": given, "rope_scaling": linear | {"rope_theta": 200.0}, "rope_theta": 300.0}, 200.0, 2.0),
        ({"rope_parameters": given, "rope_scaling": None, "rope_theta": 300.0}, 500.0, 1.0),
        ({"rope_parameters": linear | {"rope_theta": 500.0}, "rope_scaling": {}}, 500.0, 2.0),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        [rope] = from_huggingface(str(tmp_path)).ropes
        wanted = base ** (-torch.arange(0, 8, 2) / 8) / factor
        close(rope.frequencies()[0], wanted)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
@pytest.mark.parametrize("odd", ["fifo", "/dev/zero"])
def test_a_pipe_or_device_in_the_place_of_a_file_is_refused(name, odd, tmp_path):
    to_huggingface(random_gpt(), tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if name.endswith("index.json"):  # which is read in the place of one file
        (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    os.mkfifo(tmp_path / name) if odd == "fifo" else (tmp_path / name).symlink_to(odd)
    with pytest.raises(HuggingFaceError, match="cannot be read .*not a regular file"):
        from_huggingface(str(tmp_path))
        read_tokenizer_json(tmp_path)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
@pytest.mark.parametrize("ties", [False, True])
def test_a_folder_that_a_compiled_or_distributed_model_wrote_is_read(ties, prefix, tmp_path):
    """transformers reads none of these names; a tied folder with a head of other numbers has that head, as there."""
    model, tokens = random_gpt(tie_embeddings=ties), torch.randint(61, (2, 6))
    to_huggingface(model, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {prefix + name: weight.clone() for name, weight in load_file(file).items()}
    save_file(weights, file)
    assert torch.equal(from_huggingface(str(tmp_path))(tokens), model(tokens))
    if ties:
        embedding = weights[f"{prefix}model.embed_tokens.weight"]
        save_file(weights | {f"{prefix}lm_head.weight": 2 * embedding}, file)
        torch.testing.assert_close(from_huggingface(str(tmp_path))(tokens), 2 * model(tokens))


def test_an_adapter_is_told_to_be_merged_alone_and_beside_the_files_of_its_model(tmp_path):
    """transformers adds it to weights that are there, and a model without it is another."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    alone = r"is an adapter, such as LoRA's, not a model: merge it into its model"
    with pytest.raises(HuggingFaceError, match=alone):
        from_huggingface(str(tmp_path))
    to_huggingface(random_gpt(), tmp_path)
    with pytest.raises(HuggingFaceError, match=r"has an adapter, .* beside its weights: .* move adapter_config"):
        from_huggingface(str(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(HuggingFaceError, match=alone):
        from_huggingface(str(tmp_path))
    (tmp_path / "elsewhere").rename(tmp_path / "model.safetensors")
    (tmp_path / "adapter_config.json").unlink()
    from_huggingface(str(tmp_path))


def test_the_hub_is_asked_once_for_a_model_and_what_it_does_not_have_is_refused_in_a_sentence(tmp_path, monkeypatch):
    to_huggingface(random_gpt(), tmp_path)
    asked: list[str] = []
    hub = SimpleNamespace(snapshot_download=lambda name, **_: asked.append(name) or str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    from_huggingface("some/model")
    assert find_folder("some/model") == tmp_path and asked == ["some/model"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HuggingFaceError, match="~nobody-here/a is not a local folder"):
        find_folder("~nobody-here/a")
    with pytest.raises(HuggingFaceError, match=r"not a local folder.*: pip install huggingface_hub, or give a folder"):
        from_huggingface("no/such-model")
    hub.snapshot_download = mock.Mock(side_effect=OSError("no route to host"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(HuggingFaceError, match=r"\(no route .*\): check the name and the network, or give a folder\.$"):
        find_folder("no/such-model")


def test_what_is_no_folder_of_theirs_is_answered_with_the_folder_or_the_way_of_a_run(tmp_path):
    to_huggingface(random_gpt(), tmp_path / "theirs")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    file = tmp_path / "theirs" / "model.safetensors"
    for where, remedy in (
        (file, f"is a file: give its folder, {tmp_path / 'theirs'}"),
        (tmp_path / "run", f"a run or checkpoint of tinygpt is given as it is, by checkpoint={tmp_path / 'run'} or"),
    ):
        with pytest.raises(HuggingFaceError, match=re.escape(remedy)):
            read_config(str(where))
    assert ExportConfig(import_from="hf:gpt2", to="ours").import_from == "gpt2"  # as init_from has it


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left on device") as refused:
        to_huggingface(random_gpt(), tmp_path)
    assert refused.value.errno == errno.ENOSPC
    named = "to=.*out cannot be written .No space left on device.: name another place.$"
    with pytest.raises(SettingsError, match=named), writing("to", str(tmp_path / "out")) as unfinished:
        to_huggingface(random_gpt(), unfinished)


# python export.py


def save(directory: Path, bad: float = 0.0, **settings) -> Path:
    model, tokenizer = random_gpt(vocab_size=257, **settings), make_tokenizer(TokenizerConfig(name="byte"), [])
    model.lm_head.weight.data[3, 3] += bad
    save_checkpoint(directory, model=model, tokenizer=tokenizer, config=TrainConfig(model=model.config))
    return directory


def test_an_exported_checkpoint_comes_back_as_the_same_one(tmp_path, capsys):
    original = load_checkpoint(save(tmp_path / "step_1"))
    export(ExportConfig(checkpoint=str(tmp_path / "step_1"), to=str(tmp_path / "theirs")))
    assert "a Qwen3ForCausalLM" in capsys.readouterr().out
    names = {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in (tmp_path / "theirs").iterdir()} == names
    export(ExportConfig(import_from=str(tmp_path / "theirs"), to=str(tmp_path / "ours")))
    back = load_checkpoint(tmp_path / "ours")
    assert all(torch.equal(t, back.model.state_dict()[name]) for name, t in original.model.state_dict().items())
    assert back.tokenizer._mergeable_ranks == original.tokenizer._mergeable_ranks
    assert back.tokenizer.eot_token == original.tokenizer.eot_token


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
@torch.inference_mode()
def test_auto_classes_load_it_and_write_what_we_write_alone_and_in_a_padded_batch(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    checkpoint = load_checkpoint(save(tmp_path / "step_1", block_size=64, **SHAPES[kind]))
    export(ExportConfig(checkpoint=str(tmp_path / "step_1"), to=str(tmp_path / "theirs")))
    write = transformers.pipeline("text-generation", model=str(tmp_path / "theirs"), device="cpu")
    assert write.model.config.model_type == kind and write.model.config.pad_token_id is None
    texts, settings = ["a", "the cat sat on", "x" * 30], dict(max_new_tokens=12, do_sample=False)
    assert write(texts, batch_size=3, **settings) == [write(text, **settings) for text in texts]
    ids = write.tokenizer("naïve 😀", return_tensors="pt")["input_ids"]
    text, end = ids[0].tolist(), checkpoint.tokenizer.eot_token
    assert text == [end, *checkpoint.tokenizer.encode_ordinary("naïve 😀")]  # as sample.py
    assert write.tokenizer.decode(text, skip_special_tokens=True) == "naïve 😀" and write.tokenizer.eos_token_id == end
    assert write.tokenizer("a", "b")["input_ids"] == [end, 97, end, 98]
    written = write.model.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist()
    while len(text) < len(written):
        text.append(int(checkpoint.model(torch.tensor([text]))[0, -1].argmax()))
    assert written == text


REFUSED = [
    ({"checkpoint": "{tmp}/no", "to": "{tmp}/out"}, "does not exist"),
    ({"checkpoint": "{tmp}/step_1", "to": "{tmp}/step_1"}, "is there already"),
    ({"checkpoint": "{tmp}/step_1"}, "to= is needed"),
    ({"checkpoint": "{tmp}/step_1", "import_from": "x", "to": "{tmp}/out"}, "both given"),
    ({"checkpoint": "{tmp}/alibi", "to": "{tmp}/out"}, "position=alibi"),
    ({"checkpoint": "{tmp}/nan", "to": "{tmp}/out"}, "is not finite"),
    ({"import_from": "{tmp}/infinite", "to": "{tmp}/out"}, "its lm_head.weight is not finite"),
    ({"checkpoint": "{tmp}/step_1", "to": "/proc/no/out"}, "cannot be written"),
    ({"checkpoint": "{tmp}/step_1", "to": "{tmp}/a/b"}, "No such file or directory.: name another place"),
    ({"import_from": "{tmp}/step_1", "to": "{tmp}/out"}, "config.json"),
    ({"import_from": "{tmp}/half", "to": "{tmp}/out"}, "cannot be read"),
    ({"import_from": "{tmp}/untokenized", "to": "{tmp}/out"}, "tokenizer.json"),
]


@pytest.fixture(scope="module")
def unusable(tmp_path_factory) -> Path:
    """A folder with a checkpoint that can be exported, and others that cannot."""
    tmp_path = tmp_path_factory.mktemp("unusable")
    save(tmp_path / "step_1")
    save(tmp_path / "alibi", position="alibi")
    with mock.patch.object(
        torch.Tensor, "isfinite", lambda tensor: torch.ones_like(tensor)
    ):  # an earlier version wrote such weights
        save(tmp_path / "nan", bad=torch.nan)
    to_huggingface(load_checkpoint(tmp_path / "step_1").model, tmp_path / "infinite")
    damaged = load_file(tmp_path / "infinite" / "model.safetensors")
    save_file(damaged | {"lm_head.weight": damaged["lm_head.weight"] / 0}, tmp_path / "infinite" / "model.safetensors")
    for name in ("half", "untokenized"):
        export(ExportConfig(checkpoint=str(tmp_path / "step_1"), to=str(tmp_path / name)))
    weights = tmp_path / "half" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    (tmp_path / "untokenized" / "tokenizer.json").unlink()
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[str(wrong)[1:-1] for wrong, _ in REFUSED])
def test_what_cannot_be_exported_is_refused_in_a_sentence_and_leaves_nothing(wrong, message, unusable):
    before = sorted(unusable.iterdir())
    with pytest.raises(SettingsError, match=message) as refused:
        export(ExportConfig(**{key: value.replace("{tmp}", str(unusable)) for key, value in wrong.items()}))
    assert "\n" not in str(refused.value) and sorted(unusable.iterdir()) == before


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"init_from": "/home/me/runs/first"}, "init_from=first"),
        ({"init_from": "outputs/first/"}, "init_from=first"),
        ({"init_from": "~/first/checkpoints/step_9"}, "init_from=step_9"),
        ({"init_from": "hf:/home/me/gpt"}, "init_from=hf:gpt"),
        ({"init_from": "hf:here/gpt"}, "init_from=hf:gpt"),
        ({"init_from": "hf:openai-community/gpt2"}, "init_from=hf:openai-community/gpt2"),
        ({"data": {"source": "hf", "name": "/home/me/letters"}}, "data.name=letters"),
        ({"data": {"source": "hf", "name": "here/gpt"}}, "data.name=gpt"),
        ({"data": {"source": "hf", "name": "allenai/c4"}}, "data.name=allenai/c4"),
    ],
)
def test_a_card_has_no_folder_of_the_machine(tmp_path, monkeypatch, settings, shown):
    """It had that of init_from, which a hub would show."""
    (tmp_path / "here/gpt").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    found = [*changed_settings(SimpleNamespace(meta=Meta(settings)))]
    assert shown in found


@pytest.mark.slow
def test_the_card_of_a_folder_has_settings_figures_a_sample_and_code_that_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    folder = save(tmp_path / "step_1")
    figures = {"val_loss": 2.5, "val_bpb": 1.75, "val_bpb_stderr": 0.0625}
    config = TrainConfig(
        model=load_checkpoint(folder).model.config,
        max_steps=7,
        run_dir="/home/me",
        data=DataConfig(path="/home/me/my.txt"),
    )
    one = load_checkpoint(folder)
    progress = Progress(metrics=figures, step=6, earlier_settings="max_steps=3 until step 3")
    save_checkpoint(tmp_path / "told", model=one.model, tokenizer=one.tokenizer, config=config, progress=progress)
    monkeypatch.chdir(tmp_path)
    export(ExportConfig(checkpoint="told", to="mine"))
    card = (tmp_path / "mine/README.md").read_text()
    assert (
        card.startswith("---\nlibrary_name: transformers\n") and "\n# mine\n" in card and "Qwen3ForCausalLM of " in card
    )
    assert "held-out text: 1.7500 ± 0.0625 bits/byte, 2.5000 nats/token" in card and "/home/me" not in card
    assert "trained with tinygpt:" in card and "\nIts weights are those of step 6. The run was resumed, and had" in card
    assert "before: max_steps=3 until step 3. On held-out" in card
    (command,) = (line.strip() for line in card.splitlines() if line.startswith("    python train.py"))
    typed = dict(argument.split("=", 1) for argument in shlex.split(command)[2:])
    assert typed["max_steps"] == "7" and typed["data.source"] == "files" and typed["model.n_embd"] == "32"
    sample = card.split("## A sample\n\n")[1]
    assert len(sample) > 100 and all(line.startswith("    ") for line in sample.rstrip("\n").split("\n"))
    capsys.readouterr()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    exec(code.replace("max_new_tokens=200", "max_new_tokens=5"), {})
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_card_of_a_model_that_was_not_evaluated_or_cannot_write_says_so(tmp_path):
    save(tmp_path / "step_1")
    export(ExportConfig(checkpoint=str(tmp_path / "step_1"), to=str(tmp_path / "out")))
    card = (tmp_path / "out/README.md").read_text()
    assert "\nIt was not evaluated." in card and "no step of training by them:" in card and "trained with" not in card
    big = load_checkpoint(tmp_path / "step_1")
    big.model.blocks[0].mlp.down_proj.weight.data.fill_(1e38)
    save_checkpoint(
        tmp_path / "big", model=big.model, tokenizer=big.tokenizer, config=TrainConfig(model=big.model.config)
    )
    export(ExportConfig(checkpoint=str(tmp_path / "big"), to=str(tmp_path / "too")))
    assert "    There is none: its logits are not finite." in (tmp_path / "too/README.md").read_text()

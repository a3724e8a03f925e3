"""Folders of other people: weights that their settings do not name, quantised ones, files of other formats."""

import json

import pytest
import torch
from conftest import close, random_gpt
from safetensors.torch import load_file, save_file

from common.errors import HuggingFaceError
from interop.huggingface import from_huggingface, to_huggingface

LLAMA = {"qk_norm": False, "norm_eps": 1e-5}
GPT2 = {
    "position": "learned",
    "norm": "layernorm",
    "mlp": "gelu_tanh",
    "bias": True,
    "qkv_bias": True,
    "qk_norm": False,
}
Q = "model.layers.1.self_attn.q_proj"


def folder_of(folder, settings=LLAMA, **changes):
    """A folder with these weights added or replaced; returns the model too."""
    model = random_gpt(**settings)
    to_huggingface(model, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, change in changes.items():
        weights[name] = change(weights)
    save_file(weights, file, {"format": "pt"})
    return model


def as_int8(weights):
    weight = weights[f"{Q}.weight"]
    return (weight / weight.abs().amax(1, keepdim=True) * 127).round().to(torch.int8)


def ones(*shape):
    return lambda weights: torch.ones(shape)


PLAIN = "choose its version with plain float32"
FOREIGN = {
    "int8": ({f"{Q}.weight": as_int8}, f"has {Q}.weight quantised, as int8: {PLAIN}"),
    "float8": (
        {f"{Q}.weight": lambda weights: weights[f"{Q}.weight"].to(torch.float8_e4m3fn)},
        f"has {Q}.weight quantised, as float8_e4m3fn",
    ),
    "a scale": ({f"{Q}.weight_scale_inv": ones(1, 1)}, f"has {Q}.weight_scale_inv, for which its config.json has no"),
    "a bias": ({f"{Q}.bias": ones(32)}, f"has {Q}.bias, for which its config.json has no place: {PLAIN}"),
    "a bias of the head": ({"lm_head.bias": ones(61)}, "has lm_head.bias"),
    "a norm more": ({"model.layers.0.post_feedforward_layernorm.weight": ones(32)}, "post_feedforward_layernorm"),
    "an adapter": ({f"{Q}.lora_A.default.weight": ones(2, 32)}, f"has {Q}.lora_A.default.weight"),
    "a layer more": ({"model.layers.2.input_layernorm.weight": ones(32)}, "has 3 layers, and its config.json 2: set"),
    "a layer with a gap before it": (
        {"model.layers.3.input_layernorm.weight": ones(32)},
        "has model.layers.3.input_lay",
    ),
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_weights_that_would_be_part_of_the_logits_are_refused(foreign, tmp_path):
    changes, message = FOREIGN[foreign]
    folder_of(tmp_path, **changes)
    with pytest.raises(HuggingFaceError, match=message):
        from_huggingface(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "names", "told"),
    [
        (LLAMA, ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"], ""),
        (LLAMA, ["model.rotary_emb.inv_freq", "score.weight", "score.bias"], "score.bias, score.weight"),
        (LLAMA, [*"dcab", "model.embed_positions.weight"], "a, b, c and 2 others"),
        (GPT2, ["transformer.h.0.attn.bias", "v_head.summary.weight"], "v_head.summary.weight"),
        (GPT2, ["transformer.h.0.crossattention.c_attn.weight", "transformer.h.0.ln_cross_attn.bias"], ""),
    ],
)
def test_constants_and_weights_outside_of_the_layers_change_nothing(settings, names, told, tmp_path, caplog):
    """As in transformers, which names the weights that have no place."""
    model, tokens = folder_of(tmp_path, settings, **dict.fromkeys(names, ones(4))), torch.randint(61, (2, 6))
    close(from_huggingface(str(tmp_path))(tokens), model(tokens))
    wanted = [f"{tmp_path}: read without {told}, for which its class has no place; transformers leaves it out too."]
    assert caplog.messages == (wanted if told else [])


@pytest.mark.parametrize("settings", [LLAMA, GPT2, {}, LLAMA | {"qkv_bias": True}, LLAMA | {"mlp": "relu2"}])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": False}, "has is_causal=False: choose a model with is_causal=True"),
        ({"is_causal": None}, "has is_causal=None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is a LlamaForSequenceClassification, which writes no"),
        ({"architectures": ["Qwen2ForProcessRewardModel"]}, "is a Qwen2ForProcessRewardModel, which writes no text"),
    ],
)
def test_models_that_see_what_comes_or_classify_are_refused(change, message, settings, tmp_path):
    folder_of(tmp_path, settings | {"tie_embeddings": True})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(HuggingFaceError, match=message):
        from_huggingface(str(tmp_path))


SLIDING = "sliding_attention"
FULL = "full_attention"


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"attention": "sdpa/sdpa+nope"}, {"sliding_window": 3, "layer_types": [SLIDING, FULL]}),
        ({"attention": "sdpa/sdpa+nope"}, {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0}),
        ({"attention": "sdpa/sdpa+nope"}, {"sliding_window": 3, "use_sliding_window": False, "max_window_layers": 0}),
        ({"attention_window": 3}, {"layer_types": [FULL, SLIDING]}),
        ({"attention_window": 3}, {"layer_types": [FULL, FULL]}),
        ({"attention_window": 3}, {"layer_types": None, "use_sliding_window": False}),
        ({}, {"sliding_window": 3, "use_sliding_window": True, "layer_types": [SLIDING, FULL]}),
    ],
)
@torch.no_grad()
def test_windows_of_smollm3_mistral_and_llama_are_those_of_transformers(settings, change, tmp_path):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "MinistralConfig"):
        pytest.skip("older versions read over a Mistral's layer_types")
    folder_of(tmp_path, LLAMA | settings)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(61, (2, 12))
    close(from_huggingface(str(tmp_path))(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("settings", "change", "told"),
    [
        ({"attention": "sdpa+window/sdpa", "attention_window": 3}, {"use_sliding_window": "false"}, "write false"),
        ({"attention": "sdpa+window/sdpa", "attention_window": 3}, {"use_sliding_window": [False]}, "write true or"),
        ({"tie_embeddings": True}, {"tie_word_embeddings": "False"}, "write false, without quotes"),
        (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings=1 in config.json: write true or false"),
        (LLAMA, {"attention_bias": "false"}, 'has attention_bias="false" in config.json: write false, without'),
        (LLAMA, {"rope_scaling": "None"}, "write null, without quotes"),
        (GPT2, {"scale_attn_weights": [True]}, "write true or false"),
        (LLAMA, {"hidden_act": ["silu"]}, r"hidden_act=\['silu'\]"),
    ],
)
def test_words_of_json_in_quotes_and_lists_of_one_are_refused_by_name(settings, change, told, tmp_path):
    """As some converters write them; "false" passed for true, and left the windows where they were."""
    folder_of(tmp_path / "theirs", settings)
    file = tmp_path / "theirs/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(HuggingFaceError, match=told):
        from_huggingface(str(tmp_path / "theirs"))


def test_a_quantised_model_is_named_by_its_method(tmp_path):
    folder_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(HuggingFaceError, match=rf"is quantised \(fp8\): {PLAIN}"):
        from_huggingface(str(tmp_path))


C_ATTN = "transformer.h.0.attn.c_attn"


@pytest.mark.parametrize(
    ("settings", "rename", "message"),
    [
        (LLAMA, {f"{Q}.weight": f"{Q}.qweight"}, f"has no {Q}.weight, but {Q}.qweight: {PLAIN}"),
        (LLAMA, {f"{Q}.weight": f"{Q}.base_layer.weight"}, f"has no {Q}.weight, but {Q}.base_layer.weight: {PLAIN}"),
        (LLAMA, {"lm_head.weight": "lm_head.qweight"}, f"has no lm_head.weight, but lm_head.qweight: {PLAIN}"),
        (GPT2, {f"{C_ATTN}.weight": f"{C_ATTN}.W_q"}, f"has no {C_ATTN}.weight, but {C_ATTN}.W_q: {PLAIN}"),
        (
            GPT2,
            {f"{C_ATTN}.weight": "h.0.attn.c_attn.W_q"},
            f"has no {C_ATTN}.weight, but h.0.attn.c_attn.W_q: {PLAIN}",
        ),
        (GPT2, {f"{C_ATTN}.weight": None}, f"has no {C_ATTN}.weight, which its config.json asks for: choose another"),
        (GPT2, {f"{C_ATTN}.bias": None}, f"has no {C_ATTN}.bias, which its config.json asks for: choose another"),
        (LLAMA, {"lm_head.weight": None}, "has no lm_head.weight, which tie_word_embeddings=false in its config.json"),
        (LLAMA, None, "but weights of other names .*: merge its adapters, with peft's merge_and_unload"),
    ],
)
def test_a_weight_that_stands_under_a_name_of_quantisation_or_peft_is_told_from_one_that_is_missing(
    settings, rename, message, tmp_path
):
    folder_of(tmp_path, settings)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    if rename is None:
        weights = {f"base_model.model.{name}": weight for name, weight in weights.items()}
    for name, other in (rename or {}).items():
        weight = weights.pop(name)
        weights |= {other: weight} if other else {}
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(HuggingFaceError, match=message):
        from_huggingface(str(tmp_path))


def test_one_file_goes_before_an_index_of_an_earlier_save(tmp_path):
    """As in transformers, which wrote the file last."""
    model, tokens = folder_of(tmp_path), torch.randint(61, (2, 6))
    old = {name: 2 * weight for name, weight in load_file(tmp_path / "model.safetensors").items()}
    save_file(old, tmp_path / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(old, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    close(from_huggingface(str(tmp_path))(tokens), model(tokens))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "has pytorch_model.bin, but no model.safetensors: save the model again by transformers"),
        ("model.fp16.safetensors", "no model.safetensors: rename the file that you want to model.safetensors"),
        ("tiny.gguf", "has tiny.gguf, but no model.safetensors: save the model again"),
        ("consolidated.safetensors", "has consolidated.safetensors, but no model.safetensors: save the model again"),
    ],
)
def test_weights_in_another_file_are_named_with_what_to_do(name, message, tmp_path):
    folder_of(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(HuggingFaceError, match=message):
        from_huggingface(str(tmp_path))
    if message.endswith("rename the file that you want to model.safetensors"):  # the remedy works
        (tmp_path / name).rename(tmp_path / "model.safetensors")
        from_huggingface(str(tmp_path))


MISTRALS = {"model.layers": "layers", "self_attn.q_proj": "attention.wq", "input_layernorm": "attention_norm"}
MISTRALS |= {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
OTHER_NAMES = {
    "Mistral's": MISTRALS,
    "litgpt's": {"model.layers": "transformer.h", "input_layernorm": "norm_1", "model.embed_tokens": "transformer.wte"},
    "ours": {"model.layers": "blocks", "model.embed_tokens": "token_embedding", "model.norm": "final_norm"},
    "with a prefix": {"model.": "model.model.", "lm_head": "model.lm_head"},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("names", OTHER_NAMES.values(), ids=OTHER_NAMES)
def test_weights_with_other_names_are_refused_by_these_and_not_by_a_setting(names, tied, tmp_path):
    """Mistral's rows lie as ours: under new names alone the model would answer as another."""
    folder_of(tmp_path)
    renamed = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        for word, other in names.items():
            name = name.replace(word, other)
        renamed[name] = weight
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    told = rf"has no model.layers.0.input_layernorm.weight, but weights of other names \({min(renamed)}, .*: save the"
    with pytest.raises(HuggingFaceError, match=told):
        from_huggingface(str(tmp_path))


def test_transposed_matrices_are_told_apart_from_another_config(tmp_path):
    """nanoGPT names its weights as GPT-2 of transformers does, which has them transposed."""
    model, tokens = folder_of(tmp_path, GPT2), torch.randint(61, (2, 6))
    file = tmp_path / "model.safetensors"
    theirs = load_file(file)
    turned = {
        name: weight.t().contiguous() if ".h." in name and weight.ndim == 2 else weight
        for name, weight in theirs.items()
    }
    save_file(turned, file, {"format": "pt"})
    with pytest.raises(HuggingFaceError, match=r"c_attn.weight of 96 × 32 numbers, .* 32 × 96: transpose the matrices"):
        from_huggingface(str(tmp_path))
    save_file(theirs, file, {"format": "pt"})  # the remedy works
    close(from_huggingface(str(tmp_path))(tokens), model(tokens))


def test_a_model_in_several_files_is_read_by_its_index_or_the_missing_file_is_named(tmp_path):
    model, tokens = folder_of(tmp_path), torch.randint(61, (2, 6))
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    place = {name: names[number % 2] for number, name in enumerate(weights)}
    for file in names:
        part = {name: weight for name, weight in weights.items() if place[name] == file}
        save_file(part, tmp_path / file, {"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    with pytest.raises(HuggingFaceError, match=f"has {names[0]}, {names[1]}, but no {index.name}: download that file"):
        from_huggingface(str(tmp_path))
    (tmp_path / "consolidated.safetensors").write_bytes(b"")  # Mistral's, before the others by name
    with pytest.raises(HuggingFaceError, match=f"but no {index.name}: download that file too"):
        from_huggingface(str(tmp_path))
    (tmp_path / "consolidated.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": place}))  # the remedy works
    close(from_huggingface(str(tmp_path))(tokens), model(tokens))
    (tmp_path / names[1]).rename(tmp_path / "model.safetensors-2-of-2.safetensors")  # other names, as in some folders
    with pytest.raises(HuggingFaceError, match=f"lacks 1 of the 2 files that its {index.name} names, such as"):
        from_huggingface(str(tmp_path))
    index.write_text(index.read_text().replace(names[1], "model.safetensors-2-of-2.safetensors"))
    close(from_huggingface(str(tmp_path))(tokens), model(tokens))


@pytest.mark.parametrize("name", ["ckpt.pt", "model.gguf"])
def test_a_file_or_a_folder_without_settings_is_no_model(name, tmp_path):
    (tmp_path / name).write_bytes(b"GGUF")
    for where, problem in ((tmp_path / name, "is a file"), (tmp_path, "has no config.json")):
        with pytest.raises(HuggingFaceError, match=f"{problem}: give the folder that transformers' save_pretrained"):
            from_huggingface(str(where))

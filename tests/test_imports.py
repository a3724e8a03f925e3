"""Models of Hugging Face with settings of all kinds: transformers' own logits, or a sentence that names the setting."""

import json
import random

import pytest
import torch
import torch.nn.functional as F
from conftest import some
from safetensors.torch import load_file, save_file, save_model

from common.errors import HuggingFaceError
from interop.huggingface import TARGETS, from_huggingface, read_config, read_huggingface

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(24)[None] * 7 % 61


def rope_of(rng, length):
    """Parameters of RoPE, and a name in them that we do not know; None if we know all."""
    theta = rng.choice([10_000.0, 500.0, 1e6])
    kind = rng.choice(["default", "default", "linear", "yarn", "yarn", "llama3", "dynamic"])
    rope = {"rope_theta": theta, "rope_type": kind}
    if kind == "default":
        return rope, None
    rope["factor"] = rng.choice([2.0, 4.0, 1.5])
    if kind == "dynamic":
        return rope, "dynamic"
    unknown = None
    if kind == "llama3":
        low, high = rng.choice([(1.0, 4.0), (1.0, 4.0), (1.0, 8.0)])
        rope |= {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": length // 2}
        unknown = "high_freq_factor" if high != 4.0 else None
    if kind == "yarn":
        rope["original_max_position_embeddings"] = rng.choice([length // 2, length])
        own = 0.1 * torch.tensor(rope["factor"], dtype=torch.float64).log().item() + 1
        written = rng.choice(
            ["", "attention_factor", "other attention_factor", "mscale", "both mscales", "beta", "truncate"]
        )
        if written == "attention_factor":
            rope["attention_factor"] = own
        if written == "other attention_factor":
            rope["attention_factor"], unknown = own + 0.25, "attention_factor"
        if written == "mscale":
            rope |= {"mscale": 0.7}  # alone it does nothing
        if written == "both mscales":
            rope |= {"mscale": 1.0, "mscale_all_dim": 0.5}
            unknown = "mscale"
        if written == "beta":
            rope |= {"beta_fast": rng.choice([32.0, 16.0]), "beta_slow": 1.0}
            unknown = "beta_fast" if rope["beta_fast"] != 32.0 else None
        if written == "truncate":
            rope["truncate"] = rng.choice([True, False])
            unknown = None if rope["truncate"] else "truncate"
    return rope, unknown


def drawn(seed):
    """Return a class's settings that were drawn, and the names of those that we do not know."""
    rng = random.Random(seed)
    model_type = rng.choice(["qwen3", "qwen3", "llama", "gpt2"])
    heads = rng.choice([1, 2, 4])
    unknown = []
    common = dict(initializer_range=0.2, bos_token_id=0, eos_token_id=0, pad_token_id=None, vocab_size=61)
    tied = rng.choice([True, False])
    if model_type == "gpt2":
        settings = dict(
            n_positions=rng.choice([32, 1024]), n_embd=32, n_layer=rng.choice([1, 2, 12]), n_head=heads,
            n_inner=rng.choice([None, 40, 128]), layer_norm_epsilon=rng.choice([1e-5, 1e-3]),
            activation_function=rng.choice(["gelu_new", "gelu", "gelu_pytorch_tanh", "relu"]),
            scale_attn_weights=rng.random() < 0.9, scale_attn_by_inverse_layer_idx=rng.random() < 0.1,
            reorder_and_upcast_attn=rng.random() < 0.2, tie_word_embeddings=tied, resid_pdrop=0.0,
        )  # fmt: skip
        unknown += ["activation_function"] if settings["activation_function"] == "relu" else []
        unknown += [] if settings["scale_attn_weights"] else ["scale_attn_weights"]
        unknown += ["scale_attn_by_inverse_layer_idx"] if settings["scale_attn_by_inverse_layer_idx"] else []
        return model_type, common | settings, unknown, rng
    length = rng.choice([32, 2048 if model_type == "llama" else 32_768])
    rope, unknown_in_rope = rope_of(rng, length)
    settings = dict(
        hidden_size=32, intermediate_size=rng.choice([40, 88]), num_hidden_layers=rng.choice([1, 2, 3]),
        num_attention_heads=heads, num_key_value_heads=rng.choice([heads, 1, None]),
        hidden_act=rng.choice(["silu", "silu", "silu", "swish", "gelu"]), max_position_embeddings=length,
        rms_norm_eps=rng.choice([1e-6, 1e-6, 1e-5]), tie_word_embeddings=tied, rope_parameters=rope,
        attention_bias=rng.random() < 0.1, attention_dropout=rng.choice([0.0, 0.1]),
    )  # fmt: skip
    unknown += ["hidden_act"] if settings["hidden_act"] == "gelu" else []
    unknown += ["attention_bias"] if settings["attention_bias"] else []
    unknown += [unknown_in_rope] if unknown_in_rope else []
    if model_type == "llama":
        settings |= dict(mlp_bias=rng.random() < 0.1, head_dim=rng.choice([None, 8, 16]))
        unknown += ["mlp_bias"] if settings["mlp_bias"] else []
    else:
        settings |= dict(head_dim=rng.choice([8, 128]), use_sliding_window=rng.random() < 0.6)
        settings |= dict(sliding_window=rng.choice([4, 9, None]), max_window_layers=rng.choice([0, 1, 28]))
        if rng.random() < 0.3:
            kinds = ["sliding_attention", "full_attention"]
            settings["layer_types"] = [rng.choice(kinds) for _ in range(settings["num_hidden_layers"])]
            settings["use_sliding_window"], settings["sliding_window"] = True, 5
        unknown += ["rms_norm_eps"] if settings["rms_norm_eps"] != 1e-6 else []
    return model_type, common | settings, unknown, rng


def write(folder, model_type, settings, rng):
    """Write a folder as people have them, and return what is odd about it."""
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    defaults = type(config)().to_dict()
    for name in list(written):  # a file may leave out what is the default
        if name not in ("model_type", "architectures") and written[name] == defaults.get(name) and rng.random() < 0.7:
            del written[name]
    if "layer_types" not in settings:
        written.pop("layer_types", None)
    if "rope_parameters" in written and rng.random() < 0.5:  # as transformers 4 writes it
        rope = written.pop("rope_parameters")
        written["rope_theta"] = rope.pop("rope_theta")
        written["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if model_type == "gpt2" and rng.random() < 0.3:
        written = {{"n_embd": "hidden_size", "n_head": "num_attention_heads"}.get(k, k): v for k, v in written.items()}
    (folder / "config.json").write_text(json.dumps(written))
    weights = load_file(folder / "model.safetensors")
    head = "lm_head.weight"
    if settings["tie_word_embeddings"]:
        weights.pop(head, None)
    odd = rng.choice(["", "", "own head", "no prefix"])
    if odd == "own head" and settings["tie_word_embeddings"]:
        weights[head] = torch.randn(61, 32)
    if odd == "no prefix":
        weights = {name.removeprefix("model.").removeprefix("transformer."): each for name, each in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("seed", some(range(60), 8))
@torch.inference_mode()
def test_a_drawn_model_has_transformers_logits_or_a_sentence_that_names_the_setting(seed, tmp_path):
    torch.manual_seed(seed)
    model_type, settings, unknown, rng = drawn(seed)
    write(tmp_path, model_type, settings, rng)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    wanted = theirs(TOKENS).logits
    try:
        ours = from_huggingface(str(tmp_path))
    except HuggingFaceError as error:
        assert unknown and any(name in str(error) for name in unknown), (str(error), unknown)
        assert "download" not in str(error)
        return
    assert not unknown, unknown
    assert read_config(str(tmp_path)) == ours.config
    assert (ours(TOKENS) - wanted).abs().max() < 2e-3 * wanted.abs().max()


def other_value(value):
    """Another value of the same kind, for a setting whose meaning the test does not know."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 3 * value + 0.01
    if isinstance(value, dict):
        return {name: each if isinstance(each, str) else other_value(each) for name, each in value.items()}
    return value[::-1] if isinstance(value, list) else "gelu"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", some(sorted(TARGETS), 3))
@torch.inference_mode()
def test_every_setting_on_which_transformers_acts_is_read_as_it_does_or_refused(model_type, tmp_path):
    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=None)
    if model_type != "gpt2":
        sizes |= dict(intermediate_size=40, num_key_value_heads=2, head_dim=8, max_window_layers=1)
        sizes |= dict(use_sliding_window=True, sliding_window=8)

    def model_of(settings):
        config = transformers.AutoConfig.for_model(**settings)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
        return model, model(TOKENS, return_dict=True).logits

    plain = transformers.AutoConfig.for_model(model_type, **sizes).to_dict()
    _, expected = model_of(plain)
    acted_upon = set()
    plain.pop("architectures", None)  # which names a class, and no value of it
    for name, value in plain.items():
        settings = plain | {name: other_value(value)}
        try:
            model, wanted = model_of(settings)
        except Exception:  # of any kind: transformers has no such value, or checks it late
            continue
        if wanted.shape != expected.shape or not torch.equal(wanted, expected):
            acted_upon.add(name)
        save_model(model, str(tmp_path / "model.safetensors"))
        (tmp_path / "config.json").write_text(json.dumps(settings))
        try:
            got = from_huggingface(str(tmp_path))(TOKENS)
        except HuggingFaceError:
            assert name in acted_upon, name
            continue
        assert (got - wanted).abs().max() < 2e-3 * wanted.abs().max(), name
    named = {"vocab_size", "tie_word_embeddings"}
    named |= {"n_layer"} if model_type == "gpt2" else {"rope_parameters", "intermediate_size"}
    named |= {"sliding_window"} & ({*plain} if model_type in ("mistral", "qwen2", "qwen3") else set())
    assert acted_upon > named


@pytest.mark.parametrize("model_type", some([*TARGETS], 3))
def test_an_import_is_trained_further_as_transformers_trains_it(model_type, tmp_path):
    """Three steps of SGD, as long as no id of the text is that of padding: its embedding gets no gradient there."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, vocab_size=61, hidden_size=32, num_hidden_layers=2,
                                               num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
                                               attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, pad_token_id=60,
                                               bos_token_id=60, eos_token_id=60)  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    theirs.save_pretrained(tmp_path)
    ours = from_huggingface(str(tmp_path)).double().train()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, ours)]
    rows = torch.randint(60, (3, 4, 25))
    for inputs, targets in zip(rows[..., :-1], rows[..., 1:], strict=True):
        losses = [F.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten()), ours.loss(inputs, targets)]
        torch.testing.assert_close(losses[1] / targets.numel(), losses[0], atol=1e-6, rtol=0)
        for loss, divisor, optimizer in zip(losses, (1, targets.numel()), optimizers, strict=True):
            optimizer.zero_grad()
            (loss / divisor).backward()
            optimizer.step()
    with torch.no_grad():
        assert (ours(inputs) - theirs(inputs).logits).abs().max() < 1e-4


@pytest.mark.parametrize("odd", ["", "no prefix", "two files"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@torch.inference_mode()
def test_a_tied_weight_may_have_the_name_of_the_head_alone(model_type, odd, tmp_path):
    config = transformers.AutoConfig.for_model(model_type, vocab_size=61, hidden_size=32, num_hidden_layers=1,
                                               num_attention_heads=2, tie_word_embeddings=True)  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    config.save_pretrained(tmp_path)
    save_model(theirs, tmp_path / "model.safetensors")  # of two names it keeps the first of the alphabet
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" in weights and not any("embed_tokens" in name or "wte" in name for name in weights)
    if odd == "no prefix":
        weights = {name.removeprefix("model.").removeprefix("transformer."): each for name, each in weights.items()}
        save_file(weights, tmp_path / "model.safetensors")
    if odd == "two files":
        (tmp_path / "model.safetensors").unlink()
        places = {name: "one.safetensors" if name == "lm_head.weight" else "two.safetensors" for name in weights}
        for file in set(places.values()):
            save_file({name: each for name, each in weights.items() if places[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    ours = from_huggingface(str(tmp_path))
    assert ours.config.tie_embeddings and ours.lm_head.weight is ours.token_embedding.weight
    assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() < 1e-4

    # An embedding of its own cannot be missing.
    written = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(
        (HuggingFaceError, ValueError), match="where its config.json asks for|which its config.json asks"
    ):
        from_huggingface(str(tmp_path))


def test_a_file_without_the_head_of_its_own_is_refused_by_that_name(tmp_path):
    config = transformers.AutoConfig.for_model("llama", vocab_size=61, hidden_size=32, intermediate_size=40,
                                               num_hidden_layers=1, num_attention_heads=2)  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for gone, message in (
        ("lm_head.weight", "no lm_head.weight, which tie_word_embeddings=false"),
        ("model.norm.weight", "no model.norm.weight, which its config.json asks for"),
    ):
        rest = {name: each for name, each in weights.items() if name != gone}
        save_file(rest | {"other": torch.zeros(10_000)}, tmp_path / "model.safetensors")
        with pytest.raises(HuggingFaceError, match=message) as refused:
            read_huggingface(str(tmp_path))
        assert "download" not in str(refused.value)

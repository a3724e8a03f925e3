"""To Hugging Face and back: the same bits, the same logits, the same ids."""

import json
import random
import string
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiktoken
import torch
from conftest import PRESETS, preset_settings, random_gpt, split_patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from data.config import TokenizerConfig
from data.tokenizer import BPE_PATTERN, END_OF_TEXT, make_tokenizer, train_bpe
from errors import HuggingFaceError
from interop.huggingface import find_folder, from_huggingface, to_huggingface
from interop.tokenizer import DIGITS_PATTERN, GPT2_PATTERN, read_tokenizer_json, save_tokenizer_json

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
    "llama-ntk": LLAMA | {"rope_scaling": "ntk", "rope_scaling_factor": 4.0},
    "llama-narrow-heads": LLAMA | {"head_size": 4},
    "qwen3": {},
    "qwen3-wide-heads": {"head_size": 16, "n_kv_head": 2},
    "qwen3-three-heads": {"n_head": 3, "head_size": 16},
    "qwen3-multi-query": {"n_kv_head": 1, "n_inner": 40},
    "qwen3-single-head": {"attention": "single_head"},
}


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_their_model_gives_our_logits_and_back_come_the_same_bits(shape, tmp_path):
    model = random_gpt(**SHAPES[shape])
    to_huggingface(model, tmp_path, end_of_text=60)
    back = from_huggingface(str(tmp_path))
    state = back.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert (back.config.tie_embeddings, back.config.block_size) == (model.config.tie_embeddings, 16)
    tokens = torch.randint(61, (3, 16))
    torch.testing.assert_close(back(tokens), model(tokens), atol=1e-5, rtol=1e-5)
    theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-4, rtol=0)
    assert theirs.config.eos_token_id == 60


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen3"])
def test_what_transformers_saves_gives_our_gpt_its_logits(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    if kind == "GPT2":
        config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=61)
    else:
        config = getattr(transformers, f"{kind}Config")(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, head_dim=16,
            intermediate_size=48, max_position_embeddings=16, vocab_size=61,
        )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    if kind == "GPT2":  # whose embeddings are tied where nothing is said
        saved.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(saved))
    tokens = torch.randint(61, (2, 16))
    torch.testing.assert_close(from_huggingface(str(tmp_path))(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_exported(preset, tmp_path):
    shape = preset_settings(preset)
    model = random_gpt(**shape | {"n_layer": 1, "n_head": 4, "n_embd": 32, "n_inner": None, "block_size": 8})
    expected = {"gpt2": "GPT2LMHeadModel", "llam": "LlamaForCausalLM"}.get(preset[:4], "Qwen3ForCausalLM")
    assert to_huggingface(model, tmp_path) == expected


@pytest.mark.parametrize(
    ("settings", "obstacle", "preset"),
    [
        ({"position": "alibi"}, "position=alibi", "tiny"),
        ({"mlp": "relu2"}, "mlp=relu2", "tiny"),
        ({"attention": "average"}, "attention=average", "tiny"),
        ({"attention": "softmax1"}, "attention=softmax1", "tiny"),
        (LLAMA | {"attention_window": 4, "qkv_bias": True}, "attention_window=4", "llama"),
        ({"attention": "sdpa+gate"}, r"attention=sdpa\+gate", "tiny"),
        ({"logit_softcap": 30.0}, "logit_softcap=30.0", "tiny"),
        ({"norm_eps": 1e-5}, "norm_eps=1e-05", "tiny"),
        (LLAMA | {"qkv_bias": True}, "qkv_bias=True", "llama"),
        (LLAMA | {"n_head": 3, "head_size": 8}, "n_head=3 that does not divide n_embd=32", "llama"),
        (GPT2 | {"bias": False}, "bias=False", "gpt2"),
        (GPT2 | {"n_kv_head": 2}, "n_kv_head=2", "gpt2"),
        (GPT2 | {"head_size": 16}, "head_size=16", "gpt2"),
    ],
    ids=str,
)
def test_what_they_cannot_express_names_the_setting_and_a_preset_that_can(settings, obstacle, preset, tmp_path):
    with pytest.raises(HuggingFaceError, match=f"no .*{obstacle}.*model={preset} can be exported"):
        to_huggingface(random_gpt(**settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


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
    (tmp_path / "model").mkdir()
    for file in ("config.json", "model.safetensors.index.json"):
        (tmp_path / "model" / file).write_text((tmp_path / file).read_text().replace("a.safe", "../a.safe"))
    with pytest.raises(HuggingFaceError, match=r"names a file elsewhere \(\.\./a\.safetensors\)"):
        from_huggingface(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function=relu is not known"),
        ({"model_type": "mamba"}, "is a mamba: only gpt2, llama and qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn"),
        ({"head_dim": 16}, "cannot be read"),
        ({"vocab_size": 62}, "not have the size"),
        ({"num_hidden_layers": 3}, "KeyError"),
        ({"hidden_size": None}, "Type.*Error"),
    ],
    ids=str,
)
def test_a_model_that_ours_cannot_express_or_that_is_damaged_is_refused_in_a_sentence(change, message, tmp_path):
    to_huggingface(random_gpt(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(HuggingFaceError, match=message) as refused:
        from_huggingface(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_name_that_cannot_be_had_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HuggingFaceError, match=r"not a local folder.*pip install huggingface_hub"):
        from_huggingface("no/such-model")


def test_the_hub_is_asked_once_for_a_model(tmp_path, monkeypatch):
    to_huggingface(random_gpt(), tmp_path)
    asked: list[str] = []
    hub = SimpleNamespace(snapshot_download=lambda name, **_: asked.append(name) or str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    from_huggingface("some/model")
    assert find_folder("some/model") == tmp_path and asked == ["some/model"]


# The tokenizer


ODD = "ab Z9 \t\n\r'sſ.,_/é漢😀\u0301\u00a0\u2028\u0085"
TEXTS = st.text(st.sampled_from(ODD) | st.characters(codec="utf-8"), max_size=30)


def trained(pattern: str) -> tiktoken.Encoding:
    """A tokenizer with merges across all that the pattern leaves together, which a wrong cut would take apart."""
    text = Path(string.__file__).read_text() + "héllo wörld 漢字 123 4567 😀 " * 50
    return train_bpe([text, "".join(random.Random(0).choices(ODD, k=50_000))], 2000, pattern)


@pytest.fixture(scope="module")
def bpe() -> tiktoken.Encoding:
    return trained(BPE_PATTERN)


@pytest.mark.parametrize("name", ["byte", "bpe", "gpt2", "cl100k_base", "o200k_base"])
def test_their_tokenizer_gives_our_ids(name, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    byte = name == "byte"
    ours = make_tokenizer(TokenizerConfig(name=name), []) if byte else trained(split_patterns()[name])
    save_tokenizer_json(ours, tmp_path, 16)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    back = read_tokenizer_json(tmp_path)
    source = Path(string.__file__).read_text() + Path(tiktoken.__file__).read_text()
    source += "".join(random.Random(1).choices(ODD, k=20_000))
    assert theirs.encode(source).ids == ours.encode_ordinary(source) == back.encode_ordinary(source)

    @settings(max_examples=150, deadline=None)
    @given(text=TEXTS.filter(lambda text: END_OF_TEXT not in text))  # which theirs takes for the token
    def the_same(text):
        ids = ours.encode_ordinary(text)
        assert theirs.encode(text).ids == ids == back.encode_ordinary(text) and theirs.decode(ids) == text

    the_same()
    assert theirs.token_to_id(END_OF_TEXT) == ours.eot_token == back.eot_token


def test_where_no_token_is_called_as_ours_the_first_that_ends_a_text_of_theirs_does(bpe, tmp_path):
    save_tokenizer_json(bpe, tmp_path, 16)
    file, end = tmp_path / "tokenizer.json", bpe.eot_token
    file.write_text(file.read_text().replace(END_OF_TEXT, "</s>"))
    for ends in (end, [end, 5]):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert read_tokenizer_json(tmp_path).eot_token == end


def test_auto_tokenizer_loads_it(bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_tokenizer_json(bpe, tmp_path, 16)
    to_huggingface(random_gpt(vocab_size=bpe.n_vocab), tmp_path, bpe.eot_token)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n    return {'a': 12345}  # naïve 😀"
    assert tokenizer(text)["input_ids"] == bpe.encode_ordinary(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text and tokenizer.eos_token_id == bpe.eot_token


def steps(content: dict) -> list[dict]:
    return content["pre_tokenizer"]["pretokenizers"]


@pytest.mark.parametrize("before", [[], ["Digits"]], ids=str)
def test_byte_level_after_digits_or_alone_gives_their_ids(before, bpe, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pattern = DIGITS_PATTERN if before else GPT2_PATTERN
    save_tokenizer_json(trained(pattern.replace(r"\p{N}|", r"\p{N}+|")), tmp_path, 16)  # with numbers to cut apart
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = [{"type": "Digits", "individual_digits": True}] * len(before)
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*digits, byte_level]}
    content["normalizer"] = {"type": "NFC"}
    file.write_text(json.dumps(content))
    theirs, ours = tokenizers.Tokenizer.from_file(str(file)), read_tokenizer_json(tmp_path)

    @settings(max_examples=200, deadline=None)
    @given(text=TEXTS.map(lambda text: unicodedata.normalize("NFC", text)).filter(lambda text: END_OF_TEXT not in text))
    def the_same(text):
        assert theirs.encode(text).ids == ours.encode_ordinary(text)

    the_same()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["model"].update(type="Unigram"), "a model Unigram"),
        (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "a normalizer Lowercase"),
        (lambda t: steps(t)[1].update(add_prefix_space=True), "add_prefix_space"),
        (lambda t: steps(t)[1].update(use_regex=True), "use_regex"),
        (lambda t: steps(t)[0].update(behavior="MergedWithNext"), "MergedWithNext"),
        (lambda t: steps(t)[0].update(invert=True), "invert"),
        (lambda t: steps(t).insert(0, {"type": "Digits", "individual_digits": True}), "Digits"),
        (lambda t: steps(t).insert(1, steps(t)[0]), "Split.*Split"),
        (lambda t: steps(t).pop(0), "the steps"),
        (lambda t: t["added_tokens"].append(t["added_tokens"][0] | {"id": 9999, "content": "quick"}), "other ids"),
        (lambda t: t["model"]["merges"].reverse(), "another order"),
        (lambda t: t["model"]["vocab"].pop("a"), "another order|cannot be read"),
        (lambda t: t.pop("model"), "cannot be read"),
        (lambda t: t["pre_tokenizer"].update(type="Whitespace", pretokenizers=[{"type": "Whitespace"}]), "Whitespace"),
    ],
)
def test_a_tokenizer_that_tiktoken_cannot_stand_for_is_refused(change, message, bpe, tmp_path):
    save_tokenizer_json(bpe, tmp_path, 16)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(HuggingFaceError, match=message):
        read_tokenizer_json(tmp_path)

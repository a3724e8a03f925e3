"""python export.py: a checkpoint to Hugging Face and back, as a person types it."""

import os
import stat
from pathlib import Path

import pytest
import torch
from conftest import random_gpt

from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from errors import SettingsError
from export import ExportConfig, export
from runs.checkpoint import load_checkpoint, save_checkpoint
from training.config import TrainConfig


def save(directory: Path, **settings) -> Path:
    model = random_gpt(vocab_size=257, **settings)
    tokenizer = make_tokenizer(TokenizerConfig(name="byte"), [])
    save_checkpoint(directory, model=model, tokenizer=tokenizer, config=TrainConfig(model=model.config))
    return directory


def test_an_exported_checkpoint_comes_back_as_the_same_one(tmp_path, capsys):
    original = load_checkpoint(save(tmp_path / "step_1"))
    export(ExportConfig(checkpoint=str(tmp_path / "step_1"), to=str(tmp_path / "theirs")))
    assert "a Qwen3ForCausalLM" in capsys.readouterr().out
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "theirs").iterdir()} == names
    export(ExportConfig(import_from=str(tmp_path / "theirs"), to=str(tmp_path / "ours")))
    back = load_checkpoint(tmp_path / "ours")
    weights = back.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in original.model.state_dict().items())
    assert back.tokenizer._mergeable_ranks == original.tokenizer._mergeable_ranks
    assert back.tokenizer.eot_token == original.tokenizer.eot_token


@torch.inference_mode()
def test_auto_classes_load_it_and_write_what_we_write(tmp_path):
    transformers = pytest.importorskip("transformers")
    checkpoint = load_checkpoint(save(tmp_path / "step_1", block_size=64))
    export(ExportConfig(checkpoint=str(tmp_path / "step_1"), to=str(tmp_path / "theirs")))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    ids = tokenizer("naïve 😀", return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == checkpoint.tokenizer.encode_ordinary("naïve 😀")
    written = model.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist()
    text = ids[0].tolist()
    while len(text) < len(written):
        text.append(int(checkpoint.model(torch.tensor([text]))[0, -1].argmax()))
    assert written == text


THEIRS = {
    "qwen3": {},
    "llama": {"qk_norm": False},
    "gpt2": dict(position="learned", norm="layernorm", qk_norm=False, bias=True, qkv_bias=True, mlp="gelu_tanh"),
}


@pytest.mark.parametrize("kind", THEIRS)
def test_a_batched_pipeline_pads_and_writes_what_it_writes_for_each_text_alone(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    save(tmp_path / "step_1", block_size=64, **THEIRS[kind])
    export(ExportConfig(checkpoint=str(tmp_path / "step_1"), to=str(tmp_path / "theirs")))
    write = transformers.pipeline("text-generation", model=str(tmp_path / "theirs"), device="cpu")
    assert write.model.config.model_type == kind and write.model.config.pad_token_id is None
    texts, settings = ["a", "the cat sat on", "x" * 30], dict(max_new_tokens=12, do_sample=False)
    assert write(texts, batch_size=3, **settings) == [write(text, **settings) for text in texts]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027], ids=oct)
def test_checkpoints_and_exports_are_readable_as_the_umask_says(umask, tmp_path):
    before = os.umask(umask)
    try:
        save(tmp_path / "step_1")
        export(ExportConfig(checkpoint=str(tmp_path / "step_1"), to=str(tmp_path / "theirs")))
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 9 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}


REFUSED = [
    ({"checkpoint": "{tmp}/no", "to": "{tmp}/out"}, "does not exist"),
    ({"checkpoint": "{tmp}/step_1", "to": "{tmp}/step_1"}, "is there already"),
    ({"checkpoint": "{tmp}/step_1"}, "to=FOLDER is needed"),
    ({"checkpoint": "{tmp}/step_1", "import_from": "x", "to": "{tmp}/out"}, "both given"),
    ({"checkpoint": "{tmp}/alibi", "to": "{tmp}/out"}, "position=alibi"),
    ({"checkpoint": "{tmp}/step_1", "to": "/proc/no/out"}, "cannot be written"),
    ({"import_from": "{tmp}/step_1", "to": "{tmp}/out"}, "config.json"),
    ({"import_from": "{tmp}/half", "to": "{tmp}/out"}, "cannot be read"),
    ({"import_from": "{tmp}/untokenized", "to": "{tmp}/out"}, "tokenizer.json"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[str(wrong)[1:-1] for wrong, _ in REFUSED])
def test_what_cannot_be_exported_is_refused_in_a_sentence_and_leaves_nothing(wrong, message, tmp_path):
    save(tmp_path / "step_1")
    save(tmp_path / "alibi", position="alibi")
    for name in ("half", "untokenized"):
        export(ExportConfig(checkpoint=str(tmp_path / "step_1"), to=str(tmp_path / name)))
    weights = tmp_path / "half" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    (tmp_path / "untokenized" / "tokenizer.json").unlink()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SettingsError, match=message) as refused:
        export(ExportConfig(**{key: value.replace("{tmp}", str(tmp_path)) for key, value in wrong.items()}))
    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before

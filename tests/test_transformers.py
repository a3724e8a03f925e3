"""Exported folders in the versions of transformers that people have: logits, the card's code, batches, pipelines."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import first_of, random_gpt
from safetensors.torch import save_file
from test_huggingface import SHAPES

from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer, train_bpe
from generation.generate import encode_prompt
from interop.card import model_card
from interop.huggingface import to_huggingface, version_needed
from interop.tokenizer import save_tokenizer_json
from model.attention import FORMS

# The first with all three classes, the last 4.x, and the one that is installed.
VERSIONS = ["installed", "4.57.6", "4.51.3"]
EXPORTED = SHAPES | {"qwen3-yarn-of-8": {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_trained_length": 8}}
PROMPTS = ["de e\u0301", "x"]  # the first is not in NFC
BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])

# Runs in the environment of a version. It prints, for each folder, a sentence for each thing that is not right.
CHECK = """
import json, re, sys, warnings
from pathlib import Path
import torch
from safetensors.torch import load_file
import transformers
from transformers import AutoModelForCausalLM, pipeline

transformers.logging.set_verbosity_error()
wrong = {}
for folder in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
    found = wrong[folder.name] = []
    try:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        card = (folder / "README.md").read_text()
        loader = re.search("import AutoModelForCausalLM, (.*)", card)[1]
        tokenizer = getattr(transformers, loader).from_pretrained(folder)
        expected = load_file(folder / "expected.safetensors")
        with torch.inference_mode():
            logits = model(expected["tokens"]).logits
        if not torch.allclose(logits, expected["logits"], atol=1e-4, rtol=1e-5):
            found.append(f"logits differ by {(logits - expected['logits']).abs().max():.1e}")
        # One prompt and a padded batch are continued alike, greedily.
        prompts = json.loads(sys.argv[2])
        greedy = dict(max_new_tokens=6, do_sample=False)
        each = [model.generate(**tokenizer(prompt, return_tensors="pt"), **greedy) for prompt in prompts]
        batch = model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), **greedy)
        for prompt, alone, padded in zip(prompts, each, batch):
            new = alone[0, len(tokenizer(prompt)["input_ids"]):].tolist()  # fewer than 6 if the model ends the text
            if padded[batch.shape[1] - 6:].tolist()[: len(new)] != new:
                found.append("a padded batch is continued otherwise")
        if tokenizer(prompts[0])["input_ids"] != expected["ids"].tolist():
            found.append("other ids")
        writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
        written = writer(prompts[0], **greedy)[0]["generated_text"]
        if written != tokenizer.decode(each[0][0], skip_special_tokens=True):
            found.append("the pipeline writes another text")
        code = re.search("```python\\n(.*?)```", card, re.S)[1]
        exec(re.sub("max_new_tokens=[0-9]+", "max_new_tokens=6", code).replace("print(", "str("), {})
    except Exception as error:
        found.append(f"{type(error).__name__}: {str(error)[:200]}")
print("RESULT", json.dumps([transformers.__version__, wrong]))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """An exported folder of each shape, with our tokens and logits beside it."""
    root = tmp_path_factory.mktemp("exported")
    for shape, settings in EXPORTED.items():
        model = random_gpt(**settings | {"vocab_size": 257})
        folder = root / shape
        kind = to_huggingface(model, folder, BYTE.eot_token)
        save_tokenizer_json(BYTE, folder, model.config.block_size)
        words = dict(name=str(folder), kind=kind, parameters=1, block_size=16, command="", needed=version_needed(model))
        (folder / "README.md").write_text(model_card("", {}, **words))
        tokens = torch.randint(257, (3, model.config.block_size))
        with torch.inference_mode():
            expected = {"tokens": tokens, "logits": model(tokens)}
        expected["ids"] = torch.tensor(encode_prompt(BYTE, PROMPTS[0]))
        save_file(expected, folder / "expected.safetensors")
    return root


def packages_of(version: str, tmp_path: Path) -> dict[str, str]:
    """The environment variables of a process that has a version of transformers, beside the torch of this one."""
    if version == "installed":
        pytest.importorskip("transformers")
        return dict(os.environ)
    target = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(target)]
    install.append(f"transformers=={version}")
    done = subprocess.run(install, capture_output=True, text=True)
    if not (target / "transformers").exists():
        pytest.skip(f"transformers {version} cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    return os.environ | {"PYTHONPATH": str(target)}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("version", first_of(*VERSIONS))
def test_an_exported_folder_is_the_same_model_in_every_version_of_transformers(version, folders, tmp_path):
    environment = packages_of(version, tmp_path)
    command = [sys.executable, "-c", CHECK, str(folders), json.dumps(PROMPTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    shutil.rmtree(tmp_path / "packages", ignore_errors=True)
    used, wrong = json.loads(re.search("^RESULT (.*)$", done.stdout, re.M)[1])
    assert version in (used, "installed") and set(wrong) == set(EXPORTED)
    for name, found in wrong.items():
        needed = re.search("With transformers (.*) or later", (folders / name / "README.md").read_text())[1]
        is_enough = [*map(int, used.split(".")[:2])] >= [*map(int, needed.split("."))]
        assert found == [] or not is_enough, f"{name} in transformers {used}: {found}"
        if name in ("qwen3-yarn-of-8", "qwen3-windows"):
            assert bool(found) != is_enough, "the card asks for no later version than it must"


@torch.no_grad()
def test_the_pages_lines_let_a_model_of_transformers_compute_with_a_form():
    """With softmax as its own, also in a padded batch and with a cache; another form gives other logits."""
    transformers = pytest.importorskip("transformers")
    page = (Path(__file__).parent.parent / "docs/interop.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```text\n(from transformers import AttentionInterface.*?)```", page, re.DOTALL)
    shape = dict(vocab_size=61, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, intermediate_size=40)).eval()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    given = {"input_ids": torch.randint(61, (2, 6)), "attention_mask": mask}
    greedy = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    wanted = theirs(**given).logits[mask.bool()]
    written = theirs.generate(**given, **greedy)
    for form in ("sdpa", "loop", "sigmoid"):
        exec(code.replace('"sigmoid"', repr(form)), {"FORMS": FORMS, "theirs": theirs})
        close_to_theirs = torch.allclose(theirs(**given).logits[mask.bool()], wanted, atol=1e-5)
        assert close_to_theirs == (form != "sigmoid")
        if close_to_theirs:
            assert torch.equal(theirs.generate(**given, **greedy), written)
            alone = given["input_ids"][1:]
            assert torch.equal(theirs.generate(alone, **greedy, cache_implementation="static"), written[1:])


@torch.no_grad()
@pytest.mark.parametrize("family", ["Bert", "ViT", "Bart", "T5", "Gemma2", "GptOss"])
def test_the_pages_lines_give_what_the_model_computes_or_refuse_it(family):
    """Encoders were causal where nothing is padded; soft caps, sinks and T5's bias were left out."""
    transformers = pytest.importorskip("transformers")
    page = (Path(__file__).parent.parent / "docs/interop.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```text\n(from transformers import AttentionInterface.*?)```", page, re.DOTALL)
    shape = dict(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40)
    more = {
        "ViT": dict(image_size=8, patch_size=4),
        "Bart": dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=40, decoder_ffn_dim=40),
        "T5": dict(d_model=32, d_kv=8, num_layers=1, num_heads=4, d_ff=40),
        "Gemma2": dict(num_key_value_heads=2, head_dim=8, attn_logit_softcapping=1.0),
        "GptOss": dict(num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
    }.get(family, {})
    if family == "Bart":
        more |= dict(encoder_attention_heads=4, decoder_attention_heads=4)
    theirs = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**shape, **more)).eval()
    for weight in theirs.parameters():
        weight.normal_(std=0.2) if weight.ndim > 1 else None
    ids = torch.randint(61, (2, 6))
    given = {"pixel_values": torch.randn(2, 3, 8, 8)} if family == "ViT" else {"input_ids": ids}
    if family in ("Bart", "T5"):
        given["decoder_input_ids"] = ids[:, :4]
    theirs.set_attn_implementation("eager")
    wanted = theirs(**given).last_hidden_state
    exec(code.replace('"sigmoid"', '"loop"'), {"FORMS": FORMS, "theirs": theirs})
    if family in ("Gemma2", "GptOss"):
        with pytest.raises(ValueError, match="would leave out"):
            theirs(**given)
        return
    assert torch.allclose(theirs(**given).last_hidden_state, wanted, atol=1e-4)


def test_a_tokenizer_is_loaded_by_a_class_that_reads_its_pattern(tmp_path):
    """transformers 5 has rules of its own for a Qwen2, such as single digits, which its AutoTokenizer takes."""
    transformers = pytest.importorskip("transformers")
    ours = train_bpe(["1234 " * 9, "a" * 9], 270)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    save_tokenizer_json(ours, tmp_path, 16)
    words = dict(name="x", parameters=1, block_size=16, command="", needed="5")
    for kind, loader in {"Qwen2ForCausalLM": "PreTrainedTokenizerFast", "LlamaForCausalLM": "AutoTokenizer"}.items():
        assert f"tokenizer = {loader}.from" in model_card("", {}, kind=kind, **words)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("1234 12", "e\u0301"):
        assert theirs(text).input_ids == encode_prompt(ours, text)


def test_the_pages_labels_keep_the_end_of_each_text_and_leave_out_padding(tmp_path):
    transformers = pytest.importorskip("transformers")
    page = (Path(__file__).parent.parent / "docs/interop.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```text\n(def collate.*?)```", page, re.DOTALL)
    save_tokenizer_json(BYTE, tmp_path, 16)
    names = {"tokenizer": transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path), "texts": ["ab", "a"]}
    exec(code, names)
    batch, end = names["collate"](names["rows"]), BYTE.eot_token
    assert batch["labels"].tolist() == [[end, 97, 98, end], [-100, end, 97, end]]
    assert batch["input_ids"].tolist() == [[end, 97, 98, end], [end, end, 97, end]]

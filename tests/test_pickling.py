"""A model can be copied, pickled, saved whole and sent to another process, with forms of one's own too."""

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import random_gpt, some

from common.errors import SettingsError
from model.attention import FORMS, MODIFIERS, SETTINGS
from model.attention.contract import from_weights, named_as, of_weighting
from model.attention.weighting import Softcap
from model.cache import KVCache
from model.config import MLPS, NORMS

ROOT = Path(__file__).parent.parent
EVERY = [*FORMS, *(f"sdpa+{name}" for name in (*SETTINGS, *MODIFIERS)), "mla+sink/softmax1+forget"]
TOKENS = torch.arange(10)[None]


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"pickle": lambda model: pickle.loads(pickle.dumps(model)), "copy": copy.deepcopy, "save": saved}


@pytest.mark.parametrize("attention", some(EVERY, 4))
@torch.no_grad()
def test_a_model_of_every_form_and_modifier_comes_back_as_it_was(attention):
    model = random_gpt(attention=attention, attention_window=3 if "window" in attention else None)
    logits = model(TOKENS)
    for way in WAYS.values():
        again = way(model)
        assert torch.equal(again(TOKENS), logits)
        for one, other in zip(again.attentions, model.attentions, strict=True):
            # A form that has a name is that form, and not a copy of it.
            assert one.function is other.function or other.form in ("softcap", "moba", "parallax", "wall", "stacked")


@pytest.mark.parametrize("settings", [*({"mlp": name} for name in MLPS), *({"norm": name} for name in NORMS)], ids=str)
def test_so_does_one_of_every_mlp_and_norm(settings):
    model = random_gpt(**settings, ngrams=(2,))
    assert torch.equal(WAYS["pickle"](model)(TOKENS), model(TOKENS))


@torch.no_grad()
def test_a_cache_comes_back_too_and_goes_on():
    for attention in ("sdpa+window/delta", "mla/sdpa+conv"):
        model = random_gpt(attention=attention, attention_window=3)
        whole = model(TOKENS)
        for way in WAYS.values():
            cache = KVCache(10)
            model(TOKENS[:, :6], cache=cache)
            assert torch.allclose(way(model)(TOKENS[:, 6:], cache=way(cache)), whole[:, 6:], atol=1e-4)
            assert cache.position == 6


@from_weights
def halved(scores):
    return (scores / 2).softmax(-1)


def test_a_function_that_is_no_form_is_pickled_by_its_name_and_one_of_a_weighting_by_its_content():
    assert pickle.loads(pickle.dumps(halved)) is halved and copy.deepcopy(halved) is halved
    q = torch.randn(3, 1, 2, 5, 4).unbind()
    softcap = of_weighting(Softcap(2.0))
    again = pickle.loads(pickle.dumps(softcap))
    assert again is not softcap and torch.equal(again(*q), softcap(*q))


def test_a_form_of_ones_own_is_pickled_by_its_name(monkeypatch):
    monkeypatch.setitem(FORMS, "mine", named_as(halved, Softcap(2.0), ()))
    FORMS["mine"].__name__ = "mine"
    FORMS["mine"].__module__ = "code_1234.mine"  # as the module of code=FILE, which no import finds
    written = pickle.dumps(FORMS["mine"])
    assert pickle.loads(written) is FORMS["mine"] is copy.deepcopy(FORMS["mine"])
    monkeypatch.delitem(FORMS, "mine")
    with pytest.raises(SettingsError, match="attention=mine is no form in this process: run its file first, by code="):
        pickle.loads(written)


# A file of one's own, which also sends its model to other processes.
OWN = """
import multiprocessing, pickle, sys
import torch
from torch import nn
from model.attention.call import add_matrix
from model.attention.contract import attention_function, from_weights
from model.attention.layer import MultiHeadAttention
from model.attention.modifiers import Modifier
from model.attention.registry import form, modifier
from model.config import GPTConfig
from model.gpt import GPT

@form("relu")
@from_weights
def relu(scores):
    n = (scores > -torch.inf).sum(-1, keepdim=True)
    return scores.relu() / n

@form("steps")
@attention_function
def steps(call):
    scores = call.q @ call.k.mT
    return scores.masked_fill(~call.mask, -torch.inf).softmax(-1) @ call.v

@form("plain")
def plain(q, k, v, *, mask, bias, is_causal, dropout_p, scale):
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

@form("far")
class Far(MultiHeadAttention):
    def attend(self, call, x, ctx):
        return super().attend(add_matrix(call, torch.ones(call.k.shape[-2])), x, ctx)

@modifier("twice", changes="result")
class Twice(Modifier):
    def finish(self, y, v, x, ctx):
        return 2 * y

NAMES = ("relu", "steps", "plain", "far", "sdpa+twice", "relu+sink")

def work(model, tokens):
    return model(tokens).tolist()

def main():
    torch.manual_seed(0)
    tokens = torch.arange(8)[None]
    shape = dict(n_embd=16, n_head=2, vocab_size=9, n_layer=1, zero_init=False)
    models = [GPT(GPTConfig(attention=name, **shape)) for name in NAMES]
    pickle.dump(models[0], open(sys.argv[1], "wb"))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for name, model in zip(NAMES, models):
            print(name, pool.apply(work, (model, tokens)) == work(model, tokens))

if __name__ == "__main__":
    main()
"""


@pytest.mark.long
def test_models_of_ones_own_forms_go_to_spawned_processes(tmp_path):
    file, where = tmp_path / "own.py", tmp_path / "model.pickle"
    file.write_text(OWN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(file), str(where)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    names = ("relu", "steps", "plain", "far", "sdpa+twice", "relu+sink")
    assert run.stdout.splitlines() == [f"{name} True" for name in names]


SENT = """
import pickle, sys
from common.errors import SettingsError
from model.attention.code import run_code
if len(sys.argv) > 2:
    run_code(sys.argv[2])
try:
    model = pickle.load(open(sys.argv[1], "rb"))
    print(model.attentions[0].function.__name__)
except SettingsError as error:
    print(error)
"""


@pytest.mark.long
def test_a_process_without_the_file_of_a_form_says_what_to_run_first(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    make = f"""
import pickle
from model.attention.code import run_code
from model.config import GPTConfig
from model.gpt import GPT
run_code({str(tmp_path / "own.py")!r})
model = GPT(GPTConfig(attention="relu", n_embd=16, n_head=2, vocab_size=9, n_layer=1))
pickle.dump(model, open({str(tmp_path / "model.pickle")!r}, "wb"))
"""
    subprocess.run([sys.executable, "-c", make], cwd=ROOT, check=True)
    said = []
    for more in ([], [str(tmp_path / "own.py")]):
        command = [sys.executable, "-c", SENT, str(tmp_path / "model.pickle"), *more]
        said.append(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip())
    sentence = "attention=relu is no form in this process: run its file first, by code=FILE or run_code(FILE)."
    assert said == [sentence, "relu"]

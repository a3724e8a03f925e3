"""The lines of docs/library.md on other models than the page's, beside values that are computed in another way."""

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from conftest import close, random_gpt, tokens_drawn
from torch import nn

from cli.eval import score_checkpoints
from common.errors import SettingsError
from generation.config import EvalConfig, SamplingParams, TextConfig
from generation.generate import encode_prompt, generate, generate_text
from generation.score import ScoringParams, score
from model.attention import FORMS, MODIFIERS, AttentionContext
from model.attention.call import lengths
from model.attention.modifiers import Modifier
from model.attention.registry import modifier
from model.cache import KVCache
from model.gpt import GPT
from model.heads import for_each_layer
from runs.checkpoint import save_checkpoint
from training.config import TrainConfig

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parent.parent / "docs" / "library.md").read_text(encoding="utf-8")
PAIRS = {b"e" + bytes([letter]): 257 + letter for letter in range(256)}
TOKENIZER = tiktoken.Encoding(
    "pairs",
    pat_str=r"[\s\S]{1,2}",
    mergeable_ranks={bytes([letter]): letter + (letter > 99) for letter in range(256)} | PAIRS | {b"A ": 513},
    special_tokens={"<|endoftext|>": 100},  # before other ids, as SmolLM has it
)


def lines(of: str, **names):
    """Run the block of the page that has a text; return all names, and what it prints as `printed`."""
    (block,) = [block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if of in block]
    printed: list[str] = []
    known = dict(copy=copy, encode_prompt=encode_prompt, generate=generate, generate_text=generate_text, nn=nn)
    names = known | {"torch": torch, "tokenizer": TOKENIZER, "print": printed.append} | names
    exec(compile(block, "docs/library.md", "exec"), names)
    return names | {"printed": printed}


def model_of(**settings):
    return random_gpt(vocab_size=514, block_size=64, **settings)


@torch.no_grad()
def test_bits_are_divided_by_the_bytes_of_the_tokens_that_are_predicted():
    model = model_of().double()
    names = lines("first = len", model=model)
    first, *others = names["tokens"][0].tolist()
    assert TOKENIZER.decode([first]) == "A "
    log_p = model(torch.tensor([[first, *others]]))[0].log_softmax(-1)
    bits = -sum(log_p[place, token].item() for place, token in enumerate(others)) / math.log(2)
    close(names["bits_per_byte"], bits / len(TOKENIZER.decode_bytes(others)))


def test_documents_are_scored_as_eval_scores_them_the_last_without_its_end(tmp_path):
    model = random_gpt(vocab_size=514, block_size=128)
    earlier = dict(np=np, score=score, in_float32=ScoringParams(torch.autocast("cpu", enabled=False)))
    names = lines("It tells what may be seen.", model=model, print=mock.Mock(), **earlier)
    save_checkpoint(tmp_path / "run", model=model, tokenizer=TOKENIZER, config=TrainConfig(model=model.config))
    records = [json.dumps({"text": document}) for document in names["documents"]]
    (tmp_path / "text.jsonl").write_text("\n".join(records), encoding="utf-8")
    text = TextConfig(path=str(tmp_path / "text.jsonl"))
    (found,) = score_checkpoints(EvalConfig(checkpoint=str(tmp_path / "run"), data=text, precision="fp32"))
    assert (found.total.tokens, found.total.bpb) == (names["total"].tokens, names["total"].bpb)
    one, other = (TOKENIZER.encode(document) for document in names["documents"])
    end = TOKENIZER.eot_token
    ids = torch.tensor([[end, *one, end, *other]])
    with torch.no_grad():
        log_p = model(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    assert found.total.tokens == len(one) + 1 + len(other)
    close(found.total.loss, -log_p.mean().item())


@pytest.mark.parametrize("settings", [{}, {"position": "learned"}, {"attention": "delta"}])
@torch.no_grad()
def test_a_text_beyond_the_context_is_scored_in_windows(settings):
    model, text = model_of(**settings), "A mask is a table of what may be seen."
    names = lines("ScoringParams", model=model, text=text, math=math)
    ids, nats = TOKENIZER.encode(9 * text), {}
    for begin in (*range(0, len(ids) - 64, 8), len(ids) - 65):  # a token is scored by the first window that has it
        log_p = model(torch.tensor([ids[begin : begin + 64]]))[0].log_softmax(-1)
        for place, token in enumerate(ids[begin + 1 : begin + 65]):
            nats.setdefault(begin + 1 + place, -log_p[place, token].item())
    assert [*nats] == [*range(1, len(ids))]
    close(names["bits_per_byte"], sum(nats.values()) / math.log(2) / (9 * len(text) - len(TOKENIZER.decode(ids[:1]))))


@pytest.mark.parametrize(
    "settings", [{"logit_softcap": 1.0}, {"tie_embeddings": True}, {"attention": "delta"}], ids=str
)
def test_tokens_that_a_hook_bans_are_never_drawn(settings):
    """Half of these ids have an e, and with a cap of 1 no logit is far below another."""
    model = model_of(**settings)
    names = lines("banned", model=model)
    assert len(names["banned"]) == 257
    hook = model.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, names["banned"], -1e4))
    params = SamplingParams(max_new_tokens=30)
    texts = [chunk.text for chunk in generate(model, TOKENIZER, [[100, 1]] * 4, seeds=[1, 2, 3, 4], params=params)]
    hook.remove()
    assert "e" not in "".join([*texts, *names["printed"]]) and not any(model._forward_hooks)
    assert "e" in "".join(generate_text(model, TOKENIZER, "A", max_new_tokens=30))


@pytest.mark.parametrize("returns", [True, False], ids=["written-into", "another"])
def test_log_p_are_the_models_own_whatever_chooses_does_to_the_logits(returns):
    model = model_of()
    params = SamplingParams(temperature=0.8, max_new_tokens=12)
    write = lines("def write(", model=model, params=params)["write"]
    banned = torch.arange(257, 514)

    def choose(logits, new):
        found = logits if returns else logits.clone()
        found[:, banned] = -torch.inf
        return found

    new, log_p = write([100, 7], seed=2, choose=choose)
    with torch.no_grad():
        whole = model(torch.tensor([[100, 7, *new]]))[0].log_softmax(-1)
    close(torch.tensor(log_p), whole[range(1, 1 + len(new)), new])
    assert len(new) > 3 and not set(new) & set(banned.tolist())


@pytest.mark.parametrize("attention", ["delta/sdpa", "sdpa+window/sdpa+key_offset"])
def test_a_cache_of_every_form_waits_in_eight_bits(attention, tmp_path, monkeypatch):
    """A state and a window do not go back to the prompt's end, as crop() would."""
    monkeypatch.chdir(tmp_path)
    Path("outputs").mkdir()
    model = model_of(attention=attention, attention_window=4)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.02)  # logits as of a young model
    names = lines("torch.save(cache", model=model, tokens=torch.randint(99, (1, 20)))
    names = lines("waiting", **{name: names[name] for name in ("model", "tokens", "cache")})
    assert names["cache"].position == 10 and not names["cache"].layers


@pytest.mark.parametrize("shares", [False, True])
def test_an_average_has_each_weight_once_tied_or_shared_by_layers(shares):
    """The lines twice, after two steps, beside the sum in float64; the same over state_dict() is another."""
    model = model_of(tie_embeddings=True)
    if shares:
        weights = {id(weight): weight for weight in model.parameters()}
        model.blocks.append(copy.deepcopy(model.blocks[0], weights))
        model.config.n_layer += 1
        model.number_layers()
    first = {name: weight.detach().double() for name, weight in model.named_parameters()}
    names = lines("mean.lerp_", model=model)
    average, wrong = names["average"], copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 0.01)
        for name, mean in wrong.state_dict().items():
            mean.lerp_(model.state_dict()[name], 0.01)
    for name, weight in average.named_parameters():
        close(weight.double(), 1.02 * first[name])
    assert not torch.allclose(wrong.token_embedding.weight.double(), 1.02 * first["token_embedding.weight"], 1e-3)


@pytest.mark.parametrize("settings", [{}, {"attention": "sdpa+value_residual"}, {"attention": "sdpa+window/linear"}])
def test_a_taller_copy_is_trained_without_its_model(settings):
    window = {"attention_window": 4} if "window" in str(settings) else {}
    model, tokens = model_of(**settings, **window), torch.randint(99, (2, 9))
    before = copy.deepcopy(model.state_dict())
    taller = lines("taller", model=model)["taller"]
    with torch.no_grad():
        x, ctx = model.embed(tokens, None, None, AttentionContext())
        for block in [*model.blocks, model.blocks[-1]]:
            x = block(x, ctx)
        close(taller(tokens), model.logits(x))
    taller.loss(tokens, tokens).backward()
    torch.optim.SGD(taller.parameters(), 0.1).step()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert not torch.equal(taller.blocks[0].mlp.down_proj.weight, model.blocks[0].mlp.down_proj.weight)


@pytest.mark.parametrize("settings", [{}, {"n_kv_head": 2, "attention": "sdpa+conv"}, {"position": "learned"}])
@torch.no_grad()
def test_the_rows_of_a_written_text_are_those_of_its_own_tokens(settings):
    model, prompt, params = model_of(**settings), [100, 7, 1, 8, 2], SamplingParams(max_new_tokens=9)
    rows = lines("last_rows", model=model, prompt=prompt, params=params, for_each_layer=for_each_layer)["last_rows"]
    (written,) = tokens_drawn(model, TOKENIZER, [prompt], [1], params)
    wanted = []

    def look(attention, arguments):
        q, k, _ = attention.queries_keys_values(*arguments)
        scores = q[:, :, -1:] @ k.repeat_interleave(4 // k.size(1), 1).mT / math.sqrt(8)
        wanted.append(scores.softmax(-1)[:, :, 0])

    hooks = [attention.register_forward_pre_hook(look) for attention in model.attentions]
    model(torch.tensor([prompt + written]))
    for hook in hooks:
        hook.remove()
    assert rows[0].shape == (1, 4, 14)
    for row, by_hand in zip(rows, wanted, strict=True):
        close(row, by_hand)


@pytest.mark.parametrize("settings", [{}, {"attention": "sdpa+diff"}, {"attention": "delta/sdpa+sink"}])
def test_the_entropy_of_a_loss_is_that_of_the_positive_weights_with_its_gradient(settings):
    model = model_of(**settings).double()
    tokens, weight = torch.tensor([[100, 7, 1, 8, 2, 8]]), model.blocks[0].mlp.down_proj.weight
    found, names = [], dict(model=model, tokens=tokens, F=F)
    seen = weight.register_hook(found.append)
    entropies = lines("entropies", **names)["entropies"]
    seen.remove()

    def by_definition():
        maps = for_each_layer(model, tokens[:, :-1], lambda weights: weights.clamp(min=0))
        shares = [weights / weights.sum(-1, keepdim=True).clamp(min=1e-12) for weights in maps]
        return [torch.special.entr(share).sum(-1).mean() for share in shares]

    for entropy, wanted in zip(entropies, by_definition(), strict=True):
        close(entropy, wanted, rtol=1e-6, atol=1e-6)
    direction, values = torch.randn_like(weight), []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            weight += step * direction
            values.append(model.loss(tokens[:, :-1], tokens[:, 1:]) + 0.1 * sum(by_definition()))
    close((found[0] * direction).sum(), (values[0] - values[1]) / 2e-6, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("modifiers", ["", "+sink", "+conv+sink"])
def test_relevance_is_of_the_keys_of_the_text_alone(modifiers):
    """The gradient of a weight is that of the head's result times the value of the key."""
    tokens, model = torch.tensor([[100, 7, 1, 8, 2, 8]]), model_of(attention="sdpa" + modifiers)
    with mock.patch.dict(FORMS):
        relevance = lines("relevance", model=model, tokens=tokens)["relevance"]
    values, results, hooks = [], [], []

    def keep_values(attention, arguments):
        values.append(attention.queries_keys_values(*arguments)[2])

    for attention in model.attentions:
        hooks.append(attention.register_forward_pre_hook(keep_values))
        hooks.append(attention.o_proj.register_forward_pre_hook(lambda module, arguments: results.append(*arguments)))
    logit = model(tokens)[0, -1, 97]
    for hook in hooks:
        hook.remove()
    maps = for_each_layer(model, tokens, lambda weights: weights)
    for layer, gradient in enumerate(torch.autograd.grad(logit, results)):
        of_weights = gradient.unflatten(-1, (4, -1)).transpose(1, 2) @ values[layer].mT  # (1, H, T, T)
        close(relevance[layer], (maps[layer] * of_weights).clamp(min=0).mean(1))


def test_the_first_tokens_are_kept_in_place_of_a_window_and_refused_beside_one():
    model = model_of(attention="sdpa+window", attention_window=32)
    refused = pytest.raises(SettingsError, match="leave out window, and set attention_window=None")
    with mock.patch.dict(FORMS), mock.patch.dict(MODIFIERS), refused:
        lines("class First", model=model)
    whole = model_of()
    whole.load_state_dict(model.state_dict())
    with mock.patch.dict(FORMS), mock.patch.dict(MODIFIERS):
        streaming = lines("class First", model=whole)["streaming"]
    tokens, place = torch.randint(99, (1, 60)), torch.arange(60)
    seen = (place < 4) | (place[:, None] - place < 32)

    def hide(block, arguments):
        arguments[1].mask = seen

    whole.blocks[0].register_forward_pre_hook(hide)
    with torch.no_grad():
        close(streaming(tokens), whole(tokens))
        cache = KVCache(60)
        close(torch.cat([streaming(part, cache=cache) for part in tokens.split([41, 1, 18], 1)], 1), whole(tokens))


STRETCHED = [
    {},
    {"rope_fraction": 0.5},
    {"rope_fraction": 0.5, "rope_proportional": True},
    {"attention": "mla"},
    {"attention": "sdpa+nope/sdpa"},
]


@pytest.mark.parametrize("settings", STRETCHED)
def test_another_base_halves_the_slowest_frequency_and_leaves_the_fastest(settings):
    model = model_of(head_size=16, **settings)
    names = lines("longer = ", model=model, save_checkpoint=mock.Mock(), checkpoint=mock.Mock())
    for attention, longer in zip(model.attentions, names["longer"].attentions, strict=True):
        if attention.rope is not None:
            before, after = (layer.rope.frequencies()[0][[0, -1]] for layer in (attention, longer))
            close(before / after, torch.tensor([1.0, 2.0]))


def test_two_kinds_of_rotation_have_no_one_base():
    with pytest.raises(ValueError, match="too many values to unpack"):
        lines("longer = ", model=model_of(attention="sdpa/mla"))


@pytest.mark.parametrize("scaling", ["yarn", "llama3"])
@torch.no_grad()
def test_a_longer_model_of_the_same_trained_length_reads_short_texts_alike(scaling):
    model = model_of(head_size=32, rope_scaling=scaling, rope_scaling_factor=4.0)
    tokens, length = torch.randint(99, (1, 40)), round(model.attentions[0].rope.trained)
    for kept in (None, length):
        longer = GPT(replace(model.config, block_size=256, rope_trained_length=kept)).eval()
        longer.load_state_dict(model.state_dict())
        assert torch.allclose(longer(tokens), model(tokens), atol=1e-4) == (kept is not None)


@pytest.mark.parametrize("attention", ["index", "dsa", "index+window/sdpa"])
def test_an_indexer_learns_from_texts_alone_if_padding_on_the_right_is_told(attention):
    window = {"attention_window": 9} if "window" in attention else {}
    model, tokens = model_of(attention=attention, **window).train(), torch.randint(99, (2, 24))
    targets, starts = tokens.roll(-1, 1), torch.zeros(2, 24, dtype=torch.long)
    targets[0, 9:] = -100
    starts[0, 9:] = 24
    weights = [weight for name, weight in model.named_parameters() if "index" in name]

    def gradients(loss):
        return torch.autograd.grad(loss, weights)

    alone = sum(model.loss(tokens[row : row + 1, :n], targets[row : row + 1, :n]) for row, n in enumerate((9, 24)))
    wanted = gradients(alone)
    for gradient, of_texts in zip(gradients(model.loss(tokens, targets, doc_starts=starts)), wanted, strict=True):
        close(gradient, of_texts, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(gradients(model.loss(tokens, targets))[0], wanted[0], atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_of_eight_bits_rounds_each_row_by_its_largest_number_and_keeps_zeros(dtype):
    cache = lines("class RoundedCache", KVCache=KVCache)["RoundedCache"](9)
    rows = torch.randn(2, 3, 5, 8).to(dtype)
    rows[0, 0], rows[0, 1] = 0, rows[0, 1] / 1000
    step = rows.double().abs().amax(-1, keepdim=True) / 127
    wanted = torch.where(step > 0, (rows.double() / step).round() * step, 0)
    close(cache.append(0, "k", rows).double(), wanted, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("settings", [{"position": "alibi"}, {"attention": "sdpa+forget"}, {"attention": "gta+fade"}])
def test_a_prefix_is_refused_beside_a_penalty_that_raises_the_scores_of_later_keys(settings):
    model, tokens = model_of(**settings), torch.randint(99, (1, 20))
    names = dict(modifier=modifier, Modifier=Modifier, lengths=lengths, GPT=GPT, replace=replace)
    with mock.patch.dict(MODIFIERS), pytest.raises(ValueError, match="ALiBi, forget and fade raise the scores of lat"):
        lines("class Prefix", model=model, tokens=tokens, **names)


@pytest.mark.parametrize("attention", ["sdpa+key_offset", "softcap/sdpa+out_norm", "moba/sdpa+nope"])
def test_a_modifier_joins_those_of_each_layer_of_a_model(attention):
    """A text of which the first one hides nothing is read as before."""
    model, tokens = model_of(attention=attention, score_softcap=2.0), torch.randint(99, (1, 32))
    names = dict(modifier=modifier, Modifier=Modifier, lengths=lengths, GPT=GPT, replace=replace)
    parts = {"first": "streaming", "prefix": "reader", "learned_prefix": "tuned"}
    for added, name in parts.items():
        with mock.patch.dict(MODIFIERS):
            made = lines(f'@modifier("{added}"', model=model, tokens=tokens, **names)[name]
        for layer, plain in zip(made.attentions, model.attentions, strict=True):
            assert (layer.form, [*layer.modifiers]) == (plain.form, [*plain.modifiers, added])
            assert (layer.rope is None) == (plain.rope is None)
        if added == "first":
            close(made(tokens), model(tokens))

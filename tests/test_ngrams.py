"""Hashed n-grams at the input: a token reads the same row in every way of reading a text."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import close, random_gpt, settings_of

from common.errors import HuggingFaceError, SettingsError
from interop.huggingface import to_huggingface
from model.attention import AttentionContext
from model.config import GPTConfig
from model.gpt import GPT
from model.ngrams import ngram_hashes
from model.size import count_parameters, count_weights, flops_per_token
from runs.checkpoint import load_checkpoint
from train import train, train_step
from training.optimizer import split_parameters
from training.plan import plan_run

ROOT = Path(__file__).parent.parent
TABLES = {"ngrams": [2, 4], "ngram_rows": 53}


def embedded(model: GPT, text: list[int]) -> torch.Tensor:
    """The tables' sum at each token of a text, computed token by token in Python's integers."""
    sums = []
    for t in range(len(text)):
        hashed, total = 0, torch.zeros(model.config.n_embd)
        for back in range(4):
            hashed = (hashed ^ (text[t - back] + 1 if back <= t else 0)) * 1_540_483_477 % (2**31 - 1)
            if back + 1 in (2, 4):
                total = total + model.ngrams.tables[(2, 4).index(back + 1)].weight[hashed % 53]
        sums.append(total)
    return torch.stack(sums)


def test_a_token_adds_the_row_at_the_hash_of_its_last_ids_for_each_n():
    model, text = random_gpt(**TABLES), torch.randint(61, (12,))
    close(model.ngrams(text[None], AttentionContext())[0], embedded(model, text.tolist()), rtol=0, atol=0)


@torch.inference_mode()
def test_ids_before_the_document_or_the_text_count_as_none():
    model, tokens = random_gpt(**TABLES), torch.randint(61, (2, 9))
    doc_starts = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 7, 7], [0, 1, 2, 2, 2, 2, 2, 2, 2]])
    found = model.ngrams(tokens, AttentionContext(doc_starts=doc_starts))
    for row, ends in enumerate(([0, 3, 7, 9], [0, 1, 2, 9])):
        alone = [embedded(model, tokens[row, a:b].tolist()) for a, b in itertools.pairwise(ends)]
        close(found[row], torch.cat(alone), rtol=0, atol=0)


@pytest.mark.parametrize("top", [2**32 - 2, 2**20])
def test_no_product_leaves_64_bits_and_rows_are_evenly_used(top):
    hashes = ngram_hashes([*torch.randint(top // 2, top, (4, 40_000))])
    for hashed in hashes:
        assert hashed.min() >= 0 and hashed.max() < 2**31  # a product beyond 2^63 would be negative
        rows = torch.bincount(hashed.flatten() % 1000, minlength=1000).double()
        assert ((rows - rows.mean()) ** 2 / rows.mean()).sum() < 1300  # χ² of 999 degrees of freedom
    grid = torch.cartesian_prod(torch.arange(1, 257), torch.arange(1, 257))  # all bigrams of bytes
    assert len(ngram_hashes([*grid.T])[1].unique()) > 65_500


@pytest.mark.long
def test_tables_are_counted_apart_begin_small_and_are_left_to_adamw(train_config):
    config = GPTConfig(vocab_size=61, **TABLES)
    model, plain = GPT(config), GPT(replace(config, ngrams=None))
    parts, C = count_parameters(model), config.n_embd
    assert parts["ngrams"] == 2 * 53 * C and parts.total() - parts["ngrams"] == count_parameters(plain).total()
    assert flops_per_token(model) == flops_per_token(plain)
    assert count_weights(config) == parts.total()
    close(model.ngrams.tables[1].weight.std(), torch.tensor(0.02), rtol=0.05, atol=0)
    assert [id(p) for p in split_parameters(model)["embeddings"][1:]] == [id(p) for p in model.ngrams.parameters()]
    planned = plan_run(train_step, replace(train_config, model=replace(train_config.model, **TABLES), dry_run=True))
    assert "ngrams 3,392" in planned and "(3,392 in tables of n-grams)" in planned


@pytest.mark.slow
def test_a_run_says_what_a_token_reads_and_keeps_the_sizes(train_config, tmp_path, caplog):
    config = replace(train_config, model=replace(train_config.model, **TABLES), sample_tokens=0, max_steps=1)
    caplog.set_level("INFO", "tinygpt")
    train(config)
    assert "in tables of n-grams)" in caplog.text
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "step_1").model.config.ngrams == [2, 4]


def test_hugging_face_has_none_which_is_said_in_a_sentence(tmp_path):
    with pytest.raises(HuggingFaceError, match=r"has no ngrams=\[2,4\]\): train without those of one class"):
        to_huggingface(random_gpt(**TABLES), tmp_path / "out")
    to_huggingface(random_gpt(ngrams=[], ngram_rows=5), tmp_path / "out")


@pytest.mark.parametrize(("typed", "wanted"), [("[2,3,4]", [2, 3, 4]), ("3", [3]), ("null", None), ("[]", None)])
def test_sizes_are_typed_as_a_list(typed, wanted):
    assert settings_of(f"model.ngrams={typed}").model.ngrams == wanted


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("ngrams=[1,2]", "each of model.ngrams=1 must be at least 2"),
        ("ngrams=[2,3,2]", "model.ngrams=[2,3,2] has a size twice: give each once."),
        ("ngrams=[200]", "model.ngrams=[200] has a size above model.block_size=128: give smaller ones."),
        ("ngrams=[two]", "model.ngrams=[two] is not a list of whole numbers, as in '[1,2]', or null"),
        ("ngram_rows=0", "model.ngram_rows=0 must be at least 1"),
    ],
)
def test_a_mistake_is_named_with_its_setting(typed, said):
    with pytest.raises(SettingsError, match=f"^{re.escape(said)}"):
        settings_of(f"model.{typed}")

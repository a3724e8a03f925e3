"""The figures and lists on the pages are those of the code."""

import gzip
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from conftest import PRESETS, preset_settings, random_gpt, some, split_patterns
from test_demo import CONFIGS
from test_faults import CONFIGURATIONS

from data.config import TalesConfig, TokenizerConfig
from data.tales import tales
from data.texts import stdlib_files
from model.attention import FORMS, MODIFIERS, SETTINGS
from model.config import GPTConfig
from model.size import count_parameters, without_weights
from pages import demo
from training.config import TrainConfig
from training.pretrained import MAY_CHANGE_ON_INIT
from training.run import DEFAULT_STEPS

ROOT = Path(__file__).parent.parent
NUMBERS = dict(enumerate(["three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"], 3))


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(name: str, title: str) -> str:
    return page(name).split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_forms_and_modifiers_are_counted_and_listed():
    modifiers = {*SETTINGS, *MODIFIERS}
    assert f"{len(FORMS)} forms and {len(modifiers)} modifiers" in page("README.md")
    tables = section("docs/attention_field.md", "All names").split("| modifier |")
    assert [{*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)} for table in tables] == [{*FORMS}, modifiers]


def test_the_model_and_the_run_of_the_readme_are_the_defaults():
    config = TrainConfig(model=GPTConfig(vocab_size=TokenizerConfig().vocab_size))
    model = without_weights(config.model)
    total = f"{count_parameters(model).total():,} parameters"
    blocks = sum(p.numel() for block in model.blocks for p in block.parameters())
    shape = f"4 blocks of 4 heads (sdpa), {config.model.n_embd} wide"
    assert f"{total}, {blocks:,} of them in {shape}" in page("README.md") and total in page("docs/scaling.md")
    assert f"{DEFAULT_STEPS} steps of {config.batch_size} × {config.model.block_size} tokens" in page("README.md")
    assert f"the default is {DEFAULT_STEPS}\n" in page("docs/training.md")


@pytest.mark.parametrize("preset", some(PRESETS, 3))
def test_a_presets_comment_has_its_size(preset):
    found = re.search(r"([\d.]+)([MB]) parameters (without|with)", page(f"conf/model/{preset}.yaml"))
    parts = count_parameters(without_weights(GPTConfig(vocab_size=50_257, **preset_settings(preset))))
    if found and found[3] == "without":  # embeddings
        del parts["embedding"], parts["lm_head"]
    size = parts.total() / (1e9 if found and found[2] == "B" else 1e6)
    assert found is None or found[1] == (f"{size:.2f}" if found[2] == "B" else f"{size:.0f}")
    assert found or preset in ("tiny", "small")


@pytest.mark.parametrize("name", ["attention", "attention_long", "attention_2048", "scaling"])
def test_an_experiments_runs_are_counted(name):
    text = page(f"conf/experiment/{name}.yaml")
    sweeper = yaml.safe_load(text)["hydra"]["sweeper"]
    values = [str(each).split(",") for each in sweeper["params"].values()]
    runs = math.prod(map(len, values)) * len(sweeper["variants"])
    assert f" {runs} runs, " in text
    said = {"attention": f"in {runs} runs,", "attention_long": f": {runs} runs of", "scaling": f"of the {runs} runs"}
    assert said.get(name, "") in " ".join(page("docs/which_attention.md").split())


def test_the_settings_that_init_from_may_change_are_listed():
    fine_tune = section("docs/training.md", "Fine-tune")
    free = {name.removeprefix("model.") for name in MAY_CHANGE_ON_INIT} - {"dropout", "attention_dropout"}
    assert free <= {*re.findall(r"`(?:model\.)?(\w+)`", fine_tune)} and "both dropouts" in fine_tune


def test_what_a_page_computes_is_listed():
    listed = re.search(r"The page computes softmax attention: .*?; with any", page("docs/generation.md"), re.DOTALL)[0]
    assert {*re.findall(r"`(\w+)`", listed)} == {*demo.FORMS, *demo.MODIFIERS}


def test_the_configurations_of_tests_are_counted():
    text = page("docs/how_it_is_tested.md")
    assert f"random moments, in {NUMBERS[len(CONFIGURATIONS)]} configurations" in text
    assert f"{NUMBERS[len(CONFIGS)]} configurations write the tokens" in text
    assert f"from {NUMBERS[len(split_patterns()) + 1]} tokenizers" in text  # and bytes


def test_the_default_texts_have_the_sizes_of_the_pages():
    stories = "".join(tales(TalesConfig(count=700)))
    assert f"({TalesConfig().count:,}, {len(stories) * 10 / 1e6:.0f} MB)" in page("docs/data.md")
    # The files held out are short ones, of which gzip learns little.
    code = [Path(file).read_bytes() for file in stdlib_files()]
    held_out = b"".join(text for text in code[::3] if len(text) < 13_000)
    assert 8 * len(gzip.compress(held_out)) / len(held_out) == pytest.approx(2.24, abs=0.15)
    assert "gzip      needs 2.24" in page("README.md") and "gzip\nneeds 2.24 for this text" in page("README.md")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic_quantisation_changes_no_module_as_the_page_of_the_library_says():
    model = random_gpt()
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert [type(module) for module in quantised.modules()] == [type(module) for module in model.modules()]

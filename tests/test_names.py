"""A name that a setting may have stands in all places that must know it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import test_demo
import test_gpt
from omegaconf import OmegaConf

import model.config
import model.gpt
import training.config
import training.optimizer
from cli.command import setting_docs
from cli.overrides import CONF
from data.config import SOURCES, TOKENIZERS, VOCABULARIES, DataConfig, TokenizerConfig
from data.tasks import TASKS
from model.config import GPTConfig
from pages import demo
from runs.summary import NUMBERS
from sweeps.leaderboard import COLUMNS, FORMATS

PAGES = Path(demo.__file__).parent


def in_page(table: str, file: str = "gpt.js") -> set[str]:
    """The names of a table in JavaScript, with which lines begin."""
    text = (PAGES / file).read_text(encoding="utf-8")
    body = re.search(rf"^const {table} = \{{\n(.*?)^\}};", text, re.M | re.S)[1]
    return {*re.findall(r"^  (\w+)[:,]", body, re.M)}


def in_conf(group: str, key: str) -> set[str]:
    """The presets of a group, each with the name that it gives to `key` unless that is its own."""
    options = {file.stem: OmegaConf.load(file) for file in (CONF / group).glob("*.yaml")}
    # Some presets of data bring a model's and a run's settings too.
    named = {name: option.get("data", option).get(key, name) for name, option in options.items()}
    return {name if name == given else f"{name}.yaml with {key}={given}" for name, given in named.items()}


def in_help(schema: type, field: str) -> set[str]:
    """The names that the first sentence of a field's docstring lists: a, b (why) or c."""
    text = setting_docs(schema)[field]
    while (without := re.sub(r" ?\([^()]*\)", "", text)) != text:  # the innermost parentheses first
        text = without
    sentence = text.split(".")[0]
    return {part for part in re.split(", | or ", sentence.rpartition(": ")[2]) if part.isidentifier()}


def in_configs(configs, field: str) -> set[str]:
    return {config.get(field, getattr(GPTConfig, field)) for config in configs}


DEMOS = test_demo.CONFIGS.values()
# {choice: {place: its names}}
CHOICES = {
    "optimizer": {
        "OPTIMIZERS of training/config.py": training.config.OPTIMIZERS,
        "OPTIMIZERS of training/optimizer.py": training.optimizer.OPTIMIZERS,
        "conf/optimizer": in_conf("optimizer", "name"),
        "the docstring of OptimizerConfig.name": in_help(training.config.OptimizerConfig, "name"),
    },
    "schedule": {
        "SCHEDULES of training/config.py": training.config.SCHEDULES,
        "SCHEDULES of training/optimizer.py": training.optimizer.SCHEDULES,
        "conf/schedule": in_conf("schedule", "name"),
        "the docstring of ScheduleConfig.name": in_help(training.config.ScheduleConfig, "name"),
    },
    "norm": {
        "NORMS of model/config.py": model.config.NORMS,
        "NORMS of model/gpt.py": model.gpt.NORMS,
        "NORMS of pages/gpt.js": in_page("NORMS"),
        "the docstring of GPTConfig.norm": in_help(GPTConfig, "norm"),
        "VARIANTS of tests/test_gpt.py": in_configs(test_gpt.VARIANTS, "norm"),
        "CONFIGS of tests/test_demo.py": in_configs(DEMOS, "norm"),
    },
    "MLP": {
        "MLPS of model/config.py": model.config.MLPS,
        "MLPS of model/gpt.py": model.gpt.MLPS,
        "MLPS of pages/gpt.js": in_page("MLPS"),
        "the docstring of GPTConfig.mlp": in_help(GPTConfig, "mlp"),
        "VARIANTS of tests/test_gpt.py": in_configs(test_gpt.VARIANTS, "mlp"),
        "CONFIGS of tests/test_demo.py": in_configs(DEMOS, "mlp"),
    },
    "position": {
        "POSITIONS of model/config.py": model.config.POSITIONS,
        "the docstring of GPTConfig.position": in_help(GPTConfig, "position"),
        "CONFIGS of tests/test_demo.py": in_configs(DEMOS, "position"),
    },
    "scaling of RoPE": {
        "ROPE_SCALINGS of model/config.py": model.config.ROPE_SCALINGS,
        "the docstring of GPTConfig.rope_scaling": in_help(GPTConfig, "rope_scaling"),
        "CONFIGS of tests/test_demo.py": in_configs(DEMOS, "rope_scaling"),
    },
    "modifier": {
        "MODIFIERS of pages/demo.py": {*demo.MODIFIERS},
        "MODIFIERS of pages/gpt.js": in_page("MODIFIERS") | {"window", "nope"},  # which are settings of its layers
    },
    "attention": {
        "FORMS and MODIFIERS of pages/demo.py": {*demo.FORMS, *demo.MODIFIERS},
        "CONFIGS of tests/test_demo.py": {
            name for config in DEMOS for name in re.split(r"[+/]", config.get("attention", "sdpa"))
        },
    },
    "source": {
        "SOURCES of data/config.py": SOURCES,
        "conf/data": in_conf("data", "source"),
        "the docstring of DataConfig.source": in_help(DataConfig, "source"),
    },
    "task": {"VOCABULARIES of data/config.py": {*VOCABULARIES}, "TASKS of data/tasks.py": {*TASKS}},
    "tokenizer": {
        "TOKENIZERS of data/config.py": TOKENIZERS,
        "conf/tokenizer": in_conf("tokenizer", "name"),
        "the docstring of TokenizerConfig.name": in_help(TokenizerConfig, "name"),
    },
    "format of a column": {
        "FORMATS of sweeps/leaderboard.py": {*FORMATS},
        "formats of pages/runs.html": in_page("formats", "runs.html"),
        "COLUMNS of sweeps/leaderboard.py": {column.format for column in COLUMNS},
    },
}


@pytest.mark.parametrize("choice", CHOICES)
def test_each_place_knows_every_name_that_another_does(choice):
    places = CHOICES[choice]
    known = {name for names in places.values() for name in names}
    lacking = [f"{place} lacks {name}" for place, names in places.items() for name in sorted(known.difference(names))]
    assert not lacking, "\n".join(lacking)


def test_each_column_shows_a_number_of_summary():
    lacking = {column.field for column in COLUMNS}.difference(NUMBERS)
    assert not lacking, f"COLUMNS of sweeps/leaderboard.py has {lacking}, which Summary lacks"

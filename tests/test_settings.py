"""Settings: typed values reach the dataclass; a mistake is one sentence with its remedy."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path, PureWindowsPath
from types import NoneType
from typing import Any, get_args, get_origin
from unittest import mock

import numpy as np
import pytest
import yaml
from conftest import settings_of, some
from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.command import FIRST, answer, described, first_sentence, help_text, setting_docs
from cli.composition import compose_settings, composing, explain, of_search, remedy_for_option, sweep, to_settings
from cli.composition import register_schema as register
from cli.hydra_command import group_options, start
from cli.overrides import CONF, GROUPS, SWEEP, check_typed, check_wandb_sweep
from cli.with_torch import inherited_settings
from common.aliases import ALIASES, ALIASES_BESIDE, NAMES, NAMES_BESIDE, OPTIONS, VALUES
from common.errors import CheckpointError, SettingsError, format_value
from common.mistakes import sentence_for
from common.settings import (
    build,
    from_arguments,
    in_our_words,
    parse_overrides,
    read_value,
    setting_hints,
    settings_in,
    unknown_setting,
)
from common.text import flat, hydra_quoted, seen_from_here, without_escapes
from data.config import VOCABULARIES, DataConfig, TalesConfig, TaskConfig, TokenizerConfig
from eval import EvalConfig
from export import ExportConfig
from generation.config import SampleConfig, SamplingParams, TextConfig
from model.attention.registry import check_names
from model.config import AttentionConfig, GPTConfig
from sweeps.hydra_versions import IS_1_3
from training.config import OptimizerConfig, PlanConfig, ScheduleConfig, TrainConfig, WandbConfig
from training.device import choose_device
from training.optimizer import schedule_factor

SCHEMAS = {"train.py": TrainConfig, "sample.py": SampleConfig, "eval.py": EvalConfig, "export.py": ExportConfig}
NAMES_OF = {
    script: [*(GROUPS if script == "train.py" else []), *setting_hints(schema)] for script, schema in SCHEMAS.items()
}
TEXTS = ["Hello, world", "def read(self", "it's", "a=b", "'", 'say "hi" and "ho"', "a\nb\n", "C:\\new\\", 'a\\"b']
TEXTS += ["x\\\n", "${x}", "\\${x}", "${", "$5", "日本 😀", "", "  two", "true", "1e3", "[a", "[a]", "--x", "???", "{a"]


def composed(*typed: str) -> TrainConfig:
    """The settings of `python train.py`; in a sweep those checked before Hydra makes its jobs."""
    arguments = [argument for argument in typed if argument not in SWEEP]
    check_typed(parse_overrides(arguments, NAMES_OF["train.py"]), is_sweep := len(arguments) < len(typed))
    inherited, values = inherited_settings(parse_overrides(arguments))
    register(inherited)
    try:
        if not is_sweep:
            return compose_settings(values)
        with composing():
            return to_settings(compose("train", arguments))
    finally:
        register({})


def mistake(*typed: str) -> str:
    """The sentence that answers these arguments of train.py."""
    with pytest.raises(Exception) as raised:
        composed(*typed)
    sentence = sentence_for(raised.value) or explain(raised.value)
    assert sentence, raised.value
    return sentence


# What is typed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    some(
        [
            "optimizer.embedding_lr",
            "model.n_kv_head",
            "max_minutes",
            "init_from",
            "resume",
            "data.subset",
            "wandb.group",
        ],
        4,
    ),
)
def test_none_as_a_sweep_by_wandb_types_it_is_null(name):
    assert composed(f"{name}=None") == composed(f"{name}=null")
    assert mistake("batch_size=None").startswith("batch_size=None is not a whole number: correct it")
    assert composed("sample_prompt=None").sample_prompt == "None"  # a text, which may be any


@pytest.mark.parametrize(
    ("argument", "setting", "value"),
    [("temperature=-1", "temperature", "-1"), ("top_p=0", "top_p", "0"), ("seed=a=b", "seed", "a=b")],
)
def test_a_mistake_carries_its_setting_for_which_the_default_is_the_remedy(argument, setting, value):
    with pytest.raises(SettingsError) as raised:
        from_arguments(SampleConfig, [argument])
    error = raised.value
    assert (error.setting, error.value, error.problem) == (setting, value, f"{argument} {error.fault}")
    default = format_value(getattr(SampleConfig(), setting))
    assert error.remedy.removesuffix(".0") == f"correct it, or leave it out for {setting}={default}"


@pytest.mark.parametrize(
    ("typed", "left_out"),
    [
        ("optimizer=adamw optimizer.lr=x", " for optimizer.lr=0.001"),
        ("-m model=gpt2 model.n_layer=0", ""),
    ],
)
def test_what_a_setting_is_if_it_is_left_out_is_told_of_the_options_beside_it(typed, left_out):
    assert mistake(*typed.split()).endswith(f": correct it, or leave it out{left_out}.")


@pytest.mark.parametrize(
    ("schema", "name", "word", "typed"),
    [
        (TrainConfig, "keep_checkpoints", "all", 1000000),
        (TrainConfig, "keep_checkpoints", "null", 1000000),
        (TrainConfig, "eval_interval", "never", 1000000),
        (TrainConfig, "seed", "Random", "$RANDOM"),
        (SampleConfig, "seed", "random", "$RANDOM"),
        (SampleConfig, "max_new_tokens", "inf", 100000),
        (SampleConfig, "top_k", "all", None),
        (TrainConfig, "eval_tokens", "all", 1000000000),
    ],
)
def test_a_word_in_place_of_a_number_has_the_remedy_of_a_number_below_all(schema, name, word, typed):
    remedies = []
    for value in (word, "-1"):
        with pytest.raises(SettingsError) as raised:
            from_arguments(schema, [f"{name}={value}"])
        remedies.append(raised.value.remedy)
    assert remedies[0] == remedies[1] and (str(typed) if typed else "leave it out") in remedies[0]
    if typed and typed != "$RANDOM":
        assert getattr(from_arguments(schema, [f"{name}={typed}"]), name) == typed
    with pytest.raises(SettingsError, match="correct it, or leave it out"):  # this one has no meaning without a limit
        from_arguments(TrainConfig, ["batch_size=all"])


def test_a_number_with_a_unit_and_a_truth_of_digits_are_answered_with_what_to_type():
    for typed, ours in {
        "max_steps=10k": "10000",
        "max_steps=1.5M": "1500000",
        "data.val_fraction=5%": "0.05",
        "max_flops=2B": "2000000000",
        "dry_run=1": "true",
        "model.bias=0": "false",
    }.items():
        name = typed.partition("=")[0]
        with pytest.raises(SettingsError) as refused:
            from_arguments(TrainConfig, [typed])
        assert refused.value.remedy == f"write {name}={ours}"
        from_arguments(TrainConfig, [f"{name}={ours}"])
    for typed in ("max_steps=10m", "checkpoint_interval=1h", "max_steps=10%", "dry_run=2"):
        with pytest.raises(SettingsError, match=": correct it"):
            from_arguments(TrainConfig, [typed])


def test_the_words_of_a_sentence_choose_no_remedy(monkeypatch):
    refused = mock.Mock(side_effect=SettingsError("temperature=2 is odd"))
    monkeypatch.setattr(SampleConfig, "__post_init__", refused)
    with pytest.raises(SettingsError, match=r"^temperature=2 is odd\.$"):
        from_arguments(SampleConfig, [])


@pytest.mark.slow
def test_the_commands_defaults_are_the_dataclasses():
    assert composed() == settings_of("model=tiny", "data=stdlib", "optimizer=muon") == TrainConfig()
    assert from_arguments(SampleConfig, []) == SampleConfig()


@pytest.mark.slow
@pytest.mark.parametrize("group", sorted({path.parent.name for path in CONF.glob("*/*.yaml")}))
def test_every_option_of_every_group_is_a_valid_configuration(group):
    for path in (CONF / group).glob("*.yaml"):
        needs = "data.name=x" if path.stem == "hf" else "data.path=x"
        is_whole = group != "data" or path.stem in ("stdlib", "tales", "shakespeare", *VOCABULARIES)
        composed("dry_run=true", f"{group}={path.stem}", *[] if is_whole else [needs])


@pytest.mark.slow
def test_options_change_what_they_name_and_nothing_else():
    adamw, cosine = settings_of("optimizer=adamw").optimizer, settings_of("schedule=cosine").schedule
    assert (adamw.lr, adamw.embedding_lr, adamw.lm_head_lr, adamw.weight_decay) == (1e-3, None, None, 0.1)
    assert (cosine.warmup_steps, cosine.final_factor) == (None, 0.1)
    assert composed("data.path=notes.txt").data.source == "files"
    few = composed("+experiment=shakespeare_cpu", "max_steps=9")
    assert (few.max_steps, few.model.block_size) == (9, 64)


def test_a_short_name_selects_the_attention_spaces_and_all():
    for config in (composed("attention=sdpa + gate / delta", "model=gpt2"), TrainConfig(attention="sdpa+gate/delta")):
        assert (config.model.attention, config.attention) == ("sdpa+gate/delta", None)


@pytest.mark.parametrize("text", some(TEXTS, 6))
def test_a_text_is_what_was_typed(text):
    assert from_arguments(SampleConfig, [f"prompt={text}"]).prompt == text
    assert composed(f"sample_prompt={text}", f"data.path=x{text}").sample_prompt == text
    (word,) = shlex.split(hydra_quoted("sample_prompt", text))  # what is printed to be pasted
    assert word == f"sample_prompt={text}"


@pytest.mark.slow
@pytest.mark.parametrize("path", [r"C:\texts\a.txt", r"C:\new\my texts\b.txt", "D:\\texts\\"])
def test_a_path_of_windows_is_what_was_typed_and_is_told_with_slashes(path):
    assert composed(f"data.path={path}").data.path == path
    assert composed("-m", f"data.path={path}").data.path == path
    (word,) = shlex.split(hydra_quoted("resume", PureWindowsPath(path)))
    assert word == f"resume={PureWindowsPath(path).as_posix()}"


def test_a_path_on_another_drive_is_told_whole(monkeypatch):
    assert seen_from_here(Path.cwd() / "a" / "b") == str(Path("a/b"))
    monkeypatch.setattr(os.path, "relpath", mock.Mock(side_effect=ValueError("path is on mount 'C:'")))
    assert seen_from_here(Path("/a/b")) == str(Path("/a/b"))


@given(text=st.text())
@settings(max_examples=60)
def test_a_text_of_any_characters_is_what_was_typed(text):
    text = text.rstrip("\r")  # of a script's line
    assert from_arguments(SampleConfig, [f"prompt={text}"]).prompt == text
    (word,) = shlex.split(hydra_quoted("hydra.sweep.dir", f"x{text}"))
    read = OverridesParser.create().parse_override(word).value()
    assert re.sub(r"(\\*)\1\\\$\{", r"\1${", read) == f"x{text}" or "${" in text


def test_what_is_not_text_is_read_by_its_type():
    typed = ["top_k=null", "checkpoint=null", "temperature=1e-3", "interactive=True", "max_new_tokens=1e2"]
    read = from_arguments(SampleConfig, [*typed, 'stop=["\\n\\n", "${x}", no, 1]'])
    assert read.stop == ["\n\n", "${x}", "no", "1"] and (read.top_k, read.checkpoint) == (None, None)
    assert (read.temperature, read.interactive, read.max_new_tokens) == (1e-3, True, 100)
    assert from_arguments(SampleConfig, ["stop=END"]).stop == ["END"]
    for typed, stop in {
        r"stop=\n\n": "\n\n",
        r"stop=\end{x}": r"\end{x}",
        r"stop=\\n": r"\n",
        r"stop=a\x0c\u00e9": "a\fé",
    }.items():
        again = from_arguments(SampleConfig, ["seed=3"], from_arguments(SampleConfig, [typed]))
        assert again.stop == [stop], "escapes are read once"
    assert from_arguments(EvalConfig, ["data.path=null", "stride=3"]) == EvalConfig(stride=3)
    assert from_arguments(SampleConfig, ["seed=3"], read).temperature == 1e-3  # on top of others
    numbers = ["max_steps=1e3", "max_flops=1e3", "batch_size=16.0", "grad_clip=2"]
    many = composed(*numbers, "dry_run=on", "wandb.tags=[a, 5]")
    assert (many.max_steps, many.max_flops, many.batch_size, many.dry_run) == (1000, 1000.0, 16, True)
    assert many.wandb.tags == ["a", "5"] and isinstance(many.grad_clip, float)


def test_a_value_is_shown_as_it_is_typed():
    values = {None: "null", True: "true", 2.0: "2", 0.1: "0.1", math.nan: "nan", 1e-06: "1e-06", 7: "7", "a.0": "a.0"}
    assert {value: format_value(value) for value in values} == values and format_value(["a", 1]) == "[a,1]"


# Mistakes

AT_LEAST_1 = ("batch_size", "micro_batch_size", "eval_batch_size", "max_steps", "max_skipped_steps", "keep_checkpoints")
AT_LEAST_1 += ("log_interval", "eval_interval", "checkpoint_interval")
WRONG = [
    (OptimizerConfig, dict(name="sgd"), "optimizer.name=sgd is not known: choose one of muon, adamw"),
    (OptimizerConfig, dict(lr=math.nan), "optimizer.lr=nan must be finite and above 0"),
    (OptimizerConfig, dict(lr=0.0), "optimizer.lr=0 must be finite and above 0"),
    (OptimizerConfig, dict(embedding_lr=-1.0), "optimizer.embedding_lr=-1 must be"),
    (OptimizerConfig, dict(lm_head_lr=math.inf), "optimizer.lm_head_lr=inf must be"),
    (OptimizerConfig, dict(momentum=1.0), "optimizer.momentum=1 must be at least 0 and below 1"),
    (OptimizerConfig, dict(beta1=1.0), "optimizer.beta1=1 must be at least 0 and below 1"),
    (OptimizerConfig, dict(beta2=-0.1), "optimizer.beta2=-0.1 must be"),
    (OptimizerConfig, dict(weight_decay=math.nan), "optimizer.weight_decay=nan must be finite and at least 0"),
    (ScheduleConfig, dict(name="none"), "schedule.name=none is not known"),
    (ScheduleConfig, dict(warmup_steps=-1), "schedule.warmup_steps=-1 must be at least 0"),
    (ScheduleConfig, dict(decay_fraction=2.0), "schedule.decay_fraction=2 must be at least 0 and at most 1"),
    (ScheduleConfig, dict(final_factor=1.5), "schedule.final_factor=1.5 must be at least 0 and at most 1"),
    (WandbConfig, dict(mode="on"), "wandb.mode=on is not known: choose one of disabled, offline, online"),
    *((TrainConfig, {name: 0}, f"{name}=0 must be at least 1") for name in AT_LEAST_1),
    *((TrainConfig, {name: 0.0}, f"{name}=0 must be finite and above 0") for name in ("max_minutes", "max_flops")),
    *((TrainConfig, {n: "x"}, f"{n}=x is not known") for n in ("precision", "compile", "recompute")),
    (TrainConfig, dict(sample_tokens=-1), "sample_tokens=-1 must be at least 0"),
    (DataConfig, dict(val_fraction=0.0), "data.val_fraction=0 must be above 0: to train on the whole text, give"),
    (TrainConfig, dict(grad_clip=math.nan), "grad_clip=nan must be finite and at least 0"),
    (TrainConfig, dict(seed=-1), "seed=-1 must be from 0 to 2^63 - 1"),
    (TrainConfig, dict(seed=2**63), f"seed={2**63} must be"),
    (TrainConfig, dict(resume="a", init_from="b"), "resume=a and init_from=b are both given: choose one"),
    (
        TrainConfig,
        dict(attention="sdpa", model=GPTConfig(attention="loop")),
        "attention=sdpa and model.attention=loop are",
    ),
    (EvalConfig, dict(stride=0), "stride=0 must be at least 1"),
    (EvalConfig, dict(precision="bf17"), "precision=bf17 is not known"),
    (ExportConfig, {}, "to= is needed: give to=FOLDER for Hugging Face, or to=demo.html for a page"),
    (ExportConfig, dict(to="demo.PDF"), "to=demo.PDF is no page and no folder: give its name the ending .html"),
    (ExportConfig, dict(to="my.tar.gz"), "to=my.tar.gz is no page and no folder: give its name the ending .html, or"),
    (SampleConfig, dict(results="a.CSV"), "results=a.CSV gets JSON lines: give its name the ending .jsonl; docs/"),
    (ExportConfig, dict(to="my.onnx"), "or none; docs/library.md has the lines that make an ONNX file"),
    (ExportConfig, dict(to="my.mlpackage"), "to=my.mlpackage is no page and no folder"),
    (ExportConfig, dict(to="x", checkpoint="a", import_from="b"), "checkpoint=a and import_from=b are both given"),
]


@pytest.mark.parametrize(("ending", "line"), [("onnx", "torch.onnx.export("), ("gguf", "convert_hf_to_gguf.main()")])
def test_the_page_that_is_named_for_a_format_has_its_lines(ending, line):
    with pytest.raises(SettingsError) as refused:
        ExportConfig(to=f"my.{ending}")
    for remedy in (refused.value.remedy, unknown_setting(ending, NAMES_OF["export.py"]).remedy):
        page = re.search(r"docs/\w+\.md", remedy)[0]
        assert line in (CONF.parent / page).read_text("utf-8")


def test_the_ending_of_a_page_is_read_in_large_letters_too_and_a_dot_in_a_folders_name_is_no_ending():
    assert ExportConfig(to="Demo.HTML").is_page and not ExportConfig(to="tales-1.5b").is_page
    assert SampleConfig(results="a.json").results == "a.json"


@pytest.mark.parametrize(("schema", "values", "said"), WRONG, ids=[said[:40].replace("/", "") for _, _, said in WRONG])
def test_a_value_that_cannot_be_is_named_with_its_setting(schema, values, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        schema(**values)


# Settings for which an empty text, as of a variable that the shell has not, means nothing.
MEANINGLESS = ("run_dir", "resume", "init_from", "data.path", "data.cache_dir", "wandb.name", "model", "max_steps")
TYPED = {  # what is typed behind train.py, and what is answered
    "model.n_heads=8": "there is no setting model.n_heads: here it is model.n_head",
    "optimiser=adamw": "there is no setting optimiser: did you mean optimizer",
    "lr=0.1": "there is no setting lr: here it is optimizer.lr (the peak rate, of Muon; optimizer=adamw takes",
    "+foo=1": "there is no setting foo: --help all lists them",
    "data.path.x=3": "there is no setting data.path.x: did you mean data.path?",
    "-m hydra.foo=1": "hydra.foo=1 is no setting of a sweep: leave it out",
    "hydra.run.dir=a": "hydra.run.dir=a has no effect here: run_dir=FOLDER names the folder of a run",
    "hydra.mode=MULTIRUN": "hydra.mode=MULTIRUN is for sweeps: type -m in its place",
    "hydra.job.num=3": "hydra.job.num=3 is for sweeps: leave it out",
    "-m hydra.launcher=joblib": "would take the place of all its settings: type hydra/launcher=joblib.",
    "-m hydra.sweeper=decide,grid": "place of all its settings: type hydra/sweeper=decide,grid.",
    "-m hydra/launcher=joblib hydra/launcher.n_jobs=2": "slash, which is for options: type hydra.launcher.n_jobs=2.",
    "-m hydra/sweeper/delta=1": "hydra/sweeper/delta=1 has a slash, which is for options: type hydra.sweeper.delta=1.",
    "-m hydra.sweep=a": "hydra.sweep=a would take the place of all its settings: type hydra.sweep.dir=a.",
    "-m hydra.sweeper=null": "hydra.sweeper=null would take the place of all its settings: leave it out.",
    "launcher=joblib": "there is no setting launcher: python train.py -m hydra/launcher=joblib hydra.launcher.n_jobs=2",
    "sweeper=decide": "there is no setting sweeper: python train.py -m hydra/sweeper=decide compares variants; docs/",
    "hydra.sweep.dir=a": "hydra.sweep.dir=a is for sweeps: add -m; run_dir= names",
    "data.val_fraction=-1": "give another for validation by data.val_path=FILE instead.",
    "data=recall data.val_fraction=0": "correct it, or leave it out for data.val_fraction=null.",
    "data.val_path=a data.val_fraction=-1": "correct it, or leave it out for data.val_fraction=null.",
    "model=a/b": "init_from=hf:NAME",
    "max_steps=10,000": "several values for one run: write max_steps=10000, or add -m to train with each",
    **{
        f"hydra{name}": f"hydra{name} is for sweeps: leave it out: Hydra writes no file and no log of its own for a run"
        for name in (
            "/job_logging=disabled",
            "/hydra_logging=none",
            ".output_subdir=null",
            ".verbose=true",
            ".output=false",
        )
    },
    "run_dir=${oc.env:RUNS}/a": """type the value, or add -m; the shell puts in a variable: run_dir="$RUNS/a\"""",
    "seed=${oc.env:RANK,3}": """; the shell puts in a variable: seed="${RANK:-3}\"""",
    "run_dir=a/${now:%F}": """type the value, or add -m; the shell puts in the time: run_dir="a/$(date '+%F')\"""",
    "run_dir=lr-${optimizer.lr}": "run_dir=lr-${optimizer.lr}: ${…} has a value in sweeps alone: type the value",
    "wandb.name=${hydra:job.name}": "${…} has a value in sweeps alone: type the value, or add -m.",
    "model.n_head=many": "model.n_head=many is not a whole number",
    "max_steps=1.5": "max_steps=1.5 is not a whole number, or null",
    "max_steps=+50": "max_steps=+50 is not a whole number, or null: write the sum, without +",
    "checkpoint_interval=10m": "checkpoint_interval=10m is not a whole number of steps: correct it",
    "gpu=0": "here it is device (cuda:1 is the second GPU; docs/hardware.md chooses several)",
    "max_hours=1": "here it is max_minutes (60 for an hour of training)",
    "pruner=median": "here it is patience (it ends a run by its own losses; docs/sweeps.md trains the best",
    "output=false": "here it is run_dir",
    "save_every_minutes=10": "here it is checkpoint_interval (a number of steps; dry_run=true prints",
    "optimizer.lr=fast": "optimizer.lr=fast is not a number",
    "model.qk_norm=maybe": "model.qk_norm=maybe is not true or false",
    "seed=true": "seed=true is not a whole number",
    "seed=null": "seed=null is not a whole number: seed=$RANDOM, in bash, is another one each time",
    "data.val_fraction=2": "must be above 0 and at most 0.5: correct it, or leave it out for data.val_fraction=null",
    "model=/etc/passwd": "model=/etc/passwd does not exist: choose model from gpt2",
    "tokenizer=char": "tokenizer=char does not exist: choose tokenizer=byte (one token a byte, so a letter",
    "tokenizer=my/tokenizer.json": "; a file of another tokenizer is read only with its model, by init_from=hf:FOLDER",
    "schedule=cosine_with_restarts": "does not exist: choose schedule=warmup_stable_decay (docs/training.md begins",
    "schedule=cosine schedule.T_0=10": "here it is schedule (warmup_stable_decay, of which docs/training.md begins",
    "learning_rate_min_factor=0.5": "here it is schedule.final_factor (the last rate as a share of the peak).",
    "schedule=cosine min_lr_rate=0.1": "here it is schedule.final_factor",
    "cosine_min_lr_ratio=0.1": "here it is schedule.final_factor",
    "patience_epochs=5": "here it is patience (the number of evaluations without a better loss).",
    "restore_best_weights=true": "here it is keep_checkpoints (the best is kept besides, and sample.py takes it).",
    "early_stopping_metric=val_acc": "here it is keep_checkpoints (the best, which is kept besides, is that",
    "schedule=Linear": "schedule=Linear does not exist: choose schedule=warmup_stable_decay (",
    "model=gpt2-xl": "model=gpt2-xl does not exist: choose model=gpt2_xl (",
    "-m hydra/launcher=x": "hydra/launcher=x does not exist: choose hydra/launcher from",
    "model=huge": "model=huge does not exist: choose model from gpt2",
    "+experiment=nope": "experiment=nope does not exist: choose experiment from",
    "experiment=Heads": "experiment=Heads does not exist: did you mean experiment=heads.",
    "optimizer=conf/optimizer/adamw.yaml": "conf/optimizer/adamw.yaml does not exist: did you mean optimizer=adamw.",
    "-m optimizer=sgd": "optimizer=sgd does not exist: choose optimizer from adamw, muon",
    "-m experiment=[heads,nope]": "experiment=nope does not exist: choose experiment from attention",
    "model={0}": "model={0} has settings in braces: type each setting as model.NAME=VALUE",
    "-m optimizer={1:2}": "optimizer={1:2} has settings in braces: type each setting as optimizer.NAME=VALUE",
    "-m model={n_layer:1,n_embd:16},{n_layer:2}": 'variants=["model.n_layer=1 model.n_embd=16", "model.n_layer=2"]',
    "model=small,tiny": "model=small,tiny is several values for one run: add -m",
    "attention=sdpa,loop": "attention=sdpa,loop is several values for one run: add -m",
    "seed=1,2": "seed=1,2 is several values for one run: add -m",
    "model.n_inner=[8,16]": "type -m model.n_inner=8,16 to train with each; all layers of a model have the same.",
    "-m model.n_inner=[8,16],[16,8]": "=8,16,16,8 to train with each; all layers of a model have the same.",
    "attention=[sdpa,loop]": "to train with each; attention=sdpa/loop has them in turns, layer by layer.",
    "mlp_size_layerlist=[8,16]": "here it is model.n_inner (one for all layers; docs/library.md has a model with parts",
    "seed=1, -m": "cannot read the override 'seed=1,': leave out the last comma, as in seed=1.",
    "-m optimizer=adamw,muon,": "leave out the last comma, as in optimizer=adamw,muon.",
    "-m hydra/sweeper/sampler=tpe": "hydra/sweeper/sampler has no effect here: add hydra/sweeper=optuna, or leave",
    "-m +hydra/launcher=joblip": "hydra/launcher=joblip does not exist: choose hydra/launcher from basic, ",
    "-m hydra.sweeper.params={seed:[1,}": "type the values of each setting, as in seed=1,2.",
    **{
        f"-m hydra{each}": f"hydra{each} is no setting of a sweep: leave it out, for the terminal and train.log have"
        for each in ("/job_logging=disabled", "/hydra_logging=default", ".job_logging.version=1", ".verbose=null")
    },
    **{
        f"-m hydra.{each}": f"hydra.{each} is no setting of a sweep: leave it out."
        for each in ("launcher._target_=abc", "callbacks.sweeps=null", "mode=RUN", "overrides.task=[1]", "job.num=0")
    },
    "-m hydra/env=default": "hydra/env=default is no setting of a sweep: leave it out.",
    "-m +hydra.x=1": "hydra.x=1 is no setting of a sweep: leave it out, or type its part of Hydra too, as in hydra.sw",
    "-m hydra.n_trials=3": "as in hydra.sweeper.n_trials or hydra.launcher.n_trials.",
    "-m hydra.sampler.seed=1": "as in hydra.sweeper.sampler.seed or hydra.launcher.sampler.seed.",
    "-m hydra.swep.dir=x": "hydra.swep.dir=x is no setting of a sweep: did you mean hydra.sweep.dir?",
    "-m hydra/lancher=joblib": "hydra/lancher=joblib is no setting of a sweep: did you mean hydra/launcher?",
    "-m hydra/launcher=[joblib]": "hydra/launcher=[joblib] is no option: leave it out, or type one option without br",
    "-m experiment={a:1}": "experiment={a:1} is no option: leave it out, or type one option without brackets.",
    "-m experiment=[heads,null]": "experiment=[heads,null]: null is no option of experiment: leave it out, or name",
    "-m hydra.job.env_copy=[HOME,NOPE_1]": "has a variable that is not set: set NOPE_1 before the command, or leave it",
    "-m hydra.callbacks=[1]": "): correct it, or leave it out.",
    "-m hydra.searchpath=[http://x]": "hydra.searchpath has a folder that Hydra cannot read: type --config-dir=FOLDER.",
    "-m seed=rang(1,3)": "ranges are choice(2,4,8)",
    "-m optimizer.lr=zip(0.1,0.2)": "write the pairs as variants, as in 'hydra.sweeper.variants=[\"model.n_embd=64 ",
    "-m hydra/sweeper=optuna": "hydra/sweeper=optuna does not exist: pip install hydra-optuna-sweeper.",
    "-m sample_prompt=it's": "kinds of quotes, as in 'data.path=\"notes (1).txt\"', on Windows \"data.path='notes (1)",
    "-m model.n_kv_head=sort(null,1)": "sort takes no null: list the values, as in model.n_kv_head=null,1.",
    "-m model.n_kv_head=shuffle(choice(2,null))": "choice takes no null: list the values, as in model.n_kv_head=2,null",
    "-m optimizer.lr=loguniform(1e-4,1e-1)": "list values, as in optimizer.lr=A,B; hydra/sweeper=optuna draws values",
    "-m optimizer.lr=logrange(-4,-2,3)": "list values, as in optimizer.lr=A,B; hydra/sweeper=optuna draws values",
    "-m optimizer.lr=np.logspace(-4,-2,3)": "list values, as in optimizer.lr=A,B; hydra/sweeper=optuna draws values",
    "-m optimizer.lr=10**range(-4,-2)": "list values, as in optimizer.lr=A,B; ranges are choice(2,4,8) and range(1,5)",
    "-m hydra/sweeper=random": "choose hydra/sweeper from basic, decide, grid; hydra/sweeper=optuna draws values",
    "-m hydra.job.env_set.A=1": "hydra.job.env_set.A is new to Hydra: type +hydra.job.env_set.A=VALUE.",
    "+hydra.job.env_set.A=1": "hydra.job.env_set.A=1 is for sweeps: type A=1 before the command.",
    "-m hydra/sweeper=decide hydra.sweeper.max_pair=5": "no setting hydra.sweeper.max_pair: hydra.sweeper has base",
    "-m hydra.sweeper.study_name=x": "hydra.sweeper.study_name has no effect here: add hydra/sweeper=optuna, or leave",
    "-m hydra.sweeper.max_batch_size=2": "max_batch_size: python train.py -m hydra/launcher=joblib hydra.launcher",
    "-m hydra/launcher=joblib hydra.launcher.inner_max_num_threads=2": "threads: OMP_NUM_THREADS=2 before the command",
    "-m hydra.launcher.timeout=60": "hydra.launcher.timeout has no effect here: add hydra/launcher=joblib, or leave it",
    "-m hydra.sweeper.n_trials=5": "hydra.sweeper.n_trials has no effect here: add hydra/sweeper=optuna",
    "wandb.tags=a,b": "wandb.tags has the one tag 'a,b': write wandb.tags='[a,b]'",
    "seed=${foo}": "seed=${foo}: ${…} has a value in sweeps alone",
    "data.path=${HOME}/x +experiment=ladder": "many runs are asked for, and one would be made: add -m",
    "attention=matmul model.attention=loop": "attention=matmul and model.attention=loop are both given",
    "attention=mla model.qk_norm=false": "model.qk_norm=false has no effect with attention=mla: leave it",
    **{
        f"attention={form} model.position=pope": f"model.position=pope has no effect with attention={form}: leave it"
        for form in ("average", "linear", "delta", "wall/short_conv", "sdpa+nope", "wall/sdpa+nope")
    },
    "attention=sdpa+nope model.rope_theta=5": "model.rope_theta=5 has no effect with attention=sdpa+nope: leave it",
    "data=recall data.path=x": "data.path=x has no effect with data=recall: leave it",
    "data=recall tokenizer=byte": "tokenizer=byte has no effect with data=recall: leave it",
    "data=copy data.task.items=9": "data.task.items=9 has no effect with data=copy: leave it",
    "data=copy data.separator=null": "data.separator=null has no effect with data=copy: leave it",
    "data=text data.path=x data.text_field=body": "data.text_field=body has no effect with data=text: leave it",
    "data.separator=---": "data.separator=--- has no effect with data=stdlib: leave it",
    "data.task.vocab_size=64": "data.task.vocab_size=64 has no effect with data=stdlib: leave it",
    "data.name=a/b": "data.name=a/b has no effect with data=stdlib: leave it",
    "plan.device=h100": "plan.device=h100 has no effect with dry_run=false: leave it",
    "model.rope_scaling_factor=2": "model.rope_scaling_factor=2 has no effect with model.rope_scaling=none: leave it",
    "tokenizer=byte tokenizer.vocab_size=300": "tokenizer.vocab_size=300 has no effect with tokenizer=byte: leave it",
    "model.position=alibi model.rope_theta=5": "model.rope_theta=5 has no effect with model.position=alibi: leave it",
    "model.ngram_rows=9": "model.ngram_rows=9 has no effect with model.ngrams=null: leave it",
    "wandb=true": "there is no setting wandb: did you mean wandb.mode or wandb.project or ",
    "wandb.tags=[{a:1}]": "is not a list of texts, as in '[a,b]', or null",
    "resume=a run_dir=b": "resume=a and run_dir=b are two folders: leave out run_dir",
    "seed=1,2 -m run_dir=a": "run_dir=a is for a single run: leave it out of -m; hydra.sweep.dir=",
    "-m resume=auto": "resume=auto is for a single run",
    **{f"{name}=": f"{name}= is empty: give it a value, or leave it out" for name in MEANINGLESS},
    "-m seed=1,2 hydra.sweep.dir=": "hydra.sweep.dir= is empty",
    **{f"{name}=~no_user/x": f"{name}=~no_user/x names no user" for name in ("resume", "init_from")},
    "resume=/nowhere": "resume=/nowhere holds no run (no folder checkpoints): give a run's directory, or auto",
    "init_from=hf:": "init_from=hf: does not exist",
    "init_from=nothere tokenizer=byte": "init_from=nothere: it does not exist",
    "init_from=resume": "init_from=resume: it does not exist: resume=auto, or resume=RUN, continues a run",
    "init_from=scratch": "init_from=scratch: it does not exist: leave it out to begin anew",
    "init_from=gpt2-xl": "init_from=gpt2-xl: it does not exist: init_from=hf:gpt2-xl begins with it",
    "dataset=shakespeare_char": "there is no setting dataset: here it is data.path (a file, a folder or a glob",
    "train.global_batch_size=8": "there is no setting train.global_batch_size: here it is batch_size (sequences in one",
    "dataset.train_on_input=false": "here it is data.path (each of its words counts, those of questions too; there",
    "data.folds=5": "here it is data.val_path (each fold in its turn, as docs/data.md divides a text; no seed",
    "random_state=3": "here it is seed (of the weights, the order and the dropout; it does not change the",
    "chat_template=chatml": "here it is data.text_field (one field is the text; docs/data.md makes it of several, or",
    "loss_mask=true": "here it is data.path (each of its words counts, those of questions too; there is no loss on",
    "Per-Device-Train-Batch-Size=8": "here it is micro_batch_size (batch_size has all sequences of a step)",
    "=5": "cannot read '=5': settings are typed NAME=VALUE, without dashes; --help all lists them",
    "bogus": "cannot read 'bogus': settings are typed NAME=VALUE",
    "~optimizer": "cannot read '~optimizer': leave it out: a setting that is not typed has its default",
    "seed=2 ~seed": "leave it out: a setting that is not typed has its default; seed=VALUE gives another.",
    "~wandb": "leave it out: a setting that is not typed has its default.",
    "~hydra/launcher": "leave it out: a setting that is not typed has its default.",
    "~optimizer=muon": "cannot read '~optimizer=muon': leave it out: a setting that is not typed has its default",
    **{f"{flag} 4": f"cannot read '{flag}': settings" for flag in ("-v", "--cfg", "--batch_size=4")},
    "tokenizer='byte'": "tokenizer='byte' does not exist: did you mean tokenizer=byte.",
    'experiment="heads"': 'experiment="heads" does not exist: did you mean experiment=heads.',
    "verbose=0": "here it is log_interval (TQDM_DISABLE=1 before the command leaves out its bar, > /dev/null behind",
    "save_dir=runs/a": "there is no setting save_dir: here it is run_dir.",
    "model_summary=true": "here it is dry_run (it prints the parameters of each part, the memory and the time).",
    'compile="off"': 'compile="off" is not known: did you mean compile=off.',
}
if IS_1_3:  # 1.4 knows no types in a file that is in place of a plugin's
    TYPED["-m hydra/launcher=joblib hydra.launcher.timeout=None"] = "converted to Float): leave it out, or type null"
    TYPED["-m hydra/launcher=joblib hydra.launcher.n_jobs=many"] = "converted to Integer): correct it, or leave it out."


@pytest.mark.parametrize("typed", ["mine", "mine.yml"])
def test_an_option_in_a_file_that_hydra_does_not_read_is_found(tmp_path, monkeypatch, typed):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yml").write_text("seed: 2")
    monkeypatch.setattr("cli.composition.CONF", tmp_path)
    monkeypatch.chdir(tmp_path)
    error = MissingConfigException("", missing_cfg_file=f"experiment/{typed}", options=["heads"])
    said = f"experiment={typed} does not exist: rename experiment/mine.yml to mine.yaml."
    assert explain(error) == said


def test_an_option_of_another_trainer_is_answered_with_one_of_ours(tmp_path, monkeypatch):
    for group in OPTIONS.keys() & {*GROUPS}:
        ours = {file.stem for file in (CONF / group).glob("*.yaml")}
        named = {answer.partition(": ")[0] for answer in OPTIONS[group].values()}
        assert not OPTIONS[group].keys() & ours and named <= ours
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my notes.txt").touch()
    assert remedy_for_option("data", "my notes.txt", ["text"]) == "type 'data.path=my notes.txt'"
    assert remedy_for_option("data", "notes.txt", ["text"]).startswith(
        "choose data from text; a file of yours is data."
    )
    # The periods of docs/training.md: the rate falls from step 800 to 1000, and from 1800 to 2000.
    for fraction, begin, steps in ((0.2, 800, 1000), (0.1, 1000, 2000)):
        period = ScheduleConfig(decay_fraction=fraction)
        factors = [schedule_factor(period, step, step / steps, steps) for step in range(begin, steps + 1)]
        assert factors[:-200] == pytest.approx([1] * (steps - begin - 199))
        assert factors[-201:] == pytest.approx([1 - number / 200 for number in range(201)])
    # A cosine begins none: step 1000 of 2000 is its middle.
    assert schedule_factor(ScheduleConfig(name="cosine", warmup_steps=0), 1000, 0.5, 2000) == pytest.approx(0.5)
    # What is said of linear: from the warm-up on the rate falls by the same amount in each step.
    linear = ScheduleConfig(warmup_steps=5, decay_fraction=1.0)
    factors = [schedule_factor(linear, step, step / 25, 25) for step in range(5, 26)]
    assert factors == pytest.approx([1 - number / 20 for number in range(21)])


def test_a_value_of_another_trainer_is_answered_with_one_of_ours():
    assert all(len(" ".join(values.values()).split()) == len(OPTIONS[name]) for name, values in VALUES.items())
    checks = {"attention": check_names, "device": choose_device}
    for name in OPTIONS.keys() - {*GROUPS, "checkpoint"}:
        check = checks.get(name, lambda value, name=name: build(TrainConfig, {name: value}))
        for theirs, ours in OPTIONS[name].items():
            setting, _, difference = ours.partition(": ")
            with pytest.raises(SettingsError) as refused:
                check(theirs)
            said = f"here it is {name}={setting}{difference and f' ({difference})'}"
            assert sentence_for(refused.value) == f"{refused.value.problem}: {said}."
            if name != "device":  # which this machine may not have
                check(setting)
    last = str(in_our_words(CheckpointError("x", setting="checkpoint", value="last")))
    assert "here it is checkpoint=null (" in last and "RUN/checkpoints/last" in last


def test_a_name_of_another_trainer_is_answered_with_ours_in_every_command_that_has_it():
    typed = " ".join(NAMES.values()).split()
    assert len(typed) == len({*typed}) == len(ALIASES)
    served = set()
    for names in NAMES_OF.values():
        own = {condition for condition in NAMES_BESIDE if condition in names}
        others = {name for condition in own for name in ALIASES_BESIDE[condition]}
        for ours, theirs in [*NAMES.items(), *(row for condition in own for row in NAMES_BESIDE[condition].items())]:
            settings, _, difference = ours.partition(": ")
            known = next((name for name in settings.split() if name in names), None)
            said = f"here it is {known}{difference and f' ({difference})'}" if known else difference
            apart = set() if ours not in NAMES or any(ours in NAMES_BESIDE[condition] for condition in own) else others
            for name in {*theirs.split()} - {*names} - apart if known or not settings else ():
                assert unknown_setting(name, names).remedy == said, name
                served.add(name)
    assert served == {*ALIASES}


def test_a_name_of_another_trainer_is_answered_with_what_it_is_beside_the_other_settings():
    for condition, rows in NAMES_BESIDE.items():
        typed = len(" ".join(rows.values()).split())
        assert typed == len(ALIASES_BESIDE[condition])
    for typed, said in {
        "lr=1e-3": "optimizer.lr (the peak rate, of Muon; optimizer=adamw takes rates such as 1e-3)",
        "optimizer=adamw lr=1e-3": "optimizer.lr (the peak rate)",
        "data=hf dataset=a/b": "data.name (or data.path=FILE of Parquet)",
        "data=recall vocab_size=64": "data.task.vocab_size",
        "bf16=true": "precision (precision=bf16)",
        "bf16=False": "precision (precision=bf16 for true)",
        "--optimizer=adamw --learning-rate=1e-3": "type optimizer=adamw",
        "optimizer=adamw --learning-rate=1e-3": "optimizer.lr (the peak rate)",
    }.items():
        with pytest.raises(SettingsError) as refused:
            check_typed(parse_overrides(typed.split(), NAMES_OF["train.py"]), is_sweep=False)
        assert refused.value.remedy.endswith(said), typed
    for script, typed, said in (
        ("sample.py", "max_tokens", "here it is max_new_tokens"),
        ("sample.py", "batch", "here it is batch_size (samples at a time)"),
        ("sample.py", "t", "here it is temperature"),
        ("eval.py", "test_file", "here it is data.path"),
        ("export.py", "out_dir", "here it is to"),
        ("export.py", "bf16", "here it is dtype (dtype=bfloat16)"),
    ):
        assert unknown_setting(typed, NAMES_OF[script]).remedy == said


def test_what_the_answers_to_other_names_say_can_be_typed():
    hints = {name: hint for schema in SCHEMAS.values() for name, hint in setting_hints(schema).items()}
    rows = [*NAMES, *(ours for others in NAMES_BESIDE.values() for ours in others)]
    texts = [*rows, *(f"{name}={ours}" for name, values in VALUES.items() for ours in values)]
    tried = 0
    for text in texts:
        for file in re.findall(r"[\w/]+\.(?:md|py)\b", text):
            assert (CONF.parent / file).is_file() or file == "prepare.py", text  # nanoGPT's
        for pattern in re.findall(r"\bsdpa[\w+/]*", text):
            check_names(pattern)
        for name, value in re.findall(r"(?<![\w./=-])([a-z_.]+(?:/[a-z]+)?)=([^\s,;:)']*)", text):
            tried += 1
            option = CONF / name / f"{value}.yaml"
            if value in ("", "RUN", "FILE", "FOLDER", "NAME", "N", "BASE"):
                assert name in hints or option.parent.is_dir(), text
            elif name in hints:
                read_value(name, value.split(",")[0], hints[name])
            else:
                assert option.is_file() or name.startswith("hydra") or value == "hf:NAME", text
        for name in re.findall(
            r"(?<![\w./=-])(?:model|data(?:\.ta\w+)?|optimizer|schedule|tokenizer|wandb)\.[a-z_0-9]+", text
        ):
            assert name in hints or name == "model.safetensors", text
    assert tried > 60


def test_a_setting_of_another_command_is_answered_with_that_command():
    for script, typed, said in (
        ("train.py", "temperature", "temperature is a setting of sample.py"),
        ("train.py", "dtype", "here it is precision"),
        ("train.py", "stride", "stride is a setting of eval.py"),
        ("sample.py", "max_steps", "max_steps is a setting of train.py"),
        ("sample.py", "lr", "optimizer.lr is a setting of train.py"),
        ("sample.py", "data.path", "data.path is a setting of train.py and eval.py"),
        ("sample.py", "schedule", "schedule is a setting of train.py"),
        (
            "sample.py",
            "streaming",
            "here it is results (results=- or a file; without it the text is printed as it comes)",
        ),
        ("eval.py", "streaming", "--help all lists them"),  # not "data is a setting of train.py and eval.py"
        ("eval.py", "seed", "seed is a setting of train.py and sample.py"),
        (
            "eval.py",
            "eval_tokens",
            "here it is data.path (all of it is scored; head -c 1000000 FILE writes a shorter one)",
        ),
        ("eval.py", "run_dir", "here it is checkpoint"),
        ("export.py", "temp", "temperature is a setting of sample.py"),
        (
            "export.py",
            "onnx",
            "here it is to (a folder in Hugging Face's format; docs/library.md has the lines for ONNX)",
        ),
        ("sample.py", "logit_bias", "docs/library.md has the lines that keep tokens from being drawn"),
        (
            "sample.py",
            "min_new_tokens",
            "there is no least length, and a sample ends where the model ends the document",
        ),
    ):
        assert unknown_setting(typed, NAMES_OF[script]).remedy == said


def test_a_setting_with_dashes_is_answered_with_what_to_type():
    for script, typed, said in (
        ("train.py", "--max_iters=500", "here it is max_steps"),
        ("train.py", "--learning-rate=1e-3", "here it is optimizer.lr (the peak rate"),
        ("train.py", "--num-layers 4", "here it is model.n_layer"),
        ("train.py", "--n_head 4", "here it is model.n_head"),
        ("train.py", "--seed=4", "type seed=4"),
        ("train.py", "--seed 4", "type seed=VALUE"),
        ("train.py", "--dry_run", "type dry_run=VALUE"),
        ("sample.py", "--top-k 40", "did you mean top_k?"),
        ("sample.py", "--n_predict 40", "here it is max_new_tokens"),
        ("sample.py", "-i", "here it is interactive"),
        ("sample.py", "--nothing", "--help all lists them"),
        ("train.py", "max_iters 500", "here it is max_steps"),
        ("train.py", "seed 5", "type seed=VALUE"),
        ("sample.py", "prompt=Now start", '--help all lists them; quote a value with spaces: "prompt=Now start"'),
    ):
        with pytest.raises(SettingsError) as refused:
            parse_overrides(typed.split(), NAMES_OF[script])
        assert f"settings are typed NAME=VALUE, without dashes; {said}" in refused.value.remedy


@pytest.mark.parametrize("typed", ["seed=2 max_steps=3", "--seed=2 --max_steps=3", "--seed=2 max_steps=3"])
def test_several_settings_within_quotes_are_answered_with_arguments_that_can_be_typed(typed):
    with pytest.raises(SettingsError) as refused:
        build(TrainConfig, parse_overrides([typed], NAMES_OF["train.py"]))
    said = refused.value.remedy.rpartition("argument of its own: ")[2]
    config = build(TrainConfig, parse_overrides(shlex.split(said)))
    assert (config.seed, config.max_steps) == (2, 3)


@pytest.mark.parametrize(
    "first", ["tokenizer=byte", "data.path=x.txt", f"data.path={'x' * 300}", "run_dir=a", "init_from=runs/b"]
)
def test_a_path_or_option_with_a_setting_behind_it_is_no_name_of_a_file(first):
    """As `train.py "$SETTINGS"` types it: run_dir='a seed=3' made a folder of that name."""
    with pytest.raises(SettingsError, match="is several settings in one argument: type each") as refused:
        parse_overrides([f"{first} seed=3"], NAMES_OF["train.py"])
    said = refused.value.remedy.rpartition("argument of its own: ")[2]
    assert parse_overrides(shlex.split(said)) == dict([first.split("="), ["seed", "3"]])


@pytest.mark.parametrize("typed", ["wandb.notes=better with seed=2", "sample_prompt=x seed=2", "wandb.name=a seed=2"])
def test_a_text_may_hold_what_looks_like_a_setting(typed, tmp_path, monkeypatch):
    name, _, value = typed.partition("=")
    assert parse_overrides([typed], NAMES_OF["train.py"]) == {name: value}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a seed=3").mkdir()  # somebody's
    assert parse_overrides(["resume=a seed=3"], NAMES_OF["train.py"])


def test_a_name_is_near_another_by_its_words():
    names = NAMES_OF["train.py"]
    for typed, ours in {
        "optimzer.lr": "optimizer.lr",
        "maxsteps": "max_steps",
        "batch_sise": "batch_size",
        "grad-clp": "grad_clip",
        "eval-tokens": "eval_tokens",
        "SEEED": "seed",
        "model.attention_windows": "model.attention_window",
        "warmup_step": "schedule.warmup_steps",
        "check_points_interval": "checkpoint_interval",
        "system.seed": "seed?",
    }.items():
        assert unknown_setting(typed, names).remedy.startswith(f"did you mean {ours}"), typed
    for typed in ("rest_size", "edit_interval", "attention_kind", "wandb.on", "run_id", "check", "val_max_minutes"):
        assert unknown_setting(typed, names).remedy == "--help all lists them", typed


@pytest.mark.parametrize(
    "typed",
    ["model.rope_theta", "model.block_size", "context_length", "model.rope_scaling", "n_heads", "n_layer", "mlp"],
)
def test_a_setting_of_the_model_is_the_checkpoints_where_one_is_read(typed):
    for script in ("sample.py", "eval.py", "export.py"):
        names = [name for name, *_ in settings_in(SCHEMAS[script])]
        said = str(unknown_setting(typed, names))
        assert said.startswith(f"there is no setting {typed}: the checkpoint has those of its model; docs/library.md")
        for shapes, ours in {"attention": "attention", "n_kv_head": "model.n_kv_head"}.items():
            assert f"'python train.py init_from=RUN {ours}=…'" in str(unknown_setting(shapes, names))
    names = [name for name, *_ in settings_in(SCHEMAS["train.py"])]
    assert "checkpoint" not in str(unknown_setting("model.rope_thetas", names))


@pytest.mark.parametrize("typed", ["--cfg", "--cfg jobs", "seed=1 --cfg"])
def test_hydras_flag_without_one_of_its_words_is_answered_with_them(typed):
    with pytest.raises(SettingsError, match=r"^--cfg( jobs)? shows nothing: type --cfg job, hydra or all\.$"):
        start(typed.split())


@pytest.mark.parametrize("typed", ["-sc", "-sc bash", "--shell-completion install"])
def test_the_completion_of_a_shell_is_answered_with_how_it_is_typed(typed):
    """It was a traceback of Hydra's."""
    with pytest.raises(SettingsError, match=f"^{typed} completes nothing: type -sc install=bash, zsh or fish\\.$"):
        start(typed.split())


@pytest.mark.parametrize("typed", some(TYPED, 6))
def test_what_train_cannot_read_is_answered_in_a_sentence_of_ours(typed):
    sentence = mistake(*typed.split())
    assert TYPED[typed] in sentence and len(sentence.splitlines()) == 1


@pytest.mark.parametrize(
    ("script", "typed", "said"),
    [
        ("sample.py", "temprature=1", "there is no setting temprature: did you mean temperature?"),
        ("sample.py", "seed=many", "seed=many is not a whole number: correct it, or leave it out for seed=1"),
        ("sample.py", "top_p=2", "at most 1: correct it, or leave it out for top_p=1.0"),
        (
            "sample.py",
            "num_samples=1e20",
            "must be from 0 to 2^32 less num_samples=100000000000000000000: lower num_samples",
        ),
        *(("sample.py", f"{name}=", f"{name}= is empty") for name in ("prompts", "prompt_file", "results")),
        *(("eval.py", f"{name}=", f"{name}= is empty") for name in ("checkpoint", "against", "page", "data.path")),
        ("export.py", "to=x import_from=", "import_from= is empty: give it a value, or leave it out"),
        ("sample.py", "seed=5\u200b", "is not a whole number, and has U+200B (ZERO WIDTH SPACE): correct it"),
        ("sample.py", "top_p=−1", "top_p=−1 is not a number: correct it"),  # a minus, which a person sees
        ("sample.py", "–top_k=4", "cannot read '–top_k=4', which has U+2013 (EN DASH): type it anew"),
        ("sample.py", "\ufeffseed=4", r"cannot read '\ufeffseed=4', which has U+FEFF (ZERO WIDTH NO-BREAK SPACE)"),
        ("eval.py", "checkpoint=a notes.txt”", "which has U+201D (RIGHT DOUBLE QUOTATION MARK): type it anew"),
        ("eval.py", "checkpoint=a über.txt", "cannot read 'über.txt': settings are typed NAME=VALUE"),
        ("sample.py", "stop=[a", "stop=[a is not a list of texts, as in '[a,b]'"),
        (
            "sample.py",
            "stop=[[a]]",
            """stop=[[a]] is not a list of texts, as in '[a,b]', or null: write 'stop=["[a]"]'""",
        ),
        ("sample.py", "stop=[[S1],[/S1]]", """write 'stop=["[S1]","[/S1]"]'"""),
        ("sample.py", r"stop=[\d,!]", r"""write 'stop=["\\d","!"]'"""),
        ("sample.py", "interactive=true prompt=a", "prompt=a and interactive=true are given: choose one"),
        ("sample.py", "--top_k=4", "settings are typed NAME=VALUE, without dashes"),
        (
            "sample.py",
            "prompt=Once # another beginning",
            "cannot read '#': leave out the comment, or let zsh do so from",
        ),
        ("eval.py", "-m checkpoint=a,b", "cannot read '-m': leave it out, and start the command once for each value"),
        ("eval.py", "-m a", "without dashes; here it is checkpoint"),
        ("eval.py", "#bits per byte", "cannot read '#bits': leave out the comment"),
        ("train.py", "--local-rank=0", "type torchrun in place of python -m torch.distributed.launch, which adds it"),
        ("train.py", "--local_rank 0", "cannot read '--local_rank': leave it out, and type torchrun"),
        (
            "train.py",
            "wandb.tags.+=c",
            "there is no setting wandb.tags.+: a list is typed whole, as in 'wandb.tags=[A,B]'",
        ),
        ("train.py", "wandb.tags[2]=c", "a list is typed whole, as in 'wandb.tags=[A,B]'"),
        ("sample.py", "stop.0=c", "a list is typed whole, as in 'stop=[A,B]'"),
        ("train.py", "wandb.tags=extend_list(c)", "wandb.tags=extend_list(c) is not a list of texts, as in '[a,b]'"),
        ("train.py", "seed=1 --local_rank 1", "type torchrun in place of python -m torch.distributed.launch"),
        ("sample.py", "bogus", "cannot read 'bogus'"),
        ("export.py", "demo.html", "cannot read 'demo.html': settings are typed"),
        ("eval.py", "data=x", "data.source=x is not known: choose one of files, text"),
        ("eval.py", "data=copy", "data=copy is a task, on which eval.py scores the models that have learned it: leave"),
        ("eval.py", "data.separator=null", "data.separator=null is given without a text: leave it out for the valid"),
        ("eval.py", "data.text_field=x", "data.text_field=x is given without a text"),
    ],
)
def test_what_the_other_commands_cannot_read_is_answered_likewise(script, typed, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        from_arguments(SCHEMAS[script], typed.split())


@pytest.mark.parametrize("value", ["[S2]", "[/INST]", "[S 2]", r"[a\d]"])
def test_a_single_text_in_brackets_is_a_list_of_it_which_is_told_with_the_list_that_has_them(value, caplog):
    """A speaker's mark is so: a sample ended in its bracket."""
    caplog.set_level(logging.WARNING, "tinygpt")
    assert from_arguments(SampleConfig, [f"stop={value}"]).stop == [value[1:-1]]
    said, _, remedy = caplog.messages[0].partition(": ")
    assert said == f"stop={value} is a list of the text {value[1:-1]}"
    (typed,) = shlex.split(remedy.removesuffix(" has the brackets."))
    assert from_arguments(SampleConfig, [typed]).stop == [value]
    caplog.clear()
    for other in ("[a,b]", "S2", '["[S2]"]', "['a']", "[]", "[S2] or", ",", "a, b", "a,"):
        with suppress(SettingsError):
            from_arguments(SampleConfig, [f"stop={other}"])
    assert not caplog.messages


def test_a_text_that_may_be_meant_as_a_list_is_told_and_null_is_none(caplog):
    caplog.set_level(logging.WARNING, "tinygpt")
    assert from_arguments(SampleConfig, [r"stop=</s>,\n###"]).stop == ["</s>,\n###"]
    (typed,) = shlex.split(caplog.messages[0].partition("commas: ")[2].removesuffix(" is a list."))
    assert from_arguments(SampleConfig, [typed]).stop == ["</s>", "\n###"]
    assert from_arguments(SampleConfig, ["stop=null"]).stop == [] and len(caplog.messages) == 1


@pytest.mark.parametrize("typed", ["${oc.env:TEXTS,/a b.txt}", "a b", r"C:\x\y", '"a, b"', "1.0", r"'C:\, x'"])
def test_an_override_is_shown_without_the_backslashes_of_hydra(typed):
    """A job's line had data.path=$\\{oc.env\\:TEXTS\\}, of a sweep that has one text."""
    (parsed,) = OverridesParser.create().parse_overrides([f"data.path={typed}"])
    assert without_escapes(f"data.path={parsed.get_value_element_as_str()}") == f"data.path={typed}"


def test_null_names_no_folder_and_no_field():
    for typed, default in {"data.cache_dir=null": "~/.cache/tinygpt", "data.text_field=None": "text"}.items():
        with pytest.raises(SettingsError) as refused:
            from_arguments(TrainConfig, [typed])
        name = typed.partition("=")[0]
        assert str(refused.value) == f"{typed} is not a text: correct it, or leave it out for {name}={default}."
    assert from_arguments(SampleConfig, ["prompt=null"]).prompt == "null"


def test_what_the_agent_of_wandb_types_is_answered_with_lines_of_the_sweeps_file(monkeypatch, tmp_path):
    braces = "optimizer={'lr': 0.01, 'beta1': 0.8}"
    typed = {braces: "has settings in braces: type optimizer.lr=0.01 optimizer.beta1=0.8."}
    typed |= {
        "model={n_layer:2}": "type model.n_layer=2.",
        "model={n_layer}": "type each setting as model.NAME=VALUE",
        "data={'task': {'items': 4}}": "data.task.items=4.",
    }
    for one, said in typed.items():
        with pytest.raises(SettingsError, match=re.escape(said)):
            check_typed(parse_overrides([one]), is_sweep=False)
    with pytest.raises(SettingsError, match=r"type each setting as data\.NAME=VALUE\.$"):  # no variant has a blank
        check_typed(parse_overrides(["data={path:a b},{path:c}"]), is_sweep=True)
    monkeypatch.setattr("common.settings.WANDB_SWEEP", True)
    monkeypatch.setattr("cli.overrides.WANDB_SWEEP", True)
    with pytest.raises(
        SettingsError, match=r"in the sweep's YAML write the parameters as optimizer\.lr: …, optimizer\.beta1: …\.$"
    ):
        check_typed(parse_overrides([braces]), is_sweep=False)
    # Its command by default, and with ${args_no_equals}; the docs have the command that works.
    command = 'command: ["${env}", python, "${program}", "${args_no_hyphens}"]'
    assert command in (CONF.parent / "docs/sweeps.md").read_text(encoding="utf-8")
    for one in (["--optimizer.lr=0.02"], ["--optimizer.lr", "0.02"]):
        with pytest.raises(SettingsError, match=re.escape(f"write {command} in the sweep's YAML.")):
            parse_overrides(one)
    # A command without the arguments: the run would have its defaults, and wandb would show the chosen values.
    chosen = tmp_path / "config.yaml"
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(chosen))
    parameters = {"optimizer.lr": 1e-3, "optimizer": "adamw", "compile": "on", "seed": 3, "model.n_kv_head": None}
    written = {"wandb_version": 1} | {name: {"value": value} for name, value in parameters.items()}
    chosen.write_text(json.dumps(written), encoding="utf-8")
    agent = [f"{name}={value}" for name, value in parameters.items()]
    check_wandb_sweep(parse_overrides([*agent, "max_steps=4"]))
    check_wandb_sweep(parse_overrides([*agent, "optimizer.lr=.001"]))
    for typed, missed in (([], agent[0]), (agent[:1], agent[1]), ([*agent, "seed=4"], "seed=3")):
        said = f"{missed} is chosen by a sweep of wandb, and not typed: write {command} in the sweep's YAML."
        with pytest.raises(SettingsError, match=f"^{re.escape(said)}$"):
            check_wandb_sweep(parse_overrides(typed))
    monkeypatch.setattr("cli.overrides.WANDB_SWEEP", False)
    check_wandb_sweep({})
    monkeypatch.setattr("common.settings.WANDB_SWEEP", False)
    with pytest.raises(SettingsError, match="without dashes"):
        parse_overrides(["--optimizer.lr=0.02"])


def test_quotes_that_the_shell_of_windows_leaves_in_place_are_answered_with_those_that_it_reads():
    for typed, shown in {"'data.path=a b.txt'": "data.path=a b.txt", "'variants=[\"a\"]'": "NAME=['A','B']"}.items():
        said = (
            f'single quotes in place: type double quotes around an argument, and single ones inside, as in "{shown}".'
        )
        with pytest.raises(SettingsError, match=re.escape(said)), mock.patch.object(os, "name", "nt"):
            parse_overrides(["seed=1", typed])
    # A program that starts the command, such as Docker, leaves them elsewhere.
    with pytest.raises(
        SettingsError, match=re.escape("no shell has taken its single quotes: leave them out, as in a=b")
    ):
        parse_overrides(["'a=b'"])
    for typed, whole in (
        (["prompt='Once", "upon", "a", "time'", "seed=2"], "prompt=Once upon a time"),
        (["prompt=Once", "upon"], "prompt=Once upon"),
    ):
        with pytest.raises(SettingsError, match=f"cannot read 'upon': .*; quote a value with spaces: \"{whole}\""):
            parse_overrides(typed)
    for typed, remedy in {"seed= 5 x=1": "write seed=5", "seed= x=1": "give it a value, or leave it out"}.items():
        with pytest.raises(SettingsError, match=f"seed= is empty: {remedy}"):
            parse_overrides(typed.split())
    assert parse_overrides(["prompt='tis"]) == {"prompt": "'tis"}
    # As of python train.py "$MORE" where that is not set: no value with spaces was divided.
    for typed in ([""], ["seed=2", ""]):
        with pytest.raises(SettingsError, match="an empty argument, .*: leave it out, or give the variable a value.$"):
            parse_overrides(typed)


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
@pytest.mark.parametrize(
    ("end", "said"), [("^", "of cmd.exe"), ("'`'", "of PowerShell"), ("\\ ", "blanks"), ("'\\'", "of a Linux")]
)
def test_a_sign_that_ends_the_lines_of_another_shell_is_named(end, said):
    script = f"printf '%s\\0' seed=2 {end}\n max_steps=3"
    handed_on = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False).stdout
    typed = handed_on.split("\0")[:-1]
    assert len(typed) >= 2 and "=" not in typed[1]
    with pytest.raises(SettingsError, match=f"{said}.*: leave it out"):
        parse_overrides(typed)
    with pytest.raises(SettingsError, match='quote a value with spaces: "prompt=2 . 3"'):
        parse_overrides(["prompt=2", "^", "3"])


def test_powershell_which_divides_a_value_at_commas_is_answered_with_the_quotes_that_it_needs():
    for typed in (["seed=1", "2", "3"], ["optimizer.lr=0.01", "0.02"]):
        with pytest.raises(SettingsError) as refused:
            parse_overrides(typed)
        (remedy,) = re.findall('in PowerShell one with commas: "(.*)"', str(refused.value))
        assert parse_overrides([remedy]) == {typed[0].split("=")[0]: ",".join(typed).split("=")[1]}


def test_a_job_of_a_search_whose_values_do_not_go_together_is_answered_with_a_space():
    error = SettingsError("has no effect with attention=sdpa", "leave it out", setting="model.latent_size", value=8)
    searched = of_search(error, "attention=sdpa model.latent_size=8")
    assert str(searched).startswith(str(error).removesuffix(".") + "; hydra.sweeper.custom_search_space draws")
    divided = SettingsError("model.n_head=3 does not divide model.n_embd=16", "choose 4")
    assert "custom_search_space" in str(of_search(divided, "model.n_head=3"))
    for drawn in ("", "model.n_head=4", "model.n_head=33 seed=2"):  # of all jobs, or of another setting
        assert of_search(divided, drawn) is None


def test_several_values_of_a_setting_that_all_jobs_share_are_answered_with_one_or_with_quotes():
    for typed, said in {
        "hydra.sweep.dir=a,b": """same hydra.sweep.dir: type one, or 'hydra.sweep.dir="a,b"' for a text with commas.""",
        "hydra.sweep.dir=choice(a,b)": "same hydra.sweep.dir: type one.",
        "hydra/launcher=basic,joblib": "same hydra/launcher: type one.",
    }.items():
        with pytest.raises(HydraException) as raised:
            override = OverridesParser.create().parse_overrides([typed])
            ConfigLoaderImpl.validate_sweep_overrides_legal(override, RunMode.MULTIRUN, from_shell=True)
        assert explain(raised.value) == f"{typed} is several values, and all jobs have the {said}"


def test_a_file_whose_name_has_a_comma_is_quoted_in_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.txt").write_text("text")
    for typed in ("data.path=a,b.txt", "data.val_path=a,b.txt", "code=a,b.txt", f"init_from={tmp_path}/a,b.txt"):
        name, _, value = typed.partition("=")
        with pytest.raises(
            SettingsError, match=re.escape(f"""'{name}="{value}"' is the file or folder of this name""")
        ):
            check_typed(parse_overrides([typed]), is_sweep=True)
        check_typed(parse_overrides([typed]), is_sweep=False)
    for typed in ("data.path=a,c.txt", 'data.path="a,b.txt"', "sample_prompt=a,b.txt", f"data.path=a,{'b' * 5000}"):
        check_typed(parse_overrides([typed]), is_sweep=True)
    check_typed({"init_from": '"a,c"'}, is_sweep=True)


@pytest.mark.parametrize("values", [("4", "8,16"), ("8,16", "4"), ("4", "interval(8,16)")])
def test_a_sweep_gets_the_last_value_of_a_setting_alone(monkeypatch, values):
    """Optuna's sweeper took 4 of batch_size=4 batch_size=8,16 for all trials, and the command said 8,16."""
    handed = mock.Mock()
    monkeypatch.setattr("cli.composition.call_hydra", handed)
    overrides = [f"batch_size={values[0]}", "seed=1,2", f"+batch_size={values[1]}"]
    sweep(overrides, {"batch_size": values[1], "seed": "1,2"}, [])
    assert sorted(handed.call_args.args[0]) == sorted(["-m", f"batch_size={values[1]}", "seed=1,2"])


@pytest.mark.parametrize("script", ["train.py", "sample.py"])
def test_a_command_pasted_into_a_cell_is_told_how_a_notebook_calls_it(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", mock.Mock())
    monkeypatch.setattr(sys, "argv", ["/x/ipykernel_launcher.py", "-f", "/x/runtime/kernel-1.json"])
    with pytest.raises(SystemExit):
        answer(TrainConfig, CONF.parent / script, lambda arguments: None)
    assert f"type %run {script} NAME=VALUE, or call functions" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [script, "seed=2"])  # as %run has it
    answer(TrainConfig, CONF.parent / script, print)
    assert capsys.readouterr().out == "['seed=2']\n"


@pytest.mark.parametrize("argument", ["run_dir=a", "seed=5", "max_new_tokens=5", "to=x", "-m", "bogus", ""])
def test_a_carriage_return_of_a_script_from_windows_becomes_no_part_of_a_name(argument):
    said = r"ends in a carriage return, as each line of a script .*: convert the script: sed -i 's/\\r\$//' SCRIPT\.$"
    with pytest.raises(SettingsError, match=said):
        parse_overrides(["seed=1", f"{argument}\r"])
    assert parse_overrides(["prompt=a\rb", r"stop=a\r"]) == {"prompt": "a\rb", "stop": r"a\r"}


def without_temporary() -> SettingsError:
    """The error of a file that may be written, where Python has no folder for temporary ones."""
    error = SettingsError("to=x cannot be written", "name another place")
    error.__context__ = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "there is not enough memory, or too few threads (MemoryError): choose a smaller model"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "raise the limits that ulimit -a"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "there is not enough memory"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), "x cannot be used (File name too long): check"),
        (OSError(errno.EMFILE, "Too many open files"), "there are too many open files: raise the limit that ulimit -n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "there is not enough memory, or too few threads"),
        (
            without_temporary(),
            "there is no folder for temporary files (No usable temporary directory found in ['/tmp'])",
        ),
        (SettingsError("torch cannot compile", "let TMPDIR name one"), "torch cannot compile: let TMPDIR name one."),
        (RuntimeError("CUDA error: an illegal"), "look for the cause in nvidia-smi and dmesg, or set device=cpu"),
        (RuntimeError("MPS backend failed"), "look for the cause in the log of the system, or set device=cpu"),
        (OSError(errno.EBADF, "Bad file descriptor"), None),
        (RuntimeError("shapes do not match"), None),
    ],
)
def test_what_the_machine_refuses_is_a_sentence_and_a_mistake_of_ours_is_not(error, said):
    sentence = sentence_for(error)
    assert sentence == said if said is None else said in sentence


# Help


def helped(script: str, *words: str) -> str:
    """What SCRIPT --help WORDS prints."""
    groups = group_options() if script == "train.py" else {}
    return help_text(SCHEMAS[script], CONF.parent / script, ["--help", *words], groups)


@pytest.mark.parametrize("script", SCHEMAS)
def test_every_setting_has_a_docstring_below_it(script):
    named = [(kind, each.name) for _, each, kind in settings_in(SCHEMAS[script])]
    lacking = [f"{kind.__name__}.{name} has no docstring" for kind, name in named if name not in setting_docs(kind)]
    assert not lacking, "\n".join(lacking)


@pytest.mark.parametrize("script", SCHEMAS)
def test_help_all_lists_every_setting_with_its_default_and_the_first_sentence_of_its_docstring(script):
    schema, told = SCHEMAS[script], helped(script, "all")
    listed = {name: (default, meaning) for name, default, meaning in described(schema)}
    assert listed.keys() == flat(asdict(schema(to="x") if script == "export.py" else schema())).keys()
    for name, (default, meaning) in listed.items():
        assert f"  {name}={default}" in told and len(first_sentence(meaning)) > 9, name
        assert "".join(first_sentence(meaning).split()) in "".join(told.split())  # whatever its lines are
    assert all(text == listed[name][1] for name, text in setting_docs(schema).items() if name in listed)
    assert max(map(len, told.splitlines())) <= 120
    for default in ("max_steps=null", "dry_run=false", 'sample_prompt=""', "optimizer.lr=0.02"):
        assert f"  {default} " in told or script != "train.py"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("script", SCHEMAS)
def test_help_shows_the_settings_to_know_first_in_groups_on_a_page_or_two(script, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    told = helped(script).splitlines()
    shown = {line.split("=")[0].strip() for line in told if re.match(r"  \S+=", line)}
    groups = FIRST.get(SCHEMAS[script].__name__)
    named = (
        {name for names in groups.values() for name in names.split()}
        if groups
        else {name for name, *_ in described(SCHEMAS[script])}
    )
    assert shown == named and len(told) <= 60
    assert groups is None or ({*groups} <= set(told) and len(named) <= 25)
    assert ("--help all" in " ".join(told)) == (groups is not None)


def test_help_shows_the_option_of_each_group_that_changes_nothing():
    told, settings = helped("train.py", "all"), flat(asdict(TrainConfig()))
    for group in {*GROUPS} - {"experiment"}:
        options = {file.stem: yaml.safe_load(file.read_text()) or {} for file in (CONF / group).iterdir()}
        idle = [name for name, values in options.items() if flat(values, f"{group}.").items() <= settings.items()]
        assert re.findall(rf"^  {group}=(\w+)", told, re.M) == idle
    assert re.findall(r"^  (\S+)=OPTION", told, re.M) == ["experiment", "hydra/launcher"]


def test_help_of_a_word_shows_the_whole_meaning_of_the_settings_that_mention_it():
    told = helped("train.py", "Nesterov")
    assert re.findall(r"^  (\S+)=", told, re.M) == ["optimizer.momentum"] and "Muon's Nesterov momentum." in told
    assert re.findall(r"^  (\S+)=", helped("train.py", "shakespeare_cpu"), re.M) == ["experiment"]
    told = " ".join(helped("train.py", "recompute", "seed=1").split())  # the second sentence, wrapped somewhere
    assert "for a third more arithmetic" in told
    assert {"top_k=null", "top_p=1.0"} <= {
        line.split()[0] for line in helped("sample.py", "top_").splitlines() if "=" in line
    }
    for word, options in (("sweeper", "decide grid"), ("multirun", "decide grid"), ("joblib", "joblib submitit_local")):
        assert re.search(rf"^  hydra/\w+=\w+ +{options}", helped("train.py", word), re.M)
    # A comment that zsh hands on is no word to look for.
    assert helped("train.py", "#", "the", "settings") == helped("train.py")
    for script, word, said in (
        ("eval.py", "zorro", "--help all lists them"),
        ("train.py", "max_iters", "here it is max_steps"),
        ("train.py", "exclude", "here it is data.path \\("),
        ("sample.py", "learning_rate", "optimizer.lr is a setting of train.py"),
    ):
        with pytest.raises(SettingsError, match=f"^--help {word}: no setting has this in its name or meaning: {said}"):
            helped(script, word)


@pytest.mark.parametrize("width", [30, 40, 79])
def test_help_fits_a_narrow_terminal_with_each_meaning_below_its_name(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    told = helped("train.py", "all").splitlines()
    names = {f"  {name}={default}" for name, default, _ in described(TrainConfig)}
    assert all(len(line) <= width or line in names for line in told) and names <= set(told)
    assert len(told) < 6 * len(names)  # beside the names a line had one character
    below = told[told.index("  data=stdlib") + 1 :]
    assert below[0].startswith("    copy csv files hf")


def test_an_attention_that_is_said_twice_alike_is_one():
    assert TrainConfig(attention="loop", model=GPTConfig(attention="loop")).model.attention == "loop"


@pytest.mark.parametrize(
    ("script", "name", "typed", "texts"),
    [
        ("sample.py", "stop", "[.,!,?]", [".", "!", "?"]),
        ("sample.py", "stop", r"[\n\n, *]", ["\n\n", "*"]),
        ("train.py", "freeze", "[a,!b]", ["a", "!b"]),
        ("train.py", "wandb.tags", "[1st try, @lab]", ["1st try", "@lab"]),
    ],
)
def test_a_list_with_signs_that_need_quotes_is_answered_with_the_list_to_type(script, name, typed, texts):
    with pytest.raises(SettingsError, match=r"is not a list of texts") as caught:
        from_arguments(SCHEMAS[script], [f"{name}={typed}"])
    answered = re.fullmatch(r"write '(.*)'", caught.value.remedy)[1]
    config = from_arguments(SCHEMAS[script], [answered])
    assert attrgetter(name)(config) == texts


@pytest.mark.parametrize("value", ["-1", "inf", "null", "none"])
def test_clipping_is_turned_off_by_the_value_that_is_told(value):
    with pytest.raises(SettingsError, match=r"grad_clip=0 clips no gradient") as caught:
        from_arguments(TrainConfig, [f"grad_clip={value}"])
    assert from_arguments(TrainConfig, [caught.value.remedy.split()[0]]).grad_clip == 0


def test_python_may_give_tuples_for_lists_and_a_text_for_a_number_is_refused_by_name():
    """A tuple was one text, and "2" ended in a TypeError of Python without the setting's name."""
    values = {"freeze": ("token_embedding", "blocks.0"), "wandb.tags": ("a", "1"), "model.ngrams": (2, 3)}
    config = build(TrainConfig, values)
    assert (config.freeze, config.wandb.tags) == (["token_embedding", "blocks.0"], ["a", "1"])
    assert config.model.ngrams == [2, 3]
    for make, setting in (
        (lambda: TrainConfig(max_steps="2"), "max_steps=2"),
        (lambda: TrainConfig(max_minutes="2"), "max_minutes=2"),
        (lambda: OptimizerConfig(beta1="0.9"), "optimizer.beta1=0.9"),
    ):
        with pytest.raises(SettingsError, match=f"^{setting} is a text: give a number, without quotes"):
            make()


CLASSES = [TrainConfig, SampleConfig, EvalConfig, SamplingParams, TextConfig, AttentionConfig, GPTConfig, DataConfig]
CLASSES += [TokenizerConfig, OptimizerConfig, ScheduleConfig, WandbConfig, PlanConfig, TaskConfig, TalesConfig]
# {kind of a field: values of other types}.
OTHERS = {
    bool: ["yes", 2, 0.5, []],
    int: [2.5, "3", True, [1], math.nan, 1j],
    float: ["0.5", True, [1], 1j],
    str: [1, ["a"], b"x", 2.5],
    list: [1, {}],
}


@pytest.mark.parametrize("group", CLASSES)
def test_python_gives_no_field_a_value_of_another_type(group):
    """2.5 layers, "yes" for false or a list for a path went on to where no one could tell what was wrong."""
    for each in fields(group):
        others = ["x", [], {"x": 1}] if is_dataclass(each.type) else OTHERS[kind_of(each.type)]
        if not is_nullable(each.type) and each.name != "stop":  # JSON of others has null for no stop
            others = [*others, None]
        for value in others:
            with pytest.raises(SettingsError) as caught:
                group(**{each.name: value})
            assert each.name in str(caught.value), (each.name, value)


def kind_of(hint: Any) -> type:
    kind = get_args(hint)[0] if is_nullable(hint) else hint
    return get_origin(kind) or kind


def is_nullable(hint: Any) -> bool:
    return NoneType in get_args(hint)


def test_python_may_give_whole_floats_numpys_numbers_paths_and_booleans():
    config = TrainConfig(
        max_steps=1e3, seed=np.int64(7), grad_clip=1, run_dir=Path("runs") / "a", compile=True, dry_run=False
    )
    assert (config.max_steps, config.seed, config.grad_clip, config.run_dir) == (1000, 7, 1.0, str(Path("runs/a")))
    assert [type(value) for value in (config.max_steps, config.seed, config.grad_clip)] == [int, int, float]
    assert (config.compile, TrainConfig(compile=False).compile, TrainConfig(compile="False").compile) == (
        "on",
        "off",
        "off",
    )
    assert DataConfig(path=Path("a.txt"), val_path=Path("b.txt")).path == "a.txt"
    assert GPTConfig(n_embd=np.int32(64), rope_theta=np.float32(500), ngrams=(np.int64(2), 3.0)).ngrams == [2, 3]
    assert TrainConfig(model={"n_layer": 3.0}, data={"task": {"items": 4}}) == TrainConfig(
        model=GPTConfig(n_layer=3), data=DataConfig(task=TaskConfig(items=4))
    )
    with pytest.raises(SettingsError, match=r"there is no setting model\.layers: GPTConfig has attention, .*n_layer"):
        TrainConfig(model={"layers": 3})
    json.dumps(asdict(config))


def test_somebodys_own_group_may_have_fields_of_any_type():
    @dataclass(kw_only=True)
    class Mine(AttentionConfig):
        table: dict[str, int] = field(default_factory=dict)
        size: int = 3

    assert Mine(table={"a": 1}, size=4, n_embd=32.0) == Mine(table={"a": 1}, size=4, n_embd=32)


@pytest.mark.parametrize("preset", some(sorted(path.stem for path in (CONF / "model").glob("*.yaml")), 3))
def test_the_mlp_of_a_preset_grows_with_its_width(preset):
    """A Llama of width 96 had an MLP of 2,048, 21 times as wide."""
    whole = composed(f"model={preset}").model
    assert whole.inner == (2048 if preset == "llama" else whole.inner) and 2.6 < whole.inner / whole.n_embd <= 4
    small = composed(f"model={preset}", "model.n_embd=96", "model.n_head=4").model
    assert 2.6 < small.inner / 96 <= 4

"""The commands as a person types them: settings, mistakes, help."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from conftest import run_here
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from errors import SettingsError
from evaluate import EvaluateConfig
from export import ExportConfig
from generation.config import SampleConfig
from model.config import GPTConfig
from runs.checkpoint import open_checkpoint
from schema import from_arguments, setting_docs, setting_names, to_settings
from settings import CONF
from training.config import TrainConfig

pytestmark = pytest.mark.usefixtures("no_pictures")
ROOT = Path(train.__file__).parent
SCHEMAS = {"train.py": TrainConfig, "sample.py": SampleConfig, "evaluate.py": EvaluateConfig, "export.py": ExportConfig}
TINY = ["tokenizer=byte", "model.n_layer=1", "model.n_embd=32", "model.block_size=16", "max_steps=1"]
TINY += ["sample_tokens=0", "device=cpu", "data.cache_dir=cache"]


def run(script: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def settings_of(*overrides: str) -> TrainConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_settings(compose("train", list(overrides)), TrainConfig)


# Settings


def test_the_commands_defaults_are_the_dataclasses():
    assert settings_of() == settings_of("model=tiny", "data=stdlib", "optimizer=muon") == TrainConfig()
    assert from_arguments(SampleConfig, []) == SampleConfig()


@pytest.mark.parametrize("override", [f"{path.parent.name}={path.stem}" for path in sorted(CONF.glob("*/*.yaml"))])
def test_every_option_of_every_group_is_a_valid_configuration(override):
    extra = {f"data={source}": ["data.path=x"] for source in ("text", "jsonl", "parquet", "nanogpt")}
    extra |= {"data=hf": ["data.name=x"], "data=mix": ["data.mix=[x:1]"]}
    prefix = "+" if override.startswith("experiment") else ""
    settings_of(prefix + override, *extra.get(override, []))


def test_options_change_what_they_name_and_nothing_else():
    adamw, cosine = settings_of("optimizer=adamw").optimizer, settings_of("schedule=cosine").schedule
    assert (adamw.lr, adamw.embedding_lr, adamw.lm_head_lr, adamw.weight_decay) == (1e-3, None, None, 0.1)
    assert (cosine.warmup_steps, cosine.final_factor) == (100, 0.1)
    assert settings_of("data.path=notes.txt").data.source == "text"


def test_a_short_name_selects_the_attention():
    for config in (settings_of("attention=matmul", "model=gpt2"), TrainConfig(attention="matmul")):
        assert (config.model.attention, config.attention) == ("matmul", None)
    with pytest.raises(SettingsError, match=r"attention=sdpa and model\.attention=loop are both given"):
        TrainConfig(model=GPTConfig(attention="loop"), attention="sdpa")


PROMPTS = ["Hello, world", "def read(self", "it's", "a=b", "'", 'say "hi" and "ho"', "a\nb\n", "C:\\new\\", 'a\\"b']
PROMPTS += ["x\\\n", "${x}", "\\${x}", "${", "$5", "日本 😀", "", "  two", "null", "true", "1e3", "[a", "[a]", "--x"]
PROMPTS += ["???"]


def test_a_prompt_is_what_was_typed():
    for prompt in PROMPTS:
        assert from_arguments(SampleConfig, [f"prompt={prompt}"]).prompt == prompt


@given(prompt=st.text())
@settings(max_examples=60, deadline=None)
def test_a_prompt_of_any_characters_is_what_was_typed(prompt):
    assert from_arguments(SampleConfig, [f"prompt={prompt}"]).prompt == prompt


def test_what_is_not_text_is_read_by_its_type():
    typed = ["top_k=null", "checkpoint=null", "temperature=1e-3", "logprobs=True", "results=-"]
    read = from_arguments(SampleConfig, [*typed, 'stop=["\\n\\n", "${x}", no, 1]'])
    assert from_arguments(SampleConfig, ["stop=END"]).stop == ["END"]
    assert read.stop == ["\n\n", "${x}", "no", "1"] and (read.top_k, read.checkpoint) == (None, None)
    assert (read.temperature, read.logprobs) == (1e-3, True)
    assert from_arguments(EvaluateConfig, ["data.path=null", "stride=3"]) == EvaluateConfig(stride=3)
    assert from_arguments(EvaluateConfig, ["data.path=[a"]).data.path == "[a"


# Mistakes


MISTAKES = {
    "train.py model.n_heads=8": "there is no setting model.n_heads: did you mean model.n_head",
    "train.py optimiser=adamw": "there is no setting optimiser: did you mean optimizer",
    "train.py lr=0.1": "there is no setting lr: did you mean optimizer.lr?",
    "train.py +foo=1": "there is no setting foo",
    "train.py +model.foo=1": "there is no setting model.foo",
    "train.py hydra.foo=1": "there is no setting hydra.foo: --cfg hydra shows",
    "train.py model.n_head=many": "model.n_head: Value 'many' of type 'str' could not be converted to Integer",
    "train.py max_steps=1.5": "max_steps: Value '1.5' of type 'float' could not",
    "train.py model.qk_norm=maybe": "model.qk_norm: Value 'maybe' is not a valid bool",
    "train.py model=huge": "model=huge does not exist: choose model from gpt2",
    "train.py model=3 data=stdlib": "error: model=3 does not exist: a group takes the name of an option",
    "train.py attention=fast": "attention=fast: 'fast' is unknown: choose a form from ",
    "train.py attention=sdpa model.attention=loop": "attention=sdpa and model.attention=loop are both given",
    "train.py +experiment=nope": "experiment=nope does not exist: choose experiment from",
    "train.py experiment=shakespeare": "+experiment=shakespeare",
    "train.py model.n_head=3": "model.n_head=3 does not divide model.n_embd=128",
    "train.py model.n_embd=12 model.n_head=4": "a head size of 3 is odd",
    "train.py +experiment=ladder": "many runs are asked for, and one would be made: add -m",
    "train.py attention=simple model.n_embd=33 model.n_head=3": "a head size of 33 is odd",
    "train.py seed=1,2": "add --multirun",
    "train.py hydra/sweeper=optuna seed=1": "one would be made: add -m",
    "train.py data.path=it's": "cannot read the override",
    "train.py seed=1 -m sample_prompt=it's": "cannot read the override",
    "train.py hydra.run.dir=a": "write run_dir=a",
    "train.py hydra.job.chdir=true": "hydra.job.chdir=true is not used: paths are relative to the folder",
    "train.py seed=1,2 -m run_dir=a": "run_dir=a is for a single run",
    "train.py -m resume=auto": "resume=auto is for a single run",
    "train.py =5": "cannot read '=5': settings are typed NAME=VALUE",
    "train.py attention=matmul model.attention=sdpa": "attention=matmul and model.attention=sdpa are both given",
    "train.py model.rope_scaling_factor=2": "=2.0 means nothing with model.rope_scaling=none",
    "train.py model.rope_scaling=ntk": "model.rope_scaling=ntk means nothing with model.rope_scaling_factor=1",
    "train.py model.position=none model.rope_theta=9": "model.rope_theta=9.0 means nothing with model.position=none",
    "train.py attention=single_head model.n_kv_head=2": "model.n_kv_head=2 means nothing with attention=single_head",
    "train.py attention=average model.position=alibi": "model.position=alibi means nothing with attention=average",
    "train.py attention=delta/linear model.position=alibi": "model.position=alibi means nothing with attention=delta/",
    "train.py attention=mla model.rope_fraction=0.5": "model.rope_fraction=0.5 means nothing with attention=mla",
    "train.py data=jsonl data.path=x data.subset=a": "data.subset=a means nothing with data=jsonl",
    "train.py tokenizer=byte tokenizer.vocab_size=500": "tokenizer.vocab_size=500 means nothing with tokenizer=byte",
    "train.py optimizer=adamw optimizer.momentum=0.9": "optimizer.momentum=0.9 means nothing with optimizer=adamw",
    "train.py schedule=cosine schedule.decay_fraction=0.1": "decay_fraction=0.1 means nothing with schedule=cosine",
    "train.py schedule=constant schedule.final_factor=0.1": "final_factor=0.1 means nothing with schedule=constant",
    "train.py wandb.project=p": "wandb.project=p means nothing with wandb.mode=disabled",
    "train.py wandb.mode=offline wandb.tags=a": "wandb.tags takes a list, as in 'wandb.tags=[a,b]'",
    "train.py plan.device=h100": "plan.device=h100 means nothing with dry_run=false",
    "train.py dry_run=true plan.devices=8": "plan.devices=8 means nothing with plan.device=null",
    "train.py allow_changes=true": "allow_changes=True means nothing with resume=null",
    "sample.py =5": "cannot read '=5': settings are typed NAME=VALUE",
    "sample.py temperature=0 top_k=5": "top_k=5 means nothing with temperature=0",
    "sample.py interactive=true prompt=a": "prompt=a means nothing with interactive=true",
    "sample.py batch_size=3": "batch_size=3 means nothing with prompts=null and results=null",
    "sample.py special_tokens=true": "special_tokens=True means nothing with an empty prompt",
    "sample.py page=a.html num_samples=3": "num_samples=3 means nothing with page=a.html",
    "evaluate.py page=/proc/x.html": "page=/proc/x.html cannot be written",
    "evaluate.py page=x.htm": "page=x.htm is a page: give its name the ending .html",
    "sample.py page=/proc/x.html": "page=/proc/x.html cannot be written",
    "train.py --batch_size 4": "write batch_size=4",
    "train.py --batch_size=4": "write batch_size=4",
    "train.py --model.n-head 4 seed=1": "write model.n_head=4",
    "sample.py --top-k=4": "write top_k=4",
    "evaluate.py --data.path notes.txt": "write data.path=notes.txt",
    "export.py --to folder": "write to=folder",
    "export.py --verbose": "there is no flag --verbose",
    "train.py model.dropout=2": "model.dropout=2.0 must be at least 0 and below 1",
    "train.py data.val_fraction=0.6": "data.val_fraction=0.6 must be above 0 and at most 0.5",
    "train.py optimizer.lr=nan": "optimizer.lr=nan must be finite and above 0",
    "train.py optimizer.lm_head_lr=inf": "optimizer.lm_head_lr=inf must be finite and above 0",
    "train.py optimizer.weight_decay=nan": "optimizer.weight_decay=nan must be finite and at least 0",
    "train.py optimizer.beta1=1": "optimizer.beta1=1.0 must be at least 0 and below 1",
    "train.py schedule.final_factor=1.5": "schedule.final_factor=1.5 must be at least 0 and at most 1",
    "train.py grad_clip=nan": "grad_clip=nan must be finite and at least 0",
    "train.py max_flops=inf": "max_flops=inf must be finite and above 0, or null for no limit",
    "train.py model.rope_theta=nan": "model.rope_theta=nan must be finite and above 0",
    "train.py model.rope_scaling_factor=inf": "model.rope_scaling_factor=inf must be finite and at least 1",
    "train.py model.norm_eps=nan": "model.norm_eps=nan must be finite and above 0",
    "train.py model.logit_softcap=nan": "model.logit_softcap=nan must be finite and above 0",
    "train.py batch_size=0": "batch_size=0 must be at least 1",
    "train.py seed=99999999999999999999999": "seed=99999999999999999999999 must be from 0 to 2^63 - 1",
    "train.py bogus": "cannot read the override 'bogus'",
    "train.py data.path=/nowhere/at/all.txt": "data.path=/nowhere/at/all.txt",
    "train.py device=cuda:99": "device=cuda:99",
    "train.py data=jsonl": "data=jsonl needs data.path",
    "train.py tokenizer.vocab_size=100": "tokenizer.vocab_size=100",
    "train.py wandb.mode=on": "wandb.mode=on is not known",
    "sample.py bogus": "cannot read 'bogus': settings are typed NAME=VALUE",
    "sample.py seed=many": "seed: Value 'many' of type 'str' could not",
    "sample.py stop=null": "stop takes a list, as in 'stop=[a,b]'",
    "train.py data.path=${foo}": "error: Interpolation key 'foo' not found",
    "train.py run_dir=": "run_dir= is empty: give a folder, or leave it out",
    "train.py resume=": "resume= is empty",
    "sample.py stop=[a": "stop=[a cannot be read as a list",
    "sample.py temprature=1": "did you mean temperature",
    "sample.py prompt=it's,read(self prompt_file=b": "prompt=it's,read(self and prompt_file=b are given",
    "evaluate.py data=x": "data: ",
    "evaluate.py stride=0": "stride=0 must be at least 1",
    "export.py": "to=FOLDER is needed",
    "sample.py": "there is no run under outputs/ yet: train one with `python train.py`",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_ends_in_one_sentence_and_status_1(command, tmp_path):
    result = run_here(*command.split(), cwd=tmp_path)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 1
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert MISTAKES[command] in lines[0]
    assert not list(tmp_path.iterdir())


def test_a_form_without_rope_has_a_head_of_any_size(tmp_path, text_file):
    typed = [*TINY, f"data.path={text_file}", "attention=average", "model.n_embd=36", "model.n_head=12"]
    assert run_here("train.py", *typed, cwd=tmp_path).returncode == 0


def test_what_a_preset_sets_may_mean_nothing():
    assert settings_of("attention=simple", "model=gpt2").model.qkv_bias


# The terminal


@pytest.mark.parametrize(
    ("script", "end", "status", "said"),
    [
        *((script, "--help | head -1; exit ${PIPESTATUS[0]}", 0, "") for script in SCHEMAS),
        (
            "train.py",
            "--help > /dev/full",
            1,
            "error: standard output or a file cannot be used (No space left on device)",
        ),
        ("sample.py", "--help > /dev/full", 1, "error: standard output or a file cannot be used (No space left"),
        ("evaluate.py", "--help >&-", 0, ""),
        ("export.py", ">&- 2>&- <&-", 1, ""),
        ("sample.py", "bogus 2> /dev/full", 1, ""),
    ],
)
def test_a_stream_that_is_gone_or_full_is_answered_in_a_sentence_or_not_at_all(script, end, status, said, tmp_path):
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / script))} {end}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == status and done.stderr.startswith(said) and len(done.stderr.splitlines()) == bool(said)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["> /dev/full 2> /dev/full", ">&- 2>&-", "2>&1 | true; exit ${PIPESTATUS[0]}"])
def test_a_run_goes_on_without_its_console(end, text_file, tmp_path):
    typed = shlex.join([sys.executable, str(ROOT / "train.py"), *TINY, f"data.path={text_file}", "run_dir=run"])
    done = subprocess.run(["bash", "-c", f"{typed} {end}"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "best validation loss" in (tmp_path / "run/train.log").read_text()
    assert (tmp_path / "run/checkpoints/step_1").is_dir()


def test_nothing_that_is_printed_or_logged_steers_a_terminal(tmp_path):
    (tmp_path / "text\x1b]0;title\x07.txt").write_text("\x1b]0;title\x07\u202ex\x9b31m\n" * 900, encoding="utf-8")
    typed = [*TINY, "data.path='text*.txt'", "run_dir=run", "max_steps=40", "sample_tokens=40"]
    result = run_here("train.py", *typed, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "run/train.log").read_text(encoding="utf-8")
    for text in (result.stdout, result.stderr, log, run_here("evaluate.py", cwd=tmp_path).stdout):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "␛]0;" in log  # the model has learned it
    refused = run_here("sample.py", "checkpoint=a\x1b]0;title\x07\nb", cwd=tmp_path)
    assert "␛]0;title␇␊b" in refused.stderr and len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(("script", "typed"), [("sample.py", []), ("evaluate.py", []), ("export.py", ["to=x"])])
def test_ctrl_c_outside_the_training_loop_ends_in_one_line(script, typed, tmp_path, monkeypatch):
    monkeypatch.setattr("runs.checkpoint.open_checkpoint", mock.Mock(side_effect=KeyboardInterrupt))
    result = run_here(script, *typed, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (130, "stopped by Ctrl-C\n")


def test_ctrl_c_while_a_command_is_imported_ends_in_one_line(tmp_path):
    code = f"import sys; sys.argv[0] = {str(ROOT / 'train.py')!r}; import console; raise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")


# Help


@pytest.mark.parametrize("script", SCHEMAS)
def test_help_lists_every_setting_with_its_default_and_meaning(script, tmp_path):
    shown = run_here(script, "--help", cwd=tmp_path).stdout
    assert f":  python {script} " in shown.splitlines()[0] and "Hydra" not in shown
    words = " ".join(shown.split())
    for name in setting_names(SCHEMAS[script]):
        assert f"  {name}=" in shown or any(other.startswith(f"{name}.") for other in setting_names(SCHEMAS[script]))
    for name, meaning in setting_docs(SCHEMAS[script]).items():
        assert len(meaning) > 9, name
        assert meaning.split(". ")[0].rstrip(".") in words
    assert ("gpt2_xl" in shown and "+experiment" in shown and "-m" in shown) == (script == "train.py")


def test_help_shows_defaults_as_they_are_typed_and_hydras_own_flags_work(tmp_path):
    shown = run_here("train.py", "--help", cwd=tmp_path).stdout
    for setting in ("max_steps=null", "dry_run=false", "optimizer.lr=0.02", "tokenizer.name=bpe", 'sample_prompt=""'):
        assert f"  {setting} " in shown
    shown = run_here("train.py", "--cfg", "job", "model=small", cwd=tmp_path)
    assert shown.returncode == 0 and "n_embd: 512" in shown.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCHEMAS)
def test_help_answers_without_waiting_for_torch_or_hydra(script):
    code = f"""import json, sys; sys.argv = ['{script}', '--help']; import {script[:-3]} as command; command.main()
print(json.dumps([name for name in ('torch', 'hydra') if name in sys.modules]))"""
    started = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert time.perf_counter() - started < 3, "on a busy machine; torch alone would add more than a second"
    assert json.loads(result.stdout.splitlines()[-1]) == (["hydra"] if script == "train.py" else [])


def test_tab_completes_settings_and_options_as_the_readme_says(tmp_path):
    (line,) = re.findall(r'^eval "\$\(python .*\)"', (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    ask = '; COMP_LINE="python $1" COMP_POINT=99 COMP_CWORD=2; hydra_bash_completion; echo ${COMPREPLY[@]}'
    expected = {
        "train.py optimizer=": "optimizer=adamw optimizer=muon",
        "train.py model.n_l": "model.n_layer=",
        "sample.py prompt": "prompt= prompt_file= prompts=",
    }
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for typed, completed in expected.items():
        bash = ["bash", "-c", line + ask, "bash", typed]
        done = subprocess.run(bash, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.stdout.startswith(completed) and done.stderr == ""  # some versions of Hydra add the default


# Runs


def test_train_then_sample_as_a_person_types_them(text_file, tmp_path):
    overrides = f"""data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer.vocab_size=300 max_steps=12
        model.n_layer=1 model.n_embd=32 model.block_size=16 eval_interval=6 sample_tokens=8 device=cpu"""
    trained = run("train.py", *overrides.split(), cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    advice = trained.stdout.strip().splitlines()[-1].split("python ")[1].split()
    by_advice, newest = run(*advice, cwd=tmp_path), run_here("sample.py", cwd=tmp_path)
    assert by_advice.returncode == 0 and by_advice.stdout == newest.stdout and len(newest.stdout) > 1

    asked = ["prompt_file=-", "num_samples=2", "max_new_tokens=5"]
    prompted = run_here("sample.py", *asked, cwd=tmp_path, stdin="Ünïcode, = '")
    assert prompted.stdout.count("Ünïcode, = '") == 2 and "--- sample 2 of 2" in prompted.stdout

    second = run_here("train.py", *overrides.split(), cwd=tmp_path)
    assert "Preparing" in trained.stdout and "Preparing" not in second.stdout


def test_a_run_has_all_its_files_in_run_dir_and_those_of_another_stay_as_they_are(text_file, tmp_path):
    typed = [*TINY, f"data.path={text_file}", "run_dir=my ${seed} run"]
    assert run_here("train.py", *typed, cwd=tmp_path).returncode == 0
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "my 1 run").rglob("*")}
    assert {"checkpoints", "metrics.jsonl", "summary.json"} <= files.keys()
    assert {path.name for path in tmp_path.iterdir()} == {"my 1 run", "cache", text_file.name}
    again = run_here("train.py", *typed, "seed=2", "run_dir=my 1 run", cwd=tmp_path)
    assert again.returncode == 1 and "run_dir=my 1 run already holds a run" in again.stderr
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "my 1 run").rglob("*")} == files


def test_a_resumed_run_has_its_own_settings_but_for_what_is_asked(text_file, tmp_path):
    start = [*TINY, f"data.path={text_file}", "run_dir=run", "sample_prompt=\\${x}", "schedule=constant", "seed=7"]
    start += ["schedule.warmup_steps=1"]
    assert run_here("train.py", *start, cwd=tmp_path).returncode == 0
    before = open_checkpoint(str(tmp_path / "run")).meta["config"]
    assert before["sample_prompt"] == "${x}"
    resumed = run_here("train.py", "resume=run", "max_steps=2", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    after = open_checkpoint(str(tmp_path / "run")).meta["config"]
    assert after == before | {"max_steps": 2, "resume": "run"}
    finished = run_here("train.py", "resume=auto", "run_dir=run", cwd=tmp_path)
    assert finished.returncode == 1 and "run_dir=run already holds a run" in finished.stderr
    # A group's option that is typed replaces the whole group.
    other = run_here("train.py", "resume=run", "schedule=warmup_stable_decay", cwd=tmp_path)
    assert other.returncode == 1
    assert "schedule.name=warmup_stable_decay (was constant), schedule.warmup_steps=10 (was 1)" in other.stderr


@pytest.mark.parametrize("place", ["file/run", "file"])
def test_a_run_directory_that_cannot_be_made_is_named(place, text_file, tmp_path):
    (tmp_path / "file").write_text("x")
    result = run_here("train.py", f"run_dir={place}", f"data.path={text_file}", *TINY, cwd=tmp_path)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert f"run_dir={place} cannot be made" in result.stderr


def test_a_jobs_mistake_is_said_with_its_number(text_file, tmp_path):
    result = run_here("train.py", "-m", f"data.path={text_file}", *TINY, "model.n_head=3,4", cwd=tmp_path)
    assert "job 0: model.n_head=3" in result.stdout
    assert "job 0 failed: model.n_head=3 does not divide model.n_embd=32" in result.stdout

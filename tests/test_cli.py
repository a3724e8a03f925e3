"""The commands as a person types them: settings, mistakes, help."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import run_here
from hydra import compose, initialize_config_dir
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sample
import train
from runs.checkpoint import open_checkpoint
from runs.quoting import QUOTED, quote_prompts
from runs.summary import read_summary
from settings import CONF, explain, place_run, to_settings
from training.config import TrainConfig

pytestmark = pytest.mark.usefixtures("no_pictures")
ROOT = Path(train.__file__).parent


def run(script: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def settings_of(*overrides: str) -> TrainConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_settings(compose("train", ["run_dir=null", *overrides]), TrainConfig)


@pytest.mark.parametrize(
    "override",
    [
        f"{group.name}={option.stem}"
        for group in sorted(CONF.iterdir())
        if group.is_dir()
        for option in sorted(group.glob("*.yaml"))
    ],
)
def test_every_option_of_every_group_is_a_valid_configuration(override):
    extra = {"data=text": ["data.path=x"], "data=jsonl": ["data.path=x"], "data=hf": ["data.name=x"]}
    prefix = "+" if override.startswith("experiment") else ""
    settings_of(prefix + override, *extra.get(override, []))


def test_a_short_name_selects_the_attention():
    assert settings_of("attention=matmul").model.attention == "matmul"
    assert settings_of("attention=matmul", "model=gpt2").model.attention == "matmul"


def test_a_path_alone_reads_that_text():
    config = settings_of("data.path=notes.txt")
    assert config.data.source == "text" and config.data.held_out == 0.1


MISTAKES = {
    "train.py model.n_heads=8": "there is no setting model.n_heads: did you mean model.n_head",
    "train.py optimiser=adamw": "there is no setting optimiser: did you mean optimizer",
    "train.py +foo=1": "there is no setting foo",
    "train.py +model.foo=1": "there is no setting model.foo",
    "train.py model.n_head=many": "model.n_head takes a whole number",
    "train.py max_steps=1.5": "max_steps takes a whole number",
    "train.py model.qk_norm=maybe": "model.qk_norm takes true or false",
    "train.py model=huge": "model=huge does not exist: choose model from gpt2",
    "train.py attention=fast": "attention=fast does not exist: choose attention from",
    "train.py +experiment=nope": "experiment=nope does not exist: choose experiment from",
    "train.py experiment=shakespeare": "+experiment=shakespeare",
    "train.py model.n_head=3": "n_head=3 does not divide n_embd=128",
    "train.py model.n_embd=12 model.n_head=4": "odd head size of 3",
    "train.py +experiment=ladder": "many runs are asked for (of attention × seed), and one would be made: add -m",
    "train.py attention=simple model.n_embd=33 model.head_size=32": "head of attention=simple gives an odd head size",
    "train.py seed=1,2": "add -m to try each value",
    "train.py data.path=it's": "cannot read the override",
    "train.py -m sample_prompt=it's": "cannot read the override",
    "train.py seed=1 -m sample_prompt=it's": "cannot read the override",
    "train.py run_dir=a hydra.run.dir=b": "run_dir=a and hydra.run.dir=b are both given: choose one",
    "train.py run_dir=a -m seed=1,2": "run_dir is one folder for all jobs",
    "train.py optimizer.lr=nan": "optimizer.lr=nan must be a positive number",
    "train.py optimizer.lm_head_lr=inf": "optimizer.lm_head_lr=inf must be a positive number",
    "train.py optimizer.weight_decay=nan": "optimizer.weight_decay=nan must be a number from 0 on",
    "train.py grad_clip=nan": "grad_clip=nan must be a number from 0 on",
    "train.py max_flops=inf": "max_flops=inf must be a positive number, or null for no limit",
    "train.py model.rope_theta=nan": "rope_theta=nan must be a positive number",
    "train.py model.rope_scaling_factor=inf": "rope_scaling_factor=inf must be a number from 1 on",
    "train.py model.norm_eps=nan": "norm_eps=nan must be a positive number",
    "train.py model.logit_softcap=nan": "logit_softcap=nan must be a positive number",
    "train.py seed=99999999999999999999999": "seed=99999999999999999999999 must be from 0 to 2^63 - 1",
    "train.py bogus": "cannot read the override 'bogus'",
    "train.py data.path=/nowhere/at/all.txt": "data.path=/nowhere/at/all.txt",
    "train.py device=cuda:99": "device=cuda:99",
    "train.py data=jsonl": "data=jsonl needs data.path",
    "train.py tokenizer.vocab_size=100": "tokenizer.vocab_size=100",
    "train.py wandb.mode=on": "wandb.mode=on is not known",
    "sample.py top_p=0": "top_p=0.0 must be above 0",
    "sample.py top_p=1.01": "top_p=1.01",
    "sample.py top_k=0": "top_k=0",
    "sample.py temperature=-1": "temperature=-1.0",
    "sample.py num_samples=0": "num_samples=0",
    "sample.py checkpoint=/nowhere/at/all": "checkpoint=/nowhere/at/all does not exist",
    "sample.py checkpoint=.": "is not a checkpoint",
    "sample.py prompt_file=/nowhere": "prompt_file=/nowhere cannot be read",
    "sample.py prompt=a prompt_file=b": "prompt=a and prompt_file=b are given",
    "sample.py prompt=it's,read(self prompt_file=b": "prompt=it's,read(self and prompt_file=b are given",
    "sample.py temprature=1": "did you mean temperature",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_ends_in_one_sentence_and_status_1(command, tmp_path):
    result = run_here(*command.split(), cwd=tmp_path)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 1
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert MISTAKES[command] in lines[0]
    assert not list(tmp_path.glob("outputs/**/checkpoints"))


def test_sample_without_a_run_says_what_to_do(tmp_path):
    result = run_here("sample.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert "python train.py" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"]], ids=str)
def test_help_answers_without_waiting_for_torch(flags):
    for script in ("train.py", "sample.py"):
        started = time.perf_counter()
        result = run(script, *flags)
        assert result.returncode == 0 and "seed" in result.stdout
        assert time.perf_counter() - started < 3  # on a busy machine; torch alone would add more than a second
    loaded = "import sys; sys.argv = ['train.py', '--help']; import train; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("script", ["train.py", "sample.py", "evaluate.py", "export.py"])
def test_help_tells_how_the_command_is_typed(script, tmp_path):
    shown = run_here(script, "--help", cwd=tmp_path).stdout
    assert f":  python {script} " in shown.splitlines()[0] and "Hydra" not in shown
    assert ("model: gpt2" in shown) == (script == "train.py")  # the groups are the training's


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


def prompt_of(argument: str) -> str:
    return compose("sample", quote_prompts([argument])).prompt


PROMPTS = ["Hello, world", "def read(self", "it's", "a=b", 'say "hi" and "ho"', "a\nb\n", "C:\\new\\", 'a\\"b', "x\\\n"]
PROMPTS += [
    "${x}",
    "\\${x}",
    "${",
    "$5",
    "日本 😀",
    "",
    "  two",
    "null",
    "true",
    "1e3",
    "[a]",
    "{a: b}",
    "choice(a,b)",
    "'",
    '"a',
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_what_was_typed(prompt):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert prompt_of(f"prompt={prompt}") == prompt


@given(prompt=st.text(st.sampled_from("\\${}\"' a\n,()")))
@settings(max_examples=60, deadline=None)
def test_a_prompt_of_any_characters_is_what_was_typed(prompt):
    assume(not QUOTED.fullmatch(prompt))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert prompt_of(f"prompt={prompt}") == prompt


def test_a_prompt_that_is_quoted_for_hydra_stays_so_and_a_sweeps_commas_separate():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert prompt_of('prompt="Hello, world"') == prompt_of("prompt='Hello, world'") == "Hello, world"
    for arguments in (["-m", "sample_prompt=a,b"], ["prompt"], ["prompts=a.jsonl"]):
        assert quote_prompts(arguments) == arguments


def test_a_resumed_run_remembers_a_prompt_as_it_was_typed(text_file, tmp_path):
    start = f"""run_dir=run data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer=byte model.n_layer=1
        model.n_embd=32 model.block_size=16 max_steps=1 sample_tokens=0 device=cpu sample_prompt=${{x}}"""
    assert run_here("train.py", *start.split(), cwd=tmp_path).returncode == 0
    resumed = run_here("train.py", "resume=run", "max_steps=2", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert open_checkpoint(str(tmp_path / "run")).meta["config"]["sample_prompt"] == "${x}"


def test_the_sample_command_is_configured_by_its_dataclass():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert to_settings(compose("sample"), sample.SampleConfig) == sample.SampleConfig()


@pytest.mark.parametrize("place", ["hydra.run.dir", "run_dir"])
def test_a_run_directory_that_cannot_be_made_is_named(place, tmp_path):
    (tmp_path / "file").write_text("x")
    settings = ["max_steps=1", f"data.path={ROOT / 'README.md'}", f"data.cache_dir={tmp_path}/cache", "tokenizer=byte"]
    result = run_here("train.py", f"{place}=file/run", *settings, cwd=tmp_path)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "file/run" in result.stderr and "cannot be written" in result.stderr


def test_a_run_that_is_stopped_before_it_trains_says_so(text_file, tmp_path, monkeypatch):
    def prepare(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("training.start.prepare", prepare)
    stopped = run_here("train.py", "run_dir=run", f"data.path={text_file}", cwd=tmp_path)
    assert (stopped.returncode, stopped.stderr) == (130, "")
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["reason"]) == ("stopped", "by a signal before the first step")


def test_a_folder_in_the_place_of_a_runs_lock_is_named(text_file, tmp_path):
    (tmp_path / "run/.lock").mkdir(parents=True)
    settings = f"run_dir=run max_steps=1 data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer=byte"
    result = run_here("train.py", *settings.split(), cwd=tmp_path)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "run/.lock cannot be written (Is a directory): give a folder" in result.stderr


@pytest.mark.parametrize(
    ("typed", "placed"),
    [
        (["run_dir=a/b", "seed=2"], ["hydra.run.dir=a/b", "seed=2"]),
        (['run_dir="my, run"'], ['hydra.run.dir="my, run"']),
        (["run_dir=${seed}", "hydra.run.dir=${seed}"], 2 * ["hydra.run.dir=${seed}"]),
        (["run_dir=", "seed=2"], ["seed=2"]),
        (["run_dir=null"], []),
        (["run_dir=a", "--cfg", "job"], ["run_dir=a", "--cfg", "job"]),
        (["run_dir=a", "resume=auto"], ["hydra.run.dir=a"]),
    ],
    ids=str,
)
def test_hydras_files_go_where_the_run_goes(typed, placed):
    assert place_run(typed) == placed


def test_a_run_has_all_its_files_in_run_dir_and_those_of_another_stay_as_they_are(text_file, tmp_path):
    settings = f"""run_dir=run data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer=byte model.n_layer=1
        model.n_embd=32 model.block_size=16 max_steps=1 sample_tokens=0 device=cpu"""
    assert run_here("train.py", *settings.split(), cwd=tmp_path).returncode == 0
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert {"checkpoints", "train.log", "overrides.yaml", "summary.json"} <= files.keys()
    assert not (tmp_path / "outputs").exists()
    again = run_here("train.py", *settings.split(), "seed=2", cwd=tmp_path)
    assert again.returncode == 1 and "run_dir=run already holds a run" in again.stderr
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == files


def test_a_full_or_read_only_disk_is_a_sentence_however_it_is_met():
    full = OSError(errno.ENOSPC, "No space left on device", "outputs/run/train.log")
    expected = "outputs/run/train.log cannot be written (No space left on device): give a folder"
    assert explain(full, TrainConfig).startswith(expected)
    wrapped = ValueError("Unable to configure handler 'file'")
    wrapped.__cause__ = full
    assert explain(wrapped, TrainConfig).startswith(expected)
    assert explain(OSError(errno.EIO, "Input/output error"), TrainConfig) is None

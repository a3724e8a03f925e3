"""The commands as processes: closed streams, Ctrl-C, terminals and help."""

import ast
import errno
import importlib
import json
import logging
import os
import pickle
import re
import runpy
import shlex
import subprocess
import sys
import unicodedata
from contextlib import ExitStack
from dataclasses import asdict
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from unittest import mock

import pytest
from conftest import first_of, run_here, some

import train
from common.errors import CheckpointError, DataError, SettingsError, naming
from common.files import reading, writing
from common.mistakes import mistakes_explained, sentence_for
from common.text import command as started_by
from common.text import visible
from data.config import TokenizerConfig
from data.encoding import NotText
from data.tokenizer import make_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from runs.checkpoint import open_checkpoint, save_checkpoint
from training.config import TrainConfig

pytestmark = pytest.mark.usefixtures("no_pictures")
ROOT = Path(train.__file__).parent
COMMANDS = ["train.py", "sample.py", "eval.py", "export.py"]
TINY = ["tokenizer=byte", "model.n_layer=1", "model.n_embd=32", "model.block_size=16", "max_steps=1"]
TINY += ["sample_tokens=0", "device=cpu", "data.cache_dir=cache"]


def shell(command: str, cwd: Path = ROOT, **more) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-c", command], cwd=cwd, capture_output=True, text=True, timeout=120, **more)


def typed(script: str) -> str:
    return shlex.join([sys.executable, str(ROOT / script)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "end", "status", "said"),
    [
        ("train.py", "--help | head -1; exit ${PIPESTATUS[0]}", 0, ""),
        ("sample.py", "--help > /dev/full", 1, "error: standard output or a file cannot be used (No space left"),
        ("eval.py", "--help >&-", 0, ""),
        ("export.py", ">&- 2>&- <&-", 1, ""),
        ("sample.py", "bogus 2> /dev/full", 1, ""),
    ],
)
def test_a_stream_that_is_gone_or_full_is_answered_in_a_sentence_or_not_at_all(script, end, status, said, tmp_path):
    done = shell(f"{typed(script)} {end}", tmp_path)
    assert done.returncode == status and done.stderr.startswith(said) and len(done.stderr.splitlines()) == bool(said)


@pytest.mark.long
@pytest.mark.parametrize("end", first_of("> /dev/full 2> /dev/full", ">&- 2>&-", "2>&1 | true; exit ${PIPESTATUS[0]}"))
def test_a_run_goes_on_without_its_console(end, text_file, tmp_path):
    done = shell(f"{typed('train.py')} {shlex.join([*TINY, f'data.path={text_file}', 'run_dir=run'])} {end}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "best validation loss" in (tmp_path / "run/train.log").read_text()
    assert (tmp_path / "run/checkpoints/step_1").is_dir()


@pytest.mark.slow
def test_nothing_that_is_printed_steers_a_terminal_and_a_log_has_the_true_letters(tmp_path):
    (tmp_path / "text\x1b]0;title\x07.txt").write_text("\x1b]0;title\x07\u202ex\x9b31m\n" * 900, encoding="utf-8")
    settings = [*TINY, "data.path=text*.txt", "run_dir=run", "max_steps=40", "sample_tokens=40"]
    result = run_here("train.py", *settings, cwd=tmp_path, is_terminal=True)
    assert result.returncode == 0, result.stderr
    scored = run_here("eval.py", "checkpoint=run", cwd=tmp_path, is_terminal=True).stdout
    for text in (result.stdout, result.stderr, scored):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "␛]0;" in result.stdout  # the model has learned it
    assert "\x1b]0;" in (tmp_path / "run/train.log").read_text(encoding="utf-8")
    refused = run_here("sample.py", "checkpoint=a\x1b]0;title\x07\nb", cwd=tmp_path)
    assert "␛]0;title␇␊b" in refused.stderr and len(refused.stderr.splitlines()) == 1


def test_a_message_without_a_handler_steers_no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", mock.Mock(isatty=lambda: True))
    with mistakes_explained():
        pass
    assert logging.lastResort.format(logging.makeLogRecord({"msg": "a\x1b[31m"})) == "a␛[31m"


def test_a_text_that_ends_a_command_is_printed_as_python_would(capsys):
    """The usage of docs/recall.py was not: status 1 without a word."""
    with pytest.raises(SystemExit, match="1"), mistakes_explained():
        sys.exit("python docs/recall.py FOLDER")
    assert capsys.readouterr() == ("", "python docs/recall.py FOLDER\n")


def test_a_library_whose_machine_code_does_not_fit_is_told_in_a_sentence(tmp_path, monkeypatch):
    """NumPy ends such a fault of its own in 30 lines, and the explanation of the fault imported it again."""
    name = "broken_library"
    file = tmp_path / f"{name}{EXTENSION_SUFFIXES[0]}"
    file.write_bytes(b"no machine code")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)

    def said() -> str | None:
        try:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise ImportError("IMPORTANT: PLEASE READ THIS") from error
        except ImportError as error:
            return sentence_for(error)

    assert said().startswith(f"a library does not fit this system ({file}: ")
    assert said().endswith("): install into a fresh virtual environment.")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    assert "): unset LD_LIBRARY_PATH, which names libraries to take first, or install into" in said()
    # A name that a module of ours lacks is a mistake of ours.
    assert sentence_for(ImportError("cannot import name 'x'", name="common.text", path="common/text.py")) is None
    assert sentence_for(ModuleNotFoundError("No module named 'absent'", name="absent")) is None


@pytest.mark.slow
def test_the_signs_of_a_terminal_are_of_what_moves_its_cursor_or_reorders_text_and_of_nothing_else():
    bidi = re.compile("LEFT-TO-RIGHT|RIGHT-TO-LEFT|STRONG ISOLATE|POP DIRECTIONAL|ARABIC LETTER MARK")
    for letter in map(chr, range(0x110000)):
        kind = unicodedata.category(letter)
        acts = kind in ("Cc", "Zl", "Zp") or (kind == "Cf" and bidi.search(unicodedata.name(letter, "")))
        if acts and letter not in "\t\n":
            assert len(visible(letter)) in (1, 8) and visible(letter)[0] in "<" + "".join(
                map(chr, range(0x2400, 0x2422))
            )
        elif kind == "Cs":  # of a byte that is no letter
            assert visible(letter) == "\ufffd"
        else:
            assert visible(letter) == letter


# Paths

LONG = "x" * 300
NAMED = {
    "train.py": ["resume", "run_dir", "init_from", "data.cache_dir", "data.path", "data=nanogpt data.path"],
    "sample.py": ["checkpoint", "prompt_file"],
    "eval.py": ["checkpoint", "checkpoint=run against", "checkpoint=run data.path"],
    "export.py": ["checkpoint", "to"],
}


@pytest.mark.slow
def test_a_name_that_is_too_long_is_refused_with_its_setting(text_file, tmp_path):
    model = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, vocab_size=257)
    tokenizer, config = make_tokenizer(TokenizerConfig(name="byte"), ""), TrainConfig(model=model)
    save_checkpoint(tmp_path / "run/checkpoints/step_1", model=GPT(model), tokenizer=tokenizer, config=config)
    for script, settings in NAMED.items():
        for setting in settings:
            more = [*TINY, f"data.path={text_file}"] if setting in ("run_dir", "data.cache_dir") else []
            more += ["to=new"] * (script == "export.py" and setting != "to")
            done = run_here(script, *more, *f"{setting}={LONG}".split(), cwd=tmp_path)
            name = setting.split()[-1]
            assert done.stderr == f"error: {name}={LONG} cannot be used (File name too long): name another place.\n"


@pytest.mark.parametrize(("opened", "said"), [(reading, "read"), (writing, "written")])
def test_a_path_that_is_read_has_another_remedy_than_one_that_is_written(opened, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentence = rf"^to=a cannot be {said} \(Permission denied\)"
    with pytest.raises(SettingsError, match=sentence) as refused, opened("to", "a"):
        raise PermissionError(errno.EACCES, "Permission denied", "x")
    assert ("that you may read" in str(refused.value)) == (opened is reading)


def test_a_mistake_is_blamed_on_the_setting_that_was_typed():
    with pytest.raises(SettingsError, match="^against=no does not exist: give a run"), naming("against", "no"):
        open_checkpoint("no")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            CheckpointError("is damaged", "use another", setting="checkpoint", value=Path("run")),
            "against=run is damaged",
        ),
        (SettingsError("is damaged", "use another", setting="against", value="run"), "against=run is damaged"),
        (DataError("line 3 is damaged", "use another", value="/home/run"), "against=run line 3 is damaged"),
        (DataError(": x is damaged", "use another", value="/home/run"), "against=run: x is damaged"),
        (DataError("is damaged", "use another", value="run/a"), "against=run: run/a is damaged"),
        (SettingsError("is damaged", "use another", setting="seed", value="run"), "against=run: seed=run is damaged"),
        (SettingsError("it is damaged", "use another"), "against=run: it is damaged"),
        # The words of a sentence do not matter.
        (SettingsError("checkpoint=run is damaged", "use another"), "against=run: checkpoint=run is damaged"),
    ],
    ids=str,
)
def test_an_error_is_blamed_by_its_fields_and_says_its_value_once(error, said):
    for opened in (1, 2):  # within the same setting it is blamed once
        with ExitStack() as stack:
            stack.enter_context(pytest.raises(type(error), match=f"^{re.escape(said)}: use another.$"))
            for _ in range(opened):
                stack.enter_context(naming("against", "run", "/home/run"))
            raise error
        assert not str(error).startswith("against=run:")  # it may be raised again elsewhere


def test_an_error_crosses_to_another_process_with_its_fields():
    with pytest.raises(NotText) as refused, naming("data.path", "x"):
        raise NotText("x", "an image", "give a file of text")
    again = pickle.loads(pickle.dumps(refused.value))
    assert str(again) == "data.path=x is an image: give a file of text."
    assert vars(again) == vars(refused.value)
    assert (again.setting, again.value, again.noun) == ("data.path", "x", "an image")


# Ctrl-C


@pytest.mark.parametrize(("script", "settings"), [("sample.py", []), ("eval.py", []), ("export.py", ["to=x"])])
def test_ctrl_c_outside_the_training_loop_ends_in_one_line(script, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(f"cli.{script.removesuffix('.py')}.open_checkpoint", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(os, "_exit", sys.exit)
    done = run_here(script, *settings, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")


# Help


@pytest.mark.slow
def test_a_mistake_in_the_settings_of_a_run_or_a_sweep_does_not_wait_for_torch():
    mistakes = [["model.n_head=x"], ["-m", "seed=x,y"], ["-m", "hydra.sweeper.variants=3"]]
    code = f"""import runpy, sys; from contextlib import suppress
for mistake in {mistakes}:
    sys.argv = ['train.py', *mistake]
    with suppress(SystemExit): runpy.run_path('train.py', run_name='__main__')
    print('torch' in sys.modules)"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"(error: .*\n){3}", result.stderr) and result.stdout == "False\n" * 3


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 10, 13), (3, 11, 0)])
def test_an_older_python_is_told_which_one_is_needed(version, monkeypatch):
    monkeypatch.setattr("sys.version_info", version)
    monkeypatch.setattr("sys.version", f"{'.'.join(map(str, version))} (main)")
    with ExitStack() as stack:
        if version < (3, 11):
            asked = r"error: tinygpt needs Python 3\.11 or later, and this is 3\.\d+\.\d+: make a virtual environment"
            stack.enter_context(pytest.raises(SystemExit, match=asked))
        runpy.run_path(str(ROOT / "common/__init__.py"))


def test_what_an_older_python_reads_before_it_is_refused_has_no_newer_grammar():
    for file in ("sample.py", "eval.py", "export.py", "cli/__init__.py", "common/__init__.py"):
        tree = ast.parse((ROOT / file).read_text(), feature_version=(3, 7))
        first = next(node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
        assert ast.unparse(first) in ("import common", "import sys", "from cli.command import run_command")


@pytest.mark.parametrize("script", COMMANDS)
def test_help_answers_without_waiting_for_torch_numpy_or_hydra(script):
    code = f"""import json, runpy, sys; from contextlib import suppress; sys.argv = ['{script}', '--help']
with suppress(SystemExit): runpy.run_path('{script}', run_name='__main__')
print(json.dumps([name for name in ('torch', 'numpy', 'hydra', 'omegaconf') if name in sys.modules]))"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert json.loads(lines[-1]) == [] and f":  python {script}" in lines[0]
    assert ("gpt2_xl" in result.stdout and "-m" in result.stdout) == (script == "train.py")


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use cannot be removed there")
@pytest.mark.parametrize(
    ("script", "arguments"),
    some([("train.py", ""), ("sample.py", "checkpoint=run"), ("train.py", "-m seed=1,2"), ("eval.py", "--help")], 4),
)
def test_a_command_in_a_folder_that_was_removed_ends_in_a_sentence(tmp_path, script, arguments):
    """Its remedy works if there is a new folder of that name, as after a checkout of another branch."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    typed_there = f"{typed(script)} {arguments}"
    done = shell(
        f"rmdir '{folder}'; {typed_there}; echo $?; mkdir '{folder}'; cd \"$PWD\" && {typed_there} --help", cwd=folder
    )
    said = 'error: the folder in which this command is typed was removed: type cd "$PWD" if there is a new one of its'
    assert done.stderr == f"{said} name, or go to another.\n"
    assert done.stdout.startswith("1\n") and f":  python {script}" in done.stdout


@pytest.mark.slow
def test_help_begins_with_what_the_command_does_under_python_oo_too():
    done = subprocess.run([sys.executable, "-OO", ROOT / "eval.py", "--help"], capture_output=True, text=True)
    assert done.stdout.startswith("Measure how well a checkpoint predicts text:  python eval.py")


@pytest.mark.parametrize("typed", ["--cfg job +model=small", "-m model=small --cfg job"])
def test_hydras_own_flag_shows_the_settings_of_a_run_and_nothing_is_written(tmp_path, typed):
    shown = run_here("train.py", *typed.split(), cwd=tmp_path)
    assert shown.returncode == 0 and "n_embd: 512" in shown.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "typed",
    ["seed=7 --cfg job model=small", "--cfg job seed=7 -p model model=small", "~optimizer.lr --cfg job model=small"],
)
def test_hydras_own_flag_stands_between_settings(tmp_path, typed):
    """The settings behind it were "unrecognized arguments"; small is 512 wide."""
    shown = run_here("train.py", *typed.split(), cwd=tmp_path)
    assert shown.returncode == 0 and "n_embd: 512\n" in shown.stdout
    assert ("\nseed: 7\n" in shown.stdout) == (typed.startswith("seed"))


def test_hydras_own_flag_shows_an_experiment_of_ones_own_after_other_settings(tmp_path):
    (tmp_path / "a=b" / "experiment").mkdir(parents=True)
    (tmp_path / "a=b" / "experiment" / "mine.yaml").write_text("# @package _global_\noptimizer:\n  lr: 2e-3\n")
    shown = run_here(
        "train.py", *["seed=7", "--config-dir", "a=b", "experiment=mine", "--cfg", "job", "max_steps=3"], cwd=tmp_path
    ).stdout
    assert "\nseed: 7\n" in shown and "\nmax_steps: 3\n" in shown and "\n  lr: 0.002\n" in shown


def test_hydras_own_flag_shows_what_a_run_inherits_and_texts_as_typed(tmp_path, monkeypatch):
    """They were the defaults, and 100000.0."""
    monkeypatch.setattr("cli.with_torch.inherited_settings", lambda typed, new: ({"model": {"n_embd": 16}}, typed))
    shown = run_here("train.py", "resume=RUN", "+sample_prompt=1e5", "--cfg", "job", cwd=tmp_path).stdout
    assert "  n_embd: 16\n" in shown and "\nsample_prompt: '1e5'\n" in shown and "\nresume: RUN\n" in shown


def test_hydras_own_flag_shows_the_model_of_the_weights_with_which_a_run_begins(tmp_path, monkeypatch):
    brought = {"model": asdict(GPTConfig(n_embd=48)), "tokenizer": {"name": "byte", "vocab_size": 300}}
    monkeypatch.setattr("cli.with_torch.settings_of_weights", lambda where: brought)
    shown = run_here("train.py", "init_from=RUN", "--cfg", "job", cwd=tmp_path).stdout
    assert "  n_embd: 48\n" in shown and "\n  name: byte\n  vocab_size: 300\n" in shown and "of_weights" not in shown


@pytest.mark.parametrize("typed", ["seed=1,2", "init_from=a,b"])
def test_hydras_own_flag_shows_one_job_of_a_sweep(typed, tmp_path):
    refused = run_here("train.py", "-m", typed, "--cfg", "job", cwd=tmp_path)
    said = f"error: '{typed}' has several values, and --cfg shows those of one job: type one of them.\n"
    assert refused.stderr == said


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("optimizer=", {"optimizer=adamw", "optimizer=muon"}),
        ("-m model.n_h", {"model.n_head="}),
    ],
)
def test_the_shell_completes_names_and_options_by_hydras_flag(typed, words, tmp_path, monkeypatch):
    monkeypatch.setenv("COMP_LINE", f"python train.py {typed}")
    answered = run_here("train.py", "-sc", "query=bash", cwd=tmp_path)
    assert {*answered.stdout.split()} == words and not list(tmp_path.iterdir()), answered.stderr


# Runs


def test_train_then_sample_as_a_person_types_them(text_file, tmp_path):
    settings = [*TINY, f"data.path={text_file}", "tokenizer=bpe", "tokenizer.vocab_size=300", "max_steps=12"]
    trained = shell(f"{typed('train.py')} {shlex.join(settings)}", tmp_path)
    assert trained.returncode == 0, trained.stderr
    sampling = trained.stdout.strip().splitlines()[-1]
    script, *advice = shlex.split(sampling.removeprefix("sample    python "))
    assert (tmp_path / script).resolve() == ROOT / "sample.py"  # from a folder without it
    by_advice = run_here("sample.py", *advice, cwd=tmp_path)
    newest = run_here("sample.py", cwd=tmp_path)
    assert by_advice.returncode == 0 and by_advice.stdout == newest.stdout and len(newest.stdout) > 1
    asked = ["prompt_file=-", "num_samples=2", "max_new_tokens=5"]
    prompted = run_here("sample.py", *asked, cwd=tmp_path, stdin="Ünïcode, = '")
    assert prompted.stdout.count("Ünïcode, = '") == 2 and "--- sample 2 of 2" in prompted.stdout
    second = run_here("train.py", *settings, cwd=tmp_path)
    assert "Preparing" in trained.stdout and "Preparing" not in second.stdout


@pytest.mark.slow
def test_a_run_has_all_its_files_in_run_dir_and_those_of_another_stay_as_they_are(text_file, tmp_path):
    settings = [*TINY, f"data.path={text_file}", "run_dir=my ${x} run"]
    assert run_here("train.py", *settings, cwd=tmp_path).returncode == 0
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "my ${x} run").rglob("*")}
    assert {"checkpoints", "metrics.jsonl", "summary.json"} <= files.keys()
    assert {path.name for path in tmp_path.iterdir()} == {"my ${x} run", "cache", text_file.name}
    again = run_here("train.py", *settings, "seed=2", cwd=tmp_path)
    assert again.returncode == 1 and "run_dir=my ${x} run already holds a run" in again.stderr
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "my ${x} run").rglob("*")} == files


@pytest.mark.slow
def test_a_mistake_ends_in_one_sentence_and_status_1_a_jobs_with_its_number(text_file, tmp_path):
    for command in ("train.py lr=1", "train.py +experiment=ladder", "sample.py", "eval.py stride=0", "export.py"):
        result = run_here(*command.split(), cwd=tmp_path)
        assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, command
        assert result.stderr.startswith("error: "), result.stderr
    result = run_here("train.py", "-m", f"data.path={text_file}", *TINY, "model.vocab_size=20,400", cwd=tmp_path)
    assert "job 0: model.vocab_size=20" in result.stdout
    assert "job 0 failed: model.vocab_size=20 is less than the tokenizer's" in result.stdout


def test_a_script_is_named_as_it_is_started_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert started_by("sample.py") == "python sample.py"
    monkeypatch.chdir(tmp_path)
    assert started_by("sample.py") == f"python {os.path.relpath(ROOT / 'sample.py')}"


@pytest.mark.parametrize(
    "name", ["docs/compare.py", "docs/probes.py", "docs/apart.py", "sweeps", "model.attention.choose"]
)
def test_each_command_beside_the_four_prints_its_docstring_for_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    try:
        if name.endswith(".py"):
            runpy.run_path(str(ROOT / name), run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as exiting:
        assert not exiting.code
    shown = capsys.readouterr()
    assert f"python {name}" in shown.out or f"python -m {name}" in shown.out
    assert "error" not in shown.err


PLAN = pytest.param("train.py dry_run=true data=tales", marks=pytest.mark.slow)


@pytest.mark.parametrize("typed", ["eval.py", "sample.py", "export.py to=x", PLAN])
def test_what_works_in_one_process_is_refused_under_torchrun(typed, tmp_path, monkeypatch):
    """Two processes would write each result twice."""
    monkeypatch.setattr("os._exit", sys.exit)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in variables.items() | {("TORCHELASTIC_RUN_ID", "x")}:
        monkeypatch.setenv(name, value)
    done = run_here(*typed.split(), cwd=tmp_path)
    said = "works in one process, and torchrun has started 2: type python "
    assert done.returncode == 1 and said in done.stderr, done.stderr
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun --nproc-per-node=1
    assert said not in run_here("eval.py", cwd=tmp_path).stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", "sample.py", "eval.py", "export.py"])
def test_a_command_is_that_of_its_own_clone_also_under_a_safe_path(script, tmp_path):
    """It ended in a traceback, or ran the code of a clone in PYTHONPATH."""
    for name in ("cli", "common"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of another clone')\n")
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(("Train", "Generate", "Measure", "Export")), done.stderr

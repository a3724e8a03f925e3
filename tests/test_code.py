"""code=FILE runs a person's own file before names are read, says what is wrong with it, and runs nothing unasked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import conftest
import pytest
import torch
import yaml
from conftest import random_gpt, some
from sweeping import ROOT, run_here, tiny
from test_distributed import torchrun

from cli.composition import compose_settings, register_inherited
from cli.eval import score_checkpoints
from cli.sample import write_samples
from common.errors import SettingsError
from common.settings import from_arguments
from data.config import VOCABULARIES, TokenizerConfig
from data.tasks import TASKS
from data.tokenizer import make_tokenizer
from generation.config import EvalConfig, SampleConfig, TextConfig
from model.attention import AttentionContext, check, choose, make_attention
from model.attention.code import RAN, explained, run_code
from model.attention.registry import FORMS, MODIFIERS
from model.cache import KVCache
from model.config import GPTConfig
from model.size import count_weights
from runs.checkpoint import as_json, open_checkpoint, read_meta, save_checkpoint
from runs.plugins import find_code, keep_code
from runs.summary import read_summary
from train import train
from training.config import TrainConfig
from training.distributed import Ranks
from training.start import check_machine, try_code

OWN = '''
import torch
from torch import nn

from data.tasks import task
from model.attention.contract import from_weights
from model.attention.modifiers import Modifier
from model.attention.registry import form, modifier

from .neighbour import FACTOR


@form("relu")
@from_weights
def relu(scores):
    n = (scores > -torch.inf).sum(-1, keepdim=True)
    return FACTOR * scores.relu() / n


@modifier("head_scale", changes="result")
class HeadScale(Modifier):
    def __init__(self, layer, config):
        super().__init__(layer, config)
        self.scale = nn.Parameter(torch.ones(layer.n_head))

    def finish(self, y, v, x, ctx):
        return y * self.scale[:, None, None].to(y.dtype)


@task("repeat", vocab_size=9)
def repeat(random, B, T, task):
    """The target of every position but the first is the first id."""
    inputs = random.randint(0, task.ids("repeat"), (B, T))
    targets = inputs[:, :1].repeat(T, axis=1)
    targets[:, 0] = -1
    return inputs, targets
'''
BEGINNING = "from model.attention.registry import form\n"
USED = BEGINNING + "form('mine')(None)\n"
sample = partial(conftest.run_here, "sample.py")


@pytest.fixture(autouse=True)
def _registries():
    """Forget the names and files of a test."""
    registries = (FORMS, MODIFIERS, VOCABULARIES, TASKS, RAN)
    before = [dict(registry) for registry in registries]
    yield
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)


def forget(*forms: str) -> None:
    """Forget what has run, as a new process does."""
    RAN.clear()
    for registry, names in ((FORMS, ["relu", *forms]), (MODIFIERS, ["head_scale"]), (VOCABULARIES, ["repeat"])):
        for name in names:
            registry.pop(name, None)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("FACTOR = 1\n")
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@pytest.mark.slow
def test_a_run_with_code_can_be_sampled_scored_and_resumed_with_the_same_file_alone(own, tmp_path):
    asked = [*tiny(tmp_path, max_steps=4), "attention=relu+head_scale", "run_dir=run"]
    result = run_here(*asked, "code=own.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "sample.py checkpoint=run code=own.py" in result.stdout
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert written["code"] == "own.py" and len(written["code_hash"]) == 16
    assert read_summary(tmp_path / "run").code_hash == written["code_hash"]
    commands = {
        "sample.py": ["checkpoint=run", "max_new_tokens=3"],
        "eval.py": ["checkpoint=run"],
        "export.py": ["checkpoint=run", "to=demo.html"],
        "train.py": ["resume=run", "max_steps=6"],
    }
    for script, arguments in commands.items():
        forget()
        without = conftest.run_here(script, *arguments, cwd=tmp_path)
        assert without.returncode == 1 and without.stderr.count("\n") == 1, script
        assert "attention=relu+head_scale: 'relu' is no form: " in without.stderr
        assert "code=FILE" in without.stderr if script == "train.py" else "as in code=own.py." in without.stderr
        if script != "export.py":  # a page knows our forms alone
            result = conftest.run_here(script, *arguments, "code=own.py", cwd=tmp_path)
            assert result.returncode == 0, result.stderr
    assert read_meta(tmp_path / "run/checkpoints/step_6").progress.finished


def test_a_run_begins_with_the_weights_of_a_model_of_the_files_names(own, tmp_path):
    """Its settings were read before the file ran: the remedy was the file that was typed."""
    run_code(str(own))
    model = random_gpt(attention="relu+head_scale")
    saved = asdict(TrainConfig()) | {"code": str(own)}
    save_checkpoint(tmp_path / "model", model=model, tokenizer=None, config=saved)
    forget()
    typed = {"init_from": str(tmp_path / "model"), "data.path": "a.txt"}
    with pytest.raises(SettingsError, match=f"give the file that registers it, as in code={re.escape(str(own))}.$"):
        compose_settings(register_inherited(typed))
    with pytest.raises(SettingsError, match=f"give the file that registers it, as in code={re.escape(str(own))}.$"):
        compose_settings(register_inherited(typed | {"code": "null"}))
    assert "relu" not in FORMS
    settings = compose_settings(register_inherited(typed | {"code": str(own)}))
    assert settings.model.attention == "relu+head_scale" and settings.code_hash == run_code(str(own))


@pytest.mark.slow
def test_a_run_keeps_the_file_and_its_neighbours_and_names_its_copy_where_they_are_gone(own, tmp_path):
    """A run whose file is gone could not be read any more."""
    asked = [*tiny(tmp_path, max_steps=2), "attention=relu", "code=own.py", "run_dir=run"]
    assert run_here(*asked, cwd=tmp_path).returncode == 0
    kept = {file.name: file.read_bytes() for file in (tmp_path / "run/code").iterdir()}
    assert kept == {file.name: file.read_bytes() for file in (own, tmp_path / "neighbour.py")}
    wanted = read_summary(tmp_path / "run")
    own.unlink()
    forget()
    without = conftest.run_here("sample.py", "checkpoint=run", cwd=tmp_path)
    kept_code = re.search(r"as in (code=[^ ]+)\.$", without.stderr)[1]
    assert kept_code == f"code={Path('run/code/own.py')}"
    for command in (["sample.py", "checkpoint=run"], ["train.py", "resume=run", "max_steps=4"]):
        done = conftest.run_here(*command, kept_code, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    # The run that went on with its own copy has it still, and the same hash.
    assert {file.name: file.read_bytes() for file in (tmp_path / "run/code").iterdir()} == kept
    assert read_summary(tmp_path / "run").code_hash == wanted.code_hash


@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
def test_the_copy_of_a_link_has_the_links_name(own, tmp_path):
    """The copy had the name of the file behind it, under which no command looked."""
    (tmp_path / "latest.py").symlink_to("own.py")
    run_code(str(tmp_path / "latest.py"), VOCABULARIES)
    keep_code(str(tmp_path / "latest.py"), tmp_path / "run")
    assert (tmp_path / "run/code/latest.py").read_text() == own.read_text()
    own.unlink()
    found = find_code(str(tmp_path / "latest.py"), tmp_path / "run")
    assert Path(found).resolve() == tmp_path / "run/code/latest.py"


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["own.py", "neighbour.py"])
def test_a_changed_file_is_told_and_taken_only_with_allow_changes(own, tmp_path, changed):
    asked = [*tiny(tmp_path, max_steps=2), "attention=relu", "code=own.py", "run_dir=run"]
    assert run_here(*asked, cwd=tmp_path).returncode == 0
    with (tmp_path / changed).open("a") as file:
        file.write("FACTOR = 2\n")
    going_on = ["resume=run", "code=own.py", "max_steps=3"]
    result = run_here(*going_on, cwd=tmp_path)
    assert "code=own.py has changed since this process ran it: start the command again, a sweep in" in result.stderr
    forget()
    before = read_summary(tmp_path / "run").code_hash
    result = run_here(*going_on, cwd=tmp_path)
    assert result.returncode == 1 and f"would not be the same run: code_hash={run_code(str(own))} (was {before})" in (
        result.stderr
    )
    result = run_here(*going_on, "allow_changes=true", cwd=tmp_path)
    assert result.returncode == 0 and read_summary(tmp_path / "run").code_hash == run_code(str(own)) != before


@pytest.mark.parametrize("place", ["neighbour.py", "package/__init__.py", "package/inner.py", "folder/inner.py"])
def test_a_neighbour_that_was_changed_within_a_second_is_run_as_it_is(tmp_path, place):
    neighbour = tmp_path / place
    neighbour.parent.mkdir(exist_ok=True)
    neighbour.write_text("FACTOR = 2\n")
    py_compile.compile(str(neighbour), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)  # as Python does
    written = neighbour.stat().st_mtime
    neighbour.write_text("FACTOR = 3\n")
    os.utime(neighbour, (written, written))
    module = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    (tmp_path / "own.py").write_text(
        f"from .{module} import FACTOR\nfrom model.attention.registry import form\n\n\n"
        "@form('scaled')\ndef scaled(call):\n    return FACTOR * call\n"
    )
    found = run_code(str(tmp_path / "own.py"))
    assert FORMS["scaled"](7) == 21
    content = (tmp_path / "own.py").read_bytes() + b"\0" + neighbour.read_bytes()
    assert found == hashlib.sha256(content).hexdigest()[:16]


def test_a_neighbour_that_is_imported_late_is_refused_because_the_hash_has_none(tmp_path):
    (tmp_path / "late.py").write_text("FACTOR = 3\n")
    (tmp_path / "own.py").write_text(
        "from model.attention.registry import form\n\n\n"
        "@form('scaled')\ndef scaled(call):\n    from .late import FACTOR\n    return FACTOR * call\n"
    )
    run_code(str(tmp_path / "own.py"))
    with pytest.raises(SettingsError, match=r"late is imported after the file has run, .*: import it at the top of"):
        FORMS["scaled"](7)


@pytest.mark.slow
def test_a_task_of_a_file_is_learned_and_scored(own, tmp_path):
    asked = ["data.source=repeat", "code=own.py", "data.task.vocab_size=5", "run_dir=run", "max_steps=2"]
    sizes = ["model.n_layer=1", "model.n_embd=32", "model.block_size=8", "batch_size=4", "device=cpu"]
    result = run_here(*asked, *sizes, cwd=tmp_path)
    assert result.returncode == 0 and "accuracy" in result.stdout, result.stderr
    meta = read_meta((tmp_path / "run/checkpoints/last").resolve())
    assert meta.config["model"]["vocab_size"] == 5 and meta.progress.metrics["val_loss"] > 0
    forget()
    without = conftest.run_here("eval.py", "checkpoint=run", cwd=tmp_path)
    assert "data.source=repeat is not known: give the file that registers it, as in code=own.py" in without.stderr
    assert "7 answers" not in without.stdout
    scored = conftest.run_here("eval.py", "checkpoint=run", "code=own.py", cwd=tmp_path)
    assert scored.returncode == 0 and "task        repeat" in scored.stdout, scored.stderr


def test_a_file_that_seeds_changes_no_number_of_the_run(tmp_path):
    file = tmp_path / "seeds.py"
    file.write_text(USED + "import torch\ntorch.manual_seed(7)\n")
    state = torch.get_rng_state()
    run_code(str(file))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "line",
    ["torch.set_default_dtype(torch.bfloat16)", "torch.set_default_device('meta')", "torch.set_grad_enabled(False)"],
)
@pytest.mark.parametrize("end", ["", "\n1 / 0\n"])
def test_a_file_that_changes_torch_for_its_own_end_changes_nothing_after_it(tmp_path, line, end):
    file = tmp_path / "scripts_head.py"
    file.write_text(f"{USED}import torch\n{line}{end}")
    with pytest.raises(SettingsError) if end else contextlib.nullcontext():
        run_code(str(file))
    new = torch.nn.Linear(1, 1)(torch.zeros(1))
    assert (new.dtype, new.device.type, new.requires_grad) == (torch.float32, "cpu", True)


def test_a_checkpoint_that_has_learned_with_other_code_than_the_file_tells_of_its_own(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "form.py"
    file.write_text(BEGINNING + "form('mine')(lambda scores: scores.softmax(-1))\n")
    model = random_gpt(vocab_size=257)
    byte = make_tokenizer(TokenizerConfig(name="byte"), [])
    config = TrainConfig(model=model.config, code=str(file), code_hash=run_code(str(file)))
    save_checkpoint(tmp_path / "run/checkpoints/step_1", model=model, tokenizer=byte, config=config)
    keep_code(str(file), tmp_path / "run")
    open_checkpoint("run")
    assert not caplog.messages
    settings = SampleConfig(checkpoint="run", results="a.jsonl", max_new_tokens=4, device="cpu", code=str(file))
    write_samples(settings)

    forget()
    FORMS.pop("mine")
    open_checkpoint("run")  # without a file nothing is known to be another
    assert not caplog.messages
    file.write_text(file.read_text().replace("scores.softmax", "(3 * scores).softmax"))
    with pytest.raises(SettingsError, match="line 1 is no result of these prompts and settings"):
        write_samples(settings)
    (said,) = caplog.messages
    assert said.endswith("step_1 has learned with other code than has run here: code=run/code/form.py is its own.")
    shutil.rmtree("run/code")
    open_checkpoint("run")
    assert caplog.messages[1].endswith("has learned with other code than has run here: its figures may be others.")


def test_a_file_that_imports_those_of_two_runs_is_no_other_code_while_they_are_as_they_were(
    tmp_path, monkeypatch, caplog, capsys
):
    """Both runs warned of other code, beside the file that the pages advise, though neither file had changed."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("A mask is a table. " * 9)
    Path("shared.py").write_text(f"{BEGINNING}mine = theirs = lambda scores: scores.softmax(-1)\n")
    byte = make_tokenizer(TokenizerConfig(name="byte"), [])
    for name in ("mine", "theirs"):
        forget("mine", "theirs")
        Path(f"{name}.py").write_text(f"from .shared import form, {name}\nform('{name}')({name})\n")
        model = random_gpt(vocab_size=257)
        config = TrainConfig(model=model.config, code=f"{name}.py", code_hash=run_code(f"{name}.py"))
        save_checkpoint(f"{name}/checkpoints/step_1", model=model, tokenizer=byte, config=config)
        keep_code(f"{name}.py", Path(name))
    settings = EvalConfig(checkpoint="mine", against="theirs", data=TextConfig(path="text.txt"), device="cpu")
    for number, changed in enumerate((None, "mine/code/shared.py", "shared.py")):  # the last is a neighbour of both
        forget("mine", "theirs")
        Path(f"both{number}.py").write_text("from . import mine, theirs\n")
        if changed:
            Path(changed).write_text(f"{Path(changed).read_text()}# edited\n")
        caplog.clear()
        score_checkpoints(replace(settings, code=f"both{number}.py"))
        expected = {None: [], "shared.py": ["mine", "theirs"]}.get(changed, ["mine"])
        assert [Path(message.split()[0]).parts[-3] for message in caplog.messages] == expected
        assert ("different files of code=" in capsys.readouterr().out) == bool(changed)
    forget("mine", "theirs")


def test_two_files_of_one_name_or_two_have_remedies_that_work(tmp_path, monkeypatch, capsys):
    """The first remedy was another name, which its checkpoint lacks; the second was to give the other file, in turn."""
    monkeypatch.chdir(tmp_path)
    byte = make_tokenizer(TokenizerConfig(name="byte"), [])
    begin = f"{BEGINNING}from model.attention.contract import from_weights\n"
    for name, factor in (("mine", 1), ("again", 2), ("theirs", 3)):
        form = name.replace("again", "mine")
        own = f"@form('{form}')\n@from_weights\ndef {form}(scores):\n    return ({factor} * scores).softmax(-1)\n"
        Path(f"{name}.py").write_text(begin + own)
    for name in ("mine", "theirs"):
        forget("mine", "theirs")
        config = TrainConfig(code=f"{name}.py", code_hash=run_code(f"{name}.py"))
        model = random_gpt(vocab_size=257, attention=name)
        save_checkpoint(name, model=model, tokenizer=byte, config=replace(config, model=model.config))

    forget("mine", "theirs")
    run_code("mine.py")
    with pytest.raises(SettingsError, match="the name 'mine' is taken: choose another one, or run each of the two fil"):
        run_code("again.py")
    Path("text.txt").write_text("A mask is a table. " * 9)
    text = TextConfig(path="text.txt")
    settings = EvalConfig(checkpoint="mine", against="theirs", data=text, device="cpu", code="mine.py")
    with pytest.raises(SettingsError, match="as in code=theirs.py, or for checkpoints of two files one beside both th"):
        score_checkpoints(settings)
    forget("mine", "theirs")
    Path("both.py").write_text("from . import mine, theirs\n")
    one, other = score_checkpoints(replace(settings, code="both.py"))
    assert "the two have learned with different files of code=: where both define one name, " in capsys.readouterr().out
    for name, both in (("mine", one), ("theirs", other)):
        forget("mine", "theirs")
        (alone,) = score_checkpoints(replace(settings, checkpoint=name, against=None, code=f"{name}.py"))
        assert alone.total.loss == both.total.loss
    forget("mine", "theirs")


def test_a_file_that_goes_to_its_own_folder_leaves_the_run_in_that_of_the_command(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "goes.py").write_text(USED + "import os\nos.chdir(os.path.dirname(__file__))\n")
    run_code("../goes.py")
    assert Path.cwd() == tmp_path / "here"


def test_a_default_device_of_the_caller_is_there_after_a_file(tmp_path):
    file = tmp_path / "other_device.py"
    file.write_text(USED + "import torch\ntorch.set_default_device('cpu')\n")
    torch.set_default_device("meta")
    try:
        run_code(str(file))
        assert torch.zeros(1).device.type == "meta"
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "code=FILE cannot be read (No such file or directory): give a Python file that registers a form, a"),
        ("this is no Python\n", "code=FILE, line 1: SyntaxError: invalid syntax"),
        ("\0", "code=FILE"),
        ("x = 1\n", "code=FILE registers nothing: decorate a function or a class with @form, @modifier or @task."),
        (
            USED + "@form\ndef other(q, k, v): ...\n",
            'code=FILE, line 3: @form has no name: write @form("NAME").',
        ),
        (USED + "import sys\nsys.exit(3)\n", "code=FILE, line 4: SystemExit: 3: correct the file."),
        (USED + "form('mine')(None)\n", "code=FILE, line 3: the name 'mine' is taken: choose"),
        (USED + "form('sdpa')(None)\n", "code=FILE, line 3: the name 'sdpa' is taken: choose"),
        (USED + "form('my-form')(None)\n", "code=FILE, line 3: the name 'my-form' is no identifier"),
        (
            "from model.attention.registry import modifier\nmodifier('x', changes='score')\n",
            "code=FILE, line 2: modifier x",
        ),
        ("from data.tasks import task\ntask('copy', 3)(None)\n", "code=FILE, line 2: the name 'copy' is taken"),
        (USED + "import absent_here\n", "code=FILE, line 3: ModuleNotFoundError: No module named 'absent_here'"),
        (USED + "from .absent import x\n", "code=FILE, line 3: ModuleNotFoundError: No module named 'code_"),
        (
            USED + "from beside import x\n",
            "code=FILE, line 3: ModuleNotFoundError: No module named 'beside': write a dot before its neighbour, as in "
            "from .beside import NAME.",
        ),
        (USED + "from data import x\n", "code=FILE, line 3: ImportError: cannot import name 'x' from 'data'"),
        (USED + "1 / 0\n", "code=FILE, line 3: ZeroDivisionError: division by zero: correct the file."),
    ],
)
def test_a_file_that_cannot_be_used_ends_in_one_sentence_with_the_line_and_leaves_no_name(
    tmp_path, capsys, source, said
):
    file = tmp_path / "bad.py"
    (tmp_path / "beside.py").write_text("x = 1\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/__init__.py").touch()
    if source is not None:
        file.write_text(source)
    state = torch.get_rng_state()
    before = dict(FORMS)
    with pytest.raises(SettingsError) as caught:
        run_code(str(file), VOCABULARIES)
    sentence = str(caught.value)
    assert sentence.replace(str(file), "FILE").startswith(said) and "\n" not in sentence
    trace = capsys.readouterr().err
    assert ("line" in sentence) == (f'File "{file}", line' in trace) and "attention/code.py" not in trace
    assert ("dot" in sentence) == ("beside" in sentence or "'data'" in sentence)
    assert before == FORMS and file not in RAN
    assert torch.equal(torch.get_rng_state(), state) != ("manual_seed" in (source or ""))


@pytest.mark.parametrize("script", ["train.py", "sample.py", "eval.py", "export.py"])
def test_each_command_ends_with_the_sentence(tmp_path, script):
    (tmp_path / "bad.py").write_text("x = 1\nx.y\n")
    asked = ["to=out"] if script == "export.py" else []
    result = conftest.run_here(script, "code=bad.py", *asked, cwd=tmp_path)
    assert result.returncode == 1
    *trace, sentence = result.stderr.splitlines()
    assert sentence == (
        "error: code=bad.py, line 2: AttributeError: 'int' object has no attribute 'y': correct the file."
    )
    assert trace[0].startswith("Traceback") and any("x.y" in line for line in trace)


@pytest.mark.long
def test_a_checkpoint_that_names_a_file_does_not_run_it(own, tmp_path):
    asked = [*tiny(tmp_path, max_steps=2), "attention=relu", "code=own.py", "run_dir=run"]
    assert run_here(*asked, cwd=tmp_path).returncode == 0
    forget()
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + OWN)
    for known in ("sdpa", "relu"):
        for checkpoint in (tmp_path / "run/checkpoints").glob("step_*/"):
            meta = read_meta(checkpoint)
            settings = meta.config | {"code": str(evil), "model": meta.config["model"] | {"attention": known}}
            (checkpoint / "meta.json").write_text(as_json(replace(meta, config=settings)))
        (tmp_path / "run/config.yaml").write_text(f"code: {evil}\n")
        for script, arguments in (
            ("sample.py", ["checkpoint=run"]),
            ("eval.py", ["checkpoint=run"]),
            ("export.py", ["checkpoint=run", f"to={known}"]),
            ("train.py", ["resume=run", "max_steps=3", "allow_changes=true"]),
            ("train.py", ["init_from=run", "max_steps=3"]),
        ):
            result = conftest.run_here(script, *arguments, cwd=tmp_path)
            if known == "relu":
                assert result.returncode == 1 and "'relu' is no form" in result.stderr, (script, result.stderr)
            assert not (tmp_path / "ran").exists(), script


@pytest.mark.slow
def test_the_check_is_of_a_files_names_too(own, capsys):
    assert check.main(["relu", "sdpa+head_scale", f"code={own}"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\nrelu ") == printed.count("\nsdpa+head_scale ") == 2 and "every check passed" in printed
    with pytest.raises(SettingsError, match=r"code=absent.py cannot be read"):
        check.main(["sdpa", "code=absent.py"])


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("mix(self, q, k, v, x, ctx): return q", r"mix\(\) returned \(2, 4, .*, not \(2, 4, .*, \(2, 2, "),
        ("mix(self, q, k, v, x, ctx): return q, k.mT, v", r"mix\(\) returned"),
        ("score(self, call, x, ctx): return None", r"score\(\) returned NoneType, not Call"),
        ("score(self, call, x, ctx): return call.q", r"score\(\) returned \(2, 4, .*, not Call"),
        ("finish(self, y, v, x, ctx): return y.flatten(2)", r"finish\(\) returned \(2, 4, \d+\), not \(2, 4, "),
    ],
)
def test_a_modifier_that_returns_another_shape_is_named(tmp_path, method, said):
    file = tmp_path / "own.py"
    head = "from model.attention.modifiers import Modifier\nfrom model.attention.registry import modifier\n"
    file.write_text(f"{head}@modifier('mine', changes='values')\nclass Mine(Modifier):\n    def {method}\n")
    with pytest.raises(SettingsError, match=rf"^code={file}: Mine\.{said}"):
        check.main(["sdpa+mine", f"code={file}"])


def test_a_modifier_that_reads_numbers_as_it_is_made_is_not_too_large(tmp_path):
    file = tmp_path / "own.py"
    head = (
        "import torch\nfrom model.attention.modifiers import Modifier\nfrom model.attention.registry import modifier\n"
    )
    body = "def __init__(self, *given):\n        super().__init__(*given)\n        torch.ones(3).sum().item()\n"
    mine = f"{head}@modifier('mine', changes='values')\nclass Mine(Modifier):\n    {body}"
    file.write_text(mine)
    with pytest.raises(SettingsError, match=r"line 4: modifier Mine changes nothing: override mix\(\), score\(\) or"):
        run_code(str(file))
    file.write_text(f"{mine}    def mixx(self, q, k, v, x, ctx):\n        return q, k, v\n")
    with pytest.raises(SettingsError, match=r"line 4: modifier Mine has mixx, which nothing calls: write mix\(\)"):
        run_code(str(file))
    file.write_text(mine.replace("(Modifier)", "(torch.nn.Module)"))
    with pytest.raises(SettingsError, match="modifier mine is no Modifier: derive its class from Modifier"):
        run_code(str(file))
    for taken in ("half", "keys", "training"):  # "KeyError: attribute 'half' already exists: correct the file"
        file.write_text(mine.replace("'mine'", f"'{taken}'"))
        with pytest.raises(SettingsError, match=f"line 4: modifier {taken} has the name of a part of torch's modules"):
            run_code(str(file))
    # A base class needs no method that changes something.
    base = "class Base(Modifier):\n    scale = 2.0\n"
    mine = mine.replace("@modifier", f"{base}@modifier").replace("Mine(Modifier)", "Mine(Base)")
    file.write_text(f"{mine}    def mix(self, q, k, v, x, ctx):\n        return q, k, v * self.scale\n")
    run_code(str(file))
    with pytest.raises(RuntimeError, match="meta tensors"):
        count_weights(GPTConfig(vocab_size=9, attention="sdpa+mine"))


OWN_IDLE = (
    f"import torch\nfrom model.attention.modifiers import Modifier\n{BEGINNING.replace('form', 'modifier')}"
    "@modifier('idle', changes='result')\nclass Idle(Modifier):\n"
    "    def __init__(self, layer, config):\n        super().__init__(layer, config)\n"
    "        self.used, self.unused = (torch.nn.Parameter(torch.ones(())) for _ in range(2))\n"
    "    def finish(self, y, v, x, ctx):\n        return y * self.used\n"
)


@pytest.mark.slow
def test_a_parameter_that_no_gradient_reaches_is_named(tmp_path, caplog):
    (tmp_path / "idle.py").write_text(OWN_IDLE)
    found = run_here("attention=sdpa+idle", "code=idle.py", *tiny(tmp_path, max_steps=2), cwd=tmp_path)
    told = "attention=sdpa+idle: no gradient reaches modifiers.idle.unused, so training does not change it."
    assert found.returncode == 0 and found.stderr.count(told) + found.stdout.count(told) == 1, found


def test_a_weight_that_no_gradient_reaches_is_refused_under_torchrun_unless_frozen(tmp_path, caplog):
    """The second step ended in a traceback of DistributedDataParallel; `simple` has no weights at all."""
    (tmp_path / "idle.py").write_text(OWN_IDLE)
    run_code(str(tmp_path / "idle.py"))
    config = TrainConfig(
        model=GPTConfig(attention="simple/sdpa+idle", n_layer=4, block_size=16, position="none"), freeze=["lm_head"]
    )
    try_code(config, Ranks())
    assert "no gradient reaches modifiers.idle.unused, so training does not change it." in caplog.text
    idle = [f"blocks.{layer}.attention.modifiers.idle.unused" for layer in (1, 3)]
    with pytest.raises(SettingsError, match="torchrun waits for each") as refused:
        try_code(config, Ranks(launched=True))
    assert f"freeze='[{','.join(['lm_head', *idle])}]'" in str(refused.value)
    for frozen in (idle, ["blocks.1.attention.modifiers.idle", "blocks.3"]):
        try_code(replace(config, freeze=frozen), Ranks(launched=True))


@pytest.mark.long
def test_the_command_of_the_check_ends_in_a_sentence_for_own_heads_of_another_shape(tmp_path):
    (tmp_path / "own.py").write_text(
        f"{BEGINNING}@form('short')\ndef short(q, k, v, **given):\n    return v[..., :3, :]\n"
    )
    command = [sys.executable, "-m", "model.attention.check", "short", f"code={tmp_path / 'own.py'}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1 and found.stderr.startswith(f"error: code={tmp_path / 'own.py'}: RuntimeError"), found
    assert "Traceback" not in found.stderr


OWN_VALUES = """from model.attention.layer import MultiHeadAttention
from model.attention.registry import form

@form("of_keys")
class OfKeys(MultiHeadAttention):
    def attend(self, call, x, ctx):
        return super().attend(call._replace(v=call.k), x, ctx)

@form("of_keys_before")
class OfKeysBefore(MultiHeadAttention):
    def project(self, x):
        q, k, _ = super().project(x)
        return q, k, k
"""


def test_an_own_layer_whose_weights_cannot_be_known_is_refused_before_it_trains(tmp_path):
    """It passed the check, and ended a run in a traceback of the maps at the first evaluation."""
    (tmp_path / "own.py").write_text(OWN_VALUES)
    run_code(str(tmp_path / "own.py"))
    try_code(TrainConfig(model=GPTConfig(attention="of_keys_before")), Ranks())
    with pytest.raises(SettingsError, match="of_keys sums up other values than call.v, .* change values before"):
        try_code(TrainConfig(model=GPTConfig(attention="of_keys")), Ranks())


@pytest.mark.slow
def test_the_check_names_a_parameter_that_no_gradient_reaches(tmp_path, capsys):
    (tmp_path / "idle.py").write_text(OWN_IDLE)
    assert check.main(["sdpa+idle", f"code={tmp_path / 'idle.py'}"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("note: no gradient reaches modifiers.idle.unused of sdpa+idle\n") and not said.err


def test_the_check_of_a_modifier_that_is_of_float32_alone_ends_in_a_sentence(tmp_path):
    source = OWN_IDLE.replace("y * self.used", "y @ torch.eye(y.size(-1)) * self.used")
    (tmp_path / "single.py").write_text(source)
    with pytest.raises(SettingsError, match=r"^code=\S+single\.py, line 10: RuntimeError: .*same dtype.*the file\.$"):
        check.main(["sdpa+idle", f"code={tmp_path / 'single.py'}"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("y * (self.used / (self.used - 1))", "^attention=sdpa\\+idle gives infinity or NaN: look at its divisions"),
        ("y * (1 + (self.used - 1).abs().sqrt())", "^attention=sdpa\\+idle has a gradient of infinity or NaN: look"),
        (
            "(self.__dict__.setdefault('n', []).append(1), y * self.used * len(self.n))[1]",
            "two results for the same tok",
        ),
        ("y * self.use", r"^code=\S+own\.py, line 10: AttributeError: .*'use'"),
        ("y * self.layer_sizes['heads']", r"^code=\S+own\.py, line 10: AttributeError"),
        ("y * torch.ones(24).to(y.dtype)[: y.size(1)] if y.dtype is torch.bfloat16 else y", r"line 10: RuntimeError: "),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_a_mistake_of_an_own_modifier_ends_in_a_sentence_of_the_check_and_of_a_run(tmp_path, body, said, command):
    file = tmp_path / "own.py"
    file.write_text(OWN_IDLE.replace("y * self.used", body))
    run_code(str(file))
    if command == "check":
        with pytest.raises(SettingsError, match=said):
            check.main(["sdpa+idle", f"code={file}"])
    elif "bfloat16" not in body:
        with pytest.raises(SettingsError, match=said), explained(str(file)):
            try_code(TrainConfig(model=GPTConfig(attention="sdpa+idle")), Ranks())


OWN_BELL = f"""{BEGINNING}
from model.attention.contract import from_weights
import torch
@form("bell")
@from_weights
def bell(scores):
    weights = torch.exp(-((scores - scores.amax(-1, keepdim=True)) ** 2))
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)

@form("filled_bell")
@from_weights
def filled_bell(scores):
    hidden = scores == -torch.inf
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp(-((scores.masked_fill(hidden, 0) - highest) ** 2)).masked_fill(hidden, 0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
"""


def test_a_form_whose_gradient_is_not_finite_at_a_hidden_key_is_refused(tmp_path):
    """Its weights are right, and its gradient at a score of -inf is 0 · inf: no step of a run changed anything."""
    (tmp_path / "own.py").write_text(OWN_BELL)
    run_code(str(tmp_path / "own.py"))
    scores = torch.tensor([0.5, -torch.inf], requires_grad=True)
    weights = torch.exp(-((scores - scores.amax()) ** 2))
    assert weights.tolist() == [1, 0] and torch.autograd.grad(weights.sum(), scores)[0].isnan().all(), "the case"
    for refuses in (partial(check.main, ["bell"]), partial(try_code, of_form("bell"), Ranks())):
        with pytest.raises(SettingsError, match="attention=bell has a gradient of infinity or NaN: .*-inf of a hidden"):
            refuses()
    try_code(of_form("filled_bell"), Ranks())


def of_form(attention: str) -> TrainConfig:
    """Return the settings of a run with a form."""
    return TrainConfig(model=GPTConfig(attention=attention))


def test_rows_of_other_axes_are_refused_by_their_shape():
    inputs = torch.arange(24.0).view(2, 3, 4)  # (B, T, C), as a layer's input
    for keep in (
        lambda rows: AttentionContext().previous(0, "mine", rows, 1)[0],
        lambda rows: KVCache(3).append(0, "mine", rows),
    ):
        with pytest.raises(ValueError, match=r"rows of mine are \(2, 3, 4\), not \(B, n, T, width\)"):
            keep(inputs)
        assert keep(inputs[:, None]).shape == (2, 1, 3, 4)


def test_a_modifier_for_another_number_of_heads_is_told_the_sizes_that_it_met(tmp_path):
    file = tmp_path / "three.py"
    file.write_text(OWN_IDLE.replace("y * self.used", "y * self.used * torch.ones(3, 1, 1, dtype=y.dtype)"))
    run_code(str(file))
    with pytest.raises(SettingsError, match="fit the check's n_embd=32, n_head=4, n_kv_head=2 and up to 24 tokens"):
        check.main(["sdpa+idle", f"code={file}"])
    with pytest.raises(SettingsError, match="which has to fit 8 query heads of 64 channels and 2 key heads"):
        choose.main(["sdpa+idle", "T=4", f"code={file}"])
    config = TrainConfig(model=GPTConfig(attention="sdpa+idle", n_embd=24, n_head=2), code=str(file), device="cpu")
    with pytest.raises(SettingsError, match="fit model.n_embd=24, model.n_head=2, model.block_size=128"):
        check_machine(config, torch.device("cpu"), Ranks())
    check_machine(replace(config, model=replace(config.model, n_head=3)), torch.device("cpu"), Ranks())


@pytest.mark.slow
def test_a_run_names_the_line_of_an_own_modifier_that_cannot_be_made(tmp_path):
    source = OWN_IDLE.replace("super().__init__(layer, config)", "super().__init__(layer, config.n_heads)")
    (tmp_path / "own.py").write_text(source)
    found = run_here("attention=sdpa+idle", "code=own.py", *tiny(tmp_path), cwd=tmp_path)
    assert found.returncode == 1
    assert "error: code=own.py, line 7: AttributeError: 'GPTConfig' object has no attribute 'n_heads'" in found.stderr


@pytest.mark.slow
def test_a_modifier_that_is_wrong_only_for_documents_with_a_cache_fails(tmp_path, capsys):
    wrong = "y if ctx.cache is None or ctx.doc_starts is None else y * 2"
    (tmp_path / "own.py").write_text(OWN_IDLE.replace("y * self.used", wrong))
    assert check.main(["sdpa+idle", f"code={tmp_path / 'own.py'}"]) == 1
    row = re.search(r"^sdpa\+idle .*", capsys.readouterr().out, re.M)[0]
    assert row.count("FAIL") == 1 and re.fullmatch(r".*FAIL \S+ +ok \S+ *", row), row


OWN_BACKWARD = (
    f"import torch\nfrom model.attention.modifiers import Modifier\n{BEGINNING}"
    "from model.attention.contract import from_weights\nfrom model.attention.registry import modifier\n"
    "class Softmax(torch.autograd.Function):\n"
    "    @staticmethod\n    def forward(ctx, scores):\n"
    "        ctx.save_for_backward(scores.softmax(-1))\n        return scores.softmax(-1)\n"
    "    @staticmethod\n    def backward(ctx, g):\n"
    "        (w,) = ctx.saved_tensors\n        return w * (g - SUM * (w * g).sum(-1, keepdim=True))\n"
    "@form('fast')\n@from_weights\ndef fast(scores):\n    return Softmax.apply(scores)\n"
    "@modifier('mixed', changes='result')\nclass Mixed(Modifier):\n"
    "    def finish(self, y, v, x, ctx):\n        return y * Softmax.apply(y)\n"
)


@pytest.mark.parametrize("summed", [True, False])
def test_a_backward_of_ones_own_is_compared_with_differences(tmp_path, monkeypatch, capsys, summed):
    """It was compared with itself in float64, and one without the sum of softmax passed every check."""
    (tmp_path / "own.py").write_text(OWN_BACKWARD.replace("SUM", str(int(summed))))
    monkeypatch.setattr(check, "run", lambda *arguments: "ok")
    names = ["fast", "sdpa+mixed", "sdpa+gate"]
    assert check.main([*names, f"code={tmp_path / 'own.py'}"]) == 0
    told = re.findall(r"note: the gradient of (\S+) is (\S+)% off differences of its output", capsys.readouterr().out)
    assert [name for name, _ in told] == [*names[:2]] * (not summed)
    assert all(float(share) > 1 for _, share in told)

    q = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q: FORMS["fast"](q, q, q), (q,), raise_exception=False) == summed


def test_the_check_of_an_own_layer_that_cannot_be_made_ends_in_a_sentence(tmp_path):
    (tmp_path / "old.py").write_text(
        "from model.attention.layer import MultiHeadAttention\nfrom model.attention.registry import form\n"
        "@form('old')\nclass Old(MultiHeadAttention):\n    def __init__(self, config, depth):\n        pass\n"
    )
    with pytest.raises(SettingsError, match=r"^code=\S+old\.py: TypeError: .*depth"):
        check.main(["old", f"code={tmp_path / 'old.py'}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "result",
    [
        "y + y.unflatten(2, (-1, 32)).mean(3).repeat_interleave(32, 2) if y.size(2) % 32 == 0 else y",
        "torch.where(even, y + y.roll(-1, 2), y)",
        "torch.where(even, y, y + torch.nn.functional.pad(y[:, :, 1:], (0, 0, 0, 1)))",
        "y if len(y) < 3 else y + y.roll(-1, 2)",
    ],
)
def test_a_leak_between_few_tokens_or_in_long_blocks_is_found(result, tmp_path):
    (tmp_path / "blocks.py").write_text(
        f"import torch\nfrom model.attention.modifiers import Modifier\n{BEGINNING.replace('form', 'modifier')}"
        "@modifier('blocks', changes='result')\nclass Blocks(Modifier):\n"
        "    def finish(self, y, v, x, ctx):\n"
        f"        even = (torch.arange(y.size(2)) % 2 == 0)[:, None]\n        return {result}\n"
    )
    asked = ["attention=sdpa+blocks", "code=blocks.py", *tiny(tmp_path, max_steps=2), "model.block_size=64"]
    found = run_here(*asked, cwd=tmp_path)
    assert found.returncode == 1 and "attention=sdpa+blocks lets later tokens change earlier positions" in found.stderr


@pytest.mark.long
def test_the_check_finds_a_form_that_sees_the_future(tmp_path, capsys):
    mean = "v.mean(2, keepdim=True).repeat_interleave(q.size(1) // v.size(1), 1)"
    source = f"{BEGINNING}@form('cheat')\ndef cheat(q, k, v, **others):\n    return {mean} + 0 * q[..., :1]\n"
    (tmp_path / "cheat.py").write_text(source)
    assert check.main(["cheat", f"code={tmp_path / 'cheat.py'}"]) == 1
    assert "FAIL" in capsys.readouterr().out

    # Neither a run nor a comparison starts with it.
    variants = 'hydra.sweeper.variants=["attention=sdpa","attention=sdpa/cheat code=cheat.py"]'
    for asked in (["attention=sdpa/cheat", "code=cheat.py"], ["-m", "hydra/sweeper=decide", variants]):
        result = run_here(*asked, *tiny(tmp_path, max_steps=2), cwd=tmp_path)
        assert result.returncode == 1 and "attention=cheat lets later tokens change earlier positions" in result.stderr
        assert "step 1" not in result.stdout


# The plain layer until its weight moves from 0.
HIDDEN = """
import torch
from torch import nn

from model.attention.layer import MultiHeadAttention
from model.attention.registry import FORMS, form


@form("hidden")
class Hidden(MultiHeadAttention):
    def __init__(self, config):
        super().__init__(config, FORMS["matmul"])
        self.share = nn.Parameter(torch.zeros(()))

"""
# Each result gets a share of the next token's, or of one that depends on how many tokens the pass has.
NEXT = """
    def merge(self, y):
        return super().merge(y + self.share * torch.cat((y[..., 1:, :], y[..., :1, :]), -2))
"""
PLACE = """
    def merge(self, y):
        return super().merge(y + self.share * torch.arange(y.shape[-2])[:, None])
"""


@pytest.mark.parametrize(("step", "found_by"), [(NEXT, ["future", "document", "cache"]), (PLACE, ["cache"])])
def test_a_mistake_in_a_form_that_begins_as_the_plain_layer_is_found(tmp_path, step, found_by):
    (tmp_path / "hidden.py").write_text(HIDDEN + step)
    run_code(str(tmp_path / "hidden.py"))
    results = {name: check.run(name, "hidden", torch.device("cpu"), torch.float32) for name in check.CHECKS}
    assert all(results[name].startswith("FAIL") for name in found_by), results
    assert results["value+grad"].startswith("ok")
    config = GPTConfig(attention="hidden", n_embd=32, vocab_size=2)
    sees_future = contextlib.nullcontext() if step == PLACE else pytest.raises(SettingsError, match="later tokens")
    with sees_future:
        check.refuse_leak("hidden", check.moved_layer(config), torch.randn(1, 16, 32))


@pytest.mark.parametrize("T", [64, 100, 128, 512])
@pytest.mark.parametrize("remainder", range(4))
def test_a_look_at_the_next_token_in_one_of_four_late_positions_is_found(remainder, T):
    place = torch.arange(T)
    looks = (place > T // 2 - 2) & (place % 4 == remainder)

    def late(x):
        return torch.where(looks[:, None], x.roll(-1, 1), x)

    check.refuse_leak("late", lambda x: x, torch.randn(1, T, 8))
    with pytest.raises(SettingsError, match="later tokens"):
        check.refuse_leak("late", late, torch.randn(1, T, 8))


def test_the_check_sees_a_leak_that_does_not_cross_the_middle(tmp_path):
    prefix = """
    def merge(self, y):
        near = y[..., :8, :].mean(-2, keepdim=True).expand(*y.shape[:-2], min(8, y.shape[-2]), -1)
        return super().merge(torch.cat((near, y[..., 8:, :]), -2))
"""
    (tmp_path / "prefix.py").write_text(HIDDEN + prefix)
    run_code(str(tmp_path / "prefix.py"))
    assert check.run("future", "hidden", torch.device("cpu"), torch.float32).startswith("FAIL")


def test_the_check_sees_padding_that_is_read_through_its_token_ids_alone(tmp_path):
    earlier = """
    def merge(self, y):
        return super().merge(y + self.ids.cumsum(-1)[:, None, :, None])

    def attend(self, call, x, ctx):
        self.ids = ctx.tokens
        return super().attend(call, x, ctx)
"""
    (tmp_path / "earlier.py").write_text(HIDDEN + earlier)
    run_code(str(tmp_path / "earlier.py"))
    assert check.run("padding", "hidden", torch.device("cpu"), torch.float32).startswith("FAIL")


# One that sees the next token once training has moved its weight, as no trial at the beginning can know.
LATE = (
    HIDDEN.replace("torch.zeros(())", "torch.ones(())")
    + """
    def merge(self, y):
        moved = (self.share - 1).abs() > LEAST
        return super().merge(self.share * (y + moved * torch.cat((y[..., 1:, :], y[..., :1, :]), -2)))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("least", "is_refused"), [(0.0, True), (1e9, False)])
def test_a_layer_that_learns_to_see_the_future_is_refused_after_training(tmp_path, monkeypatch, least, is_refused):
    (tmp_path / "late.py").write_text(LATE.replace("LEAST", str(least)))
    monkeypatch.setattr("training.start.tried_layer", lambda config: make_attention(config).eval())
    asked = ["attention=hidden", f"code={tmp_path / 'late.py'}", *tiny(tmp_path, max_steps=4), "model.dropout=0.1"]
    asked = [word.replace("tokenizer=", "tokenizer.name=") for word in asked]
    config = from_arguments(TrainConfig, [*asked, f"run_dir={tmp_path / 'run'}"])
    if not is_refused:
        train(config)
    else:
        with pytest.raises(SettingsError, match="^attention=hidden lets later tokens change earlier positions"):
            train(config)
    assert read_summary(tmp_path / "run").status == ("failed" if is_refused else "finished")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("q[..., 1:, :]", "attention=mine makes (2, 2, 32) of tokens (2, 3, 32): return (…, H, T, Dv), a row"),
        ("q @ k", "code=mine.py, line 4: RuntimeError: Expected size"),
    ],
)
def test_a_form_that_fails_is_tried_before_anything_else(result, said, tmp_path):
    (tmp_path / "mine.py").write_text(f"{BEGINNING}@form('mine')\ndef mine(q, k, v, **others):\n    return {result}\n")
    found = run_here("attention=mine", "code=mine.py", *tiny(tmp_path, max_steps=2), cwd=tmp_path)
    assert found.returncode == 1 and said in found.stderr and found.stderr.splitlines()[-1].startswith("error: ")
    assert "data " not in found.stdout


@pytest.mark.long
def test_jobs_of_one_process_run_each_its_own_file_and_a_comparison_notes_their_hashes(own, tmp_path):
    (tmp_path / "other.py").write_text(
        OWN.replace('"relu"', '"other"').replace("head_scale", "x").replace("repeat", "r")
    )
    variants = '["attention=sdpa","code=own.py attention=relu","code=other.py attention=other"]'
    asked = ["-m", "hydra/sweeper=decide", "hydra.sweeper.max_pairs=7", "hydra.sweep.dir=it", *tiny(tmp_path)]
    asked += ["max_steps=1", "hydra.sweeper.give_up=2", f"hydra.sweeper.variants={variants}"]
    result = run_here(*asked, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    code = json.loads((tmp_path / "it/decide.json").read_text())["code"]
    assert code == {
        "attention=sdpa": None,
        "code=own.py attention=relu": read_summary(tmp_path / "it/1-1").code_hash,
        "code=other.py attention=other": read_summary(tmp_path / "it/1-2").code_hash,
    }
    assert len({*code.values()}) == 3
    forget()
    for name in ("other", "x", "r"):
        for registry in (FORMS, MODIFIERS, VOCABULARIES):
            registry.pop(name, None)
    own.write_text(OWN + "\n")
    result = run_here(*asked, cwd=tmp_path)
    assert (
        result.returncode == 1
        and "hydra.sweep.dir=" in result.stderr
        and "ran another version of the file of code=" in result.stderr
    )


@pytest.mark.slow
def test_a_sweep_says_of_a_broken_file_that_none_of_its_jobs_can_run(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\n")
    assert "code=bad.py registers nothing" in run_here("-m", "code=bad.py", "seed=1,2", cwd=tmp_path).stderr


@pytest.mark.long
def test_the_ranks_of_torchrun_run_the_file_too(own, tmp_path, text_file):
    with torchrun(tmp_path, text_file, f"code={own}", "attention=relu", "max_steps=2") as process:
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert read_summary(tmp_path / "run").code_hash == run_code(str(own), VOCABULARIES)


@pytest.mark.slow
def test_train_runs_the_file_for_a_program_too(own, train_config):
    config = replace(train_config, code=str(own), max_steps=1, eval_interval=1, sample_tokens=0)
    config.model = replace(config.model, attention="relu")
    assert train(config) < 6 and config.code_hash is None
    assert "relu" in FORMS and asdict(config)["code"] == str(own)


IDEAS = sorted((ROOT / "docs/ideas").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("idea", some(IDEAS, 5), ids=lambda path: path.stem)
def test_every_idea_of_the_night_keeps_the_contract_and_is_in_the_pages_table(idea, capsys):
    attention = re.search(r"^# attention=(\S+)$", idea.read_text(), re.M)[1]
    assert check.main([attention, f"code={idea}"]) == 0, capsys.readouterr().out
    assert f"\n| `{idea.stem}` |" in (ROOT / "docs/search.md").read_text()


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a baseline needs a commit")
def test_the_loop_of_the_page_runs_as_it_stands(tmp_path):
    """On two ideas, with the smallest settings."""
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "docs/search.md").read_text(), re.DOTALL | re.MULTILINE)[1]
    small = " ".join([*tiny(tmp_path, max_steps=1), "hydra.sweeper.max_pairs=7"])
    loop = re.sub(r'SMALL = """.*?"""', f'SMALL = """{small}"""', block, flags=re.DOTALL)
    assert loop != block
    checkout = tmp_path / "checkout"
    clone = ["git", "clone", "-q", str(ROOT), str(checkout)]
    subprocess.run(clone, check=True)
    (checkout / "ideas").mkdir()
    for name in ("cubic.py", "previous.py"):
        shutil.copy(ROOT / "docs/ideas" / name, checkout / "ideas" / name)
    done = subprocess.run([sys.executable, "-c", loop], cwd=checkout, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(cubic|previous): (dropped|undecided|confirmed|better|no diff)", done.stdout, re.M), (
        done.stdout
    )
    assert not [*(checkout / "night").glob("previous/1-0/checkpoints")]  # copied from the first idea's

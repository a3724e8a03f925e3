"""A person's own files of settings: folders, experiments, and their mistakes."""

import contextlib
import itertools
import re
import subprocess

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cli.composition import compose_settings, explain, register_schema, tell_overruled
from cli.hydra_command import start
from cli.overrides import CONF, check_options, check_typed, refuse_misread, take_folder
from common.errors import SettingsError, format_value
from common.settings import parse_overrides, tell_repeated
from sweeps.grid import Grid
from sweeps.hydra_versions import VERSION_BASE
from sweeps.ranges import range_text
from tests.sweeping import swept

SMALL = "# @package _global_\nmodel:\n  n_layer: 1\n  n_embd: 48\n"


def composed(*arguments):
    """The settings of `python train.py ARGUMENTS`."""
    left, searched = take_folder([*arguments])
    register_schema({})
    return compose_settings(parse_overrides(left), searched)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my files, 1/experiment").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my files, 1"


@pytest.mark.slow
def test_an_experiment_stands_in_a_folder_of_ones_own(folder):
    (folder / "experiment/small.yaml").write_text(SMALL)
    for typed in (["--config-dir=my files, 1"], ["--config-dir", str(folder)], ["-cd", "my files, 1"]):
        for experiment in ("experiment=small", "+experiment=small"):
            config = composed(experiment, *typed, "model.n_layer=3")
            assert (config.model.n_layer, config.model.n_embd) == (3, 48)
    # Ours are there as before.
    assert composed(f"--config-dir={folder}", "experiment=shakespeare", "dry_run=true").data.source == "shakespeare"


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("experiment=odd", "correct it in my files, 1/experiment/odd.yaml"),
        ("experiment=odd optimizer=own", "correct it in my files, 1/experiment/odd.yaml"),
        ("optimizer=own", "correct it in my files, 1/optimizer/own.yaml"),
        ("experiment=odd optimizer.lr=-1", "correct it, or leave it out for optimizer.lr=-3"),
    ],
)
def test_a_wrong_value_that_nobody_typed_is_told_with_its_file(folder, typed, remedy):
    """It was told to be left out, of a command that did not have it."""
    (folder / "optimizer").mkdir()
    (folder / "experiment/odd.yaml").write_text("# @package _global_\noptimizer:\n  lr: -3\n")
    (folder / "optimizer/own.yaml").write_text("name: adamw\nlr: -2\n")
    with pytest.raises(SettingsError) as raised:
        composed("--config-dir=my files, 1", *typed.split())
    assert raised.value.setting == "optimizer.lr" and raised.value.remedy == remedy


@pytest.mark.parametrize("typed", [["--config-dir=nothere"], ["-cd"], ["--config-dir", ""], ["--config-dir=."]])
def test_a_folder_without_options_is_refused(folder, typed):
    with pytest.raises(SettingsError, match="is no folder with options: name one with files such as experiment/NAME"):
        take_folder(["seed=1", *typed])


FILES = ["--config-name=mine", "-cn", "--config-path=.", "--config", "-c", "mine.yaml", "config/train_gpt2.py"]


@pytest.mark.parametrize("typed", FILES)
def test_a_file_in_place_of_an_experiment_is_answered_with_the_way_to_give_it(typed):
    with pytest.raises(SettingsError, match=r"cannot read .*write settings in FOLDER/experiment/NAME\.yaml"):
        take_folder([typed, "mine"])
    # What begins or ends alike is a setting.
    kept = ["prompt=a.yaml", "code=mine.py", "-m"]
    assert take_folder(kept) == (kept, [])


def test_hydras_own_setting_for_folders_is_answered_with_the_flag():
    with pytest.raises(SettingsError, match="is for sweeps: type --config-dir=FOLDER"):
        check_typed({"hydra.searchpath": "[mine]"}, is_sweep=False)


@pytest.mark.parametrize("content", ["seed: 1\n", "defaults: [missing, _self_]\n"])
def test_an_experiment_that_is_not_there_is_answered_with_ones_own_too_wherever_it_is_named(folder, content):
    (folder / "experiment/mine.yaml").write_text(f"# @package _global_\n{content}")
    with pytest.raises(Exception) as caught:
        composed(f"--config-dir={folder}", f"experiment={'mine' if 'missing' in content else 'missing'}")
    options = sorted(file.stem for place in (CONF, folder) for file in (place / "experiment").glob("*.yaml"))
    assert explain(caught.value) == f"experiment=missing does not exist: choose experiment from {', '.join(options)}."


# {content: the place and the reason}
DAMAGED = {
    "model:\n\tn_layer: 1\n": "in line 3 (found character",
    'run_dir: "1", "2\n': "in line 2 (",
    "seed: 1\nseed: 2\n": "in line 3 (found duplicate key seed)",
    "model: {n_layer: 1\n": "in line 3 (",
    "run_dir: a: b\n": "in line 2 (mapping values are not allowed",
    'run_dir: "C:\\Users\\me"\n': "): put a value with backslashes in single quotes, or in none.",
    'run_dir: "C:\\Data"\n': "): put a value with backslashes in single quotes, or in none.",
}


@pytest.mark.parametrize("content", DAMAGED)
def test_a_file_that_is_no_yaml_is_named_with_the_line(folder, content):
    (folder / "experiment/bad.yaml").write_text(f"# @package _global_\n{content}")
    with pytest.raises(Exception) as caught:
        composed(f"--config-dir={folder}", "experiment=bad")
    sentence = explain(caught.value)
    assert sentence.startswith("my files, 1/experiment/bad.yaml is no YAML ") and DAMAGED[content] in sentence
    assert sentence.count("\n") == 0


@pytest.mark.parametrize("content", ["source: stdlib\nmodel:\n  n_layer: 1\n", "max_steps: 2\n"])
def test_a_file_of_a_group_that_has_another_groups_settings_is_told_how(folder, content):
    (folder / "data").mkdir()
    (folder / "data/mine.yaml").write_text(content)
    with pytest.raises(SettingsError, match=r"the file of data= has m.*, which is not in data: begin it with the"):
        composed(f"--config-dir={folder}", "data=mine")
    (folder / "data/mine.yaml").write_text("# @package _global_\ndata:\n  source: stdlib\nmodel:\n  n_layer: 1\n")
    assert composed(f"--config-dir={folder}", "data=mine").model.n_layer == 1


def test_a_file_in_another_encoding_is_named(folder, monkeypatch):
    (folder / "experiment/bad.yaml").write_bytes("# café\n".encode("latin-1"))
    with pytest.raises(SettingsError, match=r"my files, 1/experiment/bad\.yaml is not UTF-8: save it"):
        take_folder([f"--config-dir={folder}"])
    # One of conf/ is found by its content; content of other files is no mistake of a person.
    monkeypatch.setattr("cli.composition.CONF", folder)
    for content, said in {"# café\n": "experiment/bad.yaml is not UTF-8", "é": "None"}.items():
        with pytest.raises(UnicodeDecodeError) as caught:
            content.encode("latin-1").decode()
        assert said in str(explain(caught.value))


MISREAD = {
    "sample_prompt: 12:30": "sample_prompt: 12:30, which YAML reads as 750: write '12:30'",
    "sample_prompt: 1.0": "sample_prompt: 1.0, which YAML reads as 1: write '1.0'",
    "data: {text_field: no}": "data.text_field: no, which YAML reads as false: write 'no'",
    "wandb: {name: 007}": "wandb.name: 007, which YAML reads as 7: write '007'",
    "wandb: {tags: [a, 12:30]}": r"wandb.tags: \[a,12:30\], which YAML reads as \[a,750\]: put quotes around each text",
    "seed: 010": "seed: 010, which YAML reads as 8: write the number that is meant",
    "model: {rope_theta: 10:00}": "rope_theta: 10:00, which YAML reads as 600: write the number that is meant",
    "hydra: {sweeper: {params: {sample_prompt: [12:30, a]}}}": "sample_prompt: 12:30, which YAML reads as 750",
    "hydra: {sweeper: {params: {seed: [1, 010]}}}": "seed: 010, which YAML reads as 8",
}


@pytest.mark.parametrize("written", MISREAD)
def test_a_value_that_yaml_reads_as_another_is_refused(folder, written):
    """YAML 1.1 counts 12:30 in sixties and 010 in eights; the command line takes both as they are typed."""
    (folder / "experiment/odd.yaml").write_text(f"# @package _global_\n{written}\n")
    with pytest.raises(SettingsError, match=rf"my files, 1/experiment/odd\.yaml has .*{MISREAD[written]}"):
        take_folder([f"--config-dir={folder}"])


OVERRIDDEN = {
    "[override /optimizer: muon, override optimizer: adamw]": "odd.yaml overrides optimizer 2 times, and Hydra takes",
    "[override /hydra/job_logging: default]": "conf/train.yaml overrides hydra/job_logging, so that of .*odd.yaml has",
    "[override /optimizer: adamw, override /schedule: cosine]": "",
    "[small, override /optimizer: adamw]": "",
}


@pytest.mark.parametrize("defaults", OVERRIDDEN)
def test_an_override_that_comes_second_is_refused_for_hydra_passes_over_it(folder, defaults):
    (folder / "experiment/odd.yaml").write_text(f"# @package _global_\ndefaults: {defaults}\n")
    if OVERRIDDEN[defaults]:
        with pytest.raises(SettingsError, match=OVERRIDDEN[defaults]):
            take_folder([f"--config-dir={folder}"])
    else:
        assert take_folder([f"--config-dir={folder}"])[0] == []


def test_values_that_yaml_and_the_command_line_read_alike_are_taken(folder):
    (folder / "schedule").mkdir()
    (folder / "schedule/mine.yaml").write_text("name: cosine\nwarmup_steps: 1e1\n")
    quoted = "sample_prompt: '12:30'\nwandb: {name: '007', tags: [a, b]}\nmax_steps: 1_0\nlog_interval: 1e0\nseed: 7\n"
    others = "data: {separator: ~}\noptimizer: {lr: .001}\nmodel: {ngrams: [2, 3]}\ncompile: off\ndry_run: yes\n"
    ranges = "hydra: {sweeper: {params: {seed: '1,2', model.n_head: [1, 2], model: null}}}\n"
    (folder / "experiment/odd.yaml").write_text(f"# @package _global_\n{quoted}{others}{ranges}")
    assert take_folder([f"--config-dir={folder}"])[0] == []
    for file in CONF.glob("*/*.yaml"):
        refuse_misread(file)


def test_the_experiment_that_is_typed_is_looked_at(folder, monkeypatch):
    (folder / "experiment/odd.yaml").write_text("# @package _global_\nseed: 010\n")
    monkeypatch.setattr("cli.overrides.CONF", folder)
    with pytest.raises(SettingsError, match="seed: 010"):
        start(["experiment=small,odd", "-m"])


@pytest.mark.parametrize(
    ("line", "said"),
    {
        "override /hydra: some_config": "experiment/odd.yaml overrides hydra, which is no group",
        "override hydra/launcher: joblib": "experiment/odd.yaml overrides experiment/hydra/launcher, which is no group",
        "override optimizer: adamw": "experiment/odd.yaml overrides experiment/optimizer, which is no group",
        "optimizer: adamw": "experiment/odd.yaml has experiment/optimizer/adamw in its defaults, which is no option",
        "/optimizer: adamw": "a file of settings has optimizer once more in its defaults",
    }.items(),
)
def test_a_default_that_is_no_override_of_a_group_is_answered_with_one(folder, line, said):
    file = folder / "experiment/odd.yaml"
    file.write_text(f"# @package _global_\ndefaults:\n  - {line}\nseed: 2\n")
    with pytest.raises(HydraException) as raised:
        composed(f"--config-dir={folder}", "experiment=odd")
    answer = explain(raised.value)
    assert answer.startswith(f"{said}: write - override /GROUP: OPTION, with one of /data, /model, /optimizer, ")
    right = answer.split("write - ")[1].split(",")[0].replace("GROUP", "optimizer").replace("OPTION", "adamw")
    file.write_text(f"# @package _global_\ndefaults:\n  - {right}\nseed: 2\n")
    assert composed(f"--config-dir={folder}", "experiment=odd").optimizer.name == "adamw"


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "model:\n  n_layer: 1\n"])
def test_an_experiment_that_sets_nothing_of_a_run_is_answered_with_its_first_line(folder, content):
    (folder / "experiment/odd.yaml").write_text(content)
    with pytest.raises(SettingsError, match="begin its file with the line # @package _global_"):
        composed(f"--config-dir={folder}", "experiment=odd")


@pytest.mark.parametrize(
    ("setting", "remedy"),
    {
        "verbose: true": "leave it out, for the terminal and train.log have",
        "job_logging: {root: {level: INFO}}": "leave it out, for the terminal",
        "mode: RUN": "leave it out",
        "job: {num: 3}": "leave it out",
        "sweeper: {_target_: abc}": "leave it out",
        "callbacks: {sweeps: null}": "leave it out",
        "runtime: {cwd: x}": "leave it out",
        "swep: {dir: x}": "did you mean hydra.sweep.dir",
        "direction: maximize": "leave it out, or type its part of Hydra too, as in hydra.sweeper.direction or",
    }.items(),
)
def test_a_file_has_the_settings_of_hydra_that_a_sweep_serves(folder, setting, remedy):
    file = folder / "experiment/odd.yaml"
    served = "sweep: {dir: x}, output_subdir: .hydra, launcher: {n_jobs: 2}"
    file.write_text(f"{SMALL}hydra: {{{served}}}\n")
    refuse_misread(file)
    file.write_text(f"{SMALL}hydra: {{{served}, {setting}}}\n")
    with pytest.raises(SettingsError, match=f"odd.yaml has hydra.* no setting of a sweep: {remedy}"):
        refuse_misread(file)


def test_an_experiment_with_a_launcher_is_read_without_a_warning_of_hydras(folder, recwarn):
    (folder / "experiment/odd.yaml").write_text(f"{SMALL}defaults: [override /hydra/launcher: joblib]\n")
    composed(f"--config-dir={folder}", "experiment=odd", "dry_run=true")
    assert not [str(warning.message) for warning in recwarn]


def test_a_byte_order_mark_that_hides_the_first_line_is_refused_with_the_command_that_removes_it(folder):
    file = folder / "experiment/odd.yaml"
    file.write_text(SMALL, "utf-8-sig")
    with pytest.raises(SettingsError, match="odd.yaml begins with a byte order mark, which hides") as caught:
        refuse_misread(file)
    subprocess.run(caught.value.remedy.removesuffix(" removes it"), shell=True, check=True)
    assert file.read_text() == SMALL
    refuse_misread(file)
    file.write_text("name: adamw\n", "utf-8-sig")  # hides nothing
    refuse_misread(file)


@pytest.mark.parametrize(
    ("content", "said"),
    {
        "seed: 1\nmax_steps: 0100": "64",
        "hydra: {sweeper: {params: {seed: [7, 010]}}}": "8",
        "max_steps: 1:30": "90",
        "wandb: {name: -017}": "-15",
    }.items(),
)
def test_a_number_that_yaml_reads_otherwise_than_a_person_is_refused(folder, content, said):
    """Octal ones and those of base 60, by Python's own int()."""
    written = content.split()[-1].strip("[]}")
    minutes, _, seconds = written.partition(":")
    assert int(said) == (int(minutes) * 60 + int(seconds) if seconds else int(written, 8))
    (folder / "experiment/odd.yaml").write_text(f"# @package _global_\n{content}\n")
    with pytest.raises(SettingsError, match=rf"odd\.yaml has .*, which YAML reads as \[?(7, )?{said}\b"):
        take_folder([f"--config-dir={folder}"])


@pytest.mark.parametrize(
    ("content", "typed", "group"),
    [("model:\n  # n_layer: 2", ["model.n_layer=2"], "model"), ("data:\n  tales:", [], "data.tales")],
)
def test_a_group_whose_lines_are_all_left_out_is_named(folder, content, typed, group):
    (folder / "experiment/odd.yaml").write_text(f"# @package _global_\n{content}\n")
    with pytest.raises(SettingsError, match=rf"odd\.yaml has nothing below the line of {group}: leave out that line\."):
        composed(f"--config-dir={folder}", "experiment=odd", *typed)


ODD = {  # what is in a file of settings, and what is answered
    "attention: {a: sdpa}": "attention takes one value: write attention: VALUE",
    "seed: {a: 1}": "seed takes one value",
    "data: t.txt": "data is a group of settings: write the option among its defaults, as in - override /data: t.txt",
    "optimizer: [a]": "optimizer is a group of settings: write its settings below the line of optimizer",
    "experiment: other": "experiment is a group of settings: write the option among its defaults, as in - other",
    "model: n_layer=3": "model is a group of settings: write its settings below the line of model",
    "data: {tales: x}": "data.tales is a group of settings: write its settings below the line of data.tales",
    "hydra: {sweeper: optuna}": "among its defaults, as in - override /hydra/sweeper: optuna",
    "hydra: {sweep: x}": "hydra.sweep is a group of settings",
    "hydra: {sweeper: }": "nothing below the line of hydra.sweeper",
    "hydra: {searchpath: [x]}": "leave it out, and type --config-dir=FOLDER",
    "hydra:": "nothing below the line of hydra: leave out",
    "- seed: 1": "is no list of settings: write a line NAME: VALUE for each",
    "model.n_layer: 1": "write model: {n_layer: 1}.",
    "hydra.sweep.dir: x": 'write hydra: {sweep: {dir: "x"}}.',
    "hydra/launcher: joblib": "as in - override /hydra/launcher: OPTION",
    "on: 1": "which YAML reads as no name",
    "data: {3: x}": 'has 3: "x", which YAML reads as no name',
    "defaults: other": "write a line - override /GROUP: OPTION for each group",
    "defaults:": "write a line - override",
    "defaults: {override /optimizer: muon}": "write a line - override",
    "defaults: [3]": "write a line - override",
    "defaults: [[other]]": "write a line - override",
    "defaults: [override /optimizer: 1]": "write a line - override",
    "defaults: [override /optimizer: {x: muon}]": "write a line - override",
    "defaults: [{override /optimizer: muon, override /schedule: cosine}]": "write a line - override",
}


@pytest.mark.parametrize("content", ODD)
def test_a_file_of_settings_of_another_shape_is_refused(folder, content):
    """Hydra and we ended in tracebacks, or a typed value lost against model.n_layer in one line."""
    file = folder / "experiment/odd.yaml"
    file.write_text(f"# @package _global_\n{content}\n")
    with pytest.raises(SettingsError, match=rf"odd\.yaml .*{re.escape(ODD[content])}"):
        refuse_misread(file)
    well = "defaults:\n  - other\n  - override /optimizer: muon\n  - override /schedule: null\n  - _self_\n"
    nested = "hydra:\n  sweeper:\n    params: {model.n_layer: '1,2', optimizer: {lr: 0.1}}\n    variants: null\n"
    file.write_text(f"# @package _global_\n{well}{nested}seed: 1\ndata:\n  tales: {{seed: 2}}\n")
    refuse_misread(file)


def test_a_group_of_ones_own_may_have_the_package_of_one_of_ours(folder):
    """`# @package model` in a folder blocks/ was refused as a wrong first line."""
    (folder / "blocks").mkdir()
    file = folder / "blocks/small.yaml"
    file.write_text("# @package model\nn_layer: 1\n")
    (folder / "experiment/odd.yaml").write_text("# @package _global_\ndefaults:\n  - /blocks: small\n")
    assert composed(f"--config-dir={folder}", "experiment=odd").model.n_layer == 1
    file.write_text("# @package data.tales\nseed: 010\n")
    with pytest.raises(SettingsError, match=r"has data\.tales\.seed: 010, which YAML reads as 8"):
        refuse_misread(file)
    file.write_text("# @package model\nn_layer: {a: 1}\n")
    with pytest.raises(SettingsError, match=r"model\.n_layer takes one value: write n_layer: VALUE"):
        refuse_misread(file)


def test_defaults_of_ones_own_in_train_yaml_are_read_as_they_are_typed(tmp_path, monkeypatch):
    file = tmp_path / "train.yaml"
    monkeypatch.setattr("cli.overrides.DEFAULTS", file)
    ours = (CONF / "train.yaml").read_text()
    for mine, said in {
        "max_steps: 12:30": "max_steps: 12:30, which YAML reads as 750",
        "wandb: {tags: [no]}": "which YAML reads as",
        "optimizer: muon": "among its defaults, as in - optimizer: muon",
        "experiment: heads": "among its defaults, as in - experiment: heads",
        "model:": "nothing below the line of model",
        "model.n_layer: 1": "write model: {n_layer: 1}",
        "off: 1": "which YAML reads as no name",
    }.items():
        file.write_text(f"{ours}\n{mine}\n")
        with pytest.raises(SettingsError, match=f"train.yaml has .*{re.escape(said)}"):
            check_options({})
    file.write_text(f"{ours}\nmax_steps: 900\noptimizer:\n  lr: 0.01\n".replace("model: null", "model: tiny"))
    check_options({"experiment": "heads"})


@pytest.mark.parametrize("line", ["# @package global", "# @package _group_", "#@package _global_ # mine"])
def test_the_first_line_of_an_experiment_has_the_package_of_all_settings(folder, line):
    (folder / "experiment/odd.yaml").write_text(f"{line}\nseed: 1\n")
    with pytest.raises(SettingsError, match="has the line .*@package.*: write # @package _global_, and nothing behind"):
        refuse_misread(folder / "experiment/odd.yaml")
    (folder / "optimizer").mkdir()
    for package in ("_group_", "optimizer", "_global_"):
        (folder / "optimizer/odd.yaml").write_text(f"#  @package  {package} \n")
        refuse_misread(folder / "optimizer/odd.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "read"), {"on": "on", "off": "off", "yes": "on", "'on'": "on", "auto": "auto"}.items()
)
def test_on_and_off_which_yaml_reads_as_true_and_false_keep_their_meaning(folder, written, read):
    (folder / "experiment/odd.yaml").write_text(f"# @package _global_\ncompile: {written}\n")
    assert composed(f"--config-dir={folder}", "experiment=odd").compile == read


PLAIN = (
    "on Yes true True y 0 007 010 0x10 1_000 2024_11_29 2024-11-29 12:30 1.0 .5 1e3 -1E5 1_0e2 5e .nan +5 1.2.3 é null"
)


@pytest.mark.slow
def test_a_value_is_refused_that_yaml_reads_as_another_than_is_typed(folder):
    """A name such as 2024_11_29 lost its signs, a prompt Yes became true, and a seed 010 was 8."""
    file = folder / "experiment/odd.yaml"
    written = {
        "wandb:\n  name: {}": lambda typed, read: format_value(read) != typed,
        "wandb:\n  tags: [a, {}]": lambda typed, read: format_value(read) != typed,
        "hydra:\n  sweeper:\n    params:\n      sample_prompt: {}": lambda typed, read: format_value(read) != typed,
        "seed: {}": lambda typed, read: typed in ("010", "12:30"),
        "optimizer:\n  lr: {}": lambda typed, read: typed in ("010", "12:30"),
    }
    for setting, typed in itertools.product(written, PLAIN.split()):
        file.write_text(f"# @package _global_\n{setting.format(typed)}\n")
        if written[setting](typed, OmegaConf.create(f"value: {typed}").value):
            with pytest.raises(SettingsError, match=r"odd\.yaml has .*, which YAML reads as "):
                take_folder([f"--config-dir={folder}"])
        else:
            take_folder([f"--config-dir={folder}"])
    file.write_text("# @package _global_\nwandb:\n  name: '010'\nseed: '010'\nsample_prompt:\n")
    config = composed(f"--config-dir={folder}", "experiment=odd")
    assert (config.wandb.name, config.seed, config.sample_prompt) == ("010", 10, "")


def test_the_values_of_an_experiment_may_be_lists_and_groups(tmp_path):
    params = {"seed": [1, 2], "optimizer": {"lr": [0.001, 1e-2]}, "model.n_head": "1,2", "wandb.tags": ["a", "b"]}
    jobs = swept(Grid(params=params), tmp_path, lambda settings: 1.0, [])
    found = [(job["seed"], job["optimizer.lr"], job["model.n_head"], job["wandb.tags"]) for job in jobs]
    assert found == [*itertools.product("12", ("0.001", "0.01"), "12", ("[a,b]",))]


def test_a_value_in_a_list_keeps_its_meaning():
    assert range_text("model.n_kv_head", [None, 1]) == "null,1"
    assert range_text("attention", ["sdpa+gate/sdpa", "mla"]) == "sdpa+gate/sdpa,mla"
    assert range_text("data.path", ["a, b.txt", "c"]) == '"a, b.txt",c'
    assert range_text("eval_interval", ["${max_steps}", 3]) == '"${max_steps}",3'
    assert range_text("freeze", ["blocks.0", "lm_head"]) == "[blocks.0,lm_head]"
    assert range_text("freeze", [["blocks.0"], None, ["blocks.0", "lm_head"]]) == "[blocks.0],null,[blocks.0,lm_head]"
    assert range_text("sample_prompt", ["null", "a", None]) == '"null",a,null'
    with pytest.raises(SettingsError, match=r"hydra\.sweeper\.params has no values of seed: leave"):
        range_text("seed", [])


@pytest.mark.slow
def test_a_program_that_uses_hydra_itself_composes_our_settings_and_goes_on_with_its_own(tmp_path):
    """Hydra refused it by a traceback, whose advice removes what the program has set up."""
    (tmp_path / "theirs.yaml").write_text("x: 1\n")
    with initialize_config_dir(str(tmp_path), job_name="theirs", **VERSION_BASE):
        before = compose("theirs", return_hydra_config=True)
        for steps in ("7", "nothing"):
            with contextlib.suppress(SettingsError, HydraException, OmegaConfBaseException):
                register_schema({})
                assert compose_settings({"max_steps": steps}).max_steps == 7
            theirs = compose("theirs", return_hydra_config=True)
            assert theirs.x == 1 and theirs.hydra.job.name == "theirs"
            assert theirs.hydra.sweeper == before.hydra.sweeper  # Hydra's, unless a test before has called train.py -m


@pytest.mark.parametrize("typed", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_a_file_that_has_the_name_of_an_option_of_ours_is_refused(folder, typed):
    """Ours was read in its place: 240 jobs, or another rate."""
    (folder / "optimizer").mkdir()
    file = folder / "optimizer/adamw.yaml"
    file.write_text("name: adamw\nlr: 0.5\n")

    def read() -> None:
        left, _ = take_folder([typed.format(folder)])
        check_options(parse_overrides(left))

    with pytest.raises(SettingsError, match=r"optimizer/adamw.yaml is not read: .* type optimizer=my_adamw"):
        read()
    file.write_bytes((CONF / "optimizer/adamw.yaml").read_bytes())  # a copy of ours says the same
    read()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            {"optimizer": "adamw"},
            ["has optimizer.lr=0.3, which counts before optimizer=adamw: type optimizer.lr=0.001"],
        ),
        ({"optimizer": "muon"}, ["has optimizer.lr=0.3, which counts before optimizer=muon: type optimizer.lr=0.02"]),
        ({"model": "gpt2_xl"}, ["has model.n_layer=1, which counts before model=gpt2_xl: type model.n_layer=48 for"]),
        ({"optimizer": "muon,adamw", "optimizer.lr": "0.1"}, []),
        ({"model": "small", "data": "tales"}, ["has model.n_layer=1, which counts before model=small: type model.n"]),
        ({"tokenizer": "byte"}, []),
    ],
)
def test_values_of_a_typed_option_that_an_experiment_replaces_are_told(folder, typed, said, caplog):
    content = "# @package _global_\nmodel:\n  n_layer: 1\noptimizer:\n  lr: 0.3\n"
    (folder / "experiment/own.yaml").write_text(content)
    _, searched = take_folder([f"--config-dir={folder}"])
    tell_overruled(typed | {"experiment": "own"}, searched)
    assert len(caplog.messages) == len(said) and all(map(str.__contains__, caplog.messages, said))
    single = {name: value.split(",")[-1] for name, value in typed.items()} | {"experiment": "own"}
    config = compose_settings(single, searched)
    assert config.model.n_layer == 1 and config.optimizer.lr == (0.1 if "optimizer.lr" in typed else 0.3)
    caplog.clear()
    tell_overruled(typed, searched)
    tell_overruled({"experiment": "own"}, searched)
    assert not caplog.messages


@pytest.mark.parametrize("typed", [{"model.attention": "sdpa"}, {"model.attention": "sdpa", "attention": "linear"}])
def test_the_short_name_and_the_setting_are_not_both_given_also_where_one_is_the_default(folder, typed):
    (folder / "experiment/own.yaml").write_text("# @package _global_\nattention: linear\n")
    _, searched = take_folder([f"--config-dir={folder}"])
    with pytest.raises(SettingsError, match="attention=linear and model.attention=sdpa are both given: choose one"):
        compose_settings(typed | {"experiment": "own"}, searched)
    assert compose_settings({"model.attention": "linear", "experiment": "own"}, searched).model.attention == "linear"


@pytest.mark.parametrize("is_sweep", [False, True])
def test_a_setting_that_is_typed_with_several_values_is_told(is_sweep, caplog, monkeypatch):
    tell_repeated(["seed=1", "seed=2", "max_steps=3", "+seed=3", "max_steps=3"], is_sweep)
    remedy = ": a run for each is -m seed=1,2,3" if is_sweep else ""
    assert caplog.messages == [f"seed is typed with 3 values, and the last one counts, 3{remedy}."]
    # A sweep refuses several of the first, and would read others of the second.
    tell_repeated(["run_dir=a", "run_dir=b", "sample_prompt=a", "sample_prompt=b, c"], is_sweep)
    assert [message.partition("last one counts, ")[2] for message in caplog.messages[1:]] == ["b.", "b, c."]
    monkeypatch.setenv("RANK", "1")
    tell_repeated(["seed=1", "seed=2"], is_sweep)
    assert len(caplog.messages) == 3

"""A sweeper of another package, such as Optuna's, runs with the care of ours.

None is needed here: the tests have one of their own.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from sweeping import ROOT, command, put_job, tiny

from cli.composition import explain
from cli.overrides import CONF
from common.errors import SettingsError
from common.files import is_locked
from hydra_plugins._tinygpt import AfterJob, Search
from runs.summary import begin_job, fail_job, read_job
from sweeps.hydra_versions import load_plugins
from sweeps.leaderboard import read_jobs

OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
LOADER = SimpleNamespace(
    repository=None,
    get_group_options=lambda group, **_: sorted(file.stem for file in (CONF / group).glob("*.yaml")),
)


def searched(
    folder: Path,
    inner: Callable[[list[str]], object],
    arguments: list[str],
    dry_run: bool = False,
    sampler: str = "tpe",
    subdir: str = "${hydra.job.num}",
    **of_package: Any,
) -> dict[str, Any]:
    """Run a search whose package's sweeper is `inner`; return the package's settings."""
    hydra: dict[str, Any] = {
        "sweeper": {"_target_": OPTUNA, "params": None} | of_package,
        "sweep": {"dir": str(folder), "subdir": subdir},
    }
    choices = {"hydra/launcher": "basic", "hydra/sweeper": "optuna", "hydra/sweeper/sampler": sampler}
    hydra |= {"runtime": {"choices": choices}}
    config = OmegaConf.create({"dry_run": dry_run, "hydra": hydra | {"overrides": {"task": arguments, "hydra": []}}})
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config.hydra, True)  # as Hydra 1.4 does
    AfterJob().on_multirun_start(config)
    assert config.hydra.sweeper._target_ == "hydra_plugins._tinygpt.Search"
    search = Search(config.hydra.sweeper.of_package)
    made: dict[str, Any] = {}

    def instantiate(config, **_):
        if inner is pytest.fail:
            raise InstantiationException("Error in call to target") from TypeError("no argument 'foo'")
        made.update(OmegaConf.to_container(config.hydra.sweeper))
        return SimpleNamespace(sweep=inner)

    with mock.patch("hydra.core.plugins.Plugins.instance") as plugins:
        plugins().instantiate_sweeper = instantiate
        search.setup(config=config, hydra_context=SimpleNamespace(config_loader=LOADER), task_function=mock.Mock())
    search.sweep(arguments)
    return made


def test_a_folder_that_all_jobs_would_share_is_refused_before_the_first(tmp_path):
    """The first job was trained, and the second failed."""
    with pytest.raises(SettingsError, match=r"^hydra.sweep.subdir=x is the folder of several jobs: end it in /"):
        searched(tmp_path, pytest.fail, [], subdir="x")


@pytest.mark.parametrize("code", ["raise ValueError('a mutable default')", "def (a mutable default"])
def test_a_plugin_that_hydra_cannot_import_is_named(code, tmp_path):
    """Beside hydra-nevergrad-sweeper 1.2 each command ended in a traceback of dataclasses."""
    file = tmp_path / "hydra_plugins/hydra_mine_sweeper/config.py"

    def instance():
        exec(compile(code, file, "exec"))

    said = f"^{file} cannot be imported by Hydra, .*: remove that plugin, by pip uninstall hydra-mine-sweeper if"
    with mock.patch("hydra.core.plugins.Plugins.instance", instance), pytest.raises(SettingsError, match=said):
        load_plugins()
    with mock.patch("hydra.core.plugins.Plugins.instance", side_effect=KeyError), pytest.raises(KeyError):
        load_plugins()  # no plugin's


def test_a_search_gets_values_that_each_package_reads_and_typed_ones_before_an_experiments(tmp_path, capsys):
    """Optuna ended in an assertion at glob(), and drew nothing for a name that an experiment has too."""
    put_job(tmp_path, 0, "optimizer.lr=0.1", val_bpb=1.25)
    given: list[str] = []

    def sweep(arguments):
        assert is_locked(tmp_path / ".lock")
        given.extend(arguments)

    params = {"optimizer.lr": "0.05", "model.n_embd": "choice(16,32)", "optimizer": "glob(a*)"}
    typed = [
        "optimizer.lr=tag(log,interval(0.1,0.2))",
        "schedule=glob(c*)",
        "seed=range(1,3),7",
        "model.n_layer=range(1,3)",
        "x=1",
    ]
    made = searched(tmp_path, sweep, typed, params=params)
    assert given[:3] == ["optimizer.lr=tag(log,interval(0.1,0.2))", "schedule=constant,cosine", "seed=1,2,7"]
    assert given[3:] == ["model.n_layer=range(1,3)", "x=1"]  # Optuna draws the end of a range too
    assert made["params"] == {"model.n_embd": "16,32", "optimizer": "adamw"}
    shown = capsys.readouterr().out
    assert "1.2500" in shown and f"table     {tmp_path}/leaderboard.md" in shown and not is_locked(tmp_path / ".lock")


def test_the_grid_of_a_package_has_every_value_of_a_range(tmp_path):
    """Of 0.1, 0.2 and 0.3 Optuna's sampler trained the first alone, without a word."""
    given: list[str] = []
    typed = ["optimizer.lr=range(0.1,0.35,0.1)", "seed=range(9,3,-2)", "batch_size=4"]
    made = searched(tmp_path, given.extend, typed, sampler="grid", params={"model.n_layer": "range(1,3)"})
    assert given == ["optimizer.lr=0.1,0.2,0.3", f"seed={','.join(map(str, range(9, 3, -2)))}", "batch_size=4"]
    assert made["params"] == {"model.n_layer": "1,2"}


def test_a_search_refuses_a_plan_and_values_that_are_none(tmp_path):
    refused = {
        "optimizer.lr=glob(*)": "glob() chooses among options, and optimizer.lr has none",
        "seed=range(1,3,0)": "must have finite numbers, and no step of 0",
        "optimizer=glob(x*)": "lists no value",
        "batch_size=tag(log,range(2,9,2))": "only an interval has a log scale: list the values, or write tag(log,inte",
        "batch_size=tag(log,choice(2,8))": "tag(log,choice(2,8)): only an interval has a log scale",
    }
    for typed, said in refused.items():
        with pytest.raises(SettingsError) as error:
            searched(tmp_path, lambda _: pytest.fail(), [typed])
        assert said in str(error.value)
    with pytest.raises(
        SettingsError, match="dry_run=true trains nothing, and hydra/sweeper=optuna chooses jobs by resul"
    ):
        searched(tmp_path, lambda _: pytest.fail(), [], dry_run=True)
    with pytest.raises(SettingsError, match="max_failure_rate=2 is no share of the jobs: name one from 0 to 1"):
        searched(tmp_path, lambda _: pytest.fail(), [], max_failure_rate=2)
    with pytest.raises(SettingsError, match="is of several figures, and a job has one: type minimize or maximize"):
        searched(tmp_path, lambda _: pytest.fail(), [], direction=["minimize", "maximize"])
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="file cannot be used"):
        searched(tmp_path / "file", lambda _: pytest.fail(), [])


SQL = type("ArgumentError", (Exception,), {"__module__": "sqlalchemy.exc"})
ERRORS = [
    (
        SQL("Could not parse 'study.pkl'\nmore"),
        "storage cannot be used (Could not parse 'study.pkl'): write sqlite:///",
    ),
    (
        ValueError("No trials are completed yet."),
        "no job of hydra/sweeper=optuna has a result: mend what made jobs fail",
    ),
    (
        ValueError("The `low` value must be larger than 0 for a log distribution (low=-3.0, high=-1.0)."),
        "a range with low=-3.0, high=-1.0 cannot be drawn from: write interval(A,B) or range(A,B",
    ),
    (ValueError("The `step` value must be non-zero positive value, but step=0."), "a range with step=0 cannot be"),
    (FileExistsError(17, "File exists", "m/1"), "a job needs the folder m/1, which is a file: remove it, or"),
    (AssertionError(), "hydra/sweeper=optuna gave up (AssertionError): change the ranges, or the settings of hydra.sw"),
    (ZeroDivisionError("division by zero"), "gave up (division by zero): change the ranges, or"),
    (SettingsError("a b", "c d"), "a b: c d."),
    (
        InstantiationException("Error locating target 'a.b'"),
        "custom_search_space=a.b cannot be imported: name FILE.FUN",
    ),
]


@pytest.mark.parametrize(("error", "said"), ERRORS, ids=lambda value: type(value).__name__)
def test_an_error_of_a_package_is_one_sentence(error, said, tmp_path):
    def sweep(_):
        raise error

    with pytest.raises(SettingsError) as refused:
        searched(tmp_path, sweep, [], custom_search_space="a.b")
    assert said in str(refused.value)
    assert explain(ZeroDivisionError("of a job")) is None


def test_an_error_of_a_package_before_its_first_job_is_one_sentence(tmp_path):
    with pytest.raises(SettingsError, match=r"hydra/sweeper=optuna gave up \(no argument 'foo'\)"):
        searched(tmp_path, pytest.fail, [])
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("of_package", [{}, {"max_failure_rate": 0.0}])
def test_an_error_of_a_job_is_told_once(of_package, tmp_path):
    """The job has told it in the terminal; a sweeper raises it again."""

    def sweep(_):
        folder = tmp_path / "0"
        folder.mkdir()
        begin_job(folder, 0, ["seed=1"])
        error = RuntimeError("out of memory")
        fail_job(folder, error)
        raise error

    with pytest.raises(SettingsError) as refused:
        searched(tmp_path, sweep, [], **of_package)
    goes_on = "; hydra.sweeper.max_failure_rate=1 goes on without jobs that fail" if of_package else ""
    assert str(refused.value) == f"a job of the search failed: the reason is above{goes_on}."


@pytest.mark.parametrize("reasons", [["a", "a"], ["a", None]])
def test_a_package_that_gives_up_after_jobs_that_all_failed_names_them(reasons, tmp_path):
    """Optuna's grid sampler ends by an error of Study.stop there, and the sentence named the ranges."""

    def sweep(_):
        for number, reason in enumerate(reasons):
            folder = tmp_path / str(number)
            folder.mkdir()
            begin_job(folder, number, [f"seed={number}"])
            if reason:
                fail_job(folder, SettingsError(reason))
        raise RuntimeError("`Study.stop` is supposed to be invoked inside an objective function or a callback.")

    with pytest.raises(SettingsError) as refused:
        searched(tmp_path, sweep, [])
    assert ("no job of hydra/sweeper=optuna has a result: mend" in str(refused.value)) == all(reasons)


FAKE = '''
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class Fake(Sweeper):
    """Takes the best of two jobs, then one of another seed."""

    def __init__(self, rate, part):
        assert part == {"_target_": "builtins.dict", "a": 1} or part == {"a": 1}
        self.rate = rate

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments):
        jobs = [[*arguments, f"optimizer.lr={self.rate * k}"] for k in (1, 2)]
        returns = self.launcher.launch(jobs, initial_job_idx=0)
        best = min(range(2), key=lambda k: float(returns[k].return_value))
        self.launcher.launch([[*jobs[best], "seed=5"]], initial_job_idx=2)
        raise ValueError(f"job {best} was best")


node = {"_target_": "hydra_plugins.fake_sweeper.Fake", "rate": 0.001, "part": {"_target_": "builtins.dict", "a": 1}}
ConfigStore.instance().store(group="hydra/sweeper", name="fake", node=node, provider="fake")
'''


@pytest.mark.slow  # three runs in a process of their own
def test_a_package_of_somebodys_own_runs_its_jobs(tmp_path):
    folder = tmp_path / "path" / "hydra_plugins"
    folder.mkdir(parents=True)
    (folder / "fake_sweeper.py").write_text(FAKE)
    typed = tiny(tmp_path, max_steps=3)
    asked = command("-m", "hydra/sweeper=fake", "hydra.sweep.dir=m", "hydra.sweeper.rate=0.002", *typed)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "path"), str(ROOT)])}
    result = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    jobs = read_jobs(tmp_path / "m")
    losses = [job.summary.val_bpb for job in jobs[:2]]
    best = losses.index(min(losses))
    assert [job.settings["optimizer.lr"] for job in jobs] == ["0.002", "0.004", ["0.002", "0.004"][best]]
    assert jobs[2].settings["seed"] == "5" and read_job(tmp_path / "m" / "2").number == 2
    assert "Traceback" not in result.stderr and result.returncode == 1
    assert f"error: hydra/sweeper=fake gave up (job {best} was best): change the ranges" in result.stderr
    assert "table     m/leaderboard.md" in result.stdout and sys.executable in asked

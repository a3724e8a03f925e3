"""Searches find the best settings, learn from failures, and resume to the same trials."""

from __future__ import annotations

import math
import shlex
import signal
import subprocess
import sys

import pytest
from sweeping import cells, command, in_memory, put_job, refusal, run, swept, tiny

from common.errors import SettingsError
from runs.summary import read_job, read_summary
from sweeps.search import TRIED, Search

optuna = pytest.importorskip("optuna")
LR = "optimizer.lr=tag(log,interval(0.0001,0.1))"
SPACE = [LR, "model.n_head=2,3,4", "max_steps=5"]


def search(n_trials: int = 12, n_jobs: int = 1, seed: int = 1) -> Search:
    return Search(n_trials=n_trials, n_jobs=n_jobs, seed=seed)


def bowl(settings: dict[str, str]) -> float:
    """Best at a rate of 0.01 with 4 heads; 3 heads are impossible."""
    if settings["model.n_head"] == "3":
        raise SettingsError("model.n_head=3 does not divide model.n_embd=32")
    return 2 + math.log10(float(settings["optimizer.lr"]) / 0.01) ** 2 - 0.1 * (settings["model.n_head"] == "4")


def test_the_best_is_found_and_named_as_a_command_and_what_failed_is_avoided(tmp_path, capsys):
    jobs = swept(search(n_trials=40), tmp_path, bowl, SPACE)
    assert len(jobs) == 40 and len({job["optimizer.lr"] for job in jobs}) == 40
    assert all(job["optimizer.lr"] == f"{float(job['optimizer.lr']):.6g}" for job in jobs)  # which a person can copy
    best = min((job for job in jobs if job["model.n_head"] != "3"), key=bowl)
    failed = [number for number, job in enumerate(jobs) if job["model.n_head"] == "3"]
    assert bowl(best) < 1.95 and len(failed) < 10 and failed[-1] < 35
    said = capsys.readouterr().out
    again = f"python train.py max_steps=5 optimizer.lr={best['optimizer.lr']} model.n_head={best['model.n_head']}"
    assert f"best      val_bpb {bowl(best):.4f}, run {jobs.index(best)}: " in said
    assert f"again     {again}\n" in said and (tmp_path / "best.txt").read_text() == f"{again}\n"


@pytest.mark.parametrize("n_jobs", [1, 5])
def test_a_search_that_was_stopped_asks_for_the_same_and_runs_what_is_left(tmp_path, n_jobs):
    (whole := tmp_path / "whole").mkdir()
    wanted = swept(search(n_jobs=n_jobs), whole, bowl, SPACE)

    def stop(settings: dict[str, str]) -> float:
        if settings == wanted[7]:
            raise KeyboardInterrupt
        return bowl(settings)

    (cut := tmp_path / "cut").mkdir()
    sweeper = search(n_jobs=n_jobs)
    first = in_memory(sweeper, cut, stop)
    with pytest.raises(KeyboardInterrupt):
        sweeper.sweep(SPACE)
    rest = swept(search(n_jobs=n_jobs), cut, bowl, SPACE)
    assert (
        len(wanted) == 12 and first == wanted[:8] and rest == wanted[7:]
    )  # neither what is finished runs again, nor what failed
    with pytest.raises(SettingsError, match=r"holds a run of .*: remove it, or give the sweep another folder"):
        swept(search(n_jobs=n_jobs, seed=2), cut, bowl, SPACE)  # another search


def test_a_search_in_which_all_fail_says_so_and_a_task_is_searched_by_its_loss(tmp_path):
    with pytest.raises(SettingsError, match=r"^all 3 runs of the search failed"):
        swept(search(n_trials=3), tmp_path, bowl, [LR, "model.n_head=3"])
    put_job(tmp_path / "task", 0, "seed=1", "model.n_head=2", val_loss=0.5, val_accuracy=0.25, val_bpb=None)
    swept(search(n_trials=1), tmp_path / "task", bowl, ["seed=1", "model.n_head=2,2"])
    assert (tmp_path / "task/best.txt").read_text().endswith("train.py seed=1 model.n_head=2\n")


@pytest.mark.parametrize(
    ("range_", "kind", "ends"),
    [
        ("max_steps=interval(2,8)", "IntDistribution", (2, 8)),
        ("optimizer.lr=interval(0,1)", "FloatDistribution", (0.0, 1.0)),
        ("optimizer.lr=int(interval(1,4))", "IntDistribution", (1, 4)),
        ("max_steps=tag(log,interval(2,8))", "IntDistribution", (2, 8)),
        ("optimizer.lr=tag(log,interval(1,4))", "FloatDistribution", (1.0, 4.0)),
    ],
)
def test_a_setting_of_whole_numbers_is_searched_in_whole_numbers(tmp_path, range_, kind, ends):
    in_memory(sweeper := search(), tmp_path, bowl)
    ((known,), fixed) = sweeper.read_space([range_, "seed=3"])[0].values(), sweeper.read_space([range_, "seed=3"])[1]
    assert (type(known).__name__, (known.low, known.high), fixed) == (kind, ends, ["seed=3"])
    assert known.log == ("log" in range_)


MISTAKES = {
    "": "hydra/sweeper=optuna has nothing to search: give a range",
    "optimizer.lr=interval(0.1,0.01)": "optimizer.lr=interval(0.1,0.01): ",
    "optimizer.lr=tag(log,interval(0,1))": "optimizer.lr=tag(log,interval(0,1)): ",
    "optimizer.lr=interval(0,inf)": "optimizer.lr=interval(0,inf) must have finite numbers",
    "optimizer.lr=interval(nan,1)": "optimizer.lr=interval(nan,1) must have finite numbers",
    "attention=sdpa,nope model.n_head=2,4": "error: attention=nope: 'nope' is no form",
    "model.n_head=2,3": "error: model.n_head=3 does not divide model.n_embd=128: choose",
    "model.dropout=interval(0,2)": "error: model.dropout=2 must be",
    "optimizer.lr=interval(0.1)": "cannot read the override 'optimizer.lr=interval(0.1)': ",
    "model=tiny,huge": "model=huge does not exist",
    "seed=range(2,1)": "seed=range(2,1) has no value",
    "seed=1,2 dry_run=yes": "dry_run=true trains nothing to compare: leave out hydra/sweeper=optuna",
    "+experiment=attention": "hydra.sweeper.variants are compared, all of them, not searched",
    "seed=1,2 hydra.sweeper.n_trials=0": "hydra.sweeper.n_trials=0 must be a whole number from 1",
    "seed=1,2 hydra.sweeper.n_jobs=some": "hydra.sweeper.n_jobs=some must be a whole number from 1",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_sentence_before_any_run(mistake, tmp_path):
    assert MISTAKES[mistake] in refusal("hydra/sweeper=optuna", *mistake.split(), cwd=tmp_path)


def test_a_value_is_refused_only_if_none_of_the_others_goes_with_it(tmp_path):
    asked = []

    def check_job(job: list[str]) -> None:
        asked.append(job)
        a, b = (int(value.partition("=")[2]) for value in job[1:])
        if a > b:
            raise SettingsError(f"a={a} is too large", "lower it")

    in_memory(sweeper := search(), tmp_path, bowl)
    sweeper.check_job = check_job
    sweeper.read_space(["c=0", "a=1,2", "b=1,2"])
    assert ["c=0", "a=2", "b=2"] in asked and len(asked) <= 8
    with pytest.raises(SettingsError, match=r"^a=3 is too large: lower it"):
        sweeper.read_space(["c=0", "a=1,3", "b=1,2"])
    asked.clear()
    with pytest.raises(SettingsError, match=r"^a=10001 is too large"):
        sweeper.read_space(["c=0", "a=0,10001", f"b={','.join(map(str, range(10_000)))}"])
    assert len(asked) <= TRIED + 1


def test_without_optuna_one_sentence_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    said = refusal("hydra/sweeper=optuna", "seed=1,2", cwd=tmp_path)
    assert said == 'error: hydra/sweeper=optuna is not installed: pip install -e ".[search]".\n'


@pytest.mark.slow
def test_runs_side_by_side_that_were_killed_search_on_to_a_best_that_its_command_trains_again(tmp_path):
    pytest.importorskip("joblib")
    asked = [
        "-m",
        "hydra/sweeper=optuna",
        LR,
        "model.vocab_size=300,100",
        *tiny(tmp_path, max_steps=20, eval_interval=10),
    ]
    asked += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_trials=6", "hydra.sweep.dir=here"]
    with subprocess.Popen(command(*asked), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        next(line for line in process.stdout if "job 2: " in line)
        process.send_signal(signal.SIGTERM)
        advice = shlex.split(process.stdout.read().split("to go on:  ")[1])
    result = run(*advice[2:], cwd=tmp_path)
    assert process.returncode == 143 and result.returncode == 0, result.stderr
    here = tmp_path / "here"
    reached = {number: read_summary(here / str(number)) for number in range(6)}
    failed = [number for number, summary in reached.items() if summary is None]
    assert all("model.vocab_size=100" in read_job(here / str(number)).overrides for number in failed)
    best = min(set(reached) - set(failed), key=lambda number: reached[number].val_bpb)
    assert f"run {best}: here/{best}" in result.stdout and len(cells(result.stdout)) == 7
    again = run(*shlex.split((here / "best.txt").read_text())[2:], "run_dir=again", cwd=tmp_path)
    assert again.returncode == 0 and read_summary(tmp_path / "again").val_bpb == reached[best].val_bpb

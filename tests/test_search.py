"""Searches: the best settings are found, it survives failures, and a search that was killed goes on."""

import shlex
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import run_here
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from test_launchers import command, final_losses, run

from errors import SettingsError
from runs.summary import write_summary
from sweeps.search import Search, open_study, settings_of

pytestmark = pytest.mark.usefixtures("no_pictures")
optuna = pytest.importorskip("optuna")

LR = "optimizer.lr=tag(log,interval(0.0001,0.1))"


@pytest.fixture
def search(tmp_path: Path, text_file: Path) -> list[str]:
    """A search among runs of half a second."""
    settings = f"""-m hydra/sweeper=optuna data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer=byte
        device=cpu precision=fp32 sample_tokens=0 model.n_layer=1 model.n_embd=32 model.block_size=32 batch_size=4"""
    return settings.split()


def trials(folder: Path) -> list[tuple]:
    return [(t.state.name, t.value, t.params) for t in open_study(folder).trials]


def best_bpb(run_dir: Path) -> float:
    return min(bpb for _, bpb in final_losses(run_dir, "val_bpb"))


def test_trials_differ_and_the_sampler_learns_from_those_that_diverged_but_not_from_those_that_broke(
    tmp_path, monkeypatch
):
    space, ends = (
        {"optimizer.lr": optuna.distributions.FloatDistribution(0.001, 0.0123456)},
        [SettingsError("diverged"), OSError("full"), 2.0],
    )
    hydra = OmegaConf.create({"hydra": {"runtime": {"output_dir": str(tmp_path)}}})

    def launch(self: Search, jobs: list, number: int) -> list[JobReturn]:
        end = ends[number]
        status = JobStatus.FAILED if isinstance(end, Exception) else JobStatus.COMPLETED
        write_summary(tmp_path, {"status": "finished", "val_bpb": None if isinstance(end, Exception) else end})
        return [JobReturn(_return_value=end, status=status, hydra_cfg=hydra)]

    for name, stub in dict(check=None, read_space=(space, []), keeping_folder=nullcontext()).items():
        monkeypatch.setattr(Search, name, lambda *_, stub=stub: stub)
    monkeypatch.setattr(Search, "launch", launch)
    search = Search(n_trials=3, n_jobs=1, seed=1)
    search.folder = tmp_path
    search.sweep([])
    assert [(state, value) for state, value, _ in trials(tmp_path)] == [
        ("PRUNED", None),
        ("FAIL", None),
        ("COMPLETE", 2.0),
    ]
    assert len({params["optimizer.lr"] for _, _, params in trials(tmp_path)}) == 3


@pytest.mark.parametrize(("value", "shown"), [(0.00512345, "0.005123"), (0.0123456, "0.0123456"), (0.001, "0.001")])
def test_a_number_is_shown_with_four_digits_where_these_are_within_its_range(value, shown):
    space = {"optimizer.lr": optuna.distributions.FloatDistribution(0.001, 0.0123456)}
    trial = optuna.trial.create_trial(value=1.0, params={"optimizer.lr": value}, distributions=space)
    assert settings_of(trial) == [f"optimizer.lr={shown}"]


@pytest.mark.slow
def test_a_search_survives_failures_and_says_how_to_train_the_best(search, tmp_path):
    asked = [LR, "model.n_head=2,3", "max_steps=20", "eval_interval=5", "hydra.sweeper.n_trials=8"]
    result = run(*search, *asked, "hydra.sweep.dir=here", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    here = tmp_path / "here"
    study = open_study(here)
    losses = {trial.number: trial.value for trial in study.trials if trial.state.name == "COMPLETE"}
    failed = [trial for trial in study.trials if trial.number not in losses]
    assert len(study.trials) == 8 and failed
    assert {trial.params["model.n_head"] for trial in failed} == {"3"}
    assert f"{len(losses)} finished, {len(failed)} failed" in result.stdout
    said_at_work, _ = result.stdout.split("\n| ", maxsplit=1)
    assert said_at_work.count("model.n_head=3 does not divide model.n_embd=32") == len(failed)

    best = min(losses, key=losses.get)
    assert f"run {best}: here/{best}" in result.stdout and losses[best] == best_bpb(here / str(best))
    _, script, *settings = shlex.split((here / "best.txt").read_text())
    again = subprocess.run(command(*settings, "run_dir=again"), cwd=tmp_path, capture_output=True, text=True)
    assert script == "train.py" and again.returncode == 0, again.stderr
    assert best_bpb(tmp_path / "again") == losses[best]


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_to_the_same_trials(search, tmp_path):
    asked = [LR, "max_steps=60", "eval_interval=20", "checkpoint_interval=20", "hydra.sweeper.n_trials=3"]
    whole = run(*search, *asked, "hydra.sweep.dir=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    stopped = [*search, *asked, "hydra.sweep.dir=stopped"]
    for number, line in ((signal.SIGKILL, "step 40"), (signal.SIGINT, "step 40")):
        process = subprocess.Popen(command(*stopped), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        text = ""
        for output in process.stdout:
            text += output
            if line in output:
                process.send_signal(number)
                break
        text += process.stdout.read()
        assert process.wait() == {signal.SIGKILL: -9, signal.SIGINT: 130}[number]
    advice = shlex.split(text.split("stopped; to go on:  ")[1])
    result = run(*advice[2:], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "resuming at step" in result.stdout
    assert trials(tmp_path / "stopped") == trials(tmp_path / "whole")
    found, wanted = (text.split("\nsearch ")[1].split("\n\n")[0] for text in (result.stdout, whole.stdout))
    assert found.replace("stopped", "whole") == wanted

    finished = run(*stopped, cwd=tmp_path)
    assert finished.returncode == 0 and "Launching" not in finished.stdout and "3 finished" in finished.stdout
    other_seed = run(*search, *asked, "hydra.sweeper.seed=2", "hydra.sweeper.n_trials=1", cwd=tmp_path)
    assert other_seed.returncode == 0
    (folder,) = tmp_path.glob("multirun/*/*")  # the default one
    assert trials(folder)[0] != trials(tmp_path / "whole")[0]


@pytest.mark.slow
def test_runs_side_by_side_search_together(search, tmp_path):
    pytest.importorskip("joblib")
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_trials=4"]
    result = run(*search, LR, "max_steps=4", "eval_interval=2", *parallel, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (folder,) = tmp_path.glob("multirun/*/*")
    found = trials(folder)
    assert [value for _, value, _ in found] == [best_bpb(folder / str(job)) for job in range(4)]


@pytest.mark.parametrize(
    ("range_", "kind", "ends"),
    [
        ("max_steps=interval(2,8)", "IntDistribution", (2, 8)),
        ("model.dropout=interval(0,1)", "FloatDistribution", (0.0, 1.0)),
    ],
)
def test_a_setting_of_whole_numbers_is_searched_in_whole_numbers(search, tmp_path, range_, kind, ends):
    fails = ["model.n_head=5", "hydra.sweeper.n_trials=1", "hydra.sweep.dir=here"]
    result = run_here("train.py", *search, range_, *fails, cwd=tmp_path)
    assert result.returncode == 1 and "all 1 runs of the search failed" in result.stderr
    (known,) = open_study(tmp_path / "here").trials[0].distributions.values()
    assert (type(known).__name__, (known.low, known.high)) == (kind, ends)


MISTAKES = {
    "": "hydra/sweeper=optuna has nothing to search",
    "optimizer.lr=interval(0.1,0.01)": "optimizer.lr=interval(0.1,0.01) cannot be searched (",
    "optimizer.lr=tag(log,interval(0,1))": "optimizer.lr=tag(log,interval(0,1)) cannot be searched (",
    "optimizer.lr=interval(0.1)": "cannot read the override 'optimizer.lr=interval(0.1)': ranges are choice(2,4,8)",
    "optimizer.lr=interval(a,b)": "cannot read the override",
    "optimizer.lrr=interval(1,2)": "there is no setting optimizer.lrr: did you mean optimizer.lr",
    "model=tiny,huge": "model=huge does not exist",
    "seed=range(2,1)": "seed=range(2,1) cannot be searched (",
    "model.n_head=2,many": "model.n_head: Value 'many' of type",
    "seed=1,2 dry_run=true": "dry_run=true trains nothing",
    "seed=1,2 dry_run=yes": "dry_run=true trains nothing",
    "+experiment=attention": "hydra.sweeper.variants are compared, all of them, not searched",
    "seed=1,2 hydra.sweeper.n_trials=0": "hydra.sweeper.n_trials=0 must be a whole number from 1",
    "seed=1,2 hydra.sweeper.n_jobs=some": "hydra.sweeper.n_jobs=some must be a whole number from 1",
    "seed=1,2 hydra.sweeper.prune=false": "there is no setting hydra.sweeper.prune",
    "seed=1,2 hydra.sweeper.trials=3": "there is no setting hydra.sweeper.trials",
    "seed=1,2 hydra.sweep.dir=/proc/x": "hydra.sweep.dir=/proc/x cannot be written",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_sentence_before_any_run(mistake, tmp_path):
    result = run_here("train.py", "-m", "hydra/sweeper=optuna", *mistake.split(), cwd=tmp_path)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 1 and len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert MISTAKES[mistake] in lines[0]
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_sweep_or_search_is_left_alone(search, tmp_path):
    asked = [*search, "max_steps=1", "hydra.sweeper.n_trials=1", "hydra.sweep.dir=here"]
    assert run_here("train.py", *asked, "seed=1,2", cwd=tmp_path).returncode == 0
    other = run_here("train.py", *asked, "seed=1,3", cwd=tmp_path)
    assert other.returncode == 1 and "holds a search with seed=1,2, not seed=1,3" in other.stderr
    (tmp_path / "here" / "search.journal").write_text("junk\n")
    assert "search.journal cannot be read" in run_here("train.py", *asked, "seed=1,2", cwd=tmp_path).stderr
    (tmp_path / "here" / "search.journal").unlink()
    other = run_here("train.py", *asked, "seed=3,4", cwd=tmp_path)
    assert "holds a run of " in other.stdout and "all 1 runs of the search failed" in other.stderr


def test_when_every_run_fails_one_sentence_says_so(search, tmp_path):
    result = run_here("train.py", *search, "model.n_head=3,5,7", "hydra.sweeper.n_trials=3", cwd=tmp_path)
    assert result.returncode == 1 and "all 3 runs of the search failed" in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_optuna_one_sentence_says_how_to_install_it(tmp_path):
    (tmp_path / "optuna.py").write_text("raise ImportError")
    result = run("-m", "hydra/sweeper=optuna", "seed=1,2", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    sentence = 'error: hydra/sweeper=optuna is not installed: pip install -e ".[search]".\n'
    assert (result.returncode, result.stderr) == (1, sentence)

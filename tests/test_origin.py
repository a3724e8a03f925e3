"""A run's code has a hash: whoever changes it, git or not, a run, a sweep and a comparison tell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import some
from sweeping import ROOT, cells, in_memory, put_job, put_summary, run_here, tiny

from common.errors import SettingsError
from data.prepare import tokens_hash
from runs.origin import PACKAGES, PROJECT_HASH, commit, commit_of, hash_of_code
from runs.summary import read_summary
from sweeps.grid import Grid, other_settings
from sweeps.leaderboard import VERSIONS, markdown, read_jobs, write_leaderboard
from train import train
from training.config import TrainConfig


def copy_code(place: Path) -> Path:
    """A copy of the files that a run needs."""
    place.mkdir()
    shutil.copy(ROOT / "train.py", place)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    return place


CHANGES = {
    "a line": lambda at: (at / "model/gpt.py").open("a").write("# other\n"),
    "a preset": lambda at: (at / "conf/experiment/heads.yaml").open("a").write("# other\n"),
    "the command": lambda at: (at / "train.py").open("a").write("\n"),
    "a new file": lambda at: (at / "model/attention/new.py").touch(),
    "a file less": lambda at: (at / "data/tales.py").unlink(),
    "another name": lambda at: (at / "data/tales.py").rename(at / "data/tales2.py"),
    "another place": lambda at: (at / "data/tales.py").rename(at / "runs/tales.py"),
    "two that changed places": lambda at: [
        (at / "data/tales.py").rename(at / "x"),
        (at / "data/tasks.py").rename(at / "data/tales.py"),
        (at / "x").rename(at / "data/tasks.py"),
    ],
}
NO_CHANGES = {
    "another command": lambda at: (at / "sample.py").write_text("x"),
    "a page": lambda at: (at / "docs").mkdir() or (at / "docs/x.py").touch(),
    "a test": lambda at: (at / "tests").mkdir() or (at / "tests/x.py").touch(),
    "a file of one's own": lambda at: (at / "mine.py").touch(),
    "a compiled file": lambda at: (at / "model/gpt.pyc").touch(),
    "a hidden file": lambda at: (at / "model/.gpt.py").touch(),
    "a lock of an editor": lambda at: (at / "model/.#gpt.py").symlink_to("me@host"),
    "the time": lambda at: os.utime(at / "model/gpt.py", (1, 1)),
    "line ends": lambda at: (at / "model/gpt.py").write_bytes(
        (at / "model/gpt.py").read_bytes().replace(b"\n", b"\r\n")
    ),
}


@pytest.mark.parametrize("change", some([*CHANGES, *NO_CHANGES], 2))
def test_the_hash_is_of_all_that_a_run_imports_and_of_nothing_else(change, tmp_path):
    copied = copy_code(tmp_path / "copy")
    assert hash_of_code(copied) == hash_of_code(ROOT) == PROJECT_HASH
    (CHANGES | NO_CHANGES)[change](copied)
    assert (hash_of_code(copied) == PROJECT_HASH) == (change in NO_CHANGES)


@pytest.mark.long
@pytest.mark.slow
def test_every_module_of_ours_that_a_run_imports_counts(tmp_path):
    script = """import sys
from cli.hydra_command import run_train_command
sys.argv[1:] = [*sys.argv[1:], "run_dir=run"]
run_train_command()
for module in list(sys.modules.values()):
    file = getattr(module, "__file__", None) or ""
    if file.startswith(sys.path[0]):
        print("MODULE", file)
"""
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[0] = {str(ROOT)!r}\n{script}", *tiny(tmp_path, max_steps=1)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    modules = [Path(line[7:]) for line in found.stdout.splitlines() if line.startswith("MODULE ")]
    assert len(modules) > 60, found.stderr
    assert {file.relative_to(ROOT).parts[0] for file in modules} <= {"train.py", *PACKAGES}


def test_a_copy_without_git_does_not_take_the_commit_of_a_repository_around_it(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    (tmp_path / "copy").mkdir()
    assert commit_of(tmp_path / "copy") is None and commit_of(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_run_names_its_code_and_one_that_resumes_with_other_code_says_so(train_config, monkeypatch, caplog):
    train_config = replace(train_config, sample_tokens=0, max_steps=2)
    train(train_config)
    run = Path(train_config.run_dir)
    meta = json.loads((run / "checkpoints/last/meta.json").read_text())
    summary = read_summary(run)
    assert meta["computed_on"]["project_hash"] == summary.project_hash == PROJECT_HASH
    assert summary.commit == commit()
    again = replace(train_config, resume=str(run), max_steps=3)
    train(again)
    assert "results may differ" not in caplog.text and "results differ" not in caplog.text
    monkeypatch.setattr("training.run.PROJECT_HASH", "0123")
    train(replace(again, max_steps=4))
    said = f"the project's code has changed, so results may differ: project_hash 0123 (was {PROJECT_HASH})"
    assert said in caplog.messages and "results differ by rounding" not in caplog.text


def test_a_table_tells_rows_of_other_code_apart(tmp_path):
    for number, (seed, code) in enumerate([(1, "aa"), (2, "aa"), (3, "bb"), (1, "bb")]):
        put_job(tmp_path, number, f"seed={seed}", project_hash=code, val_bpb=1.0 + number / 10)
    text = markdown(read_jobs(tmp_path))
    rows = [line.split(" | ") for line in text.splitlines()[2:4]]
    assert [(row[0], row[1]) for row in rows] == [("| 1, 2", "aa          "), ("| 3, 1", "bb          ")], text
    assert "The rows were computed by different code (project_hash): compare only those of the same." in text
    for number in range(4):
        put_job(tmp_path, number, f"seed={number}", project_hash="aa")
    assert "project_hash" not in markdown(read_jobs(tmp_path))
    write_leaderboard(tmp_path)
    assert (tmp_path / "leaderboard.csv").read_text().splitlines()[0].count("project_hash") == 1


def test_a_table_tells_versions_of_a_persons_file_apart_that_one_row_would_mix(tmp_path):
    def table(*jobs: tuple[str, str, str | None, float]) -> str:
        for number, (attention, seed, version, val_bpb) in enumerate(jobs):
            put_job(tmp_path, number, f"attention={attention}", f"seed={seed}", code_hash=version, val_bpb=val_bpb)
        return markdown(read_jobs(tmp_path))

    # Two versions of one form are two rows; (1.0 + 1.4) / 2 of both would be the result of neither.
    text = table(("sdpa", "1", None, 2.0), ("mine", "1", "aa", 1.0), ("mine", "2", "bb", 1.4))
    assert " 1.0000 " in text and " 1.4000 " in text and " 1.2000" not in text
    assert text.count("Some rows have different versions of a file of code= (code_hash)") == 1
    # A form without a file beside one of a file is no other version, nor is a failed job.
    text = table(("sdpa", "1", None, 2.0), ("mine", "1", "aa", 1.0), ("mine", "2", "aa", 1.4))
    assert "code_hash" not in text and "1.2000 ± 0.2828" in text  # √(0.2² + 0.2²)
    put_job(tmp_path, 2, "attention=mine", "seed=2", status="failed", reason="", code_hash="bb")
    assert "code_hash" not in markdown(read_jobs(tmp_path))


@pytest.mark.parametrize(
    ("fact", "first", "other", "said"),
    [
        ("weights_hash", "aa", "bb", "begin with different weights of init_from="),
        ("computed_in", "float32", "bfloat16", "were computed in different types of numbers"),
        (
            "earlier_settings",
            None,
            "optimizer.lr=0.5 until step 6",
            "are of runs that were resumed with other settings or code",
        ),
    ],
)
def test_a_table_tells_runs_of_other_beginnings_and_machines_apart(fact, first, other, said, tmp_path):
    for number, found in enumerate([first, other]):
        put_job(tmp_path, number, f"seed={number}", val_bpb=1.0 + number, **{fact: found})
    text = markdown(read_jobs(tmp_path))
    assert " 1.0000 " in text and " 2.0000 " in text and f"Some rows {said} ({fact}): compare only" in text
    # A run that was resumed with other settings is no copy of one that had them from its beginning.
    for number, found in enumerate([first, other]):
        job = put_job(tmp_path, number, "seed=1", val_bpb=1.0 + number, **{fact: found})
        (job / "config.yaml").write_text("seed: 1\n")
    assert len(read_jobs(tmp_path)) == 2 and "Left out" not in markdown(read_jobs(tmp_path))
    # Rows of two attentions differ in it too, but where another setting explains it.
    follows = VERSIONS[fact].settings[:1]
    for values in (["x", "x"], ["x", "y"]):
        for number, found in enumerate([first, other]):
            attention = ("sdpa", "mla")[number]
            job = put_job(tmp_path, number, f"attention={attention}", val_bpb=1.0 + number, **{fact: found})
            written = "".join(f"{setting}: {values[number]}\n" for setting in follows)
            (job / "config.yaml").write_text(f"seed: 1\nmodel:\n  attention: {attention}\n{written}")
        assert (fact in markdown(read_jobs(tmp_path))) == (values == ["x", "x"] or not follows)
    # One row has what all of its runs have in common.
    for number in range(2):
        put_job(tmp_path, number, f"seed={number}", val_bpb=1.0 + number, **{fact: other})
    assert fact not in markdown(read_jobs(tmp_path))


@pytest.mark.long
def test_a_table_tells_versions_of_the_text_apart_and_knows_a_copy_of_it(tmp_path):
    asked = ["-m", "hydra.sweep.dir=here", *tiny(tmp_path, max_steps=2)]
    text = tmp_path / "text.txt"
    assert run_here(*asked, "seed=1", cwd=tmp_path).returncode == 0
    os.utime(text, (1, 1))  # a copy, as on another machine
    assert run_here(*asked, "seed=1,2", "allow_changes=true", cwd=tmp_path).returncode == 0
    table = markdown(read_jobs(tmp_path / "here"))
    assert "| 1, 2 |" in table and "text_hash" not in table
    text.write_text(text.read_text(encoding="utf-8").replace("mat", "rug"), encoding="utf-8")
    assert run_here(*asked, "seed=1,2,3", "allow_changes=true", cwd=tmp_path).returncode == 0
    table = markdown(read_jobs(tmp_path / "here"))
    losses = [read_summary(tmp_path / f"here/{job}").val_bpb for job in range(3)]
    assert f"{sum(losses[:2]) / 2:.4f} ±" in table and f" {losses[2]:.4f} " in table
    assert "Some rows have different versions of the text (text_hash)" in table


def test_a_hash_of_tokens_is_of_their_numbers_and_their_length(monkeypatch):
    monkeypatch.setattr("data.prepare.HASHED", 1 << 20)
    rng = np.random.default_rng(0)
    for length in (1, 7, 1000, 3_000_000):
        tokens = rng.integers(0, 300, length, dtype=np.uint16)
        found = tokens_hash(tokens, tokens[:5])
        assert found == tokens_hash(tokens.copy(), tokens[:5].copy())
        others = [tokens[:-1], tokens.astype(np.uint32)]
        for place in (0, length // 2, length - 1) if length < 1 << 19 else (0, length - 1):
            others.append(tokens.copy())
            others[-1][place] ^= 1
        assert found not in [tokens_hash(other, tokens[:5]) for other in others]


def test_a_sweep_does_not_go_on_with_another_version_of_a_persons_file_beside_finished_jobs(tmp_path):
    sweeper = Grid()
    in_memory(sweeper, tmp_path, result=lambda settings: 1.0)
    first = put_job(tmp_path, 0, "seed=1", code_hash="aa")
    (first / "config.yaml").write_text("code: mine.py\n")
    sweeper.refuse_other_code([None, TrainConfig(code="mine.py", code_hash="aa")])
    sweeper.refuse_other_code([TrainConfig(code="other.py", code_hash="bb")])
    changed = [TrainConfig(code="mine.py", code_hash="bb")]
    with pytest.raises(SettingsError, match=r"another version of code=mine\.py, code_hash=aa: restore that file, "):
        sweeper.refuse_other_code(changed)
    sweeper.config.allow_changes = True
    sweeper.refuse_other_code(changed)
    sweeper.config.allow_changes = False
    put_job(tmp_path, 0, "seed=1", status="failed", code_hash="aa")  # whose file has been mended since
    sweeper.refuse_other_code(changed)


@pytest.mark.long
def test_a_sweep_that_goes_on_with_other_code_is_refused_unless_that_is_allowed(tmp_path, monkeypatch):
    asked = ["-m", "hydra.sweep.dir=here", *tiny(tmp_path, max_steps=1)]
    assert run_here("seed=1", *asked, cwd=tmp_path).returncode == 0
    monkeypatch.setattr("sweeps.grid.PROJECT_HASH", "0123")
    monkeypatch.setattr("training.log.PROJECT_HASH", "0123")
    refused = run_here("seed=1,2", *asked, cwd=tmp_path)
    ran = f"commit={commit()} project_hash={PROJECT_HASH}"
    said = f"hydra.sweep.dir=here has runs of other code ({ran}) than this, 0123: restore that code, name "
    assert refused.stderr.startswith(f"error: {said}") and refused.stderr.count("\n") == 1
    allowed = run_here("seed=1,2", *asked, "allow_changes=true", cwd=tmp_path)
    assert allowed.returncode == 0 and "job 0 is finished already" in allowed.stdout, allowed.stderr
    assert "computed by different code" in (tmp_path / "here/leaderboard.md").read_text()
    again = run_here("seed=1,2", *asked, "allow_changes=true", cwd=tmp_path)
    assert again.stdout.count("is finished already") == 2


@pytest.mark.long
def test_a_job_goes_on_with_a_changed_text_if_the_sweep_allows_it(tmp_path):
    asked = ["-m", "hydra.sweep.dir=here", "seed=1,2", *tiny(tmp_path, max_steps=1)]
    assert run_here(*asked, cwd=tmp_path).returncode == 0
    file = tmp_path / "here/1/summary.json"
    file.write_text(file.read_text().replace('"finished"', '"running"'))
    text = tmp_path / "text.txt"
    text.write_text(text.read_text(encoding="utf-8").replace("cat", "fox"), encoding="utf-8")
    refused = run_here(*asked, cwd=tmp_path)
    assert refused.returncode == 1 and "or set allow_changes=true" in refused.stdout + refused.stderr
    allowed = run_here(*asked, "allow_changes=true", cwd=tmp_path)
    assert allowed.returncode == 0 and "job 0 is finished already" in allowed.stdout, allowed.stderr
    assert run_here(*asked, cwd=tmp_path).stdout.count("is finished already") == 2
    assert "allow_changes" not in (tmp_path / "here/leaderboard.csv").read_text()


@pytest.mark.long
def test_a_comparison_goes_on_with_its_code_alone_whatever_git_knows(tmp_path):
    """In a dirty checkout, in a clean one of another commit, and in a copy without git that was unpacked elsewhere."""
    place = copy_code(tmp_path / "code")
    settings = tiny(tmp_path, max_steps=1)
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]

    def keep() -> None:
        for step in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
            subprocess.run([*git, *step], check=True, capture_output=True)

    def compare(where: Path) -> subprocess.CompletedProcess:
        asked = ["-m", "hydra/sweeper=decide", "hydra.sweeper.max_pairs=6", "hydra.sweeper.give_up=2"]
        asked += ["hydra.sweeper.variants=['model.n_head=1','model.n_head=2']", f"hydra.sweep.dir={tmp_path}/here"]
        command = [sys.executable, str(where / "train.py"), *asked, *settings]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)

    keep()
    (place / "model/gpt.py").open("a").write("# mine\n")
    first = compare(place)
    assert first.returncode == 0, first.stderr
    (place / "docs").mkdir()
    (place / "docs/page.md").write_text("A page changes no run.\n")
    keep()
    again = compare(place)
    assert again.returncode == 0 and "job 0 is finished already" in again.stdout, again.stderr
    shutil.rmtree(place / ".git")
    shutil.make_archive(str(tmp_path / "packed"), "zip", place)
    shutil.unpack_archive(tmp_path / "packed.zip", unpacked := tmp_path / "unpacked")
    again = compare(unpacked)
    assert again.returncode == 0 and "job 0 is finished already" in again.stdout, again.stderr
    (unpacked / "model/gpt.py").open("a").write("# another\n")
    other = compare(unpacked)
    assert other.returncode == 1 and " ran other code (commit=" in other.stderr and other.stderr.count("\n") == 1


def test_runs_from_before_the_hash_was_kept_are_told_apart_by_their_commit(tmp_path):
    """A row was the mean of three versions, without a word: only the record for the page has their commits."""
    for seed, commits in enumerate((["aa11"], ["aa11"], ["bb22"], ["aa11", "bb22"], [])):
        job = put_job(tmp_path, seed, f"seed={seed}", val_bpb=1.0 + seed)
        notes = [{"step": 3 * number, "commit": commit} for number, commit in enumerate(commits)]
        (job / "report.jsonl").write_text("".join(json.dumps(note) + "\n" for note in [*notes, {"step": 9}]))
    text = markdown(read_jobs(tmp_path))
    rows = {row[1]: row[0] for row in cells(text)[1:]}
    assert rows == {"commit aa11": "0, 1", "commit bb22": "2", "commit aa11, bb22": "3", "–": "4"}
    assert "The rows were computed by different code (project_hash)" in text


def test_a_table_has_the_settings_that_a_finished_run_was_trained_with(tmp_path):
    """config.yaml was edited, as for the next run: the table had a rate that no run had, or lost a seed."""
    for seed in (1, 2):
        job = put_job(tmp_path, seed, f"seed={seed}", val_bpb=1.0 + seed, seed=seed)
        settings = {"seed": seed, "optimizer": {"lr": 0.02}, "max_steps": 10}
        (job / "config.yaml").write_text(yaml.safe_dump(settings))
        (job / "checkpoints/step_10").mkdir(parents=True)
        (job / "checkpoints/step_10/meta.json").write_text(json.dumps({"config": settings}))
        (job / "checkpoints/last").symlink_to("step_10")
    before = markdown(read_jobs(tmp_path))
    assert cells(before)[1][0] == "1, 2"
    file = tmp_path / "1/config.yaml"
    file.write_text(yaml.safe_dump({"seed": 2, "optimizer": {"lr": 0.5}, "max_steps": 10, "data": {"path": "b.txt"}}))
    said = "config.yaml of 1 has data.path=b.txt, optimizer.lr=0.5, seed=2, with which it was not trained"
    assert cells(markdown(read_jobs(tmp_path))) == cells(before) and said in markdown(read_jobs(tmp_path))
    assert [job.resolved["optimizer.lr"] for job in read_jobs(tmp_path)] == [0.02, 0.02]
    assert other_settings(tmp_path / "1", {"optimizer.lr": 0.02, "seed": 1}) == {}
    # Of a run that goes on, config.yaml has what was typed last.
    put_summary(tmp_path / "1", status="stopped")
    assert [job.resolved["optimizer.lr"] for job in read_jobs(tmp_path)] == [0.5, 0.02]


def test_a_setting_that_came_later_than_a_run_has_its_default_in_the_table(tmp_path):
    """Rows were divided, and called of different texts, by settings that the older runs could not have."""
    for number, settings in enumerate(({"seed": 1}, {"seed": 2, "freeze": None, "data": {"val_path": None}})):
        (tmp_path / f"{number}").mkdir()
        put_summary(tmp_path / f"{number}", seed=settings["seed"])
        (tmp_path / f"{number}/config.yaml").write_text(yaml.safe_dump(settings))
    text = markdown(read_jobs(tmp_path))
    assert cells(text)[0][0] == "seed" and cells(text)[1][0] == "1, 2" and "different texts" not in text

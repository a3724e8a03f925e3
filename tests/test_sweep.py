"""A sweep ends in knowledge: its leaderboard is right, it survives failures, stops and kills, and goes on exactly."""

import csv
import gc
import io
import json
import math
import mmap
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from browser import browse, data_of, needs_browser
from conftest import run_here
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf
from test_cli import ROOT, run
from test_resume import assert_same_run, rows, stop_at

from errors import SettingsError
from pages.runs import POINTS, thin
from runs.directory import is_locked, lock_run
from runs.metrics import read_metrics
from runs.summary import NAME, JobRecord, begin_job, fail_job, read_job, read_summary, write_summary
from sweeps.callback import AfterJob
from sweeps.grid import Grid
from sweeps.leaderboard import comma_separated, markdown, rank, read_jobs, swept_settings, write_leaderboard
from train import train
from training.device import peak_memory, reset_peak_memory
from training.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("no_pictures")
WALL_CLOCK = ("seconds", "tokens_per_s", "decode_tokens_per_s", "peak_memory_mb")


def put_job(sweep: Path, number: int, *overrides: str, bpb: float | None = 1.0, **summary) -> Path:
    """A job's folder as a run leaves it, without its checkpoints."""
    job = sweep / str(number)
    job.mkdir(parents=True)
    JobRecord(number, list(overrides)).write(job)
    row = {"step": 10, "tokens": 1000, "seconds": 1.5}
    lines = [row | {"loss": 3.0, "tokens_per_s": 500.0}, row | {"val_loss": 2.0, "val_bpb": bpb}]
    (job / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = {"status": "finished", "val_bpb": bpb, "val_loss": 2.0}
    measured = {"parameters": 1_234_567, "tokens": 1000, "seconds": 75, "tokens_per_s": 500.4, "peak_memory_mb": 99.6}
    measured["device"] = "cuda"
    write_summary(job, known | measured | {"step": 10, "seed": 1, "flops": 1e9} | summary)
    return job


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, its head first."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_leaderboard_is_ranked_by_bits_per_byte_and_shows_what_was_swept(tmp_path, device):
    for number, (heads, bpb) in enumerate([(1, 1.5), (2, 1.25), (4, 1.75)]):
        put_job(tmp_path, number, f"model.n_head={heads}", "max_steps=60", bpb=bpb, device=device)
    head, *found = cells(markdown(read_jobs(tmp_path)))
    named = dict(zip(head, found[0], strict=True))
    assert ("peak memory" in named) == (device == "cuda") and named.pop("peak memory", "100 MB") == "100 MB"
    assert list(named) == ["model.n_head", "parameters", "tokens", "tokens/s", "time", "val bpb"]
    assert list(named.values()) == ["2", "1.23M", "1k", "500", "75.0 s", "1.2500"]
    assert [row[0] for row in found] == ["2", "1", "4"]


def test_group_choices_and_settings_that_only_some_jobs_have_are_columns_and_large_round_numbers_short(tmp_path):
    put_job(tmp_path, 9, "attention=sdpa", "+experiment=shakespeare", "max_flops=10000000000.0")
    put_job(tmp_path, 10, "attention=matmul", "max_flops=123456789.0")
    jobs = read_jobs(tmp_path)
    assert swept_settings(jobs) == ["attention", "experiment", "max_flops"]
    assert [job.name for job in jobs] == ["9", "10"] and jobs[0].settings["max_flops"] == "1e+10"
    assert ["matmul", "–", "123456789.0"] in [row[:3] for row in cells(markdown(jobs))]


def test_a_table_over_several_texts_says_that_its_rows_do_not_compare(tmp_path):
    for name in ("data", "data.path", "data.val_fraction", "data.cache_dir", "tokenizer"):
        for number in (0, 1):
            put_job(tmp_path / name, number, f"{name}={number}", "data.split=train")
        note = f"|\n\nThe rows were scored on different texts ({name}): compare only those of the same.\n"
        assert markdown(read_jobs(tmp_path / name)).endswith("|\n" if name in ("data.cache_dir", "tokenizer") else note)


def test_seeds_share_a_row_with_their_mean_and_deviation(tmp_path):
    found = {"sdpa": [1.0, 1.1, 1.4], "matmul": [1.2, 1.2, 1.0]}
    for i, (name, bits) in enumerate(found.items()):
        for seed, bpb in enumerate(bits):
            put_job(tmp_path, 3 * i + seed, f"attention={name}", f"seed={seed}", bpb=bpb, seed=seed)
    put_job(tmp_path, 6, "attention=sdpa", "seed=9", status="failed", reason="out of memory", bpb=None)
    jobs = read_jobs(tmp_path)
    head, first, second, failed = cells(markdown(jobs))
    mean, deviation = statistics.mean(found["matmul"]), statistics.stdev(found["matmul"])
    assert first[0] == "matmul" and first[-1] == f"{mean:.4f} ± {deviation:.4f} (3)"
    assert second[0] == "sdpa" and second[-1].endswith("(3)")
    assert head[1] == "seed" and failed[:2] == ["sdpa", "9"] and failed[-1] == "failed: out of memory"
    table = list(csv.DictReader(io.StringIO(comma_separated(jobs))))
    assert len(table) == 7 and math.isclose(float(table[0]["val_bpb_sd"]), deviation) and table[0]["seeds"] == "3"
    assert [row["rank"] for row in table] == ["1"] * 3 + ["2"] * 3 + ["3"]


def test_failed_jobs_are_at_the_bottom_with_their_reason_and_unfinished_ones_marked(tmp_path):
    put_job(tmp_path, 0, "seed=0", status="failed", reason="n_head=3 does not\ndivide | 64", bpb=None)
    put_job(tmp_path, 1, "seed=1", status="stopped", bpb=0.5)
    put_job(tmp_path, 2, "seed=2", bpb=1.5)
    killed = put_job(tmp_path, 3, "seed=3", status="running", bpb=0.4)  # no process has its lock
    with (killed / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 12}\n')  # after summary.json
    going_on = put_job(tmp_path, 4, "seed=4", status="running", bpb=0.6)
    with lock_run(going_on):
        results = [row[-1] for row in cells(markdown(read_jobs(tmp_path)))[1:]]
    assert results[0] == "1.5000 (1)"
    assert results[1:4] == ["0.4000 (stopped, step 12)", "0.5000 (stopped, step 10)", "0.6000 (running, step 10)"]
    assert results[4] == r"failed: n_head=3 does not divide \| 64"


HOSTILE = ["</script><script>alert(1)</script>", 'a,b "c"', "a|b`c*", "line\nbreak", "ünï → ∂", "DATA TITLE"]


@pytest.mark.parametrize("value", HOSTILE)
def test_any_value_of_an_override_comes_through_every_file(tmp_path, value):
    put_job(tmp_path, 0, f"sample_prompt={value}")
    put_job(tmp_path, 1, "sample_prompt=plain")
    write_leaderboard(tmp_path)
    table = list(csv.DictReader((tmp_path / "leaderboard.csv").open(encoding="utf-8", newline="")))
    assert value in {row["sample_prompt"] for row in table}
    text = (tmp_path / "leaderboard.md").read_text(encoding="utf-8")
    assert all(len(row) == 7 for row in cells(text)) and "<script" not in text
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script>") == 2
    assert value in {job["settings"]["sample_prompt"] for job in data_of(tmp_path / "report.html")["runs"]}


BROKEN = ["", "{", "[]", "null", '"x"', '{"status": 3}', '{"status": "finished"}', "\udcff"]


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_never_ends_a_sweep(tmp_path, content):
    put_job(tmp_path, 0, "seed=1")
    broken = put_job(tmp_path, 1, "seed=2")
    for file in (NAME, "metrics.jsonl", "job.json"):
        (broken / file).write_text(content, encoding="utf-8", errors="surrogateescape")
        assert "1.0000" in write_leaderboard(tmp_path)
        assert len(read_jobs(tmp_path)) == (1 if file == "job.json" else 2)
    (broken / NAME).unlink()
    (broken / NAME).mkdir()
    assert begin_job(broken, 1, ["seed=2"]) is None and len(read_jobs(tmp_path)) == 2
    assert "1.0000" in write_leaderboard(tmp_path)


def test_the_report_asks_the_network_for_nothing_and_stays_small(tmp_path):
    row = {"tokens": 1, "seconds": 0.5, "loss": 2.123456789}
    lines = "".join(json.dumps(row | {"step": step}) + "\n" for step in range(1000))
    for number in range(100):
        job = put_job(tmp_path, number, f"model.n_head={number % 4}", f"model.n_embd={number % 5}", bpb=1 + number)
        (job / "metrics.jsonl").write_text(lines)
    write_leaderboard(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?://|@import|src=|href=", page) and len(page) < 1_100_000


@needs_browser
def test_the_report_of_a_sweep_answers_to_keys_and_a_filter_and_leaves_failed_runs_out(tmp_path):
    for number, (heads, rate) in enumerate([(1, 0.1), (2, 0.1), (1, 0.01), (2, 0.01), (4, 0.5)]):
        ending = {"status": "failed", "bpb": None} if heads == 4 else {"bpb": 1 + number / 10}
        put_job(tmp_path, number, f"model.n_head={heads}", f"optimizer.lr={rate}", "note=<b>", **ending)
    (tmp_path / "0" / "report.html").write_text("a page")
    write_leaderboard(tmp_path)
    script = """
      const press = (where, key) => where.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      const rows = () => [...$("table").tBodies[0].rows].filter(row => !row.hidden).length;
      const found = {legend: $("legend").textContent, maps: $("maps").textContent, all: rows(),
        link: document.querySelector("#table a").getAttribute("href"), axes: places.parallel.length};
      press($("frontier"), "ArrowRight"); press($("frontier"), "Enter");
      found.read = $("frontier-reading").textContent.trim(); found.chosen = label(chosen);
      $("filter").value = "lr<0.05 n_head=2"; $("filter").oninput();
      return {...found, few: rows(), curves: new Set(places.curves.map(place => place.line)).size};
    """
    found = browse(tmp_path / "report.html", script)
    assert found.pop("legend") == "model.n_head=1model.n_head=2" and "4" not in found["maps"].split("n_head")[-1][:9]
    assert found.pop("maps").count("1.") == 4 and found.pop("axes") == 12
    first = "0: model.n_head=1  optimizer.lr=0.1"
    assert found.pop("chosen") == first and found.pop("read").startswith(first)
    assert found == {"all": 5, "link": "0/report.html", "few": 1, "curves": 1}


def test_any_folder_of_runs_has_a_report_with_what_its_runs_differ_in(train_config, tmp_path):
    for rate in (0.01, 0.02):
        optimizer = replace(train_config.optimizer, lr=rate)
        train(replace(train_config, optimizer=optimizer, run_dir=str(tmp_path / f"runs/day/{rate}"), max_steps=2))
    (tmp_path / "runs/day/0.01/report.html").write_text("its page")
    assert "| optimizer.lr |" in write_leaderboard(tmp_path / "runs")
    data = data_of(tmp_path / "runs" / "report.html")
    assert data["settings"] == ["optimizer.lr"]
    assert {run["page"] for run in data["runs"]} == {"day/0.01/report.html", None}
    assert all(run["curves"]["loss"] for run in data["runs"])


def test_a_thinned_curve_is_the_mean_of_its_neighbours():
    points = [(float(i), 2.0 * i) for i in range(POINTS * 3)]
    assert thin(points[:10]) == points[:10] and thin([]) == []
    assert len(thin(points)) == POINTS and thin(points)[0] == (1.0, 2.0) and thin(points)[-1][0] == POINTS * 3 - 2


def test_a_summary_says_what_became_of_a_run_and_has_its_best_evaluation(train_config, monkeypatch):
    results = []

    def worse_each_time(*arguments, **settings):
        result = evaluate(*arguments, **settings)
        results.append(replace(result, nats=result.nats * (1 + 9 * len(results))))
        return results[-1]

    monkeypatch.setattr("training.evaluation.evaluate", worse_each_time)
    best = train(train_config)
    run_dir = Path(train_config.run_dir)
    found = json.loads((run_dir / NAME).read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert results[0].loss < results[1].loss
    assert (found["val_loss"], found["val_bpb"]) == (best, results[0].bpb) == (results[0].loss, results[0].bpb)
    assert (found["status"], found["reason"], found["device"]) == ("finished", None, "cpu")
    assert (found["step"], found["tokens"], found["seed"]) == (20, 20 * 8 * 16, 1)
    speeds = [row["tokens_per_s"] for row in read_metrics(run_dir / "metrics.jsonl") if "tokens_per_s" in row]
    assert math.isclose(found["tokens_per_s"], statistics.median(speeds), abs_tol=0.1)
    assert found["parameters"] > 0 and found["peak_memory_mb"] > 50 and found["seconds"] > 0


def test_a_stopped_and_resumed_run_has_the_uninterrupted_ones_summary(train_config, tmp_path, monkeypatch):
    train(train_config)
    stopped = replace(train_config, run_dir=str(tmp_path / "stopped"))
    stop_at(monkeypatch, 13)
    with pytest.raises(SystemExit):
        train(stopped)
    found = read_summary(tmp_path / "stopped")
    assert found["status"] == "stopped" and "after step 14" in found["reason"] and found["val_bpb"] is not None
    monkeypatch.undo()
    train(replace(stopped, resume=stopped.run_dir))
    assert without_clock(read_summary(tmp_path / "stopped")) == without_clock(read_summary(Path(train_config.run_dir)))


def test_a_run_that_is_stopped_before_it_trains_leaves_no_directory(train_config, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("training.start.prepare", stop)
    with pytest.raises(KeyboardInterrupt):
        train(train_config)
    assert not Path(train_config.run_dir).exists()


def test_a_failed_run_leaves_its_reason_and_no_nan(train_config, monkeypatch):
    def fail(run, step):
        run.progress.best_loss = math.nan
        raise SettingsError("loss or gradient was not finite: lower optimizer.lr.\nand more")

    monkeypatch.setattr("training.step.take_step", fail)
    with pytest.raises(SettingsError):
        train(train_config)
    text = (Path(train_config.run_dir) / NAME).read_text()
    assert json.loads(text)["reason"] == "loss or gradient was not finite: lower optimizer.lr." and "NaN" not in text
    write_summary(Path(train_config.run_dir), {"val_bpb": math.nan, "val_loss": math.inf})
    assert "NaN" not in (text := (Path(train_config.run_dir) / NAME).read_text()) and "Infinity" not in text


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_peak_memory_is_measured_anew_for_each_run():
    cpu = torch.device("cpu")
    size = 80_000_000
    with mmap.mmap(-1, size) as big:  # not from malloc, which may have kept as much for the next
        big.write(bytes([1]) * size)
        high = peak_memory(cpu)
    reset_peak_memory(cpu)
    assert peak_memory(cpu) < high - 0.9 * size


def test_a_failed_jobs_exception_does_not_keep_its_model_alive():
    class Model:
        pass

    def job() -> None:
        model = Model()
        kept.append(weakref.ref(model))
        raise ValueError

    kept: list[weakref.ref] = []
    try:
        job()
    except ValueError as error:
        failed = JobReturn(_return_value=error, status=JobStatus.FAILED)
    gc.collect()
    assert kept[0]() is not None
    AfterJob().on_job_end(OmegaConf.create({"dry_run": True, "hydra": {"mode": RunMode.MULTIRUN}}), failed)
    assert kept[0]() is None


def without_clock(summary: dict) -> dict:
    return {name: value for name, value in summary.items() if name not in WALL_CLOCK}


def test_a_job_knows_whether_its_folder_holds_its_run(tmp_path):
    job = tmp_path / "3"
    job.mkdir()
    assert begin_job(job, 3, ["seed=3"]) is None and read_job(job) == JobRecord(3, ["seed=3"])
    fail_job(job, SettingsError("too\nbad"))
    assert read_job(job).reason == "too." and read_jobs(tmp_path)[0].status == "failed"
    assert begin_job(job, 3, ["seed=4", "a=1"]) is None and read_job(job).reason is None  # nothing was trained there
    write_summary(job, {"status": "stopped", "step": 5})
    assert begin_job(job, 3, ["a=1", "seed=4"]) is None
    with pytest.raises(SettingsError, match=r"holds a run of `a=1 seed=4`, not of `seed=5`: .*hydra\.sweep\.dir"):
        begin_job(job, 3, ["seed=5"])
    write_summary(job, {"status": "finished", "val_loss": 2.5, "val_bpb": 1.5})
    assert begin_job(job, 3, ["a=1", "seed=4"]) == 2.5
    (job / "job.json").unlink()
    with pytest.raises(SettingsError, match="unknown settings"):
        begin_job(job, 3, ["seed=4"])


def test_a_job_that_was_killed_before_its_first_step_is_stopped_and_one_that_prepares_is_running(tmp_path):
    (tmp_path / "0").mkdir()
    begin_job(tmp_path / "0", 0, [])
    assert read_jobs(tmp_path)[0].status == "stopped"
    with lock_run(tmp_path):
        assert read_jobs(tmp_path)[0].status == "running"


def test_a_sweep_that_is_stopped_frees_its_folder_and_the_signal_before_it_says_what_became_of_its_jobs(
    tmp_path, capsys
):
    sweep, before = Grid(), signal.getsignal(signal.SIGTERM)
    sweep.config, sweep.folder = OmegaConf.create({"dry_run": False}), tmp_path
    with pytest.raises(SystemExit, match="143"), sweep.keeping_folder():
        (tmp_path / "0").mkdir()
        begin_job(tmp_path / "0", 0, [])
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before and "– (stopped, step 0)" in capsys.readouterr().out


def small_jobs(text_file: Path, *, max_steps: int) -> list[str]:
    return f"""data.path={text_file} data.cache_dir={text_file.parent}/cache tokenizer=byte model.n_layer=1
        model.n_embd=32 model.block_size=16 model.dropout=0.1 sample_tokens=0 device=cpu eval_interval=20
        checkpoint_interval=10 max_steps={max_steps}""".split()


@pytest.mark.slow
def test_a_sweep_ends_in_its_leaderboard_and_typed_again_runs_only_what_failed(text_file, tmp_path):
    typed = ["-m", "model.n_head=1,3,2", *small_jobs(text_file, max_steps=2)]
    result = run("train.py", *typed, cwd=tmp_path)
    (sweep,) = tmp_path.glob("multirun/*/*")
    folder = sweep.relative_to(tmp_path)
    assert result.returncode == 1
    assert result.stderr == (
        f"error: 1 of 3 jobs failed: the reasons are above and at the end of {folder / 'leaderboard.md'}.\n"
    )
    assert (sweep / "leaderboard.md").read_text() in result.stdout
    assert "n_head=3 does not divide model.n_embd=32" in cells(result.stdout)[-1][-1]
    assert [job.status for job in read_jobs(sweep)] == ["finished", "failed", "finished"]
    assert len(list(sweep.glob("*/checkpoints/best"))) == 2 and not list(sweep.rglob(".hydra"))

    before = {name: (sweep / name / "metrics.jsonl").stat().st_mtime_ns for name in "02"}
    again = run_here("train.py", *typed, f"hydra.sweep.dir={folder}", cwd=tmp_path)
    assert again.returncode == 1 and "job 0 is finished already" in again.stdout and "job 1 failed" in again.stdout
    assert cells(again.stdout) == cells(result.stdout)
    assert before == {name: (sweep / name / "metrics.jsonl").stat().st_mtime_ns for name in "02"}
    ask = [sys.executable, "-m", "sweeps", str(sweep)]
    by_hand = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert cells(by_hand.stdout) == cells(result.stdout)
    with lock_run(sweep):
        locked = run_here("train.py", *typed, f"hydra.sweep.dir={folder}", cwd=tmp_path)
    assert locked.returncode == 1 and "is in use by another sweep" in locked.stderr

    other = ["-m", "model.n_head=2,1", *small_jobs(text_file, max_steps=2), f"hydra.sweep.dir={folder}"]
    mixed_up = run_here("train.py", *other, cwd=tmp_path)
    assert mixed_up.returncode == 1 and mixed_up.stderr.startswith("error: 1 of 2 jobs failed")
    assert f"{sweep}/0 holds a run of `model.n_head=1" in mixed_up.stdout
    assert before["0"] == (sweep / "0" / "metrics.jsonl").stat().st_mtime_ns and read_job(sweep / "0").reason is None


def test_a_dry_run_of_a_sweep_leaves_nothing_behind(text_file, tmp_path):
    place = tmp_path / "elsewhere"
    place.mkdir()
    result = run_here("train.py", "-m", "seed=1,2", "dry_run=true", *small_jobs(text_file, max_steps=2), cwd=place)
    assert result.returncode == 0 and not list(place.iterdir()), result.stderr


def test_variants_take_turns_within_every_combination_and_may_change_several_settings(text_file, tmp_path):
    variants = 'hydra.sweeper.variants=["model.n_head=1","model.n_head=2 max_steps=${floordiv:${max_steps},0.5}"]'
    typed = ["-m", "seed=1,2", "dry_run=true", *small_jobs(text_file, max_steps=2), variants]
    result = run_here("train.py", *typed, cwd=tmp_path)
    jobs = [line.split()[-3:] for line in result.stdout.splitlines() if line.startswith("job ")]
    ends = [(job[-1], job[-2]) if "max_steps=4" in job else job[-1] for job in jobs]
    assert ends == ["model.n_head=1", ("max_steps=4", "model.n_head=2")] * 2, result.stdout + result.stderr
    mixed = run_here("train.py", *typed, "model.n_head=4", cwd=tmp_path)
    assert mixed.stderr.startswith("error: model.n_head is what hydra.sweeper.variants compares: leave it out, or")
    idle = run_here("train.py", *typed, "hydra/sweeper=optuna", cwd=tmp_path)
    assert idle.stderr.startswith("error: ") and "Traceback" not in idle.stderr, idle.stderr


def start(*arguments: str, cwd: Path) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(file: Path, text: str = "") -> None:
    until = time.monotonic() + 60
    while not (file.exists() and (file.is_dir() or text in file.read_text())):
        assert time.monotonic() < until, f"{file} did not appear"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_sweep_that_was_stopped_then_killed_ends_in_the_uninterrupted_leaderboard(text_file, tmp_path):
    overrides = ["-m", "optimizer=muon,adamw", "model.n_head=2", *small_jobs(text_file, max_steps=100)]
    whole = run("train.py", *overrides, "hydra.sweep.dir=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr

    typed = [*overrides, "hydra.sweep.dir=cut"]
    for number, step, status in ((signal.SIGINT, 30, 130), (signal.SIGTERM, 70, 143)):
        stopped = start(*typed, cwd=tmp_path)
        wait_for(tmp_path / "cut/0/metrics.jsonl", f'"step": {step},')
        assert is_locked(tmp_path / "cut")
        stopped.send_signal(number)
        output, _ = stopped.communicate(timeout=60)
        assert stopped.returncode == status and "(stopped, step" in output, output
        assert (tmp_path / "cut/leaderboard.md").exists() and not is_locked(tmp_path / "cut")
        _, script, *typed = shlex.split(output.rstrip().splitlines()[-1].partition("to go on:")[2])
        assert script.endswith("train.py") and typed[-1] == "hydra.sweep.dir=cut" and typed[:-1] == overrides

    killed = start(*typed, cwd=tmp_path)
    wait_for(tmp_path / "cut/1/checkpoints/step_20")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert "ended without a word" in comma_separated(read_jobs(tmp_path / "cut"))

    resumed = run("train.py", *typed, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "job 0 is finished" in resumed.stdout and "resuming at step" in resumed.stdout
    for name in "01":
        assert_same_run(tmp_path / "whole" / name, tmp_path / "cut" / name)
        assert rows(tmp_path / "cut" / name)[-1]["step"] == 100
    assert final_leaderboard(tmp_path / "cut") == final_leaderboard(tmp_path / "whole")


def final_leaderboard(sweep: Path) -> list[tuple]:
    """Its rows without what the clock says."""
    jobs = [job for row in rank(read_jobs(sweep)) for job in row]
    return [(job.name, job.settings, without_clock(job.summary)) for job in jobs]

"""The pages of runs show the run, save and print, and stay small and safe."""

from __future__ import annotations

import base64
import csv
import errno
import io
import itertools
import json
import math
import random
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from signal import SIGINT, raise_signal
from unittest.mock import Mock
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from browser import Browser, browse, data_of, drawn_on_paper, needs_axe, needs_browser, violations
from conftest import attention_maps, some

from cli.export import write_export
from interop.config import ExportConfig
from pages import report
from pages.kit import shape
from pages.report import MAP_BYTES, MAPPED, Report, is_mapped
from pages.runs import POINTS, describe_run, longest_curves, run_page, spread, thin
from runs.metrics import read_metrics
from runs.summary import JobRecord, Summary, write_job, write_summary
from sweeps.leaderboard import FORMATS, write_leaderboard
from train import train
from training.log import MetricsFile, SummaryFile
from training.start import open_run

PAGES = Path(report.__file__).parent
PRESS = 'const press = (where, key) => where.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));'


def page_of(config) -> Path:
    return Path(config.run_dir) / "report.html"


def put_run(sweep: Path, number: int, bpb: float | None, *settings: str, name: str = "", **known) -> Path:
    """A job's folder as a run leaves it, without its checkpoints."""
    job = sweep / (name or str(number))
    job.mkdir(parents=True)
    row = {"step": 10, "tokens": 1000, "seconds": 1.5}
    lines = [row | {"loss": 3.0}, row | {"val_loss": 2.0, "val_bpb": bpb}]
    (job / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_job(job, JobRecord(number, list(settings)))
    measured = {"status": "finished", "device": "cuda", "val_loss": 2.0, "val_bpb": bpb, "step": 10, "tokens": 1000}
    measured |= {"flops": 1e9, "decode_tokens_per_s": 99.0, "peak_memory_mb": 9.0, "cache_bytes_per_token": 64.0}
    write_summary(job, Summary(**measured | known))
    return job


@pytest.fixture
def sweep(tmp_path) -> Path:
    """The page of a sweep: 2 attentions × 2 rates × 2 seeds, a failed job and a stopped one."""
    folder = tmp_path / "sweep"
    for number in range(8):
        form, rate, seed = ("sdpa", "mla")[number & 1], ("0.1", "0.01")[number >> 1 & 1], number >> 2
        put_run(folder, number, 1 + number / 8, f"attention={form}", f"optimizer.lr={rate}", f"seed={seed}")
    put_run(folder, 8, None, "attention=delta", "optimizer.lr=0.5", "seed=0", status="failed", reason="a reason")
    put_run(folder, 9, 9.0, "attention=delta", "optimizer.lr=0.1", "seed=0", status="stopped")
    for number in range(0, 8, 3):
        (folder / str(number) / "report.html").write_text("its page")
    write_leaderboard(folder)
    return folder / "report.html"


@pytest.mark.slow
def test_the_page_holds_what_was_written_and_what_the_heads_did_at_each_evaluation(train_config, monkeypatch):
    live, told = [], Report.on_step
    look = lambda self: live.append(run_page(self.run.directory)) or told(self)  # noqa: E731
    monkeypatch.setattr(Report, "on_step", look)
    train(train_config)
    assert '"status":"running"' in live[10] and live[10].count('"text":') == 2  # of the data, and one that was written
    data = data_of(page_of(train_config))
    (run,), alone = data["runs"], data["alone"]
    assert run["status"] == "finished" and [point[0] for point in run["curves"]["loss"]] == list(range(1, 21))
    assert [note["step"] for note in alone["samples"]] == [at["step"] for at in alone["heads"]] == [10, 20]
    assert alone["wanted"]["model.n_layer"] == 2 and alone["begun"][0]["machine"]["device"] == "cpu"
    heads = [row for row in read_metrics(Path(train_config.run_dir) / "metrics.jsonl") if "val_loss" in row]
    assert alone["heads"][1]["attention_entropy"] == heads[-1]["attention_entropy"]
    title = re.search("<title>(.*)</title>", page_of(train_config).read_text())[1]
    assert title == f"sdpa, 2 layers × 2 heads × 32 wide, on {alone['begun'][0]['text']}" and "text.txt" in title


def test_a_title_has_one_layer_and_several_heads():
    assert shape("sdpa", 1, "1, 2", 32) == "sdpa, 1 layer × 1, 2 heads × 32 wide"
    assert shape("sdpa", 2, "1", 32) == "sdpa, 2 layers × 1 head × 32 wide"


def test_a_title_has_numbers_in_ascending_order_and_other_values_by_their_best_run(tmp_path):
    for number, (heads, form) in enumerate([(8, "sdpa"), (16, "mla"), (2, "gta")]):
        put_run(tmp_path, number, 3.0 - number, f"model.n_head={heads}", f"attention={form}")
    write_leaderboard(tmp_path)
    title = re.search("<title>(.*)</title>", (tmp_path / "report.html").read_text())[1]
    assert title.startswith("gta, mla, sdpa, ") and " × 2, 8, 16 heads × " in title


@pytest.mark.slow
def test_maps_of_a_repeated_text_are_the_models_weights(train_config, monkeypatch):
    found, noted = [], Report.note
    monkeypatch.setattr(Report, "note", lambda self, **known: found.append((known, self.run)) or noted(self, **known))
    train(replace(train_config, max_steps=1))
    maps, run = found[-1]
    size, tokens = maps["size"], [run.data.tokenizer.encode_single_token(text) for text in maps["tokens"]]
    assert tokens[: size // 2] == tokens[size // 2 :] and (size, maps["heads"]) == (16, [2, 2])
    rows, columns = torch.tril_indices(size, size)
    weights = attention_maps(run.model, torch.tensor([tokens]))[..., rows, columns]
    stored = torch.frombuffer(bytearray(base64.b64decode(maps["maps"])), dtype=torch.uint8).view(2, 2, -1)
    torch.testing.assert_close((stored / 255) ** 2, weights, atol=0.004, rtol=0)


@pytest.mark.parametrize("evaluations", [1, 63, 1000, 100_000])
def test_few_evaluations_of_many_are_mapped(evaluations):
    mapped = [number for number in range(1, evaluations + 1) if is_mapped(number)]
    assert mapped[:63] == list(range(1, min(evaluations, 63) + 1))
    assert len(mapped) * MAP_BYTES < MAPPED * MAP_BYTES * (1 + math.log2(max(1, evaluations / MAPPED)))


def test_of_many_things_few_are_kept_evenly_with_the_first_and_the_last():
    assert spread([*range(201)], 5) == [0, 50, 100, 150, 200] and spread([1, 2], 5) == [1, 2] and spread([], 5) == []
    points = [(float(i), 2.0 * i) for i in range(POINTS * 3)]
    assert thin(points[:10], 1) == points[:10] and thin([], 1) == []
    thinned = thin(points, 3)
    assert len(thinned) == POINTS and thinned[0] == (1.0, 2.0) and thinned[-1][0] == POINTS * 3 - 2
    assert thin(points[:-100], 3)[:50] == thinned[:50]  # so that curves of unlike length share their steps


def test_a_page_tells_of_how_many_neighbours_a_point_is_the_mean():
    rows = [{"step": n, "tokens": n, "seconds": n, "loss": 20.0 if n == 1733 else 1.0} for n in range(1, 3001)]
    many, alone, short = (
        describe_run("run", found, {}, {}, alone=alone) for found, alone in ((rows, 0), (rows, 1), (rows[:160], 0))
    )
    assert (many["neighbours"], alone["neighbours"], short["neighbours"]) == (19, 3, 1)
    assert max(loss for *_, loss in many["curves"]["loss"]) == 2.0  # (20 + 18) / 19


def test_a_page_of_a_run_that_goes_on_stands_at_its_last_row(tmp_path):
    (tmp_path / "summary.json").write_text('{"status": "running", "step": 0, "tokens": 0, "flops": 0, "seconds": 0.1}')
    row = '{"step": %d, "tokens": %d, "flops": 9e9, "seconds": 4.5, "loss": 2.5}\n'
    (tmp_path / "metrics.jsonl").write_text(row % (10, 640) + row % (20, 1280))
    (tmp_path / "page.html").write_text(run_page(tmp_path), encoding="utf-8")
    (run,) = data_of(tmp_path / "page.html")["runs"]
    assert [run[name] for name in ("step", "tokens", "flops", "seconds")] == [20, 1280, 9e9, 4.5]
    assert run["curves"]["loss"][-1][0] == 20


NOT_FINITE = (None, math.nan, math.inf, 1e31, "NaN")


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_figure_that_is_not_finite_is_a_gap_and_one_that_was_not_measured_is_no_point(value, tmp_path):
    rows = [{"step": n, "tokens": 10 * n, "seconds": n, "loss": value if n in (3, 4) else 1.0} for n in range(1, 7)]
    rows.append({"step": 6, "tokens": 60, "seconds": 6, "val_loss": value, "val_bpb": value})
    curves = describe_run("run", rows, {}, {}, alone=True)["curves"]
    assert [(step, loss) for step, _, _, loss in curves["loss"]] == [
        (1, 1.0),
        (2, 1.0),
        (3, None),
        (4, None),
        (5, 1.0),
        (6, 1.0),
    ]
    assert curves["val_bpb"] == [(6, 60, 6, None)] and curves["lr"] == []
    # Of many points each is the mean of its finite neighbours, and a gap if there is none.
    points = [(step, step, step, None if 300 <= step < 400 or step % 3 == 0 else 2.0) for step in range(960)]
    thinned = thin(points, 6)
    assert len(thinned) == POINTS and {height for *_, height in thinned} == {2.0, None}
    assert [step for step, _, _, height in thinned if height is None] == [start + 2.5 for start in range(300, 396, 6)]


def test_seeds_that_end_at_different_steps_have_the_points_of_the_longest_so_that_their_mean_is_drawn():
    """As those that patience ends: beyond 160 points they had no step in common, and no curve."""

    def steps(count: int, *, beside: tuple[int, ...] = ()) -> list[float]:
        rows = {size: [dict(step=i, tokens=i, seconds=i, loss=1.0) for i in range(1, size + 1)] for size in (400, 200)}
        longest = longest_curves([rows[size] for size in beside]) if beside else None
        found = describe_run("run", rows[count], {}, {}, longest=longest)
        return [step for step, *_ in found["curves"]["loss"]]

    assert steps(400, beside=(400, 200)) == steps(400) and steps(400)[:3] == [2.0, 5.0, 8.0]
    assert steps(200, beside=(400, 200)) == [*steps(400)[:66], 199.5] and not set(steps(200)) & set(steps(400))


@pytest.mark.slow
@needs_browser
def test_a_curve_of_seeds_that_seconds_end_has_the_mean_of_their_ends(tmp_path):
    """Their only evaluations were at steps of their own, and the page said that nothing had been measured."""
    ends = [(8, 800, 2.5, 1.25), (12, 1200, 3.5, 1.75), (10, 1000, 3.0, 1.2)]  # step, tokens, seconds, bits per byte
    for seed, (step, tokens, seconds, bpb) in enumerate(ends):
        job = put_run(tmp_path, seed, bpb, f"seed={seed}", step=step, tokens=tokens, flops=1e6 * tokens)
        rows = [{"step": n, "tokens": 100 * n, "seconds": n / 4, "loss": 20.0 - n} for n in range(1, step + 1)]
        rows.append({"step": step, "tokens": tokens, "seconds": seconds, "val_loss": 2.0, "val_bpb": bpb})
        (job / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_leaderboard(tmp_path)
    script = 'return {ends: $("ends").hidden, tables: ["val_bpb", "front", "loss"].map(name => saved.CSV(name))};'
    found = browse(tmp_path / "report.html", script)
    curve, front, loss = (list(csv.DictReader(io.StringIO(table))) for table in found["tables"])
    assert not found["ends"]
    (point,) = curve
    assert (point["steps"], point["tokens"], point["seconds"], point["lowest"], point["highest"]) == (
        "10",
        "1000",
        "3",
        "1.2",
        "1.75",
    )
    assert float(point["validation bits per byte"]) == pytest.approx(statistics.fmean(bpb for *_, bpb in ends))
    assert {float(row["training FLOPs"]) for row in front} == {1e9}
    assert [row["steps"] for row in loss] == [*map(str, range(1, 9)), "10"]


@needs_browser
def test_lines_smoothing_means_and_tables_have_a_gap_where_a_loss_was_not_finite(train_config, tmp_path):
    train(replace(train_config, max_steps=40, eval_interval=10))
    run = Path(train_config.run_dir)
    rows = read_metrics(run / "metrics.jsonl")
    gap = range(15, 28)  # a third of the steps
    for row in rows:
        for name in ("loss", "grad_norm", "val_loss", "val_bpb"):
            if name in row and row["step"] in gap:
                row[name] = None
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "page.html"
    page.write_text(run_page(run))
    script = """
      const {places, svg} = figures.loss.of(600);
      const pieces = path => path.getAttribute("d").split("M").length - 1;
      return {lines: [...svg.querySelectorAll("path[fill=none]")].map(pieces),
        smooth: smoothed(curve(rows[0], "loss"), names.loss).map(point => point[names.loss]),
        table: saved.CSV("loss"), read: places.map(place => place.text), norm: saved.CSV("grad_norm")};
    """
    found = browse(page, script)
    assert found["lines"][-4:] == [2, 2, 2, 1]  # training, smoothed, validation, and the ring around the lowest
    losses = [row["loss"] for row in rows if "loss" in row]
    reach = math.ceil(math.sqrt(len(losses)) / 2)
    for i, smooth in enumerate(found["smooth"]):  # the mean of the neighbours, of which fewer are before the first
        near = [loss for loss in losses[max(0, i - reach) : i + min(i, reach) + 1] if loss is not None]
        assert smooth == (None if losses[i] is None else pytest.approx(statistics.fmean(near), rel=1e-4))
    table = list(csv.DictReader(io.StringIO(found["table"])))
    loss = next(name for name in table[0] if name.startswith("loss"))
    training = {int(row["steps"]): row[loss] for row in table if row["line"] == "training"}
    assert training.keys() == set(range(1, 41)) and {step for step in training if not training[step]} == set(gap)
    validation = {row["steps"]: row[loss] for row in table if row["line"] == "validation"}
    assert (
        validation.keys() == {"10", "20", "30", "40"}
        and not validation["20"]
        and all(validation[s] for s in ("10", "30"))
    )
    assert not any("NaN" in text or "null" in text for text in found["read"]) and "NaN" not in found["norm"]

    # Two seeds, of which one has the gap: their mean has it too.
    for number in range(2):
        job = put_run(tmp_path / "seeds", number, 1.0, f"seed={number}")
        points = [
            {"step": n, "tokens": n, "seconds": n, "loss": None if number and n in (4, 5) else 2.0} for n in range(9)
        ]
        (job / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    write_leaderboard(tmp_path / "seeds")
    script = """const {svg} = figures.loss.of(600), pieces = path => path.getAttribute("d").split("M").length - 1;
      return [svg.querySelectorAll("[fill-opacity='0.18']").length,
        ...[...svg.querySelectorAll("path[fill=none]")].map(pieces), saved.CSV("loss")];"""
    *pieces, table = browse(tmp_path / "seeds/report.html", script)
    assert pieces == [2, 2]  # bands, and the parts of the line
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [row["steps"] for row in rows if not row["loss (nats per token)"]] == ["4", "5"] and len(rows) == 9


HEBREW, ARABIC = "שלום עולם (עם סוגריים), English באמצע.", "مرحبا بالعالم (مع أقواس)، English في الوسط."
LONG = "x" * 300


@pytest.fixture
def foreign_pages(train_config, tmp_path) -> dict[str, Path]:
    """The pages of a run, a sweep and a model whose names are long, and whose text is Hebrew and Arabic."""
    text = tmp_path / ("p" * 150) / ("q" * 150)
    text.parent.mkdir()
    text.write_text(f"{HEBREW}\n{ARABIC}\n" * 200, encoding="utf-8")
    run = tmp_path / ("r" * 150) / ("s" * 150)
    data = replace(train_config.data, path=str(text))
    config = replace(train_config, data=data, run_dir=str(run), sample_prompt=HEBREW, sample_tokens=60, max_steps=4)
    train(config)
    record, samples = run / "report.jsonl", (HEBREW, f"{ARABIC}\n{LONG}")
    notes = [json.loads(line) for line in record.read_text().splitlines()]
    notes[0]["command"] = f"python train.py code={LONG}"
    for note, sample in zip(notes[1:], samples, strict=False):
        note["sample"] = sample
    record.write_text("".join(json.dumps(note) + "\n" for note in notes))
    (page := tmp_path / "page.html").write_text(run_page(run), encoding="utf-8")
    sweep = tmp_path / "sweep"
    for number, value in enumerate((LONG, HEBREW * 8, ARABIC * 8, "short")):
        for seed in (1, 2):
            job = put_run(sweep, 2 * number + seed, 1 + number / 8, f"sample_prompt={value}", f"seed={seed}")
            (job / "report.html").touch()
    put_run(sweep, 20, 2.0, "sample_prompt=named", "seed=1", name="n" * 250)
    put_run(sweep, 21, None, f"sample_prompt={LONG}", "seed=3", status="failed", reason=f"it failed: {LONG} {HEBREW}")
    write_leaderboard(sweep)
    write_export(ExportConfig(checkpoint=str(run), to=str(tmp_path / "demo.html")))
    return {"run": page, "sweep": sweep / "report.html", "demo": tmp_path / "demo.html"}


BEYOND = """
  document.querySelectorAll("details").forEach(part => (part.open = true));
  await new Promise(requestAnimationFrame);
  const width = document.documentElement.clientWidth;
  const scrolls = part => ["auto", "scroll", "hidden"].includes(getComputedStyle(part).overflowX);
  const inside = part => part && part !== document.body && (scrolls(part) || inside(part.parentElement));
  const far = part => part.getBoundingClientRect().right > width + 1 || part.getBoundingClientRect().left < -1;
  const beyond = [...document.querySelectorAll("body *")].filter(part => far(part) && !inside(part.parentElement));
  return [document.documentElement.scrollWidth - width, ...beyond.map(part => part.outerHTML.slice(0, 200))];
"""


# The names of facts that stand in several lines though they are one word.
BROKEN = """(() => {
  const range = new Range(), lines = cell => (range.selectNodeContents(cell), range.getClientRects().length);
  const names = [...document.querySelectorAll("#facts th, #of-head th")];
  return names.filter(cell => !cell.textContent.includes(" ") && lines(cell) > 1).map(cell => cell.textContent);
})()"""


@needs_browser
@pytest.mark.parametrize("width", some([390, 500, 1200], 3))
def test_no_page_is_wider_than_its_window_whatever_the_names(width, foreign_pages):
    for name, page in foreign_pages.items():
        with Browser(page, width=width) as browser:
            browser.ask(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
            )
            assert browser.run(f"(async () => {{ {BEYOND} }})()") == [0], name
            assert browser.run(BROKEN) == [], name


@pytest.mark.slow
@needs_browser
def test_a_persons_text_stands_in_the_direction_of_its_first_letter(foreign_pages):
    script = """const side = part => getComputedStyle(part).direction;
      return {samples: [...document.querySelectorAll("#samples p")].map(side), prompt: [...$("settings").rows]
        .filter(row => row.cells[0].textContent === "sample_prompt").map(row => side(row.cells[1])),
        lines: [...document.querySelectorAll("#samples p")].map(part => getComputedStyle(part).unicodeBidi),
        heading: side(document.querySelector("h1")), path: side($("facts").rows[0].cells[1])};"""
    found = browse(foreign_pages["run"], script)
    assert found["samples"][:1] == ["rtl"] and found["prompt"] == ["rtl"] and {*found["lines"]} == {"plaintext"}
    assert (found["heading"], found["path"]) == ("ltr", "ltr")
    script = """return [...$("table").tBodies[0].rows].map(row => [...row.cells].some(cell =>
        /[\u0590-\u06ff]/.test(cell.textContent) && getComputedStyle(cell).direction !== "rtl"));"""
    assert not any(browse(foreign_pages["sweep"], script))
    script = """$("source").value = "שלום"; $("source").oninput(); await new Promise(done => setTimeout(done, 300));
      const side = part => getComputedStyle(part).direction, text = document.querySelector("svg text");
      return [side($("source")), getComputedStyle($("text")).unicodeBidi, getComputedStyle(text).unicodeBidi,
        [...document.querySelectorAll("#likely button")].every(button => button.dir === "auto"), $("text").dir];"""
    assert browse(foreign_pages["demo"], script) == ["rtl", "plaintext", "plaintext", True, "auto"]


@pytest.mark.slow
def test_a_resumed_run_has_the_page_of_one_that_was_not_stopped(train_config, tmp_path, monkeypatch):
    train_config = replace(train_config, max_steps=8, eval_interval=4, checkpoint_interval=4)
    train(train_config)
    stopped = replace(train_config, run_dir=str(tmp_path / "stopped"))
    with monkeypatch.context() as patched:
        patched.setattr(Report, "on_step", lambda self: self.run.progress.step == 6 and raise_signal(SIGINT))
        with pytest.raises(SystemExit):
            train(stopped)
    assert data_of(page_of(stopped))["runs"][0]["status"] == "stopped"
    with (tmp_path / "stopped" / "report.jsonl").open("a") as file:
        file.write('{"step": 7, "sample": "of a part that a kill undid"}\n{"st')
    train(replace(stopped, resume=stopped.run_dir))
    whole, parts = data_of(page_of(train_config))["alone"], data_of(page_of(stopped))["alone"]
    for at in (*whole["heads"], *parts["heads"]):
        del at["seconds"]
    assert (whole["samples"], whole["heads"]) == (parts["samples"], parts["heads"])
    assert [note["step"] for note in parts["begun"]] == [0, 6]


@pytest.mark.slow
def test_the_page_is_drawn_every_ten_seconds_and_for_a_hundredth_of_the_time(train_config, monkeypatch):
    now, drawn = [0.0], []

    def draw(directory):  # takes less, then more than a tenth of a second
        drawn.append(max((row["step"] for row in read_metrics(directory / "metrics.jsonl")), default=0))
        now[0] += 0.05 if len(drawn) < 3 else 0.2
        return ""

    def step(self):  # takes three
        now[0] += 3
        told(self)

    told = Report.on_step
    monkeypatch.setattr(time, "perf_counter", lambda: now.append(now.pop() + 1e-9) or now[0])
    monkeypatch.setattr(report, "run_page", draw)
    monkeypatch.setattr(Report, "on_step", step)
    train(train_config)
    assert drawn == [4, 8, 12, 19, 20]


@pytest.mark.slow
def test_a_folder_of_the_shortest_run_has_a_page_and_one_without_runs_is_refused(
    train_config, tmp_path, monkeypatch, capsys
):
    (tmp_path / "runs").mkdir()
    train(replace(train_config, max_steps=1, sample_tokens=0, run_dir=str(tmp_path / "runs/short")))
    monkeypatch.setattr(sys, "argv", ["sweeps", str(tmp_path / "runs")])
    runpy.run_module("sweeps", run_name="__main__")
    assert data_of(tmp_path / "runs/report.html")["runs"][0]["status"] == "finished"
    capsys.readouterr()
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("empty", "file", "no"):
        monkeypatch.setattr(sys, "argv", ["sweeps", str(tmp_path / name)])
        with pytest.raises(SystemExit, match="1"):
            runpy.run_module("sweeps", run_name="__main__")
        said = rf"error: \S*{name} holds no folder of a run \(.*\): give one that does"
        assert re.search(said, capsys.readouterr().err), name


@needs_browser
def test_a_run_is_read_by_keyboard_whatever_it_wrote(train_config):
    train_config.sample_prompt = "</script><b>"
    train(train_config)
    script = """
      $("when").value = 0; $("when").oninput();
      const [heads, large, grown, loss] = ["heads", "large", "grown", "loss"].map(id => $(id).querySelector(".plot"));
      press(heads, "ArrowDown"); press(heads, "ArrowDown"); press(heads, "Enter");
      for (let i = 0; i < 2; i++) press(large, "ArrowDown");
      press(grown, "ArrowRight"); press(loss, "End");
      const said = place => place.nextSibling.textContent;
      return {step: $("step").textContent, chosen: figures.large.heading.textContent, weight: said(large),
        map: said(heads), grown: said(grown), curve: said(loss),
        samples: $("samples").children.length, facts: $("of-head").rows.length,
        bold: [...document.querySelectorAll("b")].filter(b => !b.textContent).length, status: $("about").textContent};
    """
    found = browse(page_of(train_config), PRESS + script)
    assert found["step"].startswith("step 10, ") and found["step"].endswith("(1 of 2)")
    assert found["chosen"] == "Layer 2, head 1, step 10" and found["weight"].endswith("%")
    assert found["map"] == "layer 2, head 1"  # counted from 1, as on the page in which a model writes
    assert (
        found["grown"].startswith("layer ")
        and "at 10 steps" in found["grown"]
        and found["curve"].startswith("training: ")
        and "tokens" in found["curve"]
    )
    assert (found["samples"], found["facts"], found["bold"]) == (2, 8, 0) and found["status"].endswith(": finished")


def test_a_page_has_the_leaderboards_rows_with_means_and_deviations_over_seeds(sweep):
    data = data_of(sweep)
    reached = {run["name"]: run["val_bpb"] for run in data["runs"]}
    assert [row["runs"] for row in data["rows"]] == [["0", "4"], ["1", "5"], ["2", "6"], ["3", "7"], ["9"]]
    for row in data["rows"][:4]:
        bpb = [reached[name] for name in row["runs"]]
        assert (row["val_bpb"], row["deviation"]) == (statistics.fmean(bpb), statistics.stdev(bpb))
    assert data["rows"][4]["deviation"] is None and data["best"] == 0


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_a_page_writes_counts_and_durations_as_the_leaderboard_does():
    draw = random.Random(0)
    figures = [999_960.0, 999.7, 89.99, 5399.0, 5401.0, 129_599.0, 129_601.0, 5e7, 7388.5, 7389.5]
    figures += [draw.uniform(1, 10) * 10.0 ** draw.randint(0, 12) for _ in range(500)]
    duration = re.search(r"function duration.*?\n}", (PAGES / "runs.html").read_text(encoding="utf-8"), re.DOTALL)
    grouped = re.search(r"const grouped = .*", (PAGES / "kit.js").read_text(encoding="utf-8"))
    script = f"{(PAGES / 'chart.js').read_text(encoding='utf-8')}\n{duration[0]}\n{grouped[0]}\n"
    script += f"console.log(JSON.stringify({figures}.map(x => [short(x), duration(x), grouped(x)])));"
    found = json.loads(subprocess.run(["node", "-e", script], capture_output=True, check=True, text=True).stdout)
    assert found == [[FORMATS[name](x) for name in ("short", "duration", "grouped")] for x in figures]


def test_the_best_row_of_a_page_may_be_under_way_but_not_failed(tmp_path):
    put_run(tmp_path, 0, 2.0, "attention=sdpa")
    put_run(tmp_path, 1, 1.5, "attention=mla", status="running")
    put_run(tmp_path, 2, 1.0, "attention=delta", status="failed")
    write_leaderboard(tmp_path)
    data = data_of(tmp_path / "report.html")
    assert [row["runs"] for row in data["rows"]] == [["0"], ["1"]] and data["best"] == 1


@needs_browser
def test_a_sweep_shows_seeds_as_their_mean_the_best_first_and_failures_apart(sweep):
    script = """
      const plot = $("val_bpb").querySelector(".plot"), rows = () => [...$("table").tBodies[0].rows];
      press(plot, "Home");
      const found = {key: $("key").textContent, failed: $("failed").textContent,
        ranked: rows().map(row => row.cells[1].textContent),
        links: [...document.querySelectorAll("#table a")].map(link => link.getAttribute("href")),
        maps: saved.CSV("attention-optimizer.lr"), points: saved.CSV("val_bpb"), read: plot.nextSibling.textContent,
        columns: [...$("table").tHead.rows[0].cells].map(cell => cell.textContent)};
      $("table").tHead.querySelectorAll("button")[3].click();
      found.sorted = rows().map(row => row.cells[3].textContent);
      $("filter").value = "lr=0.01 mla"; $("filter").oninput();
      found.left = rows().map(row => row.cells[1].textContent);
      return {...found, few: saved.CSV("val_bpb").split("\\n").length};
    """
    found = browse(sweep, PRESS + script)
    assert found["ranked"] == ["1.2500", "1.3750", "1.5000", "1.6250", "9.0000"]  # means of two, and what is under way
    assert found["key"].startswith("1.2500") and "attention=sdpa  optimizer.lr=0.1, 2 seeds" in found["key"]
    assert found["failed"].endswith("8 attention=delta  optimizer.lr=0.5  seed=0a reason")
    assert found["links"] == ["./0/report.html", "./6/report.html", "./3/report.html"]
    assert "from 1 to 1.5" in found["read"] and found["sorted"] == sorted(found["sorted"])
    assert {"± seeds", "decode tokens/s", "peak MB", "status"} <= set(found["columns"])
    maps = [line.split(",") for line in found["maps"].split("\n")[1:3]]
    assert maps == [["sdpa", "1.5", "1.25"], ["mla", "1.625", "1.375"]]
    assert found["few"] == 3 and found["left"] == ["1.6250"]


@needs_browser
def test_a_number_in_the_filter_is_a_whole_one(tmp_path):
    for number, (heads, rate) in enumerate(
        [("1", "0.01"), ("16", "0.01"), ("12", "1"), ("12", "1e-05"), ("16", "1.5")]
    ):
        put_run(tmp_path, number, 1.0 + number, f"model.n_head={heads}", f"optimizer.lr={rate}")
    write_leaderboard(tmp_path)
    left = {"n_head=1": [1], "model.n_head=16": [16, 16], "n_head=": [1, 12, 12, 16, 16], "lr=0.0": [], "16": [16, 16]}
    left |= {"lr=0.01 n_head=16": [16], "lr=1 finished": [12], "=1": [1, 12]}
    script = f"""
      return {json.dumps([*left])}.map(typed => {{
        $("filter").value = typed; $("filter").oninput();
        return [...$("table").tBodies[0].rows].map(row => Number(row.cells[2].textContent)).sort((a, b) => a - b);
      }});
    """
    assert dict(zip(left, browse(tmp_path / "report.html", script), strict=True)) == left


def test_a_page_has_all_digits_of_a_whole_number(tmp_path):
    for seed in (1764460799123456789, 2**53 + 1, 2**53, 7):
        (tmp_path / "config.yaml").write_text(f"seed: {seed}\n")
        (tmp_path / "page.html").write_text(run_page(tmp_path))
        shown = data_of(tmp_path / "page.html")["alone"]["wanted"]["seed"]
        assert f"{shown}" == f"{seed}" and isinstance(shown, int) == (float(seed) == seed)


@needs_browser
def test_a_heat_map_tells_what_its_cells_are_the_means_of(tmp_path):
    names = "attention", "model.n_layer", "optimizer.lr"
    for number, values in enumerate(itertools.product(("mla", "sdpa"), (1, 2), (0.01, 0.1))):
        if number != 1:  # mla, one layer, 0.1
            put_run(
                tmp_path,
                number,
                1 + number / 10,
                *(f"{name}={value}" for name, value in zip(names, values, strict=True)),
            )
    write_leaderboard(tmp_path)
    script = """
      const cells = [...document.querySelectorAll("#pairs text")].map(text => text.textContent);
      const said = $("cells").innerText, paints = [...document.querySelectorAll("#pairs [fill-opacity]")].map(rect =>
        Number(rect.getAttribute("fill-opacity")));
      return {cells: cells.filter(text => text.includes(".")), said, paints, thinned: !$("thinned").hidden};
    """
    found = browse(tmp_path / "report.html", script)
    told = "A cell has the validation bits per byte of its two settings: the stronger its colour, the better."
    assert found["said"].startswith(told) and "It is the mean of" in found["said"] and not found["thinned"]
    assert found["paints"][:4] == sorted(found["paints"][:4], reverse=True)
    assert found["cells"][:4] == ["1.000*", "1.250", "1.450", "1.650"]  # of runs 0; 2, 3; 4, 5; 6, 7


@needs_browser
def test_curves_tell_one_setting_by_colour_and_a_second_one_by_line_style(sweep):
    script = """
      const look = () => rows.map(row => [value(row, "attention"), row.colour, value(row, "optimizer.lr"), row.style]);
      const two = look(), drawn = saved.SVG("val_bpb");
      $("style").value = $("colour").value; $("style").oninput();
      return {two, drawn, one: look()};
    """
    found = browse(sweep, script)
    assert {(form, style) for form, _, _, style in found["one"]} == {("sdpa", 0), ("mla", 0), ("delta", 0)}
    for setting, look in ((0, 1), (2, 3)):
        pairs = {(row[setting], row[look]) for row in found["two"]}
        assert len(pairs) == len({row[setting] for row in found["two"]}) == len({row[look] for row in found["two"]}) > 1
    assert "attention=sdpa" in found["drawn"] and "optimizer.lr=0.01" in found["drawn"]
    assert len(set(re.findall('stroke-dasharray="(.*?)"', found["drawn"]))) == 2


# Linear sRGB to the cones, L, M and S, and what they answer in protanopia and deuteranopia (Viénot et al. 1999).
TO_CONES = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
SIGHTS = {
    "all cones": np.eye(3),
    "no L": np.array([[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]]),
    "no M": np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]]),
}
TO_XYZ = np.array([[0.41246, 0.35758, 0.18044], [0.21267, 0.71515, 0.07217], [0.01933, 0.11919, 0.9503]])


def seen(colour: str, sight: str) -> np.ndarray:
    """A colour as such an eye sees it, in CIELAB."""
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.linalg.solve(TO_CONES, SIGHTS[sight] @ TO_CONES @ linear), 0, 1)
    x, y, z = np.cbrt(TO_XYZ @ linear / [0.95047, 1, 1.08883])  # of colours that are not nearly black
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("family", "least"), [("hue", 17), ("step", 9)])
def test_colours_of_curves_differ_for_every_eye(family, least, theme, sight):
    """Blue and violet were 4 apart where green is not seen, as two blues are, and no pair less than 23 for others."""
    pairs = re.findall(rf"--{family}\d: light-dark\((#\w+), (#\w+)\)", (PAGES / "kit.css").read_text())
    colours = [seen(pair[theme == "dark"], sight) for pair in pairs]
    assert len(colours) == 8
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(colours, 2)) > least


@needs_browser
def test_a_table_shows_its_first_columns_whole_and_keeps_the_runs_in_sight(tmp_path):
    form = "sdpa+gate+forget+value_residual+key_offset/delta/mla+diff+window"
    for number in range(24):
        put_run(tmp_path, number, 1.0 + number % 2, f"attention={form}{'+sink' * (number % 2)}", f"seed={number // 2}")
    write_leaderboard(tmp_path)
    script = """
      const cells = () => [...$("table").tBodies[0].rows[0].cells], scroll = $("scroll").getBoundingClientRect();
      const hidden = cell => cell.scrollWidth - cell.clientWidth, right = cell => cell.getBoundingClientRect().right;
      const first = cells().slice(0, 4).map(cell => [hidden(cell), right(cell)]);
      $("scroll").scrollLeft = 1e6;
      return {first, right: scroll.right, left: cells()[0].getBoundingClientRect().left - scroll.left,
        wide: document.documentElement.scrollWidth <= innerWidth};
    """
    for width in (1280, 600):
        found = browse(tmp_path / "report.html", script, width=width)
        assert all(hidden <= 0 for hidden, _ in found["first"]) and found["left"] == 0 and found["wide"]
        assert all(right <= found["right"] for _, right in found["first"]) or width < 1280


@needs_browser
def test_a_smoothed_loss_is_the_mean_of_neighbours_and_keeps_its_first_point(train_config):
    train(train_config)
    script = "const values = n => Array.from({length: n}, (_, i) => ({steps: i, y: i * i}));"
    found = browse(page_of(train_config), script + "return [1, 9].map(n => smoothed(values(n), 'y').map(at => at.y));")
    assert found == [[0], pytest.approx([0, 5 / 3, 6, 11, 18, 27, 38, 43.5, 149 / 3])]


@needs_browser
def test_every_figure_saves_itself_as_a_drawing_that_stands_alone_and_as_its_figures(train_config, sweep):
    train(train_config)
    save = """const all = kind => Object.keys(figures).map(id => [id, saved[kind](id)]);
      const titles = [...document.querySelectorAll("figcaption b")].map(title => title.textContent);
      return {SVG: all("SVG"), CSV: all("CSV"), titles};"""
    for page, ids in ((page_of(train_config), {"loss", "heads", "large", "grown"}), (sweep, {"val_bpb", "front"})):
        found = browse(page, save, dark=True)
        assert ids <= {name for name, _ in found["SVG"]} == {name for name, _ in found["CSV"]}
        for _, text in found["SVG"]:
            drawing = ET.fromstring(text)
            colours = {value for one in drawing.iter() for name, value in one.items() if name in ("fill", "stroke")}
            assert drawing.tag.endswith("svg") and "font-family" in drawing.attrib and "var(" not in text
            assert all(re.fullmatch("none|#[0-9a-f]{6}", colour) for colour in colours) and "#ffffff" in colours
        firsts = [ET.fromstring(text).findtext(".//{*}text") for _, text in found["SVG"]]
        assert firsts == found["titles"]
        tables = {name: list(csv.reader(io.StringIO(text))) for name, text in found["CSV"]}
        assert all(len({len(row) for row in table}) == 1 < len(table) for table in tables.values())
        if "large" in ids:
            run = data_of(page)["runs"][0]
            step = f"step {train_config.max_steps}"
            assert {f"All heads, {step}", f"Layer 1, head 1, {step}"} <= {*firsts}
            losses = [[float(row[1]), float(row[4])] for row in tables["loss"] if row[0] == "training"]
            assert losses == [[step, loss] for step, _, _, loss in run["curves"]["loss"]]
            size, head = data_of(page)["alone"]["heads"][0]["size"], tables["heads"][1:]
            assert len(head) == 4 * size**2 and sum(float(row[4]) for row in head) == pytest.approx(4 * size, rel=0.05)


@needs_browser
def test_every_axis_has_two_labels_at_least_and_each_says_where_it_stands(sweep):
    draw = random.Random(0)
    ends = [[x, x * 10 ** draw.choice([0, 1e-6, 0.01, 0.3, 2, 12])] for x in (10.0**n for n in range(-6, 15))]
    ends += [[371.51e9, 371.75e9], [0.17341, 0.17352], [100050, 100450], [2.2551, 2.2649]]
    script = f"""return {ends}.flatMap(ends => [1, 3, 8].flatMap(most => [false, true].map(logarithmic => {{
      const {{to, labels}} = scale(ends, logarithmic, 0, 300, most);
      const read = text => parseFloat(text) * 10 ** (3 * Math.max(0, " kMGT".indexOf(text.at(-1))));
      return [ends[1], labels.map(([at, text]) => [at, text, to(read(text))])];
    }})));"""
    found = browse(sweep, script)
    assert len(found) == 6 * len(ends)
    for end, labels in found:
        assert len({text for _, text, _ in labels}) >= 2 and all(0 <= at <= 300 for at, _, _ in labels)
        assert end >= 1e15 or all(abs(at - stands) < 3 and len(text) < 17 for at, text, stands in labels), labels


@needs_browser
def test_a_link_leads_to_its_folder_whatever_that_is_called(tmp_path):
    names = ["javascript:alert(1)", "a#b?c", "100%", "<b>ünï", " x\"'"]
    for number, name in enumerate(names):
        job = put_run(tmp_path, number, 1.0 + number, f"seed={number}", "note=<img src=x>", name=name)
        (job / "report.html").touch()
    write_leaderboard(tmp_path)
    links_of = 'return [...document.querySelectorAll("#table a")].map(link => link.href);'
    links = browse(tmp_path / "report.html", links_of)
    assert {unquote(link) for link in links} == {f"{tmp_path.as_uri()}/{name}/report.html" for name in names}
    assert all(Path(unquote(link.removeprefix("file://"))).is_file() for link in links)


@pytest.fixture
def every_page(train_config, sweep) -> list[Path]:
    train(train_config)
    return [page_of(train_config), sweep]


@needs_browser
@needs_axe
@pytest.mark.parametrize("looks", [{}, {"dark": True}, {"width": 400}], ids=str)
def test_axe_finds_nothing_wrong_on_any_page(every_page, looks):
    assert [violations(page, **looks) for page in every_page] == [[], []]


@pytest.mark.slow
@needs_browser
def test_on_paper_every_page_is_light_whatever_the_theme(every_page):
    for page in every_page:
        light, dark = drawn_on_paper(page), drawn_on_paper(page, dark=True)
        assert len(light) > 1 and light == dark


@pytest.mark.slow
@needs_browser
def test_nothing_is_lost_on_any_paper(every_page):
    """Chromium counts the sheets before charts that are drawn again have their heights."""
    for page in every_page:
        sizes = ((8.5, 11), (8.27, 11.69))  # inches of Letter and A4
        drawn = [drawn_on_paper(page, dict(paperWidth=x, paperHeight=y), width=1000) for x, y in sizes]
        letter, a4 = (sum(stream.count(b"Tj") for stream in found) for found in drawn)
        assert letter > 100 and a4 == pytest.approx(letter, rel=0.02)


FORBIDDEN = """<script>Object.defineProperty(window, "sessionStorage", {get() {
  throw new DOMException("The document is sandboxed", "SecurityError");
}});</script>"""


@pytest.mark.slow
@needs_browser
def test_a_page_is_drawn_where_a_sandbox_forbids_storage(train_config, sweep):
    train(train_config)
    count = "return document.querySelectorAll('svg *, tr').length;"
    for page in (page_of(train_config), sweep):
        text = page.read_text(encoding="utf-8")
        whole = browse(page, count)
        page.write_text(
            text.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{FORBIDDEN}', 1), encoding="utf-8"
        )
        assert browse(page, count) == whole > 50


@pytest.mark.slow
@needs_browser
def test_a_page_whose_scripts_are_off_says_so_and_shows_no_empty_controls(train_config, sweep):
    """As in JupyterLab, which runs the scripts of a page once it is trusted."""
    train(train_config)
    write_export(ExportConfig(checkpoint=train_config.run_dir, to=str(sweep.with_name("demo.html"))))
    shown = "document.querySelector('main').innerText"
    useless = "[...document.querySelectorAll('select, input, textarea')].filter(one => one.checkVisibility()).length"
    for page in (page_of(train_config), sweep, sweep.with_name("demo.html")):
        with Browser(page) as browser:
            assert "Trust HTML" not in browser.run(shown) and browser.run(useless) > 3
            browser.ask("Emulation.setScriptExecutionDisabled", value=True)
            browser.reload()
            assert "In JupyterLab click Trust HTML" in browser.run(shown) and browser.run(useless) == 0


@needs_browser
def test_a_sweep_of_seeds_alone_has_no_choice_of_a_colour(tmp_path):
    for number in (1, 2):
        put_run(tmp_path, number, 2.0, f"seed={number}", seed=number)
    write_leaderboard(tmp_path)
    with Browser(tmp_path / "report.html") as browser:
        empty = "[...document.querySelectorAll('select')].filter(one => !one.options.length && one.checkVisibility())"
        assert browser.run(f"{empty}.length") == 0
        assert browser.run("$('cost').checkVisibility()")


@needs_browser
@pytest.mark.slow
def test_a_sweep_whose_jobs_have_all_failed_has_their_reasons_and_no_table(tmp_path):
    """Its script ended in "undefined is not iterable"."""
    for seed in (1, 2):
        put_run(tmp_path, seed, None, f"seed={seed}", status="failed", reason=f"reason {seed}")
    write_leaderboard(tmp_path)
    script = """$("logy").click();
      return {reasons: [...document.querySelectorAll("#failed p")].map(p => p.textContent),
        cells: document.querySelectorAll("#table th, #table td").length};"""
    assert browse(tmp_path / "report.html", script) == {"reasons": ["reason 1", "reason 2"], "cells": 0}


@needs_browser
def test_choices_that_a_reloaded_page_no_longer_has_leave_it_as_it_begins(sweep):
    count = "document.querySelectorAll('svg *, tr').length"
    with Browser(sweep) as browser:
        browser.run("$('colour').value = 'optimizer.lr'; $('logx').checked = true; update()")
        for number in (2, 3, 6, 7, 8):  # the other rates
            shutil.rmtree(sweep.parent / str(number))
        write_leaderboard(sweep.parent)
        browser.reload()
        assert browser.run("[$('colour').value, $('logx').checked]") == ["attention", True] and browser.run(count) > 50


def test_a_page_that_meets_a_full_disk_has_its_samples_when_there_is_room(train_config, caplog, monkeypatch):
    """One error ended the page: no later sample, no later curve."""
    with open_run(replace(train_config, sample_tokens=0)) as run:
        MetricsFile(run).on_row({"step": 1, "loss": 2.0}, "")
        SummaryFile(run, [])
        report = Report(run, [])
        refuse = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        for sample, is_full in (("first", False), ("second", True), ("third", True), ("fourth", False)):
            with monkeypatch.context() as patch:
                if is_full:
                    patch.setattr("pages.report.replace_text", refuse)
                    patch.setattr(report.file.file, "flush", refuse)
                report.note(sample=sample)
                report.draw()
        report.on_end(None)
        page = (run.directory / "report.html").read_text(encoding="utf-8")
        assert all(sample in page for sample in ("first", "second", "third", "fourth"))
        lines = (run.directory / "report.jsonl").read_text().splitlines()
        assert [json.loads(line).get("sample") for line in lines] == [None, "first", "second", "third", "fourth"]
    told = [message.rpartition("/")[2] for message in caplog.messages if "No space" in message]
    assert told == [
        "report.jsonl cannot be written (No space left on device): rows may be lost until it can.",
        "report.html cannot be written (No space left on device): it is drawn anew when it can.",
    ]

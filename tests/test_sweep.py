"""A sweep's leaderboard is right; a sweep survives failures and kills, and resumes exactly."""

from __future__ import annotations

import csv
import gc
import io
import itertools
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import weakref
from contextlib import ExitStack, chdir, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from browser import data_of
from conftest import first_of, some
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from sweeping import (
    ROOT,
    cells,
    command,
    in_memory,
    put_job,
    put_summary,
    refusal,
    run_here,
    swept,
    tiny,
    wait_for,
)

from cli.composition import PAIRS, check_job, composing, register_schema
from cli.overrides import CONF
from common.errors import SettingsError
from common.files import is_locked
from common.text import quote
from docs.compare import Comparison
from docs.recorded import recorded_jobs
from hydra_plugins._tinygpt import AfterJob
from model.config import GPTConfig
from runs.directory import lock_run, written_settings
from runs.metrics import read_metrics
from runs.resume import refuse_used
from runs.summary import JobRecord, Summary, begin_job, fail_job, jobs_of_sweep, read_job, read_summary
from sweeps.compositions import Compositions, brings
from sweeps.grid import Grid
from sweeps.leaderboard import (
    ACTIVE,
    comma_separated,
    markdown,
    rank,
    read_jobs,
    swept_settings,
    write_leaderboard,
)
from sweeps.ranges import combinations, for_hydra
from sweeps.sweep import check_launcher, fix_folder, kept_folder
from training.config import OptimizerConfig, PlanConfig, TrainConfig

CLOCK = ("seconds", "tokens_per_s", "decode_tokens_per_s", "peak_memory_mb")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_leaderboard_is_ranked_by_bits_per_byte_and_shows_what_was_swept(tmp_path, device):
    measured = dict(parameters=1_234_567.0, seconds=75.0, tokens_per_s=500.4, peak_memory_mb=99.6, device=device)
    for number, (heads, bpb) in enumerate([(1, 1.5), (2, 1.25), (4, 1.75)]):
        put_job(tmp_path, number, f"model.n_head={heads}", "max_steps=60", val_bpb=bpb, **measured)
    head, *found = cells(markdown(read_jobs(tmp_path)))
    named = dict(zip(head, found[0], strict=True))
    assert ("peak MB" in named) == (device == "cuda") and named.pop("peak MB", "100") == "100"
    assert list(named) == ["model.n_head", "parameters", "tokens", "tokens/s", "time", "val bpb"]
    assert list(named.values()) == ["2", "1.23M", "1k", "500", "75.0 s", "1.2500"]
    assert [row[0] for row in found] == ["2", "1", "4"]
    put_job(tmp_path, 3, "model.n_head=8", val_accuracy=0.25, val_bpb=None)  # a task's accuracy: the more the better
    put_job(tmp_path, 4, "model.n_head=16", val_accuracy=0.5, val_bpb=None)
    assert [row[0] for row in cells(markdown(read_jobs(tmp_path)))[1:3]] == ["16", "8"]


def test_group_choices_and_settings_that_only_some_jobs_have_are_columns_and_large_round_numbers_short(tmp_path):
    put_job(tmp_path, 9, "attention=sdpa", "+experiment=shakespeare", "max_flops=10000000000.0")
    put_job(tmp_path, 10, "attention=matmul", "max_flops=123456789.0")
    jobs = read_jobs(tmp_path)
    assert swept_settings(jobs) == ["attention", "experiment", "max_flops"]
    assert [job.name for job in jobs] == ["9", "10"] and jobs[0].settings["max_flops"] == "1e+10"
    assert ["matmul", "–", "123456789.0"] in [row[:3] for row in cells(markdown(jobs))]


def test_a_table_over_several_texts_says_that_its_rows_do_not_compare(tmp_path):
    for name in ("data", "data.path", "data.val_fraction", "tokenizer"):
        for number in (0, 1):
            put_job(tmp_path / name, number, f"{name}={number}", "data.split=train")
        note = f"|\n\nThe rows were scored on different texts ({name}): compare only those of the same.\n"
        assert markdown(read_jobs(tmp_path / name)).endswith("|\n" if name == "tokenizer" else note)


@pytest.mark.parametrize(("hashes", "told"), [("aa", False), ("ab", True), ((None, None), True)])
def test_rows_of_copies_of_a_text_compare(tmp_path, hashes, told):
    for number, text_hash in enumerate(hashes):
        put_job(tmp_path, number, f"data.path={number}.txt", text_hash=text_hash)
    assert ("scored on different texts" in markdown(read_jobs(tmp_path))) == told


def test_rows_that_learned_other_texts_and_are_scored_on_one_compare(tmp_path):
    def told(folder: str, *jobs: dict[str, str]) -> list[str]:
        for number, typed in enumerate(jobs):
            job = put_job(tmp_path / folder, number, *(f"{name}={value}" for name, value in typed.items()))
            settings = OmegaConf.create()
            for name, value in typed.items():
                OmegaConf.update(settings, name, value)
            OmegaConf.save(settings, job / "config.yaml")
        return re.findall(r"scored on different texts \((.*)\)", markdown(read_jobs(tmp_path / folder)))

    parts = [{"data.source": "files", "data.path": path} for path in ("a.txt", "b.txt")]
    assert told("alone", *parts) == ["data.path"]
    assert told("held", *(part | {"data.val_path": "held.txt"} for part in parts)) == []
    held_out = {"data.val_path": "held.txt", "data.val_fraction": 0.1}  # of the text that is learned too
    assert told("both", *(part | held_out for part in parts)) == ["data.path"]
    assert told("two", *({"data.val_path": path} for path in ("a.txt", "b.txt"))) == ["data.val_path"]
    divided = [{"data.separator": sign, "data.val_path": "held.txt"} for sign in "ab"]
    assert told("divided", *divided) == ["data.separator"]
    assert told("masks", {"data.document_mask": False}, {"data.document_mask": True}) == []
    assert told("caches", {"data.cache_dir": "a"}, {"data.cache_dir": "b"}) == []


def test_seeds_share_a_row_with_their_mean_and_deviation_and_have_lines_of_their_own_in_the_csv(tmp_path):
    found = {"sdpa": [1.0, 1.1, 1.4], "matmul": [1.2, 1.2, 1.0]}
    for i, (name, bits) in enumerate(found.items()):
        for seed, bpb in enumerate(bits):
            put_job(tmp_path, 3 * i + seed, f"attention={name}", f"seed={seed}", val_bpb=bpb, seed=seed)
    put_job(tmp_path, 6, "attention=sdpa", "seed=9", status="failed", reason="out of memory", val_bpb=None)
    for seed in range(7):
        put_job(tmp_path.parent / "many", seed, f"seed={seed}")
    assert cells(markdown(read_jobs(tmp_path.parent / "many")))[1][0] == "7 of them"
    jobs = read_jobs(tmp_path)
    head, first, second, failed = cells(markdown(jobs))
    mean, deviation = statistics.mean(found["matmul"]), statistics.stdev(found["matmul"])
    assert first[:2] == ["matmul", "0, 1, 2"] and first[-1] == f"{mean:.4f} ± {deviation:.4f}" and second[0] == "sdpa"
    assert head[1] == "seed" and failed[:2] == ["sdpa", "9"] and failed[-1] == "failed: out of memory"
    table = list(csv.DictReader(io.StringIO(comma_separated(jobs))))
    assert [row["job"] for row in table] == [job.name for row in rank(jobs) for job in row] and len(table) == 7
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/leaderboard.csv").write_text(comma_separated(jobs))
    assert markdown(recorded_jobs(tmp_path / "kept")) == markdown(jobs)  # all that is kept of a sweep
    assert float(table[0]["val_bpb"]) == found["matmul"][int(table[0]["seed"])] and table[-1]["status"] == "failed"
    unequal = "Some rows are means over other seeds than the rest"
    put_job(tmp_path, 7, "attention=sdpa", "seed=7")
    assert unequal not in markdown(jobs) and unequal in markdown(read_jobs(tmp_path))


REPEATED = [
    # The overrides of two jobs, their seed apart: values by another spelling, by another name and by a reference; and
    # one by its default.
    (
        ["optimizer.lr=0.01", "attention=sdpa", "max_steps=2", "log_interval=${max_steps}"],
        ["optimizer.lr=1e-2", "model.attention=sdpa", "max_steps=2.0", "log_interval=2"],
    ),
    (["optimizer.lr=0.02"], []),
]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), some(REPEATED, 2), ids=("other spellings", "a default"))
def test_a_run_that_is_there_twice_counts_once_in_tables_pages_and_comparisons(one, other, tmp_path):
    """As in folders of earlier versions, which ran both."""
    shared = tiny(tmp_path, max_steps=2)
    for name, typed in (("one", one), ("other", other)):
        result = run_here("-m", "seed=1,2", *shared, *typed, f"hydra.sweep.dir=sweep/{name}", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    losses = [read_summary(tmp_path / f"sweep/one/{job}").val_bpb for job in "01"]
    for folder in ("sweep", "runs"):  # with the jobs' records, and as a folder of runs
        if folder == "runs":
            shutil.copytree(tmp_path / "sweep", tmp_path / "runs")
            for record in tmp_path.glob("runs/*/*/job.json"):
                record.unlink()
        text = write_leaderboard(tmp_path / folder)
        (row,) = cells(text)[1:]
        assert row[-1] == f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}", text
        assert "Left out, for the settings and the seed of another job: 2 jobs (other/0, other/1)." in text
        data = data_of(tmp_path / folder / "report.html")
        assert [line["runs"] for line in data["rows"]] == [["one/0", "one/1"]] and len(data["runs"]) == 2
        assert data["repeated"] == ["other/0", "other/1"]
        table = list(csv.DictReader((tmp_path / folder / "leaderboard.csv").open()))
        assert [job["seed"] for job in table] == ["1", "2"]
        kept = tmp_path / f"kept_{folder}"
        kept.mkdir()
        with (kept / "leaderboard.csv").open("w") as file:  # as of an earlier version, with all four
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows([*table, *(job | {"job": f"again/{job['job']}"} for job in table)])
        for place in (tmp_path / folder, kept):
            comparison = Comparison(place)
            (picks,) = comparison.picks.values()
            assert [pick.bpb for pick in picks.values()] == pytest.approx(losses) and picks.keys() == {"1", "2"}


def test_a_seed_whose_result_is_not_finite_is_no_part_of_a_mean(tmp_path):
    for seed, bpb in enumerate((1.0, None, 2.0)):
        put_job(tmp_path, seed, "attention=sdpa", f"seed={seed}", val_bpb=bpb)
    put_job(tmp_path, 3, "attention=mla", "seed=0", val_bpb=3.0)
    rows = [(row[1], row[-1]) for row in cells(markdown(read_jobs(tmp_path)))[1:]]
    assert rows == [("0, 2", "1.5000 ± 0.7071"), ("0", "3.0000"), ("1", "–")]
    put_job(tmp_path, 0, "attention=sdpa", "seed=0", val_bpb=1.0, val_tokens=512.0)
    assert "eval_tokens=" not in markdown(read_jobs(tmp_path))  # of text the others have nothing


def test_a_table_tells_of_weights_that_had_learned_what_is_held_out(tmp_path):
    put_job(tmp_path, 0, "init_from=null", val_bpb=2.0)
    assert "had learned" not in markdown(read_jobs(tmp_path))
    put_job(tmp_path, 1, "init_from=a", val_bpb=1.0, learned=0.42)
    assert "some runs had learned up to 42% of what is held out, in runs before" in markdown(read_jobs(tmp_path))


def test_runs_with_different_tokenizers_are_told_to_score_all_of_the_text(tmp_path):
    def remedy(*targets: float) -> list[str]:
        for number, count in enumerate(targets):
            bpb = 4.0 * count / (300 + number)  # so it read 300 or 301 bytes, times ln 2
            put_job(tmp_path, number, f"tokenizer.name={number}", val_loss=4.0, val_bpb=bpb, val_tokens=count)
        return re.findall(r"different parts of the validation text: (.*)\.", markdown(read_jobs(tmp_path)))

    assert remedy(512, 512) == ["eval_tokens=1e9 scores all of it"]
    assert remedy(512, 400) == ["eval_tokens=400 scores as many targets in each"]


@pytest.mark.parametrize("typed", ["run_dir=null", "data.cache_dir=c", "allow_changes=true", "wandb.name=a"])
def test_a_setting_that_changes_no_result_divides_no_row(typed, tmp_path):
    """As run_dir, which each job writes into its config.yaml as its own folder."""
    name, _, value = typed.partition("=")
    for number, bpb in enumerate((1.0, 1.5)):
        job = put_job(tmp_path, number, typed, f"seed={number}", val_bpb=bpb)
        (job / "config.yaml").write_text(f"{name}: {value} {number}\nseed: {number}\n")
    head, row = cells(markdown(read_jobs(tmp_path)))
    assert name not in head and row[0] == "0, 1" and row[-1] == "1.2500 ± 0.3536"  # √(2 · 0.25²)


def test_texts_that_are_read_as_one_number_are_two_settings(tmp_path):
    for number, prompt in enumerate(("1", "1.0", "1e-05", "0.00001", "010", "10")):
        job = put_job(tmp_path, number, f"sample_prompt={prompt}", val_bpb=1.0 + number)
        (job / "config.yaml").write_text(yaml.safe_dump({"seed": 1, "sample_prompt": prompt}))
    head, *rows = cells(markdown(read_jobs(tmp_path)))
    assert head[0] == "sample_prompt" and [row[0] for row in rows] == ["1", "1.0", "1e-05", "0.00001", "010", "10"]


def test_seeds_that_differ_in_their_last_digit_are_two(tmp_path):
    for number, seed in enumerate((2**62 + 1, 2**62)):
        put_job(tmp_path, number, f"seed={seed}", val_bpb=1.0 + number)
    assert cells(markdown(read_jobs(tmp_path)))[1][-1] == "1.5000 ± 0.7071"


def test_a_run_from_other_weights_or_of_a_failed_or_stopped_job_is_no_repetition(tmp_path):
    for number, (init_from, status) in enumerate([("null", "finished"), ("a", "finished"), ("a", "stopped")]):
        put_job(tmp_path, number, "seed=1", f"init_from={init_from}", status=status)
        (tmp_path / f"{number}/config.yaml").write_text(f"seed: 1\ninit_from: {init_from}\nrun_dir: {number}\n")
        (tmp_path / f"{number}/job.json").unlink()
    assert [(job.status, job.repeats) for job in read_jobs(tmp_path)] == [("finished", [])] * 2 + [("stopped", [])]
    assert len(cells(markdown(read_jobs(tmp_path)))) == 4


def test_a_run_that_went_on_shares_the_row_of_those_that_nobody_stopped(tmp_path):
    """Not if it has lost an init_from: one with given weights, or of a version that did not tell."""
    own = {"computed_in": "float32"}
    for seed, facts in enumerate((own, own, own | {"weights_hash": "a"}, {})):
        job = put_job(tmp_path, seed, seed=seed, val_bpb=1.0 + seed, **facts)
        (job / "job.json").unlink()
        (job / "config.yaml").write_text(f"seed: {seed}\ninit_from: null\nresume: {job if seed else 'null'}\n")
    head, *rows = cells(markdown(read_jobs(tmp_path)))
    found = {row[head.index("seed")]: row[-1] for row in rows}
    assert found == {"0, 1": "1.5000 ± 0.7071", "2, 3": "3.5000 ± 0.7071"}  # √(2 · 0.5²)


def test_the_models_of_several_beginnings_are_told_in_a_table(tmp_path):
    """init_from=null beside a small model is the default one: twenty times as large, with other tokens."""
    small = {"model": {"n_layer": 1, "vocab_size": 257}, "tokenizer": {"name": "byte"}}
    for number, (seed, start) in enumerate(itertools.product((1, 2), ("a", None))):
        job = put_job(tmp_path, number, f"init_from={start}", f"seed={seed}", "model.dropout=0.1", val_bpb=seed)
        own = {"seed": seed, "init_from": start} | (small if start else {"model": {"vocab_size": 2048}})
        (job / "config.yaml").write_text(yaml.safe_dump(own))
    head, *rows = cells(markdown(read_jobs(tmp_path)))
    assert head[:4] == ["init_from", "seed", "model.n_layer", "tokenizer.name"]
    assert sorted(row[:4] for row in rows) == [["a", "1, 2", "1", "byte"], ["null", "1, 2", "4", "bpe"]]
    # Settings that somebody chose are told as they were typed.
    for number, option in enumerate(("init_from=a", "model=small")):
        put_job(tmp_path / "chosen", number, option)
        (tmp_path / f"chosen/{number}/config.yaml").write_text(f"model: {{n_layer: {number}}}\n")
    assert "model.n_layer" not in cells(markdown(read_jobs(tmp_path / "chosen")))[0]


def test_seeds_share_a_row_where_another_setting_follows_from_the_seed(tmp_path):
    for seed in (1, 2):
        job = put_job(tmp_path, seed, f"seed={seed}", "data.tales.seed=${seed}", "attention=sdpa", val_bpb=float(seed))
        (job / "config.yaml").write_text(f"seed: {seed}\ndata: {{tales: {{seed: {seed}}}}}\n")
    (row,) = cells(markdown(read_jobs(tmp_path)))[1:]
    assert row[:2] == ["1, 2", "1, 2"] and row[-1] == "1.5000 ± 0.7071"


def test_a_setting_that_nobody_typed_divides_a_row_where_its_file_has_changed(tmp_path):
    """But not the device, which a parallel launcher chooses."""
    for number, rate in enumerate((0.01, 0.01, 0.5)):
        job = put_job(tmp_path, number, "experiment=mine", f"seed={number}", val_bpb=1.0 + number)
        (job / "config.yaml").write_text(f"seed: {number}\ndevice: cuda:{number}\noptimizer: {{lr: {rate}}}\n")
    head, first, second = cells(markdown(read_jobs(tmp_path)))
    assert head[:2] == ["seed", "optimizer.lr"] and "device" not in head
    assert first[:2] == ["0, 1", "0.01"] and first[-1] == "1.5000 ± 0.7071"  # √(2 · 0.5²)
    assert second[:2] == ["2", "0.5"] and second[-1] == "3.0000"


def test_a_table_of_single_runs_has_their_attention_once(tmp_path):
    """It had a column for model.attention, and one for attention, short for it."""
    put_run(tmp_path / "a", "sdpa", 1, 1.0)
    put_run(tmp_path / "b", "linear", 1, 1.0)
    jobs = read_jobs(tmp_path)
    assert [job.settings["attention"] for job in jobs] == ["sdpa", "linear"]
    assert not any("model.attention" in job.settings for job in jobs)
    assert markdown(read_jobs(tmp_path)).startswith("| attention | tokens | val bpb |")


def test_a_table_has_the_single_runs_beside_the_jobs_of_sweeps(tmp_path):
    """They were left out without a word where a sweep lay in the same folder."""
    # Seed 1 of sdpa is a job and a single run, seed 3 a single run alone, and a job has failed before it began.
    put_run(tmp_path / "sweep/0", "linear", 1, 4.0)
    put_run(tmp_path / "sweep/1", "sdpa", 1, 1.0)
    put_run(tmp_path / "again", "sdpa", 1, 1.0)
    put_run(tmp_path / "third", "sdpa", 3, 2.0)
    put_job(tmp_path / "sweep", 0, "tokenizer=byte", "model.attention=linear", val_bpb=4.0)
    put_job(tmp_path / "sweep", 1, "tokenizer=byte", "model.attention=sdpa", val_bpb=1.0)
    put_job(
        tmp_path / "sweep",
        2,
        "tokenizer=byte",
        "model.attention=none",
        status="failed",
        reason="there is none",
        val_bpb=None,
    )
    text = write_leaderboard(tmp_path)
    head, best, worst, failed = cells(text)
    assert head[:2] == ["attention", "seed"] and "tokenizer" not in head and "model.attention" not in head
    assert best[:2] == ["sdpa", "1, 3"] and best[-1] == "1.5000 ± 0.7071"  # √(2 · 0.5²)
    assert worst[:2] == ["linear", "1"] and worst[-1] == "4.0000"
    assert failed[-1] == "failed: there is none"
    assert "Left out, for the settings and the seed of another job: 1 job (again)." in text
    with (tmp_path / "leaderboard.csv").open() as file:
        assert [job["job"] for job in csv.DictReader(file)] == ["sweep/1", "third", "sweep/0", "sweep/2"]


def put_run(folder: Path, form: str, seed: int, bpb: float) -> None:
    """A single run's folder, without its checkpoints."""
    folder.mkdir(parents=True)
    put_summary(folder, seed=seed, val_bpb=bpb)
    written = {"model": {"attention": form, "attention_window": None}, "attention": None, "seed": seed}
    (folder / "config.yaml").write_text(yaml.safe_dump(written))


TYPED = {  # values as they may be typed, and as config.yaml has them
    "model.n_kv_head": ("null", None),
    "model.n_head": ("1", 1),
    "optimizer.embedding_lr": ("NULL", None),
    "optimizer.lr": ("1e-3", 1e-3),
    "max_flops": ("1e10", 1e10),
    "model.bias": ("True", True),
    "model.ngrams": ("[2,3]", [2, 3]),
    "model.norm_eps": ("1e-7", 1e-7),
    "attention": ("sdpa+gate", "sdpa+gate"),
    "log_interval": ("${max_steps}", 1),
}
READERS = {
    "pandas": lambda pandas, file: pandas.read_csv(file).to_dict("records"),
    "polars": lambda polars, file: polars.read_csv(file).to_dicts(),
    "duckdb": lambda duckdb, file: [
        dict(zip(found.columns, row, strict=True)) for found in [duckdb.read_csv(str(file))] for row in found.fetchall()
    ],
}


@pytest.fixture(scope="module")
def odd_values(tmp_path_factory) -> Path:
    """A folder of two sweeps over odd values, each with its default."""
    folder = tmp_path_factory.mktemp("odd")
    shared = tiny(folder, max_steps=1, **{"model.n_kv_head": 1})
    shutil.copy(folder / "text.txt", odd := folder / 'my, "text" (1).txt')
    variants = ["", *(f"{name}={typed}" for name, (typed, _) in TYPED.items())]
    for number, asked in enumerate(
        (
            [*shared, f"hydra.sweeper.variants={json.dumps(variants)}"],
            [*shared[1:], f"data.path={folder}/text.txt,{quote(odd)}", f"sample_prompt={quote(PROMPT)}", "seed=7"],
        )
    ):
        result = run_here("-m", *asked, f"hydra.sweep.dir=sweep/{number}", cwd=folder)
        assert result.returncode == 0, result.stderr
    write_leaderboard(folder / "sweep")
    return folder / "sweep"


PROMPT = "don,t \"stop\": 'x'\n\\ é"


@pytest.mark.long
@pytest.mark.parametrize("library", first_of(*READERS))
def test_programs_read_the_values_of_config_yaml_from_the_table(library, odd_values):
    rows = READERS[library](pytest.importorskip(library), odd_values / "leaderboard.csv")
    read = {row["job"]: row for row in rows}
    assert len(read) == len(TYPED) + 3 and {*TYPED, "data.path", "sample_prompt"} <= rows[0].keys()
    for job, row in read.items():
        written = written_settings(odd_values / job) | asdict(read_summary(odd_values / job))
        for name in rows[0].keys() - {"job", "peak_memory_mb"}:  # which is not known for a job of a sweep on a CPU
            wanted, found = written["model.attention" if name == "attention" else name], row[name]
            is_missing = found is None or found != found
            if wanted in (None, ""):  # CSV does not tell them apart
                assert is_missing or found == "", (job, name, found)
            else:
                assert found == (str(wanted).replace(" ", "") if isinstance(wanted, list) else wanted), (job, name)
    changed = {name: {str(row[name]) for row in rows} for name in TYPED}
    assert all(len(values) > 1 for values in changed.values()), changed


@pytest.mark.long
def test_a_program_counts_missing_values_as_a_group_of_their_own(odd_values):
    """As docs/sweeps.md has it."""
    pandas = pytest.importorskip("pandas")
    (line,) = re.findall("`(pandas.*groupby.*)`", (ROOT / "docs/sweeps.md").read_text(encoding="utf-8"))
    with chdir(odd_values):
        means = eval(line, {"pandas": pandas})
    assert means.index.isna().sum() == 1 and len(means) == 2


@pytest.mark.slow
def test_the_lines_of_pandas_take_finished_jobs_alone(tmp_path):
    """Those of docs/sweeps.md, on a table with a job that was stopped and one that failed after an evaluation.

    The deviation over the seeds was that over the rates too, 2.2174 of four runs.
    """
    pytest.importorskip("pandas")
    pytest.importorskip("jinja2")
    figures = [(0.01, 1, 1.0), (0.01, 2, 2.0), (0.02, 1, 4.0), (0.02, 2, 6.0), (0.01, 3, 90.0), (0.02, 3, 90.0)]
    jobs = [(attention, *row) for attention in ("mla", "sdpa") for row in figures]
    for number, (attention, rate, seed, bpb) in enumerate(jobs):
        status = ["stopped", "failed"][rate == 0.02] if seed == 3 else "finished"
        typed = [f"attention={attention}", f"seed={seed}", f"optimizer.lr={rate}", f"model.n_layer={seed}"]
        put_job(tmp_path, number, *typed, status=status, val_bpb=bpb)
    write_leaderboard(tmp_path)
    page = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
    printed: list[str] = []
    names: dict[str, object] = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    with chdir(tmp_path):
        for block in re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
            if "leaderboard.csv" in block:
                exec(block, names)
    latex = re.findall(r"(\w+) & ([\d.]+) & ([\d.]+) & ([\d.]+) & (\d+)", printed[0])
    means = [("0.0100", "1.5000", "0.7071", "2"), ("0.0200", "5.0000", "1.4142", "2")]
    assert latex == [(attention, *row) for attention in ("mla", "sdpa") for row in means]
    assert printed[1:] == ["optimizer.lr 3.5", "model.n_layer 1.5", "seed 1.5"]


def test_failed_jobs_are_at_the_bottom_with_their_reason_and_unfinished_ones_marked(tmp_path):
    put_job(tmp_path, 0, "seed=0", status="failed", reason="n_head=3 does not\ndivide | 64", val_bpb=None)
    put_job(tmp_path, 1, "seed=1", status="stopped", val_bpb=0.5)
    put_job(tmp_path, 2, "seed=2", val_bpb=1.5)
    killed = put_job(tmp_path, 3, "seed=3", status="running", val_bpb=0.4)  # no process has its lock
    (killed / "metrics.jsonl").write_text('{"step": 12, "flops": 3e9}\n')  # after summary.json
    put_job(tmp_path, 4, "seed=4", status="running", step=None)
    (tmp_path / "4/summary.json").unlink()
    with ExitStack() as stack:
        lock_run(put_job(tmp_path, 5, "seed=5", status="running", val_bpb=0.6), stack)
        text = markdown(read_jobs(tmp_path))
        *lines, failed = text.splitlines()
        assert {len(line) for line in lines} == {len(lines[0])} != {len(failed)}  # a long reason widens no other row
        results = [row[-1] for row in cells(text)[1:]]
        lock_run(tmp_path, stack)  # a job without a step prepares its text
        assert [job.status for job in read_jobs(tmp_path)[3:5]] == ["stopped", "running"]
        assert (read_jobs(tmp_path)[3].summary.step, read_jobs(tmp_path)[3].summary.flops) == (12, 3e9)
    assert results[:2] == ["1.5000", "0.4000 (stopped, step 12)"]
    assert results[2:4] == ["0.5000 (stopped, step 10)", "0.6000 (running, step 10)"]
    assert results[4:] == ["– (stopped, step 0)", "`failed: n_head=3 does not divide ¦ 64`"]


HOSTILE = ["</script><script>alert(1)</script>", 'a,b "c"', "line\nbreak", "ünï → ∂", "DATA TITLE", "<img src=x>"]
HOSTILE += ["[x](http://evil.example)", "![x](y)", "www.evil.example", "http://evil", "a@b.example", "_x_", "~x~"]
HOSTILE += ["a|b`c*", "`", "x\\|[a](http://evil)", "&lt;b&gt;", "``[x](y)`", "\u202egnp.exe"]


def test_any_value_of_a_setting_comes_through_every_file_and_means_nothing_there(tmp_path):
    for number, value in enumerate(HOSTILE):
        put_job(tmp_path, number, f"sample_prompt={value}", f"{value}=1")
    write_leaderboard(tmp_path)
    table = list(csv.DictReader((tmp_path / "leaderboard.csv").open(encoding="utf-8", newline="")))
    assert {row["sample_prompt"] for row in table} == set(HOSTILE)
    assert [job.settings["sample_prompt"] for job in read_jobs(tmp_path)] == HOSTILE
    (tmp_path / "kept").mkdir()
    (tmp_path / "leaderboard.csv").rename(tmp_path / "kept/leaderboard.csv")
    recorded = recorded_jobs(tmp_path / "kept")
    assert [job.settings["sample_prompt"] for job in recorded] == HOSTILE
    text = (tmp_path / "leaderboard.md").read_text(encoding="utf-8")
    assert len({len(row) for row in cells(text)}) == 1 and "\u202e" not in text
    for cell in (cell for row in cells(text) for cell in row):
        assert re.fullmatch("`[^`|]+`", cell) or not ACTIVE.search(cell), cell
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script>") == 3  # those of the page itself


DAMAGE = [
    b'{"status": "finished", "step": %s}' % (b"9" * 5000),
    *(b'{"status": 3}', b"[" * 100_000, b"[]", b"\xff", b""),
]


def test_a_damaged_file_of_one_job_is_told_in_its_row_and_ends_nothing(tmp_path, caplog):
    sweep, runs = tmp_path / "sweep", tmp_path / "runs"
    put_job(sweep, 0, "seed=0", val_bpb=1.25)
    for number, content in enumerate(DAMAGE, 1):
        (put_job(sweep, number, f"seed={number}") / "summary.json").write_bytes(content)
    for number, content in enumerate(('{"number": 1e999}', "[" * 100_000, ""), 20):
        (put_job(sweep, number) / "job.json").write_text(content)
    odd = [put_job(sweep, number, f"seed={number}") for number in (30, 31, 32)]
    (odd[0] / "metrics.jsonl").write_text('{"step": 1, "loss": 1e999}\n{"step": %s}\n' % ("9" * 400) + "[" * 100_000)
    (odd[1] / "summary.json").unlink()
    for file in (odd[1] / "summary.json", odd[2] / "metrics.jsonl", odd[0] / ".lock", sweep / ".lock"):
        os.mkfifo(file)
    for name, content in {"good": "max_steps: 3", "keys": "1: {2: 3}", "deep": "[" * 1200}.items():
        (put_job(runs / name, 0) / "config.yaml").write_text(content)
        (runs / name / "0/job.json").unlink()
    for folder, count in ((sweep, 13), (runs, 3)):
        shown = write_leaderboard(folder)
        assert len(read_jobs(folder)) == count and (folder / "report.html").is_file()
        if folder == sweep:
            told = {row[0]: row[-1] for row in cells(shown)}
            assert "1.2500" in cells(shown)[1][-1] or "±" in cells(shown)[1][-1]
            assert all("summary.json cannot be read" in told[str(number)] for number in range(1, len(DAMAGE) + 1)), told
            assert all(f"{number}/job.json cannot be read" in shown for number in (20, 21, 22))
    assert not caplog.records and shown.count("config.yaml cannot be read") == 2


def test_the_command_for_a_folder_ends_in_one_line_for_a_mistake(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "docs.compare", raising=False)
    for module, arguments, said in (
        ("sweeps", [], "error: python -m sweeps FOLDER is wanted: "),
        ("sweeps", [tmp_path], f"error: {tmp_path} holds no "),
        ("docs.compare", [tmp_path], f"error: {tmp_path} holds no "),
    ):
        monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
        with pytest.raises(SystemExit, match="1"):
            runpy.run_module(module, run_name="__main__")
        told = capsys.readouterr().err
        assert told.startswith(said) and told.count("\n") == 1, told


def test_a_run_and_a_table_of_runs_do_not_replace_each_others_page(tmp_path, monkeypatch, capsys):
    """Where a value has a / in it, hydra.job.override_dirname puts a job into another job's folder."""
    sweep, job = tmp_path / "s", tmp_path / "s/attention=sdpa"
    for folder in (job / "linear", job):
        folder.mkdir(parents=True, exist_ok=True)
        begin_job(folder, 0, ["seed=1"])
        put_summary(folder, val_bpb=1.5)
        (folder / "report.html").write_text("a run's page")
        (folder / ".lock").touch()

    def table_of(folder: Path) -> None:
        monkeypatch.setattr(sys, "argv", ["sweeps", str(folder)])
        runpy.run_module("sweeps", run_name="__main__")

    with pytest.raises(SystemExit, match="1"):
        table_of(job)
    assert f"error: {job} is a run's folder, whose page the table would replace: " in capsys.readouterr().err
    assert (job / "report.html").read_text() == "a run's page" and not (job / "leaderboard.csv").exists()
    # A run is refused in the sweep's folder, before its first table and after it, and not in that of a job.
    (sweep / ".lock").touch()
    for _ in range(2):
        with pytest.raises(SettingsError, match="/s is the folder of a sweep or a table, .*: choose another"):
            refuse_used(sweep)
        table_of(sweep)
    (job / "summary.json").unlink()  # of a job that was killed before its first checkpoint
    refuse_used(job)


def test_runs_behind_a_link_that_leads_to_nothing_are_told(tmp_path, caplog):
    """As where a folder of links, the table of several sweeps, was copied to another machine alone."""
    (tmp_path / "all").mkdir()
    (tmp_path / "all/first").symlink_to(tmp_path / "gone")
    assert not write_leaderboard(tmp_path / "all")
    assert "all has links that lead to nothing here (first): cp -rL copies" in caplog.text


@pytest.mark.parametrize("is_its_cause", [False, True])
def test_a_failed_jobs_exception_does_not_keep_its_model_alive(is_its_cause, tmp_path):
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
        error.__cause__ = error if is_its_cause else None  # as after `raise error from error`
        failed = JobReturn(_return_value=error, status=JobStatus.FAILED)
    gc.collect()
    assert kept[0]() is not None
    hydra = {"mode": RunMode.MULTIRUN, "sweep": {"dir": str(tmp_path)}}
    AfterJob().on_job_end(OmegaConf.create({"hydra": hydra}), failed)
    assert kept[0]() is None


def test_a_job_knows_whether_its_folder_holds_its_run(tmp_path):
    job = tmp_path / "3"
    job.mkdir()
    assert begin_job(job, 3, ["seed=3"]) is None and read_job(job) == JobRecord(3, ["seed=3"])
    fail_job(job, SettingsError("too\nbad"))
    assert read_job(job).reason == "too." and read_jobs(tmp_path)[0].status == "failed"
    assert begin_job(job, 3, ["seed=4", "a=1"]) is None and read_job(job).reason is None  # nothing was trained there
    put_summary(job, status="stopped")
    assert begin_job(job, 3, ["a=1", "seed=4"]) is None
    with pytest.raises(SettingsError, match=r"holds a run of `a=1 seed=4`, not of `seed=5`: .*hydra\.sweep\.dir"):
        begin_job(job, 3, ["seed=5"])
    for figures, objective in [((2.5, 0.5), 0.5), ((2.5, None), 2.5), ((None, None), math.inf)]:  # the second of a task
        put_summary(job, val_loss=figures[0], val_bpb=figures[1])
        assert begin_job(job, 3, ["a=1", "seed=4"]) == objective
    (job / "job.json").unlink()
    with pytest.raises(SettingsError, match="unknown settings"):
        begin_job(job, 3, ["seed=4"])


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, True, None, -7, 1e999])
def test_a_table_passes_over_values_of_other_types_in_summaries_and_records(value, tmp_path):
    """A summary with a text for a figure ended the sweep that wrote its table in a traceback."""
    kinds = {field.name: str if field.type in (str, str | None) else float for field in fields(Summary)}
    for number, name in enumerate(kinds):
        put_job(tmp_path, number, f"seed={number}")
        file = tmp_path / str(number) / "summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
        summary = read_summary(file.parent)
        if name != "status":
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            fits = isinstance(value, str) if kinds[name] is str else is_number
            assert getattr(summary, name) == (value if fits else None)
    for number, name in enumerate(("number", "overrides", "reason"), len(kinds)):
        file = put_job(tmp_path, number, f"seed={number}") / "job.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    write_leaderboard(tmp_path)
    assert len(read_jobs(tmp_path)) == len(kinds) + 3
    assert len([*jobs_of_sweep(tmp_path)]) >= len(kinds)


def test_a_job_that_failed_is_finished_once_another_process_has_ended_its_run(tmp_path):
    for number, loss in enumerate((2.0, 3.0)):
        job = tmp_path / str(number)
        job.mkdir()
        begin_job(job, number, [f"seed={number}"])
        put_summary(job, seed=number, val_loss=loss, val_bpb=loss, status="running" if number else "finished")
    fail_job(tmp_path / "1", SettingsError("is in use"))
    assert [job.status for job in read_jobs(tmp_path)] == ["finished", "failed"]
    put_summary(tmp_path / "1", seed=1, val_bpb=3.0)  # as the process that used the folder
    figures = f"{statistics.mean((2.0, 3.0)):.4f} ± {statistics.stdev((2.0, 3.0)):.4f}"
    assert figures in markdown(read_jobs(tmp_path))
    (tmp_path / "1" / "job.json").write_text("{")  # nobody knows its settings
    assert {job.status for job in read_jobs(tmp_path)} == {"finished", "failed"}


def test_every_combination_runs_with_every_variant_and_a_job_that_fails_does_not_end_the_others(tmp_path, capsys):
    def result(settings: dict[str, str]) -> float:
        if settings["attention"] == "mla" and settings["seed"] == "2":
            raise SettingsError("mla: no")
        return 1.0

    sweeper = Grid({"seed": "1,2", "max_steps": "7,8"}, ["attention=sdpa", "attention=mla max_steps=6"])
    jobs = in_memory(sweeper, tmp_path, result)
    with pytest.raises(SettingsError, match="^1 of 4 jobs failed: the reasons are above"):
        sweeper.sweep(["max_steps=5"])
    assert [list(job.values()) for job in jobs] == [
        ["1", "5", "sdpa"],
        ["1", "6", "mla"],
        ["2", "5", "sdpa"],
        ["2", "6", "mla"],
    ]
    said = cells(capsys.readouterr().out)
    assert len(said) == 4 and said[-1][-1] == "failed: mla: no."
    again = in_memory(sweeper, tmp_path, lambda settings: 2.0)
    sweeper.sweep(["max_steps=5"])
    assert [" ".join(job.values()) for job in again] == ["2 6 mla"] and not is_locked(tmp_path / ".lock")


def test_a_sweep_in_the_folder_above_another_has_jobs_of_its_own(tmp_path):
    """It took the other's runs for its own, and refused its jobs, or began with those that were alike."""
    trained = []
    for folder, seeds in ((tmp_path / "first", "1,2"), (tmp_path, "2,3"), (tmp_path, "2,3,4"), (tmp_path, "5,4")):
        sweeper = Grid()
        jobs = in_memory(sweeper, folder, lambda settings: 1.0)
        sweeper.sweep([f"seed={seeds}"])
        trained.append([job["seed"] for job in jobs])
    assert trained == [["1", "2"], ["2", "3"], ["4"], ["5"]]
    assert [folder for folder, _ in jobs_of_sweep(tmp_path)] == [tmp_path / str(number) for number in range(4)]
    assert len([*jobs_of_sweep(tmp_path / "first")]) == 2
    # A job's folder may have another name or place by now.
    (tmp_path / "0").rename(tmp_path / "first of all")
    (tmp_path / "kept").mkdir()
    (tmp_path / "1").rename(tmp_path / "kept/1")
    sweeper = Grid()
    jobs = in_memory(sweeper, tmp_path, lambda settings: 1.0)
    sweeper.sweep(["seed=2,3"])
    assert jobs == []


def test_a_sweep_that_is_stopped_frees_its_folder_and_the_signal_and_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def stop(settings: dict[str, str]) -> float:
        (tmp_path / "now").write_text(str(is_locked(tmp_path / ".lock")))
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError

    sweeper, before = Grid(), signal.getsignal(signal.SIGTERM)
    in_memory(sweeper, tmp_path, stop)
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "a=[x, y]", "hydra.sweep.dir=other"])
    with pytest.raises(SystemExit, match="143"):
        sweeper.sweep(["seed=1,2"])
    said = capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before and (tmp_path / "now").read_text() == "True"
    assert "– (stopped, step 0)" in said and f"python train.py -m 'a=[x, y]' hydra.sweep.dir={tmp_path}\n" in said
    with ExitStack() as stack:
        lock_run(tmp_path, stack)
        with pytest.raises(SettingsError, match=f"^hydra.sweep.dir={tmp_path} is in use by a run .*: stop that one"):
            sweeper.sweep(["seed=1,2"])


MISTAKES = {
    "model=tiny,huge": "model=huge does not exist",
    "model=tiny,null": "error: model=tiny,null: null is no option of model: leave it out, or name an option.",
    "hydra.sweeper.variants=['seed']": "cannot read the override 'seed'",
    "hydra.sweeper.variants=[seed=1,seed=2]": """: write 'hydra.sweeper.variants=["NAME=VALUE",…]', or on """,
    "hydra.sweeper.variants=": "hydra.sweeper.variants= is empty",
    "model.n_head=2,3 seed=1,2": "error: model.n_head=3 does not divide model.n_embd=128: ",
    "max_steps=0 seed=1,2": "error: max_steps=0 must be at least 1: max_steps=1000000 schedule=constant",
    "seed=1,two": "error: seed=two is not a whole number",
    "device=cpu,tpu": "error: device=tpu is not a device: choose auto, cpu",
    "hydra.sweep.dir=/proc/x seed=1,2": "hydra.sweep.dir=/proc/x cannot be used",
    "hydra.sweep.subdir=x seed=1,2": "subdir=x is the folder of several jobs: end it in /${hydra.job.num}, and quote",
    "hydra.sweep.subdir=lr-${optimizer.lr} seed=1,2 optimizer.lr=1,2": "hydra.sweep.subdir=lr-1 is the folder of",
    f"hydra.sweep.subdir=${{wandb.name}}/${{seed}} seed=1,2 wandb.name=a,{'x' * 256}": "x… of 256 bytes, and disks",
    "hydra.sweep.subdir=../x/${hydra.job.num} seed=1,2": "subdir=../x/${hydra.job.num} is outside of the sweep's fol",
    "hydra.sweep.subdir=${wandb.name} seed=1,2 wandb.name=/x": "hydra.sweep.subdir=/x is outside of the sweep's folder",
    "hydra.job.chdir=true seed=1,2": "hydra.job.chdir=true moves jobs away from the folder in which their paths were",
    "hydra.run.dir=out seed=1,2": "hydra.run.dir=out is no folder of a sweep: type hydra.sweep.dir=out",
    "hydra.sweeper.values=3": "there is no setting hydra.sweeper.values",
    "hydra/sweeper=grid2 seed=1,2": "hydra/sweeper=grid2 does not exist: choose hydra/sweeper from",
    # Options that are numbers or truths to Hydra.
    "schedule=1.0,cosine": "schedule=1.0 does not exist: choose schedule from constant, cosine",
    "model=7 seed=1": "model=7 does not exist: choose model from gpt2",
    "data=true": "data=true does not exist: choose data from copy, csv",
    "hydra/launcher=1": "hydra/launcher=1 does not exist: choose hydra/launcher from",
    'hydra.sweeper.variants=["model=7"]': "model=7 does not exist: choose model from gpt2",
    "hydra.sweeper.params={model:[7,8]}": "model=7 does not exist: choose model from gpt2",
    "model=choice(1,2)": "model=1 does not exist: choose model from gpt2",
    "model=sort(2,1)": "an option is the name of a file, and a number or a truth is typed in its place: --help",
    "+hydra.launcher.n_jobs=1": "hydra.launcher.n_jobs has no effect here: add hydra/launcher=joblib, or leave it out.",
    "+hydra.job.env_set.A=a,b": "type one, or '++hydra.job.env_set.A=\"a,b\"' for a text with commas.",
    # Texts that are numbers or lists to Hydra.
    "code=3,4": "code=3 cannot be read (No such file or directory): give a Python file that registers a form",
    "init_from=[1,2],[3]": "init_from=[1,2]: it does not exist: give a run directory, a checkpoint, or hf:NAME",
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", some(MISTAKES, 5))
def test_a_mistake_ends_in_one_sentence_before_any_run(mistake, tmp_path):
    assert MISTAKES[mistake] in refusal(*mistake.split(), cwd=tmp_path)


@pytest.mark.parametrize(
    ("given", "arguments", "said"),
    [
        ({}, "seed=interval(1,2)", "seed=interval(1,2) lists no value: write it as 1,2,3 or range(1,5); hydra/swee"),
        ({"variants": 3}, "", "hydra.sweeper.variants=3 is no list of overrides: write 'hydra.sweeper.variants=["),
        ({"variants": "seed"}, "", "hydra.sweeper.variants=seed is no list of overrides"),
        ({"variants": []}, "", "hydra.sweeper.variants=[] is no list of overrides: write 'hydra.sweeper.variants=["),
        ({"variants": [1]}, "", "hydra.sweeper.variants: 1 is no override: write 'hydra.sweeper.variants=["),
        ({"variants": [None, "seed=1"]}, "", "hydra.sweeper.variants: null is no override: write 'hydra.sweeper"),
        ({"variants": ["seed=1"]}, "seed=2", "seed is what hydra.sweeper.variants compares: leave it out"),
        (
            {"variants": ["", "seed=1,2"]},
            "",
            "hydra.sweeper.variants: seed=1,2 is several values in one variant: write",
        ),
        ({"variants": ["seed=range(1,3)"]}, "", "seed=range(1,3) is several values in one variant: write a variant"),
        ({"params": "x"}, "", "hydra.sweeper.params=x is no mapping: leave it out"),
        ({}, "seed=range(1,5,0)", "seed=range(1,5,0) must have finite numbers, and no step of 0: write it as "),
        ({}, "optimizer.lr=range(0.1,inf)", "optimizer.lr=range(0.1,inf) must have finite numbers"),
        ({}, "seed=range(2,1)", "seed=range(2,1) lists no value: write it as 1,2,3 or range(1,5)"),
        ({}, "seed=7,range(1,3,0)", "seed=7,range(1,3,0) must have finite numbers, and no step of 0: write it as "),
        ({}, "seed=interval(0,1),7", "seed=interval(0,1),7 has values within a value: write it as 1,2,3"),
        ({}, "seed=choice(1,2),7", "seed=choice(1,2),7 has values within a value: write it as 1,2,3"),
        (
            {},
            "data.path=glob(*.txt)",
            "glob() chooses among options, and data.path has none: list its values, as in data.p",
        ),
        ({}, "seed=sort(range(10,0,-3))", "seed=sort(range(10,0,-3)) sorts a range: leave sort() out"),
        ({}, "optimizer.lr=sort(range(0.1,0.5,0.1),reverse=true)", "sorts a range: leave sort() out: the order"),
        ({"params": {"seed": "sort(range(1,4))"}}, "", "seed=sort(range(1,4)) sorts a range: leave sort() out"),
        ({}, "model.ngrams=[range(2,4)],[2]", "model.ngrams=[range(2,4)],[2] has values within a value"),
    ],
)
def test_values_that_a_grid_cannot_take_are_refused_before_any_run(given, arguments, said, tmp_path):
    with pytest.raises(SettingsError, match=re.escape(said)):
        swept(Grid(**given), tmp_path / "sweep", lambda settings: pytest.fail("ran"), arguments.split())
    assert not list(tmp_path.iterdir())


def settings_of_hydra(**settings: object) -> DictConfig:
    """The settings of a sweep by dotted names below hydra."""
    hydra = {"runtime": {"choices": {"hydra/launcher": "basic"}}}
    config = OmegaConf.create({"dry_run": False, "hydra": hydra})
    for name, value in settings.items():
        OmegaConf.update(config, f"hydra.{name}", value)
    return config


@pytest.mark.parametrize(
    "place", ["../x/${hydra.job.num}", "/x/${hydra.job.num}", "${hydra.job.num}/..", "${seed}/../x"]
)
@pytest.mark.parametrize("name", ["sweep.subdir", "output_subdir"])
def test_a_jobs_folder_outside_of_the_sweeps_is_refused(name, place):
    """Such jobs were trained with status 0, and the sweep had no table."""
    said = re.escape(f"hydra.{name}={place} is outside of the sweep's folder: write ")
    with pytest.raises(SettingsError, match=said):
        check_launcher(settings_of_hydra(**{name: place}))
    check_launcher(settings_of_hydra(**{name: "a b/..x/${hydra.job.num}"}))


def test_nan_is_equal_to_itself_in_what_a_job_brings():
    """hydra.launcher.timeout=nan was told to be brought by the first job, in a sentence of all its overrides."""
    parts = {"sweeper": {"delta": 0.5}, "launcher": {"timeout": math.nan}, "callbacks": {}, "sweep": {"dir": "x"}}
    one, other = (OmegaConf.create({"hydra": parts}) for _ in range(2))
    assert brings(one, other) == []
    other.hydra.launcher.timeout = 1.0
    assert brings(one, other) == ["hydra.launcher.timeout"]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("attention=nope", "attention=nope: 'nope' is no form"),
        ("data.path=nowhere", "data.path=nowhere names no regular file"),
        *first_of(
            ("device=cuda:99", "device=cuda:99 is not on this machine: choose"),
            ("data=recall data.task.items=8000", "data=recall with data.task.items=8000 cannot have"),
            ("schedule.warmup_steps=9 max_steps=7", "schedule.warmup_steps=9 is longer than the run of 7 steps"),
            ("batch_size=9 micro_batch_size=4", "micro_batch_size=4 × 1, the number of processes, does not divide"),
            ("model.n_embd=99999999", "model.n_embd=99999999"),
        ),
    ],
)
def test_a_job_that_cannot_run_is_known_before_its_text_is_read(job, said):
    register_schema({})
    with composing(), pytest.raises(SettingsError, match=re.escape(said)):
        check_job(job.split(), lambda: compose("train", job.split(), return_hydra_config=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sweeper", "variants", "said"),
    [
        ("grid", '"","max_steps=2 model.foo=1"', "error: there is no setting model.foo: "),
        ("decide", '"","attention=mla model.latent_size=0"', "error: model.latent_size=0 must"),
    ],
)
def test_a_variant_that_cannot_run_is_told_before_any_run(sweeper, variants, said, tmp_path):
    asked = (f"hydra/sweeper={sweeper}", f"hydra.sweeper.variants=[{variants}]")
    assert said in refusal(*asked, cwd=tmp_path)


def test_a_job_that_the_folder_has_keeps_its_number_and_new_ones_take_those_that_are_free(tmp_path):
    sweeper = Grid()
    sweeper.folder, sweeper.config = tmp_path, OmegaConf.create({"dry_run": False})
    for number, overrides in {0: ("a=1", "seed=1"), 2: ("a=1", "seed=3"), 3: ("seed=1", "a=2")}.items():
        put_job(tmp_path, number, *overrides)
    put_job(tmp_path, 1, "a=7", "seed=7")
    (tmp_path / "1/summary.json").unlink()  # it failed before its first step
    grid = [["a=1", "seed=1"], ["a=1", "seed=2"], ["a=2", "seed=1"], ["a=2", "seed=2"]]
    unknown = dict.fromkeys((*map(tuple, grid), ("a=5", "seed=1"), ("a=5", "seed=2")))
    numbered = sweeper.numbered(grid, unknown)
    assert numbered == {0: grid[0], 1: grid[1], 3: grid[2], 4: grid[3]} and [*numbered] == [0, 1, 3, 4]
    others = "0 holds a run of `a=1 seed=1`, not of `a=5 seed=1`: .*, type its jobs too, or remove its 3 runs"
    with pytest.raises(SettingsError, match=others):  # "remove that run" led to the next one
        sweeper.numbered([["a=5", "seed=1"], ["a=5", "seed=2"]], unknown)
    (tmp_path / "3/job.json").unlink()
    with pytest.raises(SettingsError, match="3 holds a run of unknown settings"):
        sweeper.numbered(grid, unknown)


@pytest.mark.long
def test_a_sweep_goes_on_with_further_values_of_any_setting_and_with_fewer(tmp_path):
    """A third seed, typed last, moved all jobs behind the first two to folders of others."""
    typed = [*tiny(tmp_path, max_steps=1), 'batch_size="${floordiv:${max_steps},1}"', "hydra.sweep.dir=s"]

    def go_on(*values: str) -> str:
        done = run_here("-m", *typed, *values, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def held() -> dict[int, tuple[float, int]]:
        jobs = read_jobs(tmp_path / "s")
        return {int(job.name): (job.resolved["optimizer.lr"], job.resolved["seed"]) for job in jobs}

    go_on("optimizer.lr=0.01,0.02", "seed=1,2")
    begun = {0: (0.01, 1), 1: (0.01, 2), 2: (0.02, 1), 3: (0.02, 2)}
    assert held() == begun
    assert go_on("optimizer.lr=0.01,0.02", "seed=1,2,3").count("is finished already") == 4
    begun |= {4: (0.01, 3), 5: (0.02, 3)}
    assert held() == begun
    # Of the lower rate two jobs and a new one, between which others have their numbers.
    shutil.rmtree(tmp_path / "s/1")
    assert go_on("seed=2,3,4", "optimizer.lr=0.01").count("is finished already") == 1
    assert held() == begun | {6: (0.01, 4)}
    # Other runs are for another folder, and so are those of which nobody knows the settings.
    said = refusal(*typed, "optimizer.lr=0.01,0.02", "seed=1,2", "grad_clip=2", cwd=tmp_path)
    assert "s/0 holds a run of" in said and "grad_clip=2`: give the sweep another folder by hydra.sweep.dir=" in said
    (tmp_path / "s/2/job.json").unlink()
    said = refusal(*typed, "optimizer.lr=0.01,0.02", "seed=1,2", cwd=tmp_path)
    assert "s/2 holds a run of unknown settings (no job.json), not of" in said
    assert held() == begun | {6: (0.01, 4)}  # as a single run


def test_a_run_is_one_job_whose_words_are_known_though_others_now_have_its_settings(tmp_path):
    """An experiment's rate was 0.01 when job 0 ran, is 0.02 now, and a new job is typed with 0.01."""
    sweeper = Grid()
    sweeper.folder, sweeper.config = tmp_path, OmegaConf.create({"dry_run": False})
    ran = TrainConfig(optimizer=OptimizerConfig(lr=0.01))
    (put_job(tmp_path, 0, "experiment=mine") / "config.yaml").write_text(yaml.safe_dump(asdict(ran)))
    same, new, other = ("experiment=mine",), ("experiment=mine", "optimizer.lr=0.01"), ("optimizer.lr=1e-2",)
    now = TrainConfig(optimizer=OptimizerConfig(lr=0.02))
    for jobs in ([same, new], [new, same]):
        assert sweeper.numbered(jobs, {same: now, new: ran}) == {0: same, 1: new}
    assert sweeper.numbered([other], {other: ran}) == {0: other}
    kept = ["experiment=mine", "allow_changes=true", 'hydra.sweep.subdir="0"']
    assert sweeper.as_begun({0: [*other, "allow_changes=true"]}) == {0: kept}
    with pytest.raises(SettingsError, match="0 holds a run of `experiment=mine`, not of `optimizer.lr=1e-2`"):
        sweeper.numbered([other], {other: now})


def test_a_dry_run_plans_the_jobs_that_are_typed_whatever_runs_are_in_its_folder(tmp_path, monkeypatch):
    """Its folder was the current one: job 0 of the sweep below it was trained, in place of a plan."""
    put_job(tmp_path, 0, "a=1", "seed=1")
    put_job(tmp_path / "multirun/day/time", 0, "a=1", "seed=1")
    (tmp_path / "checkpoints").mkdir()  # as in the folder of a run
    hydra = {"sweep": {"dir": str(tmp_path)}, "overrides": {"hydra": []}}
    config = OmegaConf.create({"dry_run": True, "hydra": hydra})
    sweeper = Grid()
    sweeper.config, sweeper.folder = config, fix_folder(config)
    assert config.hydra.sweep.dir == str(sweeper.folder) and not sweeper.folder.exists()
    jobs = [["a=2", "dry_run=true"], ["a=3", "dry_run=true"]]
    numbered = sweeper.numbered(jobs, {("a=2", "dry_run=true"): None, ("a=3", "dry_run=true"): None})
    assert [*sweeper.as_begun(numbered).values()] == jobs
    for number in ("0", "1"):  # under torchrun each process has a folder of its own
        monkeypatch.setenv("RANK", number)
        with kept_folder(config, sweeper.folder, pytest.fail):
            (sweeper.folder / "0").mkdir(parents=True)  # as Hydra does
        assert not sweeper.folder.exists() and len([*tmp_path.iterdir()]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["submitit_local", "submitit_slurm"])
def test_the_plan_of_a_cluster_is_printed_here_and_leaves_nothing_behind(launcher, tmp_path, monkeypatch):
    """The words of submitit's jobs went to files below .submitit, and nobody saw the plan."""
    pytest.importorskip("submitit")
    (cwd := tmp_path / "here").mkdir()
    (temporary := tmp_path / "temporary").mkdir()
    plans = ("-m", "dry_run=true", f"hydra/launcher={launcher}", "seed=1,2", *tiny(tmp_path, max_steps=1))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    planned = run_here(*plans, "+hydra.sweep.subdir=a/${hydra.job.num}", cwd=cwd)
    assert planned.returncode == 0 and planned.stdout.count("\nmemory ") == 2, planned.stderr
    assert not list(cwd.iterdir()) and not list(temporary.glob("tinygpt-*"))


@pytest.mark.slow
def test_a_sweep_goes_on_with_its_settings_however_they_are_typed(tmp_path):
    """Of another spelling, order or a default that was typed now, it said that its runs were others."""
    given = [*tiny(tmp_path, max_steps=1), "hydra.sweep.dir=s"]
    parts = "token_embedding", "blocks.0"
    first = run_here("-m", *given, f"freeze=[{parts[0]},{parts[1]}]", "seed=1,2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    words = [word for word in given if not word.startswith(("max_steps=", "batch_size="))]
    others = ["max_steps=1.0", "batch_size='${mul:2,2}'", f"freeze=[{parts[1]},{parts[0]}]", "optimizer=muon"]
    again = run_here("-m", *words, *others, "optimizer.beta2=0.95", "seed=range(1,4)", cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.count("is finished already") == 2, again.stderr
    jobs = read_jobs(tmp_path / "s")
    assert [(job.name, job.settings["seed"], job.repeats) for job in jobs] == [
        ("0", "1", []),
        ("1", "2", []),
        ("2", "3", []),
    ]
    assert swept_settings(jobs) == ["seed"] and len(rank(jobs)) == 1
    assert (
        read_job(tmp_path / "s/0").overrides[-1] == "seed=1" and "max_steps=1" in read_job(tmp_path / "s/0").overrides
    )
    # Another rate is another run, in whatever words.
    said = refusal(*words, *others, "optimizer.beta2=0.94", "seed=1,2", cwd=tmp_path)
    assert "s/0 holds a run of" in said and "remove its 3 runs" in said


def test_a_run_keeps_its_folder_where_hydra_would_compute_another(tmp_path):
    """Of a folder with the time or the job's number on a cluster, a sweep that went on trained each job once more."""
    sweeper = Grid()
    sweeper.folder, sweeper.config = tmp_path, OmegaConf.create({"dry_run": False})
    put_job(tmp_path / "12-30 a", 1, "seed=2").rename(tmp_path / "12-30 a/lr=1,seed=2")
    jobs = {0: ["seed=1"], 1: ["seed=2"]}
    assert sweeper.as_begun(jobs) == {0: ["seed=1"], 1: ["seed=2", 'hydra.sweep.subdir="12-30 a/lr=1,seed=2"']}


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("${hydra:job.override_dirname}", "subdir=lr=1 is the folder of several jobs: end it in /${hydra.job.num}"),
        ("a/${hydra:job.name}", "subdir=a/train is the folder of several jobs"),
        ("${hydra:job.override_dirname}-${hydra:job.num}", ""),
        ("${seed}", ""),
    ],
)
def test_a_folder_that_only_a_job_computes_is_known_before_any_job(place, said):
    """Of seeds with one folder, by exclude_keys, the first was trained, and the second failed."""
    grid = Grid()
    jobs = [["seed=1"], ["seed=2"]]
    job = {"override_dirname": "lr=1", "name": "train", "num": "???"}

    def of_job(overrides):
        return OmegaConf.create(
            {"seed": overrides[0][-1], "hydra": {"job": job, "sweep": {"dir": "s", "subdir": place}}}
        )

    grid.compositions, grid.places = SimpleNamespace(of_job=of_job), {}
    with pytest.raises(SettingsError, match=re.escape(said)) if said else nullcontext():
        for overrides in jobs:
            grid.compose(overrides)


@pytest.mark.slow
def test_a_sweep_goes_on_in_folders_that_are_named_by_the_time(tmp_path):
    place = "hydra.sweep.subdir=${now:%H-%M-%S-%f}/${hydra:job.num}"
    given = [*tiny(tmp_path, max_steps=1), "hydra.sweep.dir=s", place]
    assert run_here("-m", *given, "seed=1,2", cwd=tmp_path).returncode == 0
    again = run_here("-m", *given, "seed=1,2,3", cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.count("is finished already") == 2, again.stderr
    assert len([*(tmp_path / "s").glob("*/*/checkpoints")]) == 3 and "Left out" not in again.stdout


@pytest.mark.long
def test_a_value_that_follows_from_the_number_of_a_job_keeps_it(tmp_path):
    typed = [*tiny(tmp_path, max_steps=1), "seed='${hydra:job.num}'", "hydra.sweep.dir=s"]
    for rates, finished in ("0.01,0.02", 0), ("0.01,0.02,0.03", 2):
        done = run_here("-m", *typed, f"optimizer.lr={rates}", cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.count("is finished already") == finished, done.stderr
    assert [job.resolved["seed"] for job in read_jobs(tmp_path / "s")] == [0, 1, 2]


def test_jobs_with_a_value_of_their_number_are_known_by_their_other_values(tmp_path):
    """Seeds 3, 2 and 1 after 1 and 2 were 1, 2 and 1: the first job of the command was that of the first folder."""
    grid = Grid()
    grid.config, grid.folder, grid.go_on = OmegaConf.create({"dry_run": False}), tmp_path, ""
    for number in (0, 1):
        put_job(tmp_path, number, f"seed={number + 1}", f'wandb.notes="n{number}"')
        (tmp_path / f"{number}/checkpoints").mkdir()
    jobs = [[f"seed={seed}", 'wandb.notes="n${hydra:job.num}"'] for seed in (3, 2, 1)]
    unknown = {tuple(job): None for job in jobs}
    assert grid.numbered(jobs, unknown) == {0: jobs[2], 1: jobs[1], 2: jobs[0]}
    assert grid.numbered(jobs[1:], unknown) == {0: jobs[2], 1: jobs[1]}
    with pytest.raises(SettingsError, match="holds a run of `seed=1"):
        grid.numbered(jobs[:1], unknown)
    grid.folder = tmp_path / "new"
    assert grid.numbered(jobs, unknown) == dict(enumerate(jobs))


@pytest.mark.parametrize("name", ["report.html", "leaderboard.csv", "decide.json"])
def test_a_sweep_takes_no_folder_of_a_run_and_replaces_no_file_of_others(name, tmp_path):
    def folder_of_sweep() -> Path:
        hydra = {"sweep": {"dir": str(tmp_path / "s")}, "overrides": {"hydra": []}}
        return fix_folder(OmegaConf.create({"dry_run": False, "hydra": hydra}))

    assert folder_of_sweep() == tmp_path / "s"
    (tmp_path / "s/checkpoints").mkdir(parents=True)
    with pytest.raises(SettingsError, match="/s is a run's folder: name a sweep's, or a new one"):
        folder_of_sweep()
    (tmp_path / "s/checkpoints").rmdir()
    put_summary(tmp_path / "s")  # of a run whose checkpoints were removed
    with pytest.raises(SettingsError, match="/s is a run's folder"):
        folder_of_sweep()
    (tmp_path / "s/summary.json").unlink()
    # A table is a sweep's if that has a lock, or runs.
    (tmp_path / "s" / name).write_text("of somebody else")
    with pytest.raises(SettingsError, match=f"/s has a {name} of no sweep, which this one would replace: name another"):
        folder_of_sweep()
    (tmp_path / "s/.lock").touch()
    assert folder_of_sweep()
    (tmp_path / "s/.lock").unlink()
    put_job(tmp_path / "s", 0, "seed=1")
    assert folder_of_sweep() == tmp_path / "s"


@pytest.mark.long
@pytest.mark.slow
def test_a_combination_that_cannot_run_is_named_first_and_the_others_run(tmp_path, monkeypatch):
    monkeypatch.setattr("training.plan.plan_run", lambda _, config: f"n_embd={config.model.n_embd}")
    asked = ("dry_run=true", "model.n_embd=32,36", "model.n_head=2,8")
    result = run_here("-m", *asked, cwd=tmp_path)
    reason = "model.n_head=8 does not divide model.n_embd=36: choose "
    assert result.stdout.startswith(f"1 of 4 jobs cannot run: {reason}") and result.stdout.count("\nn_embd=") == 3
    assert "\nsweep     4 jobs\n" in result.stdout
    assert (
        result.stderr == "error: 1 of 4 jobs failed: the reasons are above.\n"
        and f"job 3 failed: {reason}" in result.stdout
    )
    said = run_here("-m", *asked[:3], 'hydra.sweeper.variants=["seed=1","model.n_layer=0"]', cwd=tmp_path).stderr
    assert said.startswith("error: model.n_layer=0 must be at least 1: correct it") and said.count("\n") == 1


def test_the_pairs_that_a_sentence_shows_are_two_jobs(tmp_path):
    jobs = swept(Grid(variants=json.loads(PAIRS)), tmp_path, lambda settings: 1.0)
    found = [(job["model.n_embd"], job["optimizer.lr"]) for job in jobs]
    assert found == [("64", "0.02"), ("128", "0.01")]


def test_ranges_stand_among_values(tmp_path):
    jobs = swept(
        Grid(), tmp_path, lambda settings: 1.0, ["seed=range(1,3),7,range(9,5,-2)", "optimizer.lr=range(1,2,0.5)"]
    )
    assert [job["seed"] for job in jobs] == ["1", "1", "2", "2", "7", "7", "9", "9", "7", "7"]
    assert [job["optimizer.lr"] for job in jobs[:2]] == ["1.0", "1.5"]


# Ranges of rates, and their numbers by fractions: start + i · step below the end, above it for a step below 0.
RANGES = [
    ("range(0.3,0.9,0.3)", 3, 9, 3),
    ("range(0.0,1.0,0.1)", 0, 10, 1),
    ("range(1.3,0,-0.5)", 13, 0, -5),
    ("range(start=0.1,stop=0.3,step=0.1)", 1, 3, 1),
    ("range(0.1,3)", 1, 30, 10),
    ("shuffle(range(0.3,0.9,0.3))", 3, 9, 3),
]


CHOSEN = {  # each value as Hydra reads what is typed in choice()
    "model.n_kv_head": ("null,1,2", [None, 1, 2]),
    "max_minutes": ("1.5,null", [1.5, None]),
    "sample_prompt": ('"~","it\'s","a, b",é,1.0,true', ["~", "it's", "a, b", "é", "1.0", "true"]),
    "data.path": ('a.txt,"b (1).txt"', ["a.txt", "b (1).txt"]),
    "deterministic": ("true,false", [True, False]),
    "freeze": ("[blocks.0],null", [["blocks.0"], None]),
    "optimizer.lr": ("0.01", [0.01]),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_choice_has_the_values_that_a_list_has(name):
    """Hydra's function took no null, and the quotes of its texts were lost before a job read them."""
    values, expected = CHOSEN[name]
    parser = OverridesParser.create()
    for typed in (f"{name}=choice({values})", f"+{name}=choice({values})", f"{name}={values}"):
        (override,) = parser.parse_overrides([for_hydra(typed)])
        jobs = parser.parse_overrides([job for (job,) in combinations([override])])
        assert [job.value() for job in jobs] == expected
    nested = f"{name}=shuffle(choice({values}))"
    assert for_hydra(nested) == nested


@pytest.mark.parametrize(("typed", "start", "stop", "step"), RANGES)
def test_a_range_has_the_numbers_of_its_decimals_without_its_end(typed, start, stop, step, tmp_path):
    expected = {str(number / 10) for number in range(start, stop, step)}
    given = [(Grid(), [f"optimizer.lr={typed}"]), (Grid(params={"optimizer.lr": typed}), [])]
    if not typed.startswith("shuffle"):
        given.append((Grid(), [f"optimizer.lr=7,{typed}"]))
    for number, (sweeper, arguments) in enumerate(given):
        jobs = swept(sweeper, tmp_path / str(number), lambda settings: 1.0, arguments)
        assert {job["optimizer.lr"] for job in jobs} - {"7"} == expected, arguments


@pytest.mark.long
def test_a_home_folder_is_typed_in_a_sweep_as_in_a_run(tmp_path, monkeypatch):
    """A shell leaves the ~ of NAME=~/x to the program, and Hydra reads no ~."""
    home = tmp_path / "my home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    plain = [argument for argument in tiny(tmp_path, max_steps=1) if not argument.startswith("data.path=")]
    (tmp_path / "text.txt").rename(home / "a~.txt")
    result = run_here("-m", *plain, "data.path=~/a~.txt", "hydra.sweep.dir=~/s", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert written_settings(home / "s/0")["data.path"] == "~/a~.txt"  # as it is typed, as in a single run
    # In an experiment's values, in variants, and beside other values.
    params = {"data.path": "~/a.txt,/b.txt"}
    jobs = swept(Grid(params=params, variants=["code=~/my.py"]), tmp_path / "t", lambda settings: 1.0)
    assert [(job["data.path"], job["code"]) for job in jobs] == [('"~/a.txt"', '"~/my.py"'), ("/b.txt", '"~/my.py"')]


# Experiments and options of groups that a person may write, each with settings of the sweep.
BRINGING = {
    "experiment/plain": "seed: 5",
    "experiment/ranges": "hydra: {sweeper: {params: {seed: '1,2'}}}",
    "experiment/variants": "hydra: {sweeper: {variants: [model.n_head=1, model.n_head=2]}}",
    "experiment/decides": "defaults: [override /hydra/sweeper: decide]",
    "experiment/parallel": "defaults: [override /hydra/launcher: joblib]",
    "experiment/elsewhere": "hydra: {sweep: {dir: elsewhere}}",
    "experiment/nested": "defaults: [variants]\nhydra: {sweeper: {params: {experiment: 'plain,ranges'}}}",
    "experiment/own_seed": "defaults: [decides, plain]\nhydra: {sweeper: {variants: [model.n_head=1, model.n_head=2]}}",
    "optimizer/searched": "hydra: {sweeper: {params: {optimizer.lr: '0.1,0.2'}, variants: [model.n_head=4]}}",
}
REFUSED = {
    "experiment=plain,ranges": "experiment=ranges brings hydra.sweeper.params, without effect in a job of a sweep: ",
    "+experiment=variants,plain seed=1,2": "experiment=variants brings hydra.sweeper.variants, without effect",
    "experiment=glob(d*),plain": "experiment=glob(d*),plain has values within a value",
    "experiment=glob(lad*)": "experiment=ladder brings hydra.sweeper.params, without effect",
    "experiment=plain,decides": "experiment=decides brings hydra.sweeper, without effect",
    "experiment=plain,parallel": "experiment=parallel brings hydra.launcher, without effect",
    "experiment=plain,elsewhere": "experiment=elsewhere brings hydra.sweep.dir, without effect",
    "optimizer=searched,muon": "optimizer=searched brings hydra.sweeper.params, hydra.sweeper.variants, without effect",
    "experiment=nested": "experiment=nested brings experiment=plain,ranges, whose place it takes itself: type ",
    "experiment=[ranges,own_seed,variants]": "experiment=own_seed and experiment=variants both bring hydra.sweeper.v",
    "experiment=variants optimizer=searched": "experiment=variants and optimizer=searched both bring hydra.sweeper.va",
    "VARIANT experiment=ranges": "experiment=ranges brings hydra.sweeper.params, without effect",
    "VARIANT hydra.sweep.dir=there": "hydra.sweep.dir=there brings hydra.sweep.dir, without effect",
    "hydra/launcher=joblib VARIANT hydra.launcher.n_jobs=2": "hydra.launcher.n_jobs=2 brings hydra.launcher.n_jobs, ",
    "hydra/sweeper=decide VARIANT experiment=variants": "hydra.sweeper.variants: 'experiment=variants' has the set",
    "hydra/sweeper=decide VARIANT experiment=ranges": "experiment=ranges brings hydra.sweeper.params, without effect",
    "hydra/sweeper=decide VARIANT experiment=plain": "experiment=plain brings seed=5, which a pair has in common",
    "hydra/sweeper=decide experiment=ranges VARIANT model.n_head=2": "seed=1,2 is more than one setting to compare",
}


@pytest.fixture
def searchpath(tmp_path) -> str:
    """The override that adds these experiments and options."""
    for name, content in BRINGING.items():
        (file := tmp_path / f"conf/{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package _global_\n{content}\n")
    return f"hydra.searchpath=[file://{tmp_path}/conf]"


@pytest.mark.slow
@pytest.mark.parametrize("typed", some(REFUSED, 10))
def test_what_a_job_brings_for_the_sweep_is_refused_before_any_run(typed, searchpath, tmp_path):
    typed_before, _, variant = typed.partition("VARIANT ")
    asked = [searchpath, *typed_before.split()]
    if variant:
        asked.append(f"hydra.sweeper.variants=['attention=sdpa','{variant}']")
    assert REFUSED[typed] in refusal(*asked, cwd=tmp_path)


@pytest.mark.long
@pytest.mark.slow
def test_what_an_experiment_brings_for_the_sweep_takes_effect(searchpath, tmp_path, monkeypatch):
    monkeypatch.setattr("training.plan.plan_run", lambda _, config: f"{config.model.n_head} {config.seed}")
    planned = run_here("-m", searchpath, "+experiment=[ranges,variants]", "dry_run=true", cwd=tmp_path)
    assert re.findall(r"^\d \d$", planned.stdout, re.M) == ["1 1", "2 1", "1 2", "2 2"], planned.stderr
    run_here("-m", searchpath, "experiment=elsewhere", *tiny(tmp_path, max_steps=1), cwd=tmp_path)
    assert (tmp_path / "elsewhere/0/summary.json").is_file()
    seeds: list[int] = []
    monkeypatch.setattr("sweeps.decide.Decide.run_pairs", lambda self, pair, _: seeds.append(self.record.seed + pair))
    run_here("-m", searchpath, "experiment=own_seed", *tiny(tmp_path, max_steps=1), cwd=tmp_path)
    assert seeds == [*range(5, 25)]


def test_finished_jobs_of_a_file_of_settings_that_has_changed_since_are_told(tmp_path, capsys):
    """Rows of two attentions differed in their rate, too, and no column said so."""

    def told(rate: float, *arguments: str) -> str:
        sweeper = Grid()
        in_memory(sweeper, tmp_path, lambda settings: 1.0)
        planned = TrainConfig(optimizer=OptimizerConfig(lr=rate))
        sweeper.check_job = lambda job: replace(planned, model=GPTConfig(attention=job[0].partition("=")[2]))
        capsys.readouterr()
        sweeper.sweep([*arguments])
        for job in tmp_path.glob("[0-9]*"):
            if not (job / "config.yaml").exists():
                (job / "config.yaml").write_text(f"seed: 7\noptimizer:\n  lr: {rate}\n")
        return capsys.readouterr().out

    fact = "job 0 ran optimizer.lr=0.02, and further jobs have 0.5: a file of settings, or the run, was changed since."
    assert "was changed since" not in told(0.02, "attention=sdpa")
    assert "was changed since" not in told(0.02, "attention=sdpa,mla")
    assert told(0.5, "attention=sdpa,mla,linear").count(fact) == 1


@pytest.mark.long
@pytest.mark.slow
def test_a_file_of_settings_that_is_edited_while_a_sweep_runs_changes_no_job(searchpath, tmp_path, monkeypatch):
    def edit_and_plan(_, config) -> str:
        (tmp_path / "conf/experiment/rate.yaml").write_text("# @package _global_\noptimizer: {lr: 0.5}\n")
        return f"{config.seed} {config.optimizer.lr}"

    monkeypatch.setattr("training.plan.plan_run", edit_and_plan)
    (tmp_path / "conf/experiment/rate.yaml").write_text("# @package _global_\noptimizer: {lr: 0.1}\n")
    asked = ("-m", searchpath, "+experiment=rate", "seed=1,2", "dry_run=true")
    for rate in ("0.1", "0.5"):  # the next sweep has the new ones
        planned = run_here(*asked, cwd=tmp_path)
        assert re.findall(r"^\d 0\.\d$", planned.stdout, re.M) == [f"1 {rate}", f"2 {rate}"], planned.stderr


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["decides", "parallel", "ranges", "variants"])
def test_an_experiment_of_many_runs_is_none_of_one(experiment, searchpath, tmp_path, monkeypatch):
    shutil.copytree(CONF, tmp_path / "conf", dirs_exist_ok=True)
    monkeypatch.setattr("cli.composition.CONF", tmp_path / "conf")
    said = run_here(f"experiment={experiment}", cwd=tmp_path).stderr
    assert said == "error: many runs are asked for, and one would be made: add -m.\n"


AS_TYPED = ["1e5", "1_0", "1.10", "+5", "007", "-3", "0.50", "True", "nan", "Inf", "word"]
AS_TYPED += ["1.0", "5.", ".5", "NULL", "café", "日本.txt", "a=b", "a#b", "<x>", r"\\host\share", r"a\nb", "x&y", "a:b"]


@pytest.mark.parametrize("way", ["typed", "params", "variants"])
def test_a_text_in_a_sweep_is_the_text_that_is_typed(way, tmp_path):
    params = {"sample_prompt": AS_TYPED} if way == "params" else None
    variants = [f"sample_prompt={text}" for text in AS_TYPED] if way == "variants" else None
    arguments = [f"sample_prompt={','.join(AS_TYPED)}"] if way == "typed" else []
    jobs = swept(Grid(params=params, variants=variants), tmp_path, lambda settings: 1.0, arguments)
    parser = OverridesParser.create()
    parsed = parser.parse_overrides([f"sample_prompt={job['sample_prompt']}" for job in jobs])
    assert [str(override.value()) for override in parsed] == AS_TYPED
    assert {type(override.value()) for override in parsed if override.value() != -3} == {str}


@pytest.mark.long
@pytest.mark.slow
def test_texts_and_folders_of_a_sweep_are_those_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("training.plan.plan_run", lambda _, config: f"<{config.sample_prompt}> {config.max_steps}")
    asked = ["sample_prompt= 1e5", "max_steps=1e1", "dry_run=true"]
    texts = [run_here(*mode, *asked, cwd=tmp_path).stdout for mode in ([], ["-m"])]
    assert all("< 1e5> 10\n" in text for text in texts), texts
    small = tiny(tmp_path, max_steps=1)
    asked = ["wandb.name=1_0", "wandb.group=1.0", "wandb.tags=[2024_01, 1e3,True,x,2.0]", "hydra.sweep.dir=é=1.0"]
    assert run_here("-m", *small, *asked, cwd=tmp_path).returncode == 0
    written = yaml.safe_load((tmp_path / "é=1.0/0/config.yaml").read_text())["wandb"]
    assert written["name"] == "1_0" and written["group"] == "1.0"
    assert written["tags"] == ["2024_01", "1e3", "True", "x", "2.0"]


@pytest.mark.long
def test_a_job_is_called_by_the_value_that_varies_though_it_is_typed_before(tmp_path, monkeypatch):
    """Behind seed=1 the job of seed=1,2 with that value had no name, here and in wandb."""
    monkeypatch.setattr("training.plan.plan_run", lambda _, config: f"as {config.wandb.name}")
    told = run_here("-m", "seed=1", "max_steps=3", "seed=1,2", "dry_run=true", cwd=tmp_path)
    assert re.findall(r"^(?:job|as) .*", told.stdout, re.M) == [
        line
        for seed in (1, 2)
        for line in (f"job {seed - 1}: seed={seed} dry_run=True", f"as {seed - 1} seed={seed} dry_run=True")
    ]


# Overrides, and the seeds of the jobs that remain; all but the last have repeated ones.
SAME = [
    (["seed=1,1,2"], "12"),
    (["seed=range(1,3),2"], "12"),
    (["seed=1,2", "optimizer.lr=0.02,2e-2"], "12"),
    (["hydra.sweeper.variants=['max_steps=${floordiv:3,2}','max_steps=1','seed=1 max_steps=1.0']"], "1"),
    (["seed=4", "optimizer.lr=range(0.1,0.5,0.1),0.3"], "4444"),
    (["hydra.sweeper.variants=['attention=sdpa','optimizer.lr=2e-2','model.attention=sdpa','model.n_head=2']"], "11"),
    (["hydra.sweeper.variants=['model=tiny','optimizer=muon','']", "seed=3"], "3"),
    (["seed=1,2", "wandb.name=a,b", "data.cache_dir=c,d"], "12"),
    (["seed=1,2", "sample_prompt='${hydra:job.num}','${hydra:job.id}'"], "1122"),  # the job alone knows it
]


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "seeds"), some(SAME, 9), ids=str)
def test_jobs_with_equal_settings_run_once(asked, seeds, tmp_path, monkeypatch):
    monkeypatch.setattr("training.plan.plan_run", lambda _, config: f"seed {config.seed}")
    told = run_here("-m", *asked, "dry_run=true", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert re.findall(r"^seed (\d)$", told.stdout, re.M) == [*seeds]
    assert ("would repeat another, and run once (" in told.stdout) == ((asked, seeds) != SAME[-1])


@pytest.mark.slow
@pytest.mark.parametrize("other", ["optimizer.lr=2e-2", "attention=sdpa", "model=tiny"])
def test_a_comparison_of_equal_settings_is_refused(other, tmp_path):
    variants = f"hydra.sweeper.variants=['','{other}']"
    said = refusal("hydra/sweeper=decide", variants, cwd=tmp_path)
    assert f"hydra.sweeper.variants: '{other}' has the settings of 'no change': leave one out" in said


@pytest.mark.slow
def test_a_clusters_jobs_are_not_checked_against_this_machine():
    typed = ["device=cuda:99", "data.path=/no/where"]
    for launcher in ("basic", "submitit_slurm"):
        sweeper = Grid()
        sweeper.task_function = SimpleNamespace(check=check_job)
        with composing():
            loader = GlobalHydra.instance().config_loader()
            config = loader.load_configuration("train", [f"hydra/launcher={launcher}"], RunMode.MULTIRUN)
            sweeper.compositions = Compositions(loader, config)
            if launcher == "basic":
                with pytest.raises(SettingsError, match="device=cuda:99 is not on this machine"):
                    sweeper.check_job(typed)
            else:
                sweeper.check_job(typed)
                with pytest.raises(SettingsError, match="is no form"):
                    sweeper.check_job([*typed, "attention=nope"])


@pytest.mark.long
def test_a_value_that_follows_from_another_or_from_the_job_is_swept_and_one_of_no_setting_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("training.plan.plan_run", lambda _, config: f"{config.eval_interval} {config.sample_prompt}")
    asked = ['eval_interval="${floordiv:${max_steps},4}",3', 'sample_prompt="${hydra:job.num}"']
    result = run_here("-m", "max_steps=8", *asked, "dry_run=true", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.findall(r"^(\d) (\d)$", result.stdout, re.M) == [("2", "0"), ("3", "1")]
    said = refusal("eval_interval=5,${nope}", cwd=tmp_path)
    assert "eval_interval cannot be read (Interpolation key 'nope' not found): " in said


@pytest.mark.long
def test_a_rate_in_proportion_to_the_batch_is_swept(tmp_path, monkeypatch):
    monkeypatch.setattr("training.plan.plan_run", lambda _, config: f"rate {config.optimizer.lr:.6f}")
    result = run_here(
        "-m", "batch_size=4,12", 'optimizer.lr="${mul:0.0005,${batch_size}}"', "dry_run=true", cwd=tmp_path
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert re.findall(r"^rate (.*)$", result.stdout, re.M) == ["0.002000", "0.006000"]


COMPUTED = "${mul:0.0005,${batch_size}}"
BROUGHT = {
    "variants": f"variants: ['optimizer.lr={COMPUTED} data.path=text_${{seed}}.txt', 'data.path=${{oc.env:HELD}}']",
    "params": f"params: {{optimizer.lr: '{COMPUTED}', data.path: ['text_${{seed}}.txt', '${{oc.env:HELD}}']}}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(*BROUGHT))
def test_a_value_of_a_variant_or_an_experiment_is_that_of_each_job(name, tmp_path, monkeypatch):
    """Of each job's own settings: a rate of 16 · 0.0005 and text_10.txt in all jobs were those of the defaults."""
    monkeypatch.setenv("HELD", "held.txt")
    monkeypatch.setattr("training.plan.plan_run", lambda _, config: f"has {config.optimizer.lr:.6f} {config.data.path}")
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\nhydra:\n  sweeper:\n    {BROUGHT[name]}\n"
    (tmp_path / "experiment/brought.yaml").write_text(text)
    given = ["--config-dir=.", "experiment=brought", "seed=1,2", "batch_size=4,12", "dry_run=true"]
    result = run_here("-m", *given, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    found = re.findall(r"^has (.*) (.*)$", result.stdout, re.M)
    other = "0.020000" if name == "variants" else None  # the default rate
    texts = [(size, path) for seed in "12" for size in (4, 12) for path in (f"text_{seed}.txt", "held.txt")]
    wanted = [((path == "held.txt" and other) or f"{0.0005 * size:.6f}", path) for size, path in texts]
    assert sorted(found) == sorted(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", ["${mull:2,3}", "${floordiv:1,0}", "${oc.env:NOT_SET_ANYWHERE}", "${mul:2,${batch_size},x}"]
)
def test_a_value_that_no_job_can_compute_is_refused_before_any_run(value, tmp_path):
    said = refusal(f'optimizer.lr="{value}"', "seed=1,2", cwd=tmp_path)
    assert said.startswith("error: optimizer.lr cannot be read (") and "${mul:A,B} for a product" in said
    single = run_here(f"optimizer.lr={value}", cwd=tmp_path).stderr
    assert single.startswith(f"error: optimizer.lr={value}: ${{…}} has a value in sweeps alone: type the value, or add")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "variants"),
    first_of(
        ("attention=sdpa,mla model.latent_size=8", ["attention=sdpa", "attention=mla model.latent_size=8"]),
        (
            "attention=sdpa,mla model.latent_size=8,16 seed=1,2",
            ["attention=sdpa", "attention=mla model.latent_size=8", "attention=mla model.latent_size=16"],
        ),
        ("tokenizer=byte,bpe tokenizer.vocab_size=300", ["tokenizer=byte", "tokenizer=bpe tokenizer.vocab_size=300"]),
        ("batch_size=4,32 micro_batch_size=16", ["batch_size=4", "batch_size=32 micro_batch_size=16"]),
    ),
)
def test_a_setting_of_some_values_alone_is_answered_with_variants_that_run(asked, variants, tmp_path, monkeypatch):
    said = refusal(*asked.split(), cwd=tmp_path)
    typed = shlex.split(said.partition(": type ")[2])[0]
    assert json.loads(typed.removeprefix("hydra.sweeper.variants=")) == variants
    assert " has no effect with " in said or " does not divide batch_size=4: " in said
    monkeypatch.setattr("training.plan.plan_run", lambda _, config: "planned")
    result = run_here("-m", typed, "dry_run=true", cwd=tmp_path)
    assert result.stdout.count("\nplanned\n") == len(variants), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "added"),
    [
        ("hydra.launcher.n_jobs=2", "hydra/launcher=joblib"),
        ("hydra.launcher.partition=gpu", "hydra/launcher=submitit_slurm"),
        ("hydra.launcher.nodes=1", "hydra/launcher=submitit_local or hydra/launcher=submitit_slurm"),
        ("hydra.sweeper.metric=tokens_per_s", "hydra/sweeper=decide"),
    ],
)
def test_a_setting_of_another_launcher_or_sweeper_is_answered_with_its_option(typed, added, tmp_path):
    said = refusal(typed, "seed=1,2", cwd=tmp_path)
    assert said == f"error: {typed.partition('=')[0]} has no effect here: add {added}, or leave it out.\n"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            "launcher: {n_jobs: 2}",
            "hydra.launcher.n_jobs has no effect here: add hydra/launcher=joblib, or leave it out",
        ),
        ("sweep: {subdirs: a}", "there is no setting hydra.sweep.subdirs: --cfg hydra shows those of Hydra"),
    ],
)
def test_a_setting_of_another_launcher_in_an_experiment_is_told_with_its_file(written, said, tmp_path):
    """Hydra's own words, `ConfigKeyError raised while composing config`, had no remedy."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\nhydra: {{{written}}}\n")
    told = run_here("-m", "--config-dir=.", "experiment=mine", "seed=1,2", "dry_run=true", cwd=tmp_path)
    assert told.stderr == f"error: experiment/mine.yaml: {said}.\n"


@pytest.mark.slow
def test_several_values_without_m_are_told_and_a_dry_run_that_fails_names_no_file(tmp_path):
    for several in ("seed=1,2", "attention=sdpa,mla", "model.attention=sdpa,mla", "tokenizer=byte,bpe"):
        said = run_here(several, "hydra.sweep.dir=here", cwd=tmp_path).stderr
        assert said == f"error: {several} is several values for one run: add -m to train with each.\n"
    listed = {
        "checkpoint_interval=[1,2]": "1,2",
        "seed=(1,2)": "1,2",
        "seed=[1,2],[3]": "1,2,3",
        "tokenizer=[byte,bpe]": "byte,bpe",
    }
    for several, bare in listed.items():
        for typed in ([several], ["-m", several]):
            said = run_here(*typed, "hydra.sweep.dir=here", cwd=tmp_path).stderr
            remedy = f"type -m {several.partition('=')[0]}={bare} to train with each"
            assert said == f"error: {several} is several values for one run: {remedy}.\n"
    said = run_here("-m", "attention=spda,spdb", "dry_run=true", cwd=tmp_path).stderr
    assert said.startswith("error: attention=spda: 'spda' is no form: did you mean sdpa? ") and said.count("\n") == 1


@pytest.mark.slow
def test_a_variant_has_a_share_of_its_own_setting_and_a_dry_run_leaves_nothing_behind(tmp_path, monkeypatch):
    """${mul:${optimizer.lr},3} is three times the rate that the job has without the variant."""
    plan = "{0.model.n_head} {0.max_steps} {0.optimizer.lr:.1f}".format
    monkeypatch.setattr("training.plan.plan_run", lambda _, config: f"plan {plan(config)}")
    (place := tmp_path / "elsewhere").mkdir()
    other = "model.n_head=2 max_steps=${floordiv:${max_steps},0.5} optimizer.lr=${mul:${optimizer.lr},3}"
    given = ["dry_run=true", f'hydra.sweeper.variants=["model.n_head=1","{other}"]', "optimizer.lr=0.1,0.3"]
    result = run_here("-m", *given, *tiny(tmp_path, max_steps=2), cwd=place)
    assert result.returncode == 0 and not list(place.iterdir()), result.stderr
    assert re.findall(r"^plan (.*)$", result.stdout, re.M) == ["1 2 0.1", "2 4 0.3", "1 2 0.3", "2 4 0.9"]


LAWS = ("heads", "attention", "positions")  # experiments with further lengths of the baseline


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(*LAWS))
def test_the_baseline_of_an_experiment_has_five_lengths(name, tmp_path, monkeypatch):
    """They are shares of max_steps, which the experiment has."""
    monkeypatch.setattr("training.plan.plan_run", lambda _, config: f"steps {config.max_steps}")
    narrow = ["seed=1", "model.n_embd=64", "optimizer.lr=0.004"]
    result = run_here("-m", f"experiment={name}", *narrow, "dry_run=true", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    found = [int(length) for length in re.findall(r"^steps (.*)$", result.stdout, re.M)]
    assert [*dict.fromkeys(found)] == [80, 40, int(80 / 1.41), int(80 / 0.71), 160]


@pytest.mark.long
@pytest.mark.slow
def test_a_job_hands_its_sweeper_bits_per_byte_which_compare_between_tokenizers(tmp_path, monkeypatch):
    """Of a text of bytes they are nats / ln 2. Nats of a token prefer the smaller tokenizer."""
    returned = []
    launch = Grid.launch

    def launched(sweeper, jobs, number):
        results = launch(sweeper, jobs, number)
        returned.append([result.return_value for result in results])
        return results

    monkeypatch.setattr(Grid, "launch", launched)
    variants = '["tokenizer=byte","tokenizer=bpe tokenizer.vocab_size=300"]'
    small = [argument for argument in tiny(tmp_path, max_steps=1) if not argument.startswith("tokenizer")]
    for _ in ("trained", "finished already"):
        result = run_here("-m", *small, "hydra.sweep.dir=s", f"hydra.sweeper.variants={variants}", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    losses = [read_summary(tmp_path / f"s/{job}").val_loss for job in (0, 1)]
    first, again = returned
    assert first == again and first[0] == pytest.approx(losses[0] / math.log(2))
    assert first[1] < first[0] and losses[0] < losses[1]


@pytest.mark.long
def test_a_sweep_that_was_stopped_then_killed_ends_in_the_uninterrupted_leaderboard(tmp_path):
    overrides = [
        "-m",
        "optimizer=muon,adamw",
        "model.vocab_size=300,100",
        *tiny(tmp_path, max_steps=100, eval_interval=20),
    ]
    overrides += ["model.dropout=0.1", "checkpoint_interval=10"]
    whole = run_here(*overrides, "hydra.sweep.dir=whole", cwd=tmp_path)
    said = "error: 2 of 4 jobs failed: the reasons are above.\n"
    assert whole.returncode == 1 and whole.stderr == said
    assert (tmp_path / "whole/leaderboard.md").read_text() in whole.stdout
    assert "model.vocab_size=100 is less than the tokenizer's 257" in cells(whole.stdout)[-1][-1]

    typed = [*overrides, "hydra.sweep.dir=cut"]
    for number, step in ((signal.SIGTERM, 30), (signal.SIGKILL, 90)):
        process = subprocess.Popen(command(*typed), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        wait_for(tmp_path / "cut/0/metrics.jsonl", f'"step": {step},')
        assert is_locked(tmp_path / "cut/.lock")
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        if number == signal.SIGKILL:
            assert process.returncode == -9 and "ended without a word" in comma_separated(read_jobs(tmp_path / "cut"))
            break
        assert process.returncode == 128 + number and "(stopped, step" in output, output
        _, script, *typed = shlex.split(output.rstrip().splitlines()[-1].partition("to go on:")[2])
        assert script.endswith("train.py") and typed == [*overrides, "hydra.sweep.dir=cut"]

    resumed = run_here(*typed, cwd=tmp_path)
    assert resumed.stderr == said and "resuming at step" in resumed.stdout
    again = run_here(*typed, cwd=tmp_path)
    assert again.stdout.count("is finished already") == 2 and again.stdout.count(" failed: ") == 4, again.stdout
    for name in "02":
        rows = [read_metrics(tmp_path / folder / name / "metrics.jsonl") for folder in ("whole", "cut")]
        assert without_clock(rows[0]) == without_clock(rows[1]) and rows[0][-1]["step"] == 100
    tables = [list(csv.reader((tmp_path / folder / "leaderboard.csv").open())) for folder in ("whole", "cut")]
    assert [row[:4] for row in tables[0]] == [row[:4] for row in tables[1]]
    assert not list((tmp_path / "cut").rglob(".hydra"))
    other = run_here(*overrides, "model.vocab_size=300,400", "seed=5", "hydra.sweep.dir=cut", cwd=tmp_path)
    assert "cut/0 holds a run of `optimizer=muon" in other.stderr and other.returncode == 1


def without_clock(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


def test_plans_for_several_gpus_are_not_said_to_repeat_each_other(capsys):
    """-m plan.device=h100,a100 dry_run=true planned the first alone."""
    configs = [TrainConfig(dry_run=True, plan=PlanConfig(device=name)) for name in ("h100", "a100", "a100")]
    jobs = [[f"plan.device={config.plan.device}", f"batch_size={16 + number}"] for number, config in enumerate(configs)]
    assert Grid.distinct(Grid(), jobs, configs) == jobs[:2]
    assert "1 of 3 jobs would repeat another" in capsys.readouterr().out

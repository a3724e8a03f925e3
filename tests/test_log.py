"""What a run measures and says of it: rows, the summary, the log, the lines of the terminal."""

import errno
import io
import json
import logging
import math
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from test_resume import ROOT, before_step, stopped
from tqdm import tqdm

import train as train_module
import training.terminal
from common.console import Bar
from data.config import DataConfig
from data.texts import LEFT_OUT
from generation.score import ScoringParams, score
from model.size import flops_per_token
from pages.report import Report
from pages.runs import run_page
from runs.checkpoint import open_checkpoint, read_meta
from runs.directory import open_log
from runs.metrics import Evaluation, finite, read_metrics
from runs.summary import NUMBERS, TEXTS, Summary, read_summary, write_summary
from sweeps.leaderboard import read_jobs
from train import train
from training.config import ScheduleConfig
from training.device import peak_flops, peak_memory
from training.evaluation import evaluate, first_sequences
from training.log import Loggers, MetricsFile, SummaryFile
from training.optimizer import set_learning_rate
from training.start import open_run
from training.terminal import Terminal, describe

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_rows_and_the_summary_say_what_was_spent_and_begin_anew_with_a_new_run(train_config, monkeypatch):
    now, run_dir = [0.0], Path(train_config.run_dir)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    run_dir.mkdir()
    for name in ("metrics.jsonl", "report.jsonl"):  # of a run that was killed before its first checkpoint
        (run_dir / name).write_text('{"step": 7, "left": true}\n')
    with open_run(train_config) as run, Loggers(run, Report) as loggers:
        for step, took in enumerate((1.0, 2.0, 1.0, 8.0), 1):
            now[0] += took
            run.progress.step = step
            run.config.log_interval = 1 if step != 3 else 10
            loggers.on_step(torch.tensor(1.0), torch.tensor(1.0), lr=0.1)
            if step == 3:  # an evaluation between two lines does not slow the training down
                now[0] += 500
                loggers.on_evaluation(Evaluation(1.0, 1, 1), "")
    rows, summary = read_metrics(run_dir / "metrics.jsonl"), read_summary(run_dir)
    assert [(row["tokens"], row["seconds"], row.get("tokens_per_s")) for row in rows] == [
        *((128, 1.0, 128.0), (256, 3.0, 64.0), (384, 504.0, None), (512, 512.0, 16.0))
    ]
    assert [row["flops"] for row in rows] == [row["tokens"] * flops_per_token(run.model) for row in rows]
    assert "left" not in (run_dir / "report.jsonl").read_text()
    assert (summary.tokens_per_s, summary.seconds, summary.flops) == (64.0, 512.0, 512 * flops_per_token(run.model))
    assert summary.peak_memory_mb == pytest.approx(peak_memory(torch.device("cpu")) / 1e6, rel=0.2)
    # A notebook gives paths as texts.
    assert read_metrics(f"{run_dir}/metrics.jsonl") == rows and read_summary(str(run_dir)) == summary
    assert run_page(str(run_dir)) == run_page(run_dir)
    assert [job.directory for job in read_jobs(str(run_dir.parent))] == [run_dir]


def test_metrics_are_json_whatever_the_numbers_are_and_what_cannot_be_read_is_passed_over(train_config, monkeypatch):
    with open_run(train_config) as run, Loggers(run) as loggers:
        run.progress.step = 1
        of_heads = {"of_heads": [[math.nan, 0.5], [-math.inf]]}
        monkeypatch.setattr(Loggers, "_row", lambda self, row=Loggers._row, **values: row(self, **values | of_heads))
        loggers.on_step(torch.tensor(math.nan), torch.tensor(1.0), lr=math.inf)
    file = run.directory / "metrics.jsonl"
    with file.open("ab") as end:
        end.write(b'{"step": 2, "lo\n\n7\n{"loss": 1}\n\xff\xfe\n{"step": 3, "loss": null}\n{"st')
    found = read_metrics(file)
    assert [row["step"] for row in found] == [1, 3]
    assert (found[0]["loss"], found[0]["lr"], found[0]["of_heads"]) == (None, None, [[None, 0.5], [None]])
    write_summary(run.directory, Summary(status="finished", val_loss=1e31))  # of a run that diverged
    assert read_summary(run.directory) == Summary(status="finished")
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError("closed")))
    assert read_metrics(file) == []


def test_json_has_no_nan_at_any_depth_of_lists_tuples_and_objects():
    figures = {"cost": (1.5, math.nan), "parts": [{"L1 H1": (-math.inf, [math.nan, 2])}]}
    written = json.dumps(finite(figures), allow_nan=False)
    assert json.loads(written) == {"cost": [1.5, None], "parts": [{"L1 H1": [None, [None, 2]]}]}


def test_rows_that_meet_a_full_disk_are_written_when_there_is_room(train_config, caplog):
    """The limit on the size of a file stands for the disk: it cuts a row, and refuses the next one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_run(train_config) as run:
        metrics = MetricsFile(run)
        metrics.on_row({"step": 1, "text": 9999 * "longer than train.log "}, "")
        try:
            for step, room in ((2, 30), (3, 0), (4, 200)):
                resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.path.stat().st_size + room, before[1]))
                metrics.on_row({"step": step, "text": "a row of some sixty bytes"}, "")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [row["step"] for row in read_metrics(metrics.path)] == [1, 2, 3, 4]
    (told,) = [message for message in caplog.messages if "cannot be written" in message]
    assert told.endswith("metrics.jsonl cannot be written (File too large): rows may be lost until it can.")


@pytest.mark.parametrize("name", ["metrics.jsonl", "report.jsonl"])
def test_a_log_that_was_cut_goes_on_in_a_line_of_its_own(tmp_path, name):
    file = tmp_path / name
    for before, rows in (('{"step": 1}\n{"st', [1, 7]), ('{"step": 1}\n', [1, 7]), ("", [7])):
        file.write_text(before)
        with open_log(file, "a") as log_file:
            log_file.write('{"step": 7}\n')
        assert [row["step"] for row in read_metrics(file)] == rows


@pytest.mark.parametrize(
    "remove",
    [lambda folder: folder.rename(f"{folder}_moved"), pytest.param(shutil.rmtree, marks=pytest.mark.slow)],
    ids=["moved", "removed"],
)
def test_a_folder_that_is_moved_or_removed_while_the_run_trains_is_told_once(train_config, monkeypatch, caplog, remove):
    config = replace(train_config, max_steps=4, log_interval=1, eval_interval=4, sample_tokens=0)
    folder = Path(config.run_dir)
    before_step(monkeypatch, 3, lambda run: remove(folder))
    train(config)
    (told,) = [record.getMessage() for record in caplog.records if "moved or removed" in record.getMessage()]
    assert told.startswith(f"{folder}/metrics.jsonl was moved or removed while the run trains: ")
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "summary.json"}  # and the page
    assert open_checkpoint(folder).meta.progress.step == 4
    moved = Path(f"{folder}_moved")
    assert not moved.exists() or [row["step"] for row in read_metrics(moved / "metrics.jsonl")] == [1, 2, 3, 4, 4]


def test_every_field_of_a_summary_is_read_as_it_was_written(tmp_path):
    whole = Summary(status="stopped", **dict.fromkeys(TEXTS, "text"), **dict.fromkeys(NUMBERS, 1.5))
    write_summary(tmp_path, whole)
    assert read_summary(tmp_path) == whole and None not in asdict(whole).values()


def test_the_best_evaluation_is_in_the_summary_though_metrics_jsonl_has_lost_its_row(train_config):
    """It had none, where the terminal named the step: a sweep's table had an empty cell."""
    config = replace(train_config, max_steps=2, eval_interval=1, checkpoint_interval=1)
    train(config)
    folder = Path(config.run_dir)
    rows = read_metrics(folder / "metrics.jsonl")
    best = min((row for row in rows if "val_loss" in row), key=lambda row: row["val_loss"])
    (folder / "metrics.jsonl").unlink()
    train(replace(config, resume=str(folder)))
    summary = asdict(read_summary(folder))
    assert summary["best_step"] == best["step"]
    figures = [name for name in NUMBERS if name.startswith("val_")]
    assert [summary[name] for name in figures] == [best.get(name) for name in figures]


@pytest.mark.slow
def test_a_finished_run_on_text_fills_every_number_of_its_summary_but_the_accuracy_of_a_task(documents):
    train(documents)
    summary = read_summary(Path(documents.run_dir))
    assert [name for name in NUMBERS if getattr(summary, name) is None] == ["val_accuracy", "learned"]


@pytest.mark.slow
def test_loggers_that_fail_are_told_no_more_and_the_run_goes_on(train_config, monkeypatch, caplog):
    def full_disk(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    kinds = {MetricsFile: "on_row", SummaryFile: "on_end", Terminal: "on_row", Report: "on_step"}
    for kind, told in kinds.items():
        monkeypatch.setattr(kind, told, full_disk)
    assert math.isfinite(train(replace(train_config, max_steps=2, eval_interval=2)))
    said = [message for message in caplog.messages if "failed" in message]
    lost = "failed ([Errno 28] No space left on device)"
    goes_on = {told: "" if told == "on_end" else "; training goes on without it" for told in kinds.values()}
    assert sorted(said) == sorted(f"{kind.writes} {lost}{goes_on[told]}." for kind, told in kinds.items())
    assert (Path(train_config.run_dir) / "checkpoints/last").exists()


@pytest.mark.slow
def test_skipped_steps_are_counted_in_a_row_and_do_not_keep_the_end_from_being_saved(train_config, monkeypatch, caplog):
    def step(run, number, step=train_module.train_step):
        run.loss_divisor = math.nan if number in (0, 2, 3) else 128
        return step(run, number)

    monkeypatch.setattr("train.train_step", step)
    train(replace(train_config, max_steps=4))
    assert "no validation loss counts: the steps that were evaluated had no checkpoint then" in caplog.text
    assert "step 4 was skipped, so it is not saved yet: the checkpoints stay" in caplog.text  # it is at the end
    progress = read_meta(Path(train_config.run_dir) / "checkpoints/last").progress
    assert (progress.step, progress.skipped, progress.skipped_in_a_row, progress.finished) == (4, 3, 2, True)
    caplog.clear()
    train(replace(train_config, max_steps=5, resume=train_config.run_dir))
    assert "changed nothing" not in caplog.text  # which was told before


# The terminal


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            Evaluation(20.0, 10, 10, bpb_stderr=0.5),
            "2.0000 nats/token, perplexity 7.4, 2.8854 bits/byte ± 0.5000 ",
        ),
        (Evaluation(160.0, 10, 20), "16.0000 nats/token, perplexity 8.89e+06, 11.5416 bits/byte"),
        (Evaluation(5.0, 10, 0, accuracy=0.25), "0.5000 nats/answer, accuracy 25.00%"),
    ],
    ids=str,
)
def test_an_evaluation_is_said_in_one_line(train_config, caplog, result, words):
    caplog.set_level(logging.INFO, "tinygpt")
    with open_run(train_config) as run:
        Terminal(run).on_row(result.figures, "one\ntwo")
    *_, said, sample = caplog.messages
    assert said.startswith(f"step 0: validation loss {words}") and sample == "  │ one\n  │ two"


@pytest.mark.slow
def test_a_task_is_described_and_ends_in_nats_an_answer(train_config, caplog):
    caplog.set_level(logging.INFO, "tinygpt")
    task = DataConfig(source="induction", task=replace(DataConfig().task, vocab_size=8))
    train(replace(train_config, data=task, max_steps=1))
    assert "task      induction: 1 answer in each sequence of 16 tokens, 8 ids; 512 sequences held out" in caplog.text
    assert read_metrics(Path(train_config.run_dir) / "metrics.jsonl")[0]["loss"] == pytest.approx(math.log(8), rel=0.1)
    assert "\nbest validation loss 2." in caplog.text and caplog.text.count("nats/answer") == 2


@pytest.mark.slow
def test_a_terminal_shows_a_bar_that_moves_with_every_step_and_says_where_the_run_is(train_config, monkeypatch):
    seen, on_step = [], Terminal.on_step
    monkeypatch.setattr(training.terminal, "progress_bar", partial(tqdm, file=io.StringIO()))
    see = lambda self: (on_step(self), seen.append((self.bar.n, self.bar.postfix, len(self.run.data.train))))  # noqa: E731
    monkeypatch.setattr(Terminal, "on_step", see)
    train(replace(train_config, log_interval=5, sample_tokens=0))
    assert [n for n, *_ in seen] == list(range(1, 21))
    _, postfix, tokens = seen[-1]
    assert postfix.startswith("loss ") and f"epoch {20 * train_config.tokens_per_step / tokens:.2f}" in postfix


@pytest.mark.slow
@pytest.mark.parametrize("max_steps", [20, None])
def test_the_bar_is_cut_at_the_terminals_width(train_config, max_steps, monkeypatch):
    drawn = io.StringIO()
    monkeypatch.setattr(training.terminal, "progress_bar", partial(tqdm, file=drawn, ncols=40, mininterval=0))
    config = replace(train_config, max_steps=max_steps, max_minutes=None if max_steps else 0.02, sample_tokens=0)
    train(config)
    lines = [line for line in re.split("[\\r\\n]", drawn.getvalue()) if line.strip()]
    fewest = 10 if max_steps else 1  # a slow machine takes few steps in a second
    assert len(lines) > fewest and max(map(len, lines)) == 40 and any("loss" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "peak", "single"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("Tesla T4", 65e12, 8.1e12),
        ("NVIDIA H100 PCIe", None, None),
        ("NVIDIA GeForce RTX 4090", 165e12, 82.6e12),
        ("NVIDIA of no data sheet", None, None),
    ],
)
def test_mfu_stands_beside_the_speed_of_a_gpu_whose_peak_is_known(name, peak, single, train_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak and peak_flops(torch.device("cpu")) is None
    assert peak_flops(torch.device("cuda"), torch.float32) == single
    monkeypatch.setattr(training.terminal, "peak_flops", lambda device, dtype: peak)
    with open_run(train_config) as run:
        terminal = Terminal(run)
        terminal.on_row({"loss": 1.0, "tokens": 9, "tokens_per_s": 0.3 * 312e12 / flops_per_token(run.model)}, "")
    assert ("tokens/s (30% MFU), epoch" in terminal.figures) == (peak == 312e12)
    assert ("MFU" in terminal.figures) == (peak is not None)


@pytest.mark.slow
def test_without_a_terminal_a_line_comes_every_half_minute(train_config, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tinygpt")
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for step in range(20):
        before_step(monkeypatch, step, lambda run: now.__setitem__(0, now[0] + 8))
    train(replace(train_config, eval_interval=100, sample_tokens=0))
    lines = [message.split(":")[0] for message in caplog.messages if message.startswith("step ")]
    assert lines == ["step 4 of 20", "step 8 of 20", "step 12 of 20", "step 16 of 20", "step 20 of 20", "step 20"]


def test_a_line_between_two_rows_says_of_which_step_its_figures_are(train_config, caplog):
    caplog.set_level(logging.INFO, "tinygpt")
    with open_run(train_config) as run:
        terminal = Terminal(run)
        for step, row in ((1, None), (10, {"loss": 2.0, "tokens": 640, "tokens_per_s": 1500.0}), (13, None)):
            run.progress.step = step
            if row:
                terminal.on_row(row, "")
            terminal.last_line = -math.inf
            terminal.on_step()
        figures = f": loss 2.000, 1.5k tokens/s, epoch {640 / len(run.data.train):.2f}"
    assert caplog.messages[-3:] == ["step 1 of 20", f"step 10 of 20{figures}", f"step 13 of 20{figures} (at step 10)"]


@pytest.mark.slow
def test_the_log_tells_of_both_parts_of_a_stopped_run_and_the_summary_of_the_signal(train_config):
    config = replace(train_config, sample_tokens=0, batch_size=4)
    again = stopped(config, 5)
    assert "by a signal after step 6" in read_summary(Path(config.run_dir)).reason
    ending = f"stopped after step 6; to continue:  python train.py resume={config.run_dir}"
    assert ending in (Path(config.run_dir) / "train.log").read_text()
    train(again)
    log = (Path(config.run_dir) / "train.log").read_text()
    assert log.count("step 10: validation loss") == log.count("resuming at step 6 of") == 1
    assert log.count("best validation loss") == 1


# Evaluations of documents


@pytest.fixture
def documents(train_config, tmp_path):
    """A run on 600 documents."""
    texts = ["".join(f"line {i} of text {n}\n" for i in range(5)) for n in range(600)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = replace(train_config.data, source="jsonl", path=str(tmp_path / "t.jsonl"), val_fraction=0.2)
    return replace(train_config, data=data, model=replace(train_config.model, zero_init=False))


@pytest.mark.slow
def test_a_long_validation_text_is_scored_in_part_saying_so_with_the_error_over_documents(documents, monkeypatch):
    with open_run(documents) as run:
        whole = evaluate(run.model, run.data, 8, run.autocast)
        scores = score(run.model, run.data.tokenizer, run.data.val[:], ScoringParams(run.autocast, 16)).total
        assert whole.tokens == len(run.data.val) - 1
        assert (whole.bpb, whole.bpb_stderr) == pytest.approx((scores.bpb, scores.bpb_stderr), rel=1e-3)
        half = len(run.data.val) // 2
        monkeypatch.setattr("training.terminal.evaluation_tokens", lambda *_: half)
        part = evaluate(run.model, run.data, 8, run.autocast, max_tokens=half)
        assert half - 16 < part.tokens <= half
        assert part.bpb == pytest.approx(whole.bpb, rel=0.02)
        # The document of each target, by its place in a text whose tokens are their places.
        places = replace(run.data, val=np.arange(len(run.data.val)))
        targets = np.concatenate([batch.targets.ravel() for batch in places.validation_batches(8, half)])
        found = [int((run.data.val[: place + 1] == run.data.tokenizer.eot_token).sum()) for place in targets]
        assert run.data.validation_documents(half).tolist() == found and len({*found}) > 100
        # The error of a ratio of sums over these documents.
        batches = [torch.from_numpy(np.stack(batch[:2])) for batch in run.data.validation_batches(8, half)]
        nats = torch.cat([run.model.nats(*batch.long())[0].detach().ravel() for batch in batches]).double().numpy()
        bits = np.bincount(found, nats) / math.log(2)
        sizes = np.bincount(found, torch.cat([batch[1].ravel() for batch in batches]) != run.data.tokenizer.eot_token)
        squares = ((bits - part.bpb * sizes) ** 2).sum() * len({*found}) / (len({*found}) - 1)
        assert part.bpb_stderr == pytest.approx(math.sqrt(squares) / sizes.sum(), rel=1e-3)
        assert f"({part.tokens:,} in the last evaluation)" in "\n".join(describe(run.config, run.data, run.model))


@pytest.mark.long
def test_an_evaluation_keeps_documents_apart_and_computes_as_training_does(documents):
    documents.data.document_mask = True
    with open_run(replace(documents, precision="bf16")) as run:
        whole = torch.autocast("cpu", enabled=False)
        apart, rounded = (evaluate(run.model, run.data, 8, autocast).loss for autocast in (whole, run.autocast))
        joined = evaluate(run.model, replace(run.data, document_mask=False), 8, whole).loss
        assert rounded == pytest.approx(apart, rel=1e-3) and rounded != apart and not math.isclose(joined, apart)
        tokens, doc_starts = first_sequences(run.model, run.data)
        begun = doc_starts > 0  # others before the window
        assert begun.any() and tokens.gather(1, doc_starts)[begun].eq(run.data.tokenizer.eot_token).all()


def test_a_loss_that_has_risen_is_told_with_the_remedies_that_are_not_taken(train_config, caplog):
    with open_run(replace(train_config, sample_tokens=0)) as run:
        run.progress.best_loss, run.progress.best_step, run.progress.best_tokens = 2.0, 10, 100
        run.progress.evaluated, run.progress.metrics = 20, {"val_loss": 2.5, "val_tokens": 100}
        run.progress.step = 200
        for changed, remedies in (
            ({}, "add text, train fewer steps, set model.dropout=0.2, or lower eval_interval to catch the best"),
            ({"dropout": 0.1}, "add text, train fewer steps, or lower eval_interval to catch the best"),
        ):
            run.config = replace(run.config, eval_interval=10, model=replace(run.config.model, **changed))
            Terminal(run).log_result()
            assert caplog.messages[-1] == (
                "after its best step the loss rose; sample.py takes that step's checkpoint. "
                f"The model may learn its text by heart: {remedies}"
            )
        # Without a loss that rises there is nothing to say, unless nothing tells whether it rose.
        run.progress.metrics = {"val_loss": 2.0, "val_tokens": 100}
        epoch = len(run.data.train) / run.config.tokens_per_step
        for passes, interval, told in ((5, 10**6, True), (5, 1, False), (3, 10**6, False)):
            run.progress.step = round(passes * epoch)
            run.config = replace(run.config, eval_interval=interval)
            caplog.clear()
            Terminal(run).log_result()
            said = f"the only evaluation came after {passes}.0 epochs: lower eval_interval to catch the best"
            assert (said in caplog.text) == told
        run.progress.step, run.progress.metrics = 1, {"val_loss": 2.5, "val_tokens": 100}
        Terminal(run).log_result()
        assert "Every token was new: lower optimizer.lr=" in caplog.messages[-1]


def test_a_schedule_that_max_minutes_has_cut_is_told(train_config, caplog):
    """As where Ctrl-Z halted the run, whose minutes go on; not of a run that never decays or took all its steps."""
    said = "max_minutes=1 was over in a long step, as one that Ctrl-Z halts: the learning rate is still 60% of its peak"
    with open_run(replace(train_config, sample_tokens=0, max_steps=None, max_minutes=1)) as run:
        for factor, schedule, steps, is_told in (
            (0.6, run.config.schedule, None, True),
            (0.4, run.config.schedule, None, False),
            (0.6, replace(run.config.schedule, final_factor=0.2), None, False),
            (0.6, ScheduleConfig(name="constant"), None, False),
            (0.6, run.config.schedule, 3, False),
        ):
            run.max_steps, run.progress.step = steps, 0
            run.config = replace(run.config, schedule=schedule)
            terminal = Terminal(run)
            run.progress.step = 3
            set_learning_rate(run.optimizers, factor)
            assert said not in caplog.text
            terminal.tell_if_cut()
            assert (said in caplog.text) == is_told
            caplog.clear()
            run.config = replace(run.config, schedule=train_config.schedule)


def test_a_run_that_max_minutes_ends_before_its_first_step_is_told(train_config, caplog):
    """It was finished with the loss of its first weights, and not a word."""
    with open_run(replace(train_config, sample_tokens=0, max_steps=None, max_minutes=1e-9)) as run:
        terminal = Terminal(run)
        for step, is_told in ((0, True), (3, False)):
            run.progress.step = step
            caplog.clear()
            terminal.tell_if_cut()
            assert ("max_minutes=1e-09 was over before the first step: raise it" in caplog.text) == is_told


def test_a_loss_that_rose_with_the_training_loss_is_none_of_a_text_known_by_heart(train_config, caplog):
    """Where the rate was too high, the model was told to learn its text by heart, of which it knew nothing."""
    with open_run(replace(train_config, sample_tokens=0)) as run:
        progress = run.progress
        for best, training, by_heart, said in (
            (2.0, 0.5, True, "after its best step the loss rose"),
            (2.0, 6.4, False, "after its best step the loss rose"),
            (6.0, 0.5, True, "no better than chance"),
            (6.0, 6.4, False, "no better than chance"),
            (None, 6.4, False, "no validation loss counts"),
        ):
            caplog.clear()
            terminal = Terminal(run)
            progress.step = 5000
            terminal.on_row({"loss": training, "tokens_per_s": 1.0, "tokens": 100}, "")
            progress.best_loss, progress.best_step, progress.best_tokens = best, 10, 100
            progress.evaluated, progress.metrics = 20, {"val_loss": 6.5, "val_tokens": 100}
            terminal.log_result()
            told = [one for one in caplog.messages if "heart" in one or "lower optimizer.lr=" in one]
            assert said in caplog.text and ["by heart" in one for one in told] == [by_heart] * (best is not None)


def test_a_run_that_was_evaluated_before_it_was_resumed_has_no_only_evaluation(train_config, caplog):
    with open_run(replace(train_config, sample_tokens=0, eval_interval=10**6)) as run:
        progress = run.progress
        progress.best_loss, progress.best_step, progress.best_tokens = 2.0, 2000, 100
        for before, told in ((0, True), (1000, False)):
            caplog.clear()
            progress.evaluated, progress.metrics, progress.step = before, {"val_loss": 2.0, "val_tokens": 100}, 1000
            terminal = Terminal(run)
            progress.evaluated = progress.step = 2000
            terminal.log_result()
            assert ("the only evaluation" in caplog.text) == told


@pytest.mark.parametrize("name", ["warmup_stable_decay", "cosine", "constant"])
def test_a_run_that_max_minutes_ends_within_its_warm_up_is_told(train_config, caplog, name):
    said = "max_minutes=1 was over after 3 of the 5 steps of warm-up: lower schedule.warmup_steps, or resume="
    schedule = ScheduleConfig(name=name, warmup_steps=5)
    with open_run(replace(train_config, sample_tokens=0, max_steps=None, max_minutes=1, schedule=schedule)) as run:
        terminal = Terminal(run)
        for step in (3, 6):
            run.progress.step = step
            set_learning_rate(run.optimizers, 3 / 6 if step == 3 else 0.0)
            terminal.tell_if_cut()
            assert (said in caplog.text) == (step == 3) and "long step" not in caplog.text
            caplog.clear()


@pytest.mark.parametrize(
    ("validation", "training", "steps", "is_told"),
    [(0.21, 0.5, 300, True), (0.4, 0.5, 300, False), (0.21, 0.5, 40, False), (0.5, 0.4, 300, False)],
)
def test_held_out_text_that_is_easier_than_the_training_text_is_told(
    train_config, caplog, validation, training, steps, is_told
):
    with open_run(replace(train_config, sample_tokens=0)) as run:
        terminal = Terminal(run)
        progress = run.progress
        for row in range(20):
            loss = training if row >= 15 else 9.0  # long ago it was another
            progress.step = steps - 19 + row if row >= 15 else steps // 2
            terminal.on_row({"loss": loss, "tokens_per_s": 1.0, "tokens": 100}, "")
        progress.best_loss, progress.best_step, progress.best_tokens = validation, steps, 100
        progress.evaluated, progress.metrics, progress.step = steps, {"val_loss": validation, "val_tokens": 100}, steps
        terminal.log_result()
    told = "the held-out text is much easier than the training text, whose loss is 0.50: hold some of each kind out"
    assert (told in caplog.text) == is_told


@pytest.mark.slow
def test_the_log_of_a_run_begins_with_what_was_said_of_its_text(train_config, tmp_path):
    (folder := tmp_path / "texts").mkdir()
    for number in range(12):
        (folder / f"{number:02}.bin").write_bytes(b"\0")
    (folder / "a.txt").write_text("a line of text\n" * 300)
    data = replace(train_config.data, path=str(folder), cache_dir=str(tmp_path / "cache"))
    train(replace(train_config, data=data, max_steps=1))
    lines = [line.partition("] ")[2] for line in (tmp_path / "run/train.log").read_text().splitlines()]
    named = ", ".join(f"{folder / f'{number:02}.bin'} (not text but binary)" for number in range(10))
    assert lines[0].startswith(f"Preparing {folder}: 13 files, ")
    assert lines[1] == f"{LEFT_OUT}: 12, first in {named}."
    assert lines[2].startswith("text  ")


def test_patience_that_no_evaluation_can_exhaust_is_told(train_config):
    """Such a run was said to take fewer steps, perhaps."""
    with open_run(replace(train_config, sample_tokens=0)) as run:
        for steps, interval, patience in ((20, 150, 3), (40, 10, 3), (40, 10, 2), (41, 10, 3), (12, 1, 11)):
            # By hand: the step at which a run ends whose first evaluation is its best.
            scored = [step for step in range(1, steps + 1) if step % interval == 0 or step == steps]
            is_sooner = len(scored) > patience and scored[patience] < steps
            config = replace(run.config, max_steps=steps, eval_interval=interval, patience=patience)
            line = describe(config, run.data, run.model)[-1]
            said = f" (patience={patience} cannot end it sooner, for eval_interval={interval} makes {len(scored)} eval"
            assert (f", fewer if {patience} evaluations in a row" in line, said in line) == (is_sooner, not is_sooner)


def test_bytes_are_advised_where_most_tokens_of_bpe_are_rare(train_config):
    with open_run(replace(train_config, sample_tokens=0)) as run:
        for name, ids in (
            ("bpe", "bpe with 257 ids; for so short a text try tokenizer=byte"),
            ("byte", "byte with 257 ids"),
        ):
            data = replace(
                run.data, tokenizer=SimpleNamespace(name=name, n_vocab=257, decode_bytes=lambda ids: b"a" * len(ids))
            )
            assert describe(run.config, data, run.model)[1].endswith(f", {ids}")
            tuned = replace(run.config, init_from="run")  # its tokenizer is the run's
            assert describe(tuned, data, run.model)[1].endswith(f"{name} with 257 ids")
        # By its bytes, as docs/data.md says, and not by its tokens: here a token has five.
        bpe = SimpleNamespace(name="bpe", n_vocab=257, decode_bytes=lambda ids: b"a" * 5 * len(ids))
        for tokens, advice in ((59_999, "; for so short a text try tokenizer=byte"), (60_000, "")):
            long = replace(data, tokenizer=bpe, train=np.resize(run.data.train, tokens))
            assert describe(run.config, long, run.model)[1].endswith(f", bpe with 257 ids{advice}")


def test_a_line_leaves_its_stream_before_the_bar_is_drawn_again(monkeypatch):
    """A notebook shows its streams as they are flushed: the bar came first, and the line left it behind."""
    shown: list[str] = []

    class Stream(io.StringIO):
        def flush(self) -> None:
            shown.append(self.getvalue())
            self.seek(self.truncate(0))

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Stream())
    bar = Bar(total=4, desc="bar", bar_format="{desc} {n}", mininterval=0)
    shown.clear()
    Bar.write("line")
    order = [text.strip() for text in shown if text.strip()]
    bar.close()
    monkeypatch.undo()
    assert order == ["line", "bar 0"]


@pytest.mark.long
@pytest.mark.slow
def test_a_notebook_without_ipywidgets_is_not_asked_for_them():
    code = """
import sys, types
sys.modules["ipykernel.zmqshell"] = types.ModuleType("ipykernel.zmqshell")
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: None)
sys.modules["ipywidgets"] = None  # not installed
import train
assert "tqdm.auto" in sys.modules  # which would ask
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

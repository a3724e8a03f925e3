"""What a run measures and says of it: rows, the summary, the lines of the terminal."""

import json
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import training.step
from data.config import DataConfig
from model.size import flops_per_token
from runs.checkpoint import read_meta
from runs.metrics import Evaluation, read_metrics
from runs.summary import read_summary
from train import train
from training.device import peak_memory
from training.evaluation import evaluate, first_windows
from training.log import Loggers
from training.start import open_run
from training.terminal import Terminal, describe

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_rows_and_the_summary_say_what_was_spent_and_begin_anew_with_a_new_run(train_config, monkeypatch):
    now, run_dir = [0.0], Path(train_config.run_dir)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    run_dir.mkdir()
    for name in ("metrics.jsonl", "report.jsonl"):  # of a run that was killed before its first checkpoint
        (run_dir / name).write_text('{"step": 7, "left": true}\n')
    with open_run(train_config) as run, Loggers(run) as loggers:
        for step, took in enumerate((1.0, 2.0, 8.0), 1):
            now[0] += took
            run.progress.step = step
            loggers.on_step(loss=1.0, lr=0.1, grad_norm=1.0)
    rows, summary = read_metrics(run_dir / "metrics.jsonl"), read_summary(run_dir)
    assert [(row["tokens"], row["seconds"], row["tokens_per_s"]) for row in rows] == [
        *((128, 1.0, 128.0), (256, 3.0, 64.0), (384, 11.0, 16.0))
    ]
    assert "left" not in (run_dir / "report.jsonl").read_text()
    assert (summary.tokens_per_s, summary.seconds, summary.flops) == (64.0, 11.0, 384 * flops_per_token(run.model))
    assert summary.peak_memory_mb == pytest.approx(peak_memory(torch.device("cpu")) / 1e6, rel=0.2)


def test_skipped_steps_are_counted_in_a_row_and_do_not_keep_the_end_from_being_saved(train_config, monkeypatch, caplog):
    def step(run, number, step=training.step.train_step):
        run.targets_per_step = math.nan if number in (0, 2, 3) else 128
        return step(run, number)

    monkeypatch.setattr(training.step, "train_step", step)
    train(replace(train_config, max_steps=4))
    progress = read_meta(Path(train_config.run_dir) / "checkpoints/last").progress
    assert (progress.step, progress.skipped, progress.skipped_in_a_row, progress.finished) == (4, 3, 2, True)
    caplog.clear()
    train(replace(train_config, max_steps=5, resume=train_config.run_dir))
    assert "changed nothing" not in caplog.text  # which was told before


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


def test_a_task_is_described_and_ends_in_nats_an_answer(train_config, caplog):
    caplog.set_level(logging.INFO, "tinygpt")
    task = DataConfig(source="induction", task=replace(DataConfig().task, vocab_size=8))
    train(replace(train_config, data=task, max_steps=1))
    assert "task      induction: 1 answer in each window of 16 tokens, 8 ids; 512 windows held out" in caplog.text
    assert read_metrics(Path(train_config.run_dir) / "metrics.jsonl")[0]["loss"] == pytest.approx(math.log(8), rel=0.1)
    assert "\nbest validation loss 2." in caplog.text and caplog.text.count("nats/answer") == 2


def test_a_long_validation_text_is_said_to_be_scored_in_part(train_config, monkeypatch):
    with open_run(train_config) as run:
        assert "spread evenly" not in "\n".join(describe(run.config, run.data, run.model))
        monkeypatch.setattr("training.terminal.SCORED_TOKENS", 99)
        assert "(99 of them, spread evenly, at each)" in "\n".join(describe(run.config, run.data, run.model))


def test_an_evaluation_keeps_documents_apart_and_computes_as_training_does(train_config, tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"text": f"text {n}\n"}) + "\n" for n in range(400)))
    data = replace(train_config.data, source="jsonl", path=str(file), val_fraction=0.2, document_mask=True)
    train_config.model = replace(train_config.model, zero_init=False)
    with open_run(replace(train_config, data=data, precision="bf16")) as run:
        whole = torch.autocast("cpu", enabled=False)
        apart, rounded = (evaluate(run.model, run.data, 16, 8, autocast).loss for autocast in (whole, run.autocast))
        joined = evaluate(run.model, replace(run.data, document_mask=False), 16, 8, whole).loss
        assert rounded == pytest.approx(apart, rel=1e-3) and rounded != apart and not math.isclose(joined, apart)
        tokens, starts = first_windows(run.model, run.data)
        assert starts.shape == tokens.shape and tokens.gather(1, starts).eq(run.data.tokenizer.eot_token)[:, -1].all()


def test_metrics_that_the_system_refuses_to_open_are_none(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError("closed")))
    assert read_metrics(tmp_path / "metrics.jsonl") == []

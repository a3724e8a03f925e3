"""The page of a run: what it shows is what happened, after a resume too, and it stays small."""

from __future__ import annotations

import base64
import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from browser import browse, data_of, needs_browser
from test_resume import before_step, stop_at

from model.heads import attention_maps
from pages.runs import heads_of, run_page
from runs.metrics import read_metrics
from train import train
from training.start import start_run
from training.watch.pictures import MAP_BYTES, MAPPED, Plots, is_mapped, repeated_maps


@pytest.fixture(autouse=True)
def _only_pages(monkeypatch):
    for told in ("evaluated", "ended"):
        monkeypatch.setattr(Plots, told, lambda *_: None)


def report(run_dir: str) -> dict:
    return data_of(Path(run_dir) / "report.html")


def test_the_report_holds_what_was_written_and_what_the_heads_did_at_each_evaluation(train_config, monkeypatch):
    live = []
    before_step(monkeypatch, 11, lambda run: live.append(run_page(run.directory)))
    train(train_config)
    assert '"status":"running"' in live[0] and live[0].count('"text":') == 1
    data = report(train_config.run_dir)
    (run,), alone = data["runs"], data["alone"]
    assert run["status"] == "finished" and [point[0] for point in run["curves"]["loss"]] == list(range(1, 21))
    assert [note["step"] for note in alone["samples"]] == [at["step"] for at in alone["heads"]] == [10, 20]
    assert alone["wanted"]["model.n_layer"] == 2 and alone["begun"][0]["machine"]["device"] == "cpu"
    heads = [row for row in read_metrics(Path(train_config.run_dir) / "metrics.jsonl") if "val_loss" in row]
    assert alone["heads"][1]["attention_entropy"] == heads[-1]["attention_entropy"]


def test_maps_of_a_repeated_text_are_the_models_weights(train_config):
    run = start_run(train_config)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.normal_(std=0.3)
    found = repeated_maps(run)
    size = found["size"]
    tokens = [run.data.tokenizer.encode_single_token(text) for text in found["tokens"]]
    assert tokens[: size // 2] == tokens[size // 2 :] and found["heads"] == [2, 2]
    rows, columns = torch.tril_indices(size, size)
    weights = attention_maps(run.model, torch.tensor([tokens]))[..., rows, columns]
    stored = torch.frombuffer(bytearray(base64.b64decode(found["maps"])), dtype=torch.uint8).view(2, 2, -1)
    torch.testing.assert_close((stored / 255) ** 2, weights, atol=0.004, rtol=0)
    run.occupation.close()


@pytest.mark.parametrize("evaluations", [1, 63, 1000, 100_000])
def test_few_evaluations_of_many_are_mapped(evaluations):
    mapped = [number for number in range(1, evaluations + 1) if is_mapped(number)]
    assert mapped[:63] == list(range(1, min(evaluations, 63) + 1))
    assert len(mapped) * MAP_BYTES < MAPPED * MAP_BYTES * (1 + math.log2(max(1, evaluations / MAPPED)))


def test_a_page_of_many_maps_stays_small_and_keeps_the_first_and_the_last(tmp_path):
    notes = [{"step": n, "maps": "A" * 67_000, "size": 26, "heads": [12] * 12, "tokens": []} for n in range(200)]
    kept = [at["step"] for at in heads_of(notes, [])]
    assert kept[0] == 0 and kept[-1] == 199 and 20 < len(kept) * 67_000 / 1e5 <= 30


def test_a_resumed_run_has_the_report_of_one_that_was_not_stopped(train_config, tmp_path, monkeypatch):
    train_config = replace(train_config, max_steps=8, eval_interval=4, checkpoint_interval=4)
    train(train_config)
    stopped = replace(train_config, run_dir=str(tmp_path / "stopped"))
    with monkeypatch.context() as patched:
        stop_at(patched, 5)
        with pytest.raises(SystemExit):
            train(stopped)
    with (tmp_path / "stopped" / "report.jsonl").open("a") as file:
        file.write('{"step": 7, "sample": "of a part that a kill undid"}\n{"st')
    train(replace(stopped, resume=stopped.run_dir))
    whole, parts = report(train_config.run_dir)["alone"], report(stopped.run_dir)["alone"]
    assert (whole["samples"], whole["heads"]) == (parts["samples"], parts["heads"])
    assert [note["step"] for note in parts["begun"]] == [0, 6]


@needs_browser
def test_a_browser_goes_through_the_evaluations_by_keyboard(train_config):
    train_config.sample_prompt = "</script><b>"
    train(train_config)
    script = """
      const press = (where, key) => where.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      $("when").value = 0; $("when").oninput();
      press($("grid").querySelector("button"), "ArrowDown");
      for (let i = 0; i < 2; i++) press($("large"), "ArrowDown");
      press($("grown"), "ArrowRight"); press($("curves"), "End");
      const said = name => $(`${name}-reading`).textContent;
      return {step: $("step").textContent, figures: $("figures").caption.textContent, weight: said("large"),
        grown: said("grown"), curve: said("curves"), samples: $("samples").children.length,
        bold: document.querySelectorAll("b").length, status: $("summary").textContent};
    """
    found = browse(Path(train_config.run_dir) / "report.html", script)
    assert found["step"].startswith("step 10, ") and found["step"].endswith("(1 of 2)")
    assert found["figures"] == "layer 1, head 0, step 10" and found["weight"].endswith("%")
    assert "at step" in found["grown"] and found["curve"].startswith("training: ") and "tokens" in found["curve"]
    assert (found["samples"], found["bold"]) == (2, 0) and found["status"].startswith("finished; ")


def test_the_page_of_a_folder_is_written_again_and_one_without_runs_is_refused(train_config, tmp_path, monkeypatch):
    train(replace(train_config, max_steps=1))
    page = Path(train_config.run_dir) / "report.html"
    page.unlink()
    monkeypatch.setattr(sys, "argv", ["sweeps", train_config.run_dir])
    runpy.run_module("sweeps", run_name="__main__")
    assert data_of(page)["runs"][0]["status"] == "finished"
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("empty", "file", "no"):
        monkeypatch.setattr(sys, "argv", ["sweeps", str(tmp_path / name)])
        with pytest.raises(SystemExit, match=rf"error: .*{name} holds no run \(.*\): give a folder with one"):
            runpy.run_module("sweeps", run_name="__main__")

"""docs/probes.py: known models give known figures; a missing part is named in words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_gpt

from data.config import DataConfig, TokenizerConfig
from data.tokenizer import make_tokenizer
from docs.probes import Probes, main, probe, probe_lines, run_and_text, source_line
from generation.score import ScoringParams
from model.config import GPTConfig
from model.gpt import GPT
from runs.checkpoint import open_checkpoint, save_checkpoint
from training.config import TrainConfig

OFF = ScoringParams(torch.autocast("cpu", enabled=False))
TOKENS = np.random.default_rng(3).integers(0, 61, 700).astype(np.uint32)


def probes(**settings) -> Probes:
    return Probes(random_gpt(**settings), OFF)


def test_the_even_average_looks_back_and_at_the_first_token_as_often_as_chance():
    found = probes(attention="average").induction(61)
    assert found["block"] == 8 and found["score"] == [pytest.approx([sum(1 / (i + 1) for i in range(8, 16)) / 8])] * 2
    heads = probes(attention="average").heads(TOKENS[:48].reshape(3, 16))
    assert heads["first"] == [pytest.approx([sum(1 / (i + 1) for i in range(1, 16)) / 15])] * 2
    assert heads["sink_mass"] == pytest.approx(heads["first"][0][0]) and heads["sink_share"] == 0


def test_a_query_beyond_a_window_has_the_first_token_of_its_window():
    rows = TOKENS[:48].reshape(3, 16)
    heads = probes(attention="average+window/average", attention_window=4).heads(rows)
    near = [1 / min(i + 1, 4) for i in range(1, 16)]
    far = [1 / (i + 1) for i in range(1, 16)]
    assert [layer[0] for layer in heads["first"]] == [pytest.approx(sum(each) / 15) for each in (near, far)]
    assert probes(attention="average+window", attention_window=1).heads(rows)["sink_mass"] == 0


def test_a_query_of_a_later_document_has_that_documents_first_token():
    rows = TOKENS[:48].reshape(3, 16).copy()
    rows[rows == 60] = 0
    rows[:, 5] = 60  # begins a document
    params = OFF._replace(separator=60)
    heads = Probes(random_gpt(attention="average"), params).heads(rows)
    weights = [1 / (i + 1) for length in (5, 11) for i in range(1, length)]
    assert heads["first"] == [pytest.approx([sum(weights) / len(weights)])] * 2
    positions = Probes(random_gpt(), params).by_position(TOKENS)
    induction = probes().induction(61)
    said = [*probe_lines({"heads": heads, "induction": induction, "by_position": positions})]
    assert "a token sees its own document alone" in said[-1] and positions["documents"]
    assert not probes().by_position(TOKENS)["documents"]


@pytest.mark.parametrize(
    "typed, wanted",
    {
        "": (None, None),
        "run": ("run", None),
        "run a.txt": ("run", "a.txt"),
        "run data.path=a.txt": ("run", "a.txt"),
        "data.path=a.txt": (None, "a.txt"),
    }.items(),
)
def test_a_text_may_be_typed_as_the_remedy_for_a_model_without_one_has_it(typed, wanted):
    """An imported model has no validation split: give a text with data.path=..."""
    assert run_and_text(typed.split(), "usage") == wanted


@pytest.mark.parametrize("separator", [0, 30, 60])
def test_no_random_id_is_that_of_endoftext_wherever_it_is_in_the_vocabulary(separator, monkeypatch):
    """0 in SmolLM's: no random id is below it."""
    measured, rows = probes(), []
    monkeypatch.setattr(measured, "nats", lambda read: rows.append(read) or np.ones(read.shape))
    measured.induction(61, separator)
    drawn = {*rows[0].flatten().tolist()}
    assert separator not in drawn and drawn <= {*range(61)} and len(drawn) > 30


def test_the_induction_score_is_the_weight_on_what_followed_the_same_token(monkeypatch):
    measured, L = probes(), 8
    weights = torch.rand(2, 4, 2 * L, 2 * L)

    def by_head(rows, function):
        assert rows.shape == (8, 2 * L) and (rows[:, :L] == rows[:, L:]).all()
        return [function(weights).tolist()]

    monkeypatch.setattr(measured, "by_head", by_head)
    wanted = [[weights[:, head, L + i, i + 1].mean().item() for i in range(L)] for head in range(4)]
    assert measured.induction(61)["score"] == [pytest.approx([sum(each) / L for each in wanted])]


def test_the_loss_by_position_is_that_of_whole_windows_and_goes_sixteen_times_as_far():
    measured = probes()
    found = measured.by_position(TOKENS)
    assert len(found["nats"]) == 256 and found["windows"] == 2
    tokens = torch.from_numpy(TOKENS.astype(np.int64))
    logits = measured.model(torch.stack((tokens[:256], tokens[256:512]))).transpose(1, 2)
    wanted = F.cross_entropy(logits, torch.stack((tokens[1:257], tokens[257:513])), reduction="none").mean(0)
    assert found["nats"] == pytest.approx(wanted.tolist(), rel=1e-4)


def test_learned_positions_end_where_they_end_and_a_state_has_no_scores():
    assert len(probes(position="learned").by_position(TOKENS)["nats"]) == 16
    hybrid = probes(attention="delta/sdpa")
    heads, induction = hybrid.heads(TOKENS[:16].reshape(1, 16)), hybrid.induction(61)
    assert heads["first"][0] is None and len(heads["first"][1]) == 4 and induction["score"][0] is None
    said = [*probe_lines({"heads": heads, "induction": induction})]
    assert said[-1] == "note        layer 1 keeps a state and has no score matrix: its heads are left out"
    states = probes(attention="linear")
    found = {"heads": states.heads(TOKENS[:16].reshape(1, 16)), "induction": states.induction(61)}
    assert found["heads"]["first"] == [None, None]
    assert [line[:12].strip() for line in probe_lines(found)] == ["induction", "note", "note"]


def test_the_summary_names_a_head_as_the_pages_do_and_tells_what_a_task_did_not_teach():
    """A model of data=induction, whose L2 H1 copies, seemed to have no such head: 0.055, layer 1 head 0."""
    induction = {"first_copy": 2.0, "second_copy": 2.0, "block": 8, "score": [[0.1, 0.2], [0.9, 0.3]]}
    figures = {"induction": induction, "heads": {"sink_mass": 0.1, "sink_share": 0.0}}
    said = [*probe_lines(figures)]
    assert said[1].endswith("highest score 0.900, L2 H1") and "its task alone, not repeated ids" in said[-1]
    of_text = figures | {"by_position": {"nats": [1.0] * 16, "trained": 16, "documents": False}}
    assert not any("task" in line for line in probe_lines(of_text))


@pytest.mark.long
@pytest.mark.slow
def test_the_command_writes_figures_into_the_run_and_prints_them(tmp_path):
    sizes = dict(n_layer=1, n_head=2, n_embd=16, block_size=64, vocab_size=257)
    config = TrainConfig(model=GPTConfig(attention="sdpa+gate", position="learned", **sizes))
    tokenizer = make_tokenizer(TokenizerConfig(name="byte"), ())
    save_checkpoint(tmp_path / "run/checkpoints/step_1", model=GPT(config.model), tokenizer=tokenizer, config=config)
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)
    command = [sys.executable, str(Path(__file__).parents[1] / "docs/probes.py"), "run", "text.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "run/checkpoints").glob("step_1.probes.*.json")
    found = json.loads(file.read_text())
    assert [source_line(found), *probe_lines(found)] == done.stdout.splitlines()[:-1]
    again = subprocess.run([*command, "more"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 1 and "error: python docs/probes.py [CHECKPOINT [TEXT]] is wanted" in again.stderr


@pytest.mark.slow
def test_no_document_begins_between_the_two_copies(tmp_path, monkeypatch):
    model, tokenizer = random_gpt(vocab_size=257, block_size=512), make_tokenizer(TokenizerConfig(name="byte"), ())
    save_checkpoint(tmp_path / "saved", model=model, tokenizer=tokenizer, config=TrainConfig(model=model.config))
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)
    read, nats = [], Probes.nats
    monkeypatch.setattr(Probes, "nats", lambda self, rows: read.append(rows) or nats(self, rows))
    monkeypatch.setattr("docs.probes.FARTHEST", 1)
    probe(open_checkpoint(str(tmp_path / "saved")), OFF, str(tmp_path / "text.txt"))
    assert read[0].shape == (8, 512) and read[0].max() == 255


def test_a_model_of_a_task_is_probed_on_its_windows(tmp_path):
    model = GPTConfig(n_layer=1, n_embd=16, block_size=32, vocab_size=1024)
    config = TrainConfig(model=model, data=DataConfig(source="recall"))
    save_checkpoint(tmp_path / "saved", model=GPT(config.model), tokenizer=None, config=config)
    found = probe(open_checkpoint(str(tmp_path / "saved")), OFF)
    assert found.keys() == {"task", "induction", "heads"}


@pytest.mark.slow
def test_figures_that_cannot_be_written_are_printed(tmp_path, monkeypatch, capsys):
    model = random_gpt(vocab_size=257)
    encoding = make_tokenizer(TokenizerConfig(name="byte"), ())
    save_checkpoint(tmp_path / "step_1", model=model, tokenizer=encoding, config=TrainConfig(model=model.config))
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)
    denied = PermissionError(13, "Permission denied", "step_1.probes.json")
    monkeypatch.setattr("docs.probes.replace_text", mock.Mock(side_effect=denied))
    with pytest.raises(PermissionError):
        main(str(tmp_path / "step_1"), str(tmp_path / "text.txt"))
    assert "nats/token in 8 random ids" in capsys.readouterr().out

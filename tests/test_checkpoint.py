"""Checkpoints: complete or absent, readable without running code, refused in a sentence when damaged."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from conftest import random_gpt
from safetensors.torch import load_file, save_file

import data.files
from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from errors import CheckpointError
from runs import checkpoint as checkpoints
from runs.checkpoint import (
    describe_file,
    find_checkpoints,
    link_checkpoint,
    load_checkpoint,
    load_state,
    meta_checksum,
    open_checkpoint,
    remove_checkpoints,
    save_checkpoint,
    verify_checkpoint,
)
from training.config import TrainConfig


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    directory = tmp_path / "run" / "checkpoints" / "step_5"
    save(directory, step=5)
    link_checkpoint(directory, "last")
    link_checkpoint(directory, "best")
    return directory


def save(directory: Path, step: int, metrics: dict | None = None, **settings) -> torch.nn.Module:
    model = random_gpt(seed=step, vocab_size=257, **settings)
    content = dict(tokenizer=make_tokenizer(TokenizerConfig(name="byte"), []), config=TrainConfig(model=model.config))
    state = {"optimizers": {"lm_head.weight.exp_avg": torch.randn(257, 32)}}
    save_checkpoint(directory, model=model, state=state, step=step, metrics=metrics or {"val_loss": 1.5}, **content)
    return model


@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": True, "position": "learned", "bias": True}], ids=str)
def test_what_is_saved_is_what_is_loaded(tmp_path, settings):
    model = save(tmp_path / "step_1", step=1, **settings)
    loaded = load_checkpoint(tmp_path / "step_1")
    assert loaded.model.config == model.config and not loaded.model.training
    assert loaded.meta["step"] == 1 and loaded.meta["metrics"] == {"val_loss": 1.5}
    tokens = torch.randint(257, (2, 16))
    assert torch.equal(loaded.model(tokens), model(tokens))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode_ordinary("naïve → 漢字")) == "naïve → 漢字"


FAILING = {"save_file": checkpoints, "save_tokenizer": checkpoints, "save": torch, "flush_to_disk": data.files}
FAILING |= {"rename": Path, "replace": Path}


@pytest.mark.parametrize("write", FAILING)
@pytest.mark.parametrize("step", [5, 6])
def test_a_save_that_fails_leaves_what_was_there_and_nothing_else(saved, monkeypatch, write, step):
    def fail(*arguments):
        if write == "rename" and ".replaced" in str(arguments[0]):
            return original(*arguments)  # back to its place
        raise OSError(28, "No space left on device")

    if (step, write) == (6, "rename"):
        pytest.skip("nothing is there to be set aside")
    before = sorted(saved.parent.iterdir())
    original = getattr(FAILING[write], write)
    monkeypatch.setattr(FAILING[write], write, fail)
    with pytest.raises(OSError, match="No space left"):
        save(saved.with_name(f"step_{step}"), step=step, metrics={"val_loss": 0.5})
    monkeypatch.undo()
    assert sorted(saved.parent.iterdir()) == before
    assert open_checkpoint(str(saved.parent.parent)).meta["metrics"] == {"val_loss": 1.5}
    assert verify_checkpoint(saved)["step"] == 5


def test_a_checkpoint_is_replaced_as_a_whole(saved):
    save(saved, step=5, metrics={"val_loss": 0.5})
    assert verify_checkpoint(saved)["metrics"] == {"val_loss": 0.5}
    assert sorted(path.name for path in saved.parent.iterdir()) == ["best", "last", "step_5"]


def test_the_latest_are_kept_with_their_best_and_what_last_and_best_point_to(saved, tmp_path):
    for step in (6, 7, 8, 9, 10):
        save(saved.with_name(f"step_{step}"), step=step)
    link_checkpoint(saved.with_name("step_10"), "last")
    rewrite_meta(saved.with_name("step_9"), progress={"best_step": 7})  # a run that goes back there has it still
    remove_checkpoints(saved.parent, keep=2)
    left = sorted(path.name for path in saved.parent.iterdir())
    assert left == ["best", "last", "step_10", "step_5", "step_7", "step_9"]
    (tmp_path / "run").rename(tmp_path / "moved")
    assert open_checkpoint(str(tmp_path / "moved")).meta["step"] == 5


def test_the_newest_run_is_found(tmp_path, monkeypatch):
    for age, name in enumerate(("old/1", "new/2")):
        directory = tmp_path / "outputs" / name / "checkpoints" / "step_1"
        save(directory, step=1)
        link_checkpoint(directory, "last")
        os.utime(directory.parent / "last", (10 * age, 10 * age), follow_symlinks=False)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoints(None)[0] == tmp_path / "outputs/new/2/checkpoints/step_1"
    monkeypatch.chdir(tmp_path / "outputs")
    with pytest.raises(CheckpointError, match=r"python train\.py"):
        find_checkpoints(None)


def test_a_pickle_in_place_of_the_weights_or_the_tokenizer_runs_nothing(saved, tmp_path):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for name in ("model.safetensors", "tokenizer.json", "meta.json"):
        original = (saved / name).read_bytes()
        (saved / name).write_bytes(pickle.dumps(Payload()))
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(saved)
        (saved / name).write_bytes(original)
    torch.save(Payload(), saved / "state.pt")
    with pytest.raises(CheckpointError, match=r"damaged .*more than data") as refused:
        load_state(saved)
    assert "weights_only" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def rewrite_meta(saved: Path, **changes) -> None:
    """What a forger would do: change meta.json and make its checksum fit."""
    write_meta(saved, json.loads((saved / "meta.json").read_text()) | changes)


def write_meta(saved: Path, meta: dict) -> None:
    (saved / "meta.json").write_text(json.dumps(meta | {"checksum": meta_checksum(meta)}))


@pytest.mark.parametrize("name", ["/etc/passwd", "../../outside.txt", "state.pt/../../../outside.txt"])
def test_a_file_name_that_leads_out_of_the_checkpoint_is_refused(saved, name):
    (saved.parent.parent / "outside.txt").write_text("x")
    files = json.loads((saved / "meta.json").read_text())["files"]
    rewrite_meta(saved, files=files | {name: {"bytes": 1, "sha256": "0"}})
    before = sorted(saved.parent.parent.rglob("*"))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        verify_checkpoint(saved)
    assert sorted(saved.parent.parent.rglob("*")) == before


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "bit flipped", "another"])
def test_a_damaged_file_is_refused_in_a_sentence(saved, name, damage):
    file = saved / name
    if damage == "missing":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif damage == "bit flipped":
        content = bytearray(file.read_bytes())
        content[-20] ^= 1
        file.write_bytes(content)
    else:
        file.write_text('{"format_version": 1}')
    for read in (verify_checkpoint, load_checkpoint) if name != "state.pt" else (verify_checkpoint,):
        with pytest.raises(CheckpointError, match=r"checkpoint=.*(damaged|not a checkpoint)") as refused:
            read(saved)
        assert "\n" not in str(refused.value)


def test_the_state_is_read_for_resuming_only(saved):
    (saved / "state.pt").unlink()
    assert load_checkpoint(saved).meta["step"] == 5


FORGERIES = {
    "missing": lambda weights: weights.pop("final_norm.weight"),
    "extra": lambda weights: weights.update(extra=torch.zeros(3)),
    "renamed": lambda weights: weights.update(extra=weights.pop("final_norm.weight")),
    "short": lambda weights: weights.update({"lm_head.weight": torch.zeros(3, 32)}),
    "turned": lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"].t().contiguous()}),
    "integers": lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"].long()}),
    "empty": dict.clear,
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_weights_that_are_not_those_of_the_settings_are_refused_naming_the_difference(saved, forgery):
    weights = load_file(saved / "model.safetensors")
    FORGERIES[forgery](weights)
    save_file(weights, saved / "model.safetensors")
    files = json.loads((saved / "meta.json").read_text())["files"]
    rewrite_meta(saved, files=files | {"model.safetensors": describe_file(saved / "model.safetensors")})
    reason = r"(model\.safetensors has |the weight lm_head|the weight extra|the weight final_norm)"
    with pytest.raises(CheckpointError, match=rf"is damaged or incomplete \({reason}"):
        load_checkpoint(saved)


@pytest.mark.parametrize("changes", [{"n_layer": 10**9}, {"n_embd": 10**7}, {"vocab_size": 10**9}], ids=str)
def test_sizes_that_the_weights_do_not_have_are_refused_before_anything_is_built(saved, monkeypatch, changes):
    monkeypatch.setattr(checkpoints, "GPT", None)
    meta = json.loads((saved / "meta.json").read_text())
    meta["config"]["model"] |= changes
    write_meta(saved, meta)
    with pytest.raises(CheckpointError, match=r"tensors of .* numbers, where its settings ask for"):
        load_checkpoint(saved)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(saved):
    tokenizer = json.loads((saved / "tokenizer.json").read_text())
    (saved / "tokenizer.json").write_text(json.dumps(tokenizer | {"special_tokens": {"<|endoftext|>": 10**12}}))
    files = json.loads((saved / "meta.json").read_text())["files"]
    rewrite_meta(saved, files=files | {"tokenizer.json": describe_file(saved / "tokenizer.json")})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_checkpoint(saved)


def test_another_format_and_settings_of_another_version_are_refused(saved):
    meta = json.loads((saved / "meta.json").read_text())
    rewrite_meta(saved, format_version=99)
    with pytest.raises(CheckpointError, match=r"format 99, .*: update tinygpt"):
        load_checkpoint(saved)
    rewrite_meta(saved, format_version=2)  # in which lm_head was called head
    with pytest.raises(CheckpointError, match=r"format 2, .*: use the tinygpt that wrote it"):
        load_checkpoint(saved)
    meta["config"]["model"]["_target_"] = "os.system"
    rewrite_meta(saved, format_version=meta["format_version"], config=meta["config"])
    with pytest.raises(CheckpointError, match="_target_"):
        load_checkpoint(saved)


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        open_checkpoint(str(tmp_path))

"""A checkpoint is whole or absent, runs no code when read, and is refused if it was changed."""

import errno
import json
import os
import pickle
import random
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiktoken
import torch
from conftest import random_gpt
from safetensors.torch import load_file, save_file

import common.files
import runs.checkpoint as checkpoints
from common.errors import CheckpointError, HuggingFaceError, SettingsError
from common.files import locked
from common.text import flat
from data.config import DataConfig, TokenizerConfig
from data.tokenizer import make_tokenizer
from generation.score import learned_task
from interop import find_folder
from model.config import GPTConfig
from model.size import count_weights
from model.weights import plain_weights
from runs.checkpoint import (
    Checkpoint,
    Meta,
    Progress,
    describe_file,
    find_checkpoints,
    load_checkpoint,
    meta_checksum,
    open_checkpoint,
    read_meta,
    save_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from runs.checkpointer import AsyncCheckpointer, remove_old
from runs.resume import newest, settings_to_go_on
from training.config import TrainConfig
from training.pretrained import pretrained_config

BYTE = make_tokenizer(TokenizerConfig(name="byte"), ())
MEMBERS = ("model.safetensors", "optimizer.safetensors", "tokenizer.json", "meta.json")


def save(directory: Path, step: int, best_step: int = 0, **settings) -> torch.nn.Module:
    """Write a checkpoint of a random model, as a run's AsyncCheckpointer does."""
    model = random_gpt(seed=step, vocab_size=257, **settings)
    meta = Meta(asdict(TrainConfig(model=model.config)), Progress(step, metrics={"val_loss": 1.5}, best_step=best_step))
    write_checkpoint(directory, plain_weights(model), {"lm_head.weight.exp_avg": torch.randn(257, 32)}, meta, BYTE)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    directory = tmp_path / "run" / "checkpoints" / "step_5"
    save(directory, step=5)
    AsyncCheckpointer(directory.parent, 2, BYTE).link(5, 5)
    return directory


def forge(saved: Path, **changes) -> None:
    """What a forger would do: change meta.json, or members of it, and make its checksum fit."""
    meta = json.loads((saved / "meta.json").read_text())
    for name, value in changes.items():
        meta[name] = meta[name] | value if isinstance(value, dict) else value
    del meta["checksum"]
    (saved / "meta.json").write_text(json.dumps(meta | {"checksum": meta_checksum(meta)}))


def forge_file(saved: Path, name: str) -> None:
    """Let a file that was changed be the one that meta.json describes."""
    forge(saved, files={name: describe_file(saved / name)})


@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": True, "position": "learned", "bias": True}], ids=str)
def test_what_is_saved_is_what_is_loaded_under_plain_names(tmp_path, settings):
    model = save(tmp_path / "step_1", step=1, **settings)
    loaded = load_checkpoint(tmp_path / "step_1")
    assert loaded.model.config == model.config and not loaded.model.training
    assert loaded.meta == read_meta(tmp_path / "step_1") and loaded.meta.progress.metrics == {"val_loss": 1.5}
    tokens = torch.randint(257, (2, 16))
    assert torch.equal(loaded.model(tokens), model(tokens))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode_ordinary("naïve → 漢字")) == "naïve → 漢字"
    assert sorted(path.name for path in (tmp_path / "step_1").iterdir()) == sorted(MEMBERS)


def test_the_same_step_again_writes_meta_json_alone(saved):
    before = {name: (saved / name).stat() for name in MEMBERS}
    save(saved, step=5, best_step=5)
    after = {name: (saved / name).stat() for name in MEMBERS}
    assert [name for name in MEMBERS if before[name] != after[name]] == ["meta.json"]
    assert verify_checkpoint(saved).progress.best_step == 5


OWNERS = {"save_file": checkpoints, "save_tokenizer": checkpoints, "flush_to_disk": common.files, "replace": Path}


@pytest.mark.parametrize(("step", "write"), [*((6, write) for write in OWNERS), (5, "flush_to_disk"), (5, "replace")])
def test_a_save_that_fails_leaves_what_was_there_and_nothing_else(saved, monkeypatch, step, write):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = sorted(saved.parent.iterdir())
    monkeypatch.setattr(OWNERS[write], write, fail)
    with pytest.raises(OSError, match="No space left"):
        save(saved.with_name(f"step_{step}"), step=step, best_step=5)
    monkeypatch.undo()
    assert sorted(saved.parent.iterdir()) == before
    assert sorted(path.name for path in saved.iterdir()) == sorted(MEMBERS)
    assert verify_checkpoint(saved).progress == Progress(5, metrics={"val_loss": 1.5})


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_its_files_are_readable_as_the_umask_says(tmp_path, umask):
    before = os.umask(umask)
    try:
        save(tmp_path / "step_1", step=1)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "step_1").iterdir()} == {0o666 & ~umask}


def test_the_latest_are_kept_and_what_last_and_best_point_to(saved, tmp_path):
    for step in (6, 7, 8, 9, 10):
        save(saved.with_name(f"step_{step}"), step=step)
    (saved.parent / "step_11.copy").mkdir()  # a person's, and none of ours
    AsyncCheckpointer(saved.parent, 2, BYTE).link(10, 5)
    remove_old(saved.parent, keep=2)
    left = sorted(path.name for path in saved.parent.iterdir())
    assert left == ["best", "last", "step_10", "step_11.copy", "step_5", "step_9"]
    (tmp_path / "run").rename(tmp_path / "moved")
    assert open_checkpoint(str(tmp_path / "moved")).meta.progress.step == 5
    (tmp_path / "moved/checkpoints/best").unlink()
    assert open_checkpoint(str(tmp_path / "moved")).meta.progress.step == 10


def test_a_copy_that_has_lost_its_links_has_the_same_best_checkpoint(saved):
    folder = saved.parent
    save(folder / "step_10", step=10, best_step=5)
    AsyncCheckpointer(folder, 2, BYTE).link(10, 5)
    linked = find_checkpoints(str(folder.parent))
    for name in ("best", "last"):
        (folder / name).unlink()
    assert find_checkpoints(str(folder.parent)) == linked == [saved, folder / "step_10"]
    for name in ("best", "last"):
        (folder / name).mkdir()  # as some archives have a link
    assert open_checkpoint(str(folder.parent)).meta.progress.step == 5
    for name in ("best", "last"):
        (folder / name).rmdir()
    save(folder / "step_12", step=12, best_step=11)  # which is gone
    assert open_checkpoint(str(folder.parent)).meta.progress.step == 12


def test_the_newest_run_is_found_and_what_is_no_checkpoint_named(tmp_path, monkeypatch):
    for age, name in enumerate(("outputs/old/1", "multirun/day/2", "outputs/begun/3")):
        save(tmp_path / name / "checkpoints" / "step_1", step=1)
        os.utime(tmp_path / name / "checkpoints", (10 * age, 10 * age))
    shutil.rmtree(tmp_path / "outputs/begun/3/checkpoints/step_1")
    os.utime(tmp_path / "outputs/begun/3/checkpoints", (90, 90))
    monkeypatch.chdir(tmp_path)
    assert find_checkpoints(None) == [tmp_path / "multirun/day/2/checkpoints/step_1"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_checkpoints("~/multirun/day/2") == find_checkpoints(None)
    nothings = {
        "": "does not exist",
        "nowhere": r"does not exist: give a run directory or a checkpoint in it\.$",
        "hf:gpt2": "does not exist: .*; export.py import_from= makes one of a model of Hugging Face's",
        "openai-community/gpt2": "does not exist: .*; export.py import_from= makes one",
        str(tmp_path): "is not a checkpoint",
        str(tmp_path / "outputs/begun/3"): "has no checkpoint, for it ended before its first one or they were removed",
        str(tmp_path / "multirun/day"): r"is a folder of several runs: .* job of \S*day.leaderboard.csv names",
    }
    (tmp_path / "multirun/day/leaderboard.csv").touch()
    for where, said in nothings.items():
        with pytest.raises(CheckpointError, match=f"checkpoint={where} {said}"):
            open_checkpoint(where)
    with (
        locked(tmp_path / "outputs/begun/3/.lock"),
        pytest.raises(CheckpointError, match="no checkpoint yet: wait for"),
    ):
        open_checkpoint(str(tmp_path / "outputs/begun/3"))  # which is still going on
    with pytest.raises(CheckpointError, match="begun.3: has no checkpoint, for .* removed: start a new run"):
        newest(tmp_path / "outputs/begun/3", read_meta)
    monkeypatch.chdir(tmp_path / "outputs")
    with pytest.raises(
        CheckpointError, match=r"no run with a checkpoint under outputs/ .*: train one with `python .*, or"
    ):
        find_checkpoints(None)


def damages(content: bytes, count: int) -> Iterator[bytes | None]:
    """A file's content with some bytes flipped, cut, replaced or all of it gone."""
    rng = random.Random(len(content))
    yield from (None, b"", b"{}", b"\0" * len(content))
    for number in range(count - 4):
        place = rng.randrange(len(content.rstrip(b"\n")))  # a line end that is cut changes nothing
        yield content[:place] + (bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]) * (number % 2)


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("count", [8, pytest.param(80, marks=pytest.mark.slow)])
def test_a_file_that_is_not_what_was_written_is_refused_in_a_sentence(saved, member, count):
    content = (saved / member).read_bytes()
    for number, damaged in enumerate(damages(content, count)):
        (saved / member).unlink() if damaged is None else (saved / member).write_bytes(damaged)
        for read in (verify_checkpoint, *[load_checkpoint] * (member != "optimizer.safetensors")):
            with pytest.raises(CheckpointError, match=r"checkpoint=.*(damaged|not a checkpoint)") as refused:
                read(saved)
            assert "\n" not in str(refused.value), number
        (saved / member).write_bytes(content)
    (saved / "optimizer.safetensors").unlink()
    assert load_checkpoint(saved).meta.progress.step == 5  # what is for resuming is not read for use


def test_a_pickle_in_place_of_any_file_runs_nothing(saved, tmp_path):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for member in ("model.safetensors", "tokenizer.json", "meta.json"):  # test_resume.py has the optimizer's state
        shutil.copytree(saved, forged := tmp_path / member)
        (forged / member).write_bytes(pickle.dumps(Payload()))
        if member != "meta.json":
            forge_file(forged, member)
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(forged)
    assert not (tmp_path / "ran").exists()


FORGERIES = {
    "missing": lambda weights: weights.pop("final_norm.weight"),
    "renamed": lambda weights: weights.update(extra=weights.pop("final_norm.weight")),
    "short": lambda weights: weights.update({"lm_head.weight": torch.zeros(3, 32)}),
    "turned": lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"].t().contiguous()}),
    "nan": lambda weights: weights["final_norm.weight"].fill_(torch.nan),
    "infinite": lambda weights: weights["lm_head.weight"][3, 4].fill_(torch.inf),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_weights_that_are_not_those_of_the_settings_or_not_finite_are_refused_naming_one(saved, forgery):
    weights = load_file(saved / "model.safetensors")
    FORGERIES[forgery](weights)
    save_file(weights, saved / "model.safetensors")
    forge_file(saved, "model.safetensors")
    reason = r"(the weight (final_norm|lm_head|extra)|its (final_norm|lm_head)\S+ is not finite)"
    with pytest.raises(CheckpointError, match=rf"is damaged or incomplete \({reason}"):
        load_checkpoint(saved)


FORGED = [  # a part of meta.json, and what is said of it
    ({"format_version": 99}, r"format 99; this one reads 4: update tinygpt"),
    ({"format_version": 3}, r"format 3; this one reads 4: use tinygpt 0\.1, tag v0\.1\.0"),
    ({"format_version": "x"}, "damaged"),
    ({"config": {"model": {"_target_": "os.system"}}}, "_target_"),
    (
        {"config": {"model": {"warp": 9}}},
        r"has model\.warp, unknown here; tinygpt \? wrote it: read it with that version",
    ),
    ({"config": {"model": {"norm": "dyt"}}}, r"has model\.norm=dyt, unknown here; tinygpt \? wrote it"),
    ({"config": {"model": {"norm": "d y"}}}, r"has model\.norm=d y, unknown here; tinygpt \? wrote it"),
    ({"config": {"model": {"ngrams": [1]}}}, r"has each of model\.ngrams=1, unknown here; tinygpt \? wrote it"),
    # Each value is known, but not the two together.
    ({"config": {"model": {"n_head": 3}}}, r": model\.n_head=3 does not divide model\.n_embd=\d+; tinygpt \? wrote it"),
    ({"progress": []}, "damaged"),
    ({"progress": {"nothing": 1}}, r"has progress\.nothing, unknown here; tinygpt \? wrote it"),
    *(({"files": {name: {"bytes": 1, "sha256": "0"}}}, "missing, or does not match") for name in ("/etc/passwd", "..")),
]


@pytest.mark.parametrize(
    ("changes", "said"), FORGED, ids=[str(changes)[:50].replace("/", "|") for changes, _ in FORGED]
)
def test_a_meta_json_that_says_what_cannot_be_is_refused_before_a_model_is_built(saved, monkeypatch, changes, said):
    if "model" in (changes.get("config") or ()):
        changes = {"config": {"model": read_meta(saved).config["model"] | changes["config"]["model"]}}
    forge(saved, **changes)
    monkeypatch.setattr(checkpoints, "GPT", None)
    with pytest.raises(CheckpointError, match=said.replace("^", r"\^")) as refused:
        (verify_checkpoint if "files" in changes else load_checkpoint)(saved)
    assert "\n" not in str(refused.value)


def test_a_checkpoint_that_learned_text_and_has_no_tokenizer_is_damaged(saved):
    forge(saved, config={"data": {"source": "text", "path": "x"}})
    meta = json.loads((saved / "meta.json").read_text()) | {"files": {}}
    del meta["checksum"]
    (saved / "meta.json").write_text(json.dumps(meta | {"checksum": meta_checksum(meta)}))
    with pytest.raises(CheckpointError, match=r"incomplete .it has no 'tokenizer.json'"):
        learned_task(load_checkpoint(saved))


def test_layers_beyond_64_bits_are_counted():
    assert count_weights(GPTConfig(n_layer=10**20, vocab_size=64)) > 10**20


def test_a_whole_number_that_no_tensor_holds_may_stand_for_a_float_but_none_beyond_floats(saved):
    settings = read_meta(saved).config["model"]
    forge(saved, config={"model": settings | {"rope_theta": 10**30}})
    assert load_checkpoint(saved).model(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()
    forge(saved, config={"model": settings | {"rope_theta": 10**400}})
    with pytest.raises(CheckpointError, match="rope_theta"):
        load_checkpoint(saved)


def test_the_text_of_a_run_from_before_there_were_separators_is_not_divided(saved):
    assert read_meta(saved).config["data"]["separator"] == "<|endoftext|>"
    data = {name: value for name, value in read_meta(saved).config["data"].items() if name != "separator"}
    forge(saved, config={"data": data})
    assert read_meta(saved).config["data"]["separator"] is None


def test_settings_of_older_runs_that_are_gone_are_left_out(saved):
    forge(saved, config={"tensorboard": True, "distributed": "hsdp", "plan": {"devices": 2}})
    config = read_meta(saved).config
    assert not {"tensorboard", "distributed", "plan"} & config.keys()


def test_a_damaged_checkpoint_of_a_run_is_passed_over_saying_so_but_not_one_that_is_named(saved, caplog):
    save(saved.with_name("step_6"), step=6)
    (saved / "model.safetensors").write_bytes(b"")
    assert open_checkpoint(str(saved.parent.parent)).meta.progress.step == 6
    assert "model.safetensors is missing, or does not match its checksum); trying step_6." in caplog.text
    with pytest.raises(CheckpointError, match=r"step_5 is damaged .*: use another one"):
        open_checkpoint(str(saved))
    (saved.with_name("step_6") / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"is damaged .*: no checkpoint of its run is whole, so remove or"):
        open_checkpoint(str(saved.parent.parent))


def test_a_setting_that_is_unknown_here_is_named_with_the_version_that_wrote_it_and_what_opened_it(saved):
    forge(saved, computed_on={"tinygpt": "9.1"}, config={"model": read_meta(saved).config["model"] | {"warp": 9}})
    run, said = saved.parent.parent, r"has model\.warp, unknown here; tinygpt 9\.1 wrote it: .*update tinygpt"
    known = flat(asdict(TrainConfig()))
    with pytest.raises(CheckpointError, match=rf"^resume={run} {said}"):
        settings_to_go_on(run, known)
    with pytest.raises(CheckpointError, match=rf"^checkpoint={saved} {said}"):
        open_checkpoint(str(run))
    with pytest.raises(CheckpointError, match=rf"^init_from={run}: {saved} {said}"):
        pretrained_config(str(run))


def test_a_file_in_place_of_a_checkpoint_is_refused_unopened_with_what_to_give(tmp_path):
    class Trap:
        def __reduce__(self):
            return (exec, ("raise SystemExit('it ran')",))

    (tmp_path / "ckpt.pt").write_bytes(pickle.dumps(Trap()))
    for read in (load_checkpoint, find_folder):
        with pytest.raises(
            (CheckpointError, HuggingFaceError), match=r"ckpt\.pt is a file: .*is not read: keep .*save_checkpoint"
        ) as found:
            read(tmp_path / "ckpt.pt" if read is load_checkpoint else str(tmp_path / "ckpt.pt"))
        assert "\n" not in str(found.value)
    model = random_gpt(vocab_size=257)
    save_checkpoint(tmp_path / "step_1", model=model, tokenizer=None, config=TrainConfig(model=model.config))
    with pytest.raises(CheckpointError, match=rf"give its folder, {re.escape(str(tmp_path / 'step_1'))}"):
        load_checkpoint(tmp_path / "step_1" / "model.safetensors")
    load_checkpoint(tmp_path / "step_1")


@pytest.mark.parametrize("settings", ["of a run", "of a checkpoint", "of another model"])
def test_a_changed_model_is_kept_by_its_own_settings_in_a_new_directory(settings, tmp_path):
    """The mean of two models' weights, whose logits before the softmax are not the mean of theirs."""
    first, other = random_gpt(vocab_size=257), random_gpt(seed=1, vocab_size=257)
    save_checkpoint(str(tmp_path / "one"), model=first, tokenizer=None, config=TrainConfig(model=first.config))
    config = {
        "of a run": TrainConfig(model=first.config),
        "of a checkpoint": load_checkpoint(tmp_path / "one").meta.config,
        "of another model": TrainConfig(model=GPTConfig(n_layer=7)),
    }[settings]
    mean = {name: (weight + other.state_dict()[name]) / 2 for name, weight in first.state_dict().items()}
    first.load_state_dict(mean)
    save_checkpoint(tmp_path / "mean", model=first, tokenizer=None, config=config)
    read = load_checkpoint(tmp_path / "mean").model
    assert read.config == first.config
    assert all(torch.equal(weight, mean[name]) for name, weight in read.state_dict().items())

    with pytest.raises(SettingsError, match=r"mean exists already: choose another name, or remove it first"):
        save_checkpoint(tmp_path / "mean", model=other, tokenizer=None, config=config)
    assert torch.equal(load_checkpoint(tmp_path / "mean").model.lm_head.weight, mean["lm_head.weight"])


def test_a_config_that_is_no_settings_of_a_run_is_refused_before_anything_is_written(tmp_path):
    """Meta is a dataclass too: a checkpoint with it could not be read, "damaged or incomplete"."""
    model = random_gpt(vocab_size=257)
    save_checkpoint(tmp_path / "one", model=model, tokenizer=None, config=TrainConfig(model=model.config))
    for config in (load_checkpoint(tmp_path / "one").meta, model.config, TrainConfig, None, {}):
        with pytest.raises(ValueError, match=r"no settings of a run, but \w+: pass TrainConfig\(model=model.config\)"):
            save_checkpoint(tmp_path / "two", model=model, tokenizer=None, config=config)
        assert not (tmp_path / "two").exists()


BYTES = {bytes([number]): number for number in range(256)}
END = {"<|endoftext|>": 256}
NOT_KEPT = {  # encodings that a person may have made: the arguments, and the fault
    "another end": ({"special_tokens": {"<|end|>": 256}}, r"\(it has no '<.endoftext.>'\): give one with the"),
    "no end": ({"special_tokens": {}}, "it has no '<.endoftext.>'"),
    "an end with a letter's id": ({"special_tokens": {"<|endoftext|>": 97}}, "has a token's id"),
    "ASCII": ({"mergeable_ranks": {token: rank for token, rank in BYTES.items() if rank < 128}}, "cannot be kept"),
    "words alone": ({"pat_str": r"\w+"}, r"\(it loses text\): .* whose pattern leaves out no letter"),
    "too many ids": ({"mergeable_ranks": BYTES | {b"th": 257}}, "the tokenizer has 258 ids, and the model 257: give"),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_a_tokenizer_with_which_no_checkpoint_would_open_is_refused_before_it_is_written(name, tmp_path):
    model = random_gpt(vocab_size=257)
    arguments = {"pat_str": r"\w+|\W+", "mergeable_ranks": BYTES, "special_tokens": END}
    whole = tiktoken.Encoding("whole", **arguments)
    save_checkpoint(tmp_path / "whole", model=model, tokenizer=whole, config=TrainConfig(model=model.config))
    assert open_checkpoint(tmp_path / "whole").tokenizer.encode("the cat") == [*b"the cat"]
    changes, fault = NOT_KEPT[name]
    with pytest.raises(SettingsError, match=fault):
        made = tiktoken.Encoding("made", **arguments | changes)
        save_checkpoint(tmp_path / "made", model=model, tokenizer=made, config=TrainConfig(model=model.config))
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.parametrize("tie", [False, True])
def test_a_model_that_no_checkpoint_would_open_is_refused_before_it_is_written(tie, tmp_path):
    model = random_gpt(vocab_size=257, tie_embeddings=tie)
    config = TrainConfig(model=model.config)
    with pytest.raises(SettingsError, match=r"of type object, and a checkpoint keeps a tiktoken\.Encoding: make one"):
        save_checkpoint(tmp_path / "made", model=model, tokenizer=object(), config=config)
    model.token_embedding.weight.data[3] = torch.nan
    with pytest.raises(SettingsError, match=r"token_embedding\.weight is not finite, .*: torch\.save"):
        save_checkpoint(tmp_path / "made", model=model, tokenizer=BYTE, config=config)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_every_type_open_in_float32(dtype, tmp_path):
    model = random_gpt(vocab_size=257).to(dtype)
    save_checkpoint(tmp_path / "made", model=model, tokenizer=BYTE, config=TrainConfig(model=model.config))
    opened = open_checkpoint(tmp_path / "made").model
    assert all(torch.equal(a.float(), b) for a, b in zip(model.parameters(), opened.parameters(), strict=True))


@pytest.mark.parametrize(("code", "remedy"), [(errno.ENOSPC, "make room"), (errno.EACCES, "mend that")])
def test_a_last_save_that_fails_is_told_with_its_remedy_and_not_to_be_followed_by_training(
    tmp_path, monkeypatch, caplog, code, remedy
):
    """Room was to be made in a folder without permission."""
    monkeypatch.setattr("runs.checkpointer.write_checkpoint", Mock(side_effect=OSError(code, os.strerror(code))))
    checkpointer = AsyncCheckpointer(tmp_path, 2, None)
    for ends in (False, True):
        checkpointer.save({}, {}, Meta({}), ends=ends)
        checkpointer.wait()
        assert ("training goes on, and there" in caplog.messages[-1]) == (not ends)
    with pytest.raises(CheckpointError, match=f": {remedy}, then start a new run"):
        checkpointer.finish()


def test_a_checkpoint_is_written_without_a_thread_where_a_limit_allows_none(tmp_path, monkeypatch):
    """The save was said to need more memory than there is, by a smaller model."""
    monkeypatch.setattr("threading.Thread.start", Mock(side_effect=RuntimeError("can't start new thread")))
    checkpointer = AsyncCheckpointer(tmp_path, 2, None)
    for step in (4, 5):
        checkpointer.save({"w": torch.ones(1)}, {}, Meta({}, Progress(step=step)))
    checkpointer.finish()
    assert verify_checkpoint(tmp_path / "step_5").progress.step == 5 and checkpointer.last() == tmp_path / "step_5"


def test_the_command_that_scores_a_task_is_quoted(tmp_path):
    meta = Meta(asdict(TrainConfig(data=DataConfig(source="copy"))))
    with pytest.raises(CheckpointError, match=r"eval\.py 'checkpoint=.*/a run' scores it"):
        _ = Checkpoint(tmp_path / "a run", random_gpt(), None, meta).tokenizer


def test_a_run_without_a_checkpoint_is_not_said_to_be_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/today/run/checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="^there is no run with a checkpoint under outputs/"):
        checkpoints.find_checkpoints(None)

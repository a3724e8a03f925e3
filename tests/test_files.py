"""What is written outlasts a power cut: a file has its name only once its content is on the disk."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import random_gpt

from data.config import DataConfig, TokenizerConfig
from data.files import replacing
from data.prepare import prepare
from data.tokenizer import make_tokenizer
from runs.checkpoint import save_checkpoint
from training.config import TrainConfig


def one_file(path: Path) -> Path:
    with replacing(path) as unfinished:
        unfinished.write_text("new")
    return path


def a_folder(path: Path) -> Path:
    with replacing(path) as unfinished:
        (unfinished / "inner").mkdir(parents=True)
        (unfinished / "inner" / "file").write_text("new")
    return path


def prepared_tokens(path: Path) -> Path:
    path.with_name("text.txt").write_text("some text " * 100)
    data = DataConfig(source="text", path=str(path.with_name("text.txt")), cache_dir=str(path))
    return prepare(data, TokenizerConfig(name="byte"), log=lambda _: None).directory


def a_checkpoint(path: Path) -> Path:
    model, byte = random_gpt(vocab_size=257), make_tokenizer(TokenizerConfig(name="byte"), [])
    save_checkpoint(path, model=model, tokenizer=byte, config=TrainConfig(model=model.config))
    return path


@pytest.mark.parametrize("write", [one_file, a_folder, prepared_tokens, a_checkpoint])
def test_content_is_on_the_disk_before_it_has_its_name_and_its_name_at_the_end(
    write: Callable[[Path], Path], tmp_path, monkeypatch
):
    done: list[tuple[str, int]] = []  # what was done, to which file
    fsync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append(("fsync", os.fstat(number).st_ino)), fsync(number)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (done.append(("rename", a.stat().st_ino)), rename(a, b))[1])
    written = write(tmp_path / "new")
    named = done.index(("rename", written.stat().st_ino))
    for path in (written, *written.rglob("*")):
        assert ("fsync", path.stat().st_ino) in done[:named], path
    assert ("fsync", written.parent.stat().st_ino) in done[named:]

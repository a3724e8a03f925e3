"""What replaces a file or folder outlasts a power cut: its content is on the disk before it has its name."""

import os
from pathlib import Path

import pytest

from data.files import replacing


@pytest.mark.parametrize("is_folder", [False, True])
def test_content_is_on_the_disk_before_it_has_its_name_and_its_name_at_the_end(is_folder, tmp_path, monkeypatch):
    done: list[tuple[str, int]] = []  # what was done, to which file
    fsync, rename, path = os.fsync, Path.replace, tmp_path / "new"
    monkeypatch.setattr(os, "fsync", lambda number: (done.append(("fsync", os.fstat(number).st_ino)), fsync(number)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (done.append(("rename", a.stat().st_ino)), rename(a, b))[1])
    with replacing(path) as unfinished:
        if is_folder:
            (unfinished / "inner").mkdir(parents=True)
        (unfinished / "inner" / "file" if is_folder else unfinished).write_text("content")
    named = done.index(("rename", path.stat().st_ino))
    for written in (path, *path.rglob("*")):
        assert ("fsync", written.stat().st_ino) in done[:named], written
    assert ("fsync", tmp_path.stat().st_ino) in done[named:]

"""The rules of data/files.py: what is replaced is whole or as it was, a power cut included; one process has a lock."""

import fcntl
import os
from pathlib import Path

import pytest

from data.files import is_locked, lock, remove, replace_text, replacing


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


def test_what_fails_or_is_interrupted_leaves_the_old_and_nothing_else(tmp_path):
    (path := tmp_path / "a.txt").write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as unfinished:
        unfinished.write_text("new")
        raise KeyboardInterrupt
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"] and path.read_text() == "old"
    replace_text(path, "é\ud800")
    assert path.read_bytes() == "é?".encode()


def test_removing_a_link_leaves_what_it_points_to(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    remove(tmp_path / "link")
    remove(tmp_path / "nothing")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]
    remove(tmp_path / "folder")
    assert not any(tmp_path.iterdir())


def test_a_lock_is_held_by_one_and_asking_for_it_takes_it_from_nobody(tmp_path):
    file = tmp_path / ".lock"
    assert not is_locked(file) and not file.exists()
    with lock(file):
        assert is_locked(file)
        with pytest.raises(BlockingIOError):
            lock(file, wait=0.05)
    with file.open() as asking:  # as another process that asks at the same time
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert not is_locked(file)
    with lock(file, wait=0):
        assert is_locked(file)

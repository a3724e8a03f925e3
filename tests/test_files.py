"""common/files.py: a replaced file is whole or as before, also after a power cut; locks."""

import os
import sys
import time
from pathlib import Path

import pytest
from filelock import lock_descriptor

from common import files
from common.files import is_locked, lock, point, pointed, read_foreign, remove, replace_text, replacing


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


def test_a_rename_waits_for_a_file_that_something_else_has_open(tmp_path, monkeypatch):
    def busy(path, to):
        asked.append(path)
        if len(asked) < 3 or "never" in path.name:
            raise PermissionError(13, "used by another process", str(path))
        return rename(path, to)

    asked, rename = [], Path.replace
    monkeypatch.setattr(Path, "replace", busy)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    replace_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new" and len(asked) == 3
    with pytest.raises(PermissionError):
        replace_text(tmp_path / "never.txt", "new")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_a_foreign_file_is_read_if_it_is_regular_and_of_a_bounded_size(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    monkeypatch.setattr(files, "LARGEST", 5)
    assert read_foreign(tmp_path / "link") == b"12345"
    for odd in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            read_foreign(odd)
    monkeypatch.setattr(files, "LARGEST", 4)
    with pytest.raises(OSError, match="larger than"):
        read_foreign(tmp_path / "file")


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
    with lock(file, wait=0):
        assert is_locked(file)
    file.chmod(0o444)  # somebody else's, which may be read
    with file.open() as held:
        assert not is_locked(file)
        lock_descriptor(held.fileno())
        assert is_locked(file)


def test_one_that_asks_for_a_lock_is_not_taken_for_one_that_holds_it(tmp_path, monkeypatch):
    (file := tmp_path / ".lock").touch()
    for ask in (is_locked, lambda file: lock(file).close()):
        asking = lock(file)
        monkeypatch.setattr(time, "sleep", lambda seconds, asking=asking: asking.close())  # it has asked meanwhile
        assert not ask(file)


@pytest.mark.skipif(sys.platform == "win32", reason="has no flock")
def test_a_lock_excludes_versions_that_call_flock_themselves(tmp_path):
    import fcntl

    with (tmp_path / ".lock").open("a") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert is_locked(tmp_path / ".lock")
        with pytest.raises(BlockingIOError):
            lock(tmp_path / ".lock", wait=0)
    with lock(tmp_path / ".lock"), (tmp_path / ".lock").open() as theirs, pytest.raises(BlockingIOError):
        fcntl.flock(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)


def refuse(*arguments, **options):
    raise OSError(22, "A required privilege is not held by the client")


@pytest.mark.parametrize("links", [True, False])
def test_a_link_or_a_small_file_in_place_of_it_names_a_neighbour(tmp_path, monkeypatch, links):
    for name in ("one", "two", "copied"):
        (tmp_path / name).mkdir()
    if not links:
        monkeypatch.setattr(Path, "symlink_to", refuse)
    for name in ("one", "two"):
        point(tmp_path / "last", name)
        assert pointed(tmp_path / "last") == tmp_path / name
    point(tmp_path / "copied", "one")
    assert [(tmp_path / name).is_symlink() for name in ("last", "copied")] == [links, links]
    monkeypatch.undo()
    point(tmp_path / "last", "one")  # a link again, as on a disk that was moved
    assert (tmp_path / "last").is_symlink() and pointed(tmp_path / "last") == tmp_path / "one"


@pytest.mark.parametrize("text", ["", "nothing", "../one", "a\0b", "x" * 999, "one/../two"])
def test_a_file_that_names_no_neighbour_stands_for_itself(tmp_path, text):
    (tmp_path / "one").mkdir()
    (link := tmp_path / "last").write_text(text)
    assert pointed(link) == link


def test_a_system_that_opens_no_folder_flushes_the_files(tmp_path, monkeypatch):
    original, fsync, written = os.open, os.fsync, []

    def as_on_windows(path, flags, *rest):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        assert flags & os.O_RDWR  # else fsync is refused there
        return original(path, flags, *rest)

    monkeypatch.setattr(os, "open", as_on_windows)
    monkeypatch.setattr(os, "fsync", lambda number: (written.append(os.fstat(number).st_ino), fsync(number)))
    with replacing(tmp_path / "new") as unfinished:
        unfinished.mkdir()
        (unfinished / "file").write_text("content")
    assert written == [(tmp_path / "new/file").stat().st_ino]

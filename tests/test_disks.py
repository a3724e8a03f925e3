"""Disks of other people: without locks, without flushing folders, failing; a cache of several users."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from conftest import first_of
from safetensors.torch import load_file
from sweeping import ROOT, cells, command, put_job, tiny

from common import files
from common.errors import SettingsError
from common.files import (
    NoLocks,
    flush_to_disk,
    is_locked,
    lock,
    locked,
    make_shared_folder,
    os_errors_named,
    replace_text,
    replacing,
    share,
    user_path,
    writing,
)
from data.config import DataConfig, TokenizerConfig
from data.prepare import make_folder, prepare
from model.weights import save_file
from runs.checkpoint import Meta, Progress, verify_checkpoint
from runs.checkpointer import AsyncCheckpointer
from runs.summary import read_summary
from sweeps.leaderboard import read_jobs

UNABLE = [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL]
FAILING = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS]
NAMES = errno.errorcode.get


@pytest.fixture(scope="session")
def shim(tmp_path_factory) -> str:
    """odd_disk.c as a library, which gives the commands a disk that lacks or fails something."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux")
    library = tmp_path_factory.mktemp("shim") / "odd_disk.so"
    source = Path(__file__).with_name("odd_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


def on_odd_disk(shim: str, place: Path, odd: dict[str, int], *arguments: str) -> subprocess.CompletedProcess:
    """train.py with all its files on a disk where the calls that `odd` names fail."""
    place.mkdir()
    settings = [*tiny(place, max_steps=2), *arguments]
    environment = os.environ | {"LD_PRELOAD": shim, "ODD_PLACE": str(place)}
    environment |= {f"ODD_{name}": str(code) for name, code in odd.items()}
    return subprocess.run(command(*settings), cwd=place, env=environment, capture_output=True, text=True, timeout=240)


ODD = {  # what fails, and whether the run goes on; the tests below have each code alone
    "no locks and no fsync": (
        {"FLOCK": errno.ENOSYS, "FSYNC_FOLDER": errno.EOPNOTSUPP, "FSYNC_FILE": errno.EINVAL},
        True,
    ),
    "locks that fail": ({"FLOCK": errno.EIO}, False),
    "a folder that fails": ({"FSYNC_FOLDER": errno.EIO}, False),
    "a file that fails": ({"FSYNC_FILE": errno.EIO}, False),
    "no locks and closed folders": ({"FLOCK": errno.ENOLCK, "OPEN_FOLDER": errno.EACCES, "CHMOD": errno.EPERM}, True),
}


@pytest.mark.parametrize("name", ["é" * 125 + ".html", "q" * 255])
def test_a_file_may_have_the_longest_name_that_disks_take(tmp_path, name):
    """255 bytes: its unfinished file had a longer one."""
    for text in ("one", "another"):
        with writing("to", str(tmp_path / name)) as unfinished:
            unfinished.write_text(text)
    assert len(os.fsencode(name)) == 255 and (tmp_path / name).read_text() == "another"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("disk", first_of(*ODD))
def test_a_run_and_a_sweep_go_on_without_what_a_disk_lacks_and_name_what_fails(disk, shim, tmp_path):
    odd, goes_on = ODD[disk]
    place = tmp_path / "odd"
    run = on_odd_disk(shim, place, odd, "run_dir=run")
    assert "Traceback" not in run.stdout + run.stderr
    if not goes_on:
        assert run.returncode == 1 and run.stderr.count("\n") == 1
        assert run.stderr.startswith(f"error: data.cache_dir={place}/cache cannot be used (Input/output error): ")
        return
    assert run.returncode == 0 and (place / "run/checkpoints/last/meta.json").is_file(), run.stderr
    assert run.stdout.count("This disk has no locks (") == ("FLOCK" in odd)
    shutil.rmtree(place)
    sweep = on_odd_disk(shim, place, odd, "-m", "seed=1,2", "hydra.sweep.dir=here")
    assert sweep.returncode == 0 and [row[0] for row in cells(sweep.stdout)] == ["seed", "1, 2"]
    assert (sweep.stdout + sweep.stderr).count("This disk has no locks (") == ("FLOCK" in odd)
    assert [read_summary(place / f"here/{job}").status for job in range(2)] == ["finished"] * 2


@pytest.mark.long
def test_two_sweeps_prepare_one_text_at_once_on_a_disk_without_locks(shim, tmp_path):
    place = tmp_path / "odd"
    place.mkdir()
    settings = tiny(place, max_steps=2)
    environment = os.environ | {"LD_PRELOAD": shim, "ODD_PLACE": str(place), "ODD_FLOCK": str(errno.ENOLCK)}
    asked = [command(*settings, f"run_dir={number}") for number in range(3)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = [subprocess.Popen(one, cwd=place, env=environment, **pipes) for one in asked]
    said = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert len(list((place / "cache/tokens").glob("text-*"))) == 1


def failing_with(monkeypatch, name: str, code: int, when: Callable[[Path], bool] = lambda path: True) -> list[Path]:
    """Let os.fsync fail for these paths; return the list of those for which it was called."""
    asked: list[Path] = []
    original = os.fsync

    def fsync(number: int) -> None:
        path = Path(f"/proc/self/fd/{number}").readlink()
        asked.append(path)
        if when(path):
            raise OSError(code, os.strerror(code))
        original(number)

    monkeypatch.setattr(os, name, fsync)
    return asked


@pytest.mark.parametrize("code", [*UNABLE, errno.EBADF, errno.EACCES], ids=NAMES)
@pytest.mark.parametrize("kind", [Path.is_dir, Path.is_file])
def test_what_a_disk_cannot_flush_is_left_to_it(code, kind, tmp_path, monkeypatch):
    asked = failing_with(monkeypatch, "fsync", code, kind)
    replace_text(tmp_path / "a.txt", "new")
    assert ((tmp_path / "a.txt").read_text() == "new" and any(map(kind, asked))) or kind is Path.is_file
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_the_rows_of_a_run_reach_the_disk_before_the_checkpoint_that_goes_on_from_them(tmp_path, monkeypatch):
    """A disk that became read-only kept step 200, and none of the 200 rows."""
    rows = tmp_path / "metrics.jsonl"
    rows.write_text("{}\n")
    asked = failing_with(monkeypatch, "fsync", errno.EIO, lambda path: path == rows)  # which costs no checkpoint
    checkpointer = AsyncCheckpointer(tmp_path / "checkpoints", 2, None)
    checkpointer.save({"w": torch.ones(1)}, {}, Meta({}, Progress(step=5), logs={rows.name: 3, "gone.jsonl": 1}))
    checkpointer.finish()
    assert asked[0] == rows and verify_checkpoint(tmp_path / "checkpoints/step_5").progress.step == 5


@pytest.mark.parametrize("code", FAILING, ids=NAMES)
@pytest.mark.parametrize("kind", [Path.is_dir, Path.is_file])
def test_a_disk_that_fails_is_an_error_while_the_old_file_is_there(code, kind, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("old")
    failing_with(monkeypatch, "fsync", code, kind)
    with pytest.raises(OSError, match=os.strerror(code)) as failed:
        replace_text(tmp_path / "a.txt", "new")
    assert str(tmp_path) in str(failed.value.filename)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("code", [*UNABLE, *FAILING], ids=NAMES)
def test_nothing_is_raised_once_the_new_file_is_in_place(code, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("old")
    is_renamed = lambda path: (tmp_path / "a.txt").read_text() == "new"  # noqa: E731
    asked = failing_with(monkeypatch, "fsync", code, is_renamed)
    replace_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new" and asked[-1] == tmp_path


@pytest.mark.parametrize("code", [*UNABLE, errno.EBADF], ids=NAMES)
def test_on_a_disk_without_locks_one_process_goes_on_and_says_so_once(code, tmp_path, monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "lock_descriptor", refuse)
    files.tell_of_no_locks.cache_clear()
    with pytest.raises(NoLocks):
        lock(tmp_path / ".lock")
    for _ in range(2):
        with locked(tmp_path / ".lock") as is_alone:
            assert is_alone is False
    assert is_locked(tmp_path / ".lock") is None
    (told,) = caplog.messages
    assert told.startswith(
        f"This disk has no locks ({os.strerror(code)}), so nothing stops a second process from using"
    )
    # Nobody knows whether a job goes on: it is not called stopped.
    put_job(tmp_path / "sweep", 0, "seed=1", status="running")
    (tmp_path / "sweep/0/.lock").touch()
    assert read_jobs(tmp_path / "sweep")[0].status == "running"


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOMEM], ids=NAMES)
def test_a_lock_that_fails_otherwise_is_an_error(code, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "lock_descriptor", fail)
    with pytest.raises(OSError, match=os.strerror(code)) as failed, locked(tmp_path / ".lock"):
        pass
    assert not isinstance(failed.value, NoLocks)


def test_of_two_that_prepare_a_text_without_locks_the_sooner_serves_both(text_file, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def later(folder: Path, *rest: object) -> str:
        """Another process makes the folder while this one does."""
        monkeypatch.setattr("data.prepare.make_folder", make_folder)
        prepare(data, TokenizerConfig(name="byte"), log=lambda line: None)
        monkeypatch.setattr("data.prepare.remove", lambda path: None)  # this one did so before
        return make_folder(folder, *rest)

    monkeypatch.setattr(files, "lock_descriptor", refuse)
    monkeypatch.setattr("data.prepare.make_folder", later)
    data = DataConfig(path=str(text_file), cache_dir=str(tmp_path / "cache"))
    tokens = tmp_path / "cache/tokens"
    (tokens / ".another.unfinished").mkdir(parents=True)
    found = prepare(data, TokenizerConfig(name="byte"), log=lambda line: None)
    assert len(found.train) > 1000
    assert {path.name for path in tokens.iterdir()} == {".lock", ".another.unfinished", found.fingerprint}


MODES = [0o2777, 0o1777, 0o2775, 0o750, 0o700, 0o755]


@pytest.mark.parametrize("mode", MODES, ids=oct)
@pytest.mark.parametrize("umask", first_of(0o077, 0o022, 0))
def test_what_is_in_a_cache_has_the_permissions_of_the_cache_whatever_the_umask(mode, umask, text_file, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    before = os.umask(umask)
    try:
        data = DataConfig(path=str(text_file), cache_dir=str(cache))
        prepare(data, TokenizerConfig(name="byte"), log=lambda line: None)
        replace_text(tmp_path / "other.txt", "x")
    finally:
        os.umask(before)
    found = {path.relative_to(cache).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in cache.rglob("*")}
    assert {"tokens", "tokens/.lock"} < found.keys() and len(found) == 7
    for name, own in found.items():
        assert own == (mode if (cache / name).is_dir() else mode & 0o666), name
    assert stat.S_IMODE((tmp_path / "other.txt").stat().st_mode) == 0o666 & ~umask  # a run's own file is by the umask


def test_a_cache_that_is_not_there_yet_is_by_the_umask(text_file, tmp_path):
    before = os.umask(0o077)
    try:
        data = DataConfig(path=str(text_file), cache_dir=str(tmp_path / "a/cache"))
        prepare(data, TokenizerConfig(name="byte"), log=lambda line: None)
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o077 == 0 for path in [tmp_path / "a", *(tmp_path / "a").rglob("*")])


def test_a_disk_without_permissions_keeps_its_own(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    make_shared_folder(tmp_path / "a/b")
    with replacing(tmp_path / "a/b/c", shared=True) as unfinished:
        unfinished.write_text("x")
    share(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").read_text() == "x"
    weights = {"w": torch.arange(3.0)}
    save_file(weights, tmp_path / "a/w")  # the library makes it closed to others, whatever the umask
    assert torch.equal(load_file(tmp_path / "a/w")["w"], weights["w"])


# Prepares texts in one cache as several users, in the order in which they are given: {uid: umask}.
AS_USERS = """
import json, os, sys
from pathlib import Path
from common.errors import SettingsError
from data.config import DataConfig, TokenizerConfig
from data.prepare import make_folder, prepare
cache, texts, users = sys.argv[1], sys.argv[2:-1], json.loads(sys.argv[-1])
byte = TokenizerConfig(name="byte")
warm = str(Path(cache).parent / "warm")
prepare(DataConfig(path=texts[0], cache_dir=warm), byte, log=lambda line: None)  # which imports all
for (uid, umask), text in zip(users, texts):
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        os.umask(umask)
        try:
            data = prepare(DataConfig(path=text, cache_dir=cache), byte, log=lambda line: None)
            print("tokens", len(data.train), flush=True)
        except SettingsError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become other users")
@pytest.mark.parametrize("mode", [0o2777, 0o1777, 0o755], ids=oct)
def test_a_cache_of_two_users_serves_both_or_names_the_folder_and_its_owner(mode, tmp_path):
    for folder in [tmp_path, *tmp_path.parents][:4]:
        folder.chmod(folder.stat().st_mode | 0o755)
    (tmp_path / "warm").mkdir()
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    texts = []
    for number in range(2):
        texts.append(tmp_path / f"{number}.txt")
        texts[-1].write_text(f"the cat sat on mat {number}.\n" * 200)
        texts[-1].chmod(0o644)
    if mode == 0o755:  # as an earlier version left it: the first user's
        (cache / "tokens").mkdir()
        for place in (cache, cache / "tokens"):
            os.chown(place, 1001, 1001)
    users = [(1001, 0o077), (1002, 0o077), (1002, 0o022)]
    asked = [str(texts[0]), str(texts[1]), str(texts[0]), json.dumps(users)]
    process = subprocess.run(
        [sys.executable, "-c", AS_USERS, str(cache), *asked], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    first, second, shared = process.stdout.splitlines()
    assert first.startswith("tokens ") and shared == first, process.stderr
    if mode == 0o755:
        said = f"data.cache_dir={cache} cannot be used (Permission denied: {cache}/tokens belongs to user 1001): give "
        assert second.startswith(said)
    else:
        assert second.startswith("tokens "), process.stdout


def test_a_folder_of_another_user_is_named_with_its_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "owner", lambda path: "alice")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1, raising=False)
    place = tmp_path / "tokens"
    with pytest.raises(SettingsError) as named, os_errors_named("data.cache_dir", tmp_path, "used", "give another"):
        raise PermissionError(errno.EACCES, "Permission denied", str(place / "new"))
    said = f"data.cache_dir={tmp_path} cannot be used (Permission denied: {tmp_path} belongs to alice): give another."
    assert str(named.value) == said
    with pytest.raises(SettingsError, match=r"\(No space left on device\)"), os_errors_named("a", "b", "used", "c"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))


def test_without_a_home_the_sentence_names_what_is_missing(monkeypatch):
    def unknown(*_):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(SettingsError) as told:
        user_path("data.cache_dir", "~/.cache/tinygpt")
    said = (
        "data.cache_dir=~/.cache/tinygpt is in a home folder, and neither HOME nor the system names one: set HOME, or "
    )
    assert str(told.value) == f"{said}data.cache_dir=FOLDER."
    with pytest.raises(SettingsError, match="names no user of this machine: write the folder out"):
        user_path("data.cache_dir", "~nobody_at_all/x")


@pytest.mark.parametrize(
    ("typed", "meant"),
    {
        r"D:\runs\a": "/mnt/d/runs/a",
        "c:/Users/me/notes.txt": "/mnt/c/Users/me/notes.txt",
        "D:runsa": "/mnt/d/…",  # as a shell hands on D:\runs\a without quotes
    }.items(),
)
def test_a_drive_of_windows_is_named_where_there_is_none(typed, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if os.name == "posix":
        said = f"run_dir={typed} is on a drive of Windows: in WSL write run_dir={meant}."
        with pytest.raises(SettingsError, match=f"^{re.escape(said)}$"):
            user_path("run_dir", typed)
    Path(typed).parent.mkdir(parents=True, exist_ok=True)
    Path(typed).mkdir(exist_ok=True)  # of an earlier version, which made such a folder
    assert user_path("run_dir", typed) == Path(typed)
    assert user_path("run_dir", "ab:c/d") == Path("ab:c/d")


@pytest.mark.skipif(os.name != "posix", reason="backslashes divide folders")
@pytest.mark.parametrize(
    "typed", [r"my\ notes.txt", '"my notes.txt"', "'a (1).txt'", r"a\ \(1\).txt", r"R\&D.txt", r"it\'s"]
)
def test_signs_that_a_shell_would_take_are_told_unless_a_file_has_them(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (meant,) = shlex.split(typed)
    with pytest.raises(SettingsError) as told:
        user_path("data.path", typed)
    (command,) = shlex.split(str(told.value).partition("leave them out: ")[2].removesuffix("."))
    assert command == f"data.path={meant}" and user_path("data.path", meant) == Path(meant)
    Path(typed).touch()
    assert user_path("data.path", typed) == Path(typed)


@pytest.mark.skipif(os.name != "posix", reason="no name has these characters")
@pytest.mark.parametrize(
    "typed", [r"C:\new\texts", r"C:\Program\Notes", r"runs/a\nb", r"day\_1/\Library/x", r"a\tb/new"]
)
def test_a_path_that_yaml_has_changed_between_double_quotes_is_refused_unless_it_is_there(typed, tmp_path, monkeypatch):
    """A run made a folder with a line end in its name."""
    monkeypatch.chdir(tmp_path)
    (read,) = yaml.safe_load(f'["{typed}"]')
    with pytest.raises(SettingsError, match="has characters that a backslash and a letter stand for: .* single quotes"):
        user_path("run_dir", read)
    assert yaml.safe_load(f"['{typed}']") == [typed]  # the remedy
    Path(read).parent.mkdir(parents=True, exist_ok=True)
    Path(read).mkdir(exist_ok=True)
    assert user_path("run_dir", f"./{read}/new") == Path(read) / "new"


@pytest.mark.parametrize("path", ["it's", '"a" and "b"', r"a\b", "'", "it's a dog's.txt", '"a","b"'])
def test_other_quotes_and_backslashes_are_of_the_name(path):
    assert user_path("data.path", path) == Path(path)


def test_a_closed_folder_above_a_file_is_no_failure(tmp_path, monkeypatch):
    original = os.open

    def closed(path, flags, *rest):
        if Path(path) == tmp_path and not flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, flags, *rest)

    monkeypatch.setattr(os, "open", closed)
    replace_text(tmp_path / "a.txt", "new")
    flush_to_disk(tmp_path)
    assert (tmp_path / "a.txt").read_text() == "new"

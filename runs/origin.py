"""The code of a run: the commit of the checkout, and a hash of the files that a run imports."""

import hashlib
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a run imports, or composes its settings from, besides train.py. The other commands, docs/, tests/ and benchmarks/
# change no run.
PACKAGES = (
    *("cli", "common", "conf", "data", "generation", "hydra_plugins"),
    *("interop", "model", "pages", "runs", "sweeps", "training"),
)


def hash_of_code(root: Path) -> str:
    """Return the first 16 digits of a SHA-256 of the code in a checkout.

    It covers the names and contents of the Python and YAML files there, whether git knows them or not. Hidden files,
    which nothing imports, and the kind of line ends do not count.
    """
    found = hashlib.sha256()
    for file in sorted([root / "train.py", *(file for name in PACKAGES for file in (root / name).rglob("*"))]):
        name = file.relative_to(root).as_posix()
        if file.suffix not in (".py", ".yaml") or "/." in name or not file.is_file():
            continue
        content = b""
        with suppress(OSError):  # of a file that nobody here can import either
            content = file.read_bytes().replace(b"\r\n", b"\n")
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:16]


PROJECT_HASH = hash_of_code(ROOT)
"""Taken as this module is imported, like the others: the files may change while the process runs."""


@cache
def commit() -> str | None:
    """Return the commit of this checkout, with "-dirty" if files have changed; None outside git."""
    return commit_of(ROOT)


def commit_of(root: Path) -> str | None:
    # Name the folder .git: a copy without it may lie inside another repository, whose commit is not the code's.
    command = ["git", "--git-dir=.git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.check_output(command, cwd=root, text=True, timeout=5, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.SubprocessError):
        return None

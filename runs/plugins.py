"""A person's own file in a run: code=FILE, and the copy that the run keeps.

The file may register forms, modifiers and tasks.
"""

import shutil
from pathlib import Path
from typing import Any

from common.files import remove
from common.text import seen_from_here
from data.config import VOCABULARIES
from model.attention import code

KEPT = "code"
"""The folder of a run with its own copy of the file and of the neighbours that it imports."""


def run_code(name: str | None) -> str | None:
    """Run the file of code=NAME, once in a process, and return its hash; None without a name.

    Raises SettingsError for a file that cannot be run: see model/attention/code.py, which knows no tasks.
    """
    return code.run_code(name, VOCABULARIES)


def keep_code(name: str | None, run: Path) -> None:
    """Copy the file of code=NAME, which has run, and its neighbours to the folder of a run."""
    if name is None:
        return
    own, *neighbours = code.RAN[code.path_of(name)].files
    home = own.parent
    kept = run / KEPT
    if home == kept.resolve():  # the run goes on with its own copy
        return
    remove(kept)
    copies = {own: kept / Path(name).name}  # as it is typed, where that is a link
    copies |= {file: kept / file.relative_to(home) for file in neighbours}
    for file, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def find_code(name: str, run: Path) -> str:
    """Return the path of a run's code=NAME, or of its copy if the file is no longer there."""
    kept = run / KEPT / Path(name).name
    is_gone = not code.path_of(name).is_file()
    return seen_from_here(kept) if is_gone and kept.is_file() else name


def other_code(config: dict[str, Any], run: Path) -> str:
    """Return the note on a run that has learned with other code than has run here, or ""."""
    if not code.RAN or has_run(config, run):
        return ""
    kept = kept_file(config, run)
    remedy = f"code={seen_from_here(kept)} is its own" if kept.is_file() else "its figures may be others"
    return f"has learned with other code than has run here: {remedy}"


def has_run(config: dict[str, Any], run: Path) -> bool:
    """Return whether a run's file of code= has run here as it was; True for a run without one.

    A file that imports it, beside that of another run, runs it too: then the hash is another, and the run's copy tells.
    """
    trained = config.get("code_hash")
    if trained is None or any(ran.hash == trained for ran in code.RAN.values()):
        return True
    own = kept_file(config, run)
    if not own.is_file():
        return False
    files = [own, *sorted(file for file in own.parent.rglob("*") if file.is_file() and file != own)]
    hashes = set().union(*(ran.hashes for ran in code.RAN.values()))
    return code.digest(files) == trained and {code.digest([file]) for file in files} <= hashes


def kept_file(config: dict[str, Any], run: Path) -> Path:
    """Return the path of a run's own copy of its file of code=."""
    return run / KEPT / Path(str(config.get("code"))).name

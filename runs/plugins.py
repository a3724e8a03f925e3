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
    (own, *neighbours), _ = code.RAN[code.path_of(name)]
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


def other_code(name: Any, trained: Any, run: Path) -> str:
    """Return what tells that a run has learned with other code than has run here, or "".

    name, trained: the run's file of code=NAME and its hash, None for a run without one.
    """
    here = {found for _, found in code.RAN.values()}
    if trained is None or not here or trained in here:
        return ""
    kept = run / KEPT / Path(str(name)).name
    remedy = f"code={seen_from_here(kept)} is its own" if kept.is_file() else "its figures may be others"
    return f"has learned with other code than has run here: {remedy}"

"""A person's own file in a run: code=FILE, which may register forms, modifiers and tasks."""

from data.config import VOCABULARIES
from model.attention import code


def run_code(name: str | None) -> str | None:
    """Run the file of code=NAME, once in a process, and return its hash; None without a name.

    Raises SettingsError for a file that cannot be run: see model/attention/code.py, which knows no tasks.
    """
    return code.run_code(name, VOCABULARIES)

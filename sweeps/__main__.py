"""Write a run's page, or a folder's page and leaderboard:  python -m sweeps FOLDER

An unfinished run shows its progress so far."""

import sys
from pathlib import Path

from common.errors import SettingsError
from common.files import reading, replace_text
from common.mistakes import mistakes_explained
from common.text import visible
from pages.runs import run_page
from runs.summary import read_summary
from sweeps.leaderboard import PAGE, write_leaderboard

with mistakes_explained():
    if len(sys.argv) != 2 or sys.argv[1][:1] in ("", "-"):
        raise SettingsError("python -m sweeps FOLDER is wanted", "a run's, or one with runs in it, as under multirun/")
    folder = Path(sys.argv[1])
    with reading("FOLDER", sys.argv[1]):
        next(folder.iterdir(), None)
    if read_summary(folder):
        replace_text(folder / PAGE, run_page(folder))
        print(visible(f"page      {folder / PAGE}"))
    elif text := write_leaderboard(folder):
        print(visible(text))
    else:
        raise SettingsError(f"{folder} holds no run (no summary.json or job.json)", "give a folder with one")

"""Write the page of a run, or of a sweep's or any other folder of runs and print its leaderboard, while they go on too:
python -m sweeps FOLDER"""

import sys
from pathlib import Path

from data.files import replace_text
from errors import why
from pages.runs import run_page
from runs.summary import read_summary
from runs.text import visible
from sweeps.leaderboard import PAGE, write_leaderboard

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit("usage: python -m sweeps FOLDER    (a run's, or one with runs in it, as -m makes under multirun/)")
folder = Path(sys.argv[1])
try:
    if read_summary(folder):
        replace_text(folder / PAGE, run_page(folder))
        print(visible(f"page      {folder / PAGE}"))
    elif text := write_leaderboard(folder):
        print(visible(text))
    else:
        sys.exit(f"error: {visible(folder)} holds no run (no summary.json or job.json): give a folder with one.")
except OSError as error:
    sys.exit(f"error: {visible(folder)} cannot be used ({why(error)}): name a folder that is yours to write to.")

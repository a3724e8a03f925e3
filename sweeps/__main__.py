"""Write the page and the leaderboard of a folder of runs:  python -m sweeps FOLDER

An unfinished run shows its progress so far."""

import sys
from pathlib import Path

from common.errors import SettingsError
from common.mistakes import answer_help, mistakes_explained
from common.text import visible
from runs.summary import NAME as SUMMARY
from sweeps.leaderboard import write_leaderboard

with mistakes_explained():
    answer_help(__doc__)
    if len(sys.argv) != 2 or sys.argv[1][:1] in ("", "-"):
        remedy = "one with runs in it, as under multirun/; for several, one that holds them or links to them (ln -s)"
        raise SettingsError("python -m sweeps FOLDER is wanted", remedy)
    folder = Path(sys.argv[1])
    if (folder / SUMMARY).exists():  # a run may hold other runs, as by run_dir=RUN/longer
        raise SettingsError(f"{folder} is a run's folder, whose page the table would replace", "give one that holds it")
    text = write_leaderboard(folder)
    if not text:
        raise SettingsError(f"{folder} holds no folder of a run (summary.json or job.json)", "give one that does")
    print(visible(text))

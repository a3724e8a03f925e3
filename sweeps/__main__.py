"""Write and print the leaderboard of a sweep's folder, while it runs too:  python -m sweeps DIR"""

import sys
from pathlib import Path

from runs.formatting import visible
from sweeps.leaderboard import write_leaderboard

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit("usage: python -m sweeps DIR    (a folder that -m made under multirun/)")
sweep = Path(sys.argv[1])
if text := write_leaderboard(sweep):
    print(visible(text))
else:
    sys.exit(f"error: {sweep} holds no sweep (no job.json in its folders): give the folder that -m made.")

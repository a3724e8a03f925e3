"""Print the tales that keep all facts, for each attention of a sweep:

    python docs/tales_kept.py FOLDER_OR_CSV [code=FILE]

FOLDER is a sweep of data=tales, or holds runs of it; those that have not finished are left out. Other settings in which
the runs differ, such as a rate, have rows of their own. Each model writes 64 tales, as for eval.py tales=true. Their
counts are written to FOLDER/tales.csv, which the script also reads.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from cli.eval import TALES, write_tales
from common.files import replace_text
from common.mistakes import mistakes_explained
from data.tales import first_slip
from docs.compare import existing
from model.attention.code import run_codes
from runs.checkpoint import open_checkpoint
from sweeps.leaderboard import csv_text, read_jobs, swept_settings


def count_tales(sweep: Path) -> str:
    """Return a line of CSV for each finished run: attention and swept settings, seed, tales that keep all facts."""
    lines = [["attention", "seed", "kept"]]
    jobs = read_jobs(sweep)
    others = [name for name in swept_settings(jobs) if name not in ("seed", "attention", "model.attention_window")]
    for job in jobs:
        if job.status != "finished":
            continue
        checkpoint = open_checkpoint(str(job.directory))
        config = checkpoint.model.config
        swept = {name: job.settings[name] for name in others if name in job.settings}
        if config.attention_window:
            swept = {"model.attention_window": config.attention_window} | swept
        row = " ".join(f"{name}={value}" for name, value in ({"attention": config.attention} | swept).items())
        slips = [first_slip(tale) for tale in write_tales(checkpoint)]
        seed = checkpoint.meta.config["seed"]
        lines.append([row, seed, f"{slips.count(None)}"])
    return csv_text(lines)


def main(place: Path) -> None:
    if place.is_dir():
        replace_text(place / "tales.csv", count_tales(place))
        place /= "tales.csv"
    kept = defaultdict[str, list[int]](list)
    with place.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            kept[row["attention"]].append(int(row["kept"]))

    print("| attention | of 64 tales of each seed | share |\n|---|---:|---:|")
    for attention, counts in kept.items():
        share = sum(counts) / (TALES * len(counts))
        print(f"| `{attention}` | {', '.join(map(str, counts))} | {share:.0%} |")


if __name__ == "__main__":
    with mistakes_explained():
        places = run_codes(sys.argv[1:])
        if len(places) != 1:
            sys.exit(__doc__)
        main(existing(places[0]))

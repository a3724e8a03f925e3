"""Print the tales that keep all facts, for each attention of a sweep:  python docs/tales_kept.py FOLDER_OR_CSV

FOLDER is a sweep of data=tales, or holds runs of it; those that have not finished are left out. Each model writes 64
tales, as for eval.py tales=true. Their counts are written to FOLDER/tales.csv, which the script also reads.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from cli.eval import TALES, write_tales
from common.files import replace_text
from data.tales import first_slip
from runs.checkpoint import open_checkpoint
from sweeps.leaderboard import csv_text, read_jobs


def count_tales(sweep: Path) -> str:
    """Return a line of CSV for each finished run: attention, seed, tales that keep all facts."""
    lines = [["attention", "seed", "kept"]]
    for job in read_jobs(sweep):
        if job.status != "finished":
            continue
        checkpoint = open_checkpoint(str(job.directory))
        config = checkpoint.model.config
        window = f" model.attention_window={config.attention_window}" if config.attention_window else ""
        slips = [first_slip(tale) for tale in write_tales(checkpoint)]
        seed = checkpoint.meta.config["seed"]
        lines.append([f"attention={config.attention}{window}", seed, f"{slips.count(None)}"])
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
    if len(sys.argv) != 2 or not Path(sys.argv[1]).exists():
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

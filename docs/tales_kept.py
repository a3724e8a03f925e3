"""Print the tales that keep all facts, for each attention of a sweep:

    python docs/tales_kept.py FOLDER_OR_CSV [code=FILE]

FOLDER is a sweep of data=tales, or holds runs of it; those that have not finished are left out. Other settings in which
the runs differ, such as a rate, have rows of their own. Each model writes 64 tales, as for eval.py tales=true. Their
counts are written to FOLDER/tales.csv, which the script also reads.
"""

import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from cli.eval import TALES, write_tales
from common.errors import SettingsError
from common.files import replace_text
from common.mistakes import mistakes_explained
from common.text import visible
from data.tales import first_slip
from docs.command import arguments_asked, existing, number_in, read_table
from runs.checkpoint import open_checkpoint
from sweeps.leaderboard import csv_text, read_jobs, swept_settings


def count_tales(sweep: Path) -> str:
    """Return a line of CSV for each finished run: attention and swept settings, seed, tales that keep all facts.

    Tells of models that have learned another text. Raises SettingsError for a folder without a finished run.
    """
    lines = [["attention", "seed", "kept"]]
    jobs = read_jobs(sweep)
    finished = [job for job in jobs if job.status == "finished"]
    if not finished:
        raise SettingsError(f"{sweep} has no finished run", "give the folder that -m made with data=tales")
    for source in sorted({str(job.resolved.get("data.source")) for job in finished} - {"tales"}):
        print(visible(f"Some models have learned data={source}, not tales."))
    varied = [name for name in swept_settings(jobs) if name not in ("seed", "attention", "model.attention_window")]
    for job in finished:
        checkpoint = open_checkpoint(str(job.directory))
        config = checkpoint.model.config
        swept = {name: job.settings[name] for name in varied if name in job.settings}
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
    for row in read_table(place, "attention", "kept"):
        kept[row["attention"]].append(int(number_in(row, "kept")))

    print("| attention | of 64 tales of each seed | share |\n|---|---:|---:|")
    for attention, counts in kept.items():
        share = sum(counts) / (TALES * len(counts))
        print(f"| `{attention}` | {', '.join(map(str, counts))} | {share:.0%} |")


if __name__ == "__main__":
    with mistakes_explained():
        (place,) = arguments_asked(__doc__, "FOLDER_OR_CSV")
        main(existing(place))

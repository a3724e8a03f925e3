"""Print the tales that keep all facts, for each attention and seed of a sweep:  python docs/tales_kept.py FOLDER

FOLDER is a sweep of data=tales, or holds runs of it. Each model writes 64 tales, as for eval.py tales=true.
"""

import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from cli.eval import TALES, write_tales
from data.tales import first_slip
from runs.checkpoint import open_checkpoint
from sweeps.leaderboard import read_jobs


def main(folder: Path) -> None:
    kept = defaultdict(list)
    for job in read_jobs(folder):
        checkpoint = open_checkpoint(str(job.directory))
        config = checkpoint.model.config
        window = f" model.attention_window={config.attention_window}" if config.attention_window else ""
        slips = [first_slip(tale) for tale in write_tales(checkpoint)]
        kept[f"attention={config.attention}{window}"].append(slips.count(None))
    print("| attention | of 64 tales of each seed | share |\n|---|---:|---:|")
    for attention, counts in kept.items():
        share = sum(counts) / (TALES * len(counts))
        print(f"| `{attention}` | {', '.join(map(str, counts))} | {share:.0%} |")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

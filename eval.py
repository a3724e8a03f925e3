"""Measure how well a checkpoint predicts text:  python eval.py [NAME=VALUE ...]

python eval.py                                 # the newest run, on its validation split
python eval.py data.path=notes.txt against=outputs/DATE/TIME-xxxx
python eval.py tales=true                      # how many of its tales keep every fact
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P leaves it out, for another clone perhaps

from cli.command import run_command
from generation.config import EvalConfig


def score(config: EvalConfig) -> None:
    """Print the figures of one checkpoint, or of two side by side."""
    from cli.eval import score_checkpoints  # with torch: --help and mistakes in the settings do not wait for it

    score_checkpoints(config)


def main() -> None:
    run_command(EvalConfig, score)


if __name__ == "__main__":
    main()

"""Generate text from a checkpoint:  python sample.py [NAME=VALUE ...]

python sample.py                               # the newest run, from the start of a document
python sample.py prompt="def read(self" temperature=0.5
python sample.py checkpoint=outputs/DATE/TIME-xxxx interactive=true
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P leaves it out, for another clone perhaps

from cli.command import run_command
from generation.config import SampleConfig


def sample(config: SampleConfig) -> None:
    """Print the samples as they are generated."""
    from cli.sample import write_samples  # with torch: --help and mistakes in the settings do not wait for it

    write_samples(config)


def main() -> None:
    run_command(SampleConfig, sample, decodes=True)


if __name__ == "__main__":
    main()

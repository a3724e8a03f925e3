"""Export a model, or import one:  python export.py to=FOLDER [NAME=VALUE ...]

python export.py to=mymodel                    # the newest run, in Hugging Face's format
python export.py to=demo.html                  # the newest run, as a page that writes in a browser
python export.py import_from=gpt2 to=ours      # a Hugging Face model becomes a checkpoint
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P leaves it out, for another clone perhaps

from cli.command import run_command
from interop.config import ExportConfig


def export(config: ExportConfig) -> None:
    """Write `to`, completely or not at all."""
    from cli.export import write_export  # with torch: --help and mistakes in the settings do not wait for it

    write_export(config)


def main() -> None:
    run_command(ExportConfig, export)


if __name__ == "__main__":
    main()

"""List the figures whose code has changed since they were measured:  python -m benchmarks.stale [PAGE.md ...]

A page says above a table or picture at which commit it was made and what it depends on, files or folders:

    <!-- measured 1a2b3c4: model/attention sweeps/compare.py -->

Without arguments all pages of README.md, docs/ and benchmarks/ are read. The exit status is 1 when a figure is stale.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MARK = re.compile(r"^<!-- measured ([0-9a-f]{7,40}): (.+?) -->$")


def git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)


def stale(page: Path) -> Iterator[str]:
    """Yield a line for each figure of a page whose paths are not as they were; uncommitted changes count."""
    is_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        is_code ^= line.startswith("```")
        if is_code or not (mark := MARK.match(line)):
            continue
        commit, paths = mark[1], mark[2].split()
        where = f"{page}:{number}: measured at {commit}"
        found = git("diff", "--name-only", commit, "--", *paths)
        if found.returncode:
            yield f"{where}, which this repository does not have"
        elif unknown := [path for path in paths if git("ls-tree", commit, path).stdout == ""]:
            yield f"{where}, where there is no {', '.join(unknown)}"
        elif changed := found.stdout.split():
            yield f"{where}; changed since: {', '.join(changed[:4])}" + (" …" if changed[4:] else "")


def main() -> None:
    if git("rev-parse").returncode:
        sys.exit("error: this is no git repository: run it in a checkout, whose history says what has changed.")
    pages = [Path(name) for name in sys.argv[1:]] or [
        Path("README.md"), *sorted(Path("docs").glob("*.md")), *sorted(Path("benchmarks").glob("*.md"))
    ]  # fmt: skip
    if missing := [page for page in pages if not page.is_file()]:
        sys.exit(f"error: {missing[0]} is no file: name pages, or none for all.")
    lines = [line for page in pages for line in stale(page)]
    print("\n".join(lines) or "no figure is older than its code")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()

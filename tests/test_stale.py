"""python -m benchmarks.stale names the figures whose code has changed since they were measured, and no other."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "stale.py"


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def check(folder: Path, *pages: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, SCRIPT, *pages], cwd=folder, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_a_figure_is_stale_once_its_own_code_has_changed(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD")
    marks = [f"<!-- measured {commit}: a.py -->", f"<!-- measured {commit}: b.py -->"]
    (tmp_path / "README.md").write_text("\n".join([*marks, "```", marks[0], "```"]))
    assert check(tmp_path) == (0, ["no figure is older than its code"])
    (tmp_path / "a.py").write_text("2\n")  # not committed yet
    assert check(tmp_path) == (1, [f"README.md:1: measured at {commit}; changed since: a.py"])
    git(tmp_path, "commit", "-qam", "two")
    assert check(tmp_path) == (1, [f"README.md:1: measured at {commit}; changed since: a.py"])
    (tmp_path / "docs" / "x.md").write_text(f"<!-- measured 1234567: a.py -->\n<!-- measured {commit}: c.py -->\n")
    status, lines = check(tmp_path, "docs/x.md")
    assert status == 1 and "does not have" in lines[0] and "there is no c.py" in lines[1]
    status, lines = check(tmp_path, "none.md")
    assert status == 1 and lines == ["error: none.md is no file: name pages, or none for all."]

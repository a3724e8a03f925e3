"""A page as a browser shows it, where one is installed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def data_of(page: Path) -> dict[str, Any]:
    """The data that a page was written with."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)[1])


def browse(page: Path, script: str) -> Any:
    """Open a page, run a function's body there, and return its result; nothing may be said on the console."""
    run = f"<script>document.documentElement.dataset.result = JSON.stringify((() => {{ {script} }})())</script></html>"
    opened = page.with_name(f"opened_{page.name}")
    opened.write_text(page.read_text(encoding="utf-8").replace("</html>", run), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr --dump-dom"
    profile = f"--user-data-dir={page.with_name('profile')}"
    command = [CHROMIUM, *flags.split(), "--virtual-time-budget=1000", profile, opened.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said and done.returncode == 0, said
    return json.loads(html.unescape(re.search(r'data-result="([^"]*)"', done.stdout)[1]))

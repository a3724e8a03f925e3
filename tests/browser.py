"""A page in a browser, and axe-core's findings, where they are installed."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = Path(os.environ.get("AXE", Path(__file__).parent.parent / "node_modules/axe-core/axe.min.js"))
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: npm install axe-core, or AXE=its axe.min.js")


def data_of(page: Path) -> dict[str, Any]:
    """The data that a page was written with."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)[1])


def open_page(page: Path, *flags: str, width: int = 1200, dark: bool = False) -> str:
    """Open a page and return what is printed; nothing may be said on the console."""
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr"
    looks = f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={width},900"
    command = [CHROMIUM, *options.split(), "--virtual-time-budget=5000", *looks, *flags]
    command += [f"--user-data-dir={page.with_name('profile')}", page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said and done.returncode == 0, said
    return done.stdout


def browse(page: Path, script: str, library: str = "", **looks: Any) -> Any:
    """Open a page, run a function's body there, and return its result, or what that promises."""
    tell = "found => { document.title = JSON.stringify(found); }"
    run = f"<script>{library}</script><script>(async () => {{ {script} }})().then({tell});</script></html>"
    opened = page.with_name(f"opened_{page.name}")
    opened.write_text(page.read_text(encoding="utf-8").replace("</html>", run), encoding="utf-8")
    shown = open_page(opened, "--dump-dom", **looks)
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", shown, re.S)[1]))


def violations(page: Path, **looks: Any) -> list[str]:
    """What axe-core finds wrong on a page."""
    script = """const {violations} = await axe.run();
      return violations.flatMap(({id, nodes}) => nodes.map(node => `${id}: ${node.html}`));"""
    return browse(page, script, AXE.read_text(encoding="utf-8"), **looks)


def drawn_on_paper(page: Path, **looks: Any) -> list[bytes]:
    """What is drawn where a page is printed, as commands of PDF."""
    paper = page.with_suffix(".pdf")
    open_page(page, f"--print-to-pdf={paper}", "--no-pdf-header-footer", **looks)
    found = []
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", paper.read_bytes(), re.S):
        with suppress(zlib.error):
            found.append(zlib.decompress(stream))
    return found

"""A page in a browser, and axe-core's findings, where they are installed."""

from __future__ import annotations

import base64
import json
import os
import re
import selectors
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


class Browser:
    """A page open in Chromium, which is asked by its DevTools protocol; nothing may be said on the console."""

    def __init__(self, page: Path, width: int = 1200, dark: bool = False) -> None:
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr"
        looks = f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={width},900"
        command = [CHROMIUM, *options.split(), "--remote-debugging-pipe", *looks]
        command += [f"--user-data-dir={page.with_name('profile')}", page.resolve().as_uri()]
        # Chromium reads commands from file descriptor 3 and writes answers to 4.
        pipes = ["sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 1>&2']
        self.log = page.with_name("chromium.log").open("w+b")
        self.process = subprocess.Popen(
            pipes + command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, bufsize=0
        )
        self.answers = selectors.DefaultSelector()
        self.answers.register(self.process.stdout, selectors.EVENT_READ)
        self.unread, self.session, self.commands = b"", {}, 0

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self.commands += 1
        message = {"id": self.commands, "method": method, "params": params} | self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.unread:
                assert self.answers.select(timeout=120), f"no answer to {method}"
                read = os.read(self.process.stdout.fileno(), 1 << 20)
                assert read, f"Chromium ended at {method}"
                self.unread += read
            line, _, self.unread = self.unread.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self.commands:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def run(self, expression: str) -> Any:
        """Evaluate an expression in the page and return its value, or that of its promise."""
        answer = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def reload(self) -> None:
        """Load the page anew. A question that comes while the old page goes has no answer: ask again."""
        self.run("window.old = true")
        self.ask("Page.reload")
        state = ""
        while state != "complete":
            with suppress(AssertionError):
                state = self.run("window.old ? 'old' : document.readyState")

    def __enter__(self) -> Browser:
        pages = []
        while not pages:
            pages = [target for target in self.ask("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        attached = self.ask("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        while self.run("location.protocol + document.readyState") != "file:complete":
            pass
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
        self.log.seek(0)
        said = [line for line in self.log.read().decode(errors="replace").splitlines() if "CONSOLE" in line]
        self.log.close()
        if error:
            error.add_note(f"on the page's console: {said}")
        assert error or not said, said


def browse(page: Path, script: str, library: str = "", **looks: Any) -> Any:
    """Open a page, run a function's body there, and return its result, or what that promises."""
    with Browser(page, **looks) as browser:
        browser.run(f"{library};undefined")
        return browser.run(f"(async () => {{ {script} }})()")


def violations(page: Path, **looks: Any) -> list[str]:
    """What axe-core finds wrong on a page."""
    script = """const {violations} = await axe.run();
      return violations.flatMap(({id, nodes}) => nodes.map(node => `${id}: ${node.html}`));"""
    return browse(page, script, AXE.read_text(encoding="utf-8"), **looks)


def drawn_on_paper(page: Path, sheet: dict[str, Any] | None = None, **looks: Any) -> list[bytes]:
    """What is drawn where a page is printed, as commands of PDF."""
    with Browser(page, **looks) as browser:
        paper = base64.b64decode(browser.ask("Page.printToPDF", **sheet or {})["data"])
    found = []
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", paper, re.S):
        with suppress(zlib.error):
            found.append(zlib.decompress(stream))
    return found

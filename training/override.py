"""Overrides to be pasted: what a run prints to be typed next."""

from __future__ import annotations

import re
import shlex


def override(setting: str, path: object) -> str:
    """SETTING=PATH for a shell, with the quotes that it and Hydra need."""
    text = str(path)
    if not re.fullmatch(r"[A-Za-z_/.][\w/.-]*", text, re.ASCII):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return shlex.quote(f"{setting}={text}")

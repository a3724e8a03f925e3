"""The HTML files beside this one, with their blanks filled in; each page needs nothing else and opens offline."""

import json
import re
from pathlib import Path
from typing import Any


def fill_page(file: str, **blanks: str) -> str:
    """Return `file` with HTML for every blank, e.g. TITLE. In one pass: a value may hold the name of another blank."""
    page = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return re.sub("|".join(blanks), lambda found: blanks[found[0]], page)


def script_value(data: Any) -> str:
    """Return plain data as JavaScript without a "<": a text may well be </script>."""
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")

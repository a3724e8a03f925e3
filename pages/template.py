"""The HTML files beside this one, with their blanks filled in; each page needs nothing else and opens offline."""

import html
import json
import re
from pathlib import Path
from typing import Any


def fill_page(file: str, title: str, data: Any = None, **blanks: str) -> str:
    """Return `file` with its TITLE, plain data as JavaScript for DATA, and HTML for every other blank.

    In one pass: a value may hold the name of a blank.
    """
    script = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # a text may well be </script>
    blanks |= {"TITLE": html.escape(title), "DATA": script}
    page = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return re.sub("|".join(blanks), lambda found: blanks[found[0]], page)

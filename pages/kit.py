"""The HTML files beside this one, filled in: each page holds the kit's style and script and opens offline."""

import html
import json
import re
from pathlib import Path
from typing import Any

from runs.metrics import finite


def fill_page(file: str, title: str, data: Any) -> str:
    """Return `file` with its TITLE, plain data as JSON for DATA, and the files that KIT.CSS and KIT.JS name.

    In one pass: a value may hold the name of a blank.
    """
    here = Path(__file__).parent
    blanks = {f"KIT.{kind.upper()}": (here / f"kit.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")}
    script = json.dumps(finite(data), ensure_ascii=False, separators=(",", ":"))
    blanks |= {"TITLE": html.escape(title), "DATA": script.replace("<", "\\u003c")}  # a text may well be </script>
    page = (here / file).read_text(encoding="utf-8")
    return re.sub("|".join(map(re.escape, blanks)), lambda found: blanks[found[0]], page)

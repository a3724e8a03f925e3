"""The HTML files beside this one, filled in: each page holds the kit's style and scripts and opens offline."""

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from common.text import visible
from runs.metrics import finite


def packed(values: np.ndarray) -> str:
    """Return numbers as kit.js's bytes() reads them."""
    return base64.b64encode(values.tobytes()).decode()


def packed_shares(shares: np.ndarray) -> str:
    """Return a byte for each number from 0 to 1, of its square root: small ones stay apart. NaN counts as 0."""
    return packed(np.round(255 * np.sqrt(np.nan_to_num(shares))).astype(np.uint8))


def shape(attention: object, layers: object, heads: object, width: object) -> str:
    """Return a model in a line."""
    return visible(f"{attention}, {layers} layers × {heads} heads × {width} wide")


def fill_page(file: str, title: str, data: Any) -> str:
    """Return `file` with its TITLE, plain data as JSON for DATA and the kit's files where it names them.

    In one pass: a value may hold the name of a blank.
    """
    here = Path(__file__).parent
    blanks = {name.upper(): (here / name).read_text(encoding="utf-8") for name in ("kit.css", "kit.js", "chart.js")}
    script = json.dumps(finite(data), ensure_ascii=False, separators=(",", ":"))
    blanks |= {"TITLE": html.escape(title), "DATA": script.replace("<", "\\u003c")}  # a text may well be </script>
    page = (here / file).read_text(encoding="utf-8")
    filled = re.sub("|".join(map(re.escape, blanks)), lambda found: blanks[found[0]], page)
    return filled.encode(errors="replace").decode()  # names of files may hold what is no character

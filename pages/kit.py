"""Offline pages: the HTML files of this folder, filled with data, style and scripts."""

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
    """Return the bytes of an array in base64, which kit.js's bytes() reads."""
    return base64.b64encode(values.tobytes()).decode()


def packed_shares(shares: np.ndarray) -> str:
    """Return numbers from 0 to 1 as one byte each, packed; NaN counts as 0."""
    # The square root keeps small numbers apart.
    return packed(np.round(255 * np.sqrt(np.nan_to_num(shares))).astype(np.uint8))


def shape(attention: object, layers: object, heads: object, width: object) -> str:
    """Return one line about a model: its attention and its sizes."""
    layers = f"{layers} layer{'s' * (str(layers) != '1')}"
    heads = f"{heads} head{'s' * (str(heads) != '1')}"
    return visible(f"{attention}, {layers} × {heads} × {width} wide")


def exact(value: Any) -> Any:
    """Replace whole numbers that JavaScript rounds, such as a seed of 2^53 + 1, by their texts."""
    if isinstance(value, dict):
        return {name: exact(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [exact(item) for item in value]
    return str(value) if isinstance(value, int) and abs(value) > 2**53 else value


def fill_page(file: str, title: str, data: Any) -> str:
    """Return the page `file` with its placeholders filled in.

    TITLE becomes the title, DATA plain data as JSON, and KIT.JS and the other scripts and styles these files.
    """
    here = Path(__file__).parent
    script = json.dumps(exact(finite(data)), separators=(",", ":"))
    values = {
        "TITLE": html.escape(title),
        "DATA": script.replace("<", "\\u003c"),  # the data may contain </script>
    }

    def fill(placeholder: re.Match[str]) -> str:
        name = placeholder[0]
        return values[name] if name in values else (here / name.lower()).read_text(encoding="utf-8")

    # One pass over the page: a value that contains the name of a placeholder stays as it is.
    page = (here / file).read_text(encoding="utf-8")
    filled = re.sub(r"TITLE|DATA|[A-Z]+\.(?:CSS|JS)", fill, page)
    return filled.encode(errors="replace").decode()  # a file's name may have bytes that are not UTF-8

"""Tiny Shakespeare: downloaded once, verified, and kept in the cache."""

from __future__ import annotations

import hashlib
import urllib.request
from http.client import HTTPException
from pathlib import Path

from data.files import replacing
from errors import DataError

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_TIMEOUT = 20  # seconds without an answer


def tiny_shakespeare(cache_dir: str) -> Path:
    """Return the file in the cache, downloaded if need be. Raises DataError when that fails."""
    path = Path(cache_dir).expanduser() / "tinyshakespeare.txt"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256:
        return path
    try:
        with urllib.request.urlopen(URL, timeout=_TIMEOUT) as response:
            content = response.read()
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise ValueError("the sha256 of what came is not that of the known file")
    except (OSError, HTTPException, ValueError) as error:
        raise DataError(
            f"data=shakespeare could not be downloaded from {URL} ({error}): put a copy at {path}, "
            "or give data.path=FILE for one that you have."
        ) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_bytes(content)
    except OSError as error:
        raise DataError(f"data.cache_dir={cache_dir} cannot be written ({error}): give another folder.") from error
    return path

"""Long text in bounded pieces, cut where no token spans the cut.

Every split pattern in use here (GPT-2's, cl100k's, o200k's and those of tokenizer.py) finds its
pieces from left to right and looks at most at what follows. In none does a letter or digit share a
piece with whitespace after it, nor any sign with a space after it, nor a line end with what
follows it unless that is another or, in o200k, a slash. So these cuts change no token: before
whitespace that follows a letter or digit, before a space that follows a non-space, and after a single
line end between non-spaces, the second no slash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# Longest piece in characters. It bounds memory and time, and keeps the regex engine, which gives up
# when it has to remember a million positions in a run of spaces, far from its limit.
LONGEST = 1 << 18

_UP_TO_LAST_CUT = re.compile(r"(?s).*(?:\S(?= )|[^\W_](?=\s)|\S\n(?=[^\s/]))")


def safe_cut(text: str, limit: int) -> int | None:
    """The last position from 1 to `limit` where `text` can be cut without changing a token, if any."""
    found = _UP_TO_LAST_CUT.match(text, 0, limit + 1)
    return found.end() if found else None


def pieces(blocks: Iterable[str], longest: int = LONGEST) -> Iterator[str]:
    """Text that comes in blocks of any size, as pieces of at most `longest` characters.

    A stretch of `longest` characters with nowhere to cut safely is cut at its end.
    """
    pending = ""
    for block in blocks:
        for start in range(0, len(block), longest):
            pending += block[start : start + longest]
            while len(pending) > longest:
                end = safe_cut(pending, longest) or longest
                yield pending[:end]
                pending = pending[end:]
    if pending:
        yield pending


def replace_surrogates(text: str) -> str:
    """The text with lone surrogates, which JSON can carry but UTF-8 cannot, as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

"""Long text in bounded pieces, cut where no token spans the cut.

The split patterns in use (GPT-2's, cl100k's, o200k's and those of tokenizer.py) match from left to right and look
ahead only. None keeps together a letter or digit and whitespace after it, a sign and a space after it, or a line end
and what follows, unless that is another line end or, in o200k, a slash. So three cuts change no token: before
whitespace after a letter or digit, before a space after a non-space, and after a single line end between two
non-spaces of which the second is not a slash.
"""

import re
from collections.abc import Iterable, Iterator

# Longest piece in characters. It bounds memory and time, and stays far below the limit of tiktoken's regex engine,
# which fails when it must remember a million positions in a run of spaces.
LONGEST = 1 << 18

_UP_TO_LAST_CUT = re.compile(r"(?s).*(?:\S(?= )|[^\W_](?=\s)|\S\n(?=[^\s/]))")


def safe_cut(text: str, limit: int) -> int | None:
    """Return the last position from 1 to `limit` where a cut of `text` changes no token, or None."""
    found = _UP_TO_LAST_CUT.match(text, 0, limit + 1)
    return found.end() if found else None


def pieces(blocks: Iterable[str], longest: int = LONGEST) -> Iterator[str]:
    """Yield text that comes in blocks of any size as pieces of at most `longest` characters.

    A stretch of `longest` characters without a safe cut is cut at its end.
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
    """Return the text with U+FFFD for lone surrogates, which JSON can carry but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

"""Numbers as a person reads them."""

from __future__ import annotations


def si(number: float, digits: int = 4, space: str = " ") -> str:
    """A number and SI's prefix, for its unit to follow: 1,234,567 is "1.235 M"."""
    exponent = int(f"{number:.{digits - 1}e}".split("e")[1])  # of the number as it will be rounded
    power = min(6, max(0, exponent // 3))
    return f"{number / 1000**power:.{digits}g}{space}{' kMGTPE'[power].strip()}"


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which there are one and a half."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"

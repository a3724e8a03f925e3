"""Numbers as people read them."""


def si(number: float, digits: int = 4, space: str = " ") -> str:
    """Format a number with an SI prefix, ready for its unit: 1,234,567 is "1.235 M"."""
    exponent = int(f"{number:.{digits - 1}e}".split("e")[1])  # after rounding
    power = min(6, max(0, exponent // 3))
    return f"{number / 1000**power:.{digits}g}{space}{' kMGTPE'[power].strip()}"


def duration(seconds: float) -> str:
    """Format a duration in the largest unit of which it has at least 1.5."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"

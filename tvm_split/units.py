"""Quantities, and lists, as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

MOST_AMOUNT = 1e18
"""Of seconds, bytes, or bytes a second: far above all there is, and their sums and products are finite still."""
LEAST_AMOUNT = 1e-30
"""Of what is divided by, such as seconds, unless it is 0."""
SLOWEST = 1e-9
"""Bytes a second of a link over which anything may pass at all."""
MOST_LINES = 12
BYTES_PER_UNIT = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SECONDS_PER_UNIT = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SECONDS_PER_AGE = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def bytes_text(count: float) -> str:
    """A number of bytes with a unit that fits it."""
    number, unit = _in_unit(count, BYTES_PER_UNIT, "B")
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def precise_bytes_text(count: float) -> str:
    """With four digits, so that two numbers that differ are seen to."""
    number, unit = _in_unit(count, BYTES_PER_UNIT, "B")
    return f"{number:.4g} {unit}"


def seconds_text(seconds: float) -> str:
    """A duration with a unit that fits it, and three digits or more."""
    number, unit = _in_unit(seconds, SECONDS_PER_UNIT, "s")
    return f"{number:.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"


def age_text(seconds: float) -> str:
    """An age in the largest unit of which there is at least one."""
    number, unit = _in_unit(seconds, SECONDS_PER_AGE, "")
    if not unit:
        return "less than a minute"
    count = int(number)
    return f"{count} {unit}{'' if count == 1 else 's'}"


def short_list(names: Sequence[str], most: int = 6) -> str:
    """Names with commas between them; the middle of a long list is left out, and by how much is said."""
    if len(names) <= most:
        return ", ".join(names)
    head, tail = names[: most // 2], names[-(most // 2) :]
    return f"{', '.join(head)}, … {len(names) - len(head) - len(tail)} more …, {', '.join(tail)}"


def names_of(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def few_lines(lines: Iterable[str], count: int) -> str:
    """The first of so many lines, and how many are left out."""
    shown = "\n".join(islice(lines, MOST_LINES))
    return shown if count <= MOST_LINES else f"{shown}\n… and {count - MOST_LINES} more like these"


def _in_unit(value: float, units: Sequence[tuple[float, str]], smallest: str) -> tuple[float, str]:
    """The value in the first unit of which there is at least one, else as it is in the ``smallest``."""
    for size, unit in units:
        if value >= size:
            return value / size, unit
    return value, smallest

"""Quantities as people read them."""

from __future__ import annotations

BYTES_PER_UNIT = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SECONDS_PER_UNIT = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SECONDS_PER_AGE = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def bytes_text(count: float) -> str:
    """A number of bytes with a unit that fits it."""
    for size, unit in BYTES_PER_UNIT:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def precise_bytes_text(count: float) -> str:
    """With four digits, so that two numbers that differ are seen to."""
    for size, unit in BYTES_PER_UNIT:
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.4g} B"


def seconds_text(seconds: float) -> str:
    """A duration with a unit that fits it, and three digits."""
    for size, unit in SECONDS_PER_UNIT:
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def age_text(seconds: float) -> str:
    """An age in the largest unit of which there is at least one."""
    for size, unit in SECONDS_PER_AGE:
        if seconds >= size:
            count = int(seconds / size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "less than a minute"

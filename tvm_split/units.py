"""Quantities as people read them."""

from __future__ import annotations

BYTES_PER_UNIT = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def bytes_text(count: float) -> str:
    """A number of bytes with a unit that fits it."""
    for size, unit in BYTES_PER_UNIT:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"

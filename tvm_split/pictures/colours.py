"""Colours for pictures."""

from __future__ import annotations

# The palette of Okabe and Ito, which people with any kind of colour vision can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


def text_colour(background: str) -> str:
    """Return black or white, depending on which is easier to read on ``background`` (``#RRGGBB``).

    The choice uses the relative luminance of WCAG 2.1; white and black have equal contrast at 0.179.
    """
    channels = [int(background[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"

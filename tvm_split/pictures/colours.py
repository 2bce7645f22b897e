"""Colours for pictures."""

from __future__ import annotations

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""The palette of Okabe and Ito, which people with any kind of colour vision can tell apart."""
TEXT_COLOURS = ("#ffffff", *["#000000"] * 7)
"""What is easier to read on each of these colours, by the contrast of WCAG 2.1."""

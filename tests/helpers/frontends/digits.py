"""Scikit-learn's handwritten digits, for networks that are trained in a test."""

from __future__ import annotations

from functools import cache

import numpy as np

TRAINED = 1437
"""How many of the 1797 are trained on; the others are the test."""


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images as float32 (1797, 8, 8, 1) between 0 and 1, and labels as int32 (1797,), in another order."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.images[order, :, :, None] / 16).astype("float32"), data.target[order].astype("int32")

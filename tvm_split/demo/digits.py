"""The data of the demonstration: scikit-learn's 1797 images of handwritten digits, which come with its package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvm_split.demo.network import CHANNELS

TEST_IMAGES = 720
"""A fifth of all images, kept apart; a multiple of the micro-batch, so that no image is padded or left out."""
DARKEST = 16.0
"""The largest value of a pixel in the data set."""


@dataclass(frozen=True)
class Digits:
    """Images as float32 (count, 3, 8, 8) between 0 and 1 with three equal channels, and labels as int64 (count,)."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits(seed: int) -> Digits:
    """The digits, a fifth of each class kept apart for the test."""
    from sklearn.datasets import load_digits as load_from_package
    from sklearn.model_selection import train_test_split

    data = load_from_package()
    single = (data.images / DARKEST).astype(np.float32)[:, np.newaxis]
    images = np.ascontiguousarray(np.repeat(single, CHANNELS, axis=1))
    labels = data.target.astype(np.int64)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=TEST_IMAGES, random_state=seed, stratify=labels
    )
    return Digits(train_images, train_labels, test_images, test_labels)

"""The demonstration's data, scikit-learn's 1797 images of handwritten digits, and the training on them.

It takes a few seconds, and has the same result every time on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from tvm_split.demo.network import CHANNELS, DigitNetwork

TEST_IMAGES = 720
"""A fifth of all images, kept apart; a multiple of the micro-batch, so that no image is padded or left out."""
DARKEST = 16.0
"""The largest value of a pixel in the data set."""
EPOCHS = 8
BATCH = 32
LEARNING_RATE = 2e-3


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


def train(digits: Digits, seed: int, on_epoch: Callable[[int, int], None]) -> DigitNetwork:
    """A network trained on the training images only, in evaluation mode; ``on_epoch`` hears of those done and all."""
    # One thread: batches this small only lose by sharing the work, and sums keep their order.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = DigitNetwork()
    images, labels = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    optimiser = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    # Smoothed labels keep the scores small, and so their rounding errors far below what the demonstration allows.
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(EPOCHS):
        for chosen in torch.randperm(len(images)).split(BATCH):
            optimiser.zero_grad()
            loss_of(network(images[chosen]), labels[chosen]).backward()
            optimiser.step()
        on_epoch(epoch + 1, EPOCHS)
    network.eval()
    return network


def scores_of(network: DigitNetwork, images: np.ndarray) -> np.ndarray:
    """The network's scores, float32 (count, 10), as torch computes them."""
    with torch.no_grad():
        scores: np.ndarray = network(torch.from_numpy(images)).numpy()
    return scores


def accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    """The share of images whose largest score is that of their label."""
    return float((scores.argmax(axis=1) == labels).mean())

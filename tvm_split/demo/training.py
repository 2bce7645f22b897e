"""Training of the demonstration's network: a few seconds, and the same result every time on the same machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from tvm_split.demo.digits import Digits
from tvm_split.demo.network import DigitNetwork

EPOCHS = 8
BATCH = 32
LEARNING_RATE = 2e-3

EpochDone = Callable[[int, int], None]
"""Called with the epochs done and all epochs."""


def train(digits: Digits, seed: int, on_epoch: EpochDone) -> DigitNetwork:
    """A network trained on the training images only, in evaluation mode."""
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

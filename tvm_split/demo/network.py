"""The network of the demonstration, its splits over machines, its data, and its training.

The data are scikit-learn's 1797 images of handwritten digits. Training takes a few seconds, and is reproducible on the
same machine.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from tvm_split.placement.by_hand import Shard

IMAGE_SIZE = 8
CHANNELS = 3
CLASSES = 10
TEST_IMAGES = 720
"""The size of the test set, 40 % of all images; a multiple of the micro-batch, so no image is padded or left out."""
DARKEST = 16.0
"""The largest value of a pixel in the data set."""
EPOCHS = 8
BATCH = 32
LEARNING_RATE = 2e-3

FIRST_LAYERS = {
    1: ("conv1",),
    2: ("conv1", "flatten"),
    3: ("conv1", "conv2", "flatten"),
    4: ("conv1", "conv2", "flatten", "fc2"),
}
"""The first layer of each machine, by the number of machines; layers up to the next one are on the same machine."""


class DigitNetwork(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Two convolutions and two fully connected layers, from images (batch, 3, 8, 8) to scores (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, 32, kernel_size=3, padding=1)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(32, 32, kernel_size=3, padding=1)
        self.relu2 = nn.ReLU()
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(32 * IMAGE_SIZE * IMAGE_SIZE, 256)
        self.relu3 = nn.ReLU()
        self.fc2 = nn.Linear(256, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.relu2(self.conv2(self.relu1(self.conv1(images))))
        scores: torch.Tensor = self.fc2(self.relu3(self.fc1(self.flatten(features))))
        return scores


def shards_over(machine_names: tuple[str, ...]) -> tuple[Shard, ...]:
    """Shard all layers over all machines: convolutions by rows, with halo exchange, the others by channels."""
    shares = dict.fromkeys(machine_names, 1 / len(machine_names))
    return Shard("conv1", "relu2", "rows", shares, "each"), Shard("flatten", "fc2", "channels", shares)


@dataclass(frozen=True)
class Digits:
    """Images as float32 (count, 3, 8, 8) between 0 and 1 with three equal channels, and labels as int64 (count,)."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits(seed: int) -> Digits:
    """Return the digits, split into training and test set with equal shares of each class."""
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
    """Train a network and return it in evaluation mode; ``on_epoch`` gets the number of epochs done and in total."""
    # One thread: more would slow down batches this small, and change the order of sums.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = DigitNetwork()
    images, labels = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    optimiser = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    # Label smoothing keeps the scores small, and their rounding errors far below the allowed difference.
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
    """Return the network's scores, float32 (count, 10), computed by torch."""
    with torch.no_grad():
        scores: np.ndarray = network(torch.from_numpy(images)).numpy()
    return scores


def accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of images whose largest score is that of their label."""
    return float((scores.argmax(axis=1) == labels).mean())

"""The network of the demonstration, and its splits over machines."""

from __future__ import annotations

import torch
from torch import nn

from tvm_split.errors import PlanError
from tvm_split.planner.shard import Shard

IMAGE_SIZE = 8
CHANNELS = 3
CLASSES = 10

LAYERS_BY_MACHINE = {
    1: (("conv1", "relu1", "conv2", "relu2", "flatten", "fc1", "relu3", "fc2"),),
    2: (("conv1", "relu1", "conv2", "relu2"), ("flatten", "fc1", "relu3", "fc2")),
    3: (("conv1", "relu1"), ("conv2", "relu2"), ("flatten", "fc1", "relu3", "fc2")),
    4: (("conv1", "relu1"), ("conv2", "relu2"), ("flatten", "fc1", "relu3"), ("fc2",)),
}
"""The layers of each machine, by the number of machines."""


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


def split_over(machine_names: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the layers of every machine, as the argument ``split`` of `tvm_split.plan`.

    Raises:
        PlanError: the demonstration has no split for this number of machines.
    """
    if len(machine_names) not in LAYERS_BY_MACHINE:
        raise PlanError(
            f"the demonstration can use 1 to {max(LAYERS_BY_MACHINE)} workers, {len(machine_names)} were asked for"
        )
    parts = LAYERS_BY_MACHINE[len(machine_names)]
    return {machine: list(layers) for machine, layers in zip(machine_names, parts, strict=True)}


def shards_over(machine_names: tuple[str, ...]) -> tuple[Shard, ...]:
    """Shard all layers over all machines: convolutions by rows, with halo exchange, the others by channels.

    Raises:
        PlanError: there is one machine, or there are more than an image of `IMAGE_SIZE` rows allows.
    """
    if not 1 < len(machine_names) <= max(LAYERS_BY_MACHINE):
        raise PlanError(
            f"layers of the demonstration can be shared by 2 to {max(LAYERS_BY_MACHINE)} workers, "
            f"{len(machine_names)} were asked for"
        )
    shares = dict.fromkeys(machine_names, 1 / len(machine_names))
    return Shard("conv1", "relu2", "rows", shares, "each"), Shard("flatten", "fc2", "channels", shares)

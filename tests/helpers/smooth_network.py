"""A network that transfers half a megabyte in the middle, which codecs can compress."""

import torch
from torch import nn

CROSSING_BYTES = 32 * 64 * 64 * 4
CUT = (("0", "1"), ("2", "3", "4", "5"))
"""The layers before the transfer, and those behind it."""


def smooth_network() -> tuple[nn.Module, torch.Tensor]:
    """Convolutions, and an image as smooth as photographs are."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    ).eval()
    torch.manual_seed(1)
    image = nn.functional.interpolate(torch.rand(1, 3, 8, 8), (64, 64), mode="bicubic")
    network(image)
    return network, image

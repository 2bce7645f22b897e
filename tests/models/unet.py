"""A U-Net with long skips (Ronneberger et al., 2015), padded, and with batch norms as it is used today."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.conditioning import conditioned


class DoubleConvolution(nn.Sequential):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Input float32[batch, 3, height, width], output float32[batch, classes, height, width]."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(map(DoubleConvolution, [3, *widths[:-2]], widths[:-1]))
        self.bottom = DoubleConvolution(widths[-2], widths[-1])
        rising = widths[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for wide, narrow in itertools.pairwise(rising))
        self.joined = nn.ModuleList(map(DoubleConvolution, rising[:-1], rising[1:]))
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([skips.pop(), up(x)], 1))
        return self.last(x)


def unet(width: int = 4, depth: int = 2, classes: int = 4, seed: int = 0) -> nn.Module:
    return conditioned(lambda: UNet(width, depth, classes), seed)

"""A U-Net (Ronneberger et al., 2015) with all that such networks have between their levels."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class UNet(nn.Module):
    """Two levels down and up: transposed convolutions, an interpolation, skips over the whole depth."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.bottom = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.up2, self.up1 = nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 4, 3, 2, 1, output_padding=1)
        self.join2, self.join1 = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect")
        self.last = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = functional.hardswish(self.down1(x))
        second = functional.silu(self.down2(functional.max_pool2d(first, 2)))
        bottom = functional.relu6(self.bottom(functional.avg_pool2d(second, 3, 2, 1)))
        joined = torch.relu(self.join2(torch.cat([second, self.up2(bottom)], 1)))
        wide = functional.interpolate(joined, scale_factor=2, mode="bilinear", align_corners=False)
        near = functional.interpolate(bottom, scale_factor=4, mode="nearest")[:, :4]
        joined = self.join1(torch.cat([first, self.up1(joined)], 1)) + near
        return self.last(torch.cat([joined, wide], 1))


def unet() -> tuple[nn.Module, Tensor]:
    """The network, and an input."""
    torch.manual_seed(0)
    return UNet().eval(), torch.randn(1, 1, 32, 24)

"""ResNets, VGGs, MobileNets and EfficientNets as plain torch modules, of any size, in evaluation mode."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.conditioning import conditioned


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions and a shortcut (He et al., 2016)."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != width * self.expansion:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, width * self.expansion, 1, stride, bias=False),
                nn.BatchNorm2d(width * self.expansion),
            )

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    """Input float32[batch, 3, height, width], output float32[batch, classes]."""

    def __init__(self, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = width
        for index, count in enumerate(blocks):
            layer = []
            for position in range(count):
                stride = 2 if index > 0 and position == 0 else 1
                layer.append(Bottleneck(channels, width << index, stride))
                channels = (width << index) * Bottleneck.expansion
            setattr(self, f"layer{index + 1}", nn.Sequential(*layer))
        self.stages = len(blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for index in range(self.stages):
            x = getattr(self, f"layer{index + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet(blocks: Sequence[int] = (1, 1), width: int = 8, classes: int = 10, seed: int = 0) -> nn.Module:
    return conditioned(lambda: ResNet(blocks, width, classes), seed)


def resnet50(seed: int = 0) -> nn.Module:
    """Input float32[batch, 3, 224, 224]."""
    return resnet((3, 4, 6, 3), 64, 1000, seed)


class VGG(nn.Module):
    """Input float32[batch, 3, size, size], output float32[batch, classes] (Simonyan and Zisserman, 2015)."""

    def __init__(self, plan: Sequence[int | str], hidden: int, pooled: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for entry in plan:
            if isinstance(entry, str):
                layers.append(nn.MaxPool2d(2, 2))
            else:
                layers += [nn.Conv2d(channels, entry, 3, padding=1), nn.ReLU(inplace=True)]
                channels = entry
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = nn.Sequential(
            nn.Linear(channels * pooled * pooled, hidden), nn.ReLU(True), nn.Dropout(),
            nn.Linear(hidden, hidden), nn.ReLU(True), nn.Dropout(), nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def vgg(
    plan: Sequence[int | str] = (8, "M", 16, 16, "M"),
    hidden: int = 32,
    pooled: int = 2,
    classes: int = 10,
    seed: int = 0,
) -> nn.Module:
    return conditioned(lambda: VGG(plan, hidden, pooled, classes), seed)


def vgg16(seed: int = 0) -> nn.Module:
    """Input float32[batch, 3, 224, 224]."""
    plan = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"]
    return vgg(plan, 4096, 7, 1000, seed)


class SqueezeExcite(nn.Module):
    """A gate of one value a channel, from all pixels, which the image is multiplied by (Hu et al., 2018)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.pool, self.activation, self.gate = nn.AdaptiveAvgPool2d(1), nn.SiLU(), nn.Sigmoid()
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.activation(self.fc1(self.pool(x)))))


class InvertedResidual(nn.Module):
    """Expand, depthwise, project (Sandler et al., 2018); with ``squeezes`` as in MBConv (Tan and Le, 2019)."""

    def __init__(
        self, channels: int, out: int, stride: int, expansion: int, kernel: int = 3,
        activation: type[nn.Module] = nn.ReLU6, squeezes: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), activation(inplace=True)]
        layers += [
            nn.Conv2d(hidden, hidden, kernel, stride, kernel // 2, groups=hidden, bias=False), nn.BatchNorm2d(hidden),
            activation(inplace=True),
        ]  # fmt: skip
        if squeezes:
            layers.append(SqueezeExcite(hidden, max(1, channels // 4)))
        layers += [nn.Conv2d(hidden, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and channels == out

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        norm = self.conv[-1]
        assert isinstance(norm, nn.BatchNorm2d)
        return norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.has_shortcut else self.conv(x)


class MobileNetV2(nn.Module):
    """Input float32[batch, 3, height, width], output float32[batch, classes]."""

    def __init__(self, stem: int, settings: Sequence[tuple[int, int, int, int]], last: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(3, stem, 3, 2, 1, bias=False), nn.BatchNorm2d(stem), nn.ReLU6(inplace=True))
        ]
        channels = stem
        for expansion, out, count, stride in settings:
            for position in range(count):
                layers.append(InvertedResidual(channels, out, stride if position == 0 else 1, expansion))
                channels = out
        layers.append(
            nn.Sequential(nn.Conv2d(channels, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU6(inplace=True))
        )
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


def mobilenet(
    stem: int = 8, settings: Sequence[tuple[int, int, int, int]] = ((1, 8, 1, 1), (4, 12, 2, 2)), last: int = 32,
    classes: int = 10, seed: int = 0,
) -> nn.Module:  # fmt: skip
    return conditioned(lambda: MobileNetV2(stem, settings, last, classes), seed)


def mobilenet_v2(seed: int = 0) -> nn.Module:
    """Input float32[batch, 3, 224, 224]."""
    settings = [
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ]  # fmt: skip
    return mobilenet(32, settings, 1280, 1000, seed)


class EfficientNet(nn.Module):
    """Input float32[batch, 3, height, width], output float32[batch, classes].

    ``settings`` are expansion, kernel, stride, channels and number of blocks.
    """

    def __init__(self, stem: int, settings: Sequence[tuple[int, ...]], last: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, stem, 3, 2, 1, bias=False), nn.BatchNorm2d(stem), nn.SiLU(inplace=True)]
        channels = stem
        for expansion, kernel, stride, out, count in settings:
            for position in range(count):
                strides = stride if position == 0 else 1
                layers.append(InvertedResidual(channels, out, strides, expansion, kernel, nn.SiLU, squeezes=True))
                channels = out
        layers += [nn.Conv2d(channels, last, 1, bias=False), nn.BatchNorm2d(last), nn.SiLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


def efficientnet(
    stem: int = 8, settings: Sequence[tuple[int, ...]] = ((1, 3, 1, 8, 1), (4, 5, 2, 12, 2)), last: int = 32,
    classes: int = 10, seed: int = 0,
) -> nn.Module:  # fmt: skip
    return conditioned(lambda: EfficientNet(stem, settings, last, classes), seed)


def efficientnet_b0(seed: int = 0) -> nn.Module:
    """Input float32[batch, 3, 224, 224]."""
    settings = [
        (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1),
    ]  # fmt: skip
    return efficientnet(32, settings, 1280, 1000, seed)

"""Well-known networks as plain torch modules, seeded and well-conditioned, without torchvision or transformers.

Every constructor takes its sizes, so that tests can make tiny ones; ``resnet50()``, ``vgg16()``, ``mobilenet_v2()``,
``efficientnet_b0()``, ``vit_b16()``, ``bert_base()`` and ``gpt2_small()`` have the published sizes. All are in
evaluation mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def conditioned(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build with a seed of its own: Kaiming weights, batch-norm statistics as after training; in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        for part in model.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_in", nonlinearity="relu")
                if part.bias is not None:
                    nn.init.normal_(part.bias, std=0.01)
            elif isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=1 / math.sqrt(part.in_features))
                nn.init.normal_(part.bias, std=0.01)
            elif isinstance(part, nn.BatchNorm2d):
                nn.init.uniform_(part.weight, 0.8, 1.2)
                nn.init.normal_(part.bias, std=0.05)
                nn.init.normal_(part.running_mean, std=0.05)
                nn.init.uniform_(part.running_var, 0.8, 1.2)
            elif isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=0.5)
        for part in model.modules():
            if isinstance(part, BasicBlock | Bottleneck | InvertedResidual):
                # The last norm of a residual branch is small, or the activations grow with every block.
                nn.init.uniform_(part.last_norm.weight, 0.1, 0.3)
    return model.eval()


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


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al., 2016)."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    """Input float32[batch, 3, height, width], output float32[batch, classes]."""

    def __init__(
        self, blocks: Sequence[int], width: int, classes: int, block: type[Bottleneck] | type[BasicBlock] = Bottleneck
    ) -> None:
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
                layer.append(block(channels, width << index, stride))
                channels = (width << index) * block.expansion
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


def resnet18(seed: int = 0) -> nn.Module:
    """Input float32[batch, 3, height, width] of at least 32 pixels."""
    return conditioned(lambda: ResNet((2, 2, 2, 2), 64, 1000, BasicBlock), seed)


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


class Attention(nn.Module):
    """Self-attention with torch's scaled_dot_product_attention; [batch, tokens, width] in and out."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, approximate: str = "none") -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU(approximate=approximate)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class PreNormBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, causal: bool = False, approximate: str = "none") -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden, approximate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Input float32[batch, 3, size, size], output float32[batch, classes] (Dosovitskiy et al., 2021)."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*[PreNormBlock(width, heads, 4 * width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit(
    size: int = 16, patch: int = 4, width: int = 32, depth: int = 2, heads: int = 4, classes: int = 10, seed: int = 0
) -> nn.Module:
    return conditioned(lambda: VisionTransformer(size, patch, width, depth, heads, classes), seed)


def vit_b16(seed: int = 0) -> nn.Module:
    """Input float32[batch, 3, 224, 224]."""
    return vit(224, 16, 768, 12, 12, 1000, seed)


class PostNormBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.mlp = MLP(width, hidden)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.attention(x, mask))
        return self.output_norm(x + self.mlp(x))


class Bert(nn.Module):
    """Inputs int64[batch, tokens] and a 0/1 mask int64[batch, tokens]; outputs the sequence and the pooled token."""

    def __init__(self, vocabulary: int, positions: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList([PostNormBlock(width, heads, 4 * width) for _ in range(depth)])
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.norm(self.word_embeddings(tokens) + self.position_embeddings(positions)))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, mask)
        return {"sequence": x, "pooled": torch.tanh(self.pooler(x[:, 0]))}


def bert(
    vocabulary: int = 50, positions: int = 16, width: int = 32, depth: int = 2, heads: int = 4, seed: int = 0
) -> nn.Module:
    return conditioned(lambda: Bert(vocabulary, positions, width, depth, heads), seed)


def bert_base(seed: int = 0) -> nn.Module:
    """Inputs int64[batch, tokens] twice, at most 512 tokens."""
    return bert(30522, 512, 768, 12, 12, seed)


class GPT2(nn.Module):
    """Input int64[batch, tokens], output logits float32[batch, tokens, vocabulary]; the head has its own weight."""

    def __init__(self, vocabulary: int, positions: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(positions, width)
        self.h = nn.ModuleList(
            [PreNormBlock(width, heads, 4 * width, causal=True, approximate="tanh") for _ in range(depth)]
        )
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def gpt2(
    vocabulary: int = 50, positions: int = 16, width: int = 32, depth: int = 2, heads: int = 4, seed: int = 0
) -> nn.Module:
    return conditioned(lambda: GPT2(vocabulary, positions, width, depth, heads), seed)


def gpt2_small(seed: int = 0) -> nn.Module:
    """Input int64[batch, tokens], at most 1024 tokens."""
    return gpt2(50257, 1024, 768, 12, 12, seed)


def small_models() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """One tiny network of each kind, with example inputs."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 16, 16, generator=generator)
    tokens = torch.randint(0, 50, (2, 12), generator=generator)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    return {
        "resnet": (resnet(), (image,)),
        "vgg": (vgg(), (image,)),
        "mobilenet": (mobilenet(), (image,)),
        "efficientnet": (efficientnet(), (image,)),
        "vit": (vit(), (image,)),
        "bert": (bert(), (tokens, mask)),
        "gpt2": (gpt2(), (tokens,)),
    }


PublishedModel = tuple[Callable[[], nn.Module], tuple[Tensor, ...]]


def published_models(tokens: int = 128, pixels: int = 224) -> dict[str, PublishedModel]:
    """Constructors of the networks in their published sizes, with one square image or some words as example inputs."""
    generator = torch.Generator().manual_seed(0)
    image = (torch.randn(1, 3, pixels, pixels, generator=generator),)
    words = torch.randint(0, 1000, (1, tokens), generator=generator)
    return {
        "resnet50": (resnet50, image),
        "vgg16": (vgg16, image),
        "mobilenet_v2": (mobilenet_v2, image),
        "efficientnet_b0": (efficientnet_b0, image),
        "vit_b16": (vit_b16, image),
        "bert_base": (bert_base, (words, torch.ones_like(words))),
        "gpt2_small": (gpt2_small, (words,)),
    }

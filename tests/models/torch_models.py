"""Well-known networks as plain torch modules, seeded and well-conditioned, without torchvision or transformers.

Every constructor takes its sizes, so that tests can make tiny ones; ``resnet50()``, ``vgg16()``, ``mobilenet_v2()``,
``efficientnet_b0()``, ``vit_b16()``, ``bert_base()`` and ``gpt2_small()`` have the published sizes. All are in
evaluation mode.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.convolutional_networks import (
    efficientnet,
    efficientnet_b0,
    mobilenet,
    mobilenet_v2,
    resnet,
    resnet50,
    vgg,
    vgg16,
)
from tests.models.transformers import bert, bert_base, gpt2, gpt2_small, vit, vit_b16


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
        "vit_b16": (partial(vit_b16, pixels=pixels), image),
        "bert_base": (bert_base, (words, torch.ones_like(words))),
        "gpt2_small": (gpt2_small, (words,)),
    }

"""Weights of networks in tests: seeded, and such that activations keep their size."""

import math
from collections.abc import Callable

import torch
from torch import nn


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
            if isinstance(last_norm := getattr(part, "last_norm", None), nn.BatchNorm2d):
                # The last norm of a residual branch is small, or the activations grow with every block.
                nn.init.uniform_(last_norm.weight, 0.1, 0.3)
    return model.eval()

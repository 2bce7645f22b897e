"""Well-known networks at their real size, by name."""

from __future__ import annotations

import torch

import tvm_split
from tests.models import torch_models
from tests.models.onnx_models import light_model


def load(name: str) -> tvm_split.Model:
    """``resnet50`` of torch, or a light model of ONNX."""
    if name == "resnet50":
        torch.manual_seed(1)
        return tvm_split.load_model(torch_models.resnet50(), (torch.randn(1, 3, 224, 224),), name=name)
    return tvm_split.load_model(light_model(name), name=name)

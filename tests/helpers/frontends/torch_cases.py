"""The table of the torch sweep: one tiny case for each operator and each way of using it that TVM could get wrong."""

from __future__ import annotations

from tests.helpers.frontends import torch_arithmetic, torch_layers, torch_views

CASES = [*torch_layers.CASES, *torch_arithmetic.CASES, *torch_views.CASES]

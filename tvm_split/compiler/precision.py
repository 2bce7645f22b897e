"""A model whose convolutions and products are computed in half precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm_split.model import Model
from tvm_split.planner.problem import Precision
from tvm_split.relay_passes.half_operands import HalfOperands


def in_precision(model: Model, precision: Precision) -> Model:
    """The model with operands of ``precision`` where it multiplies; every layer keeps its name, and what it rounds.

    A model that is that already stays as it is.
    """
    if precision == "float32":
        return model
    rounding: Any = HalfOperands(precision)
    module = rounding(model.module)
    layers = {name: model.layers[taker] for name, taker in rounding.rounded.items()}
    return replace(model, module=module, layers={**model.layers, **layers})

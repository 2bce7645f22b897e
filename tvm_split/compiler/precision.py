"""Compute a model's convolutions and matrix products in half precision."""

from dataclasses import replace
from typing import Any

from relay_passes.half_operands import OTHERS, HalfOperands
from relay_passes.ir import bindings_of, main_function, operator_name
from tvm_split.model import Model
from tvm_split.placement.problem import Precision
from tvm_split.units import short_list


def in_precision(model: Model, precision: Precision) -> Model:
    """Return the model with the operands of convolutions and matrix products rounded to ``precision``.

    Layers keep their names; a rounding belongs to the first layer that uses it. Operands of other
    dtypes than float32 are unchanged, as is the model if ``precision`` is float32.
    """
    if precision == "float32":
        return model
    rounding: Any = HalfOperands(precision)
    module = rounding(model.module)
    layers = {name: model.layers[reader] for name, reader in rounding.rounded.items()}
    return replace(model, module=module, layers={**model.layers, **layers})


def precision_remarks(model: Model, precision: Precision) -> tuple[str, ...]:
    """Return sentences that name the layers whose multiplications stay in float32."""
    if precision == "float32":
        return ()
    staying: dict[str, list[str]] = {}
    for binding in bindings_of(main_function(model.module)):
        operator = operator_name(binding.value)
        if operator in OTHERS and str(binding.var.ty.dtype) == "float32":
            staying.setdefault(operator.rpartition(".")[2], []).append(model.layers[binding.var.name])
    return tuple(
        f"{short_list(list(dict.fromkeys(layers)))} ({operator}): multiplied in float32, not in {precision}, which "
        "this operator would add up in, too"
        for operator, layers in staying.items()
    )

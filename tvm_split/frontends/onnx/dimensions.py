"""Bind the open sizes of an ONNX model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from tvm_split.errors import ModelImportError
from tvm_split.frontends.dimensions import OpenSizes
from tvm_split.frontends.onnx.graph import model_inputs

Array = np.ndarray[Any, Any]


def bind_sizes(
    model: onnx.ModelProto, examples: Sequence[Array] | None, batch: int | None, dimensions: Mapping[str, int]
) -> onnx.ModelProto:
    """Bind the open sizes of all inputs in place, and return ``model``.

    Sizes come from ``dimensions`` (by the size's name, or as ``input[axis]``), ``batch`` (axis 0) or the examples, in
    this order.

    Raises ModelImportError if a size stays open or two sources disagree.
    """
    known = OpenSizes(batch, dimensions)
    opened: list[tuple[onnx.TensorShapeProto.Dimension, str]] = []
    for index, value in enumerate(model_inputs(model)):
        kind = value.type.tensor_type
        example = None if examples is None else examples[index]
        if not kind.HasField("shape"):
            if example is None:
                raise ModelImportError(f"input {value.name!r} has no shape in the model; give example_inputs")
            kind.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in example.shape)
        if example is not None and example.ndim != len(kind.shape.dim):
            raise ModelImportError(
                f"input {value.name!r} has {len(kind.shape.dim)} axes, example_inputs has shape {list(example.shape)}"
            )
        for axis, dimension in enumerate(kind.shape.dim):
            place = f"{value.name}[{axis}]"
            size = None if example is None else int(example.shape[axis])
            if dimension.HasField("dim_value") and dimension.dim_value > 0:
                said = (batch if axis == 0 else None, "batch"), (size, "the example input")
                known.fixed(place, int(dimension.dim_value), *said)
                continue
            symbol = dimension.dim_param or place
            known.open(symbol, place)
            known.bind(symbol, size, f"the example input at {place}")
            opened.append((dimension, symbol))
    sizes = known.sizes()
    for dimension, symbol in opened:
        if sizes[symbol] < 1:
            raise ModelImportError(f"{known.found[symbol][1]} is {sizes[symbol]}; a size is at least 1")
        dimension.Clear()
        dimension.dim_value = sizes[symbol]
    # Recorded shapes of other tensors may contain symbols that are bound now; shape inference computes them again.
    del model.graph.value_info[:]
    for value in model.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return model

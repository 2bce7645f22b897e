"""Sizes that an ONNX model leaves open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from tvm_split.errors import ModelImportError, OpenAxesError
from tvm_split.frontends.onnx_graph import model_inputs

Array = np.ndarray[Any, Any]


def bind_sizes(
    model: onnx.ModelProto, examples: Sequence[Array] | None, batch: int | None, dimensions: Mapping[str, int]
) -> onnx.ModelProto:
    """``model`` with every input of fixed size, from ``dimensions`` (by the size's name, or as ``input[axis]``),
    ``batch`` (axis 0) or the examples, in this order. The model is changed in place and returned.

    Raises ModelImportError if a size stays open or two sources disagree.
    """
    known: dict[str, tuple[int, str]] = {}
    usable: set[str] = set()
    inputs = model_inputs(model)
    for index, value in enumerate(inputs):
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
                _check_fixed(place, int(dimension.dim_value), size, batch if axis == 0 else None, dimensions.get(place))
                continue
            symbol = dimension.dim_param or place
            usable.update((symbol, place))
            _take(known, symbol, dimensions.get(place), f"dimensions[{place!r}]")
            _take(known, symbol, dimensions.get(symbol), f"dimensions[{symbol!r}]")
            if axis == 0:
                _take(known, symbol, batch, "batch")
            _take(known, symbol, size, f"the example input at {place}")
    for wrong in dimensions:
        if wrong not in usable and not any(wrong.startswith(f"{value.name}[") for value in inputs):
            raise ModelImportError(f"dimensions names {wrong!r}, the model's open sizes are {sorted(usable) or 'none'}")
    missing: dict[str, str] = {}
    first = set()
    for value in inputs:
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
            if dimension.HasField("dim_value") and dimension.dim_value > 0:
                continue
            place = f"{value.name}[{axis}]"
            symbol = dimension.dim_param or place
            if symbol in known:
                dimension.Clear()
                dimension.dim_value = known[symbol][0]
                continue
            missing.setdefault(symbol, place)
            if axis == 0:
                first.add(symbol)
    if missing:
        raise OpenAxesError(missing, first)
    _forget_other_sizes(model)
    return model


def _take(known: dict[str, tuple[int, str]], symbol: str, size: int | None, source: str) -> None:
    if size is None:
        return
    if size < 1:
        raise ModelImportError(f"{source} is {size}; a size is at least 1")
    before = known.setdefault(symbol, (size, source))
    if before[0] != size:
        raise ModelImportError(f"{source} is {size}, but {before[1]} says {before[0]} for the same size ({symbol!r})")


def _check_fixed(place: str, fixed: int, example: int | None, batch: int | None, dimension: int | None) -> None:
    for size, source in ((dimension, f"dimensions[{place!r}]"), (batch, "batch"), (example, "the example input")):
        if size is not None and size != fixed:
            raise ModelImportError(
                f"{source} gives {place} the size {size}, the model has the fixed size {fixed} there; "
                "export it again with an open size, or use the model's own"
            )


def _forget_other_sizes(model: onnx.ModelProto) -> None:
    """Sizes written for other tensors may name symbols that are bound now; shape inference finds them again."""
    del model.graph.value_info[:]
    for value in model.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")

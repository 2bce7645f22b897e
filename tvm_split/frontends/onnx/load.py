"""Load ONNX models as Models: from files (with external data next to them), bytes, or a ModelProto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tvm_split.errors import ModelImportError
from tvm_split.frontends import ImportRequest
from tvm_split.frontends.dimensions import bound_inputs, in_order
from tvm_split.frontends.names import identifier
from tvm_split.frontends.onnx.annotations import split_from_annotations
from tvm_split.frontends.onnx.graph import model_inputs, numpy_name, static_graph
from tvm_split.frontends.onnx.importer import import_onnx, importable_operators
from tvm_split.frontends.onnx.reference import OnnxReference
from tvm_split.frontends.reference import InChildProcess
from tvm_split.model import Model

Array = np.ndarray[Any, Any]


def load_onnx(source: onnx.ModelProto | bytes | str | Path, request: ImportRequest) -> Model:
    """Return a Model of an ONNX model; ``example_inputs`` (a sequence, a dict by input name, or one array) is optional.

    Layers have the names of the nodes; missing or repeated names become operator and position (``Conv_3``).
    Raises ModelImportError.
    """
    model = _read(source)
    examples = _bind_sizes(model, request)
    graph = static_graph(model, importable_operators())
    built = import_onnx(graph)
    name = request.name or (Path(source).stem if isinstance(source, str | Path) else model.graph.name)
    reference = InChildProcess(OnnxReference(model, graph.inputs, built.held))
    outputs = built.outputs(graph.outputs)
    loaded = Model(identifier(name), "onnx", built.module, built.inputs, outputs, built.layers, reference, examples)
    return replace(loaded, annotated_split=partial(split_from_annotations, model, loaded.layer_names))


def _read(source: onnx.ModelProto | bytes | str | Path) -> onnx.ModelProto:
    if isinstance(source, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(source)
        shown = "the ModelProto"
    elif isinstance(source, str | Path):
        shown = repr(str(source))
    else:
        shown = f"a model of {len(source)} bytes"
    try:
        if isinstance(source, str | Path):
            model = onnx.load(str(source))
        elif not isinstance(source, onnx.ModelProto):
            model = onnx.load_from_string(bytes(source))
    except FileNotFoundError as error:
        raise ModelImportError(f"{shown} keeps weights in a file that is not next to it: {error}") from error
    except Exception as error:
        raise ModelImportError(f"{shown} cannot be read as an ONNX model: {error}") from error
    _check_inputs(model)
    if not model.graph.output:
        raise ModelImportError(f"{shown} is no ONNX model: it has no graph with outputs")
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ModelImportError(
                f"weight {tensor.name!r} of {shown} is in another file, and bytes or a ModelProto do not "
                "say where: give the model's path, or load it with onnx.load(path)"
            )
    return model


def _check_inputs(model: onnx.ModelProto) -> None:
    for value in model_inputs(model):
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            shown = (kind or "value of unknown type").removesuffix("_type")
            raise ModelImportError(
                f"input {value.name!r} is no tensor but of type {shown}; every input of a split network is a tensor: "
                "make its parts inputs of their own"
            )
        if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            raise ModelImportError(
                f"input {value.name!r} is of strings, which cannot be computed with here: "
                "encode them before the network, and make the codes its input"
            )


def _bind_sizes(model: onnx.ModelProto, request: ImportRequest) -> tuple[Array, ...] | None:
    """Bind the open sizes of all inputs in place; return the example inputs if they have these sizes."""
    inputs = model_inputs(model)
    examples: list[Any] = [None] * len(inputs)
    if request.example_inputs is not None:
        examples = in_order([value.name for value in inputs], request.example_inputs)
    specs: list[tuple[str, Sequence[int | None], str]] = []
    symbols: dict[str, str] = {}
    for value, example in zip(inputs, examples, strict=True):
        kind = value.type.tensor_type
        if not kind.HasField("shape"):
            if example is None:
                raise ModelImportError(f"input {value.name!r} has no shape in the model; give example_inputs")
            kind.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in np.shape(example))
        sizes = [size.dim_value if size.dim_value > 0 else None for size in kind.shape.dim]
        specs.append((value.name, sizes, numpy_name(kind.elem_type)))
        symbols.update((f"{value.name}[{axis}]", size.dim_param) for axis, size in enumerate(kind.shape.dim))
    shapes, fitting = bound_inputs(specs, request, {place: symbol for place, symbol in symbols.items() if symbol})
    for value, shape in zip(inputs, shapes, strict=True):
        if 0 in shape:
            raise ModelImportError(f"the example input for {value.name!r} has the shape {shape}; a size is at least 1")
        for dimension, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
            dimension.dim_value = size
    # Recorded shapes of other tensors may contain symbols that are bound now; shape inference computes them again.
    del model.graph.value_info[:]
    for output in model.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    return None if fitting is None else tuple(fitting)

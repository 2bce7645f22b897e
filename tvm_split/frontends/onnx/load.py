"""Load ONNX models as Models: from files (with external data next to them), bytes, or a ModelProto."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tvm_split.errors import ModelImportError
from tvm_split.frontends.dimensions import in_order
from tvm_split.frontends.frontend import ImportRequest
from tvm_split.frontends.normal_form import identifier, normal_form
from tvm_split.frontends.onnx.adapter import import_onnx, importable_operators
from tvm_split.frontends.onnx.annotations import split_from_annotations
from tvm_split.frontends.onnx.dimensions import bind_sizes
from tvm_split.frontends.onnx.graph import model_inputs, numpy_name, static_graph
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
    examples = None if request.example_inputs is None else _examples(model, request.example_inputs)
    model = bind_sizes(model, examples, request.batch, request.dimensions)
    graph = static_graph(model, importable_operators())
    imported = import_onnx(graph)
    form = normal_form(imported.function, imported.layers, graph.inputs)
    name = request.name or (Path(source).stem if isinstance(source, str | Path) else model.graph.name)
    reference = InChildProcess(OnnxReference(model, graph.inputs, form.variables(imported.held)))
    outputs = form.outputs(graph.outputs)
    loaded = Model(identifier(name), "onnx", form.module, form.inputs, outputs, form.layers, reference, examples)
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


def _examples(model: onnx.ModelProto, given: Any) -> tuple[Array, ...]:
    wanted = model_inputs(model)
    values = in_order([value.name for value in wanted], given)
    arrays = tuple(np.asarray(value, order="C") for value in values)
    for value, array in zip(wanted, arrays, strict=True):
        dtype = numpy_name(value.type.tensor_type.elem_type)
        if str(array.dtype) != dtype:
            raise ModelImportError(f"input {value.name!r} is {dtype}, example_inputs has {array.dtype}")
    return arrays

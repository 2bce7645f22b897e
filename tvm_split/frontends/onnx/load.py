"""Load ONNX models as Models: from files (with external data next to them), bytes, or a ModelProto."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_model, load_external_data_for_tensor
from tvm.relax.frontend.onnx import onnx_frontend

from rpc_runtime.program.specs import Array, TensorSpec
from tvm_split.errors import ModelImportError
from tvm_split.frontends import ImportRequest
from tvm_split.frontends.building import QUANTIZED_TOLERANCE, Built
from tvm_split.frontends.convert import BRANCH, Graph, Importer, Kind, Operation, convert
from tvm_split.frontends.dimensions import bound_inputs, in_order
from tvm_split.frontends.files import require_weights
from tvm_split.frontends.onnx.annotations import split_from_annotations
from tvm_split.frontends.onnx.conversions import CONVERSIONS, REFUSED, OnnxCall
from tvm_split.frontends.onnx.graph import OnnxGraph, model_inputs, numpy_name, static_graph, take_weights
from tvm_split.frontends.onnx.microsoft import MICROSOFT
from tvm_split.frontends.onnx.nodes import order_nodes
from tvm_split.frontends.onnx.quantised import QUANTISED
from tvm_split.frontends.onnx.reference import OnnxReference
from tvm_split.frontends.reference import InChildProcess
from tvm_split.model import Model


def load_onnx(source: onnx.ModelProto | bytes | str | Path, request: ImportRequest) -> Model:
    """Return a Model of an ONNX model; ``example_inputs`` (a sequence, a dict by input name, or one array) is optional.

    Layers have the names of the nodes; missing or repeated names become operator and position (``Conv_3``).
    Raises ModelImportError.
    """
    model = _read(source)
    weights = take_weights(model)
    examples = _bind_sizes(model, request)
    # Operators that are imported or refused directly need no replacement by simpler ones.
    importable = _known_to_tvm() - _OF_ANOTHER_DOMAIN | frozenset(CONVERSIONS) | frozenset(REFUSED)
    graph = static_graph(model, weights, importable, REFUSED)
    built = import_onnx(graph)
    name = request.name or (Path(source).stem if isinstance(source, str | Path) else model.graph.name)
    reference = InChildProcess(OnnxReference(model, graph.inputs, built.held, weights))
    own = (name.rpartition(".")[2] for name in QUANTISED)
    quantising = {"QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", *own}
    is_quantized = any(node.op_type in quantising for node in graph.nodes)
    tolerance = QUANTIZED_TOLERANCE if is_quantized else None
    loaded = built.model(name, "onnx", reference, examples, outputs=graph.outputs, tolerance=tolerance)
    return replace(loaded, annotated_split=partial(split_from_annotations, model, loaded.layer_names))


def _read(source: onnx.ModelProto | bytes | str | Path) -> onnx.ModelProto:
    try:
        if isinstance(source, onnx.ModelProto):
            shown = "the ModelProto"
            model = onnx.ModelProto()
            model.CopyFrom(source)
        elif isinstance(source, str | Path):
            shown = repr(str(source))
            model = read_model(Path(source))
        else:
            shown = f"a model of {len(source)} bytes"
            model = onnx.load_from_string(bytes(source))
    except ModelImportError:
        raise
    except Exception as error:
        raise ModelImportError(f"{shown} cannot be read as an ONNX model: {error}") from error
    _check_inputs(model)
    if not model.graph.output:
        raise ModelImportError(f"{shown} is not an ONNX model: it has no graph with outputs")
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ModelImportError(
                f"weight {tensor.name!r} of {shown} is in another file, and bytes or a ModelProto do not "
                "say where: give the model's path, or load it with onnx.load(path)"
            )
    order_nodes(model)
    _name_parts(model)
    return model


def _name_parts(model: onnx.ModelProto) -> None:
    """Name the unnamed outputs of Split nodes, in place: onnxruntime crashes on them."""
    functions = (node for function in model.functions for node in function.node)
    for place, node in enumerate((*model.graph.node, *functions)):
        if node.op_type == "Split":
            node.output[:] = [name or f"{place}:part:{part}" for part, name in enumerate(node.output)]


def _check_inputs(model: onnx.ModelProto) -> None:
    for value in model_inputs(model):
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            shown = (kind or "value of unknown type").removesuffix("_type")
            raise ModelImportError(
                f"input {value.name!r} is not a tensor but of type {shown}; inputs of a split network are tensors: "
                "make its parts inputs of their own"
            )
        if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            raise ModelImportError(
                f"input {value.name!r} is of strings, which cannot be computed with here: "
                "encode them before the network, and make the codes its input"
            )


def _bind_sizes(model: onnx.ModelProto, request: ImportRequest) -> list[Array] | None:
    """Bind the open sizes of all inputs in place; return the example inputs if they have these sizes."""
    inputs = model_inputs(model)
    examples: list[Any] = [None] * len(inputs)
    if request.example_inputs is not None:
        examples = in_order([value.name for value in inputs], request.example_inputs)
    specs = []
    for value, example in zip(inputs, examples, strict=True):
        kind = value.type.tensor_type
        if not kind.HasField("shape"):
            if example is None:
                raise ModelImportError(f"input {value.name!r} has no shape in the model; give example_inputs")
            kind.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in np.shape(example))
        sizes = [size.dim_value if size.dim_value > 0 else size.dim_param or None for size in kind.shape.dim]
        specs.append((value.name, sizes, numpy_name(kind.elem_type)))
    shapes, fitting = bound_inputs(specs, request)
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
    return fitting


def import_onnx(graph: OnnxGraph) -> Built:
    """Convert a static graph; ``held`` of the result has the names of tensors as keys. Raises ModelImportError."""
    for name in [name for name, value in graph.constants.items() if value.dtype.kind in "OSU"]:
        users = [node.name for node in graph.nodes if name in node.input]
        if users or name in graph.outputs:
            raise ModelImportError(
                f"constant {name!r} ({', '.join(users) or 'an output'}) is of strings, "
                "which cannot be computed with here"
            )
    for name in graph.outputs:
        if graph.kinds.get(name, Kind()) is None:
            raise ModelImportError(f"output {name!r} is a sequence, not a tensor: make its parts outputs of their own")
    kinds = {name: graph.kinds.get(name) or Kind() for name in graph.inputs}
    inputs = {name: TensorSpec(name, kind.shape or (), kind.dtype) for name, kind in kinds.items()}
    operations = [_operation(node, graph) for node in graph.nodes]
    built = convert(Graph(inputs, graph.outputs, graph.constants, operations), _Importer(graph.opset))
    return replace(built, empty_layers={**dict.fromkeys(graph.node_names, ""), **built.empty_layers})


_OF_ANOTHER_DOMAIN = frozenset(
    {"Attention", "BiasGelu", "FastGelu", "SkipLayerNormalization", "EmbedLayerNormalization"}
)
"""Names that TVM's importer, which ignores domains, converts as operators of com.microsoft."""


@cache
def _known_to_tvm() -> frozenset[str]:
    return frozenset(onnx_frontend._get_convert_map())


def _operation(node: onnx.NodeProto, graph: OnnxGraph) -> Operation:
    """Return a node as an `Operation`; its kind has a domain other than ONNX's, as in ``com.microsoft.FastGelu``."""
    has_graphs = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
    kinds = [graph.kinds.get(name, Kind()) for name in (*node.input, *node.output)]
    dtypes = [kind.dtype if kind is not None else "" for kind in kinds]
    allowed = [_COMPUTABLE | _READABLE] * len(node.input) + [_COMPUTABLE] * len(node.output)
    others = [dtype for dtype, names in zip(dtypes, allowed, strict=True) if dtype not in names]
    unknown = f"it has values of {others[0]}, which cannot be computed with here" if others else ""
    return Operation(
        node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}",
        node.name,
        tuple(name or None for name in node.input),
        tuple(name or None for name in node.output),
        kinds[len(node.input) :],
        {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute},
        node,
        BRANCH if has_graphs else unknown,
    )


_COMPUTABLE = frozenset(
    ["", "bool", "bfloat16", "object"]
    + [f"{kind}{bits}" for kind in ("float", "int", "uint") for bits in (8, 16, 32, 64) if (kind, bits) != ("float", 8)]
)
"""The dtypes of inputs and outputs that operators may have ("": unknown); strings (object) are refused elsewhere."""
_READABLE = frozenset(["int2", "int4", "uint2", "uint4", "float8_e8m0fnu"])
"""Further dtypes, which only the inputs of operators may have; their conversion is correct."""


class _Importer(Importer):
    def __init__(self, opset: int) -> None:
        super().__init__("ONNX", {**CONVERSIONS, **MICROSOFT, **QUANTISED}, REFUSED)
        self.opset = opset

    def call(self, operation: Operation) -> OnnxCall:
        operands = onnx_frontend.onnx_input()
        operands.extend(None if name is None else self.values[name] for name in operation.inputs)
        return OnnxCall(operation, operands, operation.attributes, self)

    def is_known_to_tvm(self, operation: Operation) -> bool:
        name = operation.source.op_type
        return name in _known_to_tvm() and (operation.kind == name) != (name in _OF_ANOTHER_DOMAIN)

    def by_tvm(self, call: OnnxCall) -> object:
        return call.by_tvm()


def read_model(path: Path) -> onnx.ModelProto:
    """Return the model in a file with its weights. Raises ModelImportError for weights that must not be read."""
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _load(tensor, path)
    load_external_data_for_model(model, str(path.parent))  # weights of other places, such as attributes
    return model


def _load(tensor: onnx.TensorProto, path: Path) -> None:
    """Read a weight in place.

    A model may name any path, and may come with links. So only files below its folder are read, and, for caches that
    keep files in one folder and link to them, files directly beside the file that the model's own path links to.
    """
    location = next((entry for entry in tensor.external_data if entry.key == "location"), None)
    if location is None:
        raise ModelImportError(f"weight {tensor.name!r} of {str(path)!r} is in another file that it does not name")
    folder, real_folder = path.parent.resolve(), path.resolve().parent
    file = (folder / location.value).resolve()
    shown = f"{str(path)!r} keeps weight {tensor.name!r} in {location.value!r}, which"
    if not file.is_relative_to(folder):
        if file.parent != real_folder:
            raise ModelImportError(f"{shown} leads out of the model's folder: put the file itself next to the model")
        folder = real_folder
    if not file.is_file():
        raise ModelImportError(f"{shown} is not there: put that file next to the model")
    if file.stat().st_nlink > 1:
        raise ModelImportError(
            f"{shown} has several names (hard links), so that it may be any file: make it a file of its own, "
            "cp FILE COPY && mv COPY FILE"
        )
    require_weights(file)
    location.value = str(file.relative_to(folder))
    load_external_data_for_tensor(tensor, str(folder))

"""Flatten an ONNX model to a static graph (functions inlined, constants folded, every node named), and compute it."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.shape_inference
from onnx import defs, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from rpc_runtime.program.specs import Array
from tvm_split.errors import ModelImportError, last_line
from tvm_split.frontends.convert import Kind
from tvm_split.frontends.onnx.nodes import array_of, read_by, stand_ins, with_branches_taken, with_functions_inlined

_FUNCTIONS = "tvm_split.functions"
"""The domain of the functions that replace ONNX's own operators."""

_LARGEST_IN_SKELETON = 1024
"""The most elements of a weight that shape inference gets with its values, since a protobuf holds at most 2 GiB."""

_NUMBERS = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64"),
    )
)
"""Dtypes that numpy stores as onnxruntime does; weights of others, such as int4, stay in the model."""


@dataclass
class OnnxGraph:
    """A static graph: nodes in execution order with unique names, constants and kinds by tensor name.

    The kind of a sequence is None.
    ``node_names`` are those of all nodes of the source, also of nodes that are folded or not needed.
    """

    nodes: list[onnx.NodeProto]
    constants: dict[str, Array]
    inputs: list[str]
    outputs: list[str]
    kinds: dict[str, Kind | None]
    opset: int
    node_names: list[str]


def numpy_name(element_type: int) -> str:
    """numpy's name of an ONNX element type."""
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(element_type)).name)


def model_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs without weights, which old models list as inputs too."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def take_weights(model: onnx.ModelProto) -> dict[str, Array]:
    """Move large weights out of ``model``, since a protobuf holds at most 2 GiB, and return their values by name."""
    weights = {}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) > _LARGEST_IN_SKELETON and numpy_name(tensor.data_type) in _NUMBERS:
            weights[tensor.name] = array_of(tensor)
            empty = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            empty.data_location = onnx.TensorProto.EXTERNAL
            empty.external_data.add(key="location", value=tensor.name)
            tensor.CopyFrom(empty)
    return weights


def static_graph(
    model: onnx.ModelProto, weights: Mapping[str, Array], importable: frozenset[str], refused: Container[str]
) -> OnnxGraph:
    """Flatten ``model``, whose inputs have fixed sizes; ``model`` and its ``weights`` are not changed.

    Operators that are not ``importable`` are replaced by simpler ones where ONNX defines them. ``refused`` ones are
    left as they are.
    """
    for sparse in model.graph.sparse_initializer:
        raise ModelImportError(f"weight {sparse.values.name!r} is sparse; only dense weights can be imported")
    rest = (tensor for tensor in model.graph.initializer if tensor.name not in weights)
    constants = {**weights, **{tensor.name: array_of(tensor) for tensor in rest}}
    skeleton = _inlined_without_weights(model)
    outputs = [value.name for value in skeleton.graph.output]
    nodes = list(skeleton.graph.node)
    names = [node.name for node in nodes]
    while True:
        nodes = _needed(nodes, outputs)
        kinds = _kinds(skeleton, nodes, constants)
        simpler = _with_functions_inlined(nodes, importable, kinds, opset_of(model))
        if len(simpler) != len(nodes):
            nodes = simpler
            continue
        remaining = with_branches_taken(_fold(nodes, constants, kinds, skeleton, refused), constants)
        if remaining == nodes:
            break
        nodes = remaining
    inputs = [value.name for value in model_inputs(model)]
    return OnnxGraph(nodes, constants, inputs, outputs, kinds, opset_of(model), names)


def layers_of_nodes(model: onnx.ModelProto) -> list[tuple[str, ...]]:
    """Return the layers of each node of the graph: its own name, or the nodes of the function that it calls.

    Nodes are named before constants are folded, so some of these layers are not in the imported model.
    """
    inlined = _inlined_without_weights(model)
    layers: list[tuple[str, ...]] = []
    rest = iter(inlined.graph.node)
    for node in model.graph.node:
        # Functions are inlined in place, and the outputs of a call keep their names.
        missing = {tensor for tensor in node.output if tensor}
        names: list[str] = []
        for part in rest:
            names.append(part.name)
            missing -= set(part.output)
            if not missing:
                break
        layers.append(tuple(names))
    return layers


def opset_of(model: onnx.ModelProto) -> int:
    """The opset version of the default domain ``ai.onnx`` in a model; 1 if the model does not state it."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def _inlined_without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without weights, with the model's functions inlined and unique names for all nodes."""
    graph = onnx.GraphProto(name=model.graph.name)
    graph.node.extend(model.graph.node)
    graph.input.extend(model_inputs(model))
    graph.output.extend(model.graph.output)
    copy = onnx.ModelProto(ir_version=max(model.ir_version, 4), graph=graph)
    copy.opset_import.extend(model.opset_import)
    copy.functions.extend(model.functions)
    copy = with_functions_inlined(copy)
    _name_nodes(copy.graph.node)
    return copy


def _name_nodes(nodes: Sequence[onnx.NodeProto]) -> None:
    """Give every node a unique name: missing and repeated names become operator and position (``Conv_3``)."""
    counts = Counter(node.name for node in nodes)
    used = {name for name, count in counts.items() if name and count == 1}
    for position, node in enumerate(nodes):
        if node.name and counts[node.name] == 1:
            continue
        name = f"{node.op_type}_{position}"
        while name in used:
            name += "_"
        used.add(name)
        node.name = name


def _kinds(
    skeleton: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], constants: dict[str, Array]
) -> dict[str, Kind | None]:
    """Infer the kind of each tensor (None: a sequence) from values of small constants and shapes of large ones."""
    model = onnx.ModelProto()
    model.CopyFrom(skeleton)
    del model.graph.node[:]
    model.graph.node.extend(chain.from_iterable(map(stand_ins, nodes)))
    used = {name for node in nodes for name in node.input} | {value.name for value in model.graph.output}
    scales = {name for node in nodes if node.op_type in ("Resize", "Upsample") for name in node.input[1:3]}
    for name, value in constants.items():
        if name not in used:
            continue
        if value.size <= _LARGEST_IN_SKELETON:
            if name in scales:  # onnxruntime rounds a scale times a size to float32: 0.7 times 10 is 7 there, 6 in ONNX
                value = np.nextafter(value, np.inf, dtype=value.dtype)
            model.graph.initializer.append(numpy_helper.from_array(value, name))
        else:
            element_type = helper.np_dtype_to_tensor_dtype(value.dtype)
            model.graph.input.append(helper.make_tensor_value_info(name, element_type, value.shape))
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:
        raise ModelImportError(f"the ONNX model is inconsistent: {error}") from error
    kinds: dict[str, Kind | None] = {name: Kind(str(array.dtype), array.shape) for name, array in constants.items()}
    for value in [*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output]:
        if value.name not in kinds and value.type.HasField("tensor_type") and value.type.tensor_type.elem_type:
            kinds[value.name] = Kind(numpy_name(value.type.tensor_type.elem_type), _shape(value))
        elif value.type.HasField("sequence_type"):
            kinds[value.name] = None
    return kinds


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    if not value.type.tensor_type.HasField("shape"):
        return None
    dimensions = value.type.tensor_type.shape.dim
    if not all(dimension.HasField("dim_value") for dimension in dimensions):
        return None
    return tuple(int(dimension.dim_value) for dimension in dimensions)


def _fold(
    nodes: Iterable[onnx.NodeProto],
    constants: dict[str, Array],
    kinds: Mapping[str, Kind | None],
    skeleton: onnx.ModelProto,
    refused: Container[str],
) -> list[onnx.NodeProto]:
    """Compute the nodes that depend on constants only, add the results to ``constants``, and return the others.

    Nodes that are ``refused`` may be random. Nodes that ONNX's evaluator cannot compute are left to the import, such as
    DequantizeLinear below opset 19.
    """
    remaining = []
    sequences: dict[str, Any] = {}
    for node in nodes:
        names = [name for name in node.input if name]
        measured = names if node.op_type in _OF_LENGTHS else names[:1] if node.op_type in _OF_SHAPES else []
        shapes = {name: kind.shape for name in measured if (kind := kinds.get(name)) and kind.shape is not None}
        operands = {name: constants[name] for name in names if name in constants}
        operands |= {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
        operands |= {name: sequences[name] for name in measured if name in sequences}
        is_known = node.domain in ("", "ai.onnx") and all(name in operands for name in names)
        values = _computed(node, operands, skeleton) if is_known and node.op_type not in refused else {}
        if any(isinstance(value, list) for value in values.values()):
            sequences |= values
            values = {}
        constants.update(values)
        if not values:
            remaining.append(node)
    return remaining


_OF_LENGTHS = ("SequenceConstruct", "SequenceErase", "SequenceInsert", "SequenceLength")
"""Operators of sequences whose length does not depend on the values of their inputs."""
_OF_SHAPES = ("Shape", "Size", "SplitToSequence")
"""Operators that need only the shape of their first input; for a split, it gives the length of the sequence."""


def _computed(node: onnx.NodeProto, operands: Mapping[str, Any], skeleton: onnx.ModelProto) -> dict[str, Any]:
    """Return the node's outputs by name, a sequence as a list; empty if ONNX's evaluator cannot compute them."""
    inputs, outputs = ([onnx.ValueInfoProto(name=name) for name in names if name] for names in (operands, node.output))
    graph = helper.make_graph([node], "constant", inputs, outputs)
    model = helper.make_model(graph, opset_imports=skeleton.opset_import, ir_version=skeleton.ir_version)
    try:
        results = ReferenceEvaluator(model).run(None, dict(operands))
    except Exception:  # it raises what its operators raise, and does not have all of them
        return {}
    return {
        output.name: result if isinstance(result, list) else np.asarray(result)
        for output, result in zip(outputs, results, strict=True)
    }


def _with_functions_inlined(
    nodes: Iterable[onnx.NodeProto], importable: frozenset[str], kinds: Mapping[str, Kind | None], opset: int
) -> list[onnx.NodeProto]:
    """Replace ONNX's operators that are not ``importable`` by their definition in simpler operators, if ONNX has one.

    The new nodes keep the name of the old one.
    """
    result: list[onnx.NodeProto] = []
    for node in nodes:
        is_own = node.domain in ("", "ai.onnx") and node.op_type not in importable
        schema = defs.get_schema(node.op_type, opset) if is_own and defs.has(node.op_type, opset) else None
        if schema is None or not (schema.has_function or schema.has_context_dependent_function):
            result.append(node)
            continue
        try:
            result.extend(_function_body(node, schema, kinds, opset))
        except Exception as error:
            raise ModelImportError(
                f"operator {node.op_type} of node {node.name!r} cannot be replaced by the simpler ones "
                f"that ONNX defines it by: {last_line(error)}"
            ) from error
    return result


def _function_body(
    node: onnx.NodeProto, schema: defs.OpSchema, kinds: Mapping[str, Kind | None], opset: int
) -> Iterator[onnx.NodeProto]:
    if schema.has_context_dependent_function:
        types = [_type(kinds.get(name)).SerializeToString() for name in node.input]
        body = schema.get_context_dependent_function(node.SerializeToString(), types)
    else:
        body = schema.get_function_with_opset_version(opset)
    function = onnx.FunctionProto.FromString(body)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(_FUNCTIONS, 1)]
    del function.opset_import[:]
    function.opset_import.extend(imports[:1])
    call = onnx.NodeProto()
    call.CopyFrom(node)
    call.domain = function.domain = _FUNCTIONS
    inputs, outputs = (
        [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name] for names in (node.input, node.output)
    )
    graph = helper.make_graph([call], "function", inputs, outputs)
    model = helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10)
    outside = {*node.input, *node.output, ""}
    for part in onnx.inliner.inline_local_functions(model).graph.node:
        part.name = node.name
        for names in (part.input, part.output):
            names[:] = [name if name in outside else f"{node.output[0]}:{name}" for name in names]
        yield part


def _type(kind: Kind | None) -> onnx.TypeProto:
    if kind is None:
        return onnx.TypeProto()
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype)), kind.shape)


def _needed(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> list[onnx.NodeProto]:
    needed = set(outputs)
    selected = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed.update(read_by(node))
            selected.append(node)
    return selected[::-1]

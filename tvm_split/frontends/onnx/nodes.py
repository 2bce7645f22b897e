"""Rewrite nodes of ONNX graphs: known branches, defaults of functions, and stand-ins whose shapes ONNX can infer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnx.inliner
from onnx import helper, numpy_helper

from rpc_runtime.program.specs import Array
from tvm_split.errors import ModelImportError, last_line


def array_of(tensor: onnx.TensorProto) -> Array:
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:
        raise ModelImportError(f"weight {tensor.name!r} is damaged: {last_line(error)}") from error


def order_nodes(model: onnx.ModelProto) -> None:
    """Put the nodes in topological order, in place: some tools write another order, which onnxruntime accepts.

    Raises ModelImportError for a tensor that nothing makes, or that is made twice or from itself.
    """
    graph = model.graph
    known = {value.name for values in (graph.input, graph.initializer) for value in values}
    known |= {weight.values.name for weight in graph.sparse_initializer}
    producers: dict[str, onnx.NodeProto] = {}
    for node in graph.node:
        for name in filter(None, node.output):
            if producers.setdefault(name, node) is not node:
                raise ModelImportError(f"two nodes make tensor {name!r}: {producers[name].op_type} and {node.op_type}")
    nodes = list(graph.node)
    for reader, name in [(node.op_type, name) for node in nodes for name in filter(None, node.input)]:
        if name not in known and name not in producers:
            raise ModelImportError(f"no node makes tensor {name!r}, which {reader} reads")
    if lost := [value.name for value in graph.output if value.name not in known and value.name not in producers]:
        raise ModelImportError(f"no node makes output {lost[0]!r}")
    places = {name: place for place, node in enumerate(nodes) for name in node.output}
    before = {place: {places[n] for n in read_by(node) if n in producers} for place, node in enumerate(nodes)}
    if any(place <= max(earlier, default=-1) for place, earlier in before.items()):
        try:
            order = [*TopologicalSorter(before).static_order()]
        except CycleError as error:
            raise ModelImportError(f"node {nodes[error.args[1][0]].op_type} needs its own result") from error
        del graph.node[:]
        graph.node.extend(nodes[place] for place in order)


def with_branches_taken(nodes: Sequence[onnx.NodeProto], constants: dict[str, Array]) -> list[onnx.NodeProto]:
    """Replace each If with a constant condition by the nodes of its branch, which keep its name."""
    result: list[onnx.NodeProto] = []
    for node in nodes:
        if node.op_type == "If" and node.domain in ("", "ai.onnx") and node.input[0] in constants:
            name = "then_branch" if constants[node.input[0]].item() else "else_branch"
            result.extend(_branch(node, next(entry.g for entry in node.attribute if entry.name == name), constants))
        else:
            result.append(node)
    return result


def _branch(node: onnx.NodeProto, graph: onnx.GraphProto, constants: dict[str, Array]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a branch of ``node``, with names of their own; its weights are added to ``constants``."""
    computed = {name for part in graph.node for name in part.output}
    pairs = [(inner.name, outer) for inner, outer in zip(graph.output, node.output, strict=True) if outer]
    prefix = f"{pairs[0][1]}:"
    names = {inner: outer for inner, outer in pairs if inner in computed}
    names |= {tensor.name: prefix + tensor.name for tensor in graph.initializer}
    graph = onnx.compose.add_prefix_graph(graph, prefix, rename_outputs=False, name_map=names)
    constants.update((tensor.name, numpy_helper.to_array(tensor)) for tensor in graph.initializer)
    copies = [(names.get(inner, inner), outer) for inner, outer in pairs]
    identities = [helper.make_node("Identity", [inner], [outer]) for inner, outer in copies if inner != outer]
    for part in (*graph.node, *identities):
        part.name = node.name
        yield part


def with_functions_inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model`` with its functions inlined; a call gets the function's defaults for attributes that it omits.

    ONNX's inliner ignores these defaults. A call inside a function may refer to an attribute that the function's caller
    omits: so callers are inlined first.
    """
    functions = {(function.domain, function.name): function for function in model.functions}
    rest = set(functions)
    while rest:
        called = {(node.domain, node.op_type) for key in rest for node in _with_branches(functions[key].node)}
        callers = sorted(rest - called) or sorted(rest)  # the inliner refuses functions that call each other
        for node in _with_branches(model.graph.node):
            function = functions.get((node.domain, node.op_type), onnx.FunctionProto())
            present = {attribute.name for attribute in node.attribute}
            node.attribute.extend(entry for entry in function.attribute_proto if entry.name not in present)
        try:
            model = onnx.inliner.inline_selected_functions(model, callers)
        except Exception as error:
            raise ModelImportError(f"the ONNX model is inconsistent: {last_line(error)}") from error
        rest.difference_update(callers)
    return model


def _with_branches(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for graph in _graphs_of(node):
            yield from _with_branches(graph.node)


def _graphs_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)]


def read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of the tensors that a node reads, and of those that nodes in its branches read."""
    for part in _with_branches([node]):
        yield from part.input
        yield from (value.name for graph in _graphs_of(part) for value in graph.output)


_ELEMENTWISE = (
    "BiasGelu",
    "FastGelu",
    "Gelu",
    "QuickGelu",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
)
_LIKE_THE_FIRST = frozenset(
    ["LayerNormalization", "SimplifiedLayerNormalization"]  # onnxruntime writes them at opsets that lack them
    + [f"com.microsoft.{name}" for name in _ELEMENTWISE]
)
_LIKE_ANOTHER = {
    f"com.microsoft.{fused}": operator
    for fused, operator in (("FusedConv", "Conv"), ("FusedGemm", "Gemm"), ("FusedMatMul", "MatMul"))
}
_ATTENTIONS = {"com.microsoft.Attention": 2, "com.microsoft.MultiHeadAttention": 3}
"""By attention operator, how many first inputs must be present; fewer are given if query, key and value are packed."""


def stand_ins(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return ONNX nodes whose last result has the shape and dtype of onnxruntime's operator; other nodes unchanged."""
    kind = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    if kind in _LIKE_THE_FIRST:
        return [helper.make_node("Identity", node.input[:1], node.output[:1])]
    if kind in _ATTENTIONS and all([*node.input, "", "", ""][: _ATTENTIONS[kind]]):  # others are refused
        return _attention_stand_ins(node)
    if kind == "com.microsoft.EmbedLayerNormalization":
        return [helper.make_node("Gather", [node.input[2], node.input[0]], node.output[:1])]
    if kind not in _LIKE_ANOTHER:
        return [node]
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    if kind.endswith("MatMul") and any(flag for name, flag in attributes.items() if name.startswith("trans")):
        left, right = _subscripts("mk", "A", attributes), _subscripts("kn", "B", attributes)
        return [helper.make_node("Einsum", node.input[:2], node.output[:1], equation=f"{left},{right}->...mn")]
    return [helper.make_node(_LIKE_ANOTHER[kind], node.input[:3], node.output[:1], **attributes)]


def _subscripts(axes: str, side: str, attributes: Mapping[str, Any]) -> str:
    first, last = tuple(axes[::-1]) if attributes.get(f"trans{side}") else tuple(axes)
    return f"{first}...{last}" if attributes.get(f"transBatch{side}") else f"...{first}{last}"


def _attention_stand_ins(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes whose last result has attention's shape: the sum of [batch, rows, 1] and [1 or batch, 1, width].

    The first term comes from the query, the second from the value or its weight.
    """
    rows, first, parts, width, zero, shape = (f"{node.output[0]}:{part}" for part in range(6))
    is_packed = node.op_type == "Attention"
    # A value may have heads: [batch, heads, columns, width / heads].
    source, axis, sizes = (node.input[1], 0, [1, 3, -1]) if is_packed else (node.input[2], -2, [0, 1, -1])
    nodes = [
        helper.make_node("Constant", [], [zero], value=numpy_helper.from_array(np.array([0]))),
        helper.make_node("Constant", [], [shape], value=numpy_helper.from_array(np.array(sizes))),
        helper.make_node("Gather", [node.input[0], zero], [rows], axis=2),
        helper.make_node("Gather", [source, zero], [first], axis=axis),
        helper.make_node("Reshape", [first, shape], [parts]),
        helper.make_node("Gather", [parts, zero], [width], axis=1),
        helper.make_node("Add", [rows, width], node.output[:1]),
    ]
    for entry in node.attribute:
        if entry.name == "qkv_hidden_sizes":
            value = numpy_helper.from_array(np.zeros(entry.ints[2], "float32"))
            nodes[-2] = helper.make_node("Constant", [], [width], value=value)
    return nodes

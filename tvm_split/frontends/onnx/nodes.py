"""Rewrite nodes of ONNX graphs: known branches, defaults of functions, and stand-ins whose shapes ONNX can infer."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.compose
from onnx import helper, numpy_helper

Array = np.ndarray[Any, Any]


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


def fill_defaults(nodes: Iterable[onnx.NodeProto], functions: Sequence[onnx.FunctionProto]) -> None:
    """Give calls of ``functions`` the attributes that they leave out, in place: ONNX's inliner does not."""
    defaults = {(function.domain, function.name): function.attribute_proto for function in functions}
    for node in nodes:
        present = {attribute.name for attribute in node.attribute}
        of_function = defaults.get((node.domain, node.op_type), ())
        node.attribute.extend(attribute for attribute in of_function if attribute.name not in present)
        for graph in _graphs_of(node):
            fill_defaults(graph.node, functions)


def _graphs_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)]


def read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of the tensors that a node reads; its branches read tensors outside of them."""
    yield from node.input
    for graph in _graphs_of(node):
        yield from (value.name for value in graph.output)
        for part in graph.node:
            yield from read_by(part)


_ACTIVATIONS = ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")
_OTHERS = ("Attention", "MultiHeadAttention", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
_LIKE_THE_FIRST = frozenset(
    ["LayerNormalization", "SimplifiedLayerNormalization"]  # onnxruntime writes them at opsets that lack them
    + [f"com.microsoft.{name}" for name in (*_ACTIVATIONS, *_OTHERS)]
)
_LIKE_ANOTHER = {
    f"com.microsoft.{fused}": operator
    for fused, operator in (("FusedConv", "Conv"), ("FusedGemm", "Gemm"), ("FusedMatMul", "MatMul"))
}


def stand_in(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return the node, or for an operator of onnxruntime one of ONNX whose first result has its shape and dtype."""
    kind = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    if any(entry.name in ("qkv_hidden_sizes", "transA", "transB") for entry in node.attribute):
        return node
    if kind in _LIKE_THE_FIRST:
        return helper.make_node("Identity", node.input[:1], node.output[:1])
    if kind == "com.microsoft.EmbedLayerNormalization":
        return helper.make_node("Gather", [node.input[2], node.input[0]], node.output[:1])
    if kind not in _LIKE_ANOTHER:
        return node
    copy = helper.make_node(_LIKE_ANOTHER[kind], node.input[:3], node.output[:1])
    copy.attribute.extend(node.attribute)
    return copy

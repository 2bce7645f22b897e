"""Import ONNX graphs with TVM's importer, extended by own conversions."""

from __future__ import annotations

from functools import cache

import onnx
from tvm.relax.frontend.onnx import onnx_frontend

from rpc_runtime.program.program import TensorSpec
from tvm_split.errors import ModelImportError
from tvm_split.frontends.building import Built
from tvm_split.frontends.convert import BRANCH, Graph, Importer, Kind, Operation, convert
from tvm_split.frontends.onnx.conversions import CONVERSIONS, REFUSED, OnnxCall
from tvm_split.frontends.onnx.graph import OnnxGraph


def import_onnx(graph: OnnxGraph) -> Built:
    """Convert a static graph; its values are the names of its tensors. Raises ModelImportError."""
    for name in [name for name, value in graph.constants.items() if value.dtype.kind in "OSU"]:
        users = [node.name for node in graph.nodes if name in node.input]
        if users or name in graph.outputs:
            raise ModelImportError(
                f"constant {name!r} ({', '.join(users) or 'an output'}) is of strings, "
                "which cannot be computed with here"
            )
    inputs = {name: TensorSpec(name, graph.kinds[name].shape or (), graph.kinds[name].dtype) for name in graph.inputs}
    operations = [_operation(node, graph) for node in graph.nodes]
    return convert(Graph(inputs, graph.outputs, graph.constants, operations), _Importer(graph.opset))


def importable_operators() -> frozenset[str]:
    """Operators of ONNX that are imported or refused directly, and so need no replacement by simpler ones."""
    return _known_to_tvm() - _OF_ANOTHER_DOMAIN | frozenset(CONVERSIONS) | frozenset(REFUSED)


_OF_ANOTHER_DOMAIN = frozenset(
    {"Attention", "BiasGelu", "FastGelu", "SkipLayerNormalization", "EmbedLayerNormalization"}
)
"""Names under which TVM imports operators of com.microsoft without checking the domain."""


@cache
def _known_to_tvm() -> frozenset[str]:
    return frozenset(onnx_frontend._get_convert_map())


def _operation(node: onnx.NodeProto, graph: OnnxGraph) -> Operation:
    """A node as an operation; its kind has its domain if that is not ONNX's: ``com.microsoft.FastGelu``."""
    has_graphs = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
    return Operation(
        node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}",
        node.name,
        tuple(name or None for name in node.input),
        tuple(name or None for name in node.output),
        [graph.kinds.get(name, Kind()) for name in node.output],
        {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute},
        node,
        BRANCH if has_graphs else "",
    )


class _Importer(Importer):
    def __init__(self, opset: int) -> None:
        super().__init__("ONNX", CONVERSIONS, REFUSED)
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

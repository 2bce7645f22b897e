"""Import ONNX graphs with TVM's importer, extended to record node names and to check every operator's result."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from relay_passes.ir import constant
from tvm_split.errors import ModelImportError
from tvm_split.frontends.importing import BRANCH, Imported, RecordingBuilder, check_type, named, refuse
from tvm_split.frontends.onnx.conversions import REFUSED, REPAIRS
from tvm_split.frontends.onnx.graph import OnnxGraph, TensorKind
from tvm_split.frontends.operators import Operators


def import_onnx(graph: OnnxGraph) -> Imported:
    """Translate a static graph; ``held`` of the result has the names of its tensors.

    Raises ModelImportError, which names every operator that cannot be imported.
    """
    return _Importer(graph).translate()


def importable_operators() -> frozenset[str]:
    """Operators of ONNX that are imported or refused directly, and so need no replacement by simpler ones."""
    own = frozenset(onnx_frontend._get_convert_map()) - _OF_ANOTHER_DOMAIN
    return own | frozenset(REPAIRS) | frozenset(REFUSED)


_OF_ANOTHER_DOMAIN = frozenset(
    {"Attention", "BiasGelu", "FastGelu", "SkipLayerNormalization", "EmbedLayerNormalization"}
)
"""Names under which TVM imports operators of com.microsoft without checking the domain."""


class _Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    def __init__(self, graph: OnnxGraph) -> None:
        super().__init__({}, {}, sanitize=False)
        self.graph = graph
        self.opset = graph.opset
        self.bb = RecordingBuilder()

    def translate(self) -> Imported:
        refuse(self._problems())
        used = {name for node in self.graph.nodes for name in node.input} | set(self.graph.outputs)
        for name, value in self.graph.constants.items():
            if name in used:
                if value.dtype.kind in "OSU":
                    users = ", ".join(node.name for node in self.graph.nodes if name in node.input)
                    raise ModelImportError(
                        f"constant {name!r} ({users or 'an output'}) is of strings, which cannot be computed with here"
                    )
                self._nodes[name] = constant(value)
        for name in self.graph.inputs:
            kind = self.graph.kinds[name]
            self._nodes[name] = relax.Var(name, relax.TensorType(kind.shape, kind.dtype))
        with self.bb.function("main", [self._nodes[name] for name in self.graph.inputs]):
            with self.bb.dataflow():
                for node in self.graph.nodes:
                    self._add(node)
                self.bb.layer = "output"
                result = self.bb.emit_output(relax.Tuple([self._nodes[name] for name in self.graph.outputs]))
            self.bb.emit_func_output(result)
        return self.bb.imported(self._nodes)

    def _problems(self) -> Iterator[tuple[str, str]]:
        converters = onnx_frontend._get_convert_map()
        for node in self.graph.nodes:
            operator = qualified(node)
            is_importable = node.op_type in converters and (operator == node.op_type) != (
                node.op_type in _OF_ANOTHER_DOMAIN
            )
            if operator in REFUSED:
                yield f"{operator} ({REFUSED[operator]})", node.name
            elif any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
                yield f"{operator} ({BRANCH})", node.name
            elif operator not in REPAIRS and not is_importable:
                yield operator, node.name

    def _add(self, node: onnx.NodeProto) -> None:
        self.bb.layer = node.name
        operator = f"operator {qualified(node)} of node {node.name!r}"
        with named(operator):
            results = self._converted(node)
        if any(node.output[len(results) :]):
            raise ModelImportError(f"{operator} has {len(node.output)} outputs, TVM imports {len(results)} of them")
        for name, result in zip(node.output, results, strict=False):
            if name:
                kind = self.graph.kinds.get(name, TensorKind("", None))
                check_type(result.ty, kind.dtype, kind.shape, operator, "ONNX")
                self._nodes[name] = result

    def _converted(self, node: onnx.NodeProto) -> list[relax.Expr]:
        inputs = onnx_frontend.onnx_input()
        inputs.extend(self._nodes[name] if name else None for name in node.input)
        attributes = self._parse_attr(node.attribute)
        attributes["tvm_custom"] = {"name": node.name, "num_outputs": len(node.output)}
        repair = REPAIRS.get(qualified(node))
        if repair is not None:
            result = repair(Operators(self.bb), inputs, attributes, self.opset)
        else:
            result = self._convert_operator(node.op_type, inputs, attributes, self.opset)
        if isinstance(result, relax.Tuple):
            return [self._bound(field) for field in result.fields]
        result = self._bound(result)
        if isinstance(result.ty, relax.TupleType):
            return [self.bb.emit(relax.TupleGetItem(result, index)) for index in range(len(result.ty.fields))]
        return [result]

    def _bound(self, value: relax.Expr) -> relax.Expr:
        """Bind calls to this node's layer; TVM's importer would bind them in the layer of the node that uses them."""
        if isinstance(value, relax.Var):
            self.bb.layers.setdefault(value.name, self.bb.layer)
        return self.bb.emit(value) if isinstance(value, relax.Call | relax.TupleGetItem) else value


def qualified(node: onnx.NodeProto) -> str:
    """A node's operator, with its domain if that is not ONNX's: ``Conv``, ``com.microsoft.FastGelu``."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"

"""TVM's importer of ONNX, made to remember node names and to check every operator's result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvm_split.errors import ModelImportError, last_line, not_importable
from tvm_split.frontends.onnx_graph import OnnxGraph, TensorKind
from tvm_split.frontends.onnx_repairs import REFUSED, REPAIRS
from tvm_split.frontends.recording import RecordingBuilder


@dataclass(frozen=True)
class ImportedOnnx:
    """``function`` computes the graph's outputs from its inputs; ``layers`` and ``tensors`` are by its variables.

    ``tensors`` gives the ONNX tensor that a variable holds.
    """

    function: relax.Function
    layers: dict[str, str]
    tensors: dict[str, str]


def import_onnx(graph: OnnxGraph) -> ImportedOnnx:
    """Translate a static graph. Raises ModelImportError naming every operator that cannot be imported."""
    return _Importer(graph).translate()


def importable_operators() -> frozenset[str]:
    """ONNX's own operators that are imported, or refused, as they are."""
    own = frozenset(name for name in onnx_frontend._get_convert_map()) - _OF_ANOTHER_DOMAIN
    return own | frozenset(REPAIRS) | frozenset(REFUSED)


_OF_ANOTHER_DOMAIN = frozenset(
    {"Attention", "BiasGelu", "FastGelu", "SkipLayerNormalization", "EmbedLayerNormalization"}
)
"""TVM imports com.microsoft's operators of these names, without looking at the domain."""


class _Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    def __init__(self, graph: OnnxGraph) -> None:
        super().__init__({}, {}, sanitize=False)
        self.graph = graph
        self.opset = graph.opset
        self.converters: dict[str, Any] = onnx_frontend._get_convert_map()
        self.bb = RecordingBuilder()

    def translate(self) -> ImportedOnnx:
        self._check_operators()
        used = {name for node in self.graph.nodes for name in node.input} | set(self.graph.outputs)
        for name, value in self.graph.constants.items():
            if name in used:
                if value.dtype.kind in "OSU":
                    users = ", ".join(node.name for node in self.graph.nodes if name in node.input)
                    raise ModelImportError(
                        f"constant {name!r} ({users or 'an output'}) is of strings, which cannot be computed with here"
                    )
                self._nodes[name] = relax.const(value, str(value.dtype))
        parameters = []
        for name in self.graph.inputs:
            kind = self.graph.kinds[name]
            parameters.append(relax.Var(name, relax.TensorType(kind.shape, kind.dtype)))
            self._nodes[name] = parameters[-1]
        with self.bb.function("main", parameters):
            with self.bb.dataflow():
                for node in self.graph.nodes:
                    self._add(node)
                self.bb.layer = "output"
                result = self.bb.emit_output(relax.Tuple([self._nodes[name] for name in self.graph.outputs]))
            self.bb.emit_func_output(result)
        tensors = {
            value.name: name
            for name, value in reversed(self._nodes.items())
            if isinstance(value, relax.Var) and isinstance(value.ty, relax.TensorType)
        }
        return ImportedOnnx(self.bb.get()["main"], self.bb.layers, tensors)

    def _check_operators(self) -> None:
        problems: dict[str, list[str]] = {}
        for node in self.graph.nodes:
            operator = qualified(node)
            if operator in REFUSED:
                problems.setdefault(f"{operator} ({REFUSED[operator]})", []).append(node.name)
            elif any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
                problems.setdefault(f"{operator} (it chooses what to compute while it runs)", []).append(node.name)
            elif operator not in REPAIRS and not self._is_importable(node):
                problems.setdefault(operator, []).append(node.name)
        if problems:
            raise not_importable(problems)

    def _is_importable(self, node: onnx.NodeProto) -> bool:
        is_own = node.domain in ("", "ai.onnx")
        return node.op_type in self.converters and is_own != (node.op_type in _OF_ANOTHER_DOMAIN)

    def _add(self, node: onnx.NodeProto) -> None:
        self.bb.layer = node.name
        try:
            results = self._converted(node)
        except ModelImportError as error:
            raise ModelImportError(
                f"operator {qualified(node)} of node {node.name!r} cannot be imported: {error}"
            ) from error
        except Exception as error:
            reason = last_line(error)
            raise ModelImportError(
                f"operator {qualified(node)} of node {node.name!r} cannot be imported: {reason}"
            ) from error
        for name, result in zip(node.output, results, strict=False):
            if name:
                _check_result(result, self.graph.kinds.get(name), node)
                self._nodes[name] = result
        if len(results) < len(node.output) and any(node.output[len(results) :]):
            raise ModelImportError(
                f"operator {qualified(node)} of node {node.name!r} has {len(node.output)} outputs, "
                f"TVM imports {len(results)} of them"
            )

    def _converted(self, node: onnx.NodeProto) -> list[relax.Expr]:
        inputs = onnx_frontend.onnx_input()
        inputs.extend(self._nodes[name] if name else None for name in node.input)
        attributes = self._parse_attr(node.attribute)
        attributes["tvm_custom"] = {"name": node.name, "num_outputs": len(node.output)}
        repair = REPAIRS.get(qualified(node))
        if repair is not None:
            result = repair(self.bb, inputs, attributes, self.opset)
        else:
            result = self._convert_operator(node.op_type, inputs, attributes, self.opset)
        if isinstance(result, relax.Tuple):
            return [self._bound(field) for field in result.fields]
        result = self._bound(result)
        if isinstance(result.ty, relax.TupleType):
            return [self.bb.emit(relax.TupleGetItem(result, index)) for index in range(len(result.ty.fields))]
        return [result]

    def _bound(self, value: relax.Expr) -> relax.Expr:
        """Bind calls here, under this node's name; TVM's importer leaves them to the node that uses them."""
        if isinstance(value, relax.Var):
            self.bb.layers.setdefault(value.name, self.bb.layer)
        return self.bb.emit(value) if isinstance(value, relax.Call | relax.TupleGetItem) else value


def qualified(node: onnx.NodeProto) -> str:
    """``Conv``, or ``com.microsoft.FastGelu`` for operators that are not ONNX's own."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def _check_result(result: relax.Expr, expected: TensorKind | None, node: onnx.NodeProto) -> None:
    if isinstance(result.ty, relax.ShapeType):
        raise ModelImportError(
            f"operator {qualified(node)} of node {node.name!r} computes a shape that is not known before the run"
        )
    found = result.ty
    try:
        shape = tuple(int(size) for size in found.shape)
    except (TypeError, AttributeError) as error:
        raise ModelImportError(
            f"operator {qualified(node)} of node {node.name!r} has a result whose shape depends on the values of its "
            "inputs; a split network needs shapes that are known beforehand"
        ) from error
    if expected is None:
        return
    right_shape = shape if expected.shape is None else expected.shape
    if str(found.dtype) != expected.dtype or shape != right_shape:
        raise ModelImportError(
            f"operator {qualified(node)} of node {node.name!r} gives {expected.dtype}{list(right_shape)} in ONNX, "
            f"imported it gives {found.dtype}{list(shape)}"
        )

"""Import TFLite graphs with TVM's importer, extended to record layers and to check every operator's result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tflite
from tvm import relax
from tvm.relax.frontend.tflite import tflite_frontend

from tvm_split.errors import ModelImportError
from tvm_split.frontends.importing import BRANCH, LOOP, RANDOM, Imported, RecordingBuilder, check_type, named, refuse
from tvm_split.frontends.tflite.conversions import REPAIRS, Given
from tvm_split.frontends.tflite.graph import Operator, TfliteGraph
from tvm_split.frontends.tflite.names import Parts

REFUSED = {
    **dict.fromkeys(("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "MULTINOMIAL"), RANDOM),
    **dict.fromkeys(("IF",), BRANCH),
    **dict.fromkeys(("WHILE", "STABLEHLO_WHILE"), f"{LOOP}; Keras's recurrent layers do not with unroll=True"),
    **dict.fromkeys(
        ("VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE", "CALL_ONCE"),
        "it keeps a state from one input to the next; convert the model with its variables frozen",
    ),
    "CALL": "it calls another graph of the file",
}
"""Kinds of operators that are refused, each with the reason."""

DYNAMIC_RANGE = (
    "its weights are int8 and its inputs are not, which is quantisation of dynamic range; convert with float16, or "
    "give the converter a representative_dataset"
)

_MOVES = frozenset(
    (
        *("TRANSPOSE", "STRIDED_SLICE", "SLICE", "GATHER", "GATHER_ND", "PACK", "UNPACK", "SPLIT", "SPLIT_V", "TILE"),
        *("SPACE_TO_DEPTH", "DEPTH_TO_SPACE", "SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND", "SQUEEZE", "EXPAND_DIMS"),
        *("PAD", "PADV2", "MIRROR_PAD", "REVERSE_V2", "BROADCAST_TO", "RESIZE_NEAREST_NEIGHBOR", "EMBEDDING_LOOKUP"),
        *("SELECT", "SELECT_V2", "RESHAPE"),
    )
)
"""Kinds that only move values, so that quantised integers do not change, as in LiteRT."""

_REPAIRED_QUANTIZED = frozenset(("GELU", "CUMSUM", "ARG_MAX", "ARG_MIN", "BATCH_MATMUL"))


def require_end(operators: Sequence[Operator], layers: Sequence[Parts]) -> None:
    """Raise ModelImportError for operators of refused kinds. Call this before running a file: loops may not end."""
    refuse(
        (f"{operator.kind} ({REFUSED[operator.kind]})", parts.operation)
        for operator, parts in zip(operators, layers, strict=True)
        if operator.kind in REFUSED
    )


def import_tflite(graph: TfliteGraph, layers: Sequence[Parts]) -> Imported:
    """Translate a static graph; ``layers`` has those of each operator, and ``held`` the numbers of tensors.

    Raises ModelImportError, which names every operator that cannot be imported.
    """
    model = tflite.Model.GetRootAsModel(graph.content, 0)
    return _Importer(model, graph, layers).translate()


class _Importer(tflite_frontend.OperatorConverter):  # type: ignore[misc]
    def __init__(self, model: Any, graph: TfliteGraph, layers: Sequence[Parts]) -> None:
        builder = RecordingBuilder()
        super().__init__(model, model.Subgraphs(0), tflite_frontend.ExprTable(), builder)
        self.graph, self.layers = graph, layers
        self.convert_map.update({kind: self._repaired(kind) for kind in REPAIRS})
        self.parts = Parts("", "", "")

    def translate(self) -> Imported:
        refuse(self._problems())
        parameters = []
        for number, name in self.graph.inputs.items():
            tensor = self.graph.tensors[number]
            parameters.append(relax.Var(name, relax.TensorType(tensor.shape, tensor.dtype)))
            self.exp_tab.set_expr(str(number), parameters[-1])
        held: dict[int, relax.Expr] = {}
        with self.bb.function("main", parameters):
            with self.bb.dataflow():
                for place, operator in enumerate(self.graph.operators):
                    self.parts = self.layers[place]
                    self.bb.layer = self.parts.operation
                    held.update(self._converted(self.subgraph.Operators(place), operator))
                outputs = [self.get_tensor_expr(each) for each in self.get_tensors([n for n, _ in self.graph.outputs])]
                self.bb.layer = "output"
                result = self.bb.emit_output(relax.Tuple(outputs))
            self.bb.emit_func_output(result)
        imported: Imported = self.bb.imported(held)
        return imported

    def convert_fused_activation_function(self, in_expr: relax.Expr, fused_activation_fn: int) -> relax.Expr:
        """Bind the value before a fused activation to its own layers, then emit the activation."""
        return super().convert_fused_activation_function(self._computed(in_expr), fused_activation_fn)

    def quantize(self, expr: relax.Expr, tensor_to_quantize: Any) -> relax.Expr:
        return super().quantize(self._computed(expr), tensor_to_quantize)

    def _computed(self, expr: relax.Expr) -> relax.Expr:
        """Bind ``expr``; the addition of a bias or folded norm belongs to the layer that it comes from."""
        if isinstance(expr, relax.Call) and expr.op.name == "relax.add" and isinstance(expr.args[0], relax.Call):
            self.bb.layer = self.parts.operation
            expr = relax.op.add(self.bb.emit(expr.args[0]), expr.args[1])
            self.bb.layer = self.parts.bias
        if isinstance(expr, relax.Call):
            expr = self.bb.emit(expr)
        self.bb.layer = self.parts.activation
        return expr

    def _repaired(self, kind: str) -> Any:
        return lambda op: REPAIRS[kind](Given(self, op))

    def _problems(self) -> Iterator[tuple[str, str]]:
        for operator, parts in zip(self.graph.operators, self.layers, strict=True):
            if operator.kind not in self.convert_map:
                yield operator.kind, parts.operation
            elif self._has_dynamic_range(operator):
                yield f"{operator.kind} ({DYNAMIC_RANGE})", parts.operation
            elif not self._can_be_quantized(operator):
                yield f"{operator.kind} of quantised numbers", parts.operation

    def _has_dynamic_range(self, operator: Operator) -> bool:
        dtypes = [self.graph.tensors[number].dtype for number in operator.inputs[:2] if number in self.graph.tensors]
        return len(dtypes) == 2 and dtypes[0] == "float32" and dtypes[1] in ("int8", "uint8")

    def _can_be_quantized(self, operator: Operator) -> bool:
        """Whether an operator has no quantised tensors, only moves values, or is converted with quantisation."""
        known = self._SUPPORTED_QUANTIZED_OPS | _REPAIRED_QUANTIZED | _MOVES
        tensors = self.get_tensors([*operator.inputs, *operator.outputs])
        return operator.kind in known or not any(tensor.qnn_params for tensor in tensors)

    def _converted(self, op: Any, operator: Operator) -> dict[int, relax.Expr]:
        shown = f"operator {operator.kind} of layer {self.parts.operation!r}"
        with named(shown):
            result = self.convert_map[operator.kind](op=op)
            if result is None:
                raise ModelImportError("TVM imports nothing for it")
            results = self._bound(result, len(operator.outputs))
        for number, expr in zip(operator.outputs, results, strict=True):
            if number in self.graph.tensors:
                tensor = self.graph.tensors[number]
                check_type(expr.ty, tensor.dtype, tensor.shape, shown, "LiteRT")
            self.exp_tab.set_expr(str(number), expr, force_override=True)
        return dict(zip(operator.outputs, results, strict=True))

    def _bound(self, result: relax.Expr, count: int) -> list[relax.Expr]:
        """Bind the results to this operator's layer; TVM's importer would bind them in the operator that uses them."""
        if not isinstance(result, relax.Tuple):
            result = self.bb.emit(result) if isinstance(result, relax.Call) else self.bb.normalize(result)
        if isinstance(result, relax.Tuple):
            fields = list(result.fields)
        elif isinstance(result.ty, relax.TupleType):
            fields = [relax.TupleGetItem(result, index) for index in range(len(result.ty.fields))]
        else:
            fields = [result]
        if len(fields) != count:
            raise ModelImportError(f"it has {count} outputs, TVM imports {len(fields)} of them")
        is_call = (relax.Call, relax.TupleGetItem)
        return [self.bb.emit(field) if isinstance(field, is_call) else self.bb.normalize(field) for field in fields]

"""Load TFLite files and bytes (float, half precision, int8) as Models, without TensorFlow."""

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import tflite
from tvm import relax
from tvm.relax.frontend.tflite import tflite_frontend

from rpc_runtime.program.specs import TensorSpec
from tvm_split.frontends import ImportRequest
from tvm_split.frontends.building import QUANTIZED_TOLERANCE, Built
from tvm_split.frontends.channels_first import channels_first
from tvm_split.frontends.convert import BRANCH, LOOP, RANDOM, Graph, Importer, Kind, Operation, convert, refuse
from tvm_split.frontends.dimensions import bound_inputs
from tvm_split.frontends.reference import InChildProcess
from tvm_split.frontends.tflite.conversions import CONVERSIONS, TfliteCall
from tvm_split.frontends.tflite.graph import Operator, TfliteFile, TfliteGraph, TfliteReference
from tvm_split.frontends.tflite.layer_names import Parts, parts_of
from tvm_split.model import Model


def load_tflite(source: str | Path | bytes, request: ImportRequest) -> Model:
    """Return a Model of a TFLite file's main graph.

    ``example_inputs`` (a sequence, a dict by input name, or one array) is optional. Inputs and outputs are in the
    file's order, with the names of its signature. Layers have their names in Keras, taken from the converter's names of
    tensors. Raises ModelImportError.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        name, shown, content = request.name or path.stem, repr(str(path)), path.read_bytes()
    else:
        name, shown, content = request.name or "model", f"a model of {len(source)} bytes", bytes(source)
    file = TfliteFile(content, shown)
    specs = file.specs()
    shapes, examples = bound_inputs(specs, request)
    require_end(file.operators, parts_of(file.operators, file.weights()))
    graph = file.bound(shapes)
    built = channels_first(import_tflite(graph, parts_of(graph.operators, graph.weights)))
    reference = TfliteReference(
        file.content,
        dict(zip(graph.inputs, shapes, strict=True)),
        [number for number, _ in graph.outputs],
        {int(key): variable for key, variable in built.held.items()},
    )
    return built.model(
        name, "tflite", InChildProcess(reference), examples,
        outputs=[output for _, output in graph.outputs], tolerance=QUANTIZED_TOLERANCE if graph.is_quantized else None,
    )  # fmt: skip


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

_OWN_QUANTIZED = frozenset(("GELU", "CUMSUM", "ARG_MAX", "ARG_MIN", "BATCH_MATMUL"))


def require_end(operators: Sequence[Operator], layers: Sequence[Parts]) -> None:
    """Raise ModelImportError for operators of refused kinds. Call this before running a file: loops may not end."""
    refuse(
        (f"{operator.kind} ({REFUSED[operator.kind]})", parts.operation)
        for operator, parts in zip(operators, layers, strict=True)
        if operator.kind in REFUSED
    )


def import_tflite(graph: TfliteGraph, layers: Sequence[Parts]) -> Built:
    """Convert a static graph; ``layers`` has those of each operator.

    ``held`` of the result has the numbers of tensors, as text, as keys. Raises ModelImportError, which names every
    operator that cannot be imported.
    """
    importer = _Importer(graph.content)
    inputs = {
        str(number): TensorSpec(name, graph.tensors[number].shape or (), graph.tensors[number].dtype)
        for number, name in graph.inputs.items()
    }
    operations = [
        Operation(
            operator.kind,
            parts.operation,
            tuple(str(number) for number in operator.inputs),
            tuple(str(number) for number in operator.outputs),
            [graph.tensors.get(number, Kind()) for number in operator.outputs],
            operator.options,
            (importer.tvm.subgraph.Operators(place), parts),
            _refusal(operator, graph, importer.tvm),
        )
        for place, (operator, parts) in enumerate(zip(graph.operators, layers, strict=True))
    ]
    outputs = [str(number) for number, _ in graph.outputs]
    return convert(Graph(inputs, outputs, {}, operations), importer)


def _refusal(operator: Operator, graph: TfliteGraph, converter: Any) -> str:
    dtypes = [graph.tensors[number].dtype for number in operator.inputs[:2] if number in graph.tensors]
    if dtypes[:1] == ["float32"] and dtypes[1:] in (["int8"], ["uint8"]):
        return DYNAMIC_RANGE
    if operator.kind in converter._SUPPORTED_QUANTIZED_OPS | _OWN_QUANTIZED | _MOVES:
        return ""
    is_quantized = any(tensor.qnn_params for tensor in converter.get_tensors([*operator.inputs, *operator.outputs]))
    return "its numbers are quantised" if is_quantized else ""


class _Importer(Importer):
    def __init__(self, content: bytes) -> None:
        super().__init__("LiteRT", CONVERSIONS, REFUSED)
        model = tflite.Model.GetRootAsModel(content, 0)
        self.tvm = _Converter(model, model.Subgraphs(0), tflite_frontend.ExprTable(), self.builder)
        self.tvm.exp_tab.exprs = self.values

    def call(self, operation: Operation) -> TfliteCall:
        self.tvm.parts = operation.source[1]
        return TfliteCall(operation, (), operation.attributes, self)

    def is_known_to_tvm(self, operation: Operation) -> bool:
        return operation.kind in self.tvm.convert_map

    def by_tvm(self, call: TfliteCall) -> Any:
        return self.tvm.convert_map[call.operation.kind](op=call.source[0])

    def output(self, key: Hashable) -> relax.Expr:
        (tensor,) = self.tvm.get_tensors([int(str(key))])
        return self.tvm.get_tensor_expr(tensor)


class _Converter(tflite_frontend.OperatorConverter):  # type: ignore[misc]
    """TVM's importer; it binds the parts of an operator to the layers that they come from, which ``parts`` names."""

    parts = Parts("", "", "")

    def convert_fused_activation_function(self, in_expr: relax.Expr, fused_activation_fn: int) -> relax.Expr:
        """Bind the value before a fused activation to its own layers, then emit the activation."""
        return super().convert_fused_activation_function(self._computed(in_expr), fused_activation_fn)

    def quantize(self, expr: relax.Expr, tensor_to_quantize: Any) -> relax.Expr:
        return super().quantize(self._computed(expr), tensor_to_quantize)

    def _computed(self, expr: relax.Expr) -> relax.Expr:
        """Bind ``expr``; the addition of a bias or folded norm belongs to the layer that it comes from."""
        if isinstance(expr, relax.Call) and expr.op.name == "relax.add":
            self.bb.layer = self.parts.operation
            expr = relax.op.add(self.bb.emit(expr.args[0]), expr.args[1])
            self.bb.layer = self.parts.bias
        expr = self.bb.emit(expr)
        self.bb.layer = self.parts.activation
        return expr

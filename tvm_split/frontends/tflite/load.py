"""Load TFLite files and bytes (float, half precision, int8) as Models, without TensorFlow.

Find the layers of a TFLite file's operators, from the names of their tensors.

A tensor's name lists TensorFlow's names of the operations that were fused to compute it, the last one first:
``net/act/Relu;net/norm/…/add;net/conv/convolution``. Each part of an operator belongs to the layer that it comes from.
"""

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
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
from tvm_split.frontends.names import Words, are_counted, is_counted, scopes_of_keras
from tvm_split.frontends.reference import InChildProcess
from tvm_split.frontends.tflite.conversions import CONVERSIONS, TfliteCall
from tvm_split.frontends.tflite.graph import Operator, TfliteFile, TfliteGraph
from tvm_split.frontends.tflite.reference import TfliteReference
from tvm_split.model import Model

_COMPUTES = re.compile(r"conv|depthwise|matmul", re.IGNORECASE)
_NORMALISES = re.compile(r"batch_?norm", re.IGNORECASE)
_WITH_WEIGHTS = frozenset(("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED", "CONV_3D"))
_SAYS_NOTHING = re.compile(
    r"|(Stateful)?PartitionedCall.*|arith\..*|tfl\..*|Identity.*|.*const(ant)?\d*", re.IGNORECASE
)


@dataclass(frozen=True)
class Parts:
    """The layers of an operator's parts: the operation itself, its bias or folded norm, and its activation."""

    operation: str
    bias: str
    activation: str


def parts_of(operators: Sequence[Operator], weights: Mapping[int, str]) -> list[Parts]:
    """Return the layers of all operators, in order; ``weights`` are the names of constant tensors by number.

    An operator whose result has no layer's name belongs to the layer of its weights, or else to that of its inputs.
    Further calls of a layer have ``@1``, ``@2`` after its name. If no tensor has a layer's name, each operator is a
    layer, named by its kind and number: ``conv_2d_0``.
    """
    pieces_by_operator = [_pieces_of(operator, weights) for operator in operators]
    is_named = any(pieces_by_operator)
    layers = _layers([piece for pieces in pieces_by_operator for piece in pieces])
    counts: Counter[str] = Counter()
    layer_of_tensor: dict[int, str] = {}
    all_parts: list[Parts] = []
    for operator, pieces in zip(operators, pieces_by_operator, strict=True):
        if pieces:
            parts = Parts(*(layers[piece] for piece in pieces))
        else:
            before = (
                [layer_of_tensor[number] for number in operator.inputs if number in layer_of_tensor] if is_named else []
            )
            layer = before[0] if before else f"{operator.kind.lower()}_{counts[operator.kind]}"
            parts = Parts(layer, layer, layer)
        counts[operator.kind] += 1
        layer_of_tensor.update(dict.fromkeys(operator.outputs, parts.activation))
        all_parts.append(parts)
    return all_parts


@dataclass(frozen=True)
class Piece:
    """One operation of TensorFlow: its scopes and its own word."""

    path: Words
    word: str


def _pieces_of(operator: Operator, weights: Mapping[int, str]) -> tuple[Piece, ...]:
    """The pieces for an operation, its bias and its activation; empty if no name identifies them."""
    pieces = _pieces(operator.name)
    if not pieces:
        of_weights = [piece for number in operator.inputs for piece in _pieces(weights.get(number, ""))]
        return (of_weights[0],) * 3 if of_weights else ()
    first = pieces[0]
    if operator.kind in _WITH_WEIGHTS:
        operation = next((piece for piece in reversed(pieces) if _COMPUTES.search(piece.word)), first)
        norms = (piece for piece in pieces if _NORMALISES.search("/".join((*piece.path, piece.word))))
        return operation, next(norms, operation), first
    # With an activation, two operations are fused. Further names come from weights that are shared with others.
    last = next((piece for piece in pieces if piece.path != first.path), first) if operator.is_fused else first
    return last, last, first


def _pieces(name: str) -> list[Piece]:
    pieces = []
    for piece in name.split(";"):
        *path, word = piece.partition(":")[0].split("/")
        if path or not _SAYS_NOTHING.fullmatch(word):
            pieces.append(Piece(tuple(path), word))
    return pieces


def _layers(pieces: Sequence[Piece]) -> dict[Piece, str]:
    """Map each piece to its layer; inner scopes of a Keras layer all belong to that layer."""
    unique = list(dict.fromkeys(pieces))
    paths = [piece.path for piece in unique]
    if are_counted([path for path in paths if path]):
        paths = [tuple(takewhile(is_counted, path)) for path in paths]
    calls: dict[Words, dict[Words, int]] = {}
    layers = {}
    for piece, path, words in zip(unique, paths, scopes_of_keras(paths), strict=True):
        called = words or (piece.word,)
        number = calls.setdefault(called, {}).setdefault(path, len(calls[called]))
        layers[piece] = "/".join(called) + (f"@{number}" if number else "")
    return layers


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
    """Convert a static graph; ``layers`` has those of each operator. Its values are the numbers of tensors as text.

    Raises ModelImportError, which names every operator that cannot be imported.
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
    """TVM's importer, which gives the parts of an operator to the layers that they come from: ``parts``."""

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

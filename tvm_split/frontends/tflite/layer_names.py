"""Find the layers of a TFLite file's operators, from the names of their tensors.

A tensor's name lists TensorFlow's names of the operations that were fused to compute it, the last one first:
``net/act/Relu;net/norm/…/add;net/conv/convolution``. Each part of an operator belongs to the layer that it comes from.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tvm_split.frontends.names import Words, are_counted, is_counted, scopes_of_keras
from tvm_split.frontends.tflite.graph import Operator

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
    """One operation of TensorFlow: its scopes and its own name."""

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
    is_fused = bool(operator.options.get("fusedActivationFunction"))
    last = next((piece for piece in pieces if piece.path != first.path), first) if is_fused else first
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

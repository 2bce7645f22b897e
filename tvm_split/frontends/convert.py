"""The driver of all importers: it converts a source's graph to Relax, operation by operation.

A frontend describes its source as a `Graph` and the framework's side of the conversion as an `Importer`. An operation
is converted by the first of these that knows it: the frontend's own conversions, then TVM's importer. All operations
that cannot be imported are refused at once.
"""

import importlib.util
import linecache
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tvm import relax

from relay_passes.ir import constant
from rpc_runtime.program.specs import Array, TensorSpec
from tvm_split.errors import ModelImportError, last_line
from tvm_split.frontends.building import Built, ModelBuilder
from tvm_split.frontends.operators import Operators, numbers_of
from tvm_split.units import short_list

RANDOM = "its result is random; a split network gives the same answer to the same input"
DYNAMIC = "the shape of its result depends on the values of its input"
BRANCH = "it chooses what to compute while it runs"
LOOP = "it loops while it runs"


@dataclass(frozen=True)
class Kind:
    """The dtype ("": unknown) and shape (None: unknown) of a tensor, as the source infers them.

    With ``may_repeat``, the imported value may have size 1 along axes on which its elements only repeat.
    """

    dtype: str = ""
    shape: tuple[int, ...] | None = None
    may_repeat: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation of a source; inputs and outputs are keys of values, None where there is none.

    ``results`` are the kinds of the outputs; an output that is a tuple has a tuple of kinds. An output of kind None is
    not checked. ``source`` is the framework's own object. ``refusal`` is the reason why this operation cannot be
    imported, if there is one. ``line`` is the line of the user's network that made it (``FILE, line N``), if it is
    known.
    """

    kind: str
    layer: str
    inputs: tuple[Hashable | None, ...]
    outputs: tuple[Hashable | None, ...]
    results: Sequence[Kind | tuple[Kind | None, ...] | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    source: Any = None
    refusal: str = ""
    line: str = ""

    @property
    def at_line(self) -> str:
        """The line of the user's network in parentheses, or an empty string."""
        return f" ({self.line})" if self.line else ""


@dataclass(frozen=True)
class Graph:
    """A source's graph with static shapes; operations are in execution order."""

    inputs: Mapping[Any, TensorSpec]
    outputs: Sequence[Hashable]
    constants: Mapping[Any, Array]
    operations: Sequence[Operation]


@dataclass(frozen=True)
class Call:
    """The argument of a conversion: an operation with its operands as expressions, and attributes by name."""

    operation: Operation
    operands: Sequence[Any]
    attributes: Mapping[str, Any]
    importer: Any

    @property
    def source(self) -> Any:
        """The framework's own object for this operation."""
        return self.operation.source

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return an attribute, or ``otherwise`` if the call has none of this name."""
        return self.attributes.get(name, otherwise)

    def numbers(self, place: int, what: str = "input") -> Any:
        """The numbers of a constant operand; None if it is absent. Raises ModelImportError if it is computed."""
        operand = self.operands[place] if place < len(self.operands) else None
        if operand is not None and numbers_of(operand) is None:
            raise ModelImportError(f"its {what} is computed while the network runs; it has to be a constant")
        return numbers_of(operand)

    @property
    def shape(self) -> list[int]:
        """The shape of the first result in the source."""
        return list(self._first.shape or ())

    @property
    def dtype(self) -> str:
        """The dtype of the first result in the source."""
        return str(self._first.dtype)

    @property
    def _first(self) -> Any:
        kind = self.operation.results[0]
        return kind[0] if isinstance(kind, tuple) else kind


Conversion = Callable[[Operators, Any], Any]
"""A function of `Operators` and a `Call` that returns the result, or several results in a sequence."""


class Importer:
    """The framework's side of `convert`: its own conversions, and TVM's importer for all other operations.

    ``values`` are the expressions of the source's values by their keys.
    """

    def __init__(self, framework: str, conversions: Mapping[str, Conversion], refused: Mapping[str, str]) -> None:
        self.framework, self.conversions, self.refused = framework, conversions, refused
        self.builder = ModelBuilder()
        self.values: dict[Hashable, Any] = {}

    def call(self, operation: Operation) -> Call:
        operands = [None if key is None else self.values[key] for key in operation.inputs]
        return Call(operation, operands, operation.attributes, self)

    def is_known_to_tvm(self, operation: Operation) -> bool:
        return False

    def by_tvm(self, call: Any) -> Any:
        """Return the result of TVM's importer for an operation that it supports."""
        raise NotImplementedError

    def output(self, key: Hashable) -> relax.Expr:
        """Return the expression of one of the graph's outputs."""
        return self.values[key]


def convert(graph: Graph, importer: Importer) -> Built:
    """Convert a graph. Raises ModelImportError, which names every operation that cannot be imported and its layers."""
    operations, used = _needed(graph)
    refuse(_problems(operations, importer))
    builder, values = importer.builder, importer.values
    values.update((key, constant(array)) for key, array in graph.constants.items() if key in used)
    op = Operators(builder)
    with builder.main(list(graph.inputs.values())) as parameters:
        values.update(zip(graph.inputs, parameters, strict=True))
        for operation in operations:
            builder.layer = operation.layer
            shown = f"operator {operation.kind} of layer {operation.layer!r}{operation.at_line}"
            with named(shown):
                call = importer.call(operation)
                conversion = importer.conversions.get(operation.kind)
                results = _results(
                    importer.by_tvm(call) if conversion is None else conversion(op, call), builder, operation
                )
            for key, result, kind in zip(operation.outputs, results, operation.results, strict=False):
                if key is not None:
                    _check(result.ty, kind, shown, importer.framework)
                    values[key] = result
        builder.outputs = [importer.output(key) for key in graph.outputs]
    built = builder.built(values)
    return replace(built, empty_layers=_empty_layers(graph, values, built.layers))


def _empty_layers(graph: Graph, values: Mapping[Hashable, Any], layers: Mapping[str, str]) -> dict[str, str]:
    """Return the source's layers for which nothing is computed (see `Model.empty_layers`)."""
    empty: dict[str, str] = {}
    for operation in graph.operations:
        if operation.layer not in layers.values():
            names = [getattr(values.get(key), "name", "") for key in operation.outputs]
            empty[operation.layer] = next((layers[name] for name in names if name in layers), "")
    return empty


def _needed(graph: Graph) -> tuple[list[Operation], set[Hashable]]:
    """Return the operations that the outputs need (assertions are needed by none), and the keys that are read.

    A result that no operation reads gets the key None, so that an importer may omit it: masks, indices, statistics.
    """
    used: set[Hashable] = set(graph.outputs)
    operations = []
    for operation in reversed(graph.operations):
        if used.intersection(operation.outputs):
            outputs = tuple(key if key in used else None for key in operation.outputs)
            operations.append(replace(operation, outputs=outputs))
            used.update(key for key in operation.inputs if key is not None)
    return operations[::-1], used


def _problems(operations: Sequence[Operation], importer: Importer) -> Iterator[tuple[str, str]]:
    for operation in operations:
        kind = operation.kind
        reason = importer.refused.get(kind) or operation.refusal
        if reason:
            yield f"{kind} ({reason})", f"{operation.layer}{operation.at_line}"
        elif kind not in importer.conversions and not importer.is_known_to_tvm(operation):
            yield kind, f"{operation.layer}{operation.at_line}"


def _results(result: Any, builder: ModelBuilder, operation: Operation) -> list[relax.Expr]:
    """Bind the results to the operation's layer; TVM's importers would bind them in the layer that uses them."""
    if result is None:
        raise ModelImportError("TVM imports nothing for it")
    result = builder.emit(result if isinstance(result, relax.Expr) else relax.Tuple(list(result)))
    if any(kind is None or isinstance(kind, tuple) for kind in operation.results):
        return [result]
    if isinstance(result, relax.Tuple):
        fields = list(result.fields)
    elif isinstance(result.ty, relax.TupleType):
        fields = [builder.emit(relax.TupleGetItem(result, index)) for index in range(len(result.ty.fields))]
    else:
        fields = [result]
    if any(key is not None for key in operation.outputs[len(fields) :]):
        raise ModelImportError(f"only the first {len(fields)} of its outputs can be imported, and another one is read")
    return fields


def refuse(problems: Iterable[tuple[str, str]]) -> None:
    """Raise ModelImportError if there are ``problems``: pairs of an operator that cannot be imported and its layer."""
    layers: dict[str, list[str]] = {}
    for operator, layer in problems:
        layers.setdefault(operator, []).append(layer)
    if layers:
        details = "; ".join(f"{operator} in {short_list(list(dict.fromkeys(at)))}" for operator, at in layers.items())
        raise ModelImportError(
            f"the model has operators that cannot be imported: {details}. Write these layers with other operators, or "
            "give the part of the model before or after them and compute them yourself"
        )


def line_of_source(error: BaseException) -> str:
    """Return the innermost line of the user's own code in an error's traceback, as `` (FILE, line N: CODE)``, or "".

    Frameworks and Python's standard library are not the user's.
    """
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        package, path = str(frame.f_globals.get("__name__", "")).partition(".")[0], frame.f_code.co_filename
        code = linecache.getline(path, number).strip()
        if code and package not in sys.stdlib_module_names and is_users(path):
            return f" ({path}, line {number}: {code})"
    return ""


def is_users(path: str) -> bool:
    """Whether a Python file is the user's own, so neither of this project nor of a framework."""
    return not path.startswith(_folders_of_others())


@cache
def _folders_of_others() -> tuple[str, ...]:
    specs = map(importlib.util.find_spec, ("tvm_split", "torch", "jax", "jaxlib", "flax", "keras"))
    return tuple(f"{folder}/" for spec in specs if spec for folder in spec.submodule_search_locations or ())


@contextmanager
def named(operator: str) -> Iterator[None]:
    """Turn any error inside the block into a ModelImportError of one line that names ``operator`` and its layer."""
    try:
        yield
    except Exception as error:
        reason = error if isinstance(error, ModelImportError) else last_line(error)
        raise ModelImportError(f"{operator} cannot be imported: {reason}") from error


def _check(actual: relax.Type, kind: Any, operator: str, framework: str) -> None:
    """Raise ModelImportError if an imported type is not of the ``kind`` that the source infers."""
    if isinstance(kind, tuple):
        for field_type, field_kind in zip(getattr(actual, "fields", ()), kind, strict=False):
            _check(field_type, field_kind, operator, framework)
    if not isinstance(kind, Kind):
        return
    try:
        sizes = [int(size) for size in actual.shape]
    except (TypeError, AttributeError) as error:
        raise ModelImportError(
            f"{operator} gives a shape that depends on the values of its inputs; "
            "a split network needs shapes that are known beforehand"
        ) from error
    shape = sizes if kind.shape is None else list(kind.shape)
    if kind.may_repeat:
        shape = [1 if imported_size == 1 else size for size, imported_size in zip(shape, sizes, strict=True)]
    if str(actual.dtype) != (kind.dtype or str(actual.dtype)) or sizes != shape:
        raise ModelImportError(
            f"{operator} gives {kind.dtype}{shape} in {framework}, imported it gives {actual.dtype}{sizes}"
        )

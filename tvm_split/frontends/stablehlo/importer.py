"""Build a Model from a StableHLO module with static sizes: flatten it, and convert each operation.

Flattening makes one list of operations of a module with functions, loops and branches.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from tvm import relax

from rpc_runtime.program.specs import Array, TensorSpec
from tvm_split.errors import ModelImportError
from tvm_split.frontends.building import Built
from tvm_split.frontends.channels_first import channels_first
from tvm_split.frontends.convert import BRANCH, LOOP, RANDOM, Graph, Importer, Kind, Operation, convert, refuse
from tvm_split.frontends.operators import Operators, shape_of
from tvm_split.frontends.reference import InChildProcess
from tvm_split.frontends.stablehlo.conversions import HloCall, elementwise, reductions, shapes
from tvm_split.frontends.stablehlo.folding import folded, without_repeats
from tvm_split.frontends.stablehlo.layer_names import Frame, Naming, Origin, as_they_are, layers_of, words_of
from tvm_split.frontends.stablehlo.modules import (
    block_of,
    bytecode,
    functions,
    in_context,
    main_of,
    result_kind,
    shape_and_dtype,
)
from tvm_split.model import Model

MOST_OPERATIONS = 200_000
"""The most operations of a flattened network. A loop that unrolls to more is not worth splitting."""

_QUIET = frozenset(
    f"stablehlo.{name}" for name in ("constant", "iota", "broadcast_in_dim", "reshape", "convert", "transpose", "slice")
)
"""Operations that do not start a new call of a layer (`Origin.is_quiet`)."""

_KEPT_WHOLE = frozenset({"chlo.erf", "chlo.top_k", "chlo.asin", "chlo.acos", "chlo.atan"})
"""Composite operations that are imported as one operation; others are replaced by their decomposition."""

_WITHOUT_EFFECT = frozenset({"Sharding", "shape_assertion", "annotate_device_placement", "SPMDFullToShardShape"})
"""Custom calls that return their operands, or nothing."""


@dataclass(frozen=True)
class FlatProgram:
    """A program without calls and loops: ``steps`` are operations of ``module``'s main function, each with its layer.

    ``module`` also contains the decompositions of composite operations. ``known`` has the values that depend on no
    input. ``arguments`` are those of the main function, including weights.
    """

    module: ir.Module
    steps: tuple[tuple[ir.Operation, str], ...]
    arguments: tuple[ir.Value, ...]
    results: tuple[ir.Value, ...]
    known: Mapping[ir.Value, Array]


@dataclass
class _Flattening:
    """The flattening of ``source`` (static sizes); ``weights`` are known arguments of its main function, by position.

    ``naming`` converts paths of operations to names of layers. ``operations`` are those so far, with their ``origins``,
    and ``problems`` what is refused, and where.
    """

    source: ir.Module
    weights: Mapping[int, Array]
    naming: Naming
    operations: list[ir.Operation] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    known: dict[ir.Value, Array] = field(default_factory=dict)
    problems: list[tuple[str, Origin]] = field(default_factory=list)

    def run(self) -> FlatProgram:
        """Raise ModelImportError for loops and branches that depend on data, each with its layer."""
        self.functions = functions(self.source)
        main = main_of(self.source)
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        flat = ir.Module.create()
        self.body = ir.InsertionPoint(flat.body)
        self.copied: set[str] = set()
        function = func.FuncOp("main", kind, ip=self.body)
        entry = function.add_entry_block()
        self.point = ir.InsertionPoint(entry)
        arguments = tuple(entry.arguments)
        self.known.update({arguments[place]: array for place, array in self.weights.items()})
        results = self._block(block_of(main), arguments, Frame())
        func.ReturnOp(results, ip=self.point)
        layers = layers_of([*self.origins, *(origin for _, origin in self.problems)], self.naming)
        of_problems = layers[len(self.origins) :]
        refuse((what, layer) for (what, _), layer in zip(self.problems, of_problems, strict=True))
        steps = tuple(zip(self.operations, layers, strict=False))  # without the layers of the problems
        return FlatProgram(flat, steps, arguments, tuple(results), self.known)

    def _block(self, block: Any, arguments: Sequence[ir.Value], frame: Frame, outer: Any = None) -> list[ir.Value]:
        """Append a block's operations to the program, and return the block's results."""
        values: dict[ir.Value, ir.Value] = dict(outer or {})
        values.update(zip(block.arguments, arguments, strict=True))
        for op_view in block.operations:
            operation = op_view.operation
            operands = [values[operand] for operand in operation.operands]
            if operation.name in ("func.return", "stablehlo.return"):
                return operands
            results = self._flattened(operation, operands, frame, values)
            values.update(zip(operation.results, results, strict=True))
        return []

    def _flattened(
        self, operation: ir.Operation, operands: list[ir.Value], frame: Frame, values: Mapping[ir.Value, ir.Value]
    ) -> Sequence[ir.Value]:
        """Append an operation, or the operations inside of it, to the program, and return its results there."""
        words = frame.words_within(words_of(operation.location))
        kind = operation.name
        if kind in ("func.call", "stablehlo.composite"):
            callee = "callee" if kind == "func.call" else "decomposition"
            name = ir.FlatSymbolRefAttr(operation.attributes[callee]).value
            if kind == "func.call" or ir.StringAttr(operation.attributes["name"]).value not in _KEPT_WHOLE:
                return self._block(block_of(self.functions[name]), operands, Frame(words, frame, name))
            self._copy_function(name)
        elif kind == "stablehlo.while":
            return self._loop(operation, operands, Frame(words, frame, "while", True), values)
        elif kind in ("stablehlo.case", "stablehlo.if"):
            return self._branch(operation, operands, Frame(words, frame, "branch", True), values)
        elif kind == "stablehlo.optimization_barrier":
            return operands
        elif kind == "stablehlo.custom_call" and _called(operation) in _WITHOUT_EFFECT:
            return operands[: len(operation.results)]
        return self._cloned(operation, operands, self._origin(operation, words, frame), values)

    def _origin(self, operation: ir.Operation, words: tuple[str, ...], frame: Frame) -> Origin:
        kind = operation.name.partition(".")[2]
        return Origin(frame, words, kind, str(operation.location), operation.name in _QUIET)

    def _cloned(
        self, operation: ir.Operation, operands: list[ir.Value], origin: Origin, values: Mapping[ir.Value, ir.Value]
    ) -> list[ir.Value]:
        """Append a copy of an operation to the program; fold it if all its operands are known."""
        if len(self.operations) >= MOST_OPERATIONS:
            raise ModelImportError(
                f"with its loops unrolled, the model has more than {MOST_OPERATIONS} operations; "
                "import a part of it without the longest loop"
            )
        clone = operation.clone(ip=self.point)
        for place, operand in enumerate(operands):
            clone.operands[place] = operand
        _give_outer_values(clone, values)
        self.operations.append(clone)
        self.origins.append(origin)
        results = list(clone.results)
        if all(operand in self.known for operand in operands):
            arrays = folded(clone, [self.known[operand] for operand in operands])
            self.known.update(zip(results, arrays or (), strict=False))
        return results

    def _copy_function(self, name: str) -> None:
        """Copy a composite operation's decomposition and the functions that it calls."""
        if name in self.copied:
            return
        self.copied.add(name)
        self.functions[name].operation.clone(ip=self.body)
        for op_view in block_of(self.functions[name]).operations:
            if op_view.operation.name == "func.call":
                self._copy_function(ir.FlatSymbolRefAttr(op_view.operation.attributes["callee"]).value)

    def _loop(
        self, operation: ir.Operation, operands: list[ir.Value], frame: Frame, values: Mapping[ir.Value, ir.Value]
    ) -> list[ir.Value]:
        """Unroll a loop while its condition is known, and return its results."""
        condition, body = (region.blocks[0] for region in operation.regions)
        for count in itertools.count():
            (goes_on,) = self._evaluated(condition, operands, frame, values)
            if goes_on is None:
                # Flattening continues after the loop, so that all problems are found at once.
                return self._refused(operation, f"while ({LOOP}{' more often than is known' * bool(count)})", frame)
            if not goes_on:
                return operands
            operands = self._block(body, operands, frame, values)
        raise AssertionError  # unreachable: a loop ends, or is refused

    def _branch(
        self, operation: ir.Operation, operands: list[ir.Value], frame: Frame, values: Mapping[ir.Value, ir.Value]
    ) -> Sequence[ir.Value]:
        """Append the chosen branch if the choice is known, and return its results."""
        chosen = self.known.get(operands[0])
        if chosen is None:
            return self._refused(operation, f"{operation.name.partition('.')[2]} ({BRANCH})", frame)
        count = len(operation.regions)
        place = int(chosen) if operation.name == "stablehlo.case" else int(not chosen)
        region = operation.regions[place if 0 <= place < count else count - 1]
        return self._block(region.blocks[0], [], frame, values)

    def _refused(self, operation: ir.Operation, what: str, frame: Frame) -> list[ir.Value]:
        """Note a problem; return placeholders for the operation's results."""
        self.problems.append((what, self._origin(operation, frame.words, frame.outer or Frame())))
        return [
            ir.Operation.create("builtin.unrealized_conversion_cast", [result.type], [], ip=self.point).results[0]
            for result in operation.results
        ]

    def _evaluated(
        self, block: Any, operands: list[ir.Value], frame: Frame, values: Mapping[ir.Value, ir.Value]
    ) -> list[Array | None]:
        """Compute a block's results without leaving it in the program; None for unknown results."""
        operations, problems = len(self.operations), len(self.problems)
        arrays = [self.known.get(result) for result in self._block(block, operands, frame, values)]
        for operation in reversed(self.operations[operations:]):
            for result in operation.results:
                self.known.pop(result, None)
            operation.erase()
        del self.operations[operations:], self.origins[operations:], self.problems[problems:]
        return arrays


def _give_outer_values(operation: ir.Operation, values: Mapping[ir.Value, ir.Value]) -> None:
    """In the regions of a copied operation, replace the values from outside by their copies."""
    for region in operation.regions:
        for block in region.blocks:
            for op_view in block.operations:
                for place, operand in enumerate(op_view.operation.operands):
                    if operand in values:
                        op_view.operation.operands[place] = values[operand]
                _give_outer_values(op_view.operation, values)


def model_of(
    module: ir.Module,
    weights: Mapping[int, Array],
    inputs: Mapping[int, str],
    examples: Sequence[Any] | None,
    *,
    framework: str,
    name: str,
    naming: Naming = as_they_are,
) -> Model:
    """Return a Model of ``module``; arguments of its main function are ``weights`` or named ``inputs``, by position.

    ``naming`` converts paths of operations to names of layers. Raises ModelImportError.
    """
    # It loads JAX, which the import can do without.
    from tvm_split.frontends.stablehlo.reference import StableHloReference

    with in_context():
        program = _Flattening(module, weights, naming).run()
        built = channels_first(import_program(program, inputs))
        codes = bytecode(module), bytecode(program.module)
    reference = StableHloReference(*codes, weights, tuple(inputs), built.held)
    return built.model(name, framework, InChildProcess(reference), examples)


def import_program(program: FlatProgram, input_names: Mapping[int, str]) -> Built:
    """Convert a program; ``input_names`` maps the positions of the arguments that are not weights to names.

    ``held`` of the result has the values with their whole shape, as (position of the step, position of the result).
    Raises ModelImportError, which names every operation that cannot be imported and its layers.
    """
    inputs = {}
    for place, name in input_names.items():
        shape, dtype = shape_and_dtype(program.arguments[place].type)
        inputs[program.arguments[place]] = TensorSpec(name, tuple(size or 0 for size in shape), dtype)
    steps = [
        (place, operation, layer)
        for place, (operation, layer) in enumerate(program.steps)
        if not all(result in program.known for result in operation.results)
    ]
    used = {operand for _, operation, _ in steps for operand in operation.operands}.union(program.results)
    constants = {
        value: np.array(without_repeats(array), order="C") for value, array in program.known.items() if value in used
    }
    operations = [_operation(operation, layer) for _, operation, layer in steps]
    importer = _Importer()
    built = convert(Graph(inputs, program.results, constants, operations), importer)
    keys = {result: (place, which) for place, source, _ in steps for which, result in enumerate(source.results)}
    held = {
        keys[value]: variable
        for value, variable in built.held.items()
        if shape_of(importer.values[value]) == _sizes(value)
    }
    return replace(built, held=held)


def _operation(operation: ir.Operation, layer: str) -> Operation:
    refusal, results = "", []
    try:
        for value in operation.operands:
            shape_and_dtype(value.type)
        kinds = [result_kind(operation, place) for place in range(len(operation.results))]
        results = [Kind(str(dtype), shape, may_repeat=True) for shape, dtype in kinds]
    except ModelImportError as error:
        refusal = str(error)
    kind = _called(operation).removeprefix("stablehlo.")
    operands, outputs = tuple(operation.operands), tuple(operation.results)
    return Operation(kind, layer, operands, outputs, results, source=operation, refusal=refusal)


def _called(operation: Any) -> str:
    """The operation's name; for a composite operation or custom call, the name of the operation that it stands for."""
    if operation.name not in ("stablehlo.composite", "stablehlo.custom_call"):
        return str(operation.name)
    attributes = operation.attributes
    return str(ir.StringAttr(attributes["name" if "name" in attributes else "call_target_name"]).value)


CONVERSIONS = elementwise.CONVERSIONS | shapes.CONVERSIONS | reductions.CONVERSIONS


class _Importer(Importer):
    def __init__(self) -> None:
        super().__init__("StableHLO", CONVERSIONS, dict.fromkeys(("rng", "rng_bit_generator"), RANDOM))
        self.wholes: dict[ir.Value, relax.Expr] = {}

    def call(self, operation: Operation) -> HloCall:
        return HloCall(operation, [self.values[key] for key in operation.inputs], {}, self)

    def whole(self, value: ir.Value) -> relax.Expr:
        """Return a value in its whole shape; `values` have size 1 along axes on which they only repeat."""
        if value not in self.wholes:
            self.wholes[value] = Operators(self.builder).repeated(self.values[value], _sizes(value))
        return self.wholes[value]

    def output(self, key: Hashable) -> relax.Expr:
        """Return an output in its whole shape; a broadcast for it belongs to the layer that makes it."""
        self.builder.layer = self.builder.layers.get(getattr(self.values[key], "name", ""), self.builder.layer)
        return self.whole(key)


def _sizes(value: ir.Value) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)

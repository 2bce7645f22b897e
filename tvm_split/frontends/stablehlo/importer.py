"""Build a Model from a StableHLO module with static sizes: flatten it, and convert each operation."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from tvm import relax

from rpc_runtime.program.program import TensorSpec
from tvm_split.errors import ModelImportError
from tvm_split.frontends.building import Built
from tvm_split.frontends.channels_first import channels_first
from tvm_split.frontends.convert import RANDOM, Graph, Importer, Kind, Operation, convert
from tvm_split.frontends.operators import Operators, shape_of
from tvm_split.frontends.reference import InChildProcess
from tvm_split.frontends.stablehlo.conversions import HloCall, contractions, elementwise, indexing, reductions, shapes
from tvm_split.frontends.stablehlo.flattening import Program, Step, flattened
from tvm_split.frontends.stablehlo.folding import without_repeats
from tvm_split.frontends.stablehlo.layer_names import Naming, as_they_are
from tvm_split.frontends.stablehlo.modules import Array, bytecode, in_context, result_kind, shape_and_dtype
from tvm_split.model import Model


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
    from tvm_split.frontends.stablehlo.reference import (
        StableHloReference,  # it loads JAX, which the import can do without
    )

    program = flattened(module, weights, naming)
    with in_context():
        built = channels_first(import_program(program, inputs))
        codes = bytecode(module), bytecode(program.module)
    reference = StableHloReference(*codes, weights, tuple(inputs), built.held)
    return built.model(name, framework, InChildProcess(reference), examples)


def import_program(program: Program, input_names: Mapping[int, str]) -> Built:
    """Convert a program; ``input_names`` maps the positions of the arguments that are not weights to names.

    ``held`` of the result has the values with their whole shape, as (position of the step, position of the result).
    Raises ModelImportError, which names every operation that cannot be imported and its layers.
    """
    inputs = {}
    for place, name in input_names.items():
        shape, dtype = shape_and_dtype(program.arguments[place].type)
        inputs[program.arguments[place]] = TensorSpec(name, tuple(size or 0 for size in shape), dtype)
    steps = [
        (place, step)
        for place, step in enumerate(program.steps)
        if not all(result in program.known for result in step.operation.results)
    ]
    used = {operand for _, step in steps for operand in step.operation.operands}.union(program.results)
    constants = {
        value: np.array(without_repeats(array), order="C") for value, array in program.known.items() if value in used
    }
    operations = [_operation(step) for _, step in steps]
    importer = _Importer()
    built = convert(Graph(inputs, program.results, constants, operations), importer)
    keys = {result: (place, which) for place, step in steps for which, result in enumerate(step.operation.results)}
    held = {
        keys[value]: variable
        for value, variable in built.held.items()
        if shape_of(importer.values[value]) == _sizes(value)
    }
    return Built(built.module, built.layers, held)


def _operation(step: Step) -> Operation:
    operation = step.operation
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
    return Operation(kind, step.layer, operands, outputs, results, source=operation, refusal=refusal)


def _called(operation: Any) -> str:
    """The operation's name; for a composite operation or custom call, the name of the operation that it stands for."""
    if operation.name not in ("stablehlo.composite", "stablehlo.custom_call"):
        return str(operation.name)
    attributes = operation.attributes
    return str(ir.StringAttr(attributes["name" if "name" in attributes else "call_target_name"]).value)


CONVERSIONS = {
    **elementwise.CONVERSIONS,
    **shapes.CONVERSIONS,
    **reductions.CONVERSIONS,
    **contractions.CONVERSIONS,
    **indexing.CONVERSIONS,
}


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

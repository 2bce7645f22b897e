"""Translate a flattened StableHLO program to one Relax function, each operation with its layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.importing import RANDOM, Imported, RecordingBuilder, check_type, named, refuse
from tvm_split.frontends.operators import Operators, constant, shape_of
from tvm_split.frontends.stablehlo.attributes import result_kind
from tvm_split.frontends.stablehlo.conversions import (
    convolution,
    dot_general,
    elementwise,
    indexing,
    reductions,
    shapes,
    sorting,
)
from tvm_split.frontends.stablehlo.conversions.call import Call, Conversions
from tvm_split.frontends.stablehlo.flattening import Program, Step
from tvm_split.frontends.stablehlo.folding import without_repeats
from tvm_split.frontends.stablehlo.modules import in_context, shape_and_dtype

CONVERSIONS: Conversions = {
    **elementwise.CONVERSIONS,
    **shapes.CONVERSIONS,
    **reductions.CONVERSIONS,
    **convolution.CONVERSIONS,
    **dot_general.CONVERSIONS,
    **indexing.CONVERSIONS,
    **sorting.CONVERSIONS,
}

REFUSED: Mapping[str, str] = dict.fromkeys(("rng", "rng_bit_generator"), RANDOM)
"""Operations that are refused, each with the reason."""


def import_program(program: Program, input_names: Mapping[int, str]) -> Imported:
    """Translate a program; ``input_names`` maps the positions of the arguments that are not weights to names.

    ``held`` of the result has the values with their whole shape, as (position of the step, position of the result).
    Raises ModelImportError, which names every operation that cannot be imported and its layers.
    """
    with in_context():
        return _Importer(program, input_names).translate()


class _Importer:
    def __init__(self, program: Program, input_names: Mapping[int, str]) -> None:
        self.program = program
        self.input_names = input_names
        self.builder = RecordingBuilder()
        self.op = Operators(self.builder)
        self.values: dict[ir.Value, relax.Expr] = {}
        self.wholes: dict[ir.Value, relax.Expr] = {}

    def translate(self) -> Imported:
        refuse(self._problems())
        inputs = []
        for place, name in self.input_names.items():
            shape, dtype = shape_and_dtype(self.program.arguments[place].type)
            inputs.append(relax.Var(name, relax.TensorType(list(shape), dtype)))
            self.values[self.program.arguments[place]] = inputs[-1]
        held: dict[tuple[int, int], relax.Expr] = {}
        with self.builder.function("main", inputs):
            with self.builder.dataflow():
                for place, step in enumerate(self.program.steps):
                    if not all(result in self.program.known for result in step.operation.results):
                        for which, (result, value) in enumerate(self._converted(step)):
                            if shape_of(value) == _sizes(result):
                                held[place, which] = value
                outputs = [self._output(result) for result in self.program.results]
                self.builder.layer = "output"
                result = self.builder.emit_output(relax.Tuple(outputs))
            self.builder.emit_func_output(result)
        return self.builder.imported(held)

    def _problems(self) -> Iterator[tuple[str, str]]:
        for step in self.program.steps:
            kind, operation = _kind(step.operation), step.operation
            shown = _shown(operation)
            if shown in REFUSED:
                yield f"{shown} ({REFUSED[shown]})", step.layer
            elif kind not in CONVERSIONS and not all(result in self.program.known for result in operation.results):
                yield shown, step.layer
            else:
                for value in (*operation.operands, *operation.results):
                    try:
                        shape_and_dtype(value.type)
                    except ModelImportError as error:
                        yield f"{shown} ({error})", step.layer
                        break

    def _value(self, value: ir.Value) -> relax.Expr:
        """Return the expression of a value; its size is 1 along axes on which the value only repeats."""
        if value not in self.values:
            array = self.program.known[value]
            self.values[value] = constant(np.array(without_repeats(array), order="C"), str(array.dtype))
        return self.values[value]

    def _whole(self, value: ir.Value) -> relax.Expr:
        if value not in self.wholes:
            self.wholes[value] = self.op.repeated(self._value(value), _sizes(value))
        return self.wholes[value]

    def _converted(self, step: Step) -> Iterator[tuple[ir.Value, relax.Expr]]:
        operation = step.operation
        self.builder.layer = step.layer
        shown = f"operation {_shown(operation)} of layer {step.layer!r}"
        operands = tuple(operation.operands)
        with named(shown):
            known = tuple(self.program.known.get(operand) for operand in operands)
            call = Call(operation, tuple(map(self._value, operands)), known, self._whole)
            found = CONVERSIONS[_kind(operation)](self.op, call)
        results = found if isinstance(found, list) else [found]
        for place, (value, result) in enumerate(zip(results, operation.results, strict=True)):
            shape, dtype = result_kind(operation, place)
            sizes = [1 if own == 1 else size for size, own in zip(shape, shape_of(value), strict=True)]
            check_type(value.ty, str(dtype), sizes, shown, "StableHLO")
            self.values[result] = value
            yield result, value

    def _output(self, result: ir.Value) -> relax.Expr:
        """Return an output in its whole shape; a broadcast for it belongs to the layer that makes it."""
        self.builder.layer = self.builder.layers.get(getattr(self._value(result), "name", ""), self.builder.layer)
        return self._whole(result)


def _sizes(value: ir.Value) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


def _kind(operation: Any) -> str:
    """The operation's name; for a composite operation or custom call, the name of the operation that it stands for."""
    if operation.name in ("stablehlo.composite", "stablehlo.custom_call"):
        return _called(operation)
    return str(operation.name)


def _called(operation: Any) -> str:
    attributes = operation.attributes
    return str(ir.StringAttr(attributes["name" if "name" in attributes else "call_target_name"]).value)


def _shown(operation: Any) -> str:
    return _kind(operation).removeprefix("stablehlo.").removeprefix("chlo.")

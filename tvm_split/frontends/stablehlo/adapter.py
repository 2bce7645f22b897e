"""A written-out StableHLO program as one Relax function, every operation under its layer's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlib.mlir import ir
from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.axis_orders import Arrangement, Arranger, Value, in_place
from tvm_split.frontends.importing import RANDOM, Imported, RecordingBuilder, check_type, named, refuse
from tvm_split.frontends.operators import shape_of
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
from tvm_split.frontends.stablehlo.flattening import Program, Step
from tvm_split.frontends.stablehlo.modules import in_context, shape_and_dtype
from tvm_split.frontends.stablehlo.values import Call, of_array

Converter = Callable[[Arranger, Call], Value | list[Value]]

CONVERTERS: Mapping[str, Converter] = {
    **elementwise.CONVERTERS,
    **shapes.CONVERTERS,
    **reductions.CONVERTERS,
    **convolution.CONVERTERS,
    **dot_general.CONVERTERS,
    **indexing.CONVERTERS,
    **sorting.CONVERTERS,
}
"""By the operation's name."""

REFUSED: Mapping[str, str] = dict.fromkeys(("rng", "rng_bit_generator"), RANDOM)
"""Operation to the reason."""


@dataclass(frozen=True)
class ImportedProgram:
    """What is held are results by the places of their step and among its results, arranged as ``arrangements`` say."""

    imported: Imported
    arrangements: Mapping[tuple[int, int], Arrangement]


def import_program(program: Program, input_names: Mapping[int, str]) -> ImportedProgram:
    """Translate a program; ``input_names`` are those of the arguments that are no weights, by place.

    Raises ModelImportError naming every operation that cannot be imported, with the layers it is in.
    """
    with in_context():
        return _Importer(program, input_names).translate()


class _Importer:
    def __init__(self, program: Program, input_names: Mapping[int, str]) -> None:
        self.program = program
        self.input_names = input_names
        self.builder = RecordingBuilder()
        self.op = Arranger(self.builder)
        self.values: dict[ir.Value, Value] = {}

    def translate(self) -> ImportedProgram:
        refuse(self._problems())
        inputs = []
        for place, name in self.input_names.items():
            shape, dtype = shape_and_dtype(self.program.arguments[place].type)
            inputs.append(relax.Var(name, relax.TensorType(list(shape), dtype)))
            self.values[self.program.arguments[place]] = in_place(inputs[-1])
        held: dict[tuple[int, int], Value] = {}
        with self.builder.function("main", inputs):
            with self.builder.dataflow():
                for place, step in enumerate(self.program.steps):
                    if not all(result in self.program.known for result in step.operation.results):
                        held.update({(place, which): value for which, value in enumerate(self._converted(step))})
                # What an output needs to lie in order belongs to the layer that makes it.
                outputs = [self._output(result) for result in self.program.results]
                self.builder.layer = "output"
                result = self.builder.emit_output(relax.Tuple(outputs))
            self.builder.emit_func_output(result)
        imported = self.builder.imported({key: value.expr for key, value in held.items()})
        arrangements = {key: value.arrangement for key, value in held.items()}
        return ImportedProgram(imported, arrangements)

    def _problems(self) -> Iterator[tuple[str, str]]:
        for step in self.program.steps:
            kind, operation = _kind(step.operation), step.operation
            shown = _shown(operation)
            if shown in REFUSED:
                yield f"{shown} ({REFUSED[shown]})", step.layer
            elif kind not in CONVERTERS and not all(result in self.program.known for result in operation.results):
                yield shown, step.layer
            else:
                for value in (*operation.operands, *operation.results):
                    try:
                        shape_and_dtype(value.type)
                    except ModelImportError as error:
                        yield f"{shown} ({error})", step.layer
                        break

    def _value(self, value: ir.Value) -> Value:
        if value not in self.values:
            self.values[value] = of_array(self.program.known[value])
        return self.values[value]

    def _converted(self, step: Step) -> Sequence[Value]:
        operation = step.operation
        self.builder.layer = step.layer
        shown = f"operation {_shown(operation)} of layer {step.layer!r}"
        operands = tuple(operation.operands)
        with named(shown):
            known = tuple(self.program.known.get(operand) for operand in operands)
            call = Call(operation, tuple(self._value(operand) for operand in operands), known)
            found = CONVERTERS[_kind(operation)](self.op, call)
        results = [found] if isinstance(found, Value) else found
        for place, (value, result) in enumerate(zip(results, operation.results, strict=True)):
            shape, dtype = result_kind(operation, place)
            lying = [value.shape[axis] for axis in value.order]
            sizes = [size if mine != 1 else 1 for size, mine in zip(lying, shape_of(value.expr), strict=True)]
            check_type(value.expr.ty, str(dtype), sizes, shown, "StableHLO")
            if value.shape != shape:
                raise ModelImportError(f"{shown} gives {list(shape)} in StableHLO, imported it gives {value.shape}")
            self.values[result] = value
        return results

    def _output(self, result: ir.Value) -> relax.Expr:
        value = self._value(result)
        self.builder.layer = self.builder.layers.get(getattr(value.expr, "name", ""), self.builder.layer)
        return self.op.full(value)


def _kind(operation: Any) -> str:
    """The operation's name; of a composite operation the name of what it is composed to be."""
    if operation.name in ("stablehlo.composite", "stablehlo.custom_call"):
        return _called(operation)
    return str(operation.name)


def _called(operation: Any) -> str:
    attributes = operation.attributes
    return str(ir.StringAttr(attributes["name" if "name" in attributes else "call_target_name"]).value)


def _shown(operation: Any) -> str:
    return _kind(operation).removeprefix("stablehlo.").removeprefix("chlo.")

"""Verify compiled stages before deployment: compare their outputs with the source framework on the same inputs."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import tvm
from tvm import relax

from relay_passes.ir import (
    bindings_of,
    emit_operations,
    main_function,
    new_function,
    operator_name,
    returned_fields,
    used_variables,
)
from relay_passes.partition import Computation
from rpc_runtime.execution.in_process import InProcessRunner
from rpc_runtime.execution.loaded_stage import first_line
from rpc_runtime.program.program import Program
from rpc_runtime.scratch import ScratchFolder
from tvm_split.compiler.bundle import Bundle, Verified
from tvm_split.compiler.stage import StageCompiler
from tvm_split.compiler.targets import host_target, runs_here
from tvm_split.errors import CompileWarning, VerificationError
from tvm_split.model import Model, Reference
from tvm_split.planner.plan import Plan
from tvm_split.planner.problem import Precision

TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""The largest difference allowed, as a share of the largest magnitude of the reference.

They allow another order of summation through a deep network: hundreds of layers of float32 (24 bits) lose
about 1e-6 a layer at worst, float16 (11 bits) and bfloat16 (8 bits) correspondingly more.
"""


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference of two arrays, its limit, and the largest magnitude of the reference."""

    largest: float
    allowed: float
    magnitude: float = 0.0

    @property
    def share(self) -> float:
        """The difference as a share of the magnitude."""
        return self.largest / self.magnitude if self.magnitude else self.largest

    @property
    def is_within(self) -> bool:
        return self.largest <= self.allowed


def difference(
    actual: np.ndarray, expected: np.ndarray, tolerance: float | None = None, precision: Precision = "float32"
) -> Difference:
    """Compare floating-point arrays with a tolerance relative to the largest finite reference value, others exactly.

    ``tolerance`` replaces the dtype's. A coarser ``precision`` of the computation raises the tolerance to its own.
    Arrays of different shapes or dtypes have an infinite difference.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Difference(float("inf"), 0.0)
    if tolerance is None:
        tolerance = TOLERANCES.get(str(expected.dtype), 0.0)
    if tolerance and precision != "float32":
        tolerance = max(tolerance, TOLERANCES[precision])
    actual_values, expected_values = actual.astype(np.float64), expected.astype(np.float64)
    equal = (actual_values == expected_values) | (np.isnan(actual_values) & np.isnan(expected_values))
    if equal.all():
        return Difference(0.0, 0.0)
    gap = np.abs(actual_values[~equal] - expected_values[~equal])
    largest = float("inf") if np.isnan(gap).any() else float(gap.max())
    finite = expected_values[np.isfinite(expected_values)]
    magnitude = float(np.abs(finite).max(initial=0.0))
    return Difference(largest, tolerance * magnitude, magnitude)


def verify_bundle(
    model: Model, plan: Plan, bundle: Bundle, computations: Callable[[], Sequence[Computation]]
) -> tuple[Verified, float | None]:
    """Run the compiled stages in this process and compare their outputs with the source framework.

    Stages for targets that this host cannot run (a GPU, another CPU) are compiled again for this host, from their
    ``computations``, so that at least the import and the passes are checked. Returns how the stages were compared, and
    the largest difference as a share of the largest magnitude of its output (None if nothing was compared). NaN equals
    NaN; a `CompileWarning` counts them for each output. Indices that choose elements of equal value pass with one too.

    Raises:
        VerificationError: an output differs by more than its tolerance; names it, the difference and the first layer
            with other values.
    """
    if model.reference is None or (compared := _compared(model, model.reference)) is None:
        return Verified.NO, None
    error = 0.0
    inputs, expected = compared
    tolerances = _tolerances(model)
    names = [getattr(output, "name", "") for output in returned_fields(main_function(model.module))]
    for program in one_by_one(bundle.program):
        with ScratchFolder("verify") as folder:
            runnable = _runnable_here(plan, replace(bundle, program=program), computations, folder.path)
            with InProcessRunner(runnable.program, runnable.blob_path) as pipeline:
                actual = pipeline.run(inputs)
        for tensor, name, value, reference in zip(model.outputs, names, actual, expected, strict=True):
            gap = difference(value, reference, tolerances.get(name), plan.precision)
            if gap.is_within:
                error = max(error, gap.share)
            elif _is_tie(model, partial(_imported_values, model, inputs), name, value, reference, plan.precision):
                text = f"output {tensor.name!r} has other indices than the source; they choose elements that are equal"
                warnings.warn(CompileWarning(f"{text} within the tolerance"), stacklevel=2)
            else:
                raise VerificationError(
                    f"the compiled model{_which_replicas(bundle.program, program)} and {model.framework} disagree on "
                    f"output {tensor.name!r} by {gap.largest:.3g} (allowed for {tensor.dtype}: {gap.allowed:.3g}). "
                    + _where_values_differ(model, model.reference, inputs, plan.precision)
                )
    for tensor, reference in zip(model.outputs, expected, strict=True):
        count = np.count_nonzero(np.isnan(reference.astype(np.float64)))
        if count:
            both = f"{count} of {reference.size} values of output {tensor.name!r} are NaN, compiled and in the source"
            warnings.warn(
                CompileWarning(f"{both}: NaN agrees with NaN, so this verifies nothing; check weights and inputs"),
                stacklevel=2,
            )
    foreign = any(not runs_here(plan.machine(stage.machine).target) for stage in bundle.program.stages)
    return (Verified.COMPILED_AGAIN if foreign else Verified.AS_COMPILED), error


def one_by_one(program: Program) -> tuple[Program, ...]:
    """Return the fewest programs without replicas that together contain each library of each stage.

    Replicas for one target share a library, so one program is usually enough.
    """
    libraries = [
        tuple({replica.library.sha256: replica for replica in replicas}.values())
        for replicas in program.replicas.values()
    ]
    return tuple(
        replace(
            program,
            stages=tuple(replace(stages[min(turn, len(stages) - 1)], replica=0, turns=(0,)) for stages in libraries),
        )
        for turn in range(max(map(len, libraries)))
    )


def _which_replicas(whole: Program, part: Program) -> str:
    """A text that names the replicas in a part of a program; empty if no stage has several."""
    chosen = [f"{stage.name} of {stage.machine}" for stage in part.stages if len(whole.replicas[stage.name]) > 1]
    return f" (with {', '.join(chosen)})" if chosen else ""


def verification_inputs(model: Model, *, makes_integers: bool = False) -> tuple[np.ndarray, ...] | None:
    """Return the example inputs, else normal floats from a fixed seed; None if an input is of another kind.

    With ``makes_integers``, such inputs are zeros and ones, which are valid in nearly every table and mask. Each row of
    them starts with 1, since a mask of zeros alone would select nothing.
    """
    if model.example_inputs is not None:
        return model.example_inputs
    generator = np.random.default_rng(0)
    inputs = []
    for tensor in model.inputs:
        if tensor.dtype in TOLERANCES:
            inputs.append(generator.standard_normal(tensor.shape).astype(np.dtype(tensor.dtype)))
        elif makes_integers:
            values = np.asarray(generator.integers(0, 2, tensor.shape))
            if values.ndim:
                values[..., :1] = 1
            inputs.append(values.astype(np.dtype(tensor.dtype)))
        else:
            return None
    return tuple(inputs)


def _compared(model: Model, reference: Reference) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]] | None:
    """Return inputs for the comparison and the source's outputs for them; None if it rejects generated integers."""
    inputs = verification_inputs(model, makes_integers=True)
    assert inputs is not None  # noqa: S101  (for mypy)
    try:
        return inputs, reference.outputs(inputs)
    except Exception as error:  # each framework raises its own
        if verification_inputs(model) is not None:
            raise
        text = f"the source rejects integer inputs of zeros and ones ({first_line(error)}), so nothing is compared"
        warnings.warn(CompileWarning(f"{text}; give example_inputs"), stacklevel=3)
        return None


def _runnable_here(
    plan: Plan, bundle: Bundle, computations: Callable[[], Sequence[Computation]], folder: Path
) -> Bundle:
    if all(runs_here(plan.machine(stage.machine).target) for stage in bundle.program.stages):
        return bundle
    stages = []
    for stage, part in zip(bundle.program.stages, computations(), strict=True):
        machine = plan.machine(stage.machine)
        if not runs_here(machine.target):
            compiler, library = StageCompiler(host_target(machine.threads)), folder / f"{stage.name}.so"
            built = compiler.build(compiler.lower(part.function)["schedule"], library, stage.name)
            weights = tuple(bundle.blobs.add_weight(f"{stage.name}.{i}", weight) for i, weight in enumerate(built))
            stage = replace(stage, device="cpu", library=bundle.blobs.add_file(library), weights=weights)
        stages.append(stage)
    return replace(bundle, program=replace(bundle.program, stages=tuple(stages)))


def _where_values_differ(model: Model, reference: Reference, inputs: Sequence[np.ndarray], precision: Precision) -> str:
    """A sentence about the first layer whose imported operations give other values than the source."""
    part = first_differing_layer(model, reference, inputs, precision)
    if part is None:
        return (
            "Each imported layer by itself agrees with the source, so the fault is in an optimisation or a schedule: "
            "compile with dump_folder= and report the stage"
        )
    layer, operator, gap, is_tie = part
    if is_tie:
        return (
            f"The first layer whose values differ is {layer!r} ({operator}): its indices choose other elements, which "
            "have equal values within the tolerance, and later layers follow them. Give example_inputs without such "
            "ties, or compile with verify=False"
        )
    why = "The importer translates it wrongly for these inputs"
    if precision != "float32":
        why = f"That may be what {precision} cannot hold or keeps too little of: try another precision"
    return (
        f"The first layer whose values differ is {layer!r} ({operator}): by {gap.largest:.3g}, allowed "
        f"{gap.allowed:.3g}. {why}"
    )


class DifferingLayer(NamedTuple):
    """A layer whose values differ from the source's; ``is_tie`` if its indices choose elements of equal value."""

    name: str
    operator: str
    gap: Difference
    is_tie: bool


def first_differing_layer(
    model: Model, reference: Reference, inputs: Sequence[np.ndarray], precision: Precision = "float32"
) -> DifferingLayer | None:
    """Find the first layer whose unoptimised values differ from the source's."""
    values, operations, tolerances = _imported_values(model, inputs), _operations(model), _tolerances(model)
    for name, expected in reference.values(inputs):
        if name in operations and name in values:
            gap = difference(values[name], expected, tolerances.get(name), precision)
            if not gap.is_within:
                operator = operator_name(operations[name]).removeprefix("relax.") or "value"
                is_tie = _is_tie(model, lambda: values, name, values[name], expected, precision)
                return DifferingLayer(model.layers[name], operator, gap, is_tie)
    return None


def _imported_values(model: Model, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the inputs and all tensors of the imported operations before any optimisation, by variable."""
    names, module = _every_value_returned(model)
    machine = relax.VirtualMachine(relax.build(module, tvm.target.Target({"kind": "llvm"})), tvm.cpu())
    values = machine["main"](*[tvm.runtime.tensor(array) for array in inputs])
    parameters = [parameter.name for parameter in main_function(model.module).params]
    return {
        **dict(zip(parameters, inputs, strict=True)),
        **{name: value.numpy() for name, value in zip(names, values, strict=True)},
    }


def _operations(model: Model) -> dict[str, relax.Expr]:
    return {binding.var.name: binding.value for binding in bindings_of(main_function(model.module))}


_CHOOSING = frozenset(f"relax.{name}" for name in ("argmax", "argmin", "argsort"))
_VIEWS = frozenset(f"relax.{name}" for name in ("astype", "reshape", "squeeze", "strided_slice"))


def _is_tie(
    model: Model,
    imported_values: Callable[[], Mapping[str, np.ndarray]],
    name: str,
    actual: np.ndarray,
    expected: np.ndarray,
    precision: Precision,
) -> bool:
    """Whether a variable holds indices, and both arrays of them choose elements that are equal within the tolerance.

    Rounding decides between such elements, so another order of summation may choose another one. ``imported_values``
    builds the whole model, and is called for indices only.
    """
    operations = _operations(model)
    while operator_name(operations.get(name)) in _VIEWS:
        name = getattr(operations[name].args[0], "name", "")
    if operator_name(operations.get(name)) not in _CHOOSING:
        return False
    call = operations[name]
    data, axis = imported_values().get(getattr(call.args[0], "name", "")), call.attrs.axis
    if data is None or axis is None:
        return False

    def chosen(indices: np.ndarray) -> np.ndarray:
        return np.take_along_axis(
            data, indices if indices.ndim == data.ndim else np.expand_dims(indices, int(axis)), int(axis)
        )

    try:
        elements, expected_elements = chosen(actual), chosen(expected)
    except (IndexError, ValueError):  # no indices of these elements
        return False
    gap = difference(elements, expected_elements, _tolerances(model).get(call.args[0].name), precision)
    return gap.is_within and not np.isnan(expected_elements.astype(np.float64)).any()


def _tolerances(model: Model) -> dict[str, float]:
    """The tolerance of each variable; the model's own tolerance, if it has one, applies to all."""
    tolerances = tolerances_of(main_function(model.module))
    return tolerances if model.tolerance is None else dict.fromkeys(model.layers, model.tolerance)


def _every_value_returned(model: Model) -> tuple[list[str], tvm.IRModule]:
    """Return the names of all tensors that the imported function binds, and a module that returns these tensors."""
    function = main_function(model.module)
    values: dict[str, relax.Expr] = {}

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        emit_operations(builder, bindings_of(function), values)
        return [value for value in values.values() if isinstance(value.ty, relax.TensorType)]

    rewritten = new_function("main", function.params, emit)
    tensors = [name for name, value in values.items() if isinstance(value.ty, relax.TensorType)]
    return tensors, tvm.IRModule({"main": rewritten})


def tolerances_of(function: relax.Function) -> dict[str, float]:
    """Return the tolerance of every floating-point tensor that ``function`` binds, by the name of its variable.

    The coarsest dtype in a value's computation counts: networks of mixed precision convert half precision to float32,
    but the lost bits do not come back. The dtypes of inputs and weights do not count: both sides have the same values.
    """
    rounding: dict[str, float] = {}
    tolerances: dict[str, float] = {}
    for binding in bindings_of(function):
        tolerance = TOLERANCES.get(str(getattr(binding.var.ty, "dtype", "")), 0.0)
        before = (rounding.get(used.name, 0.0) for used in used_variables(binding.value))
        rounding[binding.var.name] = max(tolerance, *before, 0.0)
        if tolerance:
            tolerances[binding.var.name] = rounding[binding.var.name]
    return tolerances

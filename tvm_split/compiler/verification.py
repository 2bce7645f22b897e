"""Verify compiled stages before deployment: compare their outputs with the source framework on the same inputs."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

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
)
from rpc_runtime.execution.in_process import InProcessRunner
from rpc_runtime.execution.loaded_stage import first_line
from rpc_runtime.program.program import Program
from rpc_runtime.scratch import ScratchFolder
from schedules.arithmetic import DIVISIONS, legalize_arithmetic
from tvm_split.compiler.build_cache import keep, recall
from tvm_split.compiler.bundle import Bundle, Verified
from tvm_split.compiler.difference import TOLERANCES, Difference, difference, tolerances_of
from tvm_split.compiler.model_rows import checked_rows
from tvm_split.compiler.partition import Partition
from tvm_split.compiler.rounding import TIMES_THE_SOURCE, by_regions, has_error_of_source, rounded
from tvm_split.compiler.stage import StageCompiler
from tvm_split.compiler.targets import host_target, runs_here, target_text
from tvm_split.compiler.unusual import Compared, how_unusual_differs, key_of_unusual, unusual_values
from tvm_split.errors import CompileWarning, VerificationError
from tvm_split.model import Model, Reference
from tvm_split.placement.plan import Plan
from tvm_split.placement.problem import Precision


def verify_bundle(model: Model, plan: Plan, bundle: Bundle, whole: Callable[[], Partition]) -> Bundle:
    """Run the compiled stages in this process and compare their outputs with the source framework.

    Stages for targets that this host cannot run (a GPU, another CPU) are compiled again for this host, from their
    partition ``whole``. So at least the import and the passes are checked. Returns the bundle with what was found:
    ``verified``, ``output_error`` and ``rows``. NaN equals NaN; a `CompileWarning` gives the number of NaN in each
    output. Differences that rounding alone explains also cause only a `CompileWarning`.

    Raises:
        VerificationError: an output differs by more than its tolerance; names it, the difference and the first layer
            with other values.
    """
    if model.reference is None or (compared := _compared(model, model.reference)) is None:
        return replace(bundle, verified=Verified.NO, output_error=None)
    error = 0.0
    inputs, expected = compared
    tolerances, names = _tolerances(model), _output_names(model.module)
    comparison = _Comparison(model, model.reference, inputs, plan.precision, plan, whole)
    key = key_of_unusual(model, plan, (*inputs, *expected), bundle.program)
    kept: list[str] | None = recall(key)
    unusual = (
        unusual_values(model, plan, inputs, tolerances) if kept is None else None
    )  # None also if what they show is known
    texts = kept or []
    for program in one_by_one(bundle.program):
        with ScratchFolder("verify") as folder:
            runnable = _runnable_here(plan, replace(bundle, program=program), whole, folder.path)
            with InProcessRunner(runnable.program, runnable.blob_path) as pipeline:
                actual = pipeline.run(inputs)
                probed = pipeline.run(unusual[0]) if unusual is not None else ()
        for place, (tensor, value, reference) in enumerate(zip(model.outputs, actual, expected, strict=True)):
            gap = difference(value, reference, tolerances.get(names[place]), plan.precision)
            if gap.is_within:
                error = max(error, gap.share)
            elif why := comparison.why_right(place, value, reference):
                text = f"output {tensor.name!r} differs from the source by {gap.largest:.3g}: {why}"
                warnings.warn(CompileWarning(text), stacklevel=2)
            else:
                raise VerificationError(
                    f"the compiled model{_which_replicas(bundle.program, program)} and {model.framework} disagree on "
                    f"output {tensor.name!r} by {gap.largest:.3g} (allowed for {tensor.dtype}: {gap.allowed:.3g}). "
                    + comparison.where_values_differ()
                )
        if unusual is not None:
            texts += how_unusual_differs(model, unusual, probed)
    if unusual is not None:
        keep(key, texts)
    for text in texts:
        warnings.warn(CompileWarning(text), stacklevel=2)
    for tensor, reference in zip(model.outputs, expected, strict=True):
        count = np.count_nonzero(np.isnan(reference.astype(np.float64)))
        if count:
            both = f"{count} of {reference.size} values of output {tensor.name!r} are NaN, compiled and in the source"
            warnings.warn(
                CompileWarning(f"{both}: NaN agrees with NaN, so this verifies nothing; check weights and inputs"),
                stacklevel=2,
            )
    foreign = any(not runs_here(plan.machine(stage.machine).target) for stage in bundle.program.stages)
    verified = Verified.COMPILED_AGAIN if foreign else Verified.AS_COMPILED

    def is_equal(place: int, value: np.ndarray, other: np.ndarray) -> bool:
        return difference(value, other, tolerances.get(names[place]), plan.precision).is_within

    rows = checked_rows(bundle.rows, model.reference, inputs, expected, is_equal)
    return replace(bundle, verified=verified, output_error=error, rows=rows)


def _output_names(module: tvm.IRModule) -> list[str]:
    return [getattr(output, "name", "") for output in returned_fields(main_function(module))]


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
            stages=tuple(
                replace(stages[min(number, len(stages) - 1)], replica=0, replica_schedule=(0,)) for stages in libraries
            ),
        )
        for number in range(max(map(len, libraries)))
    )


def _which_replicas(whole: Program, part: Program) -> str:
    """A text that names the replicas in a part of a program; empty if no stage has several."""
    chosen = [f"{stage.name} of {stage.machine}" for stage in part.stages if len(whole.replicas[stage.name]) > 1]
    return f" (with {', '.join(chosen)})" if chosen else ""


def verification_inputs(model: Model, *, makes_integers: bool = False) -> tuple[np.ndarray, ...] | None:
    """Return the example inputs, else normal floats from a fixed seed; None if there is an input of another dtype.

    With ``makes_integers``, inputs of other dtypes are zeros and ones, which are valid in nearly every table and mask.
    Each row of them starts with 1, since a mask of zeros alone would select nothing.
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


def _compared(model: Model, reference: Reference) -> Compared | None:
    """Return inputs and the source's outputs for them; None if the source rejects generated integers."""
    inputs = verification_inputs(model, makes_integers=True)
    assert inputs is not None  # noqa: S101  (for mypy)
    if model.example_inputs is None and any(tensor.dtype in ("int8", "uint8") for tensor in model.inputs):
        wide = tuple(map(_over_the_range, inputs))
        with suppress(Exception):  # they may be indices
            return wide, reference.outputs(wide)
    try:
        return inputs, reference.outputs(inputs)
    except Exception as error:  # each framework raises its own
        if verification_inputs(model) is not None:
            raise
        text = f"the source rejects integer inputs of zeros and ones ({first_line(error)}), so nothing is compared"
        warnings.warn(CompileWarning(f"{text}; give example_inputs"), stacklevel=3)
        return None


def _over_the_range(array: np.ndarray) -> np.ndarray:
    """Return an array with all values of its 8-bit dtype, the extremes first; arrays of other dtypes unchanged."""
    if array.dtype not in (np.int8, np.uint8):
        return array
    numbers = np.random.default_rng(0).permutation(np.arange(256).astype(array.dtype))
    kinds = np.iinfo(array.dtype)
    return np.resize(np.array([kinds.min, kinds.max, *numbers], array.dtype), array.shape)


def _runnable_here(plan: Plan, bundle: Bundle, whole: Callable[[], Partition], folder: Path) -> Bundle:
    if all(runs_here(plan.machine(stage.machine).target) for stage in bundle.program.stages):
        return bundle
    stages = []
    for stage, part in zip(bundle.program.stages, whole().computations, strict=True):
        machine = plan.machine(stage.machine)
        if not runs_here(machine.target):
            compiler, library = StageCompiler(host_target(machine.threads)), folder / f"{stage.name}.so"
            built = compiler.build(compiler.lower(part.function)["name"], library, stage.name)
            weights = tuple(bundle.blobs.add_weight(f"{stage.name}.{i}", weight) for i, weight in enumerate(built))
            stage = replace(stage, device="cpu", library=bundle.blobs.add_file(library), weights=weights)
        stages.append(stage)
    return replace(bundle, program=replace(bundle.program, stages=tuple(stages)))


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
    return _Imported(model, reference, inputs, precision).first_differing_layer()


_CHOOSING = frozenset(f"relax.{name}" for name in ("argmax", "argmin", "argsort"))
_VIEWS = frozenset(f"relax.{name}" for name in ("astype", "reshape", "squeeze", "strided_slice"))


@dataclass(frozen=True)
class _Imported:
    """A model's imported operations before any optimisation, to be compared with the values of its source."""

    model: Model
    reference: Reference
    inputs: Sequence[np.ndarray]
    precision: Precision

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """The inputs and all tensors that the operations compute, by variable. The whole model is built for it."""
        function = main_function(self.model.module)
        values: dict[str, relax.Expr] = {}

        def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
            emit_operations(builder, bindings_of(function), values)
            return [value for value in values.values() if isinstance(value.ty, relax.TensorType)]

        module = tvm.IRModule({"main": new_function("main", function.params, emit)})
        # The processor stops at a division by 0, which the source may have guarded.
        module = relax.transform.LegalizeOps(dict.fromkeys(DIVISIONS, legalize_arithmetic))(module)
        machine = relax.VirtualMachine(relax.build(module, tvm.target.Target({"kind": "llvm"})), tvm.cpu())
        results = machine["main"](*[tvm.runtime.tensor(array) for array in self.inputs])
        tensors = [name for name, value in values.items() if isinstance(value.ty, relax.TensorType)]
        arrays = dict(zip([parameter.name for parameter in function.params], self.inputs, strict=True))
        return arrays | {name: result.numpy() for name, result in zip(tensors, results, strict=True)}

    @cached_property
    def operations(self) -> dict[str, relax.Expr]:
        return {binding.var.name: binding.value for binding in bindings_of(main_function(self.model.module))}

    @cached_property
    def tolerances(self) -> dict[str, float]:
        return _tolerances(self.model)

    def first_differing_layer(self) -> DifferingLayer | None:
        for name, expected in self.reference.values(self.inputs):
            if name in self.operations and name in self.values:
                gap = difference(self.values[name], expected, self.tolerances.get(name), self.precision)
                if not gap.is_within:
                    operator = operator_name(self.operations[name]).removeprefix("relax.") or "value"
                    is_tie = self.is_tie(name, self.values[name], expected)
                    return DifferingLayer(self.model.layers[name], operator, gap, is_tie)
        return None

    def is_tie(self, name: str, actual: np.ndarray, expected: np.ndarray) -> bool:
        """Whether a variable holds indices, and both arrays of them choose elements that are equal within tolerance.

        Rounding decides between such elements, so another order of summation may choose another one.
        """
        while operator_name(self.operations.get(name)) in _VIEWS:
            name = getattr(self.operations[name].args[0], "name", "")
        if operator_name(self.operations.get(name)) not in _CHOOSING:
            return False
        call = self.operations[name]
        source, axis = getattr(call.args[0], "name", ""), call.attrs.axis
        data = self.values.get(source)
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
        gap = difference(elements, expected_elements, self.tolerances.get(source), self.precision)
        return gap.is_within and not np.isnan(expected_elements.astype(np.float64)).any()

    def where_values_differ(self) -> str:
        """A sentence about the first layer whose imported operations give other values than the source."""
        part = self.first_differing_layer()
        if part is None:
            return (
                "Each imported layer by itself agrees with the source, so the fault is in an optimisation or a "
                "schedule: compile with dump_folder= and report the stage"
            )
        start = f"The first layer whose values differ is {part.name!r} ({part.operator}): "
        if part.is_tie:
            return (
                f"{start}its indices choose other elements, which have equal values within the tolerance, and later "
                "layers follow them. Give example_inputs without such ties, or compile with verify=False"
            )
        why = "The importer translates it wrongly for these inputs"
        if self.precision != "float32":
            why = f"That may be what {self.precision} cannot hold or keeps too little of: try another precision"
        return f"{start}by {part.gap.largest:.3g}, allowed {part.gap.allowed:.3g}. {why}"


_ROUNDED_OTHERWISE = "values on ties are rounded the other way; each rounding by itself is at most one step apart"


@dataclass(frozen=True)
class _Comparison(_Imported):
    """A model with inputs for which outputs differ from the source by more than the tolerance."""

    plan: Plan
    whole: Callable[[], Partition]

    def why_right(self, place: int, actual: np.ndarray, expected: np.ndarray) -> str:
        """The reason why rounding alone explains the difference of an output; empty if nothing shows that."""
        name = _output_names(self.model.module)[place]
        if self.is_tie(name, actual, expected):
            return "its indices choose other elements, which are equal within the tolerance"
        if self.precision != "float32":
            return ""
        if self.model.tolerance is not None:
            imported = difference(self.values[name], expected, self.model.tolerance)
            limit = TIMES_THE_SOURCE * max(imported.largest, imported.allowed)
            is_like_imported = difference(actual, expected).largest <= limit
            return _ROUNDED_OTHERWISE if is_like_imported and not self.wrong_region else ""
        if has_error_of_source(self.reference, place, self.inputs, actual, expected):
            return "the network is ill-conditioned, and the source's own float32 is as far from float64"
        return ""

    def where_values_differ(self) -> str:
        if self.model.tolerance is not None and self.precision == "float32":
            return self.wrong_region
        return super().where_values_differ()

    @cached_property
    def wrong_region(self) -> str:
        """A sentence about the first layer that differs when computed from the source's own integers; empty if none."""
        module = self.whole().model.module
        outputs, names = _output_names(module), {*rounded(module), *_output_names(module)}
        known = {name: value for name, value in self.reference.values(self.inputs) if name in names}
        known |= zip(outputs, self.reference.outputs(self.inputs), strict=True)
        known |= zip([tensor.name for tensor in self.model.inputs], self.inputs, strict=True)
        targets = {target_text(machine.target): machine.target for machine in self.plan.machines}
        for target in [target for target in targets.values() if runs_here(target)] or [host_target(1)]:
            for name, value in by_regions(module, target, known).items():
                steps = np.abs(value.astype(np.float64) - known[name]).max(initial=0.0)
                gap = difference(value, known[name], self.model.tolerance)
                if steps > 1 if name in rounded(module) else not gap.is_within:
                    layer = self.model.layers.get(name, name)
                    return (
                        f"The first layer with other values is {layer!r}: by {steps:.3g} from the source's own integers"
                    )
        return ""


def _tolerances(model: Model) -> dict[str, float]:
    """The tolerance of each variable; the model's own tolerance, if it has one, applies to all."""
    tolerances = tolerances_of(main_function(model.module))
    return tolerances if model.tolerance is None else dict.fromkeys(model.layers, model.tolerance)

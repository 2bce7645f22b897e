"""Compiles a model and a plan to a bundle."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tvm
from tvm import relax

from relay_passes.communication import annotated_module, machine_modules
from relay_passes.input_cuts import range_of
from relay_passes.ir import main_function
from relay_passes.partition import Computation, output_names
from relay_passes.pipeline import Observer, cut
from rpc_runtime.program.program import InputCut, Program, RouteCodec, StageSpec, TensorSpec
from rpc_runtime.scratch import ScratchFolder
from tvm_split.compiler.blobs import BlobFolder
from tvm_split.compiler.build import BuiltStage, build_stage
from tvm_split.compiler.bundle import Bundle, Verified, kernels_key
from tvm_split.compiler.cuda_code import CudaNeeds
from tvm_split.compiler.instruction_sets import target_text
from tvm_split.compiler.kernels import Kernel
from tvm_split.compiler.precision import in_precision
from tvm_split.compiler.sharding import placed_model
from tvm_split.compiler.transfer_layouts import in_common_layouts
from tvm_split.compiler.tuning_folder import open_database
from tvm_split.compiler.verification import verify_bundle
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.planner.plan import Plan
from tvm_split.planner.problem import Stage
from tvm_split.progress import says_progress
from tvm_split.steps import StepProgress


@dataclass(frozen=True)
class CutModel:
    """A model cut by a plan, before code generation.

    ``model`` and ``plan`` are those of the stages, after sharding: no stage is shared by machines. ``annotated`` is the
    whole graph, with a device on every value and ``R.to_vdevice`` at every transfer. ``machine_modules`` is the work of
    each machine, with receive and send. Both show ``computations``: the stages' pure functions that are compiled, with
    transferred tensors in the layouts in which both sides compute.
    """

    model: Model
    plan: Plan
    annotated: tvm.IRModule
    machine_modules: Mapping[str, tvm.IRModule]
    computations: tuple[Computation, ...]
    output_names: tuple[str, ...]
    cuts: tuple[InputCut, ...]


@says_progress("compiling")
def compile(
    model: Model,
    plan: Plan,
    *,
    verify: bool = True,
    dump_folder: str | Path | None = None,
    database: str | Path | None = None,
    on_progress: StepProgress | None = None,
) -> Bundle:
    """Compile every stage of a plan for its machine's target; a stage with replicas once for each target among them.

    With ``verify``, the compiled stages run in this process on the model's example inputs and are compared with the
    source framework, if both are available. ``dump_folder`` receives the IR after every phase. ``on_progress`` is
    called with the steps, which are shown on stderr by default.

    Kernels tuned for a machine's target come from ``database``, a folder of `tvm_split.tune`; by default the folder
    that `tvm_split.compiler.tuning_folder.default_folder` finds, if it exists.

    Raises:
        TuningError: the tuning database is damaged, or the given one does not exist.
        PlanError: the plan does not fit the model.
        CompileError: a stage cannot be compiled for its target.
        VerificationError: the compiled stages and the source disagree; names the first layer whose values differ.
    """
    if plan.model != model.name:
        raise PlanError(f"the plan is for model {plan.model!r}, the model is {model.name!r}")
    model = in_precision(model, plan.precision)
    dump = Path(dump_folder) if dump_folder is not None else None
    tuned = open_database(database)
    report = on_progress or (lambda what, done, steps: None)
    report("cutting the graph", 0, len(plan.stages) + 1 + verify)
    cut = cut_model(model, plan, dump)
    steps = len(cut.plan.stages) + 1 + verify
    blobs = BlobFolder.temporary()
    stages: list[StageSpec] = []
    kernels: dict[str, tuple[Kernel, ...]] = {}
    cuda: dict[str, CudaNeeds] = {}
    with ScratchFolder("build") as build_folder:
        for index, (stage, part) in enumerate(zip(cut.plan.stages, cut.computations, strict=True)):
            report(f"compiling {stage.name} for {', '.join(stage.machines)}", index + 1, steps)
            replicas: list[StageSpec] = []
            for machines in plan.machines_by_target(stage):
                target = plan.machine(machines[0]).target
                name = stage.name if stage.machine in machines else f"{stage.name}_on_{machines[0]}"
                name = quote(name, safe=" ")  # a file name; it holds the machine's name, which may be any text
                observe = _dump_to(dump, name) if dump is not None else None
                built = build_stage(part, target, build_folder.path / f"{name}.so", cut.model.layers, tuned, observe)
                spec = _stage_spec(index, stage, part, built, target, blobs)
                same = [replace(spec, machine=each, replica=stage.machines.index(each)) for each in machines]
                kernels.update({kernels_key(each): built.kernels for each in same})
                if built.cuda is not None:
                    cuda.update({kernels_key(each): built.cuda for each in same})
                replicas += same
            stages += sorted(replicas, key=lambda each: each.replica)
    made = {tensor.name: tensor for spec in stages for tensor in spec.outputs}
    made.update({tensor.name: tensor for tensor in model.inputs})
    results = tuple(made[name] for name in cut.output_names)
    program = _program(plan, Program(model.inputs, results, tuple(stages), cuts=cut.cuts))
    readable = {"annotated": cut.annotated, **cut.machine_modules}
    ir = {name: module.script(show_meta=False) for name, module in readable.items()}
    versions = {name: version(name) for name in ("apache-tvm", "apache-tvm-ffi")}
    outputs = tuple(tensor.name for tensor in model.outputs)
    bundle = Bundle(model.name, plan, program, ir, kernels, versions, outputs, Verified.NO, blobs, cuda)
    if verify:
        report("comparing with the source", steps - 1, steps)
        verified, output_error = verify_bundle(model, plan, bundle, cut.computations)
        bundle = replace(bundle, verified=verified, output_error=output_error)
    report("done", steps, steps)
    return bundle


def _program(plan: Plan, program: Program) -> Program:
    """Return the program with the plan's codecs; raises a `PlanError` that names a tensor whose codec does not fit."""
    codecs = tuple(RouteCodec(each.tensor, each.source, each.destination, each.codec) for each in plan.codecs)
    program = replace(program, codecs=codecs)
    try:
        program.handovers  # noqa: B018  (refuses codecs of routes that there are not)
    except ValueError as error:
        raise PlanError(f"the plan does not fit: {error}") from error
    return program


def cut_model(model: Model, plan: Plan, dump_folder: Path | None = None) -> CutModel:
    """Partition a model, validate the partition, choose common layouts and build the modules that show the split."""
    parted = placed_model(in_precision(model, plan.precision), plan)
    placement = parted.placement
    inputs = main_function(model.module).params
    names = output_names(main_function(parted.model.module))
    computations = in_common_layouts(cut(parted.model.module, placement), parted.plan, names)
    found = CutModel(
        model=parted.model,
        plan=parted.plan,
        annotated=annotated_module(inputs, parted.cuts, computations, names, placement),
        machine_modules=machine_modules(computations, names, placement),
        computations=computations,
        output_names=names,
        cuts=tuple(_input_cut(each) for each in parted.cuts),
    )
    if dump_folder is not None:
        _dump_to(dump_folder, "whole")("annotated", found.annotated)
    return found


def tensor_spec(name: str, tensor_type: Any) -> TensorSpec:
    """Return name, shape and dtype of a Relax tensor type with a static shape."""
    return TensorSpec(name, tuple(int(length) for length in tensor_type.shape.values), str(tensor_type.dtype))


def _input_cut(binding: relax.VarBinding) -> InputCut:
    found = range_of(binding)
    assert found is not None  # noqa: S101  (it was cut for being one)
    return InputCut(tensor_spec(binding.var.name, binding.var.ty), found.parameter, found.axis, found.begin)


def _stage_spec(
    index: int,
    stage: Stage,
    part: Computation,
    built: BuiltStage,
    target: Mapping[str, Any],
    blobs: BlobFolder,
) -> StageSpec:
    results = part.function.ret_ty.fields
    return StageSpec(
        index=index,
        name=stage.name,
        machine=stage.machine,
        layers=stage.layers,
        device="cuda" if target["kind"] == "cuda" else "cpu",
        library=blobs.add_file(built.library),
        weights=tuple(blobs.add_weight(f"{stage.name}.weight_{i}", each) for i, each in enumerate(built.weights)),
        inputs=tuple(tensor_spec(parameter.name, parameter.ty) for parameter in part.function.params),
        outputs=tuple(tensor_spec(name, each) for name, each in zip(part.sent, results, strict=True)),
        turns=stage.turns,
        target=target_text(target),
    )


def _dump_to(folder: Path, stage: str) -> Observer:
    """Return an observer that writes the IR after every phase into a folder named after the stage."""
    numbers = itertools.count(1)

    def write(phase: str, module: tvm.IRModule) -> None:
        target = folder / stage
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{next(numbers)}-{phase}.py").write_text(module.script(show_meta=False))

    return write

"""Compiles a model and a plan to a bundle."""

import functools
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import tvm

from relay_passes.one_at_a_time import ONE_AT_A_TIME
from rpc_runtime.program.program import Program, RouteCodec
from rpc_runtime.program.specs import StageSpec
from rpc_runtime.scratch import ScratchFolder
from schedules.tuning.database import TuningDatabase
from tvm_split.arguments import ModelLike, PlanLike, as_model, as_plan
from tvm_split.compiler.blob_folder import BlobFolder
from tvm_split.compiler.build_cache import keep, key_of, recall, tvm_versions
from tvm_split.compiler.bundle import Bundle, Verified, kernels_key
from tvm_split.compiler.cuda_code import CudaNeeds, needs_of
from tvm_split.compiler.model_rows import rows_of
from tvm_split.compiler.partition import Partition, tensor_spec
from tvm_split.compiler.precision import in_precision
from tvm_split.compiler.sharding import partition
from tvm_split.compiler.stage import Kernel, StageCompiler, kernels_of
from tvm_split.compiler.targets import target_text, tvm_target
from tvm_split.compiler.tuning_folder import open_database
from tvm_split.compiler.verification import verify_bundle
from tvm_split.errors import CompileWarning, OutputError, PlanError
from tvm_split.model import Model
from tvm_split.outputs import write_text
from tvm_split.placement.plan import Plan
from tvm_split.progress import StepProgress, says_progress
from tvm_split.values import content_of


@says_progress("compiling")
@ONE_AT_A_TIME
def compile(
    model: ModelLike,
    plan: PlanLike,
    *,
    verify: bool = True,
    dump_folder: str | Path | None = None,
    database: str | Path | None = None,
    on_progress: StepProgress | None = None,
) -> Bundle:
    """Compile every stage of a plan for its machine's target; a stage with replicas once for each target among them.

    Model and plan may also be the paths of their files; open sizes of the model are those for which the plan was made.
    The bundle's plan has the compiled model's inputs. If the plan is for another graph or other shapes, its stages are
    kept, and its prediction is dropped.

    With ``verify``, the compiled stages run in this process on the model's example inputs and are compared with the
    source framework, if both are available. ``dump_folder`` receives the IR after every phase. ``on_progress`` is
    called with the steps, which are shown on stderr by default. One model is compiled at a time; other threads wait.

    Kernels tuned for a machine's target come from ``database``, a folder of `tvm_split.tune`; by default the folder
    that `tvm_split.compiler.tuning_folder.default_folder` finds, if it exists.

    Raises:
        TuningError: the tuning database is damaged, or the named one does not exist.
        PlanError: the plan does not fit the model.
        CompileError: a stage cannot be compiled for its target.
        VerificationError: the compiled stages and the source disagree; names the first layer whose values differ.
    """
    plan = as_plan(plan)
    model = as_model(model, plan.inputs)
    if plan.prediction is not None and plan.graph_digest != model.graph_digest:
        message = "the plan is for another model, or inputs of other shapes: its stages are kept, its prediction is not"
        warnings.warn(CompileWarning(message), stacklevel=2)
        plan = replace(plan, prediction=None)
    plan = replace(plan, inputs=model.inputs, graph_digest=model.graph_digest)
    digest, model = model.digest, in_precision(model, plan.precision)
    for machine in plan.machines:
        tvm_target(machine.target)
    tuned = open_database(database)
    report = on_progress or (lambda what, done, steps: None)
    whole = functools.cache(lambda: partition(model, plan))
    key, blobs = _key(model, plan, tuned), BlobFolder.temporary()
    report("looking for what was compiled before", 0, len(plan.stages) + 1 + verify)
    content = recall(key, blobs) if dump_folder is None else None
    if content is not None:
        bundle = Bundle.from_content(content, plan, blobs)
    else:
        report("cutting the graph", 0, len(plan.stages) + 1 + verify)
        bundle = _compiled(
            whole(), plan, tuned, blobs, dump_folder, lambda what, done, steps: report(what, done, steps + verify)
        )
        keep(key, bundle.content(), {blob: blobs.path(blob.sha256) for blob in bundle.blob_specs})
    bundle = replace(bundle, model_digest=digest, rows=rows_of(model))
    steps = len(bundle.program.stages) + 1 + verify
    if verify:
        report("comparing with the source", steps - 1, steps)
        bundle = verify_bundle(model, plan, bundle, whole)
    report("done", steps, steps)
    return bundle


def _key(model: Model, plan: Plan, tuned: TuningDatabase | None) -> str:
    """Return the key of all that decides what is compiled; a plan's prediction, addresses and origin do not."""
    return key_of(
        [machine.target for machine in plan.machines],
        model=[model.name, model.digest],
        machines=[[machine.name, dict(machine.target), machine.threads] for machine in plan.machines],
        stages=content_of(plan)["stages"],
        codecs=[[codec.tensor, codec.source, codec.destination, codec.codec] for codec in plan.codecs],
        tuned=None if tuned is None else tuned.digest,
    )


def _compiled(
    whole: Partition,
    plan: Plan,
    tuned: TuningDatabase | None,
    blobs: BlobFolder,
    dump_folder: str | Path | None,
    report: StepProgress,
) -> Bundle:
    """Compile each stage of a partition once for each target among its machines; the bundle is not verified."""
    dump = Path(dump_folder) if dump_folder is not None else None
    annotated = whole.annotated()
    if dump is not None:
        _dump({"annotated": annotated}, dump / "whole")
    model, steps = whole.model, len(whole.parts) + 1
    stages: list[StageSpec] = []
    kernels: dict[str, tuple[Kernel, ...]] = {}
    cuda: dict[str, CudaNeeds] = {}
    with ScratchFolder("build") as build_folder:
        for index, (stage, part) in enumerate(whole.parts):
            report(f"compiling {stage.name} for {', '.join(stage.machines)}", index + 1, steps)
            replicas: list[StageSpec] = []
            for machines in plan.machines_by_target(stage):
                target = plan.machine(machines[0]).target
                name = stage.name if stage.machine in machines else f"{stage.name}_on_{machines[0]}"
                name = quote(name, safe=" ")  # a file name; it holds the machine's name, which may be any text
                compiler = StageCompiler(target, tuned)
                modules = compiler.lower(part.function)
                if dump is not None:
                    _dump(modules, dump / name)
                library = build_folder.path / f"{name}.so"
                weights = compiler.build(modules["name"], library, stage.name)
                spec = StageSpec(
                    index=index,
                    name=stage.name,
                    machine=stage.machine,
                    layers=stage.layers,
                    device="cuda" if target["kind"] == "cuda" else "cpu",
                    library=blobs.add_file(library),
                    weights=tuple(blobs.add_weight(f"{stage.name}.weight_{i}", w) for i, w in enumerate(weights)),
                    inputs=tuple(tensor_spec(parameter.name, parameter.ty) for parameter in part.function.params),
                    outputs=tuple(map(tensor_spec, part.sent, part.function.ret_ty.fields)),
                    replica_schedule=stage.replica_schedule,
                    target=target_text(target),
                )
                same = [replace(spec, machine=machine, replica=stage.machines.index(machine)) for machine in machines]
                of_stage, needs = kernels_of(modules, part.layers(whole.model.layers)), needs_of(target)
                kernels.update({kernels_key(replica): of_stage for replica in same})
                if needs is not None:
                    cuda.update({kernels_key(replica): needs for replica in same})
                replicas += same
            stages += sorted(replicas, key=lambda replica: replica.replica)
    tensors = {tensor.name: tensor for spec in stages for tensor in spec.outputs}
    tensors.update({tensor.name: tensor for tensor in model.inputs})
    results = tuple(tensors[name] for name in whole.outputs)
    output_names = tuple(tensor.name for tensor in model.outputs)
    program = Program(model.inputs, results, tuple(stages), input_slices=whole.input_slices, output_names=output_names)
    program = _with_codecs(program, plan)
    readable = {"annotated": annotated, **whole.machine_modules()}
    ir = {name: module.script(show_meta=False) for name, module in readable.items()}
    return Bundle(model.name, plan, program, ir, kernels, dict(tvm_versions()), Verified.NO, blobs, cuda)


def _with_codecs(program: Program, plan: Plan) -> Program:
    """Return the program with the plan's codecs; raises a `PlanError` that names a tensor whose codec does not fit."""
    codecs = tuple(RouteCodec(codec.tensor, codec.source, codec.destination, codec.codec) for codec in plan.codecs)
    program = replace(program, codecs=codecs)
    try:
        program.handovers  # noqa: B018  (refuses codecs of routes that there are not)
    except ValueError as error:
        raise PlanError(f"the plan does not fit: {error}") from error
    return program


def _dump(modules: Mapping[str, tvm.IRModule], folder: Path) -> None:
    """Write the IR after every phase into a folder of the stage."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror}") from error
    for number, (phase, module) in enumerate(modules.items(), 1):
        write_text(folder / f"{number}-{phase}.py", module.script(show_meta=False))

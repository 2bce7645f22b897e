"""``tvm-split compile``: a bundle with one library per stage."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tvm_split
from tvm_split.cli import options
from tvm_split.cli.machines import MachineOptions
from tvm_split.cli.options import HIDDEN, WrongUseError, flag_of
from tvm_split.cli.source import ModelOptions, planned
from tvm_split.display.console import STDOUT, new_table, print_json, print_note
from tvm_split.planner.request import PlanRequest
from tvm_split.units import bytes_text, short_list

if TYPE_CHECKING:
    from tvm_split.compiler.bundle import Bundle


def compile(
    model: options.ModelArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for the bundle.", show_default=False)],
    machines: MachineOptions,
    shapes: ModelOptions,
    request: Annotated[PlanRequest, HIDDEN],
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan that `tvm-split plan --output` wrote; no worker is asked for it.", dir_okay=False),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare the compiled stages with the source framework.")
    ] = False,
    dump: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the IR after every phase to this folder.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Plan a model, compile each stage for its machine, prove the result, and write it all to a folder."""
    if plan is not None:
        if machines != MachineOptions():
            raise WrongUseError("it says this already; leave the machines out", "--plan")
        _require_none(request)
    made = None if plan is None else tvm_split.Plan.load(plan)
    loaded = shapes.load(model, () if made is None else made.inputs)
    made = made or planned(loaded, machines.machines(), request)
    database = request.database or made.request.database
    bundle = tvm_split.compile(loaded, made, verify=not no_verify, dump_folder=dump, database=database)
    bundle.save(output)
    if json:
        print_json({"folder": str(output), **description(bundle)})
    else:
        print_bundle(bundle)
        elsewhere = any(machine.address is not None for machine in made.machines)
        where = f" {machines.words}" if elsewhere else ""
        if plan is not None and elsewhere:
            check = f"`tvm-split deploy {output}{where}`"
            print_note(f"no worker was asked whether it is what the plan says: {check} does that, and runs nothing")
        print_note(f"written to {output}; `tvm-split run {output}{where}` runs it")


def _require_none(request: PlanRequest) -> None:
    """Raise a `WrongUseError` for an option that a plan decides."""
    for name in request.given:
        if name != "database":
            raise WrongUseError("--plan says this already", flag_of(PlanRequest, name))


def description(bundle: Bundle) -> dict[str, Any]:
    """A bundle in numbers."""
    from tvm_split.compiler.bundle import kernels_key

    return {
        "model": bundle.model,
        "digest": bundle.digest,
        "verified": bundle.verified.value,
        "output_error": bundle.output_error,
        "precision": bundle.plan.precision,
        "stages": [
            {
                "name": stage.name,
                "machine": stage.machine,
                "target": dict(bundle.plan.machine(stage.machine).target),
                "layers": stage.layers,
                "library_bytes": stage.library.size_bytes,
                "weight_bytes": sum(weight.blob.size_bytes for weight in stage.weights),
                "cuda": dataclasses.asdict(needs) if (needs := bundle.cuda.get(kernels_key(stage))) else None,
                "kernels": sorted({kernel.function for kernel in bundle.kernels.get(kernels_key(stage), ())}),
            }
            for stage in bundle.program.stages
        ],
    }


def print_bundle(bundle: Bundle) -> None:
    """A table of what was compiled."""
    caption = "a kernel that is named after several operators is one fused kernel"
    rows = (
        (
            stage["name"],
            stage["machine"],
            "\n".join(stage["kernels"]),
            bytes_text(stage["library_bytes"]),
            bytes_text(stage["weight_bytes"]),
        )
        for stage in description(bundle)["stages"]
    )
    texts = ("stage", "machine", "kernels")
    STDOUT.print(new_table(f"{bundle.model}: compiled stages", texts, ("library", "weights"), rows, caption))
    found = (
        "" if bundle.output_error is None else f"; outputs differ by {bundle.output_error:.1e} of the largest at most"
    )
    print_note(f"compared with the source framework: {_verified_words(bundle)}{found}")
    sources = [name for name, needs in bundle.cuda.items() if needs.toolkit is None]
    if sources:
        print_note(
            f"no nvcc was found: the kernels of {short_list(sources)} are source, and their workers need an nvcc "
            "(pip install 'tvm-split[cuda]')"
        )


def _verified_words(bundle: Bundle) -> str:
    from tvm_split.compiler.bundle import Verified
    from tvm_split.compiler.targets import runs_here

    if bundle.verified is not Verified.COMPILED_AGAIN:
        return bundle.verified.value
    foreign = [
        f"{stage.name} of {stage.machine}"
        for stage in bundle.program.stages
        if not runs_here(bundle.plan.machine(stage.machine).target)
    ]
    return (
        f"{bundle.verified.value}; the code that {', '.join(foreign)} will execute cannot run here and has not been run"
    )

"""``tvm-split compile``: compile a model and write a bundle."""

from pathlib import Path
from typing import Annotated

import tvm_split
from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.cli.options import HIDDEN, WrongUseError, flags_named
from tvm_split.cli.source import MachineOptions, ModelOptions, planned
from tvm_split.display.console import print_json, print_note
from tvm_split.display.view import as_json, print_parts, view
from tvm_split.placement.request import PlanRequest


def compile(
    model: options.ModelArgument,
    *,
    output: Path = options.output(..., "The folder for the bundle.", flag="--output -o"),
    machines: MachineOptions,
    shapes: ModelOptions,
    request: Annotated[PlanRequest, HIDDEN],
    plan: Path | None = option(
        None, "A plan that `tvm-split plan --output` wrote; no worker is asked for it.", dir_okay=False
    ),
    no_verify: bool = option(False, "Do not compare the compiled stages with the source framework."),
    dump: Path | None = options.output(None, "Write the IR after every phase to this folder."),
    details: bool = option(False, "Also list the kernels of each stage."),
    json: bool = options.JSON,
) -> None:
    """Plan a model, compile each stage for its machine, verify the result, and write everything to a folder.

    Example: tvm-split compile net.onnx --plan plan.json --output bundle
    """
    tvm_split.Bundle.require_replaceable(output)
    if plan is not None:
        if machines != MachineOptions():
            raise WrongUseError("it says this already; leave the machines out", "--plan")
        with flags_named(PlanRequest):
            request.require_default("--plan says this already", [name for name in request.given if name != "database"])
        chosen_plan = tvm_split.Plan.load(plan)
        loaded = shapes.load(model, chosen_plan.inputs)
    else:
        asked = machines.asked(request)
        loaded = shapes.load(model)
        chosen_plan = planned(loaded, asked, request)
    database = request.database or chosen_plan.request.database
    bundle = tvm_split.compile(loaded, chosen_plan, verify=not no_verify, dump_folder=dump, database=database)
    bundle.save(output)
    if json:
        print_json({"folder": str(output), **as_json(bundle)})
    else:
        table, *notes = view(bundle, details=details)
        print_parts([table])
        for note in notes:
            print_note(str(note))
        elsewhere = any(machine.address is not None for machine in chosen_plan.machines)
        where = f" {machines.words}" if elsewhere else ""
        if plan is not None and elsewhere:
            check = f"`tvm-split deploy {output}{where}`"
            print_note(f"no worker was asked whether it is what the plan says: {check} does that, and runs nothing")
        print_note(f"written to {output}; `tvm-split run {output}{where}` runs it")

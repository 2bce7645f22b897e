"""The phases from a whole graph to stages that can be built: the table of contents of this package.

Relay left TVM; Relax is the IR here. The package keeps the name that its first user gave it.

    whole graph ──▶ partition ──▶ verify ──▶ one pure function per stage
    each stage  ──▶ simplify ──▶ layout ──▶ lower ──▶ group ──▶ fuse ──▶ schedule ──▶ lift weights ──▶ build

Between the phases a module is plain Relax that can be printed; `run_phases` shows each to an observer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from relay_passes.bound_indices import BoundIndices
from relay_passes.fold_affine import FoldAffine
from relay_passes.fold_constants import FoldConstants
from relay_passes.fold_padding import FoldPadding
from relay_passes.partition import Computation, Placement, partition
from relay_passes.remove_identities import RemoveIdentities
from relay_passes.unique_names import UniqueNames
from relay_passes.verify_partition import verify_partition

ModulePass = Any
"""A callable from module to module, such as TVM's pass objects, which have no type annotations."""
Observer = Callable[[str, tvm.IRModule], None]
"""Called with a phase's name and the module after it."""


@dataclass(frozen=True)
class Phase:
    """A named sequence of passes that brings a module into the next form."""

    name: str
    passes: tuple[ModulePass, ...]


@dataclass(frozen=True)
class Schedules:
    """Target-dependent passes and functions for the phases of a stage.

    ``layout_passes`` run before lowering and ``schedule`` after fusion. ``legalizations`` maps operator names
    (``relax.nn.conv2d``) to functions that lower them, in the form of ``relax.transform.LegalizeOps``.
    """

    layout_passes: tuple[ModulePass, ...]
    legalizations: Mapping[str, Callable[..., Any]]
    schedule: ModulePass


def cut(whole: tvm.IRModule, placement: Placement) -> tuple[Computation, ...]:
    """Return the stages of a whole graph, verified to compute the same outputs.

    Raises:
        SelfWaitError, ContractError: as `partition` and `verify_partition`.
    """
    stages = partition(whole, placement)
    verify_partition(whole, stages)
    return stages


def stage_phases(schedules: Schedules) -> tuple[Phase, ...]:
    """Return the phases from one stage's pure function, as ``main`` of a module, to scheduled kernels.

    Weights are still constants in the result.
    """
    transform = relax.transform
    return (
        Phase(
            "simplify",
            (
                RemoveIdentities(),
                BoundIndices(),
                transform.DecomposeOpsForInference(),
                transform.CanonicalizeBindings(),
                transform.EliminateCommonSubexpr(),
                UniqueNames(),
                FoldConstants(),
                transform.FoldConstant(),
                UniqueNames(),
                FoldAffine(),
                FoldPadding(),
                transform.DeadCodeElimination(["main"]),
            ),
        ),
        Phase("layout", (*schedules.layout_passes, transform.FoldConstant())),
        Phase(
            "lower",
            (
                transform.LegalizeOps(dict(schedules.legalizations)),
                transform.AnnotateTIROpPattern(),
                # Layout changes of weights are plain kernels now; folding them prepacks the weights.
                transform.FoldConstant(),
                UniqueNames(),
            ),
        ),
        # The unique names map each kernel to the layers it came from (`relay_passes.kernel_sources`).
        Phase("group", (transform.FuseOps(), UniqueNames())),
        Phase("fuse", (transform.FuseTIR(), transform.DeadCodeElimination(["main"]))),
        Phase("schedule", (schedules.schedule,)),
    )


def up_to_layouts(schedules: Schedules) -> tuple[Phase, ...]:
    """Return the first phases of a stage, up to the one that chooses its tensors' layouts."""
    phases = stage_phases(schedules)
    return phases[: [phase.name for phase in phases].index("layout") + 1]


def run_phases(module: tvm.IRModule, phases: Sequence[Phase], observe: Observer | None = None) -> tvm.IRModule:
    """Run phases in order and return the module; ``observe`` gets the module after each phase."""
    for phase in phases:
        for each in phase.passes:
            module = each(module)
        if observe is not None:
            observe(phase.name, module)
    return module

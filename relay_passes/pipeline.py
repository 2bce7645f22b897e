"""The phases from a whole graph to stages that can be built: the table of contents of this package.

The IR is Relax. The package is named after Relay, which TVM no longer has.

    whole graph ──▶ partition ──▶ verify ──▶ one pure function per stage
    each stage  ──▶ simplify ──▶ layout ──▶ lower ──▶ group ──▶ fuse ──▶ schedule ──▶ name ──▶ lift weights ──▶ build

Between the phases a module is plain Relax that can be printed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tvm import relax

from relay_passes.bound_indices import bound_indices
from relay_passes.content_names import content_names
from relay_passes.fold_affine import fold_affine
from relay_passes.fold_constants import fold_constants, fold_remaining
from relay_passes.fold_padding import fold_padding
from relay_passes.remove_identities import remove_identities
from relay_passes.unique_names import unique_names

ModulePass = Any
"""A callable from module to module, such as TVM's pass objects, which have no type annotations."""


def stage_phases(
    layout_passes: Iterable[ModulePass], legalizations: Mapping[str, Callable[..., Any]], schedule: ModulePass
) -> dict[str, tuple[ModulePass, ...]]:
    """Return the passes of each phase, from one stage's pure function, as ``main`` of a module, to scheduled kernels.

    The arguments depend on the target: ``layout_passes`` run before lowering, and ``schedule`` after fusion.
    ``legalizations`` maps operator names (``relax.nn.conv2d``) to functions that lower them, in the form of
    ``relax.transform.LegalizeOps``. Weights are still constants in the result.
    """
    transform = relax.transform
    return {
        "simplify": (
            remove_identities,
            bound_indices,
            transform.DecomposeOpsForInference(),
            transform.CanonicalizeBindings(),
            transform.EliminateCommonSubexpr(),
            unique_names,
            fold_constants,
            fold_remaining,
            unique_names,
            fold_affine,
            fold_padding,
            transform.DeadCodeElimination(["main"]),
        ),
        "layout": (*layout_passes, fold_remaining),
        "lower": (
            transform.LegalizeOps(dict(legalizations)),
            transform.AnnotateTIROpPattern(),
            # Layout changes of weights are plain kernels now; folding them prepacks the weights.
            fold_remaining,
            unique_names,
        ),
        # The unique names map each kernel to the layers it came from (`relay_passes.kernel_sources`).
        "group": (transform.FuseOps(), unique_names),
        "fuse": (transform.FuseTIR(), transform.DeadCodeElimination(["main"])),
        "schedule": (schedule,),
        "name": (content_names,),
    }

"""The phases from a whole graph to stages that can be built: the table of contents of this package.

The IR is Relax. The package is named after Relay, which TVM no longer has.

    whole graph ──▶ partition ──▶ verify ──▶ one pure function per stage
    each stage  ──▶ simplify ──▶ layout ──▶ lower ──▶ group ──▶ fuse ──▶ schedule ──▶ name ──▶ lift weights ──▶ build

Between the phases a module is plain Relax that can be printed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tvm import relax

from relay_passes.bound_indices import BoundIndices
from relay_passes.content_names import ContentNames
from relay_passes.fold_affine import FoldAffine
from relay_passes.fold_constants import FoldConstants, FoldRemaining
from relay_passes.fold_padding import FoldPadding
from relay_passes.remove_identities import RemoveIdentities
from relay_passes.unique_names import UniqueNames

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
            RemoveIdentities(),
            BoundIndices(),
            transform.DecomposeOpsForInference(),
            transform.CanonicalizeBindings(),
            transform.EliminateCommonSubexpr(),
            UniqueNames(),
            FoldConstants(),
            FoldRemaining(),
            UniqueNames(),
            FoldAffine(),
            FoldPadding(),
            transform.DeadCodeElimination(["main"]),
        ),
        "layout": (*layout_passes, FoldRemaining()),
        "lower": (
            transform.LegalizeOps(dict(legalizations)),
            transform.AnnotateTIROpPattern(),
            # Layout changes of weights are plain kernels now; folding them prepacks the weights.
            FoldRemaining(),
            UniqueNames(),
        ),
        # The unique names map each kernel to the layers it came from (`relay_passes.kernel_sources`).
        "group": (transform.FuseOps(), UniqueNames()),
        "fuse": (transform.FuseTIR(), transform.DeadCodeElimination(["main"])),
        "schedule": (schedule,),
        "name": (ContentNames(),),
    }

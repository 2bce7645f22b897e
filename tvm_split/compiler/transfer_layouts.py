"""Choose the layouts in which stages transfer tensors: a blocked layout if both sides compute in it, else plain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tvm import relax

from relay_passes.exchange_layouts import (
    Layout,
    changed_parameters,
    count_changes,
    layouts_made,
    with_layouts,
)
from relay_passes.ir import main_function
from relay_passes.partition import Computation
from relay_passes.stage_ends import IMAGE_DIMENSIONS, has_convolution, receiving_end, sending_end
from tvm_split.compiler.build import laid_out_stage
from tvm_split.compiler.placement import tvm_target
from tvm_split.planner.plan import Plan
from tvm_split.planner.problem import Stage


def in_common_layouts(
    computations: Sequence[Computation], plan: Plan, output_names: Sequence[str]
) -> tuple[Computation, ...]:
    """Return the plan's stages, in its order, with blocked layouts for transferred images if no stage must change them.

    The model's inputs and outputs (``output_names``) stay plain.
    """
    between = _images_between(computations) - set(output_names)
    if not between:
        return tuple(computations)
    made: dict[str, list[Layout | None]] = {name: [] for name in between}
    for stage, computation in zip(plan.stages, computations, strict=True):
        if between & {*computation.sent}:
            end = sending_end(computation, between)
            for function in _laid_out(end, plan, stage) if has_convolution(end) else ():
                for name, layout in zip(end.sent, layouts_made(function), strict=True):
                    made[name].append(layout)
    common = dict(_common(made))
    for stage, computation in zip(plan.stages, computations, strict=True):
        if common.keys() & {*computation.received}:
            end = receiving_end(computation, common)
            for name in _better_plain(end, dict(common), plan, stage):
                common.pop(name, None)
    return tuple(
        with_layouts(each, common) if common.keys() & {*each.received, *each.sent} else each for each in computations
    )


def _images_between(computations: Sequence[Computation]) -> set[str]:
    received = {
        parameter.name
        for computation in computations
        for parameter in computation.function.params
        if isinstance(parameter.ty, relax.TensorType) and parameter.ty.ndim == IMAGE_DIMENSIONS
    }
    return received & {name for computation in computations for name in computation.sent}


def _better_plain(end: Computation, layouts: Mapping[str, Layout], plan: Plan, stage: Stage) -> Iterator[str]:
    """Names of tensors that a stage would convert back to plain; all of them if other changes of layout increase."""
    pairs = zip(_laid_out(with_layouts(end, layouts), plan, stage), _laid_out(end, plan, stage), strict=True)
    for function, plain in pairs:
        costs_more = count_changes(function) > count_changes(plain)
        for name, is_changed in zip(end.received, changed_parameters(function), strict=True):
            if is_changed or costs_more:
                yield name


def _laid_out(end: Computation, plan: Plan, stage: Stage) -> Iterator[relax.Function]:
    """A computation's function after the layout phase, once for each target of the stage's machines."""
    for first, *_ in plan.machines_by_target(stage):
        yield main_function(laid_out_stage(end, tvm_target(plan.machine(first).target)))


def _common(made: Mapping[str, Sequence[Layout | None]]) -> Iterator[tuple[str, Layout]]:
    """The tensors that all their senders make in one layout, each with this layout."""
    for name, layouts in made.items():
        if layouts and layouts[0] is not None and all(layouts[0].is_same(other) for other in layouts):
            yield name, layouts[0]

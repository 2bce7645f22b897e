"""Views: transposed, sliced, repeated or reshaped forms of a tensor that a kernel reads in place, without a copy.

Attention slices one product into queries, keys and values for many heads, and concatenates the heads again. As separate
kernels these copies took 3.5 of BERT's 170 ms. A matrix product that computes its operand's element addresses needs no
copies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, te, tirx

from schedules.blocks import INLINE
from schedules.relax_tools import broadcast_index, operator_of, ravel, static_shape, unravel

Indices = list[Any]
Step = Callable[[Indices], Indices]
"""Maps an element's indices in a view to its indices in the tensor behind the view."""


@dataclass(frozen=True)
class View:
    """A tensor of ``shape`` with the elements of ``source``; ``steps`` map the view's indices to the source's."""

    source: relax.Expr
    shape: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def is_copy(self) -> bool:
        """Whether the view is the source itself."""
        return not self.steps

    def tensor(self, source: te.Tensor) -> te.Tensor:
        """Return the view as a TE computation on ``source``; schedules inline it into its readers."""
        if self.is_copy:
            return source

        def element(*index: Any) -> Any:
            return element_of(source, index, self.steps)

        return te.compute(self.shape, element, name="view", attrs={INLINE: 1})


def element_of(source: Any, index: Sequence[Any], steps: Sequence[Step]) -> Any:
    """Return the element at an index of the view, read from the source, a tensor or a buffer."""
    indices = list(index)
    for step in steps:
        indices = step(indices)
    return source[tuple(indices)]


def view_of(expression: relax.Expr, bound: Callable[[relax.Var], relax.Expr | None], smallest_run: int = 1) -> View:
    """Return the view of a source tensor that has an expression's elements.

    ``bound`` returns the expression of a variable, None if it has none. Neighbours along the last axis stay neighbours
    in runs of at least ``smallest_run`` elements. The source is the operand of the earliest operation that moves
    elements. A reshape before this operation is no step of the view: it moves nothing, and equal kernels stay equal.
    """
    shape = static_shape(expression)
    if shape is None:
        raise ValueError("a view needs a static shape")
    steps: list[Step] = []
    source, needed = expression, 0
    while isinstance(expression, relax.Var):
        value = bound(expression)
        if isinstance(value, relax.Var):
            expression = value
            continue
        step = None if value is None else _step(value, smallest_run)
        if value is None or step is None:
            break
        steps.append(step)
        expression = value.args[0]
        if operator_of(value) in _MOVING:
            source, needed = expression, len(steps)
    return View(source, shape, tuple(steps[:needed]))


def _step(value: relax.Expr, smallest_run: int) -> Step | None:
    make = _STEPS.get(operator_of(value))
    before = static_shape(value.args[0]) if make is not None else None
    after = static_shape(value)
    if make is None or before is None or after is None or 0 in before or 0 in after:
        return None
    step = make(value, before, after)
    if step is None or smallest_run == 1:
        return step
    return step if _keeps_runs(step, before, after, smallest_run) else None


def _keeps_runs(step: Step, before: Sequence[int], after: Sequence[int], smallest_run: int) -> bool:
    """Return whether the view's first run is contiguous and its last axis consists of whole runs of that length."""
    run = min(smallest_run, after[-1])
    if after[-1] % run != 0 or (before[-1] % run != 0 and before[-1] != after[-1]):
        return False
    places = [ravel(step([0] * (len(after) - 1) + [lane]), before) for lane in range(run)]
    return places == list(range(places[0], places[0] + run))


def _permuted(call: relax.Call, before: Sequence[int], after: Sequence[int]) -> Step:
    axes = call.attrs.axes
    order = [int(axis) % len(before) for axis in axes] if axes is not None else list(reversed(range(len(before))))
    return lambda indices: [indices[order.index(axis)] for axis in range(len(before))]


def _sliced(call: relax.Call, before: Sequence[int], after: Sequence[int]) -> Step | None:
    numbers = [_integers(argument) for argument in call.args[1:]]
    if len(numbers) < 3 or any(values is None for values in numbers):
        return None
    axes, begins = ([values or [] for values in numbers])[:2]
    strides = (numbers[3] if len(numbers) > 3 else None) or [1] * len(axes)
    if any(stride < 1 for stride in strides):
        return None
    start, stride_of = [0] * len(before), [1] * len(before)
    for axis, begin, stride in zip(axes, begins, strides, strict=True):
        start[axis % len(before)] = slice(begin, None).indices(before[axis % len(before)])[0]
        stride_of[axis % len(before)] = stride
    return lambda indices: [start[axis] + index * stride_of[axis] for axis, index in enumerate(indices)]


def _broadcast(call: relax.Call, before: Sequence[int], after: Sequence[int]) -> Step:
    return lambda indices: broadcast_index(indices, before)


def _repeated(call: relax.Call, before: Sequence[int], after: Sequence[int]) -> Step | None:
    """Return the step of ``relax.repeat``, which puts an element's repeats side by side; None if it has no axis."""
    if call.attrs.axis is None:
        return None
    repeated, repeats = int(call.attrs.axis) % len(before), int(call.attrs.repeats)
    return lambda indices: [index // repeats if axis == repeated else index for axis, index in enumerate(indices)]


def _reshaped(call: relax.Call, before: Sequence[int], after: Sequence[int]) -> Step:
    """Return the step of a reshape, computed separately for the smallest groups of axes of equal size."""
    groups = _matching_groups(before, after)

    def step(indices: Indices) -> Indices:
        positions: Indices = []
        for stored, viewed in groups:
            place = ravel([indices[axis] for axis in viewed], [after[axis] for axis in viewed])
            positions += unravel(place, [before[axis] for axis in stored])
        return positions

    return step


def _matching_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the shortest groups (axes of ``before``, axes of ``after``) of adjacent axes with equal element counts."""
    groups: list[tuple[list[int], list[int]]] = []
    stored: list[int] = []
    viewed: list[int] = []
    sizes = [1, 1]
    positions = [0, 0]
    while positions[0] < len(before) or positions[1] < len(after):
        take_stored = positions[1] == len(after) or (positions[0] < len(before) and sizes[0] <= sizes[1])
        side, shape, axes = (0, before, stored) if take_stored else (1, after, viewed)
        axes.append(positions[side])
        sizes[side] *= shape[positions[side]]
        positions[side] += 1
        if sizes[0] == sizes[1] and stored and viewed:
            groups.append((stored, viewed))
            stored, viewed, sizes = [], [], [1, 1]
    if stored or viewed:
        groups.append((stored, viewed))
    return groups


def _integers(expression: relax.Expr) -> list[int] | None:
    if not isinstance(expression, relax.Tuple):
        return None
    values = [getattr(field, "value", field) for field in expression.fields]
    if not all(isinstance(value, int | tirx.IntImm) for value in values):
        return None
    return [int(value) for value in values]


_MOVING = ("relax.permute_dims", "relax.strided_slice", "relax.broadcast_to", "relax.repeat")
_STEPS: dict[str, Callable[[relax.Call, Sequence[int], Sequence[int]], Step | None]] = {
    "relax.permute_dims": _permuted,
    "relax.strided_slice": _sliced,
    "relax.broadcast_to": _broadcast,
    "relax.repeat": _repeated,
    "relax.reshape": _reshaped,
    "relax.squeeze": _reshaped,
    "relax.expand_dims": _reshaped,
    "relax.flatten": _reshaped,
}

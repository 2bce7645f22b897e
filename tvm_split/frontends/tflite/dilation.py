"""Recognise dilated convolutions, which TensorFlow's converter writes as three operators.

SPACE_TO_BATCH_ND(x, step) ──▶ convolution, VALID ──▶ BATCH_TO_SPACE_ND(step)
equals the convolution with dilation ``step``; its padding is the first operator's padding minus the last one's crops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from tvm_split.frontends.dimensions import Array

_CONVOLUTIONS = ("CONV_2D", "DEPTHWISE_CONV_2D")


@dataclass(frozen=True)
class Dilation:
    """A dilated convolution: the numbers of its input and output, its dilation (height, width) and its padding."""

    data: int
    result: int
    steps: tuple[int, int]
    padding: int


def dilations(
    operators: Sequence[Any],
    options: Sequence[Any],
    shapes: Mapping[int, Sequence[int]],
    constant: Callable[[int], Array | None],
    outputs: Sequence[int],
) -> dict[int, Dilation]:
    """Find dilated convolutions, by position; the operators right before and after each are part of it.

    ``operators`` have ``kind``, ``inputs`` and ``outputs``, and ``options`` are theirs. ``constant`` returns the value
    of a tensor that depends on no input, else None. ``outputs`` are the graph's.
    """
    readers = [number for operator in operators for number in operator.inputs] + list(outputs)
    found = {}
    for place in range(1, len(operators) - 1):
        before, own, after = operators[place - 1 : place + 2]
        kinds = (before.kind, after.kind)
        if own.kind not in _CONVOLUTIONS or kinds != ("SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND"):
            continue
        inner = (before.outputs[0], own.outputs[0])
        if (own.inputs[0], after.inputs[0]) != inner or any(readers.count(number) != 1 for number in inner):
            continue
        dilation = _dilation(before, own, after, options[place], shapes, constant)
        if dilation is not None:
            found[place] = dilation
    return found


def _dilation(
    before: Any,
    own: Any,
    after: Any,
    options: Any,
    shapes: Mapping[int, Sequence[int]],
    constant: Callable[[int], Array | None],
) -> Dilation | None:
    is_plain = (options.strideH, options.strideW) == (options.dilationHFactor, options.dilationWFactor) == (1, 1)
    known = [constant(number) for number in (*before.inputs[1:], *after.inputs[1:])]
    if not is_plain or options.padding != schema.Padding.VALID or any(each is None for each in known):
        return None
    steps, widths, same_steps, cuts = [each.tolist() for each in known if each is not None]
    if len(steps) != 2 or steps != same_steps:
        return None
    borders = [(low - first, high - last) for (low, high), (first, last) in zip(widths, cuts, strict=True)]
    reach = [(size - 1) * step for size, step in zip(shapes[own.inputs[1]][1:3], steps, strict=True)]
    if borders == [(each // 2, each - each // 2) for each in reach]:
        padding = schema.Padding.SAME
    elif borders == [(0, 0), (0, 0)]:
        padding = schema.Padding.VALID
    else:
        return None
    return Dilation(before.inputs[0], after.outputs[0], (steps[0], steps[1]), padding)

"""Widen convolutions whose channels or groups do not fill a vector, so that the blocked templates can take them.

If no block divides the number of output channels, some more are computed and dropped. A detector's last layer, 256 to
255 channels of 26 x 26, takes 0.74 ms in this way and 43 ms in plain NCHW. For a convolution with groups there are four
ways. The one with the fewest estimated multiply-adds is chosen:

- neighbouring groups are merged until they fill a block of lanes. The weights become block-diagonal. Most products are
  with zero, but they run at ten or more times the rate of plain loops;
- all groups are merged into one dense convolution;
- a depthwise convolution with k results per channel reads its input repeated k times, as an ordinary depthwise one;
- if the number of groups is not divisible, groups of zeros are added and dropped from the result.
"""

from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax.expr_functor import mutator

from schedules.relax_tools import (
    CONV2D,
    TraitsMutator,
    array_of,
    constant,
    is_plain,
    operator_of,
    static_shape,
    window_of,
)
from schedules.traits import Traits, channel_block, vector_width

# The time of plain loops relative to a blocked template, for equal work. Measured on one core with AVX-512: 15 GFLOP/s
# for 3 x 3 with 4 channels per group, 2.4 for 1 x 1 with 80, where the peak is 200.
PLAIN_COST = 13.0
# Depthwise with k results per channel: plain loops are vectorized if half a vector divides the width (32 to 64 channels
# of 112 x 112: 1.1 ms, repeated 2.2 ms), and otherwise not (64 to 256 of 28 x 28: 3.9 ms, repeated 0.44 ms).
PLAIN_VECTOR_COST, REPEATED_COST = 4.5, 5.0


@dataclass(frozen=True)
class Widening:
    """How to widen a convolution: add ``added`` groups of zeros, then merge every ``merged`` groups into one.

    With ``repeats``, the input channels are repeated instead, so that every output channel has its own group.
    """

    merged: int = 1
    added: int = 0
    repeats: bool = False


def choose_widening(groups: int, inputs: int, outputs: int, width: int, traits: Traits) -> Widening | None:
    """Return the cheapest way to widen a convolution of ``inputs`` to ``outputs`` channels per group; None to keep it.

    ``width`` is the result's width in pixels.
    """
    if inputs == 1 and outputs == 1:
        return _depthwise(groups, traits)
    in_vectors = inputs == 1 and vector_width(width, traits) is not None
    choices: list[tuple[float, int, Widening | None]] = [
        (PLAIN_VECTOR_COST if in_vectors else PLAIN_COST, 1, None),
        (_dense_cost(groups, outputs, traits), 0, Widening(merged=groups)),
    ]
    for merged in range(1, min(groups, 2 * traits.lanes) + 1):
        blocks = channel_block(merged * inputs, traits), channel_block(merged * outputs, traits)
        if None in blocks:
            continue
        added = -groups % merged
        cost = merged * (groups + added) / groups * traits.lanes / min(block for block in blocks if block is not None)
        choices.append((cost + bool(added), merged, Widening(merged, added)))
    if inputs == 1:
        choices.append((REPEATED_COST, 2, Widening(repeats=True)))
    # If costs are equal, merge less: 128 channels in 32 groups, 56 x 56, take 1.33 ms in blocks of 8, 1.61 in 16.
    chosen = min(choices, key=lambda choice: choice[:2])[2]
    return None if chosen == Widening() else chosen


def _depthwise(channels: int, traits: Traits) -> Widening | None:
    if channel_block(channels, traits) is not None:
        return None
    half = traits.lanes // 2
    return Widening(added=-channels % (half if half >= 4 else traits.lanes))


def _dense_cost(groups: int, outputs: int, traits: Traits) -> float:
    channels = groups * outputs
    block = channel_block(channels, traits)
    if block is not None:
        return groups * traits.lanes / block
    return groups * (-(-channels // traits.lanes) * traits.lanes) / channels


@mutator
class WidenGroups(TraitsMutator):
    """Widens convolutions in plain layout with constant weights, so that a block of lanes divides their channels.

    Output channels are padded, and groups are padded or merged if `choose_widening` estimates that to be faster.
    """

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator_of(call) != CONV2D or not is_plain(call):
            return call
        result, weight, groups = static_shape(call), array_of(call.args[1]), int(call.attrs.groups)
        if result is None or weight is None:
            return call
        if groups == 1:
            fits = channel_block(weight.shape[0], self.traits) is not None
            return call if fits else self._dense(call, call.args[0], weight)
        widening = choose_widening(groups, weight.shape[1], weight.shape[0] // groups, result[3], self.traits)
        return call if widening is None else self._widened(call, call.args[0], weight, groups, widening)

    def _dense(self, call: relax.Call, data: relax.Expr, weight: np.ndarray) -> relax.Expr:
        """Widen a convolution without groups to a channel count that blocks divide, and drop the added channels."""
        channels = weight.shape[0]
        if channel_block(channels, self.traits) is None:
            half = self.traits.lanes // 2
            block = half if channels <= half and channel_block(half, self.traits) == half else self.traits.lanes
            weight = np.pad(weight, ((0, -channels % block), (0, 0), (0, 0), (0, 0)))
        return self._first(channels, relax.op.nn.conv2d(data, constant(weight), **window_of(call)), weight)

    def _first(self, channels: int, convolution: relax.Call, weight: np.ndarray) -> relax.Expr:
        if weight.shape[0] == channels:
            return convolution
        return relax.op.strided_slice(self.emit_beside(convolution, "padded"), axes=[1], begin=[0], end=[channels])

    def _widened(
        self, call: relax.Call, data: relax.Expr, weight: np.ndarray, groups: int, widening: Widening
    ) -> relax.Expr:
        outputs, inputs = weight.shape[:2]
        if widening.repeats:
            data = self.emit_beside(relax.op.repeat(data, outputs // groups, axis=1), "blocked")
            # This is an ordinary depthwise convolution; widen it too if no block divides its channels.
            return self._widened(call, data, weight, outputs, _depthwise(outputs, self.traits) or Widening())
        if widening.added:
            widths = [0, 0, 0, widening.added * inputs, 0, 0, 0, 0]
            data = self.emit_beside(relax.op.nn.pad(data, widths), "blocked")
            weight = np.pad(weight, ((0, widening.added * outputs // groups), (0, 0), (0, 0), (0, 0)))
        merged = _block_diagonal(weight, groups + widening.added, widening.merged)
        groups = (groups + widening.added) // widening.merged
        if groups == 1:
            return self._dense(call, data, merged)
        return self._first(
            outputs, relax.op.nn.conv2d(data, constant(merged), groups=groups, **window_of(call)), merged
        )


def _block_diagonal(weight: np.ndarray, groups: int, merged: int) -> np.ndarray:
    """Convert weights [O, I / groups, kh, kw] to [O, I / groups * merged, kh, kw] for ``groups / merged`` groups."""
    if merged == 1:
        return weight
    outputs, inputs, *window = weight.shape
    source = weight.reshape(groups // merged, merged, outputs // groups, inputs, *window)
    wide = np.zeros((groups // merged, merged, outputs // groups, merged, inputs, *window), weight.dtype)
    for group in range(merged):
        wide[:, group, :, group] = source[:, group]
    return wide.reshape(outputs, merged * inputs, *window)

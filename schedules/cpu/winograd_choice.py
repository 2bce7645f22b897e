"""Whether a convolution is computed by Winograd's method, with which tiles, and how its steps are nested.

A cost rule: seconds of one core for products, transforms, and bytes that come from beyond the second-level cache. The
rates were measured on one core of an x86-64 server with AVX-512 at about 220 GFLOP/s and 15 GB/s; what is chosen depends
on their ratios only, and those are alike on its kin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from schedules.cpu.register_tile import divisors, padded_extent
from schedules.traits import Traits
from schedules.winograd_transform import POINT_PAIRS, TAPS, tile_size

# One vector multiply-add, in nanoseconds: direct convolution reaches 170 GFLOP/s, and so do the products, as long as
# their weights are near.
MULTIPLY_ADD_NS = 32 / 170
# One byte from beyond the second-level cache, of weights or of what does not stay in a group.
BYTE_NS = 1 / 15
# Transforming one tile of one channel block, by outputs: [2] 16 values, [4] 36 values.
INPUT_TRANSFORM_NS = {2: 35.0, 4: 110.0}
OUTPUT_TRANSFORM_NS = {2: 18.0, 4: 75.0}
# A group's transformed input and sums have to stay in a second-level cache of 2 MB, next to weights.
LARGEST_GROUP_BYTES = 2 * 1024 * 1024
# Weights up to this are still there for the next group.
LARGEST_KEPT_WEIGHTS_BYTES = 768 * 1024
# Waking the threads and waiting for the last of them, for each parallel loop.
PARALLEL_LOOP_NS = 4000.0
# Direct convolution is more exact and its weights are smaller: it stays where Winograd's gain is less than a tenth.
LEAST_GAIN = 0.9


@dataclass(frozen=True)
class Winograd:
    """The sizes the method leaves open: what tuning would choose.

    A tile has ``outputs`` x ``outputs`` results (2 or 4). A group has ``rows`` rows of tiles of one image. ``staged``:
    input transform, products and output transform are parallel loops of their own, with all images' values between them
    in memory; otherwise one parallel loop over groups does all three, and the values between stay in its cache.
    """

    outputs: int
    rows: int
    staged: bool


@dataclass(frozen=True)
class Workload:
    """A 3 x 3 convolution of stride and dilation 1; blocks have ``input_lanes`` and ``output_lanes`` channels."""

    batch: int
    input_blocks: int
    output_blocks: int
    out_height: int
    out_width: int
    input_lanes: int
    output_lanes: int

    @property
    def input_channels(self) -> int:
        return self.input_blocks * self.input_lanes


def choose_winograd(workload: Workload, traits: Traits, threads: int) -> Winograd | None:
    """The cheapest choice for ``threads`` threads, or None where direct convolution is about as fast."""
    choices = list(_candidates(workload))
    best = min(choices, key=lambda choice: winograd_nanoseconds(workload, choice, traits, threads))
    limit = LEAST_GAIN * direct_nanoseconds(workload, threads)
    return best if winograd_nanoseconds(workload, best, traits, threads) < limit else None


def direct_nanoseconds(workload: Workload, threads: int) -> float:
    """Direct convolution: its weights come from memory once, its image is small beside them or computed on for long."""
    pixels = workload.batch * workload.out_height * workload.out_width
    steps = pixels * workload.input_channels * TAPS * TAPS * workload.output_blocks
    weights = 4 * TAPS * TAPS * workload.input_channels * workload.output_blocks * workload.output_lanes
    return (steps * MULTIPLY_ADD_NS + weights * BYTE_NS) / threads + PARALLEL_LOOP_NS


def winograd_nanoseconds(workload: Workload, choice: Winograd, traits: Traits, threads: int) -> float:
    """Seconds, times 1e9, that the rates above give for a choice."""
    size = tile_size(choice.outputs)
    tile_columns = -(-workload.out_width // choice.outputs)
    groups = workload.batch * -(-workload.out_height // (choice.outputs * choice.rows))
    tiles = padded_extent(choice.rows * tile_columns, workload.output_blocks, traits)
    points = size * size
    weights = 4 * points * workload.input_channels * workload.output_blocks * workload.output_lanes
    products = points * tiles * workload.input_channels * workload.output_blocks * MULTIPLY_ADD_NS
    transforms = tiles * (
        workload.input_blocks * INPUT_TRANSFORM_NS[choice.outputs]
        + workload.output_blocks * OUTPUT_TRANSFORM_NS[choice.outputs]
    )
    between = group_bytes(workload, choice, tiles)
    group = products + transforms
    if choice.staged:
        # Written, and read again, where a core's share does not stay in its cache.
        beyond = 2 * between if groups * between > LARGEST_GROUP_BYTES * threads else 0
        return (groups * (group + beyond * BYTE_NS) + weights * BYTE_NS) / threads + 3 * PARALLEL_LOOP_NS
    rounds = -(-groups // threads)
    reads = weights if weights <= LARGEST_KEPT_WEIGHTS_BYTES else rounds * weights
    beyond = 2 * between if between > LARGEST_GROUP_BYTES else 0
    return rounds * (group + beyond * BYTE_NS) + reads * BYTE_NS + PARALLEL_LOOP_NS


def group_bytes(workload: Workload, choice: Winograd, tiles: int) -> int:
    """Transformed input and sums of a group of ``tiles`` tiles."""
    values = workload.input_channels + workload.output_blocks * workload.output_lanes
    return 4 * tile_size(choice.outputs) ** 2 * tiles * values


def _candidates(workload: Workload) -> Iterator[Winograd]:
    for outputs in POINT_PAIRS:
        tile_rows = -(-workload.out_height // outputs)
        yield Winograd(outputs, tile_rows, staged=True)
        for rows in divisors(tile_rows):
            yield Winograd(outputs, rows, staged=False)

"""Choose for each convolution whether Winograd's method is faster, its tiles, and its nesting of loops: a cost rule.

The estimate is the seconds of one core for products, for transforms, and for bytes from beyond the second-level cache.
The rates were measured on one core of an x86-64 server with AVX-512 at about 220 GFLOP/s and 15 GB/s. Only their ratios
affect the choice, and those are similar on related processors.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from schedules.cpu.register_tile import dividing_tile, divisors, padded_extent, slowdown
from schedules.cpu.winograd_matrices import POINT_PAIRS, TAPS, tile_size
from schedules.traits import Traits

MULTIPLY_ADD_NS = 32 / 170
"""Nanoseconds of one vector multiply-add.

Direct convolution reaches 170 GFLOP/s, and so do the products while their weights are in a near cache.
"""
BYTE_NS = 1 / 15
"""Nanoseconds per byte from beyond the second-level cache, for weights and for values that do not stay in a group."""
ROWS_FOR_A_WEIGHT = 5
"""Multiply-adds in the time of loading a weight vector from the second-level cache; smaller register tiles wait."""
SEVERAL_TILES = 1.2
"""Factor on the products' time in a group with more tiles than one register tile.

Measured at 64 channels of 224 x 224 (10.8 to 8.9 ms for groups of 28 and 14) and 128 of 112 x 112 (9.0 to 7.8).
"""
INPUT_TRANSFORM_NS = {2: 28.0, 4: 85.0}
"""Nanoseconds to transform the input of one tile of one channel block, by outputs (2: 16 values, 4: 36 values)."""
OUTPUT_TRANSFORM_NS = {2: 18.0, 4: 75.0}
"""Nanoseconds to transform one tile of one channel block back, by outputs."""
COPY_NS = 1.5
"""Nanoseconds to copy one pixel of one channel block."""
CACHE_BYTES = 2 * 1024 * 1024
"""Size of a second-level cache. What a group needs beyond it, weights included, is read again for every group."""
LARGEST_GROUP_BYTES = CACHE_BYTES // 2
"""If a group's values take more, all of them are written to memory and read again between its steps."""
PARALLEL_LOOP_NS = 4000.0
"""Nanoseconds to wake the threads and to wait for the last one, per parallel loop."""
LEAST_GAIN = 0.9
"""Winograd, which is less exact and has larger weights, must take less than this part of direct convolution's time."""


@dataclass(frozen=True)
class Workload:
    """A 3 x 3 convolution with stride and dilation 1; blocks have ``input_lanes`` and ``output_lanes`` channels."""

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


@dataclass(frozen=True)
class Winograd:
    """The sizes of a Winograd convolution, which `choose_winograd` chooses.

    A tile has ``outputs`` x ``outputs`` results (2 or 4). A group has ``rows`` x ``columns`` tiles of one image. With
    ``staged``, input transform, products and output transform are separate parallel loops; memory holds all images'
    values between them, and a group is an image. Otherwise one parallel loop over groups does all three, and the values
    between them stay in its cache.
    """

    outputs: int
    rows: int
    columns: int
    staged: bool


def choose_winograd(workload: Workload, traits: Traits, threads: int) -> Winograd | None:
    """Return the choice with the shortest estimated time, or None if direct convolution is about as fast."""
    choices = list(_candidates(workload))
    best = min(choices, key=lambda choice: winograd_nanoseconds(workload, choice, traits, threads))
    limit = LEAST_GAIN * direct_nanoseconds(workload, threads)
    return best if winograd_nanoseconds(workload, best, traits, threads) < limit else None


def direct_nanoseconds(workload: Workload, threads: int) -> float:
    """Return the estimated nanoseconds of direct convolution.

    Its weights come from memory once. The image's bytes are not counted: they are few relative to the weights, or to
    the operations on them.
    """
    pixels = workload.batch * workload.out_height * workload.out_width
    steps = pixels * workload.input_channels * TAPS * TAPS * workload.output_blocks
    weights = 4 * TAPS * TAPS * workload.input_channels * workload.output_blocks * workload.output_lanes
    return (steps * MULTIPLY_ADD_NS + weights * BYTE_NS) / threads + PARALLEL_LOOP_NS


def winograd_nanoseconds(workload: Workload, choice: Winograd, traits: Traits, threads: int) -> float:
    """Return the estimated nanoseconds of Winograd's method with the sizes of a choice."""
    across = -(-workload.out_width // (choice.outputs * choice.columns))
    groups = workload.batch * across * -(-workload.out_height // (choice.outputs * choice.rows))
    tiles = padded_extent(choice.rows * choice.columns, workload.output_blocks, traits)
    points = tile_size(choice.outputs) ** 2
    weights = 4 * points * workload.input_channels * workload.output_blocks * workload.output_lanes
    tile = dividing_tile(tiles, workload.output_blocks, traits)
    slower = max(slowdown(tile), ROWS_FOR_A_WEIGHT / tile.rows)
    products = points * tiles * workload.input_channels * workload.output_blocks * MULTIPLY_ADD_NS * slower
    pixels = (choice.outputs * choice.rows + TAPS - 1) * (choice.outputs * choice.columns + TAPS - 1)
    transforms = (
        workload.input_blocks * (tiles * INPUT_TRANSFORM_NS[choice.outputs] + pixels * COPY_NS)
        + workload.output_blocks * tiles * OUTPUT_TRANSFORM_NS[choice.outputs]
    )
    # The bytes of a group's transformed input and sums.
    between = 4 * points * tiles * (workload.input_channels + workload.output_blocks * workload.output_lanes)
    if choice.staged:
        # The values are written and read again if a core's part does not stay in its cache, or another core wrote them.
        stays_in_cache = groups * between <= CACHE_BYTES * threads
        beyond = 2 * between * ((threads - 1) / threads if stays_in_cache else 1.0)
        work = groups * (products + transforms + beyond * BYTE_NS) + weights * BYTE_NS
        return work / threads + 3 * PARALLEL_LOOP_NS
    rounds = -(-groups // threads)
    products *= SEVERAL_TILES if tiles > tile.rows else 1.0
    beyond = 2 * between if between > LARGEST_GROUP_BYTES else 0
    again = max(0, min(weights, weights + between - CACHE_BYTES))
    work = rounds * (products + transforms + (beyond + again) * BYTE_NS) + (weights - again) * BYTE_NS
    return work + PARALLEL_LOOP_NS


def _candidates(workload: Workload) -> Iterator[Winograd]:
    for outputs in POINT_PAIRS:
        rows, columns = (-(-extent // outputs) for extent in (workload.out_height, workload.out_width))
        yield Winograd(outputs, rows, columns, staged=True)
        for some_rows in divisors(rows):
            for some_columns in divisors(columns):
                if (some_rows, some_columns) != (rows, columns):
                    yield Winograd(outputs, some_rows, some_columns, staged=False)

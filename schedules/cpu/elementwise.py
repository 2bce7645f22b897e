"""Schedule functions that move or map elements, and reductions that are not contractions.

Elements (arithmetic, transposes, concatenation, gathers, padding, casts): threads share the outer loops; the innermost
loop is vectorized. The fallback, correct for every PrimFunc, only shares the outer loops of each block.

Reductions (image windows, softmax, norms, mean, sums): a window, over blocked or plain channels, is summed within one
vector of outputs. In other reductions all stages of a row (its maximum, its sum of exponentials, its quotient) run
while the row is in the first-level cache. Threads share the rows.
"""

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV

from schedules.blocks import Block, blocks_of, finished_block, inline_into_outputs, new_schedule
from schedules.traits import Traits, vector_width

# Mapping this many elements takes 3 microseconds on one core, which is less than waking the threads.
SMALLEST_PARALLEL = 16384


def schedule_elementwise(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Inline intermediate blocks and make each output one parallel vector loop; None for functions with reductions."""
    schedule = new_schedule(function)
    remaining = inline_into_outputs(schedule, function)
    if remaining is None:
        return None
    for block in remaining:
        schedule_spatial_block(schedule, block, traits)
    return schedule.mod["main"]


def schedule_spatial_block(schedule: s_tir.Schedule, block: Block, traits: Traits) -> None:
    """Make a block's outer loops parallel and vectorize the innermost."""
    loops = schedule.get_loops(block.handle)
    outer, lane = split_vector(schedule, loops, traits)
    if lane is None:
        outer = loops[:-1]
    if outer and block.iterations >= SMALLEST_PARALLEL:
        schedule.parallel(schedule.fuse(*outer))
    if lane is not None:
        schedule.vectorize(lane)


def split_vector(schedule: s_tir.Schedule, loops: list[LoopRV], traits: Traits) -> tuple[list[LoopRV], LoopRV | None]:
    """Split the innermost loop; return the other loops and the vector loop, which is None if no width divides it."""
    width = vector_width(int(schedule.get(loops[-1]).extent), traits) if loops else None
    if width is None:
        return loops, None
    outer, lane = schedule.split(loops[-1], [None, width])
    return [*loops[:-1], outer], lane


def schedule_fallback(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Make each block's outer loops parallel; blocks where this fails (scans, scatters, symbolic shapes) are kept."""
    schedule = new_schedule(function)
    try:
        children = schedule.get_child_blocks(schedule.get_sblock("root"))
    except Exception:
        return None
    for block in children:
        attempt = schedule.copy()
        try:
            _parallel(attempt, block)
        except Exception:  # noqa: S112  (TVM has one error class; the block simply stays serial)
            continue
        schedule = attempt
    return schedule.mod["main"]


def _parallel(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> None:
    loops = schedule.get_loops(block)
    iterators = schedule.get(block).iter_vars
    if len(loops) != len(iterators):
        return
    spatial: list[s_tir.schedule.LoopRV] = []
    iterations = 1
    for loop, iterator in zip(loops, iterators, strict=True):
        extent = schedule.get(loop).extent
        iterations *= int(extent) if isinstance(extent, tirx.IntImm) else SMALLEST_PARALLEL
        if iterator.iter_type == tirx.IterVar.DataPar and len(spatial) == loops.index(loop):
            spatial.append(loop)
    if spatial and iterations >= SMALLEST_PARALLEL:
        schedule.parallel(schedule.fuse(*spatial))


def schedule_pooling(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Schedule ``[pad ->] one reduction [-> elementwise ...]`` with at least one spatial axis: windows, sums, means."""
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None or sum(block.is_reduction for block in blocks) != 1:
        return None
    position = next(index for index, block in enumerate(blocks) if block.is_reduction)
    anchor, tail = blocks[position], blocks[position + 1 :]
    if anchor.spatial == 0:
        return None
    for block in blocks[:position]:
        if _pads_innermost_axis(block):
            schedule_spatial_block(schedule, block, traits)
        else:
            schedule.compute_inline(block.handle)
    finished = finished_block(schedule, anchor, tail)
    if finished is None:
        return None
    outer, vector = split_vector(schedule, schedule.get_loops(finished), traits)
    if vector is not None:
        schedule.vectorize(vector)
    fused = schedule.fuse(*outer)
    if anchor.iterations >= SMALLEST_PARALLEL:
        schedule.parallel(fused)
    schedule.compute_at(anchor.handle, fused, preserve_unit_loops=True)
    schedule.set_scope(anchor.handle, 0, "local")
    loops = schedule.get_loops(anchor.handle)
    reduction = loops[-(len(anchor.extents) - anchor.spatial) :]
    if vector is not None:
        lane = loops[-len(reduction) - 1]
        schedule.reorder(*reduction, lane)
        schedule.vectorize(lane)
    initial = schedule.decompose_reduction(anchor.handle, reduction[0])
    if vector is not None:
        schedule.vectorize(schedule.get_loops(initial)[-1])
    return schedule.mod["main"]


def _pads_innermost_axis(block: Block) -> bool:
    """Return whether the block pads the innermost axis, so that one vector has lanes inside and outside the image.

    If such a block is inlined, each lane becomes a branch. Measured on a grouped 3 x 3 convolution of 128 plain
    channels, 56 x 56: 9.4 ms inlined, 2.0 ms as a separate block.
    """
    reads = block.statement.reads
    return len(reads) == 1 and int(reads[0].source.shape[-1]) != block.output_shape[-1]


def schedule_reduction(function: tirx.PrimFunc, traits: Traits) -> tirx.PrimFunc | None:
    """Schedule all blocks under the last block's outer loops; None if they do not share loops, or nothing reduces.

    The function must have one output.
    """
    schedule = new_schedule(function)
    blocks = blocks_of(schedule)
    if blocks is None or not any(block.is_reduction for block in blocks):
        return None
    last = blocks[-1]
    if last.is_reduction and sum(block.is_reduction for block in blocks) == 1:
        # This reduces all elements to one value; `schedule_pooling` takes sums with more than one result.
        for block in blocks[:-1]:
            schedule.compute_inline(block.handle)
        return schedule.mod["main"]
    common = min(last.spatial, *(block.spatial for block in blocks if block.is_reduction))
    # A reduction's kept dimensions of extent 1 are its last iterators; they are not loops to share.
    rows = 0
    while rows < common and all(block.extents[rows] == last.extents[rows] for block in blocks if block.is_reduction):
        rows += 1
    if rows == 0 or (last.is_reduction and rows == last.spatial):
        return None
    row = schedule.fuse(*schedule.get_loops(last.handle)[:rows])
    remaining = [last]
    for block in reversed(blocks[:-1]):
        if block.is_reduction or len(schedule.get_consumers(block.handle)) > 1 or _precedes_reduction(schedule, block):
            schedule.compute_at(block.handle, row, preserve_unit_loops=True)
            remaining.append(block)
        else:
            schedule.compute_inline(block.handle)
    if sum(block.iterations for block in blocks) >= SMALLEST_PARALLEL:
        schedule.parallel(row)
    for block in remaining:
        _vectorize_in_row(schedule, block, traits)
    return schedule.mod["main"]


def _precedes_reduction(schedule: s_tir.Schedule, block: Block) -> bool:
    """Return whether to store a block's results instead of inlining it: exponentials and reciprocals are costly."""
    return block.iterations == 1 or bool(schedule.get_producers(block.handle))


def _vectorize_in_row(schedule: s_tir.Schedule, block: Block, traits: Traits) -> None:
    """Vectorize the rest of the block inside the row loop, where whole vectors fit."""
    loops = schedule.get_loops(block.handle)[1:]
    count = len(block.kinds) - block.spatial
    spatial, reduction = loops[: len(loops) - count], loops[len(loops) - count :]
    outer, lane = split_vector(schedule, spatial, traits)
    if lane is None:
        return
    if reduction:
        schedule.reorder(*outer, *reduction, lane)
    schedule.vectorize(lane)
    if reduction:
        initial = schedule.decompose_reduction(block.handle, reduction[0])
        schedule.vectorize(schedule.get_loops(initial)[-1])

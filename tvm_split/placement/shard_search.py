"""Search which blocks of a model to shard, and how: the cheapest sequence of stages, by estimates. Numbers only.

A model is divided into consecutive blocks with few tensors between them: a sharded stage begins and ends at a block.
Dynamic programming over states (blocks done, layout of their results, whether any stage is sharded). The results lie on
one machine, or in parts on the machines of a sharded stage. From a state, either one machine computes the next block
and receives all parts, or a sharded stage computes some blocks, and each of its machines receives what it needs. Plans
without sharded stages come from `search`, so these have at least one. The result is a candidate: its actual latency is
that of its `timetable`, which includes overlap.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from rpc_runtime.program.routes import CLIENT
from tvm_split.placement.graph import LayerGraph
from tvm_split.placement.problem import Axis, Evaluation, ProblemLink, Sharding, Stage
from tvm_split.placement.profile import ClusterProfile
from tvm_split.placement.solution import STAGE_SECONDS
from tvm_split.placement.step_graph import StepGraph

CUT_AXES = ("rows", "columns", "batch")
TOUCHES = 1e-6
"""Smallest part of a value that counts as one: sums of shares have rounding errors."""
MOST_BLOCKS = 24
"""Most blocks of a model; further blocks are merged, the shortest first, to limit the time of the search."""
MOST_HUNDREDTHS = 20
"""Most machines whose shares are hundredths, which is five of them for each of so many equal machines."""
ROOM = 0.97
"""Fraction of a memory that is too small that parts may fill: their size is not exactly proportional to the share."""
Links = Mapping[tuple[str, str], ProblemLink]


@dataclass(frozen=True)
class Block:
    """Consecutive layers in the order of execution, made of whole pieces of a profile.

    ``seconds`` are by machine; machines that may not compute the block are left out. ``bytes_after`` is the size of the
    tensors that this block or earlier ones produce and later ones need, without the model's inputs.
    """

    layers: tuple[str, ...]
    seconds: Mapping[str, float]
    bytes_after: float


def blocks_of(graph: LayerGraph, profile: ClusterProfile, forbidden: Mapping[str, frozenset[str]]) -> tuple[Block, ...]:
    """The blocks of a model; ``forbidden`` has, by the name of a piece, the machines that may not have it.

    A block ends between pieces, where the number of tensors that pass has a local minimum. So a chain may be divided
    after each of its pieces, a residual network after each block, and a network with skip connections from one end to
    the other not at all.
    """
    order = list(graph.dependent)
    position = {layer: place for place, layer in enumerate(order)}
    spans = [(position[piece.layers[0]], position[piece.layers[-1]] + 1) for piece in profile.pieces]
    whole = [place for place in range(1, len(order)) if not any(first < place < end for first, end in spans)]
    values = [
        (position[value.producer], max(position[layer] for layer in value.consumers), value.size_bytes)
        for value in graph.values
        if value.producer in position and any(layer in position for layer in value.consumers)
    ]
    alive = {place: [size for produced, used, size in values if produced < place <= used] for place in whole}
    ends = [*_valleys(whole, [len(alive[place]) for place in whole]), len(order)]
    blocks = []
    for first, end in pairwise([0, *ends]):
        pieces = [piece for piece, (begin, _) in zip(profile.pieces, spans, strict=True) if first <= begin < end]
        seconds = {
            machine.machine: math.fsum(machine.pieces[piece.name].seconds for piece in pieces)
            for machine in profile.machines
            if not any(machine.machine in forbidden.get(piece.name, ()) for piece in pieces)
        }
        blocks.append(Block(tuple(order[first:end]), seconds, float(sum(alive.get(end, [])))))
    while len(blocks) > MOST_BLOCKS:
        pairs = [_merged(*pair) for pair in pairwise(blocks)]
        # A block that no machine may compute takes for ever.
        least = [min(block.seconds.values(), default=math.inf) for block in pairs]
        shortest = least.index(min(least))
        blocks[shortest : shortest + 2] = [pairs[shortest]]
    return tuple(blocks)


def _valleys(places: Sequence[int], heights: Sequence[int]) -> list[int]:
    """Return the places of local minima: runs of equal heights with greater heights, or the end, on both sides."""
    valleys: list[int] = []
    first = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or heights[end] != heights[first]:
            left = first == 0 or heights[first - 1] > heights[first]
            right = end == len(places) or heights[end] > heights[first]
            if left and right:
                valleys += places[first:end]
            first = end
    return valleys


def _merged(first: Block, second: Block) -> Block:
    seconds = {name: first.seconds[name] + second.seconds[name] for name in first.seconds if name in second.seconds}
    return Block(first.layers + second.layers, seconds, second.bytes_after)


class Layout(NamedTuple):
    """How the parts of a value along an axis lie on machines; a single machine has the whole value."""

    axis: Axis | None
    machines: tuple[str, ...]
    shares: tuple[float, ...]

    @property
    def holder(self) -> str:
        """The machine with the largest share, the first of equal ones."""
        return self.machines[self.shares.index(max(self.shares))]


def whole_on(machine: str) -> Layout:
    return Layout(None, (machine,), (1.0,))


@dataclass(frozen=True)
class ShardOption:
    """A way to shard a run of blocks, or a part of the run, over machines.

    ``seconds`` maps each possible end of the stage (the number of the block after the last) to the seconds of each
    block from ``begin`` on, exchanges included. They depend on the end if halos are computed twice.
    """

    sharding: Sharding
    machines: tuple[str, ...]
    shares: tuple[float, ...]
    begin: int
    seconds: Mapping[int, Sequence[float]]

    @cached_property
    def _sums(self) -> dict[int, list[float]]:
        return {end: [0.0, *accumulate(durations)] for end, durations in self.seconds.items()}

    def ends(self, first: int) -> Iterator[tuple[int, float]]:
        """Yield each possible end of a stage that begins at block ``first``, with the stage's seconds."""
        for end, sums in self._sums.items():
            if self.begin <= first < end:
                yield end, sums[end - self.begin] - sums[first - self.begin]

    @property
    def layout(self) -> Layout:
        """The layout of its results on its machines."""
        return Layout(self.sharding.axis, self.machines, self.shares)


def stage_of(blocks: Sequence[Block], first: int, end: int, layout: Layout, sharding: Sharding | None = None) -> Stage:
    """The stage, without a name, of the blocks from ``first`` to ``end`` (exclusive) with this layout."""
    layers = tuple(layer for block in blocks[first:end] for layer in block.layers)
    return Stage(layout.machines, layers, layout.shares, sharding=sharding)


def cheapest(
    blocks: Sequence[Block],
    options: Sequence[ShardOption],
    links: Links,
    input_bytes: float,
    output_bytes: float,
    *,
    all_sharded: bool = False,
) -> tuple[Stage, ...]:
    """The stages with the least total seconds, of which at least one is sharded; empty if that is impossible.

    With ``all_sharded``, every block for which there is an option is sharded.
    """
    shardable = {
        block for option in options for end in option.seconds for block in range(option.begin, end) if all_sharded
    }
    start = _State(0, whole_on(CLIENT), False)
    best: dict[_State, float] = {start: 0.0}
    reached_by: ReachedBy = {}
    at: list[list[_State]] = [[start], *([] for _ in blocks)]

    def reach(before: _State, end: int, held: Layout, sharding: Sharding | None, seconds: float) -> None:
        if not math.isfinite(seconds):  # a link is missing
            return
        state = _State(end, held, before.is_sharded or sharding is not None)
        if sharding is not None or before.held != held:
            seconds += STAGE_SECONDS
        if state not in best:
            at[state.place].append(state)
        if seconds < best.get(state, math.inf):
            best[state], reached_by[state] = seconds, (before, sharding)

    for place in range(len(blocks)):
        alive = blocks[place - 1].bytes_after if place else input_bytes
        for before in at[place]:
            seconds_before = best[before]
            for machine, seconds in ({} if place in shardable else blocks[place].seconds).items():
                whole = whole_on(machine)
                arrives = seconds_before + relayout_seconds(links, before.held, whole, alive)
                reach(before, place + 1, whole, None, arrives + seconds)
            for option in options:
                arrives = seconds_before + relayout_seconds(links, before.held, option.layout, alive)
                for end, seconds in option.ends(place):
                    reach(before, end, option.layout, option.sharding, arrives + seconds)

    def at_client(state: _State) -> float:
        """Seconds until the client has the results; parts are first gathered on the machine with the largest share."""
        holder = whole_on(state.held.holder)
        gathered = relayout_seconds(links, state.held, holder, output_bytes)
        return best[state] + gathered + relayout_seconds(links, holder, whole_on(CLIENT), output_bytes)

    last = min((state for state in at[-1] if state.is_sharded), key=at_client, default=start)
    return _stages_to(blocks, reached_by, last) if math.isfinite(at_client(last)) else ()


def relayout_seconds(links: Links, held: Layout, target: Layout, size: float) -> float:
    """Seconds until each machine of ``target`` has what it needs of a value of ``size`` bytes; links work in parallel.

    For rows, columns and samples a machine needs its own part, as far as it does not have it; neighbours along an axis
    exchange at least a halo. For channels and heads a machine needs the whole value.
    """
    slowest = 0.0
    parts, needs = (list(zip(layout.machines, _ranges(layout), strict=True)) for layout in (held, target))
    for (source, has), (end, needed) in product(parts, needs):
        if target.axis not in CUT_AXES:
            moved = has[1] - has[0]
        elif held.axis == target.axis:
            moved = max(0.0, min(has[1], needed[1]) - max(has[0], needed[0]))
        else:
            moved = (has[1] - has[0]) * (needed[1] - needed[0])
        touch = max(has[0], needed[0]) - min(has[1], needed[1]) < TOUCHES
        is_beside = touch and held.axis == target.axis and target.axis in ("rows", "columns")
        if source != end and size and (moved > TOUCHES or is_beside):
            link = links.get((source, end))
            seconds = math.inf if link is None else link.latency_seconds + size * moved / link.bytes_per_second
            slowest = max(slowest, seconds)
    return slowest


def _ranges(layout: Layout) -> list[tuple[float, float]]:
    ends = [0.0, *accumulate(layout.shares)]
    return list(pairwise(ends))


class _State(NamedTuple):
    place: int
    held: Layout
    is_sharded: bool


ReachedBy = dict[_State, tuple[_State, Sharding | None]]
"""The state before each state, and how the blocks between them are sharded, if they are."""


def _stages_to(blocks: Sequence[Block], reached_by: ReachedBy, state: _State) -> tuple[Stage, ...]:
    """Return the stages that lead to a state; consecutive unsharded blocks of one machine form one stage."""
    stages: list[Stage] = []
    end = state.place
    while state in reached_by:
        before, sharding = reached_by[state]
        _, sharding_before = reached_by.get(before, (before, None))
        if sharding or sharding_before or before.held != state.held:
            stages.append(stage_of(blocks, before.place, end, state.held, sharding))
            end = before.place
        state = before
    return tuple(stages[::-1])


def rounded(shares: Sequence[float]) -> tuple[float, ...]:
    """The shares rounded to hundredths by the method of largest remainders; each is at least one unit.

    The unit is smaller for more than `MOST_HUNDREDTHS` machines, so that all get about what they should.
    """
    units = 100 * math.ceil(len(shares) / MOST_HUNDREDTHS)
    counts = [max(1, math.floor(share * units)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda number: counts[number] - shares[number] * units)
    for number in by_remainder[: max(0, units - sum(counts))]:
        counts[number] += 1
    while sum(counts) > units:
        counts[counts.index(max(counts))] -= 1
    return tuple(count / units for count in counts)


def rebalanced(stage: Stage, graph: StepGraph) -> Stage:
    """Return a stage with shares for which its machines finish at the same time, from the seconds of its steps.

    The stage is unchanged if it is not sharded, or if the steps of a machine take no time.
    """
    if stage.sharding is None:
        return stage
    took: defaultdict[str, float] = defaultdict(float)
    for step in graph.steps:
        if step.stage == stage.name:
            took[step.machines[0]] += step.contended_seconds[0]
    if not all(took[machine] > 0 for machine in stage.machines):
        return stage
    rates = [share / took[machine] for share, machine in zip(stage.shares, stage.machines, strict=True)]
    return replace(stage, shares=rounded([rate / sum(rates) for rate in rates]))


def lightened(stage: Stage, evaluation: Evaluation, limits: Mapping[str, float]) -> Stage:
    """A sharded stage with smaller shares for machines that exceed their memory, and larger shares for the others.

    ``limits`` are the bytes of memory of each machine. If no machine has memory left, the stage is unchanged.
    """
    fills = dict.fromkeys(stage.machines, 0.0)  # a machine that computes nothing has no load
    fills |= {load.machine: load.memory_bytes / max(limits[load.machine], 1.0) for load in evaluation.loads}
    if stage.sharding is None or min(fills[machine] for machine in stage.machines) >= 1:
        return stage
    less = [
        part / fills[machine] * ROOM if fills[machine] > 1 else part
        for machine, part in zip(stage.machines, stage.shares, strict=True)
    ]
    light = sum(part for machine, part in zip(stage.machines, less, strict=True) if fills[machine] <= 1)
    more = (light + 1.0 - sum(less)) / light
    shares = [part * (1 if fills[name] > 1 else more) for name, part in zip(stage.machines, less, strict=True)]
    return replace(stage, shares=rounded(shares))

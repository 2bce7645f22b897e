"""Search which blocks of a model to shard, and how: the cheapest sequence of stages, by estimates. Numbers only.

Dynamic programming over states (blocks done, layout of their results, whether any stage is sharded). The results lie on
one machine, or in parts on the machines of a sharded stage. From a state, either one machine computes the next block
and receives all parts, or a sharded stage computes some blocks, and each of its machines receives what it needs. Plans
without sharded stages come from `search`, so these have at least one. The result is a candidate: its actual latency is
that of its `timetable`, which includes overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from rpc_runtime.program.routes import CLIENT
from tvm_split.planner.problem import Axis, ProblemLink, Sharding
from tvm_split.planner.shard_blocks import Block

CUT_AXES = ("rows", "columns", "batch")
TOUCHES = 1e-6
"""Smallest part of a value that counts as one: sums of shares have rounding errors."""
Links = Mapping[tuple[str, str], ProblemLink]
STAGE_SECONDS = 1e-4
"""Seconds that one more stage must gain: about the time to hand over and wake up; fewer stages are easier to read."""


class Layout(NamedTuple):
    """How the parts of a value along an axis lie on machines; a single machine has the whole value."""

    axis: Axis | None
    machines: tuple[str, ...]
    shares: tuple[float, ...]


def whole_on(machine: str) -> Layout:
    return Layout(None, (machine,), (1.0,))


@dataclass(frozen=True)
class ShardOption:
    """A way to shard a run of blocks, or a part of the run, over machines.

    ``seconds`` has, by the end of the stage (the number of the block after the last), the seconds of each block from
    ``begin`` on, exchanges included. They depend on the end if halos are computed twice.
    """

    sharding: Sharding
    machines: tuple[str, ...]
    shares: tuple[float, ...]
    begin: int
    seconds: Mapping[int, Sequence[float]]

    @cached_property
    def _sums(self) -> dict[int, list[float]]:
        return {end: [0.0, *accumulate(each)] for end, each in self.seconds.items()}

    def ends(self, first: int) -> Iterator[tuple[int, float]]:
        """Pairs of a possible end of a stage that begins at block ``first``, and the stage's seconds."""
        for end, sums in self._sums.items():
            if self.begin <= first < end:
                yield end, sums[end - self.begin] - sums[first - self.begin]

    @property
    def holder(self) -> str:
        """The machine with the largest share, the first of equal ones."""
        return self.machines[self.shares.index(max(self.shares))]

    @property
    def layout(self) -> Layout:
        """The layout of its results on its machines."""
        return Layout(self.sharding.axis, self.machines, self.shares)


@dataclass(frozen=True)
class Segment:
    """Blocks from ``first`` to ``end`` (exclusive), on ``machine`` or sharded by an option.

    With an option, ``machine`` is the one with the largest share.
    """

    first: int
    end: int
    machine: str
    option: ShardOption | None = None


def cheapest(
    blocks: Sequence[Block],
    options: Sequence[ShardOption],
    links: Links,
    input_bytes: float,
    output_bytes: float,
    *,
    all_shared: bool = False,
) -> tuple[Segment, ...]:
    """The segments with the least total seconds, of which at least one is sharded; empty if that is impossible.

    With ``all_shared``, every block for which there is an option is sharded.
    """
    shareable = {
        block for option in options for end in option.seconds for block in range(option.begin, end) if all_shared
    }
    start = _State(0, whole_on(CLIENT), False)
    best: dict[_State, float] = {start: 0.0}
    reached_by: dict[_State, tuple[_State, Segment]] = {}
    at: list[list[_State]] = [[start], *([] for _ in blocks)]

    def reach(before: _State, segment: Segment, seconds: float) -> None:
        held = whole_on(segment.machine) if segment.option is None else segment.option.layout
        state = _State(segment.end, held, before.shared or segment.option is not None)
        if segment.option is not None or before.held != held:
            seconds += STAGE_SECONDS
        if state not in best:
            at[state.place].append(state)
        if seconds < best.get(state, math.inf):
            best[state], reached_by[state] = seconds, (before, segment)

    for place in range(len(blocks)):
        alive = blocks[place - 1].bytes_after if place else input_bytes
        for before in at[place]:
            known = best[before]
            for machine, seconds in ({} if place in shareable else blocks[place].seconds).items():
                arrives = known + relayout_seconds(links, before.held, whole_on(machine), alive)
                if not math.isinf(arrives):
                    reach(before, Segment(place, place + 1, machine), arrives + seconds)
            for option in options:
                arrives = known + relayout_seconds(links, before.held, option.layout, alive)
                for end, seconds in option.ends(place) if not math.isinf(arrives) else ():
                    reach(before, Segment(place, end, option.holder, option), arrives + seconds)

    def at_client(state: _State) -> float:
        """Seconds until the client has the results; parts are first gathered on the machine with the largest share."""
        held = state.held
        holder = whole_on(held.machines[held.shares.index(max(held.shares))])
        gathered = relayout_seconds(links, held, holder, output_bytes)
        return best[state] + gathered + relayout_seconds(links, holder, whole_on(CLIENT), output_bytes)

    return _joined(
        _segments_to(reached_by, min((state for state in at[-1] if state.shared), key=at_client, default=start))
    )


def relayout_seconds(links: Links, held: Layout, wanted: Layout, size: float) -> float:
    """Seconds until each machine of ``wanted`` has what it needs of a value of ``size`` bytes; links work in parallel.

    For rows, columns and samples a machine needs its own part, as far as it does not have it; neighbours along an axis
    exchange at least a halo. For channels and heads a machine needs the whole value.
    """
    slowest = 0.0
    parts, needs = (list(zip(each.machines, _ranges(each), strict=True)) for each in (held, wanted))
    for (source, has), (end, needed) in product(parts, needs):
        if wanted.axis not in CUT_AXES:
            moved = has[1] - has[0]
        elif held.axis == wanted.axis:
            moved = max(0.0, min(has[1], needed[1]) - max(has[0], needed[0]))
        else:
            moved = (has[1] - has[0]) * (needed[1] - needed[0])
        is_beside = held.axis == wanted.axis and wanted.axis in ("rows", "columns")
        if source != end and size and (moved > TOUCHES or (is_beside and _touch(has, needed))):
            link = links.get((source, end))
            seconds = math.inf if link is None else link.latency_seconds + size * moved / link.bytes_per_second
            slowest = max(slowest, seconds)
    return slowest


def _ranges(layout: Layout) -> list[tuple[float, float]]:
    ends = [0.0, *accumulate(layout.shares)]
    return list(pairwise(ends))


def _touch(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return max(one[0], other[0]) - min(one[1], other[1]) < TOUCHES


class _State(NamedTuple):
    place: int
    held: Layout
    shared: bool


def _segments_to(reached_by: Mapping[_State, tuple[_State, Segment]], state: _State) -> list[Segment]:
    found: list[Segment] = []
    while state in reached_by:
        state, segment = reached_by[state]
        found.append(segment)
    return found[::-1]


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for each in segments:
        last = found[-1] if found else None
        if last is not None and last.option is each.option is None and last.machine == each.machine:
            found[-1] = Segment(last.first, each.end, each.machine)
        else:
            found.append(each)
    return tuple(found)

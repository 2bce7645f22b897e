"""Which blocks of a model machines should share, and how: the cheapest way through, by estimates. Numbers only.

Dynamic programming over (blocks done, machine that has what they made, whether any was shared). From there either one
more block is computed by one machine, or a stage is shared that ends some blocks later, and what it made is put
together on one machine again. Plans without shared stages are `search`'s, so here at least one is. What it finds is a
candidate: its real latency is that of its `timetable`, which sees what overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from tvm_split.planner.problem import ProblemLink, Sharding
from tvm_split.planner.shard_blocks import Block
from tvm_split.rpc_runtime.program.program import CLIENT

CUT_AXES = ("rows", "columns", "batch")
STAGE_SECONDS = 1e-4
"""What one more stage has to gain: handing over and waking up take about this, and fewer stages are easier to read."""


@dataclass(frozen=True)
class Way:
    """A way to share blocks among machines, from any of its blocks to a later one.

    ``seconds`` has, by the number of the block behind the last, the seconds of each block from ``begin`` on, exchanges
    included, in a stage that ends there: with halos that are computed twice, these depend on the end.
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
        """Where a stage that begins at block ``first`` may end, and its seconds."""
        for end, sums in self._sums.items():
            if self.begin <= first < end:
                yield end, sums[end - self.begin] - sums[first - self.begin]

    @property
    def holder(self) -> str:
        """The machine with the largest share, the first of equal ones."""
        return self.machines[self.shares.index(max(self.shares))]


@dataclass(frozen=True)
class Segment:
    """Blocks from ``first`` to before ``end``, on one machine, or shared in a way."""

    first: int
    end: int
    machine: str
    way: Way | None = None


def cheapest(
    blocks: Sequence[Block],
    ways: Sequence[Way],
    links: Mapping[tuple[str, str], ProblemLink],
    input_bytes: float,
    output_bytes: float,
    *,
    all_shared: bool = False,
) -> tuple[Segment, ...]:
    """The segments of least seconds of which one at least is shared; none where that cannot be.

    With ``all_shared`` no machine has a block to itself that there is a way to share.
    """
    shareable = {block for way in ways for end in way.seconds for block in range(way.begin, end) if all_shared}
    machines = list(dict.fromkeys(name for block in blocks for name in block.seconds))
    start = _State(0, CLIENT, False)
    best: dict[_State, float] = {start: 0.0}
    came: dict[_State, tuple[_State, Segment]] = {}

    def reach(before: _State, segment: Segment, seconds: float) -> None:
        state = _State(segment.end, segment.machine, before.shared or segment.way is not None)
        if segment.way is not None or before.holder != segment.machine:
            seconds += STAGE_SECONDS
        if seconds < best.get(state, math.inf):
            best[state], came[state] = seconds, (before, segment)

    for place in range(len(blocks)):
        alive = blocks[place - 1].bytes_after if place else input_bytes
        holders = [_State(place, name, shared) for name in machines for shared in (False, True)] if place else [start]
        for before in holders:
            known = best.get(before, math.inf)
            if math.isinf(known):
                continue
            alone = {} if place in shareable else blocks[place].seconds
            for machine, seconds in alone.items():
                arrives = known + _seconds(links, before.holder, machine, alive)
                reach(before, Segment(place, place + 1, machine), arrives + seconds)
            for way in ways:
                # What comes from the client is cut along pixels and samples; channels and heads are made of all of it.
                is_cut = place or way.sharding.axis in CUT_AXES
                parts = way.shares if is_cut else [1.0] * len(way.shares)
                arrives = known + _slowest(
                    _seconds(links, before.holder, machine, alive * part)
                    for machine, part in zip(way.machines, parts, strict=True)
                )
                for end, seconds in way.ends(place):
                    after = blocks[end - 1].bytes_after if end < len(blocks) else output_bytes
                    for machine in machines if end < len(blocks) else (way.holder,):
                        gathers = _slowest(
                            _seconds(links, each, machine, after * part)
                            for each, part in zip(way.machines, way.shares, strict=True)
                        )
                        reach(before, Segment(place, end, machine, way), arrives + seconds + gathers)
    ends = [_State(len(blocks), name, True) for name in machines]
    last = min(
        ends,
        key=lambda end: best.get(end, math.inf) + _seconds(links, end.holder, CLIENT, output_bytes),
        default=start,
    )
    return _joined(_way_back(came, last))


class _State(NamedTuple):
    place: int
    holder: str
    shared: bool


def _way_back(came: Mapping[_State, tuple[_State, Segment]], state: _State) -> list[Segment]:
    found: list[Segment] = []
    while state in came:
        state, segment = came[state]
        found.append(segment)
    return found[::-1]


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for each in segments:
        last = found[-1] if found else None
        if last is not None and last.way is each.way is None and last.machine == each.machine:
            found[-1] = Segment(last.first, each.end, each.machine)
        else:
            found.append(each)
    return tuple(found)


def _seconds(links: Mapping[tuple[str, str], ProblemLink], source: str, end: str, size: float) -> float:
    if source == end or size == 0:
        return 0.0
    link = links.get((source, end))
    return math.inf if link is None else link.latency_seconds + size / link.bytes_per_second


def _slowest(seconds: Iterator[float]) -> float:
    return max(seconds, default=0.0)

"""Lay out a directed acyclic graph in rows from top to bottom, with few crossing edges.

The method of Sugiyama, Tagawa and Toda (1981): rows by longest path, a joint on every row that an edge passes, the
order within rows by barycentres in sweeps down and up, then x coordinates. A node's target is the mean of its
neighbours. The nearest coordinates that keep the order and the distances are computed exactly, by isotonic regression.

No library is used: graphviz has to be installed outside of Python, grandalf and igraph are under the GPL, and the other
Python libraries are young and contain compiled code for what is a page of arithmetic here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SWEEPS = 12
JOINT_WIDTH = 8.0
JOINT_WEIGHT = 4.0
"""The weight of a joint in the regression, relative to a node: straight edges matter more than centred nodes."""


@dataclass(frozen=True)
class Layout:
    """The positions of nodes (``rows``, ``centres``), and by edge the ``joints``: (row, x) on each row that it passes.

    Rows count from 0 at the top, x from 0 at the left end of the leftmost node. ``width`` spans all rows.
    """

    rows: Mapping[str, int]
    centres: Mapping[str, float]
    joints: Mapping[tuple[str, str], tuple[tuple[int, float], ...]]
    width: float


def layered_layout(
    widths: Mapping[str, float], edges: Sequence[tuple[str, str]], gap: float, last: str | None = None
) -> Layout:
    """Lay out nodes of given widths, in a topological order of ``edges``, at least ``gap`` apart within a row.

    The node ``last``, which no edge may leave, is placed below all others.

    Raises:
        ValueError: an edge goes against the order of ``widths``.
    """
    row_of = _rows(widths, edges, last)
    chains = {edge: _chain(edge, row_of) for edge in edges}
    order, sizes = _initial_order(widths, row_of, chains)
    above, below = _neighbours(chains)
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        neighbours = above if downwards else below
        rows = range(1, len(order)) if downwards else range(len(order) - 2, -1, -1)
        for row in rows:
            fixed = order[row - 1] if downwards else order[row + 1]
            _sort_by_barycentres(order[row], fixed, neighbours)
    centres = _places(order, sizes, above, below, gap)
    left = min((centres[each] - sizes[each] / 2 for each in sizes), default=0.0)
    right = max((centres[each] + sizes[each] / 2 for each in sizes), default=0.0)
    return Layout(
        rows=row_of,
        centres={node: centres[node] - left for node in widths},
        joints={
            edge: tuple((row_of[edge[0]] + step, centres[joint] - left) for step, joint in enumerate(chain[1:-1], 1))
            for edge, chain in chains.items()
        },
        width=right - left,
    )


_Item = str | tuple[str, str, int]
"""A node, or the joint of an edge on a row."""


def _rows(widths: Mapping[str, float], edges: Sequence[tuple[str, str]], last: str | None) -> dict[str, int]:
    place = {node: index for index, node in enumerate(widths)}
    before: dict[str, list[str]] = {node: [] for node in widths}
    after: dict[str, list[str]] = {node: [] for node in widths}
    for source, destination in edges:
        if place[source] >= place[destination]:
            raise ValueError(f"the edge from {source!r} to {destination!r} goes back in the order of the nodes")
        before[destination].append(source)
        after[source].append(destination)
    rows: dict[str, int] = {}
    for node in widths:
        rows[node] = max((rows[each] + 1 for each in before[node]), default=0)
    if last is not None:
        rows[last] = max((row for node, row in rows.items() if node != last), default=-1) + 1
    # Nodes without predecessors move down next to their successors: long edges from the top are hard to follow.
    for node in reversed(list(widths)):
        if not before[node] and after[node]:
            rows[node] = min(rows[each] for each in after[node]) - 1
    return rows


def _chain(edge: tuple[str, str], row_of: Mapping[str, int]) -> list[_Item]:
    source, destination = edge
    joints = [(source, destination, row) for row in range(row_of[source] + 1, row_of[destination])]
    return [source, *joints, destination]


def _initial_order(
    widths: Mapping[str, float], row_of: Mapping[str, int], chains: Mapping[tuple[str, str], Sequence[_Item]]
) -> tuple[list[list[_Item]], dict[_Item, float]]:
    order: list[list[_Item]] = [[] for _ in range(max(row_of.values(), default=-1) + 1)]
    sizes: dict[_Item, float] = {}
    for node, width in widths.items():
        order[row_of[node]].append(node)
        sizes[node] = width
    for (source, _), chain in chains.items():
        for step, joint in enumerate(chain[1:-1], 1):
            order[row_of[source] + step].append(joint)
            sizes[joint] = JOINT_WIDTH
    return order, sizes


def _neighbours(
    chains: Mapping[tuple[str, str], Sequence[_Item]],
) -> tuple[dict[_Item, list[_Item]], dict[_Item, list[_Item]]]:
    above: dict[_Item, list[_Item]] = {}
    below: dict[_Item, list[_Item]] = {}
    for chain in chains.values():
        for upper, lower in itertools.pairwise(chain):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    return above, below


def _sort_by_barycentres(row: list[_Item], fixed: Sequence[_Item], neighbours: Mapping[_Item, Sequence[_Item]]) -> None:
    """Sort a row by the mean positions of its items' neighbours on the fixed row; items without neighbours stay."""
    place = {item: index / max(1, len(fixed) - 1) for index, item in enumerate(fixed)}
    own = {item: index / max(1, len(row) - 1) for index, item in enumerate(row)}

    def barycentre(item: _Item) -> float:
        found = [place[each] for each in neighbours.get(item, ())]
        return sum(found) / len(found) if found else own[item]

    row.sort(key=barycentre)


def _places(
    order: Sequence[Sequence[_Item]],
    sizes: Mapping[_Item, float],
    above: Mapping[_Item, Sequence[_Item]],
    below: Mapping[_Item, Sequence[_Item]],
    gap: float,
) -> dict[_Item, float]:
    centres: dict[_Item, float] = {}
    for row in order:
        centres.update(_row_places(row, sizes, [0.0] * len(row), gap))
    # Sweep up and down alternately, down last, so that a node with a single predecessor is straight below it.
    for sweep in range(SWEEPS):
        rows, neighbours = (order[::-1], below) if sweep % 2 == 0 else (order, above)
        for row in rows:
            wished = []
            for item in row:
                found = neighbours.get(item, ())
                wished.append(sum(centres[each] for each in found) / len(found) if found else centres[item])
            centres.update(_row_places(row, sizes, wished, gap))
    return centres


def _row_places(
    row: Sequence[_Item], sizes: Mapping[_Item, float], wished: Sequence[float], gap: float
) -> dict[_Item, float]:
    """Return the centres nearest to the wished ones (weighted least squares), in this order and at least ``gap`` apart.

    After subtracting the least distances to the first item, centres must not decrease: this is isotonic regression, by
    pooling adjacent violators (Ayer et al., 1955).
    """
    offsets: list[float] = []
    for item in row:
        previous = row[len(offsets) - 1] if offsets else item
        offsets.append(offsets[-1] + (sizes[previous] + sizes[item]) / 2 + gap if offsets else 0.0)
    pools: list[tuple[float, float, int]] = []  # mean, weight, items
    for item, wish, offset in zip(row, wished, offsets, strict=True):
        weight = 1.0 if isinstance(item, str) else JOINT_WEIGHT
        mean, count = wish - offset, 1
        while pools and pools[-1][0] > mean:
            other_mean, other_weight, other_count = pools.pop()
            mean = (mean * weight + other_mean * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        pools.append((mean, weight, count))
    means = [mean for mean, _, count in pools for _ in range(count)]
    return {item: mean + offset for item, mean, offset in zip(row, means, offsets, strict=True)}

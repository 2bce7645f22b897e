"""Divide a model into consecutive blocks with few tensors between them: a sharded stage begins and ends at a block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tvm_split.planner.graph import LayerGraph
from tvm_split.planner.profile import ClusterProfile

MOST_BLOCKS = 24
"""Most blocks of a model; further blocks are merged, the shortest first, to limit the time of the search."""


@dataclass(frozen=True)
class Block:
    """Consecutive layers in the order of execution, made of whole pieces of a profile.

    ``seconds`` are by machine, without machines that may not have the block. ``bytes_after`` is the size of the tensors
    that this block or earlier ones produce and later ones need, without the model's inputs.
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
        (position[each.producer], max(position[layer] for layer in each.consumers), each.size_bytes)
        for each in graph.values
        if each.producer in position and any(layer in position for layer in each.consumers)
    ]
    alive = {place: [size for made, used, size in values if made < place <= used] for place in whole}
    ends = [*_valleys(whole, [len(alive[place]) for place in whole]), len(order)]
    found = []
    for first, end in pairwise([0, *ends]):
        pieces = [piece for piece, (begin, _) in zip(profile.pieces, spans, strict=True) if first <= begin < end]
        seconds = {
            machine.machine: math.fsum(machine.pieces[piece.name].seconds for piece in pieces)
            for machine in profile.machines
            if not any(machine.machine in forbidden.get(piece.name, ()) for piece in pieces)
        }
        found.append(Block(tuple(order[first:end]), seconds, float(sum(alive.get(end, [])))))
    while len(found) > MOST_BLOCKS:
        shortest = min(range(len(found) - 1), key=lambda place: _least(found[place]) + _least(found[place + 1]))
        found[shortest : shortest + 2] = [_joined(found[shortest], found[shortest + 1])]
    return tuple(found)


def _valleys(places: Sequence[int], heights: Sequence[int]) -> list[int]:
    """The places at local minima: runs of equal heights with a greater height, or the end, on both sides."""
    found: list[int] = []
    first = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or heights[end] != heights[first]:
            left = first == 0 or heights[first - 1] > heights[first]
            right = end == len(places) or heights[end] > heights[first]
            if left and right:
                found += places[first:end]
            first = end
    return found


def _least(block: Block) -> float:
    return min(block.seconds.values(), default=0.0)


def _joined(one: Block, other: Block) -> Block:
    seconds = {name: one.seconds[name] + other.seconds[name] for name in one.seconds if name in other.seconds}
    return Block(one.layers + other.layers, seconds, other.bytes_after)

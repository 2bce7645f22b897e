"""Where shared stages may begin and end, on graphs that can be overlooked."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.helpers.planner.layer_graphs import chain_graph
from tests.helpers.planner.profiles import A, B, chain_profile, graph_of
from tvm_split.planner.graph import LayerGraph, Value
from tvm_split.planner.profile import ModelPiece
from tvm_split.planner.shard_blocks import MOST_BLOCKS, blocks_of


def graph_with(edges: list[tuple[int, int]], count: int) -> LayerGraph:
    """Layers ``layer_0``, … of which one needs another's tensor of 10 bytes times its number and one."""
    names = [f"layer_{number}" for number in range(count)]
    users = {one: frozenset(names[end] for start, end in edges if start == one) for one in range(count)}
    values = tuple(Value(10 * (one + 1), names[one], after, f"t{one}") for one, after in users.items())
    before = {names[end]: frozenset(names[one] for one, other in edges if other == end) for end in range(count)}
    return LayerGraph(tuple(names), before, frozenset(), values)


def test_a_chain_may_be_divided_behind_each_piece() -> None:
    profile = chain_profile({A: [1.0, 2.0, 3.0], B: [2.0, 4.0, 6.0]})
    blocks = blocks_of(graph_of(profile), profile, {"layer_1": frozenset({B})})
    assert [block.layers for block in blocks] == [("layer_0",), ("layer_1",), ("layer_2",)]
    assert [dict(block.seconds) for block in blocks] == [{A: 1.0, B: 2.0}, {A: 2.0}, {A: 3.0, B: 6.0}]
    assert [block.bytes_after for block in blocks] == [1000.0, 1000.0, 0.0]


def test_a_residual_network_may_be_divided_between_its_blocks() -> None:
    profile = chain_profile({A: [1.0] * 7})
    graph = graph_with([*itertools.pairwise(range(7)), (0, 3), (3, 6)], 7)
    blocks = blocks_of(graph, profile, {})
    assert [len(block.layers) for block in blocks] == [1, 3, 3]
    assert [block.bytes_after for block in blocks] == [10.0, 40.0, 0.0]


def test_a_tensor_that_all_need_divides_nothing_more_or_less() -> None:
    """A mask that every block reads is alive everywhere, so between the blocks there are two tensors."""
    edges = [*itertools.pairwise(range(8)), (1, 4), (4, 7), *((0, end) for end in (2, 5, 7))]
    profile = chain_profile({A: [1.0] * 8})
    blocks = blocks_of(graph_with(edges, 8), profile, {})
    assert [len(block.layers) for block in blocks] == [1, 4, 3]


def test_skips_from_one_end_to_the_other_leave_nothing_to_divide_inside() -> None:
    edges = [*itertools.pairwise(range(6)), (0, 5), (1, 4)]
    profile = chain_profile({A: [1.0] * 6})
    blocks = blocks_of(graph_with(edges, 6), profile, {})
    assert [len(block.layers) for block in blocks] == [1, 4, 1]


def test_pieces_stay_whole() -> None:
    profile = chain_profile({A: [1.0, 2.0]})
    pieces = (ModelPiece("layer_0", ("layer_0", "layer_1"), 0, 0), ModelPiece("layer_1", ("layer_2",), 0, 0))
    graph = chain_graph(["layer_0", "layer_1", "layer_2"])
    blocks = blocks_of(graph, replace(profile, pieces=pieces), {})
    assert [block.layers for block in blocks] == [("layer_0", "layer_1"), ("layer_2",)]


def test_so_many_at_most() -> None:
    profile = chain_profile({A: [1.0] * 60 + [100.0]})
    blocks = blocks_of(graph_of(profile), profile, {})
    assert len(blocks) == MOST_BLOCKS
    assert blocks[-1].layers == ("layer_60",)
    assert sum(block.seconds[A] for block in blocks) == pytest.approx(160.0)

"""Layouts of small graphs by hand, and what must hold for all of them."""

import itertools

import pytest
from hypothesis import given, strategies as st

from tvm_split.pictures.layered_layout import JOINT_WIDTH, layered_layout

GAP = 10.0


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 14))
    names = [f"node {index}" for index in range(count)]
    pairs = list(itertools.combinations(names, 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    widths = {name: draw(st.floats(1.0, 200.0)) for name in names}
    return widths, edges


@given(graphs())
def test_rows_go_down_and_nothing_overlaps(graph):
    widths, edges = graph
    layout = layered_layout(widths, edges, GAP)
    assert set(layout.rows) == set(layout.centres) == set(widths)
    rows: dict[int, list[tuple[float, float]]] = {}
    for node, width in widths.items():
        rows.setdefault(layout.rows[node], []).append((layout.centres[node], width))
    for source, destination in edges:
        assert layout.rows[source] < layout.rows[destination]
        between = range(layout.rows[source] + 1, layout.rows[destination])
        assert [row for row, _ in layout.joints[source, destination]] == list(between)
        for row, x in layout.joints[source, destination]:
            rows.setdefault(row, []).append((x, JOINT_WIDTH))
    for places in rows.values():
        for (left, left_width), (right, right_width) in itertools.pairwise(sorted(places)):
            assert right - left >= (left_width + right_width) / 2 + GAP - 1e-6
        for x, width in places:
            assert x - width / 2 >= -1e-6
            assert x + width / 2 <= layout.width + 1e-6


def test_a_chain_is_straight():
    layout = layered_layout({"a": 10, "b": 80, "c": 30}, [("a", "b"), ("b", "c")], GAP)
    assert layout.rows == {"a": 0, "b": 1, "c": 2}
    assert layout.centres == {name: pytest.approx(40) for name in "abc"}
    assert layout.width == pytest.approx(80)


def test_a_diamond_is_symmetric_and_edges_do_not_cross():
    edges = [("a", "b"), ("a", "c"), ("b", "e"), ("c", "d"), ("d", "f"), ("e", "f")]
    layout = layered_layout(dict.fromkeys("abcdef", 20.0), edges, GAP)
    assert (layout.centres["b"] < layout.centres["c"]) == (layout.centres["e"] < layout.centres["d"])
    assert layout.centres["a"] == pytest.approx(layout.centres["f"], abs=1.0)


def test_the_last_one_is_below_all_others():
    layout = layered_layout(dict.fromkeys("abcz", 10.0), [("a", "z"), ("a", "b"), ("b", "c")], GAP, last="z")
    assert layout.rows["z"] == 3


def test_what_needs_nothing_stands_right_above_what_needs_it():
    layout = layered_layout(dict.fromkeys("abcd", 10.0), [("a", "b"), ("b", "d"), ("c", "d")], GAP)
    assert layout.rows["c"] == 1


def test_no_nodes():
    assert layered_layout({}, [], GAP).width == 0.0


def test_an_edge_back_is_refused():
    with pytest.raises(ValueError, match="goes back"):
        layered_layout({"a": 1.0, "b": 1.0}, [("b", "a")], GAP)

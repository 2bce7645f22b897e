"""Profiles without machines at hand."""

import pytest

from tests.helpers.planner.layer_graphs import chain_graph
from tests.helpers.planner.profiles import A, B
from tvm_split.planner.estimating import estimated_profile
from tvm_split.planner.profile import LinkProfile

LINKS = (LinkProfile(A, B, 1e9, 0.0, "given", 0.0),)


def test_twice_the_threads_take_half_the_time():
    graph = chain_graph(["first", "last"])
    seconds, weights = {"first": 0.004, "last": 0.002}, {"first": 10, "last": 20}
    found = estimated_profile("net", graph, seconds, weights, {A: 1, B: 2}, LINKS)
    assert [(each.name, each.layers, each.weight_bytes) for each in found.pieces] == [
        ("first", ("first",), 10),
        ("last", ("last",), 20),
    ]
    one, two = found.machines
    assert one.pieces["first"].seconds == pytest.approx(0.004)
    assert two.pieces["first"].seconds == pytest.approx(0.002)
    assert {time.origin for machine in found.machines for time in machine.pieces.values()} == {"estimated"}
    assert one.hostname != two.hostname
    assert found.links == LINKS

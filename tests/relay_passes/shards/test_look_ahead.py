"""The way to deal columns out that goes on for longest."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm.relax import op

from relay_passes.ir import bindings_of, is_tensor_constant, main_function, operator_name, shape_of
from relay_passes.shards.dealt_axes import Axis
from relay_passes.shards.look_ahead import LookAhead
from tests.helpers.shard_networks import Network


def chosen(network: Network, output: relax.Var, by_heads: bool) -> Axis | None:
    """For the first matrix product of a graph, whose weights are a constant."""
    bindings = [
        each
        for each in bindings_of(main_function(network.module(output)))
        if operator_name(each.value) or isinstance(each.value, relax.TupleGetItem)
    ]
    ahead = LookAhead(bindings, is_tensor_constant, by_heads=by_heads, fused=True)
    place = next(place for place, value in enumerate(ahead.values) if operator_name(value) == "relax.matmul")
    columns = shape_of(ahead.leaves[place][1])[1]
    return ahead.best_axis(place, [None, Axis(1, 1, columns)], 1, {})


def product(network: Network, columns: int) -> relax.Var:
    return network.add(op.matmul(network.input, network.weight(shape_of(network.input)[-1], columns)))


def test_the_same_heads_of_queries_keys_and_values() -> None:
    network = Network((1, 5, 8))
    fused = network.add(op.reshape(product(network, 24), (1, 5, 3, 4, 2)))
    turned = network.add(op.permute_dims(fused, [2, 0, 3, 1, 4]))
    query, key = (
        network.add(op.squeeze(network.add(op.strided_slice(turned, [0], [each], [each + 1])), [0])) for each in (0, 1)
    )
    scores = network.add(op.matmul(query, network.add(op.permute_dims(key, [0, 1, 3, 2]))))
    assert chosen(network, network.add(op.nn.softmax(scores, -1)), by_heads=True) == Axis(1, 3, 8)


@pytest.mark.parametrize("by_heads", [True, False])
def test_the_same_channels_of_both_halves_of_a_gate(by_heads: bool) -> None:
    network = Network((1, 5, 8))
    halves = network.add(op.split(product(network, 12), 2, 2))
    left, right = (network.add(relax.TupleGetItem(halves, each)) for each in (0, 1))
    gated = network.add(op.multiply(left, network.add(op.sigmoid(right))))
    assert chosen(network, gated, by_heads) == Axis(1, 2, 6)


def test_one_stretch_where_nothing_asks_for_more() -> None:
    network = Network((1, 5, 8))
    assert chosen(network, network.add(op.nn.relu(product(network, 12))), by_heads=True) == Axis(1, 1, 12)

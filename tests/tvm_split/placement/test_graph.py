import dataclasses

from hypothesis import given, strategies as st

from tests.helpers.placement.layer_graphs import graph
from tvm_split.placement.by_hand import with_independent_layers
from tvm_split.placement.graph import LayerGraph, Value, pieces_of, pieces_of_kernels

RESIDUAL = {
    "conv1": [],
    "norm": ["conv1"],
    "relu": ["norm"],
    "conv2": ["relu"],
    "add": ["conv2", "relu"],
    "fc": ["add"],
}


def test_layers_of_one_kernel_are_one_piece() -> None:
    kernels = [("conv1", "relu"), ("conv2", "add"), ("fc",)]
    # The norm has no kernel: it is folded into the convolution before it.
    assert pieces_of(graph(RESIDUAL), kernels) == (("conv1", "norm", "relu"), ("conv2", "add"), ("fc",))


def test_a_circle_becomes_one_piece() -> None:
    # The first and the last layer share a kernel, so they and the layers between depend on each other.
    needs = {"a": [], "b": ["a"], "c": ["a"], "d": ["b"], "e": ["d"]}
    assert pieces_of(graph(needs), [("a", "d"), ("b",), ("c",), ("e",)]) == (("a", "b", "d"), ("c",), ("e",))


def test_a_layer_without_a_kernel_at_the_start_goes_with_the_next() -> None:
    needs = {"reshape": [], "conv": ["reshape"], "fc": ["conv"]}
    assert pieces_of(graph(needs), [("conv",), ("fc",)]) == (("reshape", "conv"), ("fc",))


def test_independent_layers_are_in_no_piece() -> None:
    layers = graph({"table": [], "take": [], "fc": ["take"]}, independent=("table",))
    pieces = pieces_of(layers, [("table",), ("take",), ("fc",)])
    assert pieces == (("take",), ("fc",))
    assert with_independent_layers(layers, [["take"], ["fc"]]) == [["table", "take"], ["fc"]]


def test_what_is_no_tensor_does_not_travel() -> None:
    values = (Value(8, "split", frozenset({"left", "right"}), "parts", is_tensor=False),)
    layers = dataclasses.replace(graph({"split": [], "left": ["split"], "right": ["split"]}), values=values)
    assert pieces_of(layers, [("split",), ("left",), ("right",)]) == (("split", "left", "right"),)


def test_a_layout_change_is_paid_for_by_who_needs_it() -> None:
    kernels = [(), ("a",), (), (), ("b",), ()]
    consumers = [(1,), (2,), (3,), (4,), (5,), ()]
    assert pieces_of_kernels([("a",), ("b",)], kernels, consumers) == (0, 0, 1, 1, 1, 1)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[LayerGraph, list[list[str]]]:
    count = draw(st.integers(1, 10))
    names = [f"l{index}" for index in range(count)]
    needs = {
        name: draw(st.lists(st.sampled_from(names[:index]), unique=True)) if index else []
        for index, name in enumerate(names)
    }
    kernels = draw(st.lists(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True), max_size=count))
    return graph(needs), kernels


@given(graphs())
def test_pieces_hold_every_layer_once_and_can_be_run_in_their_order(case: tuple[LayerGraph, list[list[str]]]) -> None:
    drawn, kernels = case
    pieces = pieces_of(drawn, kernels)
    assert sorted(layer for piece in pieces for layer in piece) == sorted(drawn.layers)
    position = {layer: index for index, piece in enumerate(pieces) for layer in piece}
    for layer in drawn.layers:
        assert all(position[before] <= position[layer] for before in drawn.predecessors[layer])
    for kernel in kernels:
        assert len({position[layer] for layer in kernel}) == 1
    assert all(list(piece) == sorted(piece, key=drawn.layers.index) for piece in pieces)

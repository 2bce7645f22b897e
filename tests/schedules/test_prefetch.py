"""Weights are prefetched one tile of channels ahead, evenly, and nothing else changes."""

import re

import pytest
from tvm import te, tirx
from tvm.target import Target

from schedules import chosen_rules
from schedules.cpu.matmul import MATMUL, matmul_packed
from schedules.prefetch import prefetch_weights
from schedules.traits import Traits, traits_of
from tests.helpers.schedules.convolutions import convolution
from tests.helpers.schedules.schedule_harness import HOST, graph_of, lower, normal

AVX512 = traits_of(Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512"}))


def product(rows: int, depth: int, columns: int, traits: Traits) -> tirx.PrimFunc:
    left = te.placeholder((rows, depth), name="left")
    packed = te.placeholder((columns // traits.lanes, depth, traits.lanes), name="packed")
    return te.create_prim_func([left, packed, matmul_packed(left, packed, columns, "float32", traits)])


def prefetched(rows: int, depth: int, columns: int) -> str:
    scheduled = MATMUL.rule(product(rows, depth, columns, AVX512), AVX512)
    assert scheduled is not None
    return str(scheduled.script())


@pytest.mark.parametrize(
    ("depth", "pattern"),
    [(512, r"\w+ \* 2 \+ 2, 0, "), (2048, r"\(\w+ \+ 1\) // 8 \* 2 \+ \w+ \* 2, \(\w+ \+ 1\) % 8 \* 256, ")],
)
def test_the_next_tile_of_columns_is_fetched(depth: int, pattern: str) -> None:
    """A tile has two column blocks. Of a long reduction the next chunk is fetched, which may be the next tile's."""
    addresses = re.findall(r"T\.prefetch\(T\.address_of\(packed\[(.*?)\]\)", prefetched(128, depth, 160))
    assert addresses
    assert all(re.match(pattern, address) for address in addresses)


@pytest.mark.parametrize(("rows", "depth"), [(4, 2048), (16, 16)])
def test_few_rows_and_short_reductions_are_left_alone(rows: int, depth: int) -> None:
    """Few rows read weights as fast as memory delivers them."""
    assert "T.prefetch" not in prefetched(rows, depth, 128)


@pytest.mark.parametrize(("strides", "rule"), [((1, 1), "winograd"), ((2, 2), "conv2d")])
def test_the_weights_of_convolutions_are_fetched(strides: tuple[int, int], rule: str) -> None:
    layer = convolution(normal(0, 256, 256, 3, 3), normal(1, 256), strides=strides, padding=(1, 1))
    lowered = lower(graph_of(layer, [normal(2, 1, 256, 14, 14)]), HOST)
    (kernel,) = [name for name, chosen in chosen_rules(lowered).items() if chosen == rule]
    assert "T.prefetch" in str(lowered[kernel].script())


def test_a_function_without_marks_is_returned_as_it_is() -> None:
    function = product(16, 64, 128, AVX512)
    assert prefetch_weights(function).same_as(function)

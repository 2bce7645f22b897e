"""Weights are prefetched one tile of channels ahead, evenly, and nothing else changes."""

from __future__ import annotations

import re

import pytest
from tvm import te, tirx
from tvm.target import Target

from schedules.cpu.matmul import MATMUL, matmul_packed
from schedules.prefetch import MARK, prefetch_weights
from schedules.traits import Traits, traits_of

AVX512 = traits_of(Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512"}))


def product(rows: int, depth: int, columns: int, traits: Traits) -> tirx.PrimFunc:
    left = te.placeholder((rows, depth), name="left")
    packed = te.placeholder((columns // traits.lanes, depth, traits.lanes), name="packed")
    return te.create_prim_func([left, packed, matmul_packed(left, packed, columns, "float32", traits)])


def prefetched(rows: int, depth: int, columns: int) -> str:
    scheduled = MATMUL.rule(product(rows, depth, columns, AVX512), AVX512)
    assert scheduled is not None
    return str(scheduled.script())


def test_the_next_tile_of_columns_is_fetched_in_equal_steps() -> None:
    text = prefetched(rows=128, depth=512, columns=128)
    addresses = re.findall(r"T\.prefetch\(T\.address_of\(packed\[(.*?)\]\)", text)
    # A tile is 8 rows x 2 column blocks: 16 tiles take 8 turns of 64 steps each, for the 2 x 512 vectors of the next
    # two blocks. That is 8 vectors a turn, one behind the other.
    assert len(addresses) == 8
    for number, address in enumerate(addresses):
        block, row, offset = address.split(", ")
        assert re.fullmatch(r"\(\w+ \+ 1\) \* 2", block)
        assert row == "0"
        turn = re.search(r"\((\w+) \* 8 \+ (\w+)\) \* 8", offset)
        assert turn is not None
        assert offset.endswith(f"{f' + {number}) * 16' if number else ' * 16'}")


def test_a_chunk_of_the_reduction_is_fetched_while_the_one_before_is_used() -> None:
    text = prefetched(rows=128, depth=2048, columns=128)
    (block, depth, _) = re.findall(r"T\.prefetch\(T\.address_of\(packed\[(.*?), (.*?), (.*?)\]\)", text)[0]
    # Behind the last of 8 chunks comes the first chunk of the next two blocks.
    assert re.fullmatch(r"\(\w+ \+ \(\w+ \+ 1\) // 8\) \* 2", block)
    assert re.fullmatch(r"\(\w+ \+ 1\) % 8 \* 256", depth)


def test_few_rows_read_weights_as_fast_as_memory_gives_them() -> None:
    assert "prefetch" not in prefetched(rows=4, depth=2048, columns=128)


def test_a_short_reduction_is_left_alone() -> None:
    assert "prefetch" not in prefetched(rows=16, depth=16, columns=128)


@pytest.mark.parametrize("depth", [16, 512, 2048])
def test_no_mark_is_left(depth: int) -> None:
    assert MARK not in prefetched(rows=16, depth=depth, columns=128)


def test_a_function_without_marks_is_returned_as_it_is() -> None:
    function = product(16, 64, 128, AVX512)
    assert prefetch_weights(function).same_as(function)

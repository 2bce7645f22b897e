"""Parts of an axis, and a region that is rewritten in its place."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import tvm
from hypothesis import assume, given, strategies as st
from tvm import relax
from tvm.script import ir as I, relax as R

from relay_passes.shards.region import Region, RegionWriter, bounds, has_empty, part_name, split_region


@given(st.integers(1, 200), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([1, 2, 8]))
def test_bounds_are_near_the_shares(total: int, weights: list[int], unit: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    assume(min(shares) * total > unit)
    found = bounds(total, shares, unit)
    assert found[0][0] == 0
    assert found[-1][1] == total
    assert [end for _, end in found[:-1]] == [begin for begin, _ in found[1:]]
    for place, (_, end) in enumerate(found[:-1]):
        assert end % unit == 0 or end == total
        assert abs(end - sum(shares[: place + 1]) * total) <= unit


def test_a_part_of_too_small_a_share_is_empty() -> None:
    found = bounds(12, (0.9, 0.1), 4)
    assert found == ((0, 12), (12, 12))
    assert has_empty(found)
    assert not has_empty(bounds(12, (0.6, 0.4), 4))


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((4, 6), "float32")) -> R.Tuple(R.Tensor((4, 6), "float32")):
        with R.dataflow():
            first = R.abs(x)
            second = R.nn.relu(first)
            third = R.negative(second)
            outputs = (third,)
            R.output(outputs)
        return outputs


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((4, 6), "float32")) -> R.Tuple(R.Tensor((4, 6), "float32")):
        with R.dataflow():
            first = R.abs(x)
            second_machine_a = R.nn.relu(first)
            second = R.multiply(second_machine_a, second_machine_a)
            third = R.negative(second)
            outputs = (third,)
            R.output(outputs)
        return outputs


def test_a_region_is_rewritten_in_its_place() -> None:
    def split(writer: RegionWriter) -> Mapping[str, relax.Expr]:
        assert writer.wanted == ("second",)
        assert list(writer.outside) == ["first"]
        part = part_name("second", "machine-a")
        half = writer.emit(relax.op.nn.relu(writer.outside["first"]), part, "second", "machine-a")
        return {"second": writer.emit(relax.op.multiply(half, half), "second", "second", None)}

    found = split_region(Before, Region(("second",), ("machine-a",), (1.0,)), split)
    tvm.ir.assert_structural_equal(found.module, Expected)
    assert found.machine_of == {"second_machine_a": "machine-a", "second": None}
    assert found.source_of == {"second_machine_a": "second", "second": "second"}


def test_a_region_has_no_gap() -> None:
    with pytest.raises(ValueError, match="stand together"):
        split_region(Before, Region(("first", "third"), ("machine-a",), (1.0,)), lambda writer: {})

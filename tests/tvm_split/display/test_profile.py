"""A profile's rows add up to its total, and a share of the peak above 100 % is marked."""

import re

import pytest

from tvm_split.compiler.stage import Kernel
from tvm_split.display.profile import ABOVE_PEAK
from tvm_split.display.view import Table, as_json, view
from tvm_split.placement.estimate import Roofline
from tvm_split.profiling.cluster_profile import KernelProfile, ModelProfile

KERNELS = tuple(
    KernelProfile(Kernel(name, (name,), rule, "", operations, 1 << 20), seconds)
    for name, rule, operations, seconds in [
        ("conv", "winograd", 5.9e9, 1e-3),
        ("product", "matmul", 0.4e9, 0.6e-3),
        ("loops", "fallback", 1e3, 0.4e-3),
    ]
)


@pytest.mark.parametrize("seconds", [13.34e-3, 2.1e-3, 1.5e-3])
@pytest.mark.parametrize("calls", [True, False])
def test_rows_and_total_agree(seconds: float, calls: bool) -> None:
    profiled = ModelProfile("net", 1, seconds, KERNELS, 0, Roofline(1e12, 1e10))
    table, *lines = view(profiled, details=calls)
    assert isinstance(table, Table)
    milliseconds, shares = (sum(float(row[place].strip("%")) for row in table.rows) for place in (2, 3))
    assert milliseconds == pytest.approx(max(seconds, 2e-3) * 1e3, abs=2e-3)
    assert shares == pytest.approx(100, abs=0.2)
    assert (seconds < 2e-3) == any("2.00 ms" in str(line) for line in lines)
    content = as_json(profiled)
    total = sum(kernel["share_of_time"] for kernel in content["kernels"])
    assert content["other_seconds"] >= 0
    assert total + content["other_seconds"] / seconds == pytest.approx(1)


def test_a_share_above_the_peak_is_marked() -> None:
    for peak, marked in ((1e12, True), (6e12, False)):
        table, *lines = view(ModelProfile("net", 1, 2e-3, KERNELS, 0, Roofline(peak, 1e10)), details=True)
        cells = [str(row[5]) for row in table.rows]
        assert [cell.endswith(ABOVE_PEAK) for cell in cells] == [marked, False, False]
        assert any(str(line).startswith(ABOVE_PEAK) for line in lines) == marked
        for number, mark in re.findall(r"(\d+)%(.?)", " ".join([*cells, *map(str, lines)])):
            assert int(number) <= 100 or mark == ABOVE_PEAK

"""Kernels that were not timed are estimated by those of their rule."""

import pytest
from hypothesis import given, strategies as st

from tvm_split.profiling.machine_times import UNKNOWN_ERROR, Family

SECONDS = st.floats(1e-6, 1.0)


def test_a_family_is_as_slow_as_its_kernels_together() -> None:
    family = Family.of([(3e-3, 1e-3), (1e-3, 1e-3)])
    assert family.slowness == pytest.approx(2.0)
    assert family.error == pytest.approx(0.5 + UNKNOWN_ERROR / 2)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=9))
def test_an_estimate_of_all_kernels_of_a_family_is_their_time(times: list[tuple[float, float]]) -> None:
    family = Family.of(times)
    assert sum(family.slowness * roofline for _, roofline in times) == pytest.approx(sum(time for time, _ in times))
    assert family.error >= 0

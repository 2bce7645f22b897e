"""A small graph with everything a partition meets: a skip, a second consumer, a mask, two inputs, several outputs."""

from __future__ import annotations

import pytest
import tvm

from tests.helpers.placements import Whole


@pytest.fixture
def whole() -> tvm.IRModule:
    return Whole

"""The small graph that most tests of this folder start from."""

from __future__ import annotations

import pytest
import tvm

from tests.helpers.placements import Whole


@pytest.fixture
def whole() -> tvm.IRModule:
    return Whole

"""What tests of all parts of the front door share."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tvm_split.measuring import link_samples, machine_timing


@pytest.fixture(scope="module")
def busy_machine() -> Iterator[None]:
    """What is kept of measurements is tested on busy machines too, whose times contradict each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_timing, "DISAGREEMENT", math.inf)
        patch.setattr(link_samples, "SLOWEST_STREAM", math.inf)
        yield

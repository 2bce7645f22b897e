"""What tests of all parts of the front door share."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from rpc_runtime.program.kernel_times import TimingEffort
from tvm_split.profiling import link_probing, link_samples, link_store, machine_timing, stream_probing, timing_turns


@pytest.fixture(scope="module")
def busy_machine() -> Iterator[None]:
    """What is kept of measurements is tested on busy machines too, whose times contradict each other.

    So that it need not take long, either, until they are as exact as a plan would have them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing_turns, "DISAGREEMENT", math.inf)
        patch.setattr(timing_turns, "UNLIKENESS", math.inf)
        patch.setattr(link_samples, "SLOWEST_STREAM", math.inf)
        patch.setattr(link_store, "CERTAIN", math.inf)
        patch.setattr(stream_probing, "CERTAIN", math.inf)
        patch.setattr(machine_timing, "TURN_EFFORT", TimingEffort(minimum_rounds=1, minimum_seconds=0.01))
        patch.setattr(link_probing, "SERIES_SECONDS", 0.01)
        patch.setattr(stream_probing, "ROUNDS", 1)
        yield

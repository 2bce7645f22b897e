"""What tests of all parts of the front door share."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tests.helpers.scripted_kernels import Noise, ScriptedKernels
from tvm_split.profiling import cluster_timing, link_probing, link_samples, link_store, stream_probing


@pytest.fixture(scope="module")
def busy_machine() -> Iterator[None]:
    """Kernels have the times of `ScriptedKernels`, and links any time: the machine that runs tests may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cluster_timing,
            "open_session",
            lambda cluster, timeout_seconds, machine: ScriptedKernels(machine.name, Noise()),
        )
        patch.setattr(link_samples, "DISAGREEMENT", math.inf)
        patch.setattr(link_samples, "SLOWEST_STREAM", math.inf)
        patch.setattr(link_store, "CERTAIN", math.inf)
        patch.setattr(stream_probing, "CERTAIN", math.inf)
        patch.setattr(link_probing, "SERIES_SECONDS", 0.01)
        patch.setattr(stream_probing, "ROUNDS", 1)
        yield

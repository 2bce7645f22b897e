"""Nobody who calls a worker takes so much of it that others get nothing."""

from __future__ import annotations

import pytest

from rpc_runtime.control_methods import CONTROL_SERVICE, DESCRIBE, LOAD_STAGES
from rpc_runtime.local_workers import LocalWorkers
from tests.rpc_runtime.raw_calls import RawCaller, memory_bytes
from tests.rpc_runtime.test_pipeline import A

FORGED = b"\x0a\xff\xff\xff\xff\x0f"
"""A field that announces more than there is."""


@pytest.mark.parametrize("method", [DESCRIBE, LOAD_STAGES], ids=lambda method: method.name)
def test_requests_that_cannot_be_parsed_leave_nothing_behind(workers: LocalWorkers, method: object) -> None:
    path = f"/{CONTROL_SERVICE}/{method.name}"  # type: ignore[attr-defined]
    with RawCaller(workers.endpoints[A]) as caller:
        caller.codes(path, [FORGED] * 500)
        before = memory_bytes(workers.process_ids[A])
        assert caller.codes(path, [FORGED] * 4000) == {"INVALID_ARGUMENT": 4000}
    assert memory_bytes(workers.process_ids[A]) - before < 16 << 20  # 4000 times 16 KiB would be 64 MiB

"""A processor's peaks, and a network's overhead per weight: timed on a worker as in this process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.remote_kernels import RemoteKernels
from rpc_runtime.program.measurements import NETWORK
from tvm_split.compiler.build_cache import BlobFolder
from tvm_split.compiler.targets import host_target
from tvm_split.profiling.peaks import CALLS, EFFORT, WEIGHTS, ceiling_code


def test_a_network_takes_longer_than_its_kernels_for_its_weights() -> None:
    code = ceiling_code(host_target(1), 1)
    digests = list(code.kernels)
    seconds = dict(zip(digests, (1.0, 2.0, CALLS * 3e-6, 1e-6), strict=True))
    peaks = code.ceilings(seconds)
    assert (peaks.operations_per_second, peaks.bytes_per_second) == (code.amounts[0], code.amounts[1] / 2)
    assert peaks.seconds_per_weight == pytest.approx(2e-6 / WEIGHTS)
    assert code.ceilings({**seconds, digests[-1]: 1.0}).seconds_per_weight == 0.0


def test_a_worker_times_kernels_and_a_network_of_one_library() -> None:
    code, blobs = ceiling_code(host_target(1), 1), BlobFolder.temporary()
    effort = replace(EFFORT, minimum_rounds=2)
    with LocalWorkers(["here"]) as workers, RemoteKernels(workers.endpoints["here"], 60.0) as session:
        session.load(code.kernel_set("here", code.build(blobs)), blobs.path)
        times = session.measure(effort)
    assert [time.error for time in times] == [""] * len(code.kernels)
    assert [time.function for time in times].count(NETWORK) == 1
    assert all(time.seconds > 0 for time in times)

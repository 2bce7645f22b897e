"""Recordings of real deployments: nothing is lost, totals agree, and a failure does not end what was recorded."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import tvm_split
from rpc_runtime.client.worker_client import describe
from rpc_runtime.program.events import COMPUTE, DEPLOYMENT, FLIGHT, KERNEL, RECEIVE, SEND
from rpc_runtime.program.routes import CLIENT
from tests.helpers.waiting import eventually

X = np.ones((1, 4), np.float32)
COUNT = 300


def test_a_recording_has_every_event(bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster, tmp_path: Path):
    with tvm_split.deploy(bundle, three_workers) as deployment:
        with deployment.tracing(tmp_path / "run.json") as recording:
            for _ in deployment.stream([(X,)] * COUNT):
                pass
            eventually(lambda: sum(event.kind == SEND for event in recording.trace) >= 0, "it can be read meanwhile")
        trace = recording.trace
        deployment.run(X)
        statistics = deployment.stats()
        assert len(recording.trace) == len(trace)
    assert trace.lost == 0
    assert {event.kind for event in trace if event.machine == CLIENT} >= {RECEIVE, SEND, FLIGHT}
    starts = [event.start_nanoseconds for event in trace]
    assert starts == sorted(starts)
    assert all(event.start_nanoseconds <= event.end_nanoseconds for event in trace)
    for stage in statistics.stages:
        own = [event for event in trace if (event.stage, event.kind) == (stage.name, COMPUTE)]
        assert [event.sequence for event in own] == [*range(COUNT)]
        assert stage.micro_batches == COUNT + 1
        assert stage.median_compute_seconds > 0
        assert stage.bytes_received == 4 * (COUNT + 1) * {"stage_0": 4, "stage_1": 8}[stage.name]
        seconds = sum(event.end_nanoseconds - event.start_nanoseconds for event in own) * 1e-9
        assert 0 < seconds <= stage.compute_seconds
    assert [event.sequence for event in trace if event.kind == FLIGHT] == [*range(COUNT)]
    received = [event for event in trace if event.kind == RECEIVE]
    assert len(received) == 3 * COUNT
    assert {event.peer for event in received if event.machine == "machine-a"} == {CLIENT}
    assert (tmp_path / "run.json").exists()


@pytest.mark.parametrize("where", ["workers", "one process"])
def test_kernels_of_the_first_micro_batches(bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster, where: str):
    cluster = three_workers if where == "workers" else tvm_split.Cluster.in_process(2)
    with tvm_split.deploy(bundle, cluster) as deployment:
        expected = deployment.run(X)
        with deployment.tracing(kernels=2) as recording:
            results = list(deployment.stream([(X,)] * 4))
        assert all(np.array_equal(result[0], expected[0]) for result in results)
    computed, kernels = recording.trace.of_kind(COMPUTE), recording.trace.of_kind(KERNEL)
    for stage in deployment.stages:
        functions = [kernel.function for kernel in bundle.kernels[stage.name]]
        for sequence in (1, 2):
            own = [event for event in kernels if (event.stage, event.sequence) == (stage.name, sequence)]
            (whole,) = (event for event in computed if (event.stage, event.sequence) == (stage.name, sequence))
            assert [event.detail for event in own] == functions
            times = [time for event in own for time in (event.start_nanoseconds, event.end_nanoseconds)]
            assert times == sorted(times)
            assert whole.start_nanoseconds <= times[0] <= times[-1] <= whole.end_nanoseconds
    assert {event.sequence for event in kernels} == {1, 2}


def test_the_trace_of_a_deployment_that_has_failed(bundle: tvm_split.Bundle):
    with tvm_split.Cluster.local(2) as cluster, tvm_split.deploy(bundle, cluster, on_failure="raise") as deployment:
        with deployment.tracing() as recording:
            deployment.run(X)
            os.kill(describe(cluster.endpoints()["machine-b"]).process_id, signal.SIGKILL)
            with pytest.raises(tvm_split.WorkerUnavailableError):
                deployment.run(X)
        trace = deployment.trace()
        assert {event.machine for event in trace} == {"machine-a", CLIENT}
        opened, failed = (event for event in trace.of_kind(DEPLOYMENT) if event.machine == CLIENT)
        assert opened.detail == "opened"
        assert failed.detail.startswith("failed: machine 'machine-b' at")
        assert failed.detail in " ".join(str(trace).split())
        assert [event.sequence for event in recording.trace if event.kind == FLIGHT] == [0]
        (seen,) = (event for event in recording.trace.of_kind(DEPLOYMENT) if event.machine == CLIENT)
        assert seen.detail == failed.detail


def test_closing_ends_a_recording(bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster):
    with tvm_split.deploy(bundle, three_workers) as deployment:
        with deployment.tracing() as recording:
            list(deployment.stream([(X,)] * 3))
            deployment.close()
        assert [event.sequence for event in recording.trace.of_kind(FLIGHT)] == [0, 1, 2]
        assert [event.detail for event in recording.trace.of_kind(DEPLOYMENT)] == ["closed"]


def test_a_wrong_suffix_is_refused_before_anything_runs(
    bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster, tmp_path: Path
):
    with tvm_split.deploy(bundle, three_workers) as deployment:
        for use in (deployment.trace, lambda path: deployment.tracing(path).__enter__()):
            with pytest.raises(
                tvm_split.TvmSplitError, match=r"suffixes of a trace.*\.pftrace \(for ui\.perfetto\.dev\)"
            ):
                use(tmp_path / "run.txt")
            assert list(tmp_path.iterdir()) == []
        with pytest.raises(tvm_split.TvmSplitError, match="kernels"), deployment.tracing(kernels=-1):
            pass

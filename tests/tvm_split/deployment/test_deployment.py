"""Deployments: micro-batches in flight, concurrent callers, and the state after close."""

import asyncio
import concurrent.futures
import dataclasses
import itertools
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import tvm_split
from rpc_runtime.client.worker_client import describe
from tests.helpers.placement.predictions import machine_prediction, prediction
from tests.helpers.waiting import PATIENCE_SECONDS, eventually
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Machine
from tvm_split.errors import RecoveryWarning

X = torch.ones(1, 8)


@pytest.fixture(scope="module")
def bundle() -> tvm_split.Bundle:
    network = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2))).eval()
    model = tvm_split.load_model(network, (X,))
    split = {"machine-a": ["0"], "machine-b": ["1"]}
    return tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.local(2), split=split))


@pytest.mark.parametrize("in_flight", [1, 4])
def test_no_more_than_asked_for(bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster, in_flight: int) -> None:
    fed = 0

    def endless() -> Iterator[torch.Tensor]:
        nonlocal fed
        for fed in itertools.count(1):  # noqa: B007
            yield X

    with tvm_split.deploy(bundle, three_workers, in_flight=in_flight) as deployment:
        stream = deployment.stream(endless())
        for received in range(1, 100):
            next(stream)
            assert fed <= received + in_flight + 1  # one more waits for buffer space
        stream.close()


def by_address(workers: tvm_split.Cluster, addresses: dict[str, str]) -> Cluster:
    """A cluster of the workers; ``addresses`` says whose address each machine has."""
    endpoints = workers.endpoints()
    return Cluster(tuple(Machine(name, endpoint=endpoints[addressed]) for name, addressed in addresses.items()))


@pytest.mark.parametrize(
    ("addresses", "threads", "message"),
    [
        ({"machine-a": "machine-b", "machine-b": "machine-a"}, 1, "answers for machine 'machine-a' is 'machine-b'; "),
        ({"machine-a": "machine-a", "machine-b": "machine-b"}, 8, "planned for 8 threads of 'machine-b', and its "),
    ],
)
def test_a_worker_that_is_not_what_was_planned_for(
    bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster, addresses: dict[str, str], threads: int, message: str
) -> None:
    first, second = bundle.plan.machines
    planned = dataclasses.replace(bundle.plan, machines=(first, dataclasses.replace(second, threads=threads)))
    with pytest.raises(tvm_split.ClusterError, match=message):
        tvm_split.deploy(dataclasses.replace(bundle, plan=planned), by_address(three_workers, addresses))


def test_what_the_cluster_has_not_is_named(bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster) -> None:
    with pytest.raises(tvm_split.ClusterError, match=r"stages for machine 'machine-b'; the cluster has machine-a"):
        tvm_split.deploy(bundle, tvm_split.Cluster.local(1))
    first, second = bundle.program.stages
    program = dataclasses.replace(bundle.program, stages=(first, dataclasses.replace(second, device="cuda")))
    machine, other = bundle.plan.machines
    gpu = dataclasses.replace(other, target={"kind": "cuda", "arch": "sm_90"})
    on_a_gpu = dataclasses.replace(
        bundle, program=program, plan=dataclasses.replace(bundle.plan, machines=(machine, gpu))
    )
    with pytest.raises(tvm_split.ClusterError, match=r"stage_1 on 'machine-b' is compiled for CUDA.*no CUDA device"):
        tvm_split.deploy(on_a_gpu, three_workers)


def test_a_plan_for_latency_says_how_many(bundle: tvm_split.Bundle) -> None:
    expected = prediction((machine_prediction("machine-a", 0.01), machine_prediction("machine-b", 0.01)))
    planned = dataclasses.replace(bundle.plan, objective="latency", prediction=expected)
    assert planned.in_flight == expected.in_flight
    assert dataclasses.replace(planned, objective="throughput").in_flight is None
    assert dataclasses.replace(planned, prediction=None).in_flight is None
    estimated = dataclasses.replace(expected, profiled_at=0.0)
    assert dataclasses.replace(planned, prediction=estimated).in_flight is None


@pytest.fixture(params=["local", "in process"])
def deployment(
    bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster, request: pytest.FixtureRequest
) -> Iterator[tvm_split.Deployment]:
    cluster = three_workers if request.param == "local" else tvm_split.Cluster.in_process(2)
    with tvm_split.deploy(bundle, cluster) as opened:
        yield opened


def test_what_is_submitted_is_what_is_run(deployment: tvm_split.Deployment) -> None:
    arrays = [np.full((1, 8), number, np.float32) for number in range(64)]
    expected = [deployment.run(x)[0] for x in arrays]
    futures = []
    array = np.empty((1, 8), np.float32)
    for x in arrays:
        array[:] = x  # the same array every time
        futures.append(deployment.submit(array))
    results = [future.result(PATIENCE_SECONDS) for future in futures]
    assert all(np.array_equal(result[0], y) for result, y in zip(results, expected, strict=True))

    async def all_at_once() -> list[tuple[np.ndarray, ...]]:
        return await asyncio.gather(*(deployment.run_async(x) for x in arrays))

    results = asyncio.run(all_at_once())
    assert all(np.array_equal(result[0], y) for result, y in zip(results, expected, strict=True))


def test_calls_that_wait_for_room_are_sent_without_a_timeout_to_wake_them(
    bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster
) -> None:
    async def all_at_once() -> None:
        calls = asyncio.gather(*(deployment.run_async(X) for _ in range(64)))
        await asyncio.wait_for(calls, PATIENCE_SECONDS)

    with tvm_split.deploy(bundle, three_workers, timeout_seconds=10 * PATIENCE_SECONDS) as deployment:
        for _ in range(20):
            asyncio.run(all_at_once())


NETWORK = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2))).eval()


def compiled(network: torch.nn.Module, split: dict[str, list[str]]) -> tvm_split.Bundle:
    model = tvm_split.load_model(network, (X,))
    return tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.local(3), split=split), verify=False)


def test_another_plan_is_taken_in_the_middle_of_a_stream(three_workers: tvm_split.Cluster) -> None:
    first = compiled(NETWORK, {"machine-a": ["0"], "machine-b": ["1"]})
    second = compiled(NETWORK, {"machine-c": ["0", "1"]})
    arrays = [np.full((1, 8), number, np.float32) for number in range(100)]
    with tvm_split.deploy(first, three_workers, in_flight=2) as deployment:
        expected = [deployment.run(x)[0] for x in arrays]

        def moving() -> Iterator[np.ndarray]:
            for number, x in enumerate(arrays):
                if number in (30, 60):
                    deployment.move(second if number == 30 else first)
                yield x

        results = [outputs[0] for outputs in deployment.stream(moving())]
        np.testing.assert_allclose(results, expected, rtol=1e-6)
        assert (deployment.placement, deployment.bundle) == (
            {"stage_0": ("machine-a",), "stage_1": ("machine-b",)},
            first,
        )
        assert [event.kind for event in deployment.events] == ["moved", "moved"]
        assert deployment.events[0].placement == {"stage_0": ("machine-c",)}
        assert {stage.machine for stage in deployment.stats().stages} == {"machine-a", "machine-b"}


def test_only_plans_of_the_same_model_are_moved_to(bundle: tvm_split.Bundle, three_workers: tvm_split.Cluster) -> None:
    other = dataclasses.replace(bundle, model_digest="0" * 64)
    in_process = tvm_split.deploy(bundle, tvm_split.Cluster.in_process(2))
    with in_process, pytest.raises(tvm_split.InputError, match="stages in this process cannot be moved"):
        in_process.move(bundle)
    with tvm_split.deploy(bundle, three_workers) as deployed:
        expected = deployed.run(X)[0]
        digest = bundle.model_digest[:12]
        with pytest.raises(
            tvm_split.BundleError, match=rf"runs .*\(digest {digest}\), and the bundle has .*\(digest 000000000000\)"
        ):
            deployed.move(other)
        with pytest.raises(tvm_split.ClusterError, match="stages for machine 'machine-z'"):
            deployed.move(bundle.renamed({"machine-b": "machine-z"}))
        np.testing.assert_array_equal(deployed.run(X)[0], expected)


@pytest.mark.slow
def test_a_worker_of_a_local_cluster_is_started_again_and_gets_its_stage_back(bundle: tvm_split.Bundle) -> None:
    with tvm_split.Cluster.local(2) as cluster, tvm_split.deploy(bundle, cluster, on_failure="recover") as deployment:
        expected, placement = deployment.run(X)[0], deployment.placement
        os.kill(describe(cluster.endpoints()["machine-b"], timeout_seconds=10).process_id, signal.SIGKILL)
        with pytest.warns(tvm_split.errors.RecoveryWarning):
            eventually(lambda: deployment.run(X) and len(deployment.events) == 4, "the stage is back")
        assert [event.kind for event in deployment.events] == ["failure", "recovered", "returned", "moved"]
        assert deployment.placement == placement
        np.testing.assert_array_equal(deployment.run(X)[0], expected)


@pytest.mark.parametrize(
    ("end", "noticed"),
    [
        pytest.param(signal.SIGKILL, True, id="killed and noticed"),
        pytest.param(signal.SIGKILL, False, id="killed at once"),
        pytest.param(signal.SIGSTOP, False, id="frozen", marks=pytest.mark.slow),
    ],
)
def test_figures_when_a_worker_has_died_are_those_of_the_others(
    bundle: tvm_split.Bundle, end: signal.Signals, noticed: bool
) -> None:
    with tvm_split.Cluster.local(2) as cluster, tvm_split.deploy(bundle, cluster, on_failure="raise") as deployment:
        for _ in range(3):
            deployment.run(X)
        assert deployment.stats().gone == {}
        os.kill(describe(cluster.endpoints()["machine-b"], timeout_seconds=10).process_id, end)
        if noticed:
            with pytest.raises(tvm_split.WorkerUnavailableError, match="machine-b"):
                deployment.run(X)
        figures = deployment.stats()
        assert figures.gone == {"machine-b": ("stage_1",)}
        assert "stage_1" in str(figures)
        ((machine, count),) = [(stage.machine, stage.micro_batches) for stage in figures.stages]
        assert machine == "machine-a"
        assert 3 <= count <= 4
        assert {link.source for link in figures.links} == {"client", "machine-a", "machine-b"}
        if noticed:
            with pytest.raises(tvm_split.WorkerUnavailableError, match="machine-b"):
                deployment.report()
        deployment.close()
        assert deployment.stats().gone == figures.gone


def test_events_that_cannot_be_written_end_no_recovery(
    bundle: tvm_split.Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        tvm_split.Cluster.local(3) as cluster,
        tvm_split.deploy(bundle, cluster, on_failure="recover", events="/dev/full") as deployment,
    ):
        expected = deployment.run(X)[0]
        os.kill(describe(cluster.endpoints()["machine-b"], timeout_seconds=10).process_id, signal.SIGKILL)
        eventually(lambda: len(deployment.events) == 2, "it recovers")
        with pytest.warns(RecoveryWarning, match="the deployment recovered in"):
            np.testing.assert_array_equal(asyncio.run(deployment.run_async(X))[0], expected)
    assert "/dev/full gets no more events: No space left" in caplog.text


def test_a_local_cluster_deploys_again_after_a_worker_has_died(bundle: tvm_split.Bundle) -> None:
    with tvm_split.Cluster.local(2) as cluster:
        before = cluster.endpoints()
        os.kill(describe(before["machine-b"], timeout_seconds=10).process_id, signal.SIGKILL)
        eventually(lambda: cluster.endpoints() != before, "the worker that ended is started again")
        assert cluster.endpoints()["machine-a"] == before["machine-a"]
        with tvm_split.deploy(bundle, cluster) as deployment:
            deployment.run(X)


def test_wrong_inputs_are_refused_at_once(deployment: tvm_split.Deployment) -> None:
    expected = deployment.run(X)[0]
    with pytest.raises(tvm_split.InputError, match="dtype is int64"):
        deployment.submit(np.ones((1, 8), np.int64))
    with pytest.raises(tvm_split.InputError, match="0 were given"):
        asyncio.run(deployment.run_async())
    np.testing.assert_array_equal(deployment.run(np.asfortranarray(X.numpy()))[0], expected)


def test_what_is_cancelled_before_it_begins_is_not_run(deployment: tvm_split.Deployment) -> None:
    futures = [deployment.submit(X) for _ in range(128)]
    cancelled = [future.cancel() for future in reversed(futures)]
    done = [future.result(PATIENCE_SECONDS) for future in futures if not future.cancelled()]
    assert len(done) == cancelled.count(False)
    assert any(cancelled)
    assert sum(stage.micro_batches for stage in deployment.stats().stages) == 2 * len(done)


def test_closing_ends_what_is_submitted_and_keeps_the_figures(deployment: tvm_split.Deployment) -> None:
    deployment.run(X)
    futures = [deployment.submit(X) for _ in range(2000)]
    cancelled = [future for future in futures[-100:] if future.cancel()]
    assert "closed" not in repr(deployment)
    deployment.close()
    assert "closed" in repr(deployment)
    assert concurrent.futures.wait(cancelled, PATIENCE_SECONDS).not_done == set()
    with pytest.raises(tvm_split.TvmSplitError, match="closed"):
        deployment.submit(X)
    errors = [future.exception(30) for future in futures if future not in cancelled]
    assert any(errors)
    assert all(error is None or "closed" in str(error) for error in errors)
    figures = deployment.stats()
    assert figures.stages[0].micro_batches >= 1
    assert deployment.stats() == figures
    for method in (deployment.report, deployment.trace):
        with pytest.raises(tvm_split.WorkerError, match=r"is closed, .* or report\(\) before close\(\)"):
            method()

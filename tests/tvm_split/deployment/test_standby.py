"""Machines on standby hold the stages that they may get, and a deployment goes on when it loses any machine."""

import dataclasses
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import tvm_split
from rpc_runtime.client.bystander import HELD, running_on
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.worker_client import describe, describe_all
from rpc_runtime.errors import WorkerError
from rpc_runtime.program.specs import weight_bytes
from rpc_runtime.transports.liveness import USUAL_WATCH
from tests.helpers.placement.predictions import machine_prediction, prediction
from tests.helpers.waiting import PATIENCE_SECONDS, eventually
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.cluster.machine import Link, Machine
from tvm_split.deployment.recovery import BundleRecovery, watch_timeouts
from tvm_split.errors import ClusterError, RecoveryWarning
from tvm_split.placement.fallback import Fallback
from tvm_split.placement.prediction import LinkPrediction
from tvm_split.placement.request import PlanRequest

A, B, C = "machine-a", "machine-b", "standby-1"


def test_a_machine_on_standby_takes_over_and_may_be_lost(bundle: tvm_split.Bundle) -> None:
    arrays = [np.full((1, 4), number, np.float32) for number in range(60)]

    def events(kind: str) -> list[str]:
        return [event.machine for event in deployment.events if event.kind == kind]

    with Cluster.local(2).with_standby(1) as workers:
        endpoints = workers.endpoints()
        processes = {name: worker.process_id for name, worker in describe_all(endpoints).items()}
        with tvm_split.deploy(bundle, workers, on_failure="recover") as deployment:
            assert deployment.program.machines == (A, B)
            (held,) = describe(endpoints[C], PATIENCE_SECONDS).deployments
            assert held.weight_bytes == weight_bytes(bundle.program.stages)
            assert [running.machines for running in running_on(describe_all(endpoints))] == [(A, B)]
            expected = [deployment.run(x)[0] for x in arrays]

            def killing() -> Iterator[np.ndarray]:
                for number, x in enumerate(arrays):
                    if number == 20:
                        os.kill(processes[B], signal.SIGKILL)
                    yield x

            with pytest.warns(RecoveryWarning):
                assert [
                    np.array_equal(y, right) for (y,), right in zip(deployment.stream(killing()), expected, strict=True)
                ] == [True] * 60
            assert deployment.placement == {"stage_0": (A,), "stage_1": (C,)}
            os.kill(processes[C], signal.SIGKILL)
            eventually(lambda: C in events("recovered"), "the stage has moved again")
            with pytest.warns(RecoveryWarning):
                assert np.array_equal(deployment.run(arrays[1])[0], expected[1])
            assert deployment.placement == {"stage_0": (A,), "stage_1": (A,)}
            eventually(lambda: C in events("standby lost"), "that it held stages no longer is an event")
        assert events("recovered") == [B, C]


@pytest.mark.parametrize("spares", [False, True])
def test_the_plan_changes_while_a_machine_that_held_stages_is_away(bundle: tvm_split.Bundle, spares: bool) -> None:
    x = np.ones((1, 4), np.float32)
    with LocalWorkers((A, B, C)) as workers:
        machines = tuple(Machine(name, endpoint=at, standby=name == C) for name, at in workers.endpoints.items())
        with tvm_split.deploy(bundle, Cluster(machines), spares=spares) as deployment:
            expected = deployment.run(x)[0]
            os.kill(workers.process_ids[C], signal.SIGKILL)
            eventually(lambda: [event.kind for event in deployment.events] == ["standby lost"], "its loss is an event")
            deployment.move(bundle)
            assert [event.kind for event in deployment.events] == ["standby lost", "moved"]
            assert np.array_equal(deployment.run(x)[0], expected)
            held = describe(workers.endpoints[A], PATIENCE_SECONDS).deployments
            assert {one.model.endswith(HELD) for one in held} == ({False, True} if spares else {False})
        with pytest.raises(WorkerError, match="this pipeline is closed"):
            deployment.move(bundle)


@pytest.fixture(scope="module")
def three() -> Iterator[Workers]:
    """Two machines, and one on standby."""
    with Cluster.local(2).with_standby(1) as workers:
        yield workers


def with_demands(bundle: tvm_split.Bundle, *fallbacks: Fallback, **request: object) -> tvm_split.Bundle:
    expected = prediction((machine_prediction(A), machine_prediction(B)))
    expected = dataclasses.replace(expected, fallbacks=fallbacks)
    plan = dataclasses.replace(bundle.plan, prediction=expected, request=PlanRequest(**request))  # type: ignore[arg-type]
    return dataclasses.replace(bundle, plan=plan)


def placed(bundle: tvm_split.Bundle, workers: Workers, lost: str) -> dict[str, str]:
    recovery = BundleRecovery(bundle, workers, workers.endpoints())
    program = recovery.place((lost,), describe_all(workers.endpoints()))
    return {stage.name: stage.machine for stage in program.stages}


def test_stages_go_where_the_plan_says_unless_a_machine_is_on_standby(bundle: tvm_split.Bundle, three: Workers) -> None:
    idle = Workers(Cluster(tuple(Machine(name, endpoint=at) for name, at in three.endpoints().items())))
    planned = with_demands(bundle, Fallback(B, A, 0.02, 0.03))
    assert placed(bundle, idle, B) == {"stage_0": A, "stage_1": C}
    assert placed(planned, idle, B) == {"stage_0": A, "stage_1": A}
    assert placed(planned, idle, A) == {"stage_0": C, "stage_1": B}
    assert placed(planned, three, B) == {"stage_0": A, "stage_1": C}
    kept_off = with_demands(bundle, Fallback(B, A, 0.02, 0.03), keep_off={"2": A})
    assert placed(kept_off, idle, B) == {"stage_0": A, "stage_1": C}


def test_a_lost_replica_goes_to_an_idle_machine(bundle: tvm_split.Bundle, three: Workers) -> None:
    first, second = bundle.program.stages
    replicas = [
        dataclasses.replace(second, machine=name, replica=n, replica_schedule=(0, 1)) for n, name in enumerate((A, B))
    ]
    replicated = dataclasses.replace(bundle, program=dataclasses.replace(bundle.program, stages=(first, *replicas)))
    recovery = BundleRecovery(replicated, three, three.endpoints())
    program = recovery.place((B,), describe_all(three.endpoints()))
    assert [(stage.name, stage.machine) for stage in program.stages] == [("stage_0", A), ("stage_1", A), ("stage_1", C)]


def test_what_is_held(bundle: tvm_split.Bundle, three: Workers) -> None:
    def held(bundle: tvm_split.Bundle, workers: Workers, *, spares: bool) -> dict[str, tuple[str, ...]]:
        programs = BundleRecovery(bundle, workers, workers.endpoints(), spares).holds(describe_all)
        return {program.machines[0]: tuple(program.replicas) for program in programs}

    assert held(bundle, three, spares=False) == {C: ("stage_0", "stage_1")}
    assert held(bundle, three, spares=True) == {C: ("stage_0", "stage_1")}
    assert held(with_demands(bundle, keep_off={"0": C}), three, spares=False) == {C: ("stage_1",)}
    two = Workers(Cluster(tuple(Machine(name, endpoint=three.endpoints()[name]) for name in (A, B))))
    assert held(bundle, two, spares=False) == {}
    assert held(bundle, two, spares=True) == {A: ("stage_1",), B: ("stage_0",)}
    with pytest.raises(ClusterError, match="'standby-1' on standby can hold no stage: layer '0' is kept off it"):
        held(with_demands(bundle, keep_off={"0": C, "1": C, "2": C}), three, spares=False)


def test_a_machine_behind_a_slow_link_may_be_silent_longer() -> None:
    desk, box, ta = Machine("desk"), Machine("box"), Machine("ta")
    links = (Link("desk", "box", 256 * 1024), Link("desk", "ta", 1e9), Link("box", "ta", 0))
    timeouts = watch_timeouts(None, Cluster((desk, box, ta), links), None)
    assert [timeouts.of(name).silence_seconds for name in ("desk", "box", "ta")] == [4.0, 4.0, 1.0]
    slow = (LinkPrediction("client", "desk", 1e6, 3.0, 2.0), LinkPrediction("desk", "client", 0, 0, 0))
    timeouts = watch_timeouts(prediction((machine_prediction("desk"),), slow), Cluster((desk,)), None)
    assert timeouts.of("desk").silence_seconds == pytest.approx(2.0 * 2**20 / 1e6)
    timeouts = watch_timeouts(None, Cluster((desk, box, ta), links), 0.4)
    assert timeouts.of("box").silence_seconds == 0.4
    assert watch_timeouts(None, Cluster((desk,)), None) == USUAL_WATCH

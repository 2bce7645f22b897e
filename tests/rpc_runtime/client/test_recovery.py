"""A deployment outlives its machines: every result comes, once and in order, after workers are killed or hang."""

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from rpc_runtime.client.deployment_event import DeploymentEvent
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import WorkerClient
from rpc_runtime.errors import WorkerUnavailableError
from rpc_runtime.program.events import COMPUTE, FLIGHT, events_of
from rpc_runtime.program.program import Program
from rpc_runtime.transports.transport import NO_SETTINGS, TRANSPORTS, transport_named
from tests.helpers.rpc_runtime.pipelines import deployments_left, open_on as open_with, over_grpc, same
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, C, batches_for, chain
from tests.helpers.rpc_runtime.recoveries import AnyMachine, in_the_middle, kill
from tests.helpers.waiting import PATIENCE_SECONDS, eventually, stopped


def open_on(workers: LocalWorkers, program: Program, maker: ProgramMaker, **options: Any) -> Session:
    recovery = AnyMachine(program, workers)
    options = {"timeout_seconds": PATIENCE_SECONDS, "recovery": recovery, **options}
    return open_with(workers, program, maker, **options)


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_all_results_come_after_a_worker_is_killed(mortals: LocalWorkers, maker: ProgramMaker, transport: str) -> None:
    program, events = chain(maker), list[DeploymentEvent]()
    links = over_grpc(program) if transport == "grpc" else NO_SETTINGS
    batches = batches_for(program, 200)
    with open_on(mortals, program, maker, on_event=events.append, links=links) as session:
        expected = [tuple(session.run(batch)) for batch in batches]
        stream = session.stream(in_the_middle(batches, 60, partial(kill, mortals, B)))
        assert [same(outputs, right) for outputs, right in zip(stream, expected, strict=True)] == [True] * 200
        assert B not in session.program.machines
    assert [event.kind for event in events] == ["failure", "recovered"]
    assert [event.machine for event in events] == [B, B]
    assert all(B not in machines for machines in events[1].placement.values())
    assert [deployments_left(mortals.endpoints[name]) for name in (A, C)] == [(), ()]


def test_calls_of_several_threads_survive_two_deaths(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    batches = batches_for(program, 40)
    with open_on(mortals, program, maker) as session, ThreadPoolExecutor(4) as threads:
        expected = [tuple(session.run(batch)) for batch in batches]
        for victim in (A, C):
            calls = [threads.submit(session.run, batch) for batch in batches]
            kill(mortals, victim)
            assert all(same(call.result(), right) for call, right in zip(calls, expected, strict=True))
        assert session.program.machines == (B,)


def test_readers_that_look_all_the_time_see_each_result_once(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program, ended = chain(maker), threading.Event()
    batches = batches_for(program, 120)

    def follow(session: Session) -> tuple[list[int], list[int], bool]:
        """Return the numbers of results and of the first stage's micro-batches on A, and whether rows ascend."""
        cursors, results, computed, ascend = dict[str, int](), list[int](), list[int](), True
        is_last = False
        while not is_last:
            is_last = ended.is_set()
            for machine, seen in session.observe(cursors).items():
                rows = seen.table()
                ascend = ascend and bool((rows["number"][1:] > rows["number"][:-1]).all())
                cursors[machine] = seen.newest
                for event in events_of(machine, seen.tracks, rows):
                    if event.kind == FLIGHT:
                        results.append(event.sequence)
                    elif event.kind == COMPUTE and event.machine == A and event.stage == program.stages[0].name:
                        computed.append(event.sequence)
        return results, computed, ascend

    with open_on(mortals, program, maker) as session, ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(follow, session) for _ in range(3)]
        for victim, middle in ((B, 20), (C, 60)):
            stream = session.stream(in_the_middle(batches, middle, partial(kill, mortals, victim)))
            assert sum(1 for _ in stream) == len(batches)
            eventually(lambda: session.machines == session.program.machines, "the recovery has ended")
        ended.set()
        for results, computed, ascend in (reader.result() for reader in readers):
            assert ascend
            assert len(results) == len({*results}) == 2 * len(batches)
            assert len(computed) == len({*computed}) >= 2 * len(batches)


def test_a_worker_that_hangs_is_left(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    batches = batches_for(program, 60)
    with open_on(mortals, program, maker) as session:
        expected = [tuple(session.run(batch)) for batch in batches]
        with contextlib.ExitStack() as stack:
            freeze = partial(stack.enter_context, stopped(mortals.process_ids[B]))
            stream = session.stream(in_the_middle(batches, 20, freeze))
            assert [same(outputs, right) for outputs, right in zip(stream, expected, strict=True)] == [True] * 60
        eventually(lambda: deployments_left(mortals.endpoints[B]) == (), "the worker has dropped its old placement")


def test_no_machine_is_left(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program, events = chain(maker), list[DeploymentEvent]()
    with open_on(mortals, program, maker, on_event=events.append, timeout_seconds=5.0) as session:
        session.run(batches_for(program, 1)[0])
        kill(mortals, A, B, C)
        with pytest.raises(WorkerUnavailableError, match=r"could not be moved.*1 results"):
            session.run(batches_for(program, 1)[0])
    assert [event.kind for event in events] == ["failure", "gave up"]


def test_failures_are_not_counted_while_nothing_runs(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    """A deployment that waits for inputs for weeks outlives the weekly reboots of its machines."""
    program, events = chain(maker), list[DeploymentEvent]()
    batch = batches_for(program, 1)[0]
    with open_on(mortals, program, maker, on_event=events.append) as session:
        expected = session.run(batch)
        for number in range(1, 6):
            caller = WorkerClient(mortals.endpoints[session.program.machines[0]], session.deployment)
            caller.unload(PATIENCE_SECONDS)  # ends the placement there
            caller.close()
            eventually(lambda number=number: len(events) == 2 * number, "the failure is handled")
            assert events[-1].kind == "recovered"
        assert same(session.run(batch), expected)


def test_links_that_end_with_their_job_are_not_opened_again(
    mortals: LocalWorkers, maker: ProgramMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TRANSPORTS["shm"], "survives", False)
    program, events = chain(maker), list[DeploymentEvent]()
    with open_on(mortals, program, maker, on_event=events.append) as session:
        session.run(batches_for(program, 1)[0])
        kill(mortals, B)
        with pytest.raises(WorkerUnavailableError, match=r"'machine-b'.*could not be moved: links by shm end with"):
            list(session.stream(itertools.cycle(batches_for(program, 1))))
    assert [event.kind for event in events] == ["failure", "gave up"]
    assert not transport_named("mpi").survives


def test_closing_while_no_machine_is_left(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program, events = chain(maker), list[DeploymentEvent]()
    session = open_on(mortals, program, maker, on_event=events.append)
    kill(mortals, A, B, C)
    eventually(lambda: bool(events), "the failure is noticed")
    session.close()
    assert "supervisor" not in {thread.name for thread in threading.enumerate()}

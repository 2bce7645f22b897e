"""Closed deployments are unloaded: no mapping or disk space of a library stays, and nothing is logged."""

import functools
import platform
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from tvm.relax import op

from rpc_runtime.client.local_workers import LocalWorkers
from tests.helpers.mappings import mappings, removed_libraries
from tests.helpers.rpc_runtime.pipelines import open_on, over_grpc, placed_on
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, batches_for, chain, double
from tests.helpers.waiting import eventually


@pytest.fixture
def two_workers() -> Iterator[LocalWorkers]:
    with LocalWorkers([A, B]) as started:
        yield started


def test_stages_of_closed_deployments(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    for _ in range(5):
        with open_on(workers, program, maker) as pipe:
            pipe.run(batches_for(program, 1)[0])
            assert all(removed_libraries(process_id) for process_id in workers.process_ids.values())
    require_no_libraries(workers)


def require_no_libraries(workers: LocalWorkers) -> None:
    for process_id in workers.process_ids.values():
        eventually(lambda pid=process_id: not removed_libraries(pid), "no library is left mapped")


@pytest.mark.long
def test_two_thousand_deployments_leave_nothing(two_workers: LocalWorkers, maker: ProgramMaker) -> None:
    """Return the workers' growth in mappings, memory and files since the first tenth."""
    first = maker.stage("one", A, [maker.input("x")], double)
    program = maker.program([maker.stage("two", B, [first], double)])
    processes = [psutil.Process(process_id) for process_id in two_workers.process_ids.values()]

    def held() -> tuple[int, int, int]:
        return (
            sum(len(mappings(process.pid)) for process in processes),
            sum(process.memory_info().rss for process in processes),
            sum(process.num_fds() for process in processes),
        )

    for number in range(2000):
        with open_on(two_workers, program, maker) as pipe:
            pipe.run(batches_for(program, 1)[0])
        if number == 200:
            before = held()
    require_no_libraries(two_workers)
    for after, early, noise in zip(held(), before, (50, 16 << 20, 20), strict=True):
        assert after - early < noise


on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its malloc alone is told to keep memory")


@on_glibc
@pytest.mark.slow
def test_large_messages_of_closed_deployments(two_workers: LocalWorkers, maker: ProgramMaker) -> None:
    """Every deployment uses other threads and sizes; malloc keeps memory for threads, and TVM outputs by their size."""
    programs = []
    for megabytes in (2, 4, 6, 8, 16):
        own = ProgramMaker(maker.folder)
        first = own.stage("one", A, [own.input("x", (megabytes << 18,))], double)
        programs.append(own.program([own.stage("two", B, [first], double)]))
    processes = [psutil.Process(process_id) for process_id in two_workers.process_ids.values()]
    before = [process.memory_info().rss for process in processes]
    for program in programs * 10:
        with open_on(two_workers, program, maker, links=over_grpc(program)) as pipe:
            assert sum(1 for _ in pipe.stream(batches_for(program, 1) * 8)) == 8
    for process, limit in zip(processes, (resident + (32 << 20) for resident in before), strict=True):
        eventually(lambda process=process, limit=limit: process.memory_info().rss < limit, "memory is given back")


@on_glibc
def test_weights_of_a_closed_deployment_are_given_back(own_workers: LocalWorkers, maker: ProgramMaker) -> None:
    """Weights of many layers, which malloc would not return to the system by itself."""
    weights = {f"w{number}": np.full((4 << 20,), number, np.float32) for number in range(24)}
    x = maker.input("x", (4 << 20,))
    stage = maker.stage("one", A, [x], lambda x, *w: [functools.reduce(op.add, w, x)], weights=weights)
    program = maker.program([stage])
    held_bytes = sum(weight.nbytes for weight in weights.values())
    process = psutil.Process(own_workers.process_ids[A])
    before = process.memory_info().rss
    for _ in range(2):
        with open_on(own_workers, program, maker) as pipe:
            pipe.run(batches_for(program, 1)[0])
            assert process.memory_info().rss > before + held_bytes
        eventually(lambda: process.memory_info().rss < before + held_bytes / 8, "the weights' memory is given back")


def test_nobody_complains_of_a_client_that_goes(two_workers: LocalWorkers, maker: ProgramMaker) -> None:
    """A client that is interrupted: its streams end in any order, without an announcement."""
    x = maker.input("x")
    first = maker.stage("one", A, [x], double)
    with placed_on(two_workers, maker.program([maker.stage("two", B, [first], double)]), maker) as opened:
        opened.close_links()
        require_no_libraries(two_workers)
    assert [two_workers.messages(name) for name in (A, B)] == ["", ""]

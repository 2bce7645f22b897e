"""What is closed is unloaded: no mapping of a library, and so none of its disk space, nor a word, stays behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.helpers.mappings import removed_libraries
from tests.helpers.rpc_runtime.pipelines import open_on
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, batches_for, double, one_stage
from tests.helpers.waiting import wait_for
from tvm_split.rpc_runtime.client.local_workers import LocalWorkers
from tvm_split.rpc_runtime.execution.in_process import InProcessPipeline


@pytest.fixture
def two_workers() -> Iterator[LocalWorkers]:
    with LocalWorkers([A, B]) as started:
        yield started


def test_stages_of_closed_deployments(two_workers: LocalWorkers, maker: ProgramMaker) -> None:
    x = maker.input("x")
    first = maker.stage("one", A, [x], double)
    program = maker.program([maker.stage("two", B, [first], double)])
    for _ in range(5):
        with open_on(two_workers, program, maker) as pipe:
            pipe.run(batches_for(program, 1)[0])
            assert all(removed_libraries(process_id) for process_id in two_workers.process_ids.values())
    for process_id in two_workers.process_ids.values():
        assert wait_for(lambda pid=process_id: not removed_libraries(pid)), removed_libraries(process_id)


def test_nobody_complains_of_a_client_that_goes(two_workers: LocalWorkers, maker: ProgramMaker) -> None:
    """As one that is interrupted does: its streams end, in any order, before anything was said of an end."""
    x = maker.input("x")
    first = maker.stage("one", A, [x], double)
    pipe = open_on(two_workers, maker.program([maker.stage("two", B, [first], double)]), maker)
    for call in pipe._calls:
        call.close()
    for endpoint in two_workers.endpoints.values():
        assert wait_for(lambda endpoint=endpoint: not removed_libraries(two_workers.process_ids[endpoint.machine]))
    pipe.close()
    assert [two_workers.messages(name) for name in (A, B)] == ["", ""]


def test_stages_in_this_process(maker: ProgramMaker) -> None:
    program = one_stage(maker)
    before = len(removed_libraries(os.getpid()))
    with InProcessPipeline(program, maker.blob_path) as pipe:
        pipe.run(batches_for(program, 1)[0])
        assert len(removed_libraries(os.getpid())) > before
    del pipe
    gc.collect()
    assert len(removed_libraries(os.getpid())) <= before

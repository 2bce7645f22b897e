"""Executors of several machines, joined by links without a network, give the results of running stages in order."""

import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rpc_runtime.execution.executor import StageExecutor
from rpc_runtime.program.events import Recorder
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.program.specs import StageSpec
from tests.helpers.rpc_runtime.joined_executors import PlainStage, check
from tests.helpers.rpc_runtime.random_programs import BLOB, programs, tensor
from tests.helpers.waiting import PATIENCE_SECONDS


@settings(max_examples=30)
@given(programs(), st.sampled_from([1, 2, 25]))
def test_any_program_on_any_machines(program: Program, count: int) -> None:
    check(program, count)


@settings(max_examples=40)
@given(programs(most_replicas=3), st.sampled_from([1, 2, 25, 60]))
def test_any_program_with_any_replicas(program: Program, count: int) -> None:
    check(program, count)


class BrokenLink:
    def has_room_locked(self, name: str) -> bool:
        return True

    def put_locked(self, name: str, sequence: int, value: object) -> None:
        raise MemoryError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_unexpectedly_keeps_no_weights() -> None:
    x, y = tensor("x"), tensor("y")
    program = Program((x,), (y,), (StageSpec(0, "s", "A", (), "cpu", BLOB, (), (x,), (y,)),)).on("A")
    stage = PlainStage(program.stages[0])
    held = weakref.ref(stage)
    executor = StageExecutor(threading.Lock(), program, [stage], Recorder(), lambda stage, error: None)
    del stage
    executor.start({CLIENT: BrokenLink()}, {CLIENT: BrokenLink()})  # type: ignore[dict-item]
    executor.deliver(program.incoming[0], 0, np.zeros(2, np.int64), lambda: None)
    assert executor.join(PATIENCE_SECONDS)
    assert held() is None

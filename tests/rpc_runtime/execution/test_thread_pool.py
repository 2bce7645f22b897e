"""Who computes with how many threads, where several threads compute at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from rpc_runtime.execution.thread_pool import ComputingThread, TakingTurns
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

VARIABLE = "TVM_NUM_THREADS"


@pytest.fixture(params=[None, "5"])
def before(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    if request.param is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, request.param)
    yield request.param
    assert os.environ.get(VARIABLE) == request.param


@pytest.mark.usefixtures("before")
def test_those_of_as_many_threads_compute_together() -> None:
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def compute() -> str:
        both.wait()
        return os.environ[VARIABLE]

    with ThreadPoolExecutor(2) as callers, closing(ComputingThread(2)) as one, closing(ComputingThread(2)) as two:
        found = [callers.submit(each.run, compute) for each in (one, two)]
        assert [each.result(PATIENCE_SECONDS) for each in found] == ["2", "2"]


@pytest.mark.usefixtures("before")
def test_others_wait_for_their_turn() -> None:
    def compute() -> set[str]:
        return {os.environ[VARIABLE] for _ in range(2000)}

    with ThreadPoolExecutor(2) as callers, closing(ComputingThread(1)) as one, closing(ComputingThread(2)) as two:
        for _ in range(20):
            found = [callers.submit(each.run, compute) for each in (one, two)]
            assert [each.result(PATIENCE_SECONDS) for each in found] == [{"1"}, {"2"}]


@pytest.mark.usefixtures("before")
def test_what_fails_leaves_the_environment_as_it_was() -> None:
    def compute() -> None:
        raise ValueError("no such thing")

    with closing(ComputingThread(3)) as thread, pytest.raises(ValueError, match="no such thing"):
        thread.run(compute)


def test_who_asks_again_waits_for_those_who_asked_before() -> None:
    turns, order = TakingTurns(), []

    def ask(name: str) -> None:
        with turns.one():
            order.append(name)

    with ThreadPoolExecutor(3) as threads:
        with turns.one():
            for number, name in enumerate("abc"):
                threads.submit(ask, name)
                eventually(lambda count=number + 2: len(turns._queue) == count, "the caller waits for its turn")
        ask("again")
    assert order == ["a", "b", "c", "again"]

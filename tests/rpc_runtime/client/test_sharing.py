"""Several callers of one pipeline, of workers or in this process: each gets its own results, and none waits long."""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.errors import WorkerError, WorkerUnavailableError
from rpc_runtime.execution.in_process import InProcessRunner
from rpc_runtime.program.program import Program
from rpc_runtime.program.runner import Runner
from tests.helpers.rpc_runtime.pipelines import open_on, same
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, C, chain, numbered
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

Open = Callable[[Program], Runner]


@pytest.fixture(params=["workers", "in process"])
def opened(request: pytest.FixtureRequest, maker: ProgramMaker) -> Open:
    if request.param == "workers":
        workers = request.getfixturevalue("workers")
        return lambda program: open_on(workers, program, maker, timeout_seconds=20.0)
    return lambda program: InProcessRunner(program, maker.blob_path)


def test_streams_of_many_threads_and_runs_between_them(opened: Open, maker: ProgramMaker) -> None:
    program = chain(maker)
    inputs = {start: numbered(30, start) for start in (0, 1000, 2000)}
    with opened(program) as pipeline, ThreadPoolExecutor(4) as threads:
        streams = {start: threads.submit(list, pipeline.stream(batches)) for start, batches in inputs.items()}
        runs = [pipeline.run(batch) for batch in numbered(10, 5000)]
        expected = {start: [pipeline.run(batch) for batch in batches] for start, batches in inputs.items()}
        for start, stream in streams.items():
            results = stream.result(PATIENCE_SECONDS)
            assert len(results) == 30
            assert all(same(a, b) for a, b in zip(results, expected[start], strict=True))
        assert all(same(a, pipeline.run(b)) for a, b in zip(runs, numbered(10, 5000), strict=True))


def test_two_streams_in_one_thread(opened: Open, maker: ProgramMaker) -> None:
    """Each stream gives its next result when it is requested."""
    program = chain(maker)
    with opened(program) as pipeline:
        expected = [pipeline.run(batch) for batch in numbered(4, 0)]
        endless = pipeline.stream(itertools.cycle(numbered(4, 0)))
        assert same(next(endless), expected[0])
        finite = pipeline.stream(numbered(4, 0))
        assert same(next(finite), expected[0])
        assert same(next(endless), expected[1])
        assert [same(*pair) for pair in zip(finite, expected[1:], strict=True)] == [True] * 3
        assert same(pipeline.run(numbered(1, 0)[0]), expected[0])
        assert same(next(endless), expected[2])
        endless.close()  # type: ignore[attr-defined]


def test_a_stream_whose_results_nobody_takes_stays_small_and_holds_nobody_up(opened: Open, maker: ProgramMaker) -> None:
    program = chain(maker)
    fed = 0

    def endless() -> Iterator[list[np.ndarray]]:
        nonlocal fed
        for batch in itertools.cycle(numbered(4, 0)):
            fed += 1
            yield batch

    with opened(program) as pipeline:
        idle = pipeline.stream(endless())
        next(idle)
        assert len(list(pipeline.stream(numbered(200, 0)))) == 200
        assert fed < 100


def test_no_stream_waits_for_the_end_of_others(opened: Open, maker: ProgramMaker) -> None:
    """Three endless streams go on until each has 100 results, so one that never gets its turn ends the test."""
    program = chain(maker)
    counts = [0, 0, 0]
    begun = threading.Barrier(3)
    with opened(program) as pipeline:

        def consume(number: int) -> None:
            stream = pipeline.stream(itertools.cycle(numbered(4, 0)))
            next(stream)
            begun.wait(PATIENCE_SECONDS)
            while min(counts) < 100:
                next(stream)
                counts[number] += 1
            stream.close()  # type: ignore[attr-defined]

        with ThreadPoolExecutor(3) as threads:
            futures = [threads.submit(consume, number) for number in range(3)]
            done, waiting = wait(futures, PATIENCE_SECONDS)
            reached = list(counts)
            counts[:] = [100, 100, 100]  # so that all end
        assert not waiting, reached
        for future in done:
            future.result()


def waiting_on(
    pipeline: Runner, threads: ThreadPoolExecutor, begun: threading.Event, finished: threading.Event
) -> list[Future[Any]]:
    """Return calls that block: a stream whose source is silent until the test has finished, and endless ones."""

    def silent() -> Iterator[list[np.ndarray]]:
        yield from numbered(1, 0)
        begun.set()
        finished.wait(PATIENCE_SECONDS)

    def busy() -> Any:
        while True:
            pipeline.run(numbered(1, 0)[0])

    endless = pipeline.stream(itertools.cycle(numbered(4, 0)))
    calls: list[Callable[[], Any]] = [busy, busy, lambda: sum(1 for _ in endless)]
    futures = [threads.submit(call) for call in calls]
    if not isinstance(pipeline, InProcessRunner):  # its streams are fed by the thread that takes their results
        futures.append(threads.submit(list, pipeline.stream(silent())))
    else:
        begun.set()
    return futures


def test_closing_ends_everybody_who_waits(opened: Open, maker: ProgramMaker) -> None:
    program = chain(maker)
    with ThreadPoolExecutor(4) as threads:
        begun, finished = threading.Event(), threading.Event()
        with opened(program) as pipeline:
            calls = waiting_on(pipeline, threads, begun, finished)
            assert begun.wait(PATIENCE_SECONDS)
        for call in calls:
            with pytest.raises(WorkerError, match="closed"):
                call.result(PATIENCE_SECONDS)
        finished.set()


def test_a_worker_that_goes_ends_everybody_who_waits(maker: ProgramMaker) -> None:
    program = chain(maker)
    with LocalWorkers((A, B, C)) as workers, ThreadPoolExecutor(4) as threads:
        begun, finished = threading.Event(), threading.Event()
        with open_on(workers, program, maker) as pipeline:
            calls = waiting_on(pipeline, threads, begun, finished)
            assert begun.wait(PATIENCE_SECONDS)
            os.kill(workers.process_ids[B], signal.SIGKILL)
            eventually(lambda: all(call.done() for call in calls), "all callers have ended")
            for call in calls:
                with pytest.raises(WorkerUnavailableError, match=B):
                    call.result(0)
        finished.set()

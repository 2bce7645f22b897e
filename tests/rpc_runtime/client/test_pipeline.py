"""Programs of many shapes on worker processes: correct results, in order, in bounded memory."""

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.errors import InputError
from rpc_runtime.execution.in_process import InProcessRunner
from rpc_runtime.program.events import StageStatistics
from rpc_runtime.program.routes import CLIENT
from tests.helpers.rpc_runtime.pipelines import open_on, same, statistics_of_all_sent
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import SHAPES, A, B, C, batches_for, chain, double, skips
from tests.helpers.waiting import PATIENCE_SECONDS


@pytest.mark.parametrize("make", SHAPES)
def test_a_pipeline_gives_what_its_stages_give_in_turn(workers: LocalWorkers, maker: ProgramMaker, make: Any) -> None:
    program = make(maker)
    batches = batches_for(program, 40)
    with InProcessRunner(program, maker.blob_path) as reference:
        expected = list(reference.stream(batches))
    with open_on(workers, program, maker) as pipeline:
        results = list(pipeline.stream(batches))
        assert all(same(a, b) for a, b in zip(results, expected, strict=True))
        assert same(pipeline.run(batches[0]), expected[0])


def test_a_slow_source_holds_no_result_back(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    batch = batches_for(program, 1)[0]
    go_on = threading.Event()

    def source() -> Iterator[list[np.ndarray]]:
        yield batch
        assert go_on.wait(PATIENCE_SECONDS)
        yield batch

    with open_on(workers, program, maker, timeout_seconds=3.0) as pipeline:
        results = pipeline.stream(source())
        next(results)
        time.sleep(3.2)  # longer than the timeout: no result is due while the source is silent
        go_on.set()
        assert len(list(results)) == 1


def test_what_the_iterable_raises_comes_out_after_the_results_before_it(
    workers: LocalWorkers, maker: ProgramMaker
) -> None:
    program = chain(maker)
    batches = batches_for(program, 5)

    def source() -> Iterator[list[np.ndarray]]:
        yield from batches
        raise KeyError("the camera fell off")

    with open_on(workers, program, maker) as pipeline:
        got: list[tuple[np.ndarray, ...]] = []
        with pytest.raises(KeyError, match="camera"):
            got.extend(pipeline.stream(source()))
        assert len(got) == 5
        assert same(pipeline.run(batches[0]), got[0])


def test_an_abandoned_stream_leaves_the_pipeline_usable(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = skips(maker)
    batches = batches_for(program, 4)
    with open_on(workers, program, maker) as pipeline:
        expected = [pipeline.run(batch) for batch in batches]
        for _ in range(5):
            results = pipeline.stream(itertools.cycle(batches[:3]))
            assert same(next(results), expected[0])
            results.close()
            assert same(pipeline.run(batches[3]), expected[3])


def test_wrong_inputs_are_refused_and_do_no_harm(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    good = batches_for(program, 1)[0]
    with open_on(workers, program, maker) as pipeline:
        for bad in ([], [np.zeros((2, 9), np.float32)], [good[0].astype(np.float64)], good[0]):
            with pytest.raises(InputError):
                pipeline.run(bad)
        with pytest.raises(InputError):
            list(pipeline.stream([good, []]))
        assert same(pipeline.run([np.asfortranarray(good[0])]), pipeline.run(good))


def test_statistics_and_trace(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    with open_on(workers, program, maker) as pipeline:
        list(pipeline.stream(batches_for(program, 20)))
        statistics, trace = statistics_of_all_sent(pipeline), pipeline.trace()
    assert [(s.name, s.machine, s.micro_batches) for s in statistics] == [
        ("one", A, 20),
        ("two", B, 20),
        ("three", C, 20),
    ]
    assert all(s.bytes_received == s.bytes_sent == 20 * 64 for s in statistics)
    assert all(
        isinstance(s, StageStatistics) and s.compute_seconds > 0 and s.median_compute_seconds > 0 for s in statistics
    )
    assert sum(event.kind == "compute" for event in trace) == 60
    assert {event.kind for event in trace if event.machine != CLIENT} >= {"receive", "compute", "wait", "send"}
    assert {event.kind for event in trace if event.machine == CLIENT} >= {"receive", "send", "flight"}
    flights = [event for event in trace if event.kind == "flight"]
    assert [event.sequence for event in flights] == [*range(20)]
    assert all(e.start_nanoseconds <= e.end_nanoseconds for e in trace)
    assert list(trace) == sorted(trace, key=lambda e: e.start_nanoseconds)


def test_a_machine_without_an_address(workers: LocalWorkers, maker: ProgramMaker) -> None:
    x = maker.input("x")
    program = maker.program([maker.stage("one", "machine-z", [x], double)])
    with pytest.raises(InputError, match="machine-z"):
        open_on(workers, program, maker)

"""Programs of many shapes on worker processes: correct results, in order, in bounded memory."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.errors import InputError
from rpc_runtime.execution.in_process import InProcessRunner
from tests.helpers.rpc_runtime.pipelines import open_on, same
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import SHAPES, batches_for, chain, double
from tests.helpers.waiting import PATIENCE_SECONDS


def in_the_same_arrays(batches: list[list[np.ndarray]]) -> Iterator[list[np.ndarray]]:
    """Yield micro-batches in arrays that are overwritten when the next one is requested."""
    arrays = [array.copy() for array in batches[0]]
    for batch in batches:
        for array, values in zip(arrays, batch, strict=True):
            array[...] = values
        yield arrays
        for array in arrays:
            array[...] = 0


@pytest.mark.parametrize("make", SHAPES)
def test_a_pipeline_gives_what_its_stages_give_in_turn(workers: LocalWorkers, maker: ProgramMaker, make: Any) -> None:
    program = make(maker)
    batches = batches_for(program, 40)
    with InProcessRunner(program, maker.blob_path) as reference:
        expected = list(reference.stream(batches))
    with open_on(workers, program, maker) as pipeline:
        results = list(pipeline.stream(in_the_same_arrays(batches)))
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


def test_a_machine_without_an_address(workers: LocalWorkers, maker: ProgramMaker) -> None:
    x = maker.input("x")
    program = maker.program([maker.stage("one", "machine-z", [x], double)])
    with pytest.raises(InputError, match="machine-z"):
        open_on(workers, program, maker)

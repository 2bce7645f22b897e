"""Replicated stages on worker processes give the same results in the same order, whichever replica computes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm.relax import op

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.session import Session
from rpc_runtime.errors import DeadlineError
from rpc_runtime.execution.in_process import InProcessRunner
from rpc_runtime.program.measurements import COMPUTE
from rpc_runtime.program.program import Program
from tests.helpers.rpc_runtime.pipelines import open_on, same, statistics_of_all_sent
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import add, batches_for, double, subtract
from tests.helpers.waiting import stop

A, B, C, D = MACHINES = ("machine-a", "machine-b", "machine-c", "machine-d")


@pytest.fixture(scope="module")
def four_workers() -> Iterator[LocalWorkers]:
    with LocalWorkers(MACHINES) as started:
        yield started


def alone(maker: ProgramMaker) -> Program:
    """Return a program of one stage on two machines."""
    value = maker.stage("one", A, [maker.input("x")], double)
    maker.replicate([A, B], [0, 1])
    return maker.program([value])


def middle_of_a_chain(maker: ProgramMaker) -> Program:
    """Return a program with unequal shares, and with weights."""
    weights = {"w": np.full((2, 8), 3, np.float32)}
    value = maker.stage("one", A, [maker.input("x")], double)
    value = maker.stage("two", B, [value], add, weights=weights)
    maker.replicate([B, C], [0, 1, 0])
    value = maker.stage("three", D, [value], double)
    return maker.program([value])


def skip_over_replicas(maker: ProgramMaker) -> Program:
    """Return a program with one turn in eight for the second replica, and tensors that skip the replicated stage."""
    x, y = maker.input("x"), maker.input("y")
    first = maker.stage("one", A, [x], double)
    second = maker.stage("two", B, [first], lambda v: [op.negative(v)])
    maker.replicate([B, C], [0, 0, 0, 1, 0, 0, 0, 0])
    third = maker.stage("three", D, [second, first, y], lambda a, b, c: [op.add(op.subtract(a, b), c)])
    return maker.program([third, first, second, x])


def replicas_after_replicas(maker: ProgramMaker) -> Program:
    """Return a program with turns of different lengths, so that each replica sends to each."""
    value = maker.stage("one", A, [maker.input("x")], double)
    maker.replicate([A, B], [0, 1, 1])
    value = maker.stage("two", C, [value], lambda v: [op.add(v, v), op.negative(v)])
    maker.replicate([C, D], [1, 0, 0, 1])
    return maker.program(value)


def lengths_without_a_common_divisor(maker: ProgramMaker) -> Program:
    """Return a program that repeats after 143 micro-batches; a skipping tensor follows both lists of turns."""
    first = maker.stage("one", A, [maker.input("x")], double)
    maker.replicate([A, B], [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1])
    second = maker.stage("two", C, [first], lambda v: [op.negative(v)])
    maker.replicate([C, D], [0, 1] * 6 + [0])
    third = maker.stage("three", B, [first, second], subtract)
    return maker.program([third, second])


def several_stages_on_a_machine(maker: ProgramMaker) -> Program:
    """Return a program whose machines hold replicas of different stages; some need a tensor in some turns only."""
    x = maker.input("x")
    first = maker.stage("one", A, [x], double)
    maker.replicate([A, B, C], [0, 1, 2, 1])
    second = maker.stage("two", B, [first, x], subtract)
    maker.replicate([B, C], [0, 1])
    third = maker.stage("three", A, [first, second], add)
    maker.replicate([C, A, B], [2, 1, 0, 0, 1])
    fourth = maker.stage("four", A, [third, first], subtract)
    return maker.program([fourth, second])


SHAPES = [
    alone,
    middle_of_a_chain,
    skip_over_replicas,
    replicas_after_replicas,
    lengths_without_a_common_divisor,
    several_stages_on_a_machine,
]


def without_replicas(program: Program) -> Program:
    first = [replace(stage, turns=(0,)) for stage in program.stages if stage.replica == 0]
    return replace(program, stages=tuple(first))


@pytest.mark.parametrize("make", SHAPES)
def test_replicas_give_what_one_stage_gives(four_workers: LocalWorkers, maker: ProgramMaker, make: Any) -> None:
    """The source is read only while there is room, and results of an abandoned stream do not appear later."""
    program = make(maker)
    batches = batches_for(program, 250)
    with InProcessRunner(without_replicas(program), maker.blob_path) as reference:
        expected = list(reference.stream(batches))
    with InProcessRunner(program, maker.blob_path) as in_turn:
        assert all(same(a, b) for a, b in zip(in_turn.stream(batches), expected, strict=True))
    fed = 0

    def endless() -> Iterator[list[np.ndarray]]:
        nonlocal fed
        for batch in itertools.cycle(batches):
            fed += 1
            yield batch

    with open_on(four_workers, program, maker) as pipeline:
        assert list(pipeline.stream([])) == []
        assert same(pipeline.run(batches[0]), expected[0])
        results = pipeline.stream(endless())
        for index, result in enumerate(itertools.islice(results, len(batches))):
            assert same(result, expected[index])
            assert fed < index + 150
        results.close()  # type: ignore[attr-defined]
        assert same(pipeline.run(batches[7]), expected[7])


def test_each_replica_is_measured_by_itself(four_workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = middle_of_a_chain(maker)
    batches = batches_for(program, 31)
    with open_on(four_workers, program, maker) as pipeline, InProcessRunner(program, maker.blob_path) as in_turn:
        for _ in zip(pipeline.stream(batches), in_turn.stream(batches), strict=True):
            pass
        for measured in (pipeline, in_turn):
            executions = [(stage.name, stage.machine, stage.micro_batches) for stage in measured.statistics()]
            assert executions == [("one", A, 31), ("two", B, 21), ("two", C, 10), ("three", D, 31)]
            computed = [e.sequence for e in measured.trace() if (e.machine, e.kind) == (C, COMPUTE)]
            assert computed == list(range(1, 31, 3))
        sent = [(stage.bytes_received, stage.bytes_sent) for stage in statistics_of_all_sent(pipeline)]
        assert sent == [(count * 64, count * 64) for count in (31, 21, 10, 31)]


def test_weights_travel_to_each_replica_once(maker: ProgramMaker, tmp_path: Path) -> None:
    x = maker.input("x")
    maker.stage("one", A, [x], add, weights={"w": np.ones((2, 8), np.float32)})
    maker.replicate([A, B], [0, 1])
    program = maker.program(maker.stages[0].outputs)
    one_copy = sum(blob.size_bytes for blob in program.stages[0].blobs)
    with ExitStack() as stack:
        # Separate caches, as on two hosts: in a shared one, the second worker would find what the first one received.
        apart = [stack.enter_context(LocalWorkers([name], cache=tmp_path / name)) for name in (A, B)]
        endpoints = {name: endpoint for workers in apart for name, endpoint in workers.endpoints.items()}
        with Session(program, endpoints, maker.blob_path) as pipeline:
            assert pipeline.blob_bytes_sent == 2 * one_copy
        with Session(program, endpoints, maker.blob_path) as pipeline:
            assert pipeline.blob_bytes_sent == 0


@pytest.mark.parametrize("stopped", [B, C])
def test_a_replica_that_stands_still_for_a_moment_loses_no_order(
    four_workers: LocalWorkers, maker: ProgramMaker, stopped: str
) -> None:
    program = skip_over_replicas(maker)
    batches = batches_for(program, 400)
    with InProcessRunner(program, maker.blob_path) as reference:
        expected = list(reference.stream(batches))
    process = four_workers.process_ids[stopped]
    with open_on(four_workers, program, maker) as pipeline:
        results = pipeline.stream(batches)
        got = [next(results) for _ in range(10)]
        stop(process)
        goes_on = threading.Timer(1.5, os.kill, (process, signal.SIGCONT))
        goes_on.start()
        try:
            got += results
        finally:
            goes_on.join()
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))


def test_no_progress_names_the_replica_whose_turn_it_is(maker: ProgramMaker) -> None:
    program = middle_of_a_chain(maker)
    batch = batches_for(program, 1)[0]
    with (
        LocalWorkers(MACHINES) as own_workers,
        open_on(own_workers, program, maker, timeout_seconds=2.0) as pipeline,
    ):
        pipeline.run(batch)
        stop(own_workers.process_ids[C])
        # Machine C computes micro-batch 1; B and D do not wait for its tensors.
        with pytest.raises(DeadlineError, match=f"stage '(one|two)' on machine '({A}|{C})'.* to compute micro-batch 1"):
            pipeline.run(batch)
        os.kill(own_workers.process_ids[C], signal.SIGCONT)

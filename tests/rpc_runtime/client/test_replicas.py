"""Replicated stages on worker processes give the same results in the same order, whichever replica computes."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm.relax import op

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.execution.in_process import InProcessRunner
from rpc_runtime.program.events import KERNEL
from rpc_runtime.program.program import Program
from tests.helpers.rpc_runtime.pipelines import open_on, same
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import add, batches_for, double, subtract
from tests.helpers.waiting import stopped

A, B, C, D = MACHINES = ("machine-a", "machine-b", "machine-c", "machine-d")


@pytest.fixture(scope="module")
def four_workers() -> Iterator[LocalWorkers]:
    with LocalWorkers(MACHINES) as started:
        yield started


def skip_over_replicas(maker: ProgramMaker) -> Program:
    """Return a program with one turn in eight for the second replica, and tensors that skip the replicated stage."""
    x, y = maker.input("x"), maker.input("y")
    first = maker.stage("one", A, [x], double)
    second = maker.stage("two", B, [first], lambda v: [op.negative(v)])
    maker.replicate([B, C], [0, 0, 0, 1, 0, 0, 0, 0])
    third = maker.stage("three", D, [second, first, y], lambda a, b, c: [op.add(op.subtract(a, b), c)])
    return maker.program([third, first, second, x])


def lengths_without_a_common_divisor(maker: ProgramMaker) -> Program:
    """Return a program that repeats after 143 micro-batches; a skipping tensor follows both schedules."""
    first = maker.stage("one", A, [maker.input("x")], double)
    maker.replicate([A, B], [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1])
    second = maker.stage("two", C, [first], lambda v: [op.negative(v)])
    maker.replicate([C, D], [0, 1] * 6 + [0])
    third = maker.stage("three", B, [first, second], subtract)
    return maker.program([third, second])


def several_stages_on_a_machine(maker: ProgramMaker) -> Program:
    """Return a program whose machines hold replicas of different stages; some need a tensor only sometimes."""
    x = maker.input("x")
    first = maker.stage("one", A, [x], double)
    maker.replicate([A, B, C], [0, 1, 2, 1])
    second = maker.stage("two", B, [first, x], subtract)
    maker.replicate([B, C], [0, 1])
    third = maker.stage("three", A, [first, second], add)
    maker.replicate([C, A, B], [2, 1, 0, 0, 1])
    fourth = maker.stage("four", A, [third, first], subtract)
    return maker.program([fourth, second])


SHAPES = [skip_over_replicas, lengths_without_a_common_divisor, several_stages_on_a_machine]


def test_each_replica_records_the_kernels_of_its_next_micro_batches(
    four_workers: LocalWorkers, maker: ProgramMaker
) -> None:
    program = several_stages_on_a_machine(maker)
    with open_on(four_workers, program, maker) as pipeline:
        pipeline.observe(kernels=2)
        list(pipeline.stream(batches_for(program, 30)))
        kernels: dict[tuple[str, str], set[int]] = {}
        for event in pipeline.trace():
            if event.kind == KERNEL:
                kernels.setdefault((event.stage, event.machine), set()).add(event.sequence)
    expected = {(s.name, s.machine): {s.micro_batches.nth(0), s.micro_batches.nth(1)} for s in program.stages}
    assert kernels == expected


def without_replicas(program: Program) -> Program:
    first = [replace(stage, replica_schedule=(0,)) for stage in program.stages if stage.replica == 0]
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


def test_a_replica_that_stands_still_for_a_moment_loses_no_order(
    four_workers: LocalWorkers, maker: ProgramMaker
) -> None:
    program = skip_over_replicas(maker)
    batches = batches_for(program, 400)
    with InProcessRunner(program, maker.blob_path) as reference:
        expected = list(reference.stream(batches))
    with open_on(four_workers, program, maker) as pipeline:
        results = pipeline.stream(batches)
        got = [next(results) for _ in range(10)]
        with stopped(four_workers.process_ids[C]):
            time.sleep(1.0)
        got += results
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))

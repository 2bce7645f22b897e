"""What several turns of timing say together of a kernel."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, strategies as st

from tvm_split.cluster.cluster import Cluster
from tvm_split.measuring.machine_facts import MachineFacts
from tvm_split.measuring.machine_timing import (
    TURNS,
    HostTiming,
    MachineTimes,
    _MachineAtWork,
    combined,
    contradictions,
    quietest,
)
from tvm_split.measuring.store import Store
from tvm_split.measuring.target_code import TargetCode
from tvm_split.rpc_runtime.execution.in_process_kernels import InProcessKernels
from tvm_split.rpc_runtime.program.kernel_times import KernelTime

SECONDS = st.floats(1e-7, 10.0)


def timed(function: str, seconds: float, best_seconds: float, rounds: int = 2) -> KernelTime:
    return KernelTime(function, seconds, best_seconds, rounds)


def failed(function: str, error: str) -> KernelTime:
    return KernelTime(function, 0.0, 0.0, 0, error)


def test_the_median_of_the_turns_and_the_best_of_all() -> None:
    turns = [
        [timed("convolution", 3.0, 2.5), timed("relu", 0.3, 0.3)],
        [timed("convolution", 9.0, 2.0), timed("relu", 0.1, 0.1)],
        [timed("convolution", 4.0, 3.5, rounds=5), timed("relu", 0.2, 0.2)],
    ]
    assert combined(turns) == (timed("convolution", 4.0, 2.0, rounds=9), timed("relu", 0.2, 0.1, rounds=6))


def test_a_kernel_that_failed_in_one_turn_has_no_time() -> None:
    turns = [
        [timed("convolution", 3.0, 2.5), timed("relu", 0.3, 0.3)],
        [timed("convolution", 9.0, 2.0), failed("relu", "out of memory")],
        [timed("convolution", 4.0, 3.5), failed("relu", "still out of memory")],
    ]
    convolution, relu = combined(turns)
    assert convolution.seconds == 4.0
    assert relu == failed("relu", "out of memory")


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_turns_does_not_count_and_one_turn_stands_for_itself(pairs, random) -> None:
    turns = [[timed("convolution", seconds, best)] for seconds, best in pairs]
    shuffled = random.sample(turns, len(turns))
    assert combined(turns) == combined(shuffled)
    assert combined(turns[:1]) == tuple(turns[0])
    (found,) = combined(turns)
    assert found.seconds == statistics.median(seconds for seconds, _ in pairs)
    assert found.best_seconds == min(best for _, best in pairs)


def turns_of(*seconds: float) -> list[tuple[KernelTime, ...]]:
    return [(timed("convolution", each, each), timed("relu", each / 10, each / 10)) for each in seconds]


def test_a_disturbed_turn_does_not_count() -> None:
    turns = turns_of(1.0, 9.0, 1.1, 1.05)
    assert len(quietest(turns)) == TURNS
    assert combined(quietest(turns))[0].seconds == 1.05
    assert contradictions({"machine-a": [turns]}) == {}


def test_times_that_contradict_themselves() -> None:
    found = contradictions(
        {"machine-a": [turns_of(1.0, 1.1, 1.0)], "machine-b": [turns_of(1.0, 1.1, 1.0), turns_of(9, 1, 4)]}
    )
    assert found == {"machine-b": "the same kernels took 1.1 s and 9.9 s on machine-b"}


def test_equal_machines_that_contradict_each_other() -> None:
    measured = {"machine-a": [turns_of(31e-5)], "machine-b": [turns_of(404e-5)], "machine-c": [turns_of(1.0)]}
    found = contradictions(measured, [("machine-a", "machine-b")])
    assert set(found) == {"machine-a", "machine-b"}
    assert set(found.values()) == {"machine-b took 4.44 ms for what took machine-a, an equal machine, 341 µs"}
    assert contradictions(measured) == {}  # unequal machines may differ


CODE = TargetCode({"kind": "llvm"}, (), {}, 0)


def machine(name: str, threads: int = 1, code: TargetCode = CODE) -> MachineTimes:
    identity = {"hostname": "box", "machine": name, "threads": threads}
    facts = MachineFacts(name, code.target, threads, "box", "box", 0, identity)
    return MachineTimes(facts, code, None, Store(None, identity), ())


@pytest.mark.parametrize(
    ("other", "is_doubtful"),
    [
        (machine("machine-b"), True),
        (machine("machine-b", threads=2), False),
        (machine("machine-b", code=TargetCode({"kind": "llvm", "mcpu": "core2"}, (), {}, 0)), False),
    ],
)
def test_machines_of_a_host_are_equal_by_their_processors_and_code(other: MachineTimes, is_doubtful: bool) -> None:
    machines = [machine("machine-a"), other]
    timing = HostTiming(machines, Cluster.local(2), 1.0, lambda doing: None)
    at_work = [
        _MachineAtWork(each, InProcessKernels(each.machine.threads), 2, turns_of(*seconds))
        for each, seconds in zip(machines, ([31e-5] * TURNS, [404e-5] * TURNS), strict=True)
    ]
    assert set(timing._contradictions(at_work)) == ({"machine-a", "machine-b"} if is_doubtful else set())

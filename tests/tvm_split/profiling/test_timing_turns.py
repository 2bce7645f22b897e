"""What several turns of timing say together of a kernel."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, strategies as st

from rpc_runtime.program.kernel_times import KernelTime
from tests.helpers.rpc_runtime.timed_kernels import timed, turns_of
from tvm_split.profiling.timing_turns import TURNS, combined, contradictions, quietest, unlikeness

SECONDS = st.floats(1e-7, 10.0)


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


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (
            31e-5,
            404e-5,
            "machine-b took 4.44 ms for what took machine-a, an equal machine, 341 µs, most of all in conv_1",
        ),
        (
            100e-5,
            140e-5,
            "machine-b took 1.54 ms for what took machine-a, an equal machine, 1.1 ms, most of all in conv_1",
        ),
        (100e-5, 125e-5, ""),
        (1e-6, 9e-6, ""),  # a clock's and a call's noise
        (
            140e-5,
            100e-5,
            "machine-a took 1.54 ms for what took machine-b, an equal machine, 1.1 ms, most of all in conv_1",
        ),
    ],
)
def test_equal_machines_that_contradict_each_other(one: float, other: float, told: str) -> None:
    measured = {"machine-a": turns_of(one), "machine-b": turns_of(9.0, other, other, other)}
    assert unlikeness(measured, {"convolution": ["conv_1"], "relu": ["relu_1"]}) == told


def test_a_kernel_that_one_of_two_cannot_run_does_not_part_them() -> None:
    turns = [(timed("convolution", 1.0, 1.0), failed("relu", "out of memory"))]
    assert unlikeness({"machine-a": turns_of(1.0), "machine-b": turns}) == ""

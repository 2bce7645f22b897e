"""Which machines of a host are timed how often, by what their turns say."""

from __future__ import annotations

import pytest

from rpc_runtime.execution.in_process_kernels import InProcessKernels
from tests.helpers.rpc_runtime.timed_kernels import turns_of
from tvm_split.cluster.cluster import Cluster
from tvm_split.profiling.kernels import TargetCode
from tvm_split.profiling.machine_times import MachineTimes
from tvm_split.profiling.machine_timing import MOST_TURNS, HostTiming, _MachineAtWork
from tvm_split.profiling.machines import MachineFacts
from tvm_split.profiling.store import Store
from tvm_split.profiling.timing_turns import TURNS

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
    for each in at_work:
        each.contended, each.alone = each.alone, turns_of(1.0)
    doubts = timing._contradictions(at_work)
    assert set(doubts) == ({"machine-a", "machine-b"} if is_doubtful else set())
    assert all(text.startswith("at work at the same time, machine-b took 4.44 ms for") for text in doubts.values())


@pytest.mark.parametrize(
    ("second", "turns"),
    [
        ([1e-3] * TURNS, TURNS),  # as the first
        ([1.5e-3] * (TURNS + 2), TURNS + 2),  # never alike
        ([1.5e-3, 1.5e-3, 1.5e-3, 1e-3, 1e-3], TURNS + 2),  # disturbed for a while
        ([9e-3, 1e-3, 1e-3, 1e-3], TURNS + 1),  # disturbed once, which is two things that part
        ([9e-3, 1e-3, 5e-3], 2 * TURNS + 2),  # of itself, until three agree
    ],
)
def test_equal_machines_that_part_are_timed_twice_more_and_a_third_is_not(second: list[float], turns: int) -> None:
    machines = [machine("machine-a"), machine("machine-b"), machine("machine-c", threads=2)]
    timing = HostTiming(machines, Cluster.local(3), 60.0, lambda doing: None)
    at_work = [_MachineAtWork(each, InProcessKernels(each.machine.threads), 2) for each in machines]
    for turn in range(MOST_TURNS):
        wanted = timing._wanted_in(turn, at_work)
        for each, seconds in zip(at_work, (1e-3, second[turn % len(second)], 2e-3), strict=True):
            if each in wanted:
                each.alone += turns_of(seconds)
    assert [len(each.alone) for each in at_work][1:] == [turns, TURNS]

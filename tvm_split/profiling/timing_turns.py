"""What turns of timing the same kernels say together, and whether they contradict each other. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rpc_runtime.program.kernel_times import KernelTime
from tvm_split.units import seconds_text

TURNS = 3
"""Odd, so that the median is a time that was measured."""
DISAGREEMENT = 2.0
"""Times of the same kernels a moment later differ by less, unless something disturbs them."""
UNLIKENESS = 1.3
"""And times of equal machines by less than this, once the quietest turns of both are taken."""
NOISE_SECONDS = 5e-6
"""Of a kernel: what a clock and a call take here and there says nothing of the machine."""


def quietest(turns: Sequence[tuple[KernelTime, ...]]) -> list[tuple[KernelTime, ...]]:
    """The `TURNS` turns that took least: whatever disturbs a turn makes it longer."""
    return sorted(turns, key=seconds_of)[:TURNS]


def contradictions(measured: Mapping[str, Sequence[Sequence[tuple[KernelTime, ...]]]]) -> dict[str, str]:
    """By the machine's name, why its times cannot be believed: they contradict themselves.

    ``measured`` are for each machine one or more series of turns of the same kernels.
    """
    found: dict[str, str] = {}
    for name, series in measured.items():
        for turns in filter(None, series):
            kept = [seconds_of(turn) for turn in quietest(turns)]
            if max(kept) > DISAGREEMENT * min(kept):
                found[name] = f"the same kernels took {seconds_text(min(kept))} and {seconds_text(max(kept))} on {name}"
    return found


def unlikeness(
    measured: Mapping[str, Sequence[tuple[KernelTime, ...]]], layers: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> str:
    """How the times of two machines part that run the same kernels equally fast, by their names; empty if they do not.

    Kernels of which one of them has no time are left out. ``layers`` are those of each kernel, by its function: the
    one that parts most is named.
    """
    times = {
        name: {each.function: each.seconds for each in combined(quietest(turns)) if not each.error}
        for name, turns in measured.items()
    }
    shared = frozenset.intersection(*map(frozenset, times.values()))
    fast, slow = sorted(times, key=lambda name: sum(times[name][function] for function in shared))
    faster, slower = times[fast], times[slow]
    most, least = (sum(each[function] for function in shared) for each in (slower, faster))
    if most <= UNLIKENESS * least or most - least <= NOISE_SECONDS * len(shared):
        return ""
    worst = max(shared, key=lambda function: slower[function] - faster[function])
    where = f", most of all in {', '.join(layers[worst])}" if worst in layers else ""
    return f"{slow} took {seconds_text(most)} for what took {fast}, an equal machine, {seconds_text(least)}{where}"


def seconds_of(turn: Sequence[KernelTime]) -> float:
    """All kernels of a turn, once each."""
    return sum(each.seconds for each in turn)


def combined(turns: Sequence[Sequence[KernelTime]]) -> tuple[KernelTime, ...]:
    """One time for each kernel from those of one or more turns, which are of the same kernels in the same order.

    A kernel's time is the median of the turns', its best time the best of all. If a turn says of a kernel why it has no
    time, so does the result, whatever the others found.
    """
    return tuple(_combined(times) for times in zip(*turns, strict=True))


def _combined(times: Sequence[KernelTime]) -> KernelTime:
    for each in times:
        if each.error:
            return each
    return KernelTime(
        times[0].function,
        statistics.median(each.seconds for each in times),
        min(each.best_seconds for each in times),
        sum(each.rounds for each in times),
    )

"""Simulated streams over links with high latency: only computing and bandwidth limit them."""

from __future__ import annotations

import pytest

from rpc_runtime.program.routes import CLIENT
from tests.helpers.scenarios import busiest, chain
from tvm_split.simulation.scenario import LinkTimes, MachineTimes, Scenario, StageTimes, program_of
from tvm_split.simulation.simulate import simulate


def even(stages: int, period: float, wire: float, latency: float) -> Scenario:
    """A chain whose stages take ``period``, and whose links take the share ``wire`` of it per tensor."""
    return chain([period] * stages, [period * wire] * (stages + 1), [latency] * (stages + 1))


@pytest.mark.parametrize("wire", [0.05, 0.9], ids=["small tensors", "large tensors"])
@pytest.mark.parametrize(
    ("stages", "period", "latency"),
    [(2, 0.005, 0.001), (6, 0.001, 0.001), (2, 0.02, 0.005), (6, 0.001, 0.005), (2, 0.001, 0.02), (6, 0.005, 0.02)],
)
def test_a_stream_is_as_fast_as_its_slowest_stage_or_link(
    stages: int, period: float, latency: float, wire: float
) -> None:
    scenario = even(stages, period, wire, latency)
    simulation = simulate(scenario, micro_batches=1000)
    assert simulation.period_seconds == pytest.approx(busiest(scenario), rel=0.05)


def around(stages: int, seconds: float, far: float, *, returns: bool, slow: int | None = None) -> Scenario:
    """A chain with a skip connection from the first stage to the last: over a fast link, or local (``returns``).

    All other links have the latency ``far``.
    """
    places = [f"m{index}" for index in range(stages)]
    places[-1] = places[0] if returns else places[-1]
    machines: dict[str, dict[str, StageTimes]] = {}
    for index, place in enumerate(places):
        stage_seconds = seconds * (3 if index == slow else 1)
        machines.setdefault(place, {})[f"s{index}"] = StageTimes(stage_seconds, stage_seconds)
    names: list[str | None] = [None, *(f"s{index}" for index in range(stages)), None]
    tensors = [(f"t{index}", 8, names[index], [names[index + 1]]) for index in range(stages + 1)]
    tensors.append(("skip", 8, "s0", [f"s{stages - 1}"]))
    program = program_of({f"s{index}": ((place,), (0,)) for index, place in enumerate(places)}, tensors)
    links = {
        (places[index - 1], places[index]): LinkTimes(far, {f"t{index}": seconds / 10}) for index in range(1, stages)
    }
    near = [(CLIENT, places[0], "t0"), (places[-1], CLIENT, f"t{stages}")]
    near += [] if returns else [(places[0], places[-1], "skip")]
    links |= {(source, end): LinkTimes(0.001, {name: seconds / 10}) for source, end, name in near}
    return Scenario(program, {name: MachineTimes(times) for name, times in machines.items()}, links)


@pytest.mark.parametrize("slow", [None, 1])
@pytest.mark.parametrize("returns", [False, True])
def test_what_skips_a_far_way_does_not_hold_it_up(returns: bool, slow: int | None) -> None:
    scenario = around(4, 0.002, 0.02, returns=returns, slow=slow)
    simulation = simulate(scenario, micro_batches=1000)
    assert simulation.period_seconds == pytest.approx(busiest(scenario), rel=0.05)

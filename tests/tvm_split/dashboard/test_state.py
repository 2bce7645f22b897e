"""What the page shows, computed from traces."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rpc_runtime.program.events import COMPUTE, DEPLOYMENT, FLIGHT, Recorder
from rpc_runtime.program.routes import CLIENT
from tests.helpers.traces_of_runs import COUNT, A, B, two_machines
from tvm_split.dashboard.state import Live, Page, page_of
from tvm_split.observing.about import About, AboutLink, AboutStage
from tvm_split.observing.trace import Trace, trace_of

ABOUT = About(
    (AboutStage("first", A, ("conv", "relu")), AboutStage("second", B, ("fc",))),
    0.02,
    0.03,
    {A: 0.012, B: 0.009},
    (AboutLink(A, B, 0.002),),
)


def page(*times: object, live: Live | None = None) -> Page:
    return page_of(replace(two_machines(*times), about=ABOUT), live or Live())


def test_what_was_predicted_is_beside_what_was_measured():
    shown = page((6, 9))
    assert shown.limiting == (B,)
    assert shown.period_seconds == {"predicted": 0.02, "measured": pytest.approx(0.01)}
    assert shown.latency_seconds["predicted"] == 0.03
    # 1 ms to the machine, 6 there, 1 to the next, 9 there, 1 back.
    assert all(shown.latency_seconds[name] == pytest.approx(0.018) for name in ("p50", "p90", "p99"))
    first, second = shown.machines
    assert (first.machine, first.stages) == (A, (("first", ("conv", "relu")),))
    assert (first.predicted_seconds, first.measured_seconds) == (0.012, pytest.approx(0.006))
    assert (second.predicted_seconds, second.measured_seconds) == (0.009, pytest.approx(0.009))
    (link,) = [link for link in shown.links if (link.source, link.destination) == (A, B)]
    assert (link.predicted_seconds, link.measured_seconds) == (0.002, pytest.approx(0.001))
    assert link.size_bytes == 1000


def test_all_that_is_shown_is_in_the_trace():
    shown = page()
    assert shown.results == COUNT
    assert {lane for lane, *_ in shown.bars} == set(range(len(shown.lanes)))
    computed = [bar for bar in shown.bars if bar[1] == COMPUTE]
    assert len(computed) == 2 * COUNT
    assert sum(bar[3] for bar in computed) == pytest.approx(COUNT * 0.015)
    assert all(rate == pytest.approx(100, rel=0.1) for _, rate in shown.rates)


def test_a_client_that_was_not_observed():
    """The time of a micro-batch is then that on the machines."""
    trace = two_machines()
    alone = Trace(trace.model, {name: machine for name, machine in trace.machines.items() if name != CLIENT})
    shown = page_of(alone, Live())
    assert shown.results == COUNT
    assert shown.period_seconds["measured"] == pytest.approx(0.01)
    assert shown.latency_seconds["p50"] == pytest.approx(0.018)


def test_a_machine_that_does_not_answer_keeps_what_it_did():
    first, second = page(live=Live("running", gone={B})).machines
    assert first.answers
    assert not second.answers
    assert second.measured_seconds is not None
    (unknown,) = page_of(Trace("net", {}, ABOUT), Live("failed", "it has gone", {B})).machines
    assert (unknown.machine, unknown.answers, unknown.stages) == (B, False, (("second", ("fc",)),))


def test_what_happened_is_listed_in_the_order_of_time():
    recorder = Recorder()
    recorder.happened("opened")
    recorder.happened("failed: it has gone. Start it again")
    trace = trace_of("net", {CLIENT: recorder.observe(since=0)}, {})
    later = int(trace.machines[CLIENT].rows["start"].max()) + 10**9
    shown = page_of(trace, Live(), noted=[(later, "machine-b: does not answer")])
    assert [text for _, text in shown.events] == [
        f"{CLIENT}: opened",
        f"{CLIENT}: failed: it has gone",
        "machine-b: does not answer",
    ]
    assert shown.events[-1][0] == pytest.approx(1, abs=0.5)


def test_a_trace_of_nothing():
    shown = page_of(Trace("net", {}), Live())
    assert (shown.results, shown.rates, shown.bars, shown.limiting) == (0, (), (), ())
    assert json.loads(json.dumps(shown.as_values(), allow_nan=False))["model"] == "net"


durations = st.lists(st.integers(0, 10**9), max_size=40)


@given(durations, durations, st.sampled_from([COMPUTE, FLIGHT, DEPLOYMENT]))
def test_values_of_any_events_are_finite(starts, lengths, kind):
    recorder = Recorder()
    track = recorder.track(kind, "stage" if kind == COMPUTE else "", detail="x" if kind == DEPLOYMENT else "")
    for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        recorder.record(track, number, start, start + length)
    machine = CLIENT if kind != COMPUTE else A
    shown = page_of(trace_of("net", {machine: recorder.observe(since=0)}, {}), Live())
    text = json.dumps(shown.as_values(), allow_nan=False)
    assert "NaN" not in text
    assert all(math.isfinite(rate) and rate >= 0 for _, rate in shown.rates)
    assert all(0 <= share <= 1 for one in shown.machines for share in one.shares.values())

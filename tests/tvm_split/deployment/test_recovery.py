"""What observes a deployment goes on when machines fail: two are killed while inputs are streamed."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tvm_split
from rpc_runtime.client.deployment_event import DeploymentEvent
from rpc_runtime.client.worker_client import answering, describe
from rpc_runtime.program.events import COMPUTE, FLIGHT, PAUSE, RECEIVE, REPLAY, SEND
from rpc_runtime.program.routes import CLIENT
from tests.helpers.waiting import PATIENCE_SECONDS, eventually
from tvm_split.cluster.launcher import AskedMachine
from tvm_split.dashboard import live
from tvm_split.dashboard.live import LabPage
from tvm_split.dashboard.state import Page
from tvm_split.deployment.deployment import DeploymentStatistics
from tvm_split.deployment.deployment_report import DeploymentReport
from tvm_split.errors import RecoveryWarning
from tvm_split.observing import recording
from tvm_split.observing.trace import Trace

A, B, C = "machine-a", "machine-b", "machine-c"
KILLS = {40: B, 90: C}
COUNT = 150
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def inputs(number: int) -> np.ndarray[Any, Any]:
    return np.full((1, 4), number, np.float32)


def scraped(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("tvm_split")
    }


def page_at(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}page.json", timeout=PATIENCE_SECONDS) as reply:
        return dict(json.loads(reply.read()))


@dataclass
class Run:
    """A stream of `COUNT` micro-batches, and what was seen of it; two of three machines were killed meanwhile."""

    opened: DeploymentStatistics
    outputs: list[np.ndarray[Any, Any]]
    expected: list[np.ndarray[Any, Any]]
    events: tuple[DeploymentEvent, ...]
    warned: list[str]
    scrapes: list[Samples]
    page: dict[str, Any]
    lab_page: Page
    statistics: DeploymentStatistics
    report: DeploymentReport
    trace: Trace
    recorded: Trace
    last_page: dict[str, Any] = field(default_factory=dict)


def asked(cluster: tvm_split.Cluster) -> list[AskedMachine]:
    """Return the machines that answer, as a command of another process sees them."""
    endpoints = cluster.endpoints()
    return [AskedMachine(endpoints[name], worker) for name, worker in answering(endpoints).items()]


def shown(page: Page) -> list[str]:
    return [machine.machine for machine in page.machines if machine.answers]


def computing(trace: Trace) -> set[str]:
    """Return the machines that have computed the second stage."""
    return {event.machine for event in trace.of_kind(COMPUTE) if event.stage == "stage_1"}


@pytest.fixture(scope="module")
def often() -> Iterator[None]:
    """Recordings and pages read often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "POLL_SECONDS", 0.02)
        patch.setattr(live, "REFRESH_SECONDS", 0.1)
        patch.setattr(live, "SEARCH_SECONDS", 0.1)
        yield


@pytest.fixture(scope="module")
def run(often: None, bundle: tvm_split.Bundle, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with tvm_split.deploy(bundle, tvm_split.Cluster.in_process(2)) as deployment:
        expected = [deployment.run(inputs(number))[0] for number in range(COUNT)]
    events = tmp_path_factory.mktemp("events") / "events.jsonl"
    with (
        tvm_split.Cluster.local(3) as cluster,
        tvm_split.deploy(bundle, cluster, events=events) as deployment,
    ):
        metrics, page = deployment.serve_metrics(), deployment.dashboard()
        scrapes, opened = [scraped(metrics.url)], deployment.stats()
        lab = LabPage(lambda: asked(cluster), describe(cluster.endpoints()[A]).deployments[0].name)

        def batches() -> Iterator[np.ndarray[Any, Any]]:
            for number in range(COUNT):
                if number in KILLS:
                    scrapes.append(scraped(metrics.url))
                    page_at(page.url)
                    eventually(lambda: lab.page().results, "another process has its page")
                    eventually(lambda: KILLS[number] in computing(recorder.trace), "what it does is recorded")  # noqa: B023
                    os.kill(describe(cluster.endpoints()[KILLS[number]]).process_id, signal.SIGKILL)
                yield inputs(number)

        with deployment.tracing() as recorder, pytest.warns(RecoveryWarning) as warned:
            outputs = [result[0] for result in deployment.stream(batches())]
        eventually(lambda: page_at(page.url)["results"] == COUNT, "all results are shown")
        eventually(lambda: shown(lab.page()) == [A], "another process has found where the stages are")
        scrapes.append(scraped(metrics.url))
        result = Run(
            opened,
            outputs,
            expected,
            deployment.events,
            [str(warning.message) for warning in warned],
            scrapes,
            page_at(page.url),
            lab.page(),
            deployment.stats(),
            deployment.report(),
            deployment.trace(),
            recorder.trace,
        )
        os.kill(describe(cluster.endpoints()[A]).process_id, signal.SIGKILL)
        eventually(lambda: page_at(page.url)["state"] == "recovering", "the page says that no machine is left")
        result.last_page = page_at(page.url)
        assert len(events.read_text().splitlines()) == len(deployment.events)
    return result


def test_all_results_come_in_order(run: Run) -> None:
    assert all(np.array_equal(output, right) for output, right in zip(run.outputs, run.expected, strict=True))
    assert [(event.kind, event.machine) for event in run.events] == [
        *(("failure", B), ("recovered", B)),
        *(("failure", C), ("recovered", C)),
    ]
    assert [f"the deployment {event.text}" for event in run.events[1::2]] == run.warned


def test_the_recording_has_every_result_once_and_the_pauses_with_their_causes(run: Run, tmp_path: Path) -> None:
    trace = run.recorded
    flights = [event.sequence for event in trace.of_kind(FLIGHT)]
    assert len(flights) == len({*flights}) == COUNT
    pauses = trace.of_kind(PAUSE)
    assert [(event.machine, event.peer) for event in pauses] == [(CLIENT, B), (CLIENT, C)]
    for pause, event in zip(pauses, run.events[1::2], strict=True):
        assert f"'{event.machine}'" in pause.detail
        assert "has gone" in pause.detail
        seconds = (pause.end_nanoseconds - pause.start_nanoseconds) * 1e-9
        assert seconds == pytest.approx(event.pause_seconds, abs=1e-6)
    assert len(trace.of_kind(REPLAY)) == sum(event.replayed for event in run.events)
    computed = [event for event in trace.of_kind(COMPUTE) if event.stage == "stage_0"]
    assert len({event.sequence for event in computed}) == len(computed)  # a micro-batch that is fed again has a new one
    assert computing(trace) == {A, B, C}
    sent = {(e.machine, e.peer, e.tensor, e.sequence): e for e in trace.of_kind(SEND)}
    for event in trace.of_kind(RECEIVE):
        if (send := sent.get((event.peer, event.machine, event.tensor, event.sequence))) is not None:
            assert send.start_nanoseconds <= event.end_nanoseconds
    for pause in pauses:
        assert pause.detail in " ".join(str(trace).split())
    trace.save(tmp_path / "run.json")
    assert Trace.load(tmp_path / "run.json").machines == trace.machines
    trace.save(tmp_path / "run.pftrace")
    trace.save(tmp_path / "run.svg")


def test_a_trace_has_what_machines_that_still_answer_did_before(run: Run) -> None:
    assert [event.peer for event in run.trace.of_kind(PAUSE)] == [B, C]
    sequences = [event.sequence for event in run.trace.of_kind(FLIGHT)]
    assert len(sequences) == len({*sequences}) == COUNT
    first = [event for event in run.trace.of_kind(COMPUTE) if (event.machine, event.stage) == (A, "stage_0")]
    assert len(first) >= COUNT
    assert len({event.sequence for event in first}) == len(first)


def test_counters_never_go_backwards(run: Run) -> None:
    for before, after in zip(run.scrapes, run.scrapes[1:], strict=False):
        for series, value in before.items():
            if series[0].endswith("_total") and series in after:
                assert after[series] >= value, series
    last = {(name, dict(labels).get("peer", "")): value for (name, labels), value in run.scrapes[-1].items()}
    recovered = run.events[1::2]
    assert [last["tvm_split_recoveries_total", event.machine] for event in recovered] == [1, 1]
    assert all(
        last["tvm_split_pause_seconds_total", event.machine] == pytest.approx(event.pause_seconds, abs=1e-6)
        for event in recovered
    )
    assert last["tvm_split_replayed_micro_batches_total", ""] == sum(event.replayed for event in recovered)
    assert last["tvm_split_results_total", ""] == COUNT
    up = {dict(labels)["machine"]: on for (name, labels), on in run.scrapes[-1].items() if name.endswith("machine_up")}
    assert up == {A: 1, B: 0}
    assert {dict(labels)["deployment"] for samples in run.scrapes for _, labels in samples} == {
        dict(next(iter(run.scrapes[0]))[1])["deployment"]
    }


def test_figures_say_since_when_they_count(run: Run) -> None:
    assert run.opened.placed is not None
    assert run.statistics.placed == run.events[-1].time
    assert [(stage.name, stage.machine) for stage in run.statistics.stages] == [("stage_0", A), ("stage_1", A)]
    first, second = (stage.micro_batches for stage in run.statistics.stages)
    assert 0 < second < COUNT <= first  # the first stage was always on this machine
    assert run.statistics.gone == {}


def test_the_report_has_no_prediction_of_another_placement(run: Run) -> None:
    assert run.report.moved
    assert run.report.moved in str(run.report).lower()
    assert run.report.period.predicted is None
    assert run.report.advice == ()
    assert 0 < run.report.streamed < COUNT
    (machine,) = run.report.machines
    assert (machine.machine, machine.compute.predicted) == (A, None)
    assert machine.compute.measured


def test_the_page_goes_on_and_says_what_happened(run: Run) -> None:
    assert run.page["state"] in ("running", "idle")
    assert run.page["results"] == COUNT
    assert [machine["machine"] for machine in run.page["machines"]] == [A]
    assert [name for name, _ in run.page["machines"][0]["stages"]] == ["stage_0", "stage_1"]
    assert run.page["period_seconds"]["predicted"] is None
    told = [text for _, text in run.page["events"] if "recovered in" in text]
    assert len(told) == 2
    assert all("has gone" in text for text in told)


def test_the_page_says_why_nothing_runs(run: Run) -> None:
    assert "'machine-a'" in run.last_page["reason"]
    assert "has gone" in run.last_page["reason"]


def test_the_page_of_another_process_goes_on_under_the_deployment_s_new_name(run: Run) -> None:
    assert run.lab_page.state in ("running", "idle")
    assert run.lab_page.results > COUNT - max(KILLS)
    assert "goes on after" in " ".join(text for _, text in run.lab_page.events)

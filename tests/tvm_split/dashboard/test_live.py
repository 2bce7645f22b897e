"""The page of a deployment while it runs, and after a machine has gone."""

import json
import os
import signal
import urllib.request

import numpy as np
import pytest

import tvm_split
from rpc_runtime.client.worker_client import describe
from rpc_runtime.program.clocks import ClockSample, MachineClock
from rpc_runtime.program.events import COMPUTE, LINK_ENDED, SEND, Recorder, now
from rpc_runtime.program.routes import CLIENT
from tests.helpers.waiting import eventually
from tvm_split.dashboard import live
from tvm_split.dashboard.live import LivePage
from tvm_split.observing.about import About

X = np.ones((1, 4), np.float32)
NAMES = ("machine-a", "machine-b")


def page_at(url):
    with urllib.request.urlopen(f"{url}page.json", timeout=30) as reply:
        return json.loads(reply.read())


def test_a_deployment_and_the_loss_of_a_machine(bundle):
    with tvm_split.Cluster.local(2) as cluster, tvm_split.deploy(bundle, cluster, on_failure="raise") as deployment:
        server = deployment.dashboard()
        assert page_at(server.url)["state"] == "idle"
        for _ in deployment.stream([(X,)] * 50):
            pass
        eventually(lambda: page_at(server.url)["results"] == 50, "all results are shown")
        page = page_at(server.url)
        assert [machine["machine"] for machine in page["machines"]] == list(NAMES)
        assert all(machine["answers"] and machine["memory_total_bytes"] > 0 for machine in page["machines"])
        assert [machine["stages"][0][1][0] for machine in page["machines"]] == ["0", "2"]
        assert {(link["source"], link["destination"]) for link in page["links"]} >= {NAMES}
        os.kill(describe(cluster.endpoints()[NAMES[1]]).process_id, signal.SIGKILL)
        eventually(lambda: page_at(server.url)["state"] == "failed", "the failure is shown")
        page = page_at(server.url)
        assert "machine-b" in page["reason"]
        assert any("failed" in text for _, text in page["events"])
        eventually(lambda: not page_at(server.url)["machines"][1]["answers"], "the machine is marked")
        assert page_at(server.url)["machines"][0]["answers"]
    with pytest.raises(OSError, match="refused"):
        page_at(server.url)


def test_in_one_process(bundle):
    with tvm_split.deploy(bundle, tvm_split.Cluster.in_process(2)) as deployment, deployment.dashboard() as server:
        for _ in range(3):
            deployment.run(X)
        eventually(lambda: page_at(server.url)["results"] == 3, "all results are shown")


class Recorded:
    """Machines whose recorders are in this process, as a bystander sees them."""

    def __init__(self, *names: str) -> None:
        self.recorders = {name: Recorder() for name in names}
        self.clock = MachineClock()
        self.silent: set[str] = set()
        self.error: tvm_split.TvmSplitError | None = None
        self.refusing: dict[str, str] = {}

    @property
    def machines(self):
        return tuple(self.recorders)

    def observe(self, since=None, refused=None):
        since = since or {}
        refused.update(self.refusing)
        if self.error is not None:
            raise self.error
        return {
            name: recorder.observe(since.get(name, 0))
            for name, recorder in self.recorders.items()
            if name not in self.silent | self.refusing.keys()
        }

    def clocks(self):
        return dict.fromkeys(self.recorders, self.clock)

    def compute(self, name: str, first: int, count: int, begin: int) -> None:
        """Record micro-batches of 1 ms, from ``begin`` (nanoseconds) on, that are sent to the client."""
        recorder = self.recorders[name]
        computed, sent = recorder.track(COMPUTE, "stage"), recorder.track(SEND, "stage", CLIENT, "y")
        for number in range(count):
            at = begin + number * 10**6
            recorder.record(computed, first + number, at, at + 10**6)
            recorder.record(sent, first + number, at + 10**6, at + 10**6 + 1000, 4)


@pytest.fixture
def asked_anew(monkeypatch):
    """Every look asks the machines."""
    monkeypatch.setattr(live, "REFRESH_SECONDS", 0.0)


def test_a_machine_that_is_gone_does_not_hide_what_the_others_do(asked_anew):
    lab = Recorded("a", "b")
    begin = now() - 100 * 10**9
    page = LivePage("net", lab, About, {})
    lab.compute("a", 0, 50, begin)
    lab.compute("b", 0, 50, begin)
    page.page()
    lab.silent.add("b")
    lab.compute("a", 50, 500, begin + 60 * 10**9)
    shown = {machine.machine: machine for machine in page.page().machines}
    assert shown["a"].shares["compute"] == pytest.approx(1, abs=0.01)
    assert (shown["a"].answers, shown["b"].answers) == (True, False)
    assert max(bar[4] for bar in page.page().bars) == 549


def test_a_result_counts_once_when_a_clock_is_known_better(asked_anew):
    lab = Recorded("a")
    begin = now() - 10**9
    page = LivePage("net", lab, About, {})
    lab.compute("a", 0, 10, begin)
    assert page.page().results == 10
    for offset in (100, -300):
        lab.clock.add(ClockSample(now(), offset, 1000))
        assert page.page().results == 10
    lab.compute("a", 10, 5, begin + 10**8)
    assert page.page().results == 15


def test_times_count_from_the_first_look(asked_anew):
    lab = Recorded("a")
    begin = now() - 60 * 10**9
    page = LivePage("net", lab, About, {})
    lab.compute("a", 0, 10, begin)
    page.page()
    lab.silent.add("a")
    page.page()
    lab.silent.clear()
    lab.compute("a", 10, 10, begin + 50 * 10**9)
    shown = page.page()
    assert [text for _, text in shown.events] == ["a: does not answer", "a: answers again"]
    assert all(at > 0 for at, _ in shown.events)
    assert min(bar[2] for bar in shown.bars) > 0


def test_a_bystander_is_told_of_a_failure(asked_anew):
    lab = Recorded("a")
    page = LivePage("net", lab, About, {})
    lab.compute("a", 0, 10, now() - 10**9)
    assert page.page().state != "failed"
    lab.recorders["a"].happened("failed: machine 'b' has gone")
    shown = page.page()
    assert (shown.state, "machine 'b' has gone" in shown.reason) == ("failed", True)


def test_links_end_by_a_lost_machine_or_by_closing(asked_anew):
    lab = Recorded("a", "b")
    page = LivePage("net", lab, About, {})
    for name in ("a", "b"):
        lab.compute(name, 0, 10, now() - 10**9)
    lab.recorders["a"].happened(f"{LINK_ENDED}machine 'b' cannot be reached")
    assert page.page().state == "running"
    lab.silent.add("b")
    assert page.page().state == "failed"
    lab.silent.clear()
    lab.error = tvm_split.WorkerError("the deployment has ended")
    assert (page.page().state, page.has_ended) == ("ended", True)


def test_nonsense_of_a_machine_is_told_and_the_page_goes_on(asked_anew):
    lab = Recorded("a", "b")
    page = LivePage("net", lab, About, {})
    for name in ("a", "b"):
        lab.compute(name, 0, 10, now() - 10**9)
    page.page()
    lab.refusing["a"] = "a at 10.0.0.1:7: events of the unknown kind 'dance'"
    shown = page.page()
    assert (shown.state, shown.results) == ("running", 10)
    assert [machine.machine for machine in shown.machines if not machine.answers] == ["a"]
    assert any(lab.refusing["a"] in text for _, text in shown.events)
    lab.refusing.clear()
    assert all(machine.answers for machine in page.page().machines)

"""Runs a scenario: starts what it needs, lets the client run, and does each fault when its phase has come."""

import heapq
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rpc_runtime.client.deployment_event import DeploymentEvent
from rpc_runtime.processes import Closing
from rpc_runtime.scratch import PREFIX, remove_orphans
from tests.chaos.faults import CLIENT_KILLED, FAULTS, LAST, PHASES, Target
from tests.chaos.lab import Lab, Worker, relayed
from tests.chaos.scenario import Hit, Scenario
from tests.chaos.task import Outcome, Task, still_there
from tests.helpers.rpc_runtime.pipelines import over_grpc
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.waiting import eventually

TIMEOUT_SECONDS = 30.0
"""The deployment's timeout: machines that come back do so sooner."""
HUNG_SECONDS = 180.0
"""A client that takes longer for a scenario hangs."""
LINGER_SECONDS = 4.0
"""How long a fault waits for a phase that may not come, such as a recovery after a pause that nobody noticed."""


@dataclass
class Story:
    """What happened in a scenario. ``hits`` has the faults that came, with the time of each; ``closing_at`` is when
    the client began to close."""

    hits: dict[Hit, float] = field(default_factory=dict)
    events: list[tuple[float, DeploymentEvent]] = field(default_factory=list)
    open_error: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    closing_at: float = float("inf")
    hung: str = ""
    left: list[str] = field(default_factory=list)


def scratch_folders() -> set[str]:
    """Return the scratch folders of processes that run."""
    remove_orphans()
    return set(map(str, Path(tempfile.gettempdir()).glob(f"{PREFIX}*")))


class ClientProcess(Closing):
    """The process of `tests.chaos.client`, and its messages."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                cwd=ROOT,
            )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                self._messages.put(pickle.load(self._process.stdout))
        except (EOFError, pickle.UnpicklingError):
            self._messages.put(("ended",))

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, words: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(words)
            self._process.stdin.flush()
        except OSError:  # it was killed
            pass

    def next(self, seconds: float) -> tuple[Any, ...] | None:
        try:
            return self._messages.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def kill(self) -> None:
        self._process.kill()

    def stacks(self) -> str:
        """Return where its threads are; then it is killed."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        self.close()
        return self._log.read_text()[-8000:]

    def close(self) -> None:
        self._process.kill()
        self._thread.join()
        self._process.communicate()


class Director(Closing):
    """Runs scenarios in a lab, with one client after the other."""

    def __init__(self, lab: Lab, folder: Path, on_message: Callable[..., None] = lambda *words: None) -> None:
        self._lab, self._log, self._on_message = lab, folder / "client.log", on_message
        self._client: ClientProcess | None = None

    def run(self, scenario: Scenario) -> Story:
        workers = self._lab.workers(scenario.machines, at_switch=scenario.at_switch)
        folders = scratch_folders()
        if self._client is None or not self._client.is_running:
            self.close()
            self._client = ClientProcess(self._log)
        with ExitStack() as until_end:
            relays = until_end.enter_context(relayed(workers, scenario.relayed))
            targets = {name: Target(worker, relays.get(name)) for name, worker in workers.items()}
            for hit in scenario.hits:
                if hit.machine:
                    FAULTS[hit.fault].prepare(targets[hit.machine])
            self._client.send(pickle.dumps(_task(scenario, targets)))
            story = _Play(scenario, targets, self._client, self._on_message).played()
            if story.hung:
                story.hung = self._client.stacks()
            after = _after(scenario, story, workers)
        living = [worker for worker in workers.values() if worker.is_running]
        left = still_there(lambda: "; ".join(filter(None, (worker.left() for worker in living))))
        story.left += filter(None, (after, left))
        story.left += sorted(scratch_folders() - folders)
        return story

    def logs(self) -> Mapping[str, str]:
        client = {"client": self._log.read_text()} if self._log.exists() else {}
        return {**self._lab.logs(), **client}

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _task(scenario: Scenario, targets: Mapping[str, Target]) -> Task:
    endpoints = {name: target.worker.endpoint for name, target in targets.items()}
    for name, target in targets.items():
        if target.relay is not None:
            endpoints[name] = target.worker.endpoint_at(target.relay.address)
    subject = scenario.subject
    return Task(
        subject.program,
        endpoints,
        over_grpc(subject.program) if scenario.by_grpc else {},
        subject.blobs,
        subject.batches,
        subject.expected,
        scenario.streams,
        scenario.callers,
        scenario.holds,
        TIMEOUT_SECONDS,
    )


def _after(scenario: Scenario, story: Story, workers: Mapping[str, Worker]) -> str:
    """Wait until workers have ended that should; return which others have ended."""
    should = {hit.machine for hit in story.hits if hit.machine and FAULTS[hit.fault].ends}
    for machine in should:
        eventually(lambda machine=machine: not workers[machine].is_running, f"{machine} has ended")
    for hit in story.hits:
        if hit.fault == "restarted":
            workers[hit.machine].wait_ready()
    ended = [machine for machine, worker in workers.items() if not worker.is_running and machine not in should]
    return f"the workers of {', '.join(ended)} have ended" if ended else ""


class _Play:
    """One scenario, from the client's first message to its last."""

    def __init__(
        self,
        scenario: Scenario,
        targets: Mapping[str, Target],
        client: ClientProcess,
        on_message: Callable[..., None],
    ) -> None:
        self._targets, self._client, self._on_message = targets, client, on_message
        self._waiting = list(scenario.hits)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._undo: dict[Hit, Callable[[], None]] = {}
        self._story = Story()
        self._running, self._over = scenario.streams + scenario.callers, 0
        self._is_open = self._is_enough = False
        self._last_act, self._lingers_seconds = time.monotonic(), scenario.lingers_seconds

    def played(self) -> Story:
        end = time.monotonic() + HUNG_SECONDS
        try:
            while (now := time.monotonic()) < end:
                self._act(now)
                if self._is_time_for_enough(now):
                    self._is_enough = True
                    self._client.send(b"enough\n")
                next_due = self._due[0][0] if self._due else now + 0.2
                message = self._client.next(min(next_due, end, now + 0.2) - now)
                if message is not None:
                    self._on_message(*message)
                    if self._take(*message):
                        return self._story
            self._story.hung = "hung"
            return self._story
        finally:
            for undo in tuple(self._undo.values()):
                undo()

    def _act(self, now: float) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
            self._last_act = time.monotonic()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), act))

    def _take(self, kind: str, *content: Any) -> bool:
        """Take a message; return whether it is the last one."""
        story, phase = self._story, kind
        if kind == "event":
            story.events.append((time.monotonic(), content[0]))
            phase = f"event {content[0].kind}"
        elif kind == "over":
            self._over += 1
            story.open_error = story.open_error or ("" if self._is_open else content[0])
        elif kind == "opened":
            self._is_open = True
        elif kind == "closing":
            story.closing_at = time.monotonic()
        elif kind == "closed":
            story.outcomes, left = content
            story.left += [left] if left else []
            return True
        elif kind == "ended":
            if not any(hit.fault == CLIENT_KILLED for hit in story.hits):
                story.left.append("the client has ended")
            return True
        for hit in [hit for hit in self._waiting if PHASES[hit.phase].message == phase]:
            self._waiting.remove(hit)
            self._later(hit.delay_seconds, partial(self._hit, hit))
        return False

    def _hit(self, hit: Hit) -> None:
        self._story.hits[hit] = time.monotonic()
        self._on_message("fault", str(hit))
        if hit.fault == CLIENT_KILLED:
            self._client.kill()
            return
        fault, target = FAULTS[hit.fault], self._targets[hit.machine]
        self._undo[hit] = partial(self._end, hit)
        fault.hit(target)
        if hit.lasts_seconds is not None:
            self._later(hit.lasts_seconds, partial(self._end, hit))

    def _end(self, hit: Hit) -> None:
        if self._undo.pop(hit, None) is not None:
            FAULTS[hit.fault].undo(self._targets[hit.machine])

    def _is_time_for_enough(self, now: float) -> bool:
        if self._is_enough or self._due:
            return False
        if not self._is_open:
            return self._over > 0
        early = [hit for hit in self._waiting if hit.phase != LAST]
        seconds = LINGER_SECONDS if early else self._lingers_seconds
        return self._over == self._running or now >= self._last_act + seconds

"""The client of all scenarios, a process of its own: it deploys, runs and compares, and says how far it is.

It reads pickled tasks from standard input, each followed by a word that there were faults enough, and writes messages.
The next task is not read before everything of the last one is freed.
"""

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.processes import take_stdout
from rpc_runtime.program.placing import held, place
from rpc_runtime.program.program import Program
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.chaos.task import Arrays, Outcome, Task, more_than, still_there
from tests.helpers.mappings import held_by

TAIL = 25
"""Micro-batches that every caller still runs when there were faults enough."""


class AnyMachine:
    """A `Recovery`: stages may go to every machine."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        return self._task.endpoints

    def refresh(self) -> None:
        """All addresses stay."""

    def place(self, lost: Collection[str], workers: Mapping[str, WorkerDescription]) -> Program:
        return place(self._task.program, lost, list(workers), lambda machine, stages: "", lambda stage, machine: 1.0)


def spares_of(task: Task) -> list[Program]:
    """Return what each machine holds of the stages of the others."""
    names = {stage.name for stage in task.program.stages}
    holds = [held(task.program, machine, names, lambda machine, stages: "") for machine in task.endpoints]
    return [hold for hold in holds if hold is not None]


def opening_of(task: Task) -> Opening:
    """Return how a task's program is opened."""
    return Opening(
        task.program,
        task.endpoints,
        lambda digest: task.blobs / digest,
        timeout_seconds=task.timeout_seconds,
        links=task.links,
        recovery=AnyMachine(task),
        holds=spares_of(task) if task.holds else (),
    )


class Client:
    """Carries out one task after the other; ``say`` sends a message."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._resting: Counter[str] = Counter()

    def carry_out(self, task: Task, wait_enough: Callable[[], None]) -> None:
        """Deploy, run until there were faults enough, close; say what came of it."""
        self._resting = self._resting or held_by(os.getpid())
        enough = threading.Event()
        outcomes: list[Outcome] = []
        self._say("opening")
        try:
            session = Session(opening_of(task), on_event=partial(self._say, "event"))
        except TvmSplitError as error:
            self._say("over", f"{type(error).__name__}: {error}")
            wait_enough()
        else:
            self._say("opened", "")
            outcomes = self._run(session, task, enough, wait_enough)
            self._say("closing")
            session.close()
        self._say("closed", outcomes, self._left())

    def _run(
        self, session: Session, task: Task, enough: threading.Event, wait_enough: Callable[[], None]
    ) -> list[Outcome]:
        said = threading.Event()
        ways = [self._stream] * task.streams + [self._call] * task.callers
        outcomes = [Outcome() for _ in ways]

        def run(way: Callable[..., None], outcome: Outcome) -> None:
            def took(number: int, result: Arrays) -> None:
                outcome.take(task, number, result)
                if not said.is_set():
                    said.set()
                    self._say("result")

            try:
                way(session, task, enough, outcome, took)
            except Exception as error:
                outcome.error = f"{type(error).__name__}: {error}"
                self._say("over", outcome.error)

        threads = [
            threading.Thread(target=run, args=(way, outcome)) for way, outcome in zip(ways, outcomes, strict=True)
        ]
        for thread in threads:
            thread.start()
        wait_enough()
        enough.set()
        for thread in threads:
            thread.join()
        return outcomes

    def _stream(
        self, session: Session, task: Task, enough: threading.Event, outcome: Outcome, took: Callable[..., None]
    ) -> None:
        count = 0
        for result in session.stream(fed(task, enough, outcome)):
            took(count, tuple(result))
            count += 1
        outcome.lost += max(0, outcome.fed - count)
        outcome.doubled += max(0, count - outcome.fed)

    def _call(
        self, session: Session, task: Task, enough: threading.Event, outcome: Outcome, took: Callable[..., None]
    ) -> None:
        for number, batch in enumerate(fed(task, enough, outcome)):
            took(number, tuple(session.run(batch)))

    def _left(self) -> str:
        """Return what this process still has of the deployment, as text."""

        def look() -> str:
            gc.collect()  # what is left of a failed link refers to itself
            return more_than(self._resting, held_by(os.getpid()))

        text = still_there(look)
        return text and f"the client has {text}: {sorted(thread.name for thread in threading.enumerate())}"


def fed(task: Task, enough: threading.Event, outcome: Outcome) -> Iterator[Arrays]:
    """Yield micro-batches until there were faults enough, and `TAIL` more."""
    after = 0
    while after < TAIL:
        batch = task.batches[outcome.fed % len(task.batches)]
        outcome.fed += 1
        yield batch
        after += enough.is_set()
        enough.wait(0.002)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    lock, messages = threading.Lock(), take_stdout().detach()

    def say(*message: Any) -> None:
        with lock:
            pickle.dump(message, messages)
            messages.flush()

    client, tasks = Client(say), sys.stdin.buffer
    while True:
        try:
            task = pickle.load(tasks)
        except EOFError:
            return
        client.carry_out(task, tasks.readline)


if __name__ == "__main__":
    main()

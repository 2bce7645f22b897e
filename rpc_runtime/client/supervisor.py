"""Keeps a deployment running: when a machine fails, its stages go to the machines that are left.

One thread replaces placements, so that nothing else has to know that there are several. The client alone decides:
it has the inputs, and whether a machine answers it is what counts.

    running ─ failure ─▶ detach ─▶ ask all machines ─▶ place ─▶ prepare ─▶ join ─▶ attach ─▶ running
                                        ▲                 └──────── fails ────┘
                                        └──────────── at most `MOST_ATTEMPTS` times ────┘
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from queue import SimpleQueue
from typing import Literal, Protocol

from rpc_runtime.client.dispatcher import Dispatcher
from rpc_runtime.client.placement import Placement
from rpc_runtime.client.watch import Failure, ReportKind
from rpc_runtime.client.worker_client import WorkerDescription, answering
from rpc_runtime.errors import TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.program.program import Program
from rpc_runtime.wire.channels import WorkerEndpoint

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 3
"""Most placements that are tried for one failure, and most failures in a row without a result between them."""
RETURN_SECONDS = 1.0
"""Time between two questions whether a machine has returned, if the stages fit nowhere."""
SAME_LINK_SECONDS = 60.0
"""A link that breaks twice within this time counts as a failure of the machine that receives."""
RECOVERABLE = (ReportKind.GONE, ReportKind.LINK)
"""Failures of machines and links. A stage that raised would do it again with the same inputs."""


class Recovery(Protocol):
    """What knows the machines that could compute stages."""

    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        """Return the addresses of all machines that may get stages; raise an error if stages cannot move at all."""

    def place(self, lost: Collection[str], workers: Mapping[str, WorkerDescription]) -> Program:
        """Return the program on machines of ``workers`` that are not ``lost``.

        Raises:
            WorkerUnavailableError: a stage fits on none of them.
        """

    def check(self, program: Program, workers: Mapping[str, WorkerDescription]) -> None:
        """Raise an error if a worker cannot run its stages."""


EventKind = Literal["failure", "recovered", "gave up"]


@dataclass(frozen=True)
class DeploymentEvent:
    """Something that happened to a running deployment.

    ``epoch`` counts placements from 1. Of a recovery, ``pause_seconds`` is the time from the failure until inputs were
    fed again, ``replayed`` the number of micro-batches that were sent again, and ``placement`` has the machines of each
    stage from then on.
    """

    kind: EventKind
    epoch: int
    machine: str = ""
    cause: str = ""
    pause_seconds: float = 0.0
    replayed: int = 0
    placement: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def text(self) -> str:
        """What happened, and why: of an error's text its first sentence, since the others say what to do."""
        again = f" in {self.pause_seconds:.2g} s ({self.replayed} inputs were sent again)" if self.placement else ""
        return f"{self.kind}{again}: {self.cause.partition('. ')[0]}"


def placement_of(program: Program) -> dict[str, tuple[str, ...]]:
    """Return the machines of each stage, by its name."""
    return {name: tuple(stage.machine for stage in replicas) for name, replicas in program.replicas.items()}


class Supervisor:
    """Replaces the placement of a dispatcher after failures, until `close`.

    ``open_placement`` makes a placement of a program; ``on_placed`` is called with each new one before it is fed, and
    ``on_event`` with each event.
    """

    def __init__(
        self,
        placement: Placement,
        dispatcher: Dispatcher,
        recovery: Recovery,
        open_placement: Callable[[Program, Mapping[str, WorkerEndpoint]], Placement],
        on_placed: Callable[[Placement], None],
        on_event: Callable[[DeploymentEvent], None],
        timeout_seconds: float,
    ) -> None:
        self._placement, self._dispatcher, self._recovery = placement, dispatcher, recovery
        self._open_placement, self._on_placed, self._on_event = open_placement, on_placed, on_event
        self._timeout_seconds = timeout_seconds
        self._epoch = 1
        self._failures: SimpleQueue[tuple[Placement, Failure] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._opening: Placement | None = None
        self._broken_links: dict[tuple[str, str], float] = {}
        self._since_result = 0, dispatcher.completed
        """The number of failures since the last result, and the number of results then."""
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def failed(self, placement: Placement, failure: Failure) -> None:
        """Report the failure of a placement; that of an earlier one is ignored."""
        self._failures.put((placement, failure))

    def close(self) -> None:
        """End the thread; a recovery in progress is abandoned."""
        self._closed.set()
        self._failures.put(None)
        if (opening := self._opening) is not None:
            opening.close(unload=False)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (report := self._failures.get()) is not None:
            placement, failure = report
            if placement is self._placement and not self._closed.is_set():
                try:
                    self._recover(failure)
                except TvmSplitError as error:
                    self._give_up(failure, error)
                except Exception as error:  # nobody else would tell those who wait
                    logger.exception("recovery failed unexpectedly")
                    self._give_up(failure, WorkerError(f"recovery failed unexpectedly: {error!r}"))

    def _give_up(self, failure: Failure, error: TvmSplitError) -> None:
        if not self._closed.is_set():
            self._event("gave up", failure, cause=str(error))
            self._dispatcher.fail(error)

    def _recover(self, failure: Failure) -> None:
        began = time.monotonic()
        self._event("failure", failure, cause=str(failure.error))
        if failure.kind not in RECOVERABLE:
            raise failure.error
        self._require_progress(failure)
        replayed = self._dispatcher.detach()
        earlier = self._placement
        self._placement = self._next_placement(failure, began)
        self._epoch += 1
        self._on_placed(self._placement)
        self._dispatcher.attach(self._placement.links)
        program = self._placement.program
        self._event(
            "recovered",
            failure,
            pause_seconds=time.monotonic() - began,
            replayed=replayed,
            placement=placement_of(program),
        )
        # A frozen machine delays the end of its placement, which nothing waits for.
        threading.Thread(target=earlier.close, kwargs={"unload": False}, name="end-placement", daemon=True).start()

    def _require_progress(self, failure: Failure) -> None:
        """Raise an error if failures follow each other without a result: an input may end each worker that gets it."""
        count, results = self._since_result
        completed = self._dispatcher.completed
        count = count + 1 if completed == results else 1
        self._since_result = count, completed
        if count > MOST_ATTEMPTS:
            raise WorkerUnavailableError(
                f"machines failed {count} times in a row, and no result came between: input {completed} of this "
                f"deployment may be what they fail on. The last failure: {failure.error}"
            )

    def _next_placement(self, failure: Failure, began: float) -> Placement:
        """Return a placement that is connected, on machines that answer."""
        lost = set(self._lost(failure))
        attempts: list[TvmSplitError] = []
        while True:
            self._dispatcher.moved()
            try:
                endpoints = self._recovery.endpoints()
                workers = answering({name: endpoint for name, endpoint in endpoints.items() if name not in lost})
                program = self._recovery.place({*endpoints} - {*workers}, workers)
            except TvmSplitError as error:
                may_return = isinstance(error, WorkerUnavailableError) and not self._closed.wait(RETURN_SECONDS)
                if not may_return or time.monotonic() > began + self._timeout_seconds:
                    raise self._hopeless(failure, error) from error
                lost.clear()  # a machine that returns may be used again
                continue
            placement = self._opening = self._open_placement(program, endpoints)
            try:
                placement.prepare(partial(self._recovery.check, program))
                placement.join()
            except TvmSplitError as error:
                placement.close(unload=False)
                attempts.append(error)
                lost.update(placement.culprits)
                if self._closed.is_set() or len(attempts) == MOST_ATTEMPTS:
                    raise self._hopeless(failure, error) from error
                logger.info("a placement could not be opened: %s", error)
            else:
                return placement
            finally:
                self._opening = None

    def _lost(self, failure: Failure) -> Collection[str]:
        """Return the machines that are not asked at first: what has gone, or lost the same link again.

        A machine that hangs would be waited for.
        """
        if failure.kind is not ReportKind.LINK:
            return (failure.machine,)
        ends, now = (failure.machine, failure.peer), time.monotonic()
        before = self._broken_links.get(ends)
        self._broken_links[ends] = now
        return () if before is None or now - before > SAME_LINK_SECONDS else (failure.peer,)

    def _hopeless(self, failure: Failure, error: TvmSplitError) -> TvmSplitError:
        return WorkerUnavailableError(
            f"{failure.error}. Its stages could not be moved: {error}. {self._dispatcher.completed} results were "
            "returned before, those of the inputs that were fed first"
        )

    def _event(self, kind: EventKind, failure: Failure, cause: str = "", **more: object) -> None:
        event = DeploymentEvent(kind, self._epoch, failure.machine, cause or str(failure.error), **more)  # type: ignore[arg-type]
        logger.info("%s", event)
        self._on_event(event)

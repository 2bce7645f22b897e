"""Keeps a deployment running: when a machine fails or drains, its stages go to the machines that are left.

One thread at a time replaces placements, so that nothing else has to know that there are several. The client alone
decides: it has the inputs, and whether a machine answers it is what counts.

    running ─ failure ─▶ detach ─▶ ask all machines ─▶ place ─▶ prepare ─▶ join ─▶ attach ─▶ running
                                        ▲                 └──────── fails ────┘
                                        └──────────── at most `MOST_ATTEMPTS` times ────┘

    running ─ drain, return, `move` ─▶ place ─▶ prepare ─▶ join ─▶ pause ─▶ empty ─▶ detach ─▶ attach ─▶ running
              the earlier placement computes                              └ at most 2 s
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from rpc_runtime.client.bystander import HELD
from rpc_runtime.client.deployment_event import DeploymentEvent, EventKind, placement_of
from rpc_runtime.client.dispatcher import Dispatcher
from rpc_runtime.client.opening import Opening, Recovery, accept_all
from rpc_runtime.client.placement import Placement
from rpc_runtime.client.returns import MoveTimes, Returns
from rpc_runtime.client.watch import Failure, ReportKind
from rpc_runtime.client.worker_client import SIGN_OF_LIFE_SECONDS, WorkerDescription, answering, describe, not_drained
from rpc_runtime.errors import TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.program.events import FAILURE
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.transport import TRANSPORTS, transport_named

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 3
"""Most placements that are tried for one failure, and most failures in a row without a result between them."""
RETURN_SECONDS = 1.0
"""Time between two questions whether a machine has returned, if the stages fit nowhere."""
SAME_LINK_SECONDS = 60.0
"""A link that breaks twice within this time counts as a failure of the machine that receives."""
RECOVERABLE = (ReportKind.GONE, ReportKind.LINK)
"""Failures of machines and links. A stage that raised would do it again with the same inputs."""


class Supervisor:
    """Opens the placements of a dispatcher: the first one, then others after failures, drains, returns and by `move`.

    ``on_placed`` is called with each placement before it is fed, and ``on_event`` with each event. Without a recovery,
    a failure ends the dispatcher, and only `move` replaces the placement.
    """

    def __init__(
        self,
        wanted: Opening,
        dispatcher: Dispatcher,
        on_placed: Callable[[Placement], None],
        on_event: Callable[[DeploymentEvent], None],
        times: MoveTimes,
    ) -> None:
        self._wanted = wanted
        self._dispatcher, self._on_placed, self._on_event, self._times = dispatcher, on_placed, on_event, times
        self.placement = self._new(wanted)
        self._epoch = 1
        self._steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._switching = threading.RLock()
        """Held by the one thread that may replace the placement."""
        self._closed = threading.Event()
        self._opening: Placement | None = None
        self._holds: list[Placement] = []
        self._failure: Failure | None = None
        """That of the current placement, until it is handled."""
        self._emptied = threading.Event()
        """Set when a paused placement has nothing left to compute, or has failed."""
        self._returns = Returns(self._ask, lambda machine: self._steps.put(partial(self._returned, machine)), times)
        self._drained: dict[str, float] = {}
        """When machines that drain are looked at again."""
        self._told: set[str] = set()
        """The machines that drain, and of which an event has told."""
        self._broken_links: dict[tuple[str, str], float] = {}
        self._since_result = 0, dispatcher.completed
        """The number of failures since the last result, and the number of results then."""
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Open the first placement, and feed it. Raises as `Placement.prepare`."""
        with self._switching:
            self._opened(self.placement)
            self._on_placed(self.placement)
            self._dispatcher.attach(self.placement.links, self._wanted.in_flight)
            self._holds = self._held(self._wanted)
            self.blob_bytes_held = sum(hold.blob_bytes_sent for hold in self._holds)

    def move(self, wanted: Opening) -> None:
        """Change to another program; if it cannot be opened, raise the error, and the current one runs on."""
        with self._switching:
            with contextlib.ExitStack() as undo:
                placement = self._opened(self._new(wanted))
                undo.callback(placement.close, unload=False)
                holds = self._held(wanted)
                undo.pop_all()
            earlier, self._wanted, self._holds = self._holds, wanted, holds
            try:
                self._change_to(placement, "", "its owner changed the plan")
            finally:
                for hold in earlier:
                    hold.close(unload=False)

    def _new(self, wanted: Opening) -> Placement:
        draining = None if wanted.recovery is None else self._draining
        return Placement(wanted, self._dispatcher, self._failed, draining)

    def _held(self, wanted: Opening) -> list[Placement]:
        """Return placements that are loaded and not connected, on machines that may get their stages."""
        model = f"{wanted.model}{HELD}"
        opening = replace(wanted, model=model, about=lambda program: b"", check=accept_all)
        holds: list[Placement] = []
        with contextlib.ExitStack() as undo:
            for program in wanted.holds:
                held = replace(opening, program=program)
                holds.append(Placement(held, self._dispatcher, self._hold_failed, self._hold_drains))
                undo.callback(holds[-1].close, unload=False)
                holds[-1].prepare()
            undo.pop_all()
        return holds

    def _hold_failed(self, hold: Placement, failure: Failure) -> None:
        self._steps.put(partial(self._lose, hold, failure.machine, str(failure.error)))

    def _hold_drains(self, hold: Placement, machine: str) -> None:
        self._steps.put(partial(self._lose, hold, machine, f"machine {machine!r} drains"))

    def _lose(self, hold: Placement, machine: str, cause: str) -> None:
        """Give up what a machine only held; nothing depends on it."""
        if hold in self._holds:
            self._holds.remove(hold)
            self._event("standby lost", machine, cause)
            hold.close(unload=False)

    def _failed(self, placement: Placement, failure: Failure) -> None:
        """Handle the failure of a placement; that of an earlier one is ignored."""
        self._steps.put(partial(self._handle, placement, failure))
        if placement is self.placement is not self._opening:  # what is being opened may need it, or take long
            self._failure = failure
            self._emptied.set()
            self._end_opening()

    def _draining(self, placement: Placement, machine: str) -> None:
        """Look after a machine that drains; called again and again."""
        now = time.monotonic()
        if placement is self.placement and now >= self._drained.get(machine, 0.0):
            self._steps.put(partial(self._leave, machine, machine not in self._drained))
            self._drained[machine] = now + self._times.ask_seconds

    def close(self, *, unload: bool) -> None:
        """End the thread and the placement; a recovery or move in progress is abandoned."""
        self._closed.set()
        self._returns.close()
        self._steps.put(None)
        self._end_opening()
        if self._thread is not threading.current_thread():
            self._thread.join()
        with self._switching:  # its owner may be moving it
            for placement in (*self._holds, self.placement):
                placement.close(unload=unload)

    def _end_opening(self) -> None:
        if (opening := self._opening) is not None:
            opening.close(unload=False)

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            with self._switching:
                if not self._closed.is_set():
                    step()

    def _handle(self, placement: Placement, failure: Failure) -> None:
        if placement is not self.placement:
            return
        if self._wanted.recovery is None:
            self._end(failure.error)
            return
        try:
            self._recover(failure, self._wanted.recovery)
        except TvmSplitError as error:
            self._give_up(failure, error)
        except Exception as error:  # nobody else would tell those who wait
            logger.exception("recovery failed unexpectedly")
            self._give_up(failure, WorkerError(f"recovery failed unexpectedly: {error!r}"))

    def _give_up(self, failure: Failure, error: TvmSplitError) -> None:
        if not self._closed.is_set():
            self._event("gave up", failure.machine, str(error))
            self._end(error)

    def _end(self, error: TvmSplitError) -> None:
        self.placement.links.recorder.happened(f"{FAILURE}{error}")
        self._dispatcher.fail(error)

    def _recover(self, failure: Failure, recovery: Recovery) -> None:
        began = time.monotonic()
        self._event("failure", failure.machine, str(failure.error))
        if failure.kind not in RECOVERABLE:
            raise failure.error
        carried = {link.transport for link in self.placement.link_statistics()}
        if ending := [name for name in carried if name in TRANSPORTS and not transport_named(name).survives]:
            why = f"links by {', '.join(ending)} end with their job; start that again, or leave the transport auto"
            raise self._hopeless(failure, WorkerUnavailableError(why))
        self._require_progress(failure)
        self._dispatcher.detach()
        self._failure = None
        lost = {*self._lost(failure)} - {CLIENT}
        for machine in lost:
            self._returns.failed(machine)
        self._returns.expect(lost)
        placement = self._next_placement(failure, recovery, lost | self._returns.away, began)
        self._switch_to(placement, "recovered", failure.machine, str(failure.error), began)

    def _leave(self, machine: str, is_new: bool) -> None:
        """Move the stages of a machine that drains to others."""
        if machine in self.placement.program.machines:
            self._tell_draining([machine])
            self._rearrange(machine, f"machine {machine!r} drains", says_why=is_new)

    def _tell_draining(self, machines: Collection[str]) -> None:
        for machine in sorted({*machines} - self._told):
            self._told.add(machine)
            self._event("draining", machine)

    def _returned(self, machine: str) -> None:
        """Give a machine its stages back; if it cannot take them, wait for longer."""
        self._drained.pop(machine, None)
        self._told.discard(machine)
        if machine in self._wanted.program.machines:
            self._event("returned", machine)
            self._rearrange(machine, f"machine {machine!r} has returned", says_why=True)
            if machine not in self.placement.program.machines:
                self._returns.failed(machine)
                self._returns.expect([machine])

    def _rearrange(self, machine: str, cause: str, *, says_why: bool) -> None:
        """Move to where the planned stages belong while some machines are away, if they are elsewhere."""
        recovery, away = self._wanted.recovery, set(self._returns.away)
        if recovery is None:
            return
        try:
            wanted = self._placed(recovery, away, self.placement.program.machines)
            if wanted.program != self.placement.program:
                self._change_to(self._opened(self._new(wanted)), machine, cause)
        except Exception as error:
            if not isinstance(error, TvmSplitError):
                logger.exception("moving stages failed unexpectedly")
            if says_why and not self._closed.is_set():
                self._event("not moved", machine, str(error))

    def _placed(self, recovery: Recovery, avoided: Collection[str], required: Collection[str] = ()) -> Opening:
        """Return the planned stages on machines that answer, take deployments, and are not avoided.

        Raises:
            WorkerUnavailableError: a stage fits on none of them, or one that is ``required`` does not answer.
        """
        endpoints = recovery.endpoints()
        workers = answering({name: endpoint for name, endpoint in endpoints.items() if name not in avoided})
        if silent := {*required} - {*workers} - {*avoided}:
            raise WorkerUnavailableError(f"{', '.join(sorted(silent))} did not answer in time")
        free = not_drained(workers)
        self._tell_draining(({*workers} - {*free}) & {*self.placement.program.machines})
        try:
            program = recovery.place({*endpoints} - {*free}, free)
        except WorkerUnavailableError as error:
            if not (drained := ", ".join(sorted({*workers} - {*free}))):
                raise
            text = f"{error}. Drained, and free after `tvm-split drain MACHINE --undo`: {drained}"
            raise WorkerUnavailableError(text) from error
        return replace(self._wanted, program=program, endpoints=endpoints)

    def _opened(self, placement: Placement) -> Placement:
        """Return a placement when it is connected; raise an error also if the current one fails meanwhile."""
        self._opening = placement
        try:
            self._require_running()
            placement.prepare()
            placement.join()
            self._opening = None
            self._require_running()  # or it was closed, by `_end_opening`
        except BaseException:
            self._opening = None
            if placement is self.placement:  # the first one: there is nothing to recover
                self._closed.set()
                raise
            placement.close(unload=False)
            self._require_running()
            raise
        return placement

    def _require_running(self) -> None:
        self._dispatcher.require_usable()
        if self._failure is not None:
            raise WorkerUnavailableError(f"the stages that run have failed meanwhile: {self._failure.error}")

    def _change_to(self, placement: Placement, machine: str, cause: str) -> None:
        """Switch once the current placement has nothing left to compute, or was given the time for that."""
        began = time.monotonic()
        self._emptied = self._dispatcher.pause()
        if self._failure is None:
            self._emptied.wait(min(self._times.empty_seconds, self._wanted.timeout_seconds / 2))
        self._switch_to(placement, "moved", machine, cause, began)

    def _switch_to(self, placement: Placement, kind: EventKind, machine: str, cause: str, began: float) -> None:
        replayed = self._dispatcher.detach()
        earlier, self.placement, self._failure = self.placement, placement, None
        self._epoch += 1
        self._on_placed(placement)
        try:
            self._dispatcher.attach(placement.links, placement.opening.in_flight)
            self._returns.away.difference_update(placement.program.machines)
            self._returns.expect({*self._wanted.program.machines} - {*placement.program.machines})
            pause_seconds, where = time.monotonic() - began, placement_of(placement.program)
            self._event(kind, machine, cause, pause_seconds=pause_seconds, replayed=replayed, placement=where)
        finally:
            # A frozen machine delays the end of its placement, which nothing waits for.
            ending = partial(earlier.close, unload=False)
            threading.Thread(target=ending, name="end-placement", daemon=True).start()

    def _require_progress(self, failure: Failure) -> None:
        """Raise an error if failures follow each other without a result: an input may end each worker that gets it."""
        count, results = self._since_result
        completed = self._dispatcher.completed
        count = (count if completed == results else 0) + self._dispatcher.is_computing
        self._since_result = count, completed
        if count > MOST_ATTEMPTS:
            raise WorkerUnavailableError(
                f"machines failed {count} times in a row, and no result came between: input {completed} of this "
                f"deployment may be what they fail on. The last failure: {failure.error}"
            )

    def _next_placement(self, failure: Failure, recovery: Recovery, lost: set[str], began: float) -> Placement:
        """Return a placement that is connected, on machines that answer; at first without ``lost`` ones."""
        attempts: list[TvmSplitError] = []
        while True:
            self._dispatcher.moved()
            try:
                placement = self._new(self._placed(recovery, lost))
            except WorkerUnavailableError as error:
                if self._closed.wait(RETURN_SECONDS) or time.monotonic() > began + self._wanted.timeout_seconds:
                    raise self._hopeless(failure, error) from error
                lost.clear()  # a machine that returns may be used again
                continue
            try:
                return self._opened(placement)
            except TvmSplitError as error:
                attempts.append(error)
                lost.update(placement.culprits)
                if self._closed.is_set() or len(attempts) == MOST_ATTEMPTS:
                    raise self._hopeless(failure, error) from error
                logger.info("a placement could not be opened: %s", error)

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

    def _ask(self, machine: str) -> WorkerDescription | None:
        """Return the worker of a machine that is away, if it answers; called in threads of their own."""
        if (recovery := self._wanted.recovery) is None:
            return None
        try:
            recovery.refresh()
            return describe(recovery.endpoints()[machine], SIGN_OF_LIFE_SECONDS)
        except (TvmSplitError, OSError, KeyError):  # KeyError: its launcher does not list it now
            return None

    def _event(self, kind: EventKind, machine: str, cause: str = "", **more: object) -> None:
        event = DeploymentEvent(kind, self._epoch, machine, cause, **more)  # type: ignore[arg-type]
        logger.info("%s", event)
        self._on_event(event)

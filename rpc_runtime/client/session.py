"""Runs a program on workers: opens, watches and closes it."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rpc_runtime.client.asking import answers_of
from rpc_runtime.client.deployment_event import DeploymentEvent
from rpc_runtime.client.dispatcher import Dispatcher
from rpc_runtime.client.opening import Opening
from rpc_runtime.client.past import Past
from rpc_runtime.client.placement import Placement
from rpc_runtime.client.returns import USUAL_MOVE_TIMES, MoveTimes
from rpc_runtime.client.supervisor import Supervisor
from rpc_runtime.client.worker_client import ANSWER_SECONDS
from rpc_runtime.errors import DeadlineError, WorkerUnavailableError
from rpc_runtime.program.clocks import MachineClock
from rpc_runtime.program.events import OPENED, PAUSE, Observation, now
from rpc_runtime.program.measurements import LinkStatistics
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.program.runner import Outputs, Runner

logger = logging.getLogger(__name__)

ROWS_SECONDS = 10.0
"""Timeout of a worker's answer with up to 3 MB of rows."""
LAST_WORD_SECONDS = 1.0
"""Timeout of observing one worker after a failure, so that a hanging worker does not delay the others."""


class Session(Runner):
    """A program loaded on workers. A context manager.

    The constructor sends missing blobs to the workers, loads the stages, and connects the machines. Several threads may
    then run and stream at the same time. `run`, `submit` and `stream` raise:
        InputError: an input does not fit the program.
        WorkerUnavailableError: a worker has ended, hangs, or lost a connection; the session is then unusable.
        StageError: a stage raised; the session is then unusable.
        DeadlineError: there was no progress for ``timeout_seconds`` while a result was due.

    Args:
        on_event: called with each event, in any thread.
        move_times: how long moves and returns of machines take.

    Raises:
        TvmSplitError: a worker cannot be reached, refuses, or cannot run its stages. Everything is then freed.
    """

    def __init__(
        self,
        opening: Opening,
        on_event: Callable[[DeploymentEvent], None] = lambda event: None,
        move_times: MoveTimes = USUAL_MOVE_TIMES,
    ) -> None:
        self.opening = opening
        """How the program was opened; `move` takes another one."""
        self._on_event = on_event
        self._dispatcher = Dispatcher(
            opening.program, opening.timeout_seconds, lambda sequence: self._placement.waited_for(sequence)
        )
        self._supervisor = Supervisor(opening, self._dispatcher, self._use, self._add, move_times)
        self._placement = self._supervisor.placement
        self._observed, self.machines = (self._placement, Past()), opening.program.machines
        self._switching = threading.Lock()
        """Held while the end of a placement is read, and when what was observed is returned."""
        self._known: dict[str, Observation] = {}
        """What each machine was last known to have recorded, without rows."""
        try:
            self._supervisor.open()
            self.blob_bytes_sent += self._supervisor.blob_bytes_held
        except BaseException:
            self.close()
            raise
        self.happened(OPENED)
        where = ", ".join(map(str, self._placement.endpoints.values()))
        logger.info("deployment %s runs on %s", self.name, where or "no machine")

    def _use(self, placement: Placement) -> None:
        """Take a placement that is connected as the current one."""
        self._placement = placement
        self.program, self.name, self.deployment = placement.program, placement.name, placement.deployment
        self.link_secrets, self.weight_bytes = placement.link_secrets, placement.weight_bytes
        self.blob_bytes_sent += placement.blob_bytes_sent

    def move(self, opening: Opening) -> None:
        """Change to another program of the same model, which is opened while the current one computes.

        Raises as the constructor; the current program then runs on.
        """
        self._supervisor.move(opening)
        self.opening = opening

    def _add(self, event: DeploymentEvent) -> None:
        """Take an event of the supervisor: after a new placement, observe that one from now on."""
        if event.placement:
            recorder, end = self._placement.links.recorder, now()
            track = recorder.track(PAUSE, peer=event.machine, detail=event.text)
            recorder.record(track, 0, end - int(event.pause_seconds * 1e9), end)
            with self._switching:
                self._observed = (
                    self._placement,
                    self._past(*self._observed, lost=event.machine if event.kind == "recovered" else ""),
                )
                self.machines = self._placement.program.machines
        self._on_event(event)

    def _past(self, earlier: Placement, past: Past, lost: str) -> Past:
        """Return what the placements before the current one have recorded; a machine that was ``lost`` is not asked."""
        machines = [name for name in earlier.clients if name != lost or name in self._placement.clients]
        numbers = past.numbers((*machines, CLIENT), {})
        seen = past.continued(self._ask(earlier, numbers, LAST_WORD_SECONDS, refused={}), {})
        cycle, submitted = self.program.cycle, past.first_sequence + earlier.links.results.submitted
        # A multiple of the cycle, so that schedules hold for the deployment's numbers too.
        return Past({**self._known, **seen}, self.clocks(), -(-submitted // cycle) * cycle)

    def submit(self, inputs: Sequence[Any]) -> Future[Outputs]:
        return self._dispatcher.submit(inputs)

    def stream(self, batches: Iterable[Sequence[Any]]) -> Iterator[Outputs]:
        return self._dispatcher.stream(batches)

    def require_usable(self) -> None:
        self._dispatcher.require_usable()

    def happened(self, what: str) -> None:
        self._placement.links.recorder.happened(what)

    def observe(
        self,
        since: Mapping[str, int] | None = None,
        timeout_seconds: float | None = None,
        kernels: int = 0,
        refused: dict[str, str] | None = None,
    ) -> dict[str, Observation]:
        self._dispatcher.require_open()
        seconds = timeout_seconds or (ANSWER_SECONDS if since is None else ROWS_SECONDS)
        while True:
            placement, past = observed = self._observed
            machines = (*placement.clients, CLIENT)
            numbers = dict.fromkeys(machines) if since is None else past.numbers(machines, since)
            seen = past.continued(self._ask(placement, numbers, seconds, kernels, refused), since)
            with self._switching:
                if observed is self._observed:  # else numbers of its last events are used again
                    self._known.update((machine, replace(own, rows=b"")) for machine, own in seen.items())
                    return seen

    def _ask(
        self,
        placement: Placement,
        numbers: Mapping[str, int | None],
        seconds: float,
        kernels: int = 0,
        refused: dict[str, str] | None = None,
    ) -> dict[str, Observation]:
        """Return what these machines of a placement, if they answer, have recorded after the rows of these numbers."""

        def is_failing() -> bool:
            return placement is not self._placement or not self._dispatcher.is_running

        seconds = min(seconds, LAST_WORD_SECONDS) if is_failing() else seconds
        seen, errors = answers_of(
            [machine for machine in numbers if machine != CLIENT],
            lambda machine: placement.observe(machine, seconds, numbers[machine], kernels),
        )
        for machine, error in errors.items():
            # A machine that does not answer has failed, even if the watch has not noticed it yet.
            if is_failing() or isinstance(error, WorkerUnavailableError | DeadlineError):
                continue
            if refused is None:
                raise error
            refused[machine] = str(error)
        return {**seen, CLIENT: placement.links.recorder.observe(numbers[CLIENT])}

    def clocks(self) -> Mapping[str, MachineClock]:
        placement, past = self._observed
        return {**past.clocks, **{machine: client.clock for machine, client in placement.clients.items()}}

    def links(self) -> tuple[LinkStatistics, ...]:
        """Return the transport of each link; also after a failure."""
        self._dispatcher.require_open()
        return self._placement.link_statistics()

    def close(self) -> None:
        """End the deployment on all workers. Idempotent, also after a failure; does nothing in a forked process."""
        if not self._dispatcher.own_process.is_this:
            return
        self._supervisor.close(unload=self._dispatcher.close())

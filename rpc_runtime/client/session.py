"""Runs a program on workers: opens, watches and closes it."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rpc_runtime.client.dispatcher import Dispatcher
from rpc_runtime.client.placement import Placement, PlacementOptions, TransferProgress
from rpc_runtime.client.returns import USUAL_MOVE_TIMES, MoveTimes
from rpc_runtime.client.supervisor import DeploymentEvent, Opening, Recovery, Supervisor
from rpc_runtime.client.worker_client import ANSWER_SECONDS, WorkerDescription
from rpc_runtime.errors import DeadlineError, TvmSplitError, WorkerUnavailableError
from rpc_runtime.program.clocks import MachineClock
from rpc_runtime.program.events import OPENED, Observation
from rpc_runtime.program.measurements import LinkStatistics
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.program.runner import Outputs, Runner
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, USUAL_WATCH, LinkTimeouts, WatchTimeouts
from rpc_runtime.transports.transport import NO_SETTINGS, LinkSettings
from rpc_runtime.wire.channels import WorkerEndpoint

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
        blob_path: returns the file of a blob by its SHA-256.
        timeout_seconds: how long a step of opening, and later a result, may take without progress.
        on_transfer: called while blobs are sent, from one thread at a time.
        links: settings of links that differ from the default.
        in_flight: limit of micro-batches fed whose results are not taken; default: only the queues limit them.
        timeouts: after how long a silent link counts as dead.
        watch: after how long a silent worker counts as dead.
        check: called with the description of each worker before anything is sent; what it raises ends the opening.
        model: the name by which workers list the deployment.
        about: JSON that `Bystander.about` returns, of at most `MAXIMUM_ABOUT_BYTES`.
        recovery: where stages go if a machine fails or drains; None: the failure is raised.
        holds: programs that are loaded too, with this recovery, and not connected: their machines may get these stages.
        on_event: called with each event, in any thread.
        move_times: how long moves and returns of machines take.

    Raises:
        TvmSplitError: a worker cannot be reached, refuses, or cannot run its stages. Everything is then freed.
    """

    def __init__(
        self,
        program: Program,
        endpoints: Mapping[str, WorkerEndpoint],
        blob_path: Callable[[str], Path],
        *,
        timeout_seconds: float = 60.0,
        on_transfer: TransferProgress | None = None,
        links: LinkSettings = NO_SETTINGS,
        in_flight: int | None = None,
        timeouts: LinkTimeouts = USUAL_TIMEOUTS,
        watch: WatchTimeouts = USUAL_WATCH,
        check: Callable[[Mapping[str, WorkerDescription]], None] = lambda workers: None,
        model: str = "",
        about: bytes = b"",
        recovery: Recovery | None = None,
        holds: Sequence[Program] = (),
        on_event: Callable[[DeploymentEvent], None] = lambda event: None,
        move_times: MoveTimes = USUAL_MOVE_TIMES,
    ) -> None:
        options = PlacementOptions(
            blob_path, timeout_seconds, on_transfer, links, timeouts, watch, model, about, in_flight
        )
        self.opening = Opening(program, endpoints, options, check, recovery, tuple(holds))
        """How the program was opened; `move` takes another one."""
        self._dispatcher = Dispatcher(
            program, timeout_seconds, in_flight, lambda sequence: self._placement.waited_for(sequence)
        )
        self._supervisor = Supervisor(self.opening, self._dispatcher, self._use, on_event, move_times)
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
        self._dispatcher.in_flight = placement.in_flight
        self.program, self.name, self.deployment = placement.program, placement.name, placement.deployment
        self.link_secrets, self.weight_bytes = placement.link_secrets, placement.weight_bytes
        self.blob_bytes_sent += placement.blob_bytes_sent

    def move(self, opening: Opening) -> None:
        """Change to another program of the same model, which is opened while the current one computes.

        Raises as the constructor; the current program then runs on.
        """
        self._supervisor.move(opening)
        self.opening = opening

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
        seconds = ANSWER_SECONDS if since is None else ROWS_SECONDS
        seconds = timeout_seconds or (LAST_WORD_SECONDS if self._dispatcher.has_failed else seconds)
        machines = (*self._placement.clients, CLIENT)
        numbers = {machine: None if since is None else since.get(machine, 0) for machine in machines}

        def ask(machine: str) -> Observation | None:
            try:
                return self._placement.observe(machine, seconds, numbers[machine], kernels)
            except TvmSplitError as error:
                # A machine that does not answer has failed, even if the watch has not noticed it yet.
                if self._dispatcher.has_failed or isinstance(error, WorkerUnavailableError | DeadlineError):
                    return None
                if refused is None:
                    raise
                refused[machine] = str(error)
                return None

        answers = self._placement.on_every_machine(ask)
        own = self._placement.links.recorder.observe(numbers[CLIENT])
        return {**{machine: seen for machine, seen in answers.items() if seen is not None}, CLIENT: own}

    def clocks(self) -> Mapping[str, MachineClock]:
        return {machine: client.clock for machine, client in self._placement.clients.items()}

    def links(self) -> tuple[LinkStatistics, ...]:
        """Return the transport of each link; also after a failure."""
        self._dispatcher.require_open()
        return self._placement.link_statistics()

    def close(self) -> None:
        """End the deployment on all workers. Idempotent, also after a failure; does nothing in a forked process."""
        if not self._dispatcher.own_process.is_this:
            return
        self._supervisor.close(unload=self._dispatcher.close())

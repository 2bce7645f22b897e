"""Runs a program on workers: opens, watches and closes it, with all machines called at the same time."""

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rpc_runtime.client.dispatcher import Dispatcher
from rpc_runtime.client.watch import WorkerWatch
from rpc_runtime.client.worker_client import ANSWER_SECONDS, Answer, WorkerClient, WorkerDescription, on_every_machine
from rpc_runtime.errors import (
    DeadlineError,
    InputError,
    ProtocolError,
    TvmSplitError,
    WorkerUnavailableError,
    out_of_files,
)
from rpc_runtime.program.clocks import MachineClock
from rpc_runtime.program.events import OPENED, SHOWN_LETTERS, Observation
from rpc_runtime.program.measurements import LinkStatistics
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.program.runner import Outputs, Runner
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, LinkTimeouts
from rpc_runtime.transports.opening import LinkCall
from rpc_runtime.transports.transport import DEFAULT, NO_SETTINGS, LinkSettings
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.messages import LINK_SECRET_BYTES, MAXIMUM_CONNECT_SECONDS, hello_of
from rpc_runtime.wire.text import cleaned

logger = logging.getLogger(__name__)

TransferProgress = Callable[[str, int, int], None]
"""Called while blobs are sent, with (machine, bytes sent, total bytes)."""
UNLOAD_SECONDS = 5.0
"""Timeout of a worker's answer to Unload."""
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
        timeouts: after how long a silent worker or link counts as dead.
        check: called with the description of each worker before anything is sent; what it raises ends the opening.
        model: the name by which workers list the deployment.
        about: JSON that `Bystander.about` returns, of at most `MAXIMUM_ABOUT_BYTES`.

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
        check: Callable[[Mapping[str, WorkerDescription]], None] = lambda workers: None,
        model: str = "",
        about: bytes = b"",
    ) -> None:
        missing = [machine for machine in program.machines if machine not in endpoints]
        if missing:
            raise InputError(f"the program needs the machines {missing}, and only {sorted(endpoints)} have an address")
        self.program = program
        self._timeout_seconds = timeout_seconds
        self._settings = links
        self.deployment = secrets.token_hex(16)
        self.name = self.deployment[:SHOWN_LETTERS]
        self._endpoints = {machine: endpoints[machine] for machine in program.machines}
        self._clients = {name: WorkerClient(endpoint, self.deployment) for name, endpoint in self._endpoints.items()}
        programs = {machine: program.on(machine) for machine in program.machines}
        # The two ends of a link share a secret, so that no worker needs another worker's token.
        ends = dict.fromkeys(chain.from_iterable(own.links for own in programs.values()))
        self.link_secrets = {link: secrets.token_bytes(LINK_SECRET_BYTES) for link in ends}
        self._calls: list[LinkCall] = []
        self._links_of_workers: tuple[LinkStatistics, ...] = ()
        self._is_watched = self._is_open = False
        stages = {
            machine: {cleaned(stage.name): stage.micro_batches for stage in own.stages}
            for machine, own in programs.items()
        }
        self._dispatcher = Dispatcher(program, timeout_seconds, in_flight, self._waited_for, timeouts)
        self._watch = WorkerWatch(
            self._clients,
            self._fail,
            on_activity=self._dispatcher.moved,
            model=model,
            about=about,
            stages=stages,
            results=lambda: self._dispatcher.completed,
            timeouts=timeouts,
        )
        try:
            self._open(blob_path, on_transfer, check)
        except BaseException:
            self.close()
            raise

    def _open(
        self,
        blob_path: Callable[[str], Path],
        on_transfer: TransferProgress | None,
        check: Callable[[Mapping[str, WorkerDescription]], None],
    ) -> None:
        seconds = min(self._timeout_seconds, ANSWER_SECONDS)
        workers = self._on_every_machine(lambda machine: self._clients[machine].describe(seconds))
        check(workers)
        self._watch.start()
        self._is_watched = True
        try:
            self.weight_bytes = self._load(blob_path, on_transfer)
            self._links_of_workers = self._connect()
            self._open_links()
        except TvmSplitError as error:
            if text := out_of_files(error):  # links break then, and workers report only those
                raise type(error)(text) from error
            raise self._watch.cause_of(error) from error
        self._is_open = True
        self._dispatcher.require_usable()
        self.happened(OPENED)
        endpoints = ", ".join(map(str, self._endpoints.values()))
        logger.info("deployment %s runs on %s", self.deployment[:8], endpoints or "no machine")
        for call in self._calls:
            logger.debug("%s", call.statistics)

    def _load(self, blob_path: Callable[[str], Path], on_transfer: TransferProgress | None) -> dict[str, int]:
        """Send missing blobs and load the stages; return the bytes of the weights by machine."""
        progress_lock = threading.Lock()

        def load(machine: str) -> int:
            def progress(sent: int, total: int) -> None:
                if on_transfer is not None:
                    with progress_lock:
                        on_transfer(machine, sent, total)

            client = self._clients[machine]
            blobs = [blob for stage in self.program.stages_on(machine) for blob in stage.blobs]
            sent = client.send_blobs(blobs, blob_path, self._timeout_seconds, progress)
            with progress_lock:
                self.blob_bytes_sent += sent
            secrets = {link: secret for link, secret in self.link_secrets.items() if machine in link}
            return client.load(self.program, secrets, self._timeout_seconds)

        return self._on_every_machine(load)

    def _connect(self) -> tuple[LinkStatistics, ...]:
        """Make the workers connect to each other; return the transport of each link between them."""

        def connect(machine: str) -> tuple[LinkStatistics, ...]:
            peers = {}
            for name, peer in self._endpoints.items():
                setting = self._settings.get((machine, name), DEFAULT)
                peers[name] = replace(peer, address=setting.address or peer.address, transport=setting.wanted)
            seconds = min(self._timeout_seconds, MAXIMUM_CONNECT_SECONDS)
            return self._clients[machine].connect(peers, seconds)

        return tuple(chain.from_iterable(self._on_every_machine(connect).values()))

    def _open_links(self) -> None:
        """Open the client's own links."""
        for machine, outgoing in self._dispatcher.outgoing.items():
            self._call(machine, CLIENT, machine, outgoing)
        for machine, incoming in self._dispatcher.incoming.items():
            self._call(machine, machine, CLIENT, incoming)
        self._dispatcher.require_usable()  # `_fail` ends the calls made so far
        for call in self._calls:
            call.wait_accepted(self._timeout_seconds)

    def _call(self, machine: str, source: str, destination: str, link: LinkEnd) -> None:
        endpoint = replace(
            self._endpoints[machine], transport=self._settings.get((source, destination), DEFAULT).wanted
        )
        hello = hello_of(self.deployment, source, destination)
        self._calls.append(LinkCall(endpoint, self._clients[machine].token, hello, link, self._watch.link_broken))

    def _fail(self, error: TvmSplitError) -> None:
        """Fail the session with the root cause; if it is still being opened, also end its calls to workers."""
        self._dispatcher.fail(error)
        if not self._is_open:
            for client in self._clients.values():
                client.close()
            for call in tuple(self._calls):
                call.close()

    def submit(self, inputs: Sequence[Any]) -> Future[Outputs]:
        return self._dispatcher.submit(inputs)

    def stream(self, batches: Iterable[Sequence[Any]]) -> Iterator[Outputs]:
        return self._dispatcher.stream(batches)

    def _waited_for(self, sequence: int) -> str:
        """Return what a micro-batch waits for: the first stage, in topological order, that has not computed it."""
        finished = self._watch.finished()
        for stage in self.program.stages:
            own = stage.micro_batches
            if sequence in own and finished.get((stage.machine, cleaned(stage.name)), 0) <= own.count_before(sequence):
                endpoint = self._endpoints[stage.machine]
                return f"stage {stage.name!r} on {endpoint} to compute micro-batch {sequence}"
        return f"the results of micro-batch {sequence}, which every stage has computed"

    def require_usable(self) -> None:
        self._dispatcher.require_usable()

    def happened(self, what: str) -> None:
        self._dispatcher.recorder.happened(what)

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
        numbers = {machine: None if since is None else since.get(machine, 0) for machine in (*self._clients, CLIENT)}

        def ask(machine: str) -> Observation | None:
            try:
                return self._of_program(machine, self._clients[machine].observe(seconds, numbers[machine], kernels))
            except TvmSplitError as error:
                # A machine that does not answer has failed, even if the watch has not noticed it yet.
                if self._dispatcher.has_failed or isinstance(error, WorkerUnavailableError | DeadlineError):
                    return None
                if refused is None:
                    raise
                refused[machine] = str(error)
                return None

        answers = self._on_every_machine(ask)
        own = self._dispatcher.recorder.observe(numbers[CLIENT])
        return {**{machine: seen for machine, seen in answers.items() if seen is not None}, CLIENT: own}

    def _of_program(self, machine: str, seen: Observation) -> Observation:
        """Return an observation, its `cleaned` names replaced by the program's; raise `ProtocolError` for others."""
        names = {cleaned(name): name for name in ("", CLIENT, *self.program.machines)}
        stages = {"": "", **{cleaned(stage.name): stage.name for stage in self.program.stages_on(machine)}}
        try:
            tracks = [replace(track, stage=stages[track.stage], peer=names[track.peer]) for track in seen.tracks]
        except KeyError as name:
            endpoint = self._endpoints[machine]
            raise ProtocolError(f"{endpoint} has events of {name}, which is not in its program") from None
        return replace(seen, tracks=tuple(tracks))

    def clocks(self) -> Mapping[str, MachineClock]:
        return {machine: client.clock for machine, client in self._clients.items()}

    def links(self) -> tuple[LinkStatistics, ...]:
        """Return the transport of each link; also after a failure."""
        self._dispatcher.require_open()
        return (*(call.statistics for call in self._calls), *self._links_of_workers)

    def close(self) -> None:
        """End the deployment on all workers. Idempotent, also after a failure; does nothing in a forked process."""
        if not self._dispatcher.own_process.is_this:
            return
        if self._dispatcher.close() and self._is_watched:
            with contextlib.suppress(TvmSplitError):
                self._on_every_machine(lambda machine: self._clients[machine].unload(UNLOAD_SECONDS))
        self._watch.close()
        for call in self._calls:
            call.close()
        for client in self._clients.values():
            client.close()

    def _on_every_machine(self, step: Callable[[str], Answer]) -> dict[str, Answer]:
        return on_every_machine(self._clients, step)

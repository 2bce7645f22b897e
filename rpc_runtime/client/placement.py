"""A program opened on workers: blobs, stages and links, with all machines called at the same time."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

from rpc_runtime.client.asking import Answer, answers_of, raise_errors
from rpc_runtime.client.client_links import ClientLinks, Feeder
from rpc_runtime.client.opening import Opening
from rpc_runtime.client.watch import Failure, WorkerWatch
from rpc_runtime.client.worker_client import ANSWER_SECONDS, WorkerClient
from rpc_runtime.errors import InputError, ProtocolError, TvmSplitError, out_of_files
from rpc_runtime.program.events import SHOWN_LETTERS, Observation
from rpc_runtime.program.measurements import LinkStatistics
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.opening import LinkCall
from rpc_runtime.transports.transport import DEFAULT
from rpc_runtime.wire.messages import LINK_SECRET_BYTES, MAXIMUM_CONNECT_SECONDS, hello_of
from rpc_runtime.wire.text import cleaned

logger = logging.getLogger(__name__)

UNLOAD_SECONDS = 5.0
"""Timeout of a worker's answer to Unload."""


class Placement:
    """A program on its workers, as a deployment of its own: its random name and secrets let nothing of another one in.

    Call order: `prepare`, `join`, `close`. ``on_failure`` is called once, with the root cause, if it fails later.
    ``on_draining`` is called again and again while a worker drains; None: its stages are not moved away.
    """

    def __init__(
        self,
        opening: Opening,
        feeder: Feeder,
        on_failure: Callable[[Placement, Failure], None],
        on_draining: Callable[[Placement, str], None] | None = None,
    ) -> None:
        program, ends = opening.program, opening.endpoints
        missing = [machine for machine in program.machines if machine not in ends]
        if missing:
            raise InputError(f"the program needs the machines {missing}, and only {sorted(ends)} have an address")
        self.opening, self.program = opening, program
        self.links = ClientLinks(feeder, program, opening.timeouts)
        self.deployment = secrets.token_hex(16)
        self.name = self.deployment[:SHOWN_LETTERS]
        self.endpoints = {machine: ends[machine] for machine in program.machines}
        self.clients = {name: WorkerClient(endpoint, self.deployment) for name, endpoint in self.endpoints.items()}
        self.blob_bytes_sent = 0
        self.weight_bytes: dict[str, int] = {}
        self.culprits: set[str] = set()
        """The machines on which a step of opening failed."""
        self._on_failure = on_failure
        programs = {machine: program.on(machine) for machine in program.machines}
        # The two ends of a link share a secret, so that no worker needs another worker's token.
        links = dict.fromkeys(chain.from_iterable(own.links for own in programs.values()))
        self.link_secrets = {link: secrets.token_bytes(LINK_SECRET_BYTES) for link in links}
        self._calls: list[LinkCall] = []
        self._links_of_workers: tuple[LinkStatistics, ...] = ()
        self._is_watched = self._is_joined = False
        self._watch = WorkerWatch(
            self.clients,
            self._fail,
            on_activity=feeder.moved,
            model=opening.model,
            about=opening.about(program),
            stages={
                machine: {cleaned(stage.name): stage.micro_batches for stage in own.stages}
                for machine, own in programs.items()
            },
            results=lambda: self.links.results.taken,
            timeouts=opening.watch,
            on_draining=None if on_draining is None else partial(on_draining, self),
        )

    def prepare(self) -> None:
        """Describe the workers, watch them, send what they lack, and load the stages; nothing is connected yet.

        Raises:
            TvmSplitError: a worker cannot be reached, refuses, or cannot run its stages.
        """
        seconds = min(self.opening.timeout_seconds, ANSWER_SECONDS)
        workers = self.on_every_machine(lambda machine: self.clients[machine].describe(seconds))
        self.opening.check(self.program, self.endpoints, workers)
        self._watch.start()
        self._is_watched = True
        with self._naming_causes():
            self.weight_bytes = self._load()

    def join(self) -> None:
        """Connect the machines to each other and to the client. Raises as `prepare`."""
        with self._naming_causes():
            self._links_of_workers = self._connect()
            self._open_links()
        self._is_joined = True
        for call in self._calls:
            logger.debug("%s", call.statistics)

    @contextlib.contextmanager
    def _naming_causes(self) -> Iterator[None]:
        """Raise the root cause of an error in the body, as far as workers report it."""
        try:
            yield
        except TvmSplitError as error:
            if text := out_of_files(error):  # links break then, and workers report only those
                raise type(error)(text) from error
            raise self._watch.cause_of(error) from error

    def _load(self) -> dict[str, int]:
        """Send missing blobs and load the stages; return the bytes of the weights by machine."""
        progress_lock, opening = threading.Lock(), self.opening

        def load(machine: str) -> int:
            def progress(sent: int, total: int) -> None:
                self.links.moved()
                if opening.on_transfer is not None:
                    with progress_lock:
                        opening.on_transfer(machine, sent, total)

            client = self.clients[machine]
            blobs = [blob for stage in self.program.stages_on(machine) for blob in stage.blobs]
            secrets = {link: secret for link, secret in self.link_secrets.items() if machine in link}
            step = partial(client.load, self.program, secrets, opening.timeout_seconds)
            sent, weights = client.with_blobs(blobs, opening.blob_path, opening.timeout_seconds, step, progress)
            with progress_lock:
                self.blob_bytes_sent += sent
            return weights

        return self.on_every_machine(load)

    def _connect(self) -> tuple[LinkStatistics, ...]:
        """Make the workers connect to each other; return the transport of each link between them."""

        def connect(machine: str) -> tuple[LinkStatistics, ...]:
            peers = {}
            for name, peer in self.endpoints.items():
                setting = self.opening.links.get((machine, name), DEFAULT)
                peers[name] = replace(peer, address=setting.address or peer.address, transport=setting.wanted)
            seconds = min(self.opening.timeout_seconds, MAXIMUM_CONNECT_SECONDS)
            return self.clients[machine].connect(peers, seconds)

        return tuple(chain.from_iterable(self.on_every_machine(connect).values()))

    def _open_links(self) -> None:
        """Open the client's own links."""
        for machine, outgoing in self.links.outgoing.items():
            self._call(machine, CLIENT, machine, outgoing)
        for machine, incoming in self.links.incoming.items():
            self._call(machine, machine, CLIENT, incoming)
        self._watch.require_usable()  # `_fail` ends the calls made so far
        for call in self._calls:
            call.wait_accepted(self.opening.timeout_seconds)

    def _call(self, machine: str, source: str, destination: str, link: LinkEnd) -> None:
        setting = self.opening.links.get((source, destination), DEFAULT)
        endpoint = replace(self.endpoints[machine], transport=setting.wanted)
        hello = hello_of(self.deployment, source, destination)
        self._calls.append(LinkCall(endpoint, self.clients[machine].token, hello, link, self._watch.link_broken))

    def _fail(self, failure: Failure) -> None:
        """Report the root cause; if the placement is still being opened, also end its calls to workers."""
        self._on_failure(self, failure)
        if not self._is_joined:
            for client in self.clients.values():
                client.close()
            self.close_links()

    def waited_for(self, sequence: int) -> str:
        """Return what a micro-batch waits for: the first stage, in topological order, that has not computed it."""
        finished = self._watch.finished()
        for stage in self.program.stages:
            own = stage.micro_batches
            if sequence in own and finished.get((stage.machine, cleaned(stage.name)), 0) <= own.count_before(sequence):
                endpoint = self.endpoints[stage.machine]
                return f"stage {stage.name!r} on {endpoint} to compute micro-batch {sequence}"
        return f"the results of micro-batch {sequence}, which every stage has computed"

    def observe(self, machine: str, seconds: float, since: int | None, kernels: int) -> Observation:
        """Return what a machine has recorded, with the program's names; raise `ProtocolError` for others."""
        seen = self.clients[machine].observe(seconds, since, kernels)
        names = {cleaned(name): name for name in ("", CLIENT, *self.program.machines)}
        stages = {"": "", **{cleaned(stage.name): stage.name for stage in self.program.stages_on(machine)}}
        try:
            tracks = [replace(track, stage=stages[track.stage], peer=names[track.peer]) for track in seen.tracks]
        except KeyError as name:
            endpoint = self.endpoints[machine]
            raise ProtocolError(f"{endpoint} has events of {name}, which is not in its program") from None
        return replace(seen, tracks=tuple(tracks))

    def link_statistics(self) -> tuple[LinkStatistics, ...]:
        """Return the transport of each link; also after a failure."""
        return (*(call.statistics for call in self._calls), *self._links_of_workers)

    def close(self, *, unload: bool) -> None:
        """End the placement on all workers; with ``unload``, wait until they have freed it. Idempotent."""
        if unload and self._is_watched:
            with contextlib.suppress(TvmSplitError):
                self.on_every_machine(lambda machine: self.clients[machine].unload(UNLOAD_SECONDS))
        self._watch.close()
        self.close_links()
        for client in self.clients.values():
            client.close()

    def close_links(self) -> None:
        """End the client's own links."""
        for call in tuple(self._calls):
            call.close()

    def on_every_machine(self, step: Callable[[str], Answer]) -> dict[str, Answer]:
        """Run a step for all machines at the same time; raise the first error, and note all `culprits`."""
        answers, errors = answers_of(self.clients, step)
        self.culprits.update(errors)
        raise_errors(list(errors.values()))
        return answers

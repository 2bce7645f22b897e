"""A machine's program in its worker: blobs, loaded stages, links to its neighbours, and its failure."""

import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue

from rpc_runtime.errors import BlobError, ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.execution.blob_store import BlobStore
from rpc_runtime.execution.device_transfers import DeviceTransfers, UploadingOwner, overlapping_transfers
from rpc_runtime.execution.executor import StageExecutor
from rpc_runtime.execution.kernel_timer import KernelTimer
from rpc_runtime.execution.loaded_stage import (
    LoadedStage,
    LoadedWeight,
    Tensor,
    WeightCache,
    size_of,
    tensor_bytes,
    tensor_slot,
)
from rpc_runtime.hardware import available_memory_bytes
from rpc_runtime.processes import do_all
from rpc_runtime.program.events import FAILURE, LINK_ENDED, MOST_KERNEL_RUNS, SHOWN_LETTERS, Measured, Recorder
from rpc_runtime.program.measurements import KernelSet, LinkStatistics
from rpc_runtime.program.routes import CLIENT, MachineProgram
from rpc_runtime.program.specs import BlobSpec, Bytes, StageSpec
from rpc_runtime.transports.carrier import MakeSlot
from rpc_runtime.transports.link_end import LinkOwner
from rpc_runtime.transports.links import IncomingLink, OutgoingLink
from rpc_runtime.transports.liveness import LinkTimeouts
from rpc_runtime.transports.opening import LinkCall
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.messages import checked_about, hello_of
from rpc_runtime.wire.text import MAXIMUM_LETTERS
from rpc_runtime.worker.library_trials import LibraryTrials
from rpc_runtime.worker.memory import free_on_device, give_back, require_room

logger = logging.getLogger(__name__)

JOIN_SECONDS = 10.0
MAXIMUM_NAME_LETTERS = 100
"""Maximum letters of a model's or owner's name; the rest is cut off."""
CONNECT_WAIT_SECONDS = 10.0
"""Time that a neighbour's link waits for this worker's Connect: a client calls all workers at the same time."""


class LoadedProgram:
    """A machine's program in its worker. Thread-safe. Call order: `pin`, `load`, `connect`, `close`.

    Between `load` and `connect` its stages are loaded, and nothing is sent or received.
    """

    def __init__(
        self,
        request: pb.WatchRequest,
        store: BlobStore,
        trials: LibraryTrials,
        cache: WeightCache,
        timeouts: LinkTimeouts,
        threads: int,
    ) -> None:
        self._timeouts = timeouts
        self.identifier = request.deployment
        self._names = {"model": request.model[:MAXIMUM_NAME_LETTERS], "owner": request.owner[:MAXIMUM_NAME_LETTERS]}
        self.about = checked_about(request.about)
        self.moves = request.moves
        self._weight_bytes = 0
        self._store = store
        self._trials = trials
        self._cache = cache
        self._weights: frozenset[LoadedWeight] = frozenset()
        """The weights of all stages; after a link broke, the deployment that replaces this one needs them."""
        self._lock = threading.Lock()
        self._failures: SimpleQueue[pb.Failure | None] = SimpleQueue()
        """The failure, once; None when the program is closed or no longer watched."""
        self._settled = threading.Event()
        """Set when the program is connected, has failed or is closed."""
        self._program: MachineProgram | None = None
        self._link_secrets: Mapping[tuple[str, str], bytes] = {}
        self._stages: list[LoadedStage] = []
        self._recorder: Recorder | None = None
        self._transfers: DeviceTransfers | None = None
        self._executor: StageExecutor | None = None
        self.timer = KernelTimer(threads)
        self._incoming: dict[str, IncomingLink] = {}
        self._outgoing: dict[str, OutgoingLink] = {}
        self._attached: set[tuple[str, str]] = set()
        self._calls: list[LinkCall] = []
        self._failure: pb.Failure | None = None
        self._closed = False

    def description(self) -> pb.HeldDeployment:
        """Return the entry of this program in the worker's description."""
        recorder = self._recorder
        rate = recorder.micro_batches_per_second() if recorder else 0.0
        return pb.HeldDeployment(
            name=self.identifier[:SHOWN_LETTERS],
            weight_bytes=self._weight_bytes,
            micro_batches_per_second=rate,
            moves=self.moves,
            **self._names,
        )

    def measured(self) -> Measured | None:
        """Return the totals of this program's events; None before its stages are loaded."""
        if self._recorder is None or self._program is None:
            return None
        tracks, name = self._recorder.observe().tracks, self.identifier[:SHOWN_LETTERS]
        return Measured(self._names["model"], name, self._program.machine, tracks, self._weight_bytes)

    def pin(self, blobs: Iterable[BlobSpec]) -> tuple[BlobSpec, ...]:
        """Pin blobs, stored or not, until the program ends; return the missing ones."""
        self._check_open()
        missing = self._store.pin(self.identifier, blobs)
        if self._closed:
            self._store.unpin(self.identifier)
        return missing

    def store_blob(self, blob: BlobSpec, chunks: Iterable[bytes]) -> None:
        """Store a blob. Raises `BlobError` if the content has another size or digest, or does not fit."""
        self._check_open()
        self._store.write(blob, chunks)

    def load(
        self,
        program: MachineProgram,
        link_secrets: Mapping[tuple[str, str], bytes],
        seconds: float,
        caller_waits: Callable[[], bool],
    ) -> int:
        """Load libraries and weights of a machine's stages; return the bytes of the weights.

        ``link_secrets`` are the secrets of the links to and from other machines, by (source, destination). ``seconds``
        is how long the caller waits; up to half of it is used to try out new libraries in another process.

        Raises:
            WorkerError: a stage cannot run on this machine, the deployment is loaded or closed already, or
                ``caller_waits()`` is False.
            BlobError: a blob is missing or damaged.
        """
        with self._lock:
            self._check_open_locked()
            if self._program is not None:
                raise WorkerError(f"deployment {self.identifier[:8]} is loaded already")
            self._program = program
        deadline = time.monotonic() + seconds
        self.pin(blob for stage in program.stages for blob in stage.blobs)
        lacking = replace(program, stages=tuple(map(self._cache.missing, program.stages)))
        require_room(lacking, available_memory_bytes(), free_on_device(program))
        stages: list[LoadedStage] = []
        transfers = overlapping_transfers(program.stages)
        overlap = () if transfers is None else (transfers.begin, transfers.end)
        for stage in program.stages:
            if not caller_waits():
                raise WorkerError(
                    f"machine {program.machine!r} had loaded {len(stages)} of {len(program.stages)} stages when the "
                    "caller's time was over"
                )
            self._check_open()
            try:
                library = self._store.read(stage.library)
                self._trials.stage(stage, deadline, caller_waits)
                stages.append(LoadedStage(stage, library, self._store.read, self._cache, *overlap))
            except BlobError:
                self._store.remove_changed(blob for stage in program.stages for blob in stage.blobs)
                self._program = None  # the caller sends what is missing, and loads again
                raise
        with self._lock:
            self._check_open_locked()
            self._stages, self._transfers, self._link_secrets = stages, transfers, link_secrets
            self._recorder = Recorder()
            self._weights = frozenset(weight for stage in stages for weight in stage.weights)
        names = ", ".join(stage.name for stage in program.stages)
        logger.info("deployment %s: machine %r has loaded %s", self.identifier[:8], program.machine, names)
        self._weight_bytes = sum(size_of(weight.tensor) for weight in self._weights)
        return self._weight_bytes

    def load_kernels(self, kernels: KernelSet, seconds: float, caller_waits: Callable[[], bool]) -> int:
        """Load kernels to time, replacing those loaded before; return the bytes for their arguments.

        ``seconds`` as for `load`.

        Raises:
            WorkerError: this machine cannot run them, or does not have the memory for their arguments.
            BlobError: the library is missing or damaged.
        """
        self._check_open()
        library = self._store.read(kernels.library)
        self._trials.kernels(kernels, time.monotonic() + seconds, caller_waits)
        return self.timer.load_library(kernels, library)

    def connect(self, peers: Mapping[str, WorkerEndpoint], timeout_seconds: float) -> tuple[LinkStatistics, ...]:
        """Start computing, and open the links to the machines that this one sends to; return each link's transport.

        The client opens the links for its own tensors.

        Raises:
            ProtocolError: no stages are loaded, or the address of a machine is missing.
            WorkerError: the deployment is connected already, or a machine cannot be reached.
        """
        with self._lock:
            program = self._join_locked()
        self._settled.set()
        calls = []
        for machine in program.by_destination:
            if machine == CLIENT:
                continue
            if machine not in peers:
                raise ProtocolError(f"machine {program.machine!r} sends to {machine!r}, whose address is missing")
            ends = (program.machine, machine)
            self._attach(ends)
            hello = hello_of(self.identifier, *ends, self._link_secrets[ends])
            call = LinkCall(peers[machine], None, hello, self._outgoing[machine], self.link_ended)
            calls.append(call)
            with self._lock:
                closed = self._closed
                self._calls.append(call)
            if closed:
                call.close()
        for call in calls:
            try:
                call.wait_accepted(timeout_seconds)
            except WorkerUnavailableError as error:
                raise WorkerError(
                    f"machine {program.machine!r} cannot send to its neighbour: {error} "
                    f"({program.machine!r} itself must be able to reach that address)"
                ) from error
        return tuple(call.statistics for call in calls)

    def _join_locked(self) -> MachineProgram:
        """Make the links of the loaded stages and start computing; return the program."""
        program, recorder = self._loaded_locked()
        if self._executor is not None:
            raise WorkerError(f"deployment {self.identifier[:8]} is connected already")
        stages, self._stages = self._stages, []
        executor = StageExecutor(self._lock, program, stages, recorder, self._stage_failed)
        owner: LinkOwner = executor
        as_bytes: Callable[[Tensor], Bytes] = tensor_bytes
        make_slot: MakeSlot = tensor_slot
        if self._transfers is not None:
            owner = UploadingOwner(executor, self._transfers)
            as_bytes, make_slot = self._transfers.bytes_of, self._transfers.slot
        for machine, routes in program.by_destination.items():
            self._outgoing[machine] = OutgoingLink(owner, routes, as_bytes, make_slot, self._timeouts)
        for machine, routes in program.by_source.items():
            self._incoming[machine] = IncomingLink(owner, routes, make_slot, self._timeouts, reuse=True)
        executor.start(self._outgoing, self._incoming)
        self._executor = executor
        return program

    def knows_link(self, hello: pb.Hello) -> bool:
        """Return whether a caller has the secret of the link that it wants to open."""
        expected = self._link_secrets.get((hello.source, hello.destination))
        return expected is not None and hmac.compare_digest(hello.secret, expected)

    def attach(self, source: str, destination: str) -> tuple[str, IncomingLink | OutgoingLink]:
        """Return (other machine, this machine's end) of the link whose stream the other machine has opened.

        Waits up to `CONNECT_WAIT_SECONDS` until this machine is connected.
        """
        with self._lock:
            machine = self._loaded_locked()[0].machine
        self._settled.wait(CONNECT_WAIT_SECONDS)
        if self._executor is None:
            self._check_open()
            raise WorkerError(f"deployment {self.identifier[:8]} is not connected on machine {machine!r}")
        link: IncomingLink | OutgoingLink | None = self._incoming.get(source) if destination == machine else None
        if (source, destination) == (machine, CLIENT):
            link = self._outgoing.get(CLIENT)
        if link is None:
            raise ProtocolError(f"machine {machine!r} has no link from {source!r} to {destination!r}")
        self._attach((source, destination))
        return source if destination == machine else CLIENT, link

    def _attach(self, ends: tuple[str, str]) -> None:
        with self._lock:
            self._check_open_locked()
            if ends in self._attached:
                raise ProtocolError(f"the link from {ends[0]!r} to {ends[1]!r} is open already")
            self._attached.add(ends)

    def link_ended(self, peer: str, error: Exception) -> None:
        """Fail the program with the error that ended a link. The client decides which of its ends is the cause."""
        if isinstance(error, ProtocolError):
            text = f"machine {self._name!r} received an invalid message from {peer!r}: {error}"
            self._fail(pb.Failure.PROTOCOL, text, peer=peer)
        elif isinstance(error, TvmSplitError):
            self._fail(pb.Failure.LINK, str(error), peer=peer)
        else:
            logger.error("a data stream failed unexpectedly", exc_info=error)
            self._fail(pb.Failure.INTERNAL, f"machine {self._name!r} failed unexpectedly: {error!r}")

    def _stage_failed(self, stage: StageSpec, error: Exception) -> None:
        text = str(error) if isinstance(error, TvmSplitError) else f"stage {stage.name!r}: {error!r}"
        self._fail(pb.Failure.STAGE, text)

    @property
    def _name(self) -> str:
        return self._program.machine if self._program else ""

    def _fail(self, kind: pb.Failure.Kind, message: str, peer: str = "") -> None:
        text = message[:MAXIMUM_LETTERS]
        failure = pb.Failure(kind=kind, peer=peer, message=text)
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = failure
            self._halt_locked()
            if self._recorder is not None:
                self._recorder.happened((LINK_ENDED if kind == pb.Failure.LINK else FAILURE) + text)
        # A broken link is not this machine's fault: usually its client has ended; else the client reports the cause.
        level = logging.INFO if kind == pb.Failure.LINK else logging.WARNING
        logger.log(level, "deployment %s has failed: %s", self.identifier[:8], text)
        self._failures.put(failure)
        self._settled.set()
        # A failed program cannot continue, so its memory is freed at once, even if the client stays. Only after a link
        # broke weights and blobs stay while it is watched: a client that recovers needs them.
        keeps = kind == pb.Failure.LINK
        threading.Thread(target=self._free, args=(keeps,), name="free", daemon=True).start()

    def _halt_locked(self) -> None:
        if self._executor is not None:
            self._executor.stop_locked()
        for outgoing in self._outgoing.values():
            outgoing.close_locked()
        for incoming in self._incoming.values():
            incoming.close_locked()

    def next_event(self, timeout_seconds: float) -> pb.WatchEvent | None:
        """Return the failure, once, or a heartbeat after the timeout; None at the end: closed or no longer watched."""
        failure: pb.Failure | None = None
        with contextlib.suppress(Empty):
            failure = self._failures.get(timeout=timeout_seconds)
            if failure is None:
                return None
        executor, recorder = self._executor, self._recorder
        progress = executor.progress() if executor is not None else {}
        return pb.WatchEvent(
            activity=recorder.activity if recorder else 0,
            failure=failure,
            stages=[pb.StageProgress(stage=name, finished=finished) for name, finished in progress.items()],
        )

    def stop_waiting(self) -> None:
        """End the events, because the client no longer watches."""
        self._failures.put(None)

    def record_kernels(self, micro_batches: int) -> None:
        """Record the kernels of the next ``micro_batches`` of each stage. Raises `ProtocolError` for too many."""
        if micro_batches > MOST_KERNEL_RUNS:
            raise ProtocolError(
                f"kernels are recorded of at most {MOST_KERNEL_RUNS} micro-batches, not {micro_batches}"
            )
        executor = self._executor
        if executor is not None:
            executor.record_kernels(micro_batches)

    @property
    def recorder(self) -> Recorder:
        """The recorder of this program's events; still available after a failure."""
        with self._lock:
            if self._recorder is None or self._closed:
                self._check_open_locked()
                raise ProtocolError(f"deployment {self.identifier[:8]} has no stages loaded")
            return self._recorder

    def close(self) -> None:
        """End the program and free everything. Idempotent."""
        with self._lock:
            self._closed = True
        self._failures.put(None)
        self._settled.set()
        logger.info("deployment %s is closed", self.identifier[:8])
        self._free(keeps_weights=False)

    def _free(self, keeps_weights: bool) -> None:
        """Free libraries and links, and weights and pins unless they are kept; the failure is still reported.

        Idempotent. Frees the rest if a part fails, as every call to a failed GPU does; the first error is logged.
        """
        # Once `_end_all` has returned, no variable refers to the stages, even if their thread failed to free them.
        error = next(filter(None, (self._end_all(keeps_weights), give_back())), None)
        if error is not None:
            logger.error("deployment %s: freeing it failed: %s", self.identifier[:8], error)

    def _end_all(self, keeps_weights: bool) -> Exception | None:
        with self._lock:
            self._halt_locked()
            calls, self._calls = self._calls, []
            executor, self._executor = self._executor, None
            self._stages = []
        steps: list[Callable[[], object]] = [call.close for call in calls]
        if executor is not None:
            steps.append(partial(executor.join, JOIN_SECONDS))
        if self._transfers is not None:
            steps.append(self._transfers.close)
        if not keeps_weights:
            self._weights = frozenset()
            steps.append(partial(self._store.unpin, self.identifier))
        return do_all([*steps, self.timer.close])

    def _loaded_locked(self) -> tuple[MachineProgram, Recorder]:
        self._check_open_locked()
        if self._program is None or self._recorder is None:
            raise ProtocolError(f"deployment {self.identifier[:8]} has no stages loaded")
        return self._program, self._recorder

    def _check_open(self) -> None:
        with self._lock:
            self._check_open_locked()

    def _check_open_locked(self) -> None:
        if self._closed:
            raise WorkerError(f"deployment {self.identifier[:8]} is closed")
        if self._failure is not None:
            raise WorkerError(f"deployment {self.identifier[:8]} has failed: {self._failure.message}")

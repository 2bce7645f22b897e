"""The service of a worker: control (describe, upload, load, connect, watch, measure) and data streams."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, groupby
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rpc_runtime.errors import ProtocolError, WorkerError
from rpc_runtime.execution.blob_store import BlobStore
from rpc_runtime.execution.loaded_stage import WeightCache
from rpc_runtime.hardware import load_per_core
from rpc_runtime.program.events import SHOWN_LETTERS, Measured
from rpc_runtime.program.measurements import KernelSet, TimingEffort
from rpc_runtime.program.specs import BlobSpec
from rpc_runtime.transports.opening import LinkAnswer
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import DATA_SERVICE, HELLO_KEY, LINK_METHOD, LINK_PATH, WorkerEndpoint
from rpc_runtime.wire.framing import PROTOCOL_VERSION
from rpc_runtime.wire.messages import (
    MAXIMUM_CONNECT_SECONDS,
    checked_beat,
    link_secrets,
    message_of,
    program_of,
    value_of,
)
from rpc_runtime.wire.security import Metadata, TlsFiles
from rpc_runtime.wire.server import CONTROL_SERVICE, CallQuota
from rpc_runtime.wire.worker_pb2_grpc import ControlServicer
from rpc_runtime.worker.config import WorkerConfig
from rpc_runtime.worker.description import describe
from rpc_runtime.worker.library_trials import DEFAULT_SECONDS, LibraryTrials
from rpc_runtime.worker.loaded_program import LoadedProgram

MAXIMUM_DEPLOYMENTS = 64
MAXIMUM_STREAMS = 128
"""Limit of data streams; a deployment needs one or two per neighbour."""


class WorkerService(ControlServicer):  # type: ignore[misc]
    """The methods of ``worker.proto`` and data streams, for the programs of a worker. Thread-safe.

    They raise the project's errors, which `wire.server` converts to statuses. A worker whose configuration has a name
    accepts only its machine's stages; one named after its host accepts any. ``on_change`` is called when a program was
    added or removed.
    """

    def __init__(self, machine: str, config: WorkerConfig, blobs: BlobStore) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._machine = machine
        self._config = config
        self._blobs = blobs
        self._trials = LibraryTrials(blobs)
        self._weights = WeightCache()
        self._timing = threading.Lock()
        self._lock = threading.Lock()
        self._programs: dict[str, LoadedProgram] = {}
        """By the random name of their deployment."""
        self._draining = False

    def prepare(self) -> None:
        """Start the process for library trials, so that the first program does not wait for it."""
        self._trials.prepare()

    def deployments(self) -> list[pb.HeldDeployment]:
        """Return the deployments on this worker, the oldest first."""
        return [program.description() for program in tuple(self._programs.values())]

    def measured(self) -> Iterator[Measured]:
        """Yield the tracks of each deployment whose stages are loaded."""
        for program in tuple(self._programs.values()):
            if (measured := program.measured()) is not None:
                yield measured

    def is_busy(self) -> bool:
        return bool(self._programs)

    def drain(self, draining: bool = True) -> None:
        """Take no new deployments, and ask the clients of those here to move their stages away; or undo that."""
        with self._lock:
            self._draining = draining

    def is_left(self) -> bool:
        """Return whether no client has stages here that it moves away."""
        return not any(program.moves for program in tuple(self._programs.values()))

    def close(self) -> None:
        for identifier in list(self._programs):
            self._drop(identifier)
        self._trials.close()

    def _program(self, identifier: str) -> LoadedProgram:
        program = self._programs.get(identifier)
        if program is None:
            raise WorkerError(f"this worker has no deployment {identifier[:8]!r}: it has ended, or was never watched")
        return program

    def _whole_name(self, name: str) -> str:
        """Return a deployment's whole random name if ``name`` is the part that `Describe` shows, else ``name``."""
        begun = [identifier for identifier in tuple(self._programs) if identifier[:SHOWN_LETTERS] == name]
        return begun[0] if len(begun) == 1 else name

    def _drop(self, identifier: str) -> None:
        with self._lock:
            program = self._programs.pop(identifier, None)
            self._trials.keep(self.is_busy())
        if program is not None:
            program.close()
            self.on_change()

    @staticmethod
    def quotas() -> dict[str, CallQuota]:
        """Return the quota of each method, by its path."""
        asking = CallQuota("questions", 64)
        working = CallQuota("requests to prepare or to time something", 32)
        special = {"PutBlob": CallQuota("uploads", 32), "Watch": CallQuota("deployments", MAXIMUM_DEPLOYMENTS)}
        special |= dict.fromkeys(("MissingBlobs", "LoadStages", "Connect", "LoadKernels", "TimeKernels"), working)
        methods = pb.DESCRIPTOR.services_by_name["Control"].methods_by_name
        quotas = {f"/{CONTROL_SERVICE}/{name}": special.get(name, asking) for name in methods}
        return {**quotas, LINK_PATH: CallQuota("data streams", MAXIMUM_STREAMS)}

    def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        expires = self._config.certificates.expires if self._config.certificates else 0
        reply = describe(self._machine, self._config.threads, expires, self.deployments(), self._blobs.folder)
        reply.draining = self._draining
        return reply

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WatchEvent]:
        name, beat_seconds = request.deployment, checked_beat(request.beat_seconds)
        with self._lock:
            if name in self._programs:
                raise ProtocolError(f"deployment {name[:8]} is watched already")
            if self._draining:
                raise WorkerError(
                    f"machine {self._machine!r} is drained for maintenance and takes no deployments: use other "
                    f"machines, or end that with `tvm-split drain {self._machine} --undo`"
                )
            config = self._config
            program = LoadedProgram(request, self._blobs, self._trials, self._weights, config.timeouts, config.threads)
            self._programs[name] = program
            self._trials.keep(True)
        self.on_change()
        try:
            if not context.add_callback(program.stop_waiting):
                return
            yield pb.WatchEvent(load=load_per_core())
            while (event := program.next_event(beat_seconds)) is not None:
                event.draining, event.load = self._draining, load_per_core()
                yield event
        finally:
            self._drop(request.deployment)

    def MissingBlobs(self, request: pb.MissingBlobsRequest, context: Any) -> pb.MissingBlobsReply:
        blobs = [value_of(BlobSpec, blob) for blob in request.blobs]
        missing = self._program(request.deployment).pin(blobs)
        return pb.MissingBlobsReply(sha256=[blob.sha256 for blob in missing])

    def PutBlob(self, requests: Iterator[pb.PutBlobRequest], context: Any) -> pb.PutBlobReply:
        program: LoadedProgram | None = None
        for messages in _uploads(requests):
            first = next(messages)
            if not first.HasField("blob"):
                raise ProtocolError("the first message of PutBlob names the blob")
            program = program or self._program(first.deployment)
            program.store_blob(value_of(BlobSpec, first.blob), (message.chunk for message in chain([first], messages)))
        return pb.PutBlobReply()

    def LoadStages(self, request: pb.LoadStagesRequest, context: Any) -> pb.LoadStagesReply:
        program = self._program(request.deployment)
        machine_program = program_of(request)
        self._require_own("stages", machine_program.machine)
        secrets = link_secrets(request, machine_program)
        return pb.LoadStagesReply(
            weight_bytes=program.load(machine_program, secrets, _remaining_seconds(context), context.is_active)
        )

    def Connect(self, request: pb.ConnectRequest, context: Any) -> pb.ConnectReply:
        if not 0 < request.timeout_seconds <= MAXIMUM_CONNECT_SECONDS:
            raise ProtocolError(f"a timeout lies in (0, {MAXIMUM_CONNECT_SECONDS:g}] s, got {request.timeout_seconds}")
        caller = self._config.tls.as_caller() if self._config.tls is not None else TlsFiles()
        peers = {
            peer.machine: WorkerEndpoint(
                peer.machine, peer.address, tls=caller if peer.tls else None, transport=peer.transport
            )
            for peer in request.peers
        }
        links = self._program(request.deployment).connect(peers, request.timeout_seconds)
        return pb.ConnectReply(links=[message_of(pb.LinkStatistics, link) for link in links])

    def Unload(self, request: pb.UnloadRequest, context: Any) -> pb.UnloadReply:
        self._drop(request.deployment)
        return pb.UnloadReply()

    def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        self.drain(request.draining)
        return pb.DrainReply()

    def Observe(self, request: pb.ObserveRequest, context: Any) -> pb.ObserveReply:
        program = self._program(self._whole_name(request.deployment))
        if request.kernels:
            program.record_kernels(request.kernels)
        seen = program.recorder.observe(request.since if request.HasField("since") else None)
        return message_of(pb.ObserveReply, seen, about=program.about if request.about else b"")

    def LoadKernels(self, request: pb.LoadKernelsRequest, context: Any) -> pb.LoadKernelsReply:
        program, kernels = self._program(request.deployment), value_of(KernelSet, request)
        self._require_own("kernels", kernels.machine)
        allocated_bytes = program.load_kernels(kernels, _remaining_seconds(context), context.is_active)
        return pb.LoadKernelsReply(allocated_bytes=allocated_bytes)

    def TimeKernels(self, request: pb.TimeKernelsRequest, context: Any) -> pb.TimeKernelsReply:
        timer, effort = self._program(request.deployment).timer, value_of(TimingEffort, request)
        # Two measurements at a time would slow each other unnoticed.
        if not self._timing.acquire(blocking=False):
            raise WorkerError(f"machine {self._machine!r} is timing other kernels at the moment: try again later")
        try:
            times = timer.measure(effort, caller_waits=context.is_active)
        finally:
            self._timing.release()
        return pb.TimeKernelsReply(times=[message_of(pb.KernelTime, time) for time in times])

    def _require_own(self, what: str, machine: str) -> None:
        if self._config.name and machine != self._machine:
            raise WorkerError(
                f"the {what} are for machine {machine!r}, and this worker is {self._machine!r}: "
                "check the addresses in the cluster's description"
            )

    def knows_link(self, metadata: Metadata) -> bool:
        """Return whether a call's metadata has the secret of the link that it opens."""
        try:
            hello = _hello(metadata)
            return self._program(hello.deployment).knows_link(hello)
        except (ProtocolError, WorkerError):
            return False

    def link_handlers(self) -> Any:
        """Return gRPC's handler of data streams. Invalid input of a peer ends at most its deployment."""
        link = grpc.stream_stream_rpc_method_handler(self._link, None, None)
        return grpc.method_handlers_generic_handler(DATA_SERVICE, {LINK_METHOD: link})

    def _link(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        hello = _hello(context.invocation_metadata())
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"this worker speaks protocol version {PROTOCOL_VERSION}, the caller {hello.protocol_version}: "
                "upgrade one"
            )
        program = self._program(hello.deployment)
        peer, link = program.attach(hello.source, hello.destination)
        yield from LinkAnswer(link, hello, peer, partial(program.link_ended, peer)).frames(requests)


def _hello(metadata: Metadata) -> pb.Hello:
    for key, value in metadata:
        if key == HELLO_KEY and isinstance(value, bytes):
            try:
                return pb.Hello.FromString(value)
            except DecodeError as error:
                raise ProtocolError("the Hello of the data stream is damaged") from error
    raise ProtocolError("the data stream has no Hello in its metadata")


def _uploads(requests: Iterator[pb.PutBlobRequest]) -> Iterator[Iterator[pb.PutBlobRequest]]:
    """Yield an iterator over each blob's messages, the first of which names it. Consume each before the next one."""
    named = 0

    def number(request: pb.PutBlobRequest) -> int:
        nonlocal named
        named += request.HasField("blob")
        return named

    return (messages for _, messages in groupby(requests, number))


def _remaining_seconds(context: Any) -> float:
    """Return how many seconds the caller of a method still waits."""
    seconds = context.time_remaining()
    return DEFAULT_SECONDS if seconds is None else float(seconds)

"""The control side of a worker: answers Describe, takes blobs, loads stages, and is watched."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, groupby
from typing import Any

import grpc

from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError
from rpc_runtime.execution.blob_store import BlobStore
from rpc_runtime.program.kernel_times import TimingEffort
from rpc_runtime.program.program import BlobSpec
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, LinkTimeouts
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import WorkerEndpoint, status_of
from rpc_runtime.wire.control_methods import CONTROL_SERVICE, DEFAULT_REQUEST_BYTES, METHODS, Method
from rpc_runtime.wire.messages import kernel_set, link_secrets, message_of, plan_from_request, value_of
from rpc_runtime.wire.security import TlsFiles
from rpc_runtime.worker.call_limits import GREETING_SECONDS, Places, next_message
from rpc_runtime.worker.description import describe
from rpc_runtime.worker.held_program import HeldProgram
from rpc_runtime.worker.library_trials import DEFAULT_SECONDS, LibraryTrials
from rpc_runtime.worker.program_blobs import ProgramBlobs

logger = logging.getLogger(__name__)

MAXIMUM_DEPLOYMENTS = 64
UPLOAD_SILENCE_SECONDS = 20.0
SLOWEST_UPLOAD = 64 << 10
"""In bytes a second, a quarter of the slowest link that is meant to work; who sends less may do so for that long."""
MAXIMUM_CONNECT_SECONDS = 600.0


class HeldPrograms:
    """What a worker holds of each deployment, by their random names. Thread-safe.

    ``on_change`` is called when one came or went.
    """

    def __init__(self, blobs: BlobStore, timeouts: LinkTimeouts = USUAL_TIMEOUTS) -> None:
        self.timeouts = timeouts
        self.on_change: Callable[[], None] = lambda: None
        self._blobs = blobs
        self._trials = LibraryTrials(blobs)
        self._lock = threading.Lock()
        self._held: dict[str, HeldProgram] = {}

    def prepare(self) -> None:
        """Makes ready for the first program, while nobody waits for it."""
        self._trials.prepare()

    def begin(self, identifier: str) -> HeldProgram:
        if not 16 <= len(identifier) <= 64 or not identifier.isalnum():
            raise ProtocolError("a deployment's name is 16 to 64 letters and digits")
        with self._lock:
            if identifier in self._held:
                raise ProtocolError(f"deployment {identifier[:8]} is watched already")
            program = self._held[identifier] = HeldProgram(identifier, self._blobs, self._trials, self.timeouts)
        self.on_change()
        return program

    def get(self, identifier: str) -> HeldProgram:
        with self._lock:
            found = self._held.get(identifier)
        if found is None:
            raise ProtocolError(f"this worker has no deployment {identifier[:8]!r}: watch it first")
        return found

    def know_link(self, hello: pb.Hello) -> bool:
        """Whether a caller has the secret of a link that it wants to open."""
        with self._lock:
            found = self._held.get(hello.deployment)
        return found is not None and found.knows_link(hello.source, hello.destination, hello.secret)

    def drop(self, identifier: str) -> None:
        with self._lock:
            found = self._held.pop(identifier, None)
        if found is not None:
            found.close()
            self.on_change()

    def names(self) -> list[str]:
        with self._lock:
            return sorted(identifier[:8] for identifier in self._held)

    def close(self) -> None:
        with self._lock:
            held, self._held = list(self._held.values()), {}
        for program in held:
            program.close()
        self._trials.close()


class ControlService:
    """The methods of ``worker.proto``; errors of the project become statuses, others are reported as such.

    Only a worker that was given its name (``named``) insists on it; one that goes by its host's takes any part.
    """

    def __init__(self, machine: str, named: bool, threads: int, programs: HeldPrograms, tls: TlsFiles | None) -> None:
        self._machine = machine
        self._named = named
        self._threads = threads
        self._programs = programs
        self._tls = tls
        self._timing = threading.Lock()
        self._reading = threading.Lock()
        asking = Places("questions", 64)
        working = Places("requests to prepare or to time something", 32)
        self._answers: dict[str, tuple[Callable[[Any, Any], Any], Places]] = {
            "Describe": (self._describe, asking),
            "Unload": (self._unload, asking),
            "Statistics": (self._statistics, asking),
            "Trace": (self._trace, asking),
            "MissingBlobs": (self._missing_blobs, working),
            "LoadStages": (self._load_stages, working),
            "Connect": (self._connect, working),
            "LoadKernels": (self._load_kernels, working),
            "TimeKernels": (self._time_kernels, working),
            "PutBlob": (self._put_blob, Places("uploads", 32)),
            "Watch": (self._watch, Places("deployments", MAXIMUM_DEPLOYMENTS)),
        }

    def handlers(self) -> Any:
        return grpc.method_handlers_generic_handler(
            CONTROL_SERVICE,
            {name: self._handler(METHODS[name], *answer) for name, answer in self._answers.items()},
        )

    def places(self) -> dict[str, Places]:
        """Of every method, by its path."""
        return {METHODS[name].path: places for name, (_, places) in self._answers.items()}

    def _describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        return describe(self._machine, self._threads, self._tls is not None, self._programs.names())

    def _watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WatchEvent]:
        program = self._programs.begin(request.deployment)
        try:
            if not context.add_callback(program.stop_waiting):
                return
            yield pb.WatchEvent()
            while context.is_active():
                event = program.wait_event(self._programs.timeouts.beat_seconds)
                if event is None:
                    return
                if not context.is_active():
                    return
                yield event
                if event.HasField("failure"):
                    break
            # It can do nothing more, so its memory is freed at once, whether its client lives or not.
            threading.Thread(target=program.free, name="free", daemon=True).start()
            while context.is_active() and not program.closed:
                program.wait_closed(self._programs.timeouts.beat_seconds)
                yield pb.WatchEvent()
        finally:
            self._programs.drop(request.deployment)

    def _missing_blobs(self, request: pb.MissingBlobsRequest, context: Any) -> pb.MissingBlobsReply:
        blobs = [value_of(BlobSpec, blob) for blob in request.blobs]
        missing = self._programs.get(request.deployment).blobs.keep(blobs)
        return pb.MissingBlobsReply(sha256=[blob.sha256 for blob in missing])

    def _put_blob(self, requests: Iterator[pb.PutBlobRequest], context: Any) -> pb.PutBlobReply:
        blobs: ProgramBlobs | None = None
        for messages in _uploads(requests):
            first = next(messages)
            if not first.HasField("blob"):
                raise ProtocolError("the first message of PutBlob names the blob")
            blobs = blobs or self._programs.get(first.deployment).blobs
            blobs.take_in(value_of(BlobSpec, first.blob), (each.chunk for each in chain([first], messages)))
        return pb.PutBlobReply()

    def _load_stages(self, request: pb.LoadStagesRequest, context: Any) -> pb.LoadStagesReply:
        program = self._programs.get(request.deployment)
        with self._reading:
            plan = plan_from_request(request)
        self._require_own("stages", plan.machine)
        secrets = link_secrets(request, plan)
        return pb.LoadStagesReply(weight_bytes=program.load(plan, secrets, _patience(context), context.is_active))

    def _connect(self, request: pb.ConnectRequest, context: Any) -> pb.ConnectReply:
        if not 0 < request.timeout_seconds <= MAXIMUM_CONNECT_SECONDS:
            raise ProtocolError(f"a timeout lies in (0, {MAXIMUM_CONNECT_SECONDS:g}] s, got {request.timeout_seconds}")
        caller = self._tls.as_caller() if self._tls is not None else TlsFiles()
        peers = {
            peer.machine: WorkerEndpoint(
                peer.machine, peer.address, tls=caller if peer.tls else None, transport=peer.transport
            )
            for peer in request.peers
        }
        links = self._programs.get(request.deployment).connect(peers, request.timeout_seconds)
        return pb.ConnectReply(links=[message_of(pb.LinkStatistics, link) for link in links])

    def _unload(self, request: pb.UnloadRequest, context: Any) -> pb.UnloadReply:
        self._programs.drop(request.deployment)
        return pb.UnloadReply()

    def _statistics(self, request: pb.StatisticsRequest, context: Any) -> pb.StatisticsReply:
        recorder = self._programs.get(request.deployment).recorder
        return pb.StatisticsReply(
            stages=[message_of(pb.StageStatistics, stage) for stage in recorder.statistics()],
            processor_seconds=time.process_time(),
        )

    def _trace(self, request: pb.TraceRequest, context: Any) -> pb.TraceReply:
        recorder = self._programs.get(request.deployment).recorder
        return pb.TraceReply(events=[message_of(pb.TraceEvent, event) for event in recorder.trace()])

    def _load_kernels(self, request: pb.LoadKernelsRequest, context: Any) -> pb.LoadKernelsReply:
        program, kernels = self._programs.get(request.deployment), kernel_set(request)
        self._require_own("kernels", kernels.machine)
        timer = program.load_kernels(kernels, self._threads, _patience(context), context.is_active)
        return pb.LoadKernelsReply(allocated_bytes=timer.allocated_bytes)

    def _time_kernels(self, request: pb.TimeKernelsRequest, context: Any) -> pb.TimeKernelsReply:
        timer, effort = self._programs.get(request.deployment).timer, value_of(TimingEffort, request)
        # Two at a time would slow each other, and neither would know.
        if not self._timing.acquire(blocking=False):
            raise WorkerError(f"machine {self._machine!r} is timing other kernels at the moment: try again later")
        try:
            times = timer.measure(effort, is_wanted=context.is_active)
        finally:
            self._timing.release()
        return pb.TimeKernelsReply(times=[message_of(pb.KernelTime, time) for time in times])

    def _require_own(self, what: str, machine: str) -> None:
        if self._named and machine != self._machine:
            raise WorkerError(
                f"the {what} are for machine {machine!r}, and this worker is {self._machine!r}: "
                "check the addresses in the cluster's description"
            )

    def _handler(self, method: Method, behaviour: Callable[[Any, Any], Any], places: Places) -> Any:
        def call(messages: Iterator[bytes], context: Any) -> Any:
            requests = self._requests(method, messages, context)
            return behaviour(requests if method.declared.client_streaming else next(requests), context)

        def reply(messages: Iterator[bytes], context: Any) -> Any:
            try:
                with places.held(context):
                    return call(messages, context)
            except Exception as error:
                _abort(context, error)

        def replies(messages: Iterator[bytes], context: Any) -> Iterator[Any]:
            try:
                with places.held(context):
                    yield from call(messages, context)
            except Exception as error:
                _abort(context, error)

        if method.declared.server_streaming:
            return grpc.stream_stream_rpc_method_handler(replies, None, method.reply.SerializeToString)
        return grpc.stream_unary_rpc_method_handler(reply, None, method.reply.SerializeToString)

    def _requests(self, method: Method, messages: Iterator[bytes], context: Any) -> Iterator[Any]:
        """What a caller sends, which is one request at least; it must not make it last."""
        message = next_message(messages, context, GREETING_SECONDS)
        seconds = UPLOAD_SILENCE_SECONDS
        while True:
            request = self._request(method, message)
            yield request
            if isinstance(request, pb.PutBlobRequest) and request.HasField("blob"):
                seconds = UPLOAD_SILENCE_SECONDS  # however small the ones before it were
            begin = time.monotonic()
            message = next_message(messages, context, seconds)
            if message is None:
                return
            seconds += len(message) / SLOWEST_UPLOAD - (time.monotonic() - begin)
            seconds = min(seconds, UPLOAD_SILENCE_SECONDS)

    def _request(self, method: Method, message: bytes | None) -> Any:
        """Long ones are read one at a time, if their deployment is one that is watched: others want to compute."""
        is_long = message is not None and DEFAULT_REQUEST_BYTES < len(message) <= method.maximum_request_bytes
        if message is None or not is_long or method.declared.client_streaming:
            return method.read_request(message)
        self._programs.get(method.deployment(message))
        with self._reading:
            return method.read_request(message)


def _uploads(requests: Iterator[pb.PutBlobRequest]) -> Iterator[Iterator[pb.PutBlobRequest]]:
    """The messages of each blob, of which the first one names it; they are to be taken before the next blob's."""
    named = 0

    def number(request: pb.PutBlobRequest) -> int:
        nonlocal named
        named += request.HasField("blob")
        return named

    return (messages for _, messages in groupby(requests, number))


def _patience(context: Any) -> float:
    """How many seconds the caller of a method still waits."""
    seconds = context.time_remaining()
    return DEFAULT_SECONDS if seconds is None else float(seconds)


def _abort(context: Any, error: Exception) -> None:
    if isinstance(error, TvmSplitError):
        logger.info("refused %s: %s", context.peer(), error)
        context.abort(*status_of(error))
    if not isinstance(error, grpc.RpcError):  # an RpcError says that the caller has gone in the middle of a stream
        logger.error("a call of %s failed unexpectedly", context.peer(), exc_info=error)
    context.abort(grpc.StatusCode.INTERNAL, f"the worker failed unexpectedly: {error!r}"[:1000])

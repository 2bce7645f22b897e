"""The standard health service of gRPC (``grpc.health.v1``), by which orchestrators and balancers ask for a worker.

https://github.com/grpc/grpc/blob/master/doc/health-checking.md. It says whether the worker takes calls, and nothing
else about it; so whoever reaches the port may ask, also without the token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2 as pb

from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError
from rpc_runtime.wire.channels import SERVER_OPTIONS, status_of
from rpc_runtime.wire.control_methods import CONTROL_SERVICE
from rpc_runtime.worker.call_limits import GREETING_SECONDS, CallLimits, Places, next_message

HEALTH_SERVICE: str = pb.DESCRIPTOR.services_by_name["Health"].full_name
CHECK_PATH, WATCH_PATH = f"/{HEALTH_SERVICE}/Check", f"/{HEALTH_SERVICE}/Watch"
PATHS = (CHECK_PATH, WATCH_PATH)
KNOWN = ("", CONTROL_SERVICE)
"""The worker as a whole, and the one service that it has for clients."""
MAXIMUM_REQUEST_BYTES = 1024
LOOK_SECONDS = 1.0
MAXIMUM_CONNECTIONS = 256
Status = pb.HealthCheckResponse


class HealthService:
    """Says SERVING until `stop`, then NOT_SERVING. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._serving = True
        self._places = Places("questions about health", 32)

    def stop(self) -> None:
        """The worker ends: those who watch are told, and those who ask."""
        with self._changed:
            self._serving = False
            self._changed.notify_all()

    def handlers(self) -> Any:
        return grpc.method_handlers_generic_handler(
            HEALTH_SERVICE,
            {
                "Check": grpc.stream_unary_rpc_method_handler(self._check, None, Status.SerializeToString),
                "Watch": grpc.stream_stream_rpc_method_handler(self._watch, None, Status.SerializeToString),
            },
        )

    def places(self) -> dict[str, Places]:
        """Of every method, by its path."""
        return dict.fromkeys(PATHS, self._places)

    def _check(self, messages: Iterator[bytes], context: Any) -> Message:
        try:
            with self._places.held(context):
                service = _service(next_message(messages, context, GREETING_SECONDS))
        except TvmSplitError as error:
            context.abort(*status_of(error))
        if service not in KNOWN:
            context.abort(grpc.StatusCode.NOT_FOUND, f"this worker has no such service; there is {CONTROL_SERVICE}")
        reply: Message = Status(status=self._status(service))
        return reply

    def _watch(self, messages: Iterator[bytes], context: Any) -> Iterator[Message]:
        try:
            with self._places.held(context):
                service = _service(next_message(messages, context, GREETING_SECONDS))
                said = None
                while context.is_active():
                    status = self._status(service)
                    if status != said:
                        said = status
                        yield Status(status=status)
                    if status == Status.NOT_SERVING:
                        return
                    with self._changed:
                        if self._serving:
                            self._changed.wait(LOOK_SECONDS)
        except TvmSplitError as error:
            context.abort(*status_of(error))

    def _status(self, service: str) -> int:
        if service not in KNOWN:
            return int(Status.SERVICE_UNKNOWN)
        with self._changed:
            return int(Status.SERVING if self._serving else Status.NOT_SERVING)


def _service(message: bytes | None) -> str:
    if message is None or len(message) > MAXIMUM_REQUEST_BYTES:
        raise ProtocolError(f"a request for health is one message of at most {MAXIMUM_REQUEST_BYTES} bytes")
    try:
        return str(pb.HealthCheckRequest.FromString(message).service)
    except DecodeError as error:
        raise ProtocolError("this is no grpc.health.v1.HealthCheckRequest") from error


def health_server(health: HealthService, listen: str) -> Any:
    """A server, not yet started, that answers for nothing but health, without TLS: Kubernetes' probes know none.

    Raises:
        WorkerError: it cannot listen there.
    """
    limits = CallLimits(health.places())
    server = grpc.server(
        ThreadPoolExecutor(limits.threads, thread_name_prefix="health"),
        handlers=(health.handlers(),),
        interceptors=(limits,),
        options=[*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", MAXIMUM_CONNECTIONS)],
    )
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError:
        port = 0
    if not port:
        raise WorkerError(f"cannot listen on {listen}, where health is to be asked for")
    return server

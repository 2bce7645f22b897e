"""A worker's gRPC server: access control, quotas of calls, malformed requests, and gRPC's health service.

Every method is served as one with a stream of requests, which are read and parsed here. gRPC's own parsing leaks 16 KiB
for each malformed request, and cannot detect the end of a call without a request.

Orchestrators and load balancers check a worker by ``grpc.health.v1``. It reports only whether the worker accepts calls.
Therefore it needs no token.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME, HealthServicer
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

from rpc_runtime.errors import AccessError, ProtocolError, TvmSplitError, WorkerError
from rpc_runtime.processes import ending_after
from rpc_runtime.wire import worker_pb2
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.audit import Audit
from rpc_runtime.wire.channels import LINK_PATH, SERVER_OPTIONS, TOKEN_REFUSED, open_channel, status_of
from rpc_runtime.wire.security import Metadata
from rpc_runtime.wire.tokens import DEPLOY, Tokens

logger = logging.getLogger(__name__)

CONTROL_SERVICE: str = worker_pb2.DESCRIPTOR.services_by_name["Control"].full_name
HEALTH_PATHS = (f"/{SERVICE_NAME}/Check", f"/{SERVICE_NAME}/Watch")
HEALTH_CALLS, HEALTH_CONNECTIONS = 32, 256
ANSWER_SECONDS = 10.0
"""Timeout of a worker's check of itself; long enough for a busy host."""
REFUSING_THREADS = 8
"""Threads of a server in addition to its quotas, since a refused call needs a thread for a short time."""
FIRST_THREADS = 16
"""Threads for calls that are started before the server starts; one deployment needs no more."""
SPARE_THREADS = 32
"""Further threads that the process must be able to start: those of a deployment, and of gRPC, which aborts without."""
RAISE_LIMITS = "raise its limits of memory (ulimit -v) and of processes (ulimit -u), or give it fewer deployments"
OPEN_SECONDS = 10.0
"""Timeout for the request of a method without a token, so that silent peers cannot occupy the quota."""


OBSERVING_PATHS = [f"/{CONTROL_SERVICE}/{method}" for method in ("Describe", "Observe")]
"""The methods for which the role ``observe`` suffices."""
AUDITED_PATHS = [f"/{CONTROL_SERVICE}/{method}" for method in ("Watch", "LoadStages", "LoadKernels", "Unload", "Drain")]
"""The methods of which an audit log has every call; of the others it has those that were refused."""
WATCH_PATH = AUDITED_PATHS[0]
LINK_REFUSED = "no deployment here has a link with the secret that was shown; it may have ended"


class CallQuota:
    """A quota of ``limit`` concurrent calls of a kind (``name``, in the plural).

    ``is_open``: the methods need no token, so their requests must arrive within `OPEN_SECONDS`.
    """

    def __init__(self, name: str, limit: int, *, is_open: bool = False) -> None:
        self.limit = limit
        self.is_open = is_open
        self._name = name
        self._free = threading.BoundedSemaphore(limit)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count one call while the body runs.

        Raises:
            WorkerError: the quota is used up.
        """
        if not self._free.acquire(blocking=False):
            raise WorkerError(f"this worker already handles {self.limit} {self._name}, its limit; try again later")
        try:
            yield
        finally:
            self._free.release()


@dataclass(frozen=True)
class Gate(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses callers whose token is unknown or has too little of a role; runs calls within their method's quota.

    A data stream may have the secret of its link instead of a token (``knows_link``), and a method with an open quota
    needs neither. Without ``tokens``, all callers are let in. This project's errors become gRPC statuses.
    """

    quotas: Mapping[str, CallQuota]
    tokens: Tokens | None
    knows_link: Callable[[Metadata], bool]
    log: Audit

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Return the method's handler behind this gate; None for an unknown method."""
        path, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        quota, handler = self.quotas.get(path), continuation(handler_call_details)
        return None if quota is None or handler is None else self._guarded(handler, quota, path, metadata)

    def _guarded(self, handler: Any, quota: CallQuota, path: str, metadata: Metadata) -> Any:
        """Return a handler that runs the method within its quota and takes a stream of unparsed requests."""
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        parse = handler.request_deserializer

        def answer(messages: Iterator[bytes], context: Any) -> Iterator[Any]:
            with _as_status(context), self._admitted(path, metadata, context) as caller, quota.one():
                if not handler.request_streaming:
                    with ending_after(OPEN_SECONDS, context.cancel) if quota.is_open else contextlib.nullcontext():
                        request = _parsed(next(messages, None), parse)
                elif parse is None:  # data streams get gRPC's own iterator
                    request = messages
                else:
                    request = (_parsed(message, parse) for message in messages)
                is_logged = path in AUDITED_PATHS
                with self.log.call(path, caller, context, request) if is_logged else contextlib.nullcontext():
                    reply = behaviour(request, context)
                    if path == WATCH_PATH:
                        reply = self._while_allowed(reply, metadata)
                    yield from reply if handler.response_streaming else (reply,)

        return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)

    @contextlib.contextmanager
    def _admitted(self, path: str, metadata: Metadata, context: Any) -> Iterator[str]:
        """Yield the name of the caller's token, or of its certificate; raise an `AccessError` that is logged."""
        proof, token = context.auth_context(), self.tokens and self.tokens.caller(metadata)
        name = token.name if token else proof.get("x509_common_name", [b"stranger"])[0].decode(errors="replace")
        try:
            self._require_access(path, metadata)
            if "x509_pem_cert" in proof:
                from rpc_runtime.wire.certificates import require_current  # few workers have TLS

                require_current(proof["x509_pem_cert"][0])
        except AccessError as error:
            self.log.refused(path, name, context, str(error))
            raise
        yield name

    def _require_access(self, path: str, metadata: Metadata) -> None:
        if self.tokens is None or self.quotas[path].is_open or (path == LINK_PATH and self.knows_link(metadata)):
            return
        caller = self.tokens.caller(metadata)
        if caller is None:
            raise AccessError(LINK_REFUSED if path == LINK_PATH else TOKEN_REFUSED)
        if not caller.role:
            raise AccessError(f"the token of {caller.name!r} was revoked: ask for a new one (`tvm-split token`)")
        if caller.role != DEPLOY and path not in OBSERVING_PATHS:
            raise AccessError(f"the token of {caller.name!r} may {caller.role} only: ask for one that may {DEPLOY}")

    def _while_allowed(self, replies: Any, metadata: Metadata) -> Iterator[Any]:
        """Yield the events of a deployment until its caller's token is revoked, which is an error."""
        with contextlib.closing(replies):
            for reply in replies:
                self._require_access(WATCH_PATH, metadata)
                yield reply


def new_server(
    quotas: Mapping[str, CallQuota],
    connections: int,
    tokens: Tokens | None = None,
    knows_link: Callable[[Metadata], bool] = lambda metadata: False,
    log: Audit | None = None,
    handlers: Sequence[Any] = (),
) -> Any:
    """Return a server, not yet started, behind a `Gate`, with at most so many ``connections``.

    It has threads for all quotas, so that kinds of calls do not compete for threads.

    Raises:
        WorkerError: the limits of this process are too low for the server's threads.
    """
    threads = sum(quota.limit for quota in set(quotas.values())) + REFUSING_THREADS
    return grpc.server(
        _started(ThreadPoolExecutor(threads, thread_name_prefix="call")),
        handlers=handlers,
        interceptors=(Gate(quotas, tokens, knows_link, log or Audit(None)),),
        options=[*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", connections)],
    )


def _started(pool: ThreadPoolExecutor) -> ThreadPoolExecutor:
    """Return a pool with its first threads started, since a server without a thread for a call never answers it.

    Raises:
        WorkerError: this process cannot start them and the spare threads.
    """
    together = threading.Barrier(FIRST_THREADS + SPARE_THREADS)

    def wait() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # another thread could not start
            together.wait()

    try:
        for _ in range(FIRST_THREADS):
            pool.submit(wait)
        for _ in range(SPARE_THREADS - 1):
            threading.Thread(target=wait, daemon=True).start()
        together.wait()
    except RuntimeError as error:
        together.abort()
        raise WorkerError(f"this process cannot start {together.parties} threads ({error}): {RAISE_LIMITS}") from error
    return pool


def bind(server: Any, listen: str, credentials: Any = None) -> str:
    """Make a server listen on HOST:PORT, with TLS if there are ``credentials``; return the address with its port.

    Raises:
        WorkerError: the address cannot be used.
    """
    address = Address.parse(listen)
    try:  # gRPC itself reports only that it failed, and writes the reason to its own log
        address.listen().close()
        if credentials is None:
            return str(replace(address, port=server.add_insecure_port(listen)))
        return str(replace(address, port=server.add_secure_port(listen, credentials)))
    except (OSError, RuntimeError) as error:
        # Python appends the address.
        reason = error.strerror.partition(" (while")[0] if isinstance(error, OSError) and error.strerror else error
        raise WorkerError(f"cannot listen on {listen}: {reason}") from error


def _parsed(message: bytes | None, parse: Callable[[bytes], Any]) -> Any:
    if message is None:
        raise ProtocolError("this method takes a request, and the caller sent none")
    try:
        return parse(message)
    except DecodeError as error:
        raise ProtocolError(f"a request that cannot be parsed: {error}") from error


@contextlib.contextmanager
def _as_status(context: Any) -> Iterator[None]:
    """End the call with the status of the body's error."""
    try:
        yield
    except TvmSplitError as error:
        logger.info("refused %s: %s", context.peer(), error)
        context.abort(*status_of(error))
    except grpc.RpcError:
        context.abort(grpc.StatusCode.CANCELLED, "the caller hung up")
    except Exception as error:
        logger.error("a call of %s failed unexpectedly", context.peer(), exc_info=error)
        context.abort(grpc.StatusCode.INTERNAL, f"the worker failed unexpectedly: {error!r}"[:1000])


def health_servicer() -> Any:
    """Return a health servicer that reports SERVING for the worker as a whole and for its control service."""
    health = HealthServicer(experimental_non_blocking=False)
    health.set(CONTROL_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    return health


def health_quotas() -> dict[str, CallQuota]:
    """Return the quota of each method of the health service, by its path."""
    return dict.fromkeys(HEALTH_PATHS, CallQuota("health checks", HEALTH_CALLS, is_open=True))


def health_server(health: Any, listen: str) -> Any:
    """Return a server, not yet started, for health checks only, without TLS, which Kubernetes' probes do not support.

    Raises:
        WorkerError: the server cannot listen on ``listen``.
    """
    server = new_server(health_quotas(), HEALTH_CONNECTIONS)
    add_HealthServicer_to_server(health, server)
    bind(server, listen)
    return server


def require_answer(address: str, *, has_tls: bool) -> None:
    """Check the health of this process's worker at ``address``; with TLS, check only that it accepts connections.

    TLS is not checked because the certificate may be for another name, or signed by another authority.

    Raises:
        WorkerError: the worker does not answer.
    """
    own = Address.parse(address).from_here
    try:
        if has_tls:
            own.connect(ANSWER_SECONDS).close()
        else:
            with open_channel(str(own), None) as channel:
                HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
    except (OSError, grpc.RpcError) as error:
        reason = error if isinstance(error, OSError) else error.details()
        raise WorkerError(
            f"this worker listens on {address}, and does not answer there ({reason}): check the address, and whether "
            "a firewall of this host blocks it"
        ) from None

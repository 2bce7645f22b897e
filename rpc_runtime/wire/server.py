"""Interceptors of a worker's gRPC server: access control, quotas of calls, and the handling of malformed requests.

Every method is served as one with a stream of requests, which are read and parsed here. gRPC's own parsing leaks 16 KiB
for each malformed request, and cannot detect the end of a call without a request.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError
from rpc_runtime.wire.channels import LINK_PATH, status_of
from rpc_runtime.wire.security import TOKEN_VARIABLE, Metadata, Token

logger = logging.getLogger(__name__)

REFUSING_THREADS = 8
"""Threads of a server in addition to its quotas, since a refused call needs a thread for a short time."""
OPEN_REQUEST_BYTES = 1024
"""Maximum size of a request of a method without a token; a health check's request is a service name."""
OPEN_SECONDS = 10.0
"""Timeout for the request of a method without a token, so that silent peers cannot occupy the quota."""


class CallQuota:
    """A quota of ``limit`` concurrent calls of a kind (``name``, in the plural).

    ``is_open``: the methods need no token, so their requests must be short and arrive within `OPEN_SECONDS`.
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
            raise WorkerError(f"this worker answers {self.limit} {self._name} at a time, and so many run: try later")
        try:
            yield
        finally:
            self._free.release()


class AccessInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token; a data stream may have the secret of its link instead.

    ``open_to_all`` are the paths of methods that need neither.
    """

    def __init__(self, token: Token, knows_link: Callable[[Metadata], bool], open_to_all: Collection[str] = ()) -> None:
        self._token = token
        self._open_to_all = frozenset(open_to_all)
        self._knows_link = knows_link

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Return the method's handler, or one that refuses the call."""
        path, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if path in self._open_to_all or self._token.shown_in(metadata):
            return continuation(handler_call_details)
        if path != LINK_PATH:
            return _refusal(f"give the worker's own one ({TOKEN_VARIABLE} or --token-file)")
        if self._knows_link(metadata):
            return continuation(handler_call_details)
        return _refusal("no deployment here has a link with the secret that was shown; it may have ended")


class QuotaInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Runs calls within the quota of their method's path, and converts this project's errors to gRPC statuses."""

    def __init__(self, quotas: Mapping[str, CallQuota]) -> None:
        self._quotas = quotas

    @property
    def threads(self) -> int:
        """The number of threads that the server needs so that kinds of calls do not compete for threads."""
        return sum(quota.limit for quota in set(self._quotas.values())) + REFUSING_THREADS

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Return the method's handler with its quota; None, for an unknown method, if there is no quota."""
        quota = self._quotas.get(handler_call_details.method)
        handler = None if quota is None else continuation(handler_call_details)
        return None if quota is None or handler is None else _guarded(handler, quota)


def _refusal(advice: str) -> Any:
    def refuse(messages: Iterator[bytes], context: Any) -> None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, f"the token is wrong or missing: {advice}")

    return grpc.stream_unary_rpc_method_handler(refuse)


def _guarded(handler: Any, quota: CallQuota) -> Any:
    """Return a handler that runs the method within its quota and takes a stream of unparsed requests."""
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    parse = handler.request_deserializer

    def answer(messages: Iterator[bytes], context: Any) -> Iterator[Any]:
        with _as_status(context), quota.one():
            if not handler.request_streaming:
                with _soon(context) if quota.is_open else contextlib.nullcontext():
                    request = _parsed(_only(messages, quota), parse)
            elif parse is None:  # data streams get gRPC's own iterator
                request = messages
            else:
                request = (_parsed(message, parse) for message in messages)
            reply = behaviour(request, context)
            yield from reply if handler.response_streaming else (reply,)

    return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)


def _only(messages: Iterator[bytes], quota: CallQuota) -> bytes:
    message = next(messages, None)
    if message is None:
        raise ProtocolError("this method takes a request, and the caller sent none")
    if quota.is_open and len(message) > OPEN_REQUEST_BYTES:
        raise ProtocolError(f"a request of this method has at most {OPEN_REQUEST_BYTES} bytes, got {len(message)}")
    return message


def _parsed(message: bytes, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(message)
    except DecodeError as error:
        raise ProtocolError(f"a request that cannot be parsed: {error}") from error


@contextlib.contextmanager
def _soon(context: Any) -> Iterator[None]:
    """Cancel the call if the body takes longer than `OPEN_SECONDS`, since gRPC's iterator has no timeout."""
    timer = threading.Timer(OPEN_SECONDS, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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

"""What calls may take of a worker: places by kind and caller, and time to say something.

Every call that is answered holds a thread. Calls of a kind have so many places, of which one caller may hold half, so
neither a kind nor a caller can take what the others need. A call that is refused never gets a thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import grpc

from rpc_runtime.errors import ProtocolError, WorkerError
from rpc_runtime.wire.channels import status_of
from rpc_runtime.wire.refusal import refusal
from rpc_runtime.wire.security import is_loopback

GREETING_SECONDS = 10.0
"""The first message of a call follows its headers; a caller who says nothing holds a thread."""


def next_message(requests: Iterator[bytes], context: Any, seconds: float) -> bytes | None:
    """The next message of a call; None at its end.

    Raises:
        ProtocolError: it did not come within ``seconds``, which ends the call, or the caller hung up.
    """
    timer = threading.Timer(seconds, context.cancel)  # gRPC's iterator knows no timeout
    timer.daemon = True
    timer.start()
    try:
        return next(requests, None)
    except grpc.RpcError as error:
        raise ProtocolError(f"the caller hung up, or said nothing for {seconds:g} seconds") from error
    finally:
        timer.cancel()


class Places:
    """So many calls of a kind (``name``, in the plural) are answered at a time, half of them of one caller.

    A caller is known by its host; all addresses of loopback are one.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.limit = limit
        self._name = name
        self._lock = threading.Lock()
        self._taken = 0
        self._callers: Counter[str] = Counter()
        self.refusal = refusal(
            *status_of(WorkerError(f"this worker answers {limit} {name} at a time, and all are taken: try again later"))
        )

    def take(self) -> bool:
        """Whether there was a place for one more call, which is then taken until it has been ``held``."""
        with self._lock:
            free = self._taken < self.limit
            self._taken += free
            return free

    @contextlib.contextmanager
    def held(self, context: Any) -> Iterator[None]:
        """The life of a call that has a place.

        Raises:
            WorkerError: its caller holds half of all places already.
        """
        host = _host(str(context.peer()))
        share = max(1, self.limit // 2)
        try:
            with self._lock:
                self._callers[host] += 1
                count = self._callers[host]
            if count > share:
                raise WorkerError(
                    f"this worker answers {share} {self._name} of one host at a time, and {host} has as many: end some"
                )
            yield
        finally:
            with self._lock:
                self._taken -= 1
                self._callers[host] -= 1
                if not self._callers[host]:
                    del self._callers[host]


def _host(peer: str) -> str:
    """Of "ipv4:192.0.2.1:7001", or "ipv6:%5B2001:db8::1%5D:7001"."""
    host = unquote(peer.partition(":")[2].rpartition(":")[0])
    return "this host" if is_loopback(host) else host


class CallLimits(grpc.ServerInterceptor):  # type: ignore[misc]
    """Gives each call a place of its method's kind, or refuses it. Behind the interceptor that checks the token."""

    def __init__(self, places: Mapping[str, Places]) -> None:
        """``places`` by the method's path; other paths are nobody's."""
        self._places = places

    @property
    def threads(self) -> int:
        """How many every place needs together."""
        return sum(kind.limit for kind in set(self._places.values()))

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        places = self._places.get(handler_call_details.method)
        if places is None:
            return None
        return continuation(handler_call_details) if places.take() else places.refusal

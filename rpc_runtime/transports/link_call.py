"""The calling end of a data stream: a gRPC call of its own connection, and a thread that reads what comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc

from tvm_split.rpc_runtime.errors import (
    DeadlineError,
    ProtocolError,
    TvmSplitError,
    WorkerError,
    WorkerUnavailableError,
)
from tvm_split.rpc_runtime.transports.link_end import LinkEnd
from tvm_split.rpc_runtime.wire import worker_pb2 as pb
from tvm_split.rpc_runtime.wire.channels import WorkerEndpoint, error_of, explained, open_channel
from tvm_split.rpc_runtime.wire.control_methods import HELLO_KEY, LINK_PATH
from tvm_split.rpc_runtime.wire.framing import Frame, FrameKind, decode, error_text
from tvm_split.rpc_runtime.wire.security import Token


class LinkCall:
    """Opens the stream that ``hello`` is about to the worker at ``endpoint``, for this side's end of the link.

    A client is let in by the worker's ``token``, another worker by the secret in its ``hello``.
    ``on_broken(machine, error)`` is called once, from the reading thread, if the stream ends before ``close``.
    """

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        token: Token | None,
        hello: pb.Hello,
        link: LinkEnd,
        on_broken: Callable[[str, TvmSplitError], None],
    ) -> None:
        self._endpoint = endpoint
        self._link = link
        self._on_broken = on_broken
        self._answered = threading.Event()
        self._accepted = False
        self._closing = False
        self._error: TvmSplitError | None = None
        self._channel = open_channel(endpoint.address, endpoint.tls)
        metadata = ((HELLO_KEY, hello.SerializeToString()), *(token.metadata if token else ()))
        method = self._channel.stream_stream(LINK_PATH, request_serializer=None, response_deserializer=None)
        self._call = method(self._send(), metadata=metadata)
        name = f"link-{hello.source}-{hello.destination}"
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def wait_accepted(self, timeout_seconds: float) -> None:
        """Returns when the worker has accepted the stream.

        Raises:
            TvmSplitError: it has refused, cannot be reached, or said nothing in time.
        """
        if not self._answered.wait(timeout_seconds):
            raise DeadlineError(f"{self._endpoint} did not accept a data stream within {timeout_seconds:g} seconds")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._closing = True
        self._call.cancel()
        self._channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _send(self) -> Iterator[bytes]:
        try:
            yield from self._link.frames()
        except WorkerUnavailableError as error:
            self._error = WorkerUnavailableError(f"{self._endpoint}: {error}")
            raise
        except Exception as error:  # gRPC would only say that the iterator raised
            self._error = WorkerError(f"sending to {self._endpoint} failed: {error!r}")
            raise

    def _read(self) -> None:
        error: TvmSplitError
        try:
            for message in self._call:
                self._take(decode(message))
            error = WorkerUnavailableError(f"{self._endpoint} ended a data stream")
        except grpc.RpcError as status:
            error = error_of(status, str(self._endpoint))
            if isinstance(error, WorkerUnavailableError) and not (self._accepted or self._closing):
                error = explained(error, self._endpoint)
        except TvmSplitError as wrong:
            error = type(wrong)(f"{self._endpoint}: {wrong}")
        except Exception as unexpected:
            error = WorkerError(f"{self._endpoint}: {unexpected!r}")
        self._call.cancel()
        if self._error is None:
            self._error = error
        self._answered.set()
        if self._accepted and not self._closing:
            self._on_broken(self._endpoint.machine, self._error)

    def _take(self, frame: Frame) -> None:
        if frame.kind is FrameKind.ERROR:
            raise ProtocolError(error_text(frame))
        if self._accepted:
            self._link.receive(frame)
        elif frame.kind is FrameKind.ACCEPT:
            self._accepted = True
            self._answered.set()
        else:
            raise ProtocolError(f"a data stream begins with ACCEPT, not with {frame.kind.name}")

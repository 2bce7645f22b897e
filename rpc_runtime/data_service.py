"""The answering end of data streams: a neighbour or the client brings tensors, or the client fetches them."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rpc_runtime import worker_pb2 as pb
from rpc_runtime.channels import status_of
from rpc_runtime.control_methods import DATA_SERVICE, LINK_METHOD
from rpc_runtime.control_service import Deployments
from rpc_runtime.deployment import Deployment
from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerUnavailableError
from rpc_runtime.framing import PROTOCOL_VERSION, Frame, FrameKind, control_frame, decode, error_frame

HELLO_SECONDS = 10.0
MAXIMUM_HELLO_BYTES = 4096


class DataService:
    """Accepts data streams. Whatever a peer sends, the worker stays; at worst the peer's deployment fails."""

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    def handlers(self) -> Any:
        link = grpc.stream_stream_rpc_method_handler(self._link, None, None)
        return grpc.method_handlers_generic_handler(DATA_SERVICE, {LINK_METHOD: link})

    def _link(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        try:
            hello = _receive_hello(requests, context)
            deployment = self._deployments.get(hello.deployment)
            machine = deployment.machine
            if hello.destination == machine:
                incoming = deployment.attach_incoming(hello.source)
                stream = _Stream(deployment, hello.source, incoming.receive, incoming.close)
                frames = incoming.credit_frames()
            elif hello.source == machine:
                outgoing = deployment.attach_outgoing(hello.destination)
                stream = _Stream(deployment, hello.destination, outgoing.receive, outgoing.close)
                frames = outgoing.frames()
            else:
                raise ProtocolError(
                    f"a stream from {hello.source!r} to {hello.destination!r} does not touch {machine!r}"
                )
            yield control_frame(FrameKind.ACCEPT)
            stream.start(requests)
            try:
                yield from frames
            except WorkerUnavailableError as error:
                stream.broken(f"from {stream.peer!r} {error}")
                raise
            except Exception as error:
                traceback.print_exception(error, file=sys.stderr)
                deployment.internal_failed(error)
                raise
            finally:
                stream.broken("the data stream was closed")
            if stream.error is not None:
                yield error_frame(str(stream.error))
                raise stream.error
        except TvmSplitError as error:
            context.abort(*status_of(error))


class _Stream:
    """Reads one stream in a thread of its own, so that both directions flow at once."""

    def __init__(
        self, deployment: Deployment, peer: str, receive: Callable[[Frame], None], close: Callable[[], None]
    ) -> None:
        self._deployment = deployment
        self.peer = peer
        self._receive = receive
        self._close = close
        self.error: ProtocolError | None = None

    def start(self, requests: Iterator[bytes]) -> None:
        threading.Thread(target=self._read, args=(requests,), name=f"read-{self.peer}", daemon=True).start()

    def broken(self, message: str) -> None:
        """Fails the deployment, unless it has ended anyway."""
        self._deployment.link_failed(self.peer, message)

    def _read(self, requests: Iterator[bytes]) -> None:
        try:
            for message in requests:
                self._receive(decode(message))
            self.broken(f"{self.peer!r} ended its data stream")
        except ProtocolError as error:
            self.error = error
            self._deployment.protocol_failed(self.peer, str(error))
        except grpc.RpcError:
            self.broken(f"the connection to {self.peer!r} broke")
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            self._deployment.internal_failed(error)
        finally:
            self._close()


def _receive_hello(requests: Iterator[bytes], context: Any) -> pb.Hello:
    """The greeting; a caller that says nothing is hung up on, for it holds a thread."""
    timer = threading.Timer(HELLO_SECONDS, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        message = next(requests, None)
    except grpc.RpcError as error:
        raise ProtocolError("the caller hung up before its greeting") from error
    finally:
        timer.cancel()
    if message is None:
        raise ProtocolError("a data stream begins with a greeting")
    frame = decode(message)
    if frame.kind is not FrameKind.HELLO or len(frame.payload) > MAXIMUM_HELLO_BYTES:
        raise ProtocolError(f"a data stream begins with a greeting, got a frame of kind {frame.kind.name}")
    try:
        hello = pb.Hello.FromString(bytes(frame.payload))
    except DecodeError as error:
        raise ProtocolError("the greeting of a data stream is damaged") from error
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"this worker speaks protocol version {PROTOCOL_VERSION}, the caller {hello.protocol_version}: upgrade one"
        )
    return hello

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
from rpc_runtime.call_limits import GREETING_SECONDS, Places, next_message
from rpc_runtime.channels import status_of
from rpc_runtime.control_methods import DATA_SERVICE, LINK_METHOD, LINK_PATH
from rpc_runtime.control_service import Deployments
from rpc_runtime.deployment import Deployment
from rpc_runtime.errors import ProtocolError, TvmSplitError
from rpc_runtime.framing import PROTOCOL_VERSION, Frame, FrameKind, control_frame, decode, error_frame

MAXIMUM_HELLO_BYTES = 4096
MAXIMUM_STREAMS = 128
"""A deployment needs one or two per neighbour."""


class DataService:
    """Accepts data streams. Whatever a peer sends, the worker stays; at worst the peer's deployment fails."""

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments
        self._places = Places("data streams", MAXIMUM_STREAMS)

    def places(self) -> dict[str, Places]:
        return {LINK_PATH: self._places}

    def handlers(self) -> Any:
        link = grpc.stream_stream_rpc_method_handler(self._link, None, None)
        return grpc.method_handlers_generic_handler(DATA_SERVICE, {LINK_METHOD: link})

    def _link(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        try:
            with self._places.held(context):
                yield from self._answer(requests, context)
        except TvmSplitError as error:
            context.abort(*status_of(error))

    def _answer(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
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
            raise ProtocolError(f"a stream from {hello.source!r} to {hello.destination!r} does not touch {machine!r}")
        yield control_frame(FrameKind.ACCEPT)
        stream.start(requests)
        try:
            yield from frames
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            deployment.internal_failed(error)
            raise
        finally:
            stream.broken("the data stream was closed")
        if stream.error is not None:
            yield error_frame(str(stream.error))
            raise stream.error


class _Stream:
    """Reads one stream in a thread of its own, so that both directions flow at once."""

    def __init__(
        self, deployment: Deployment, peer: str, receive: Callable[[Frame], None], close: Callable[[], None]
    ) -> None:
        self._deployment = deployment
        self._peer = peer
        self._receive = receive
        self._close = close
        self.error: ProtocolError | None = None

    def start(self, requests: Iterator[bytes]) -> None:
        threading.Thread(target=self._read, args=(requests,), name=f"read-{self._peer}", daemon=True).start()

    def broken(self, message: str) -> None:
        """Fails the deployment, unless it has ended anyway."""
        self._deployment.link_failed(self._peer, message)

    def _read(self, requests: Iterator[bytes]) -> None:
        try:
            for message in requests:
                self._receive(decode(message))
            self.broken(f"{self._peer!r} ended its data stream")
        except ProtocolError as error:
            self.error = error
            self._deployment.protocol_failed(self._peer, str(error))
        except grpc.RpcError:
            self.broken(f"the connection to {self._peer!r} broke")
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            self._deployment.internal_failed(error)
        finally:
            self._close()


def _receive_hello(requests: Iterator[bytes], context: Any) -> pb.Hello:
    """The greeting; a caller that says nothing is hung up on, for it holds a thread."""
    message = next_message(requests, context, GREETING_SECONDS)
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

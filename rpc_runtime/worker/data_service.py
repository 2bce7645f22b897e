"""The answering end of data streams: a neighbour or the client brings tensors, or the client fetches them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tvm_split.rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from tvm_split.rpc_runtime.transports.link_end import LinkEnd
from tvm_split.rpc_runtime.wire import worker_pb2 as pb
from tvm_split.rpc_runtime.wire.channels import status_of
from tvm_split.rpc_runtime.wire.control_methods import DATA_SERVICE, HELLO_KEY, LINK_METHOD, LINK_PATH
from tvm_split.rpc_runtime.wire.framing import (
    PROTOCOL_VERSION,
    FrameKind,
    control_frame,
    decode,
    error_frame,
)
from tvm_split.rpc_runtime.wire.security import Metadata
from tvm_split.rpc_runtime.worker.call_limits import Places
from tvm_split.rpc_runtime.worker.control_service import HeldPrograms
from tvm_split.rpc_runtime.worker.held_program import HeldProgram

logger = logging.getLogger(__name__)

MAXIMUM_STREAMS = 128
"""A deployment needs one or two per neighbour."""


class DataService:
    """Accepts data streams. Whatever a peer sends, the worker stays; at worst the peer's deployment fails."""

    def __init__(self, programs: HeldPrograms) -> None:
        self._programs = programs
        self._places = Places("data streams", MAXIMUM_STREAMS)

    def places(self) -> dict[str, Places]:
        return {LINK_PATH: self._places}

    def knows_link(self, metadata: Metadata) -> bool:
        """Whether a caller shows the secret of the very link it wants to open."""
        try:
            return self._programs.know_link(_hello(metadata))
        except ProtocolError:
            return False

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
        hello = _hello(context.invocation_metadata())
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"this worker speaks protocol version {PROTOCOL_VERSION}, the caller {hello.protocol_version}: "
                "upgrade one"
            )
        program = self._programs.get(hello.deployment)
        peer, link = program.attach(hello.source, hello.destination)
        stream = _Stream(program, peer, link)
        yield control_frame(FrameKind.ACCEPT)
        stream.start(requests)
        try:
            yield from link.frames()
        except WorkerUnavailableError as error:
            stream.broken(f"from {peer!r} {error}")
            raise
        except Exception as error:
            logger.error("a data stream failed unexpectedly", exc_info=error)
            program.internal_failed(error)
            raise WorkerError(f"the worker failed unexpectedly: {error!r}") from error
        finally:
            stream.broken("the data stream was closed")
        if stream.error is not None:
            yield error_frame(str(stream.error))
            raise stream.error


class _Stream:
    """Reads one stream in a thread of its own, so that both directions flow at once."""

    def __init__(self, program: HeldProgram, peer: str, link: LinkEnd) -> None:
        self._program = program
        self._peer = peer
        self._link = link
        self.error: ProtocolError | None = None

    def start(self, requests: Iterator[bytes]) -> None:
        threading.Thread(target=self._read, args=(requests,), name=f"read-{self._peer}", daemon=True).start()

    def broken(self, message: str) -> None:
        """Fails the deployment, unless it has ended anyway."""
        self._program.link_failed(self._peer, message)

    def _read(self, requests: Iterator[bytes]) -> None:
        try:
            for message in requests:
                self._link.receive(decode(message))
            self.broken(f"{self._peer!r} ended its data stream")
        except ProtocolError as error:
            self.error = error
            self._program.protocol_failed(self._peer, str(error))
        except grpc.RpcError:
            self.broken(f"the connection to {self._peer!r} broke")
        except Exception as error:
            logger.error("a data stream failed unexpectedly", exc_info=error)
            self._program.internal_failed(error)
        finally:
            self._link.close()


def _hello(metadata: Metadata) -> pb.Hello:
    for key, value in metadata:
        if key == HELLO_KEY and isinstance(value, bytes):
            try:
                return pb.Hello.FromString(value)
            except DecodeError as error:
                raise ProtocolError("the greeting of a data stream is damaged") from error
    raise ProtocolError("a data stream comes with a greeting")

"""The answering end of data streams: a neighbour or the client brings tensors, or the client fetches them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rpc_runtime.errors import ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.transports.opening import LinkAnswer
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import status_of
from rpc_runtime.wire.control_methods import DATA_SERVICE, HELLO_KEY, LINK_METHOD, LINK_PATH
from rpc_runtime.wire.framing import PROTOCOL_VERSION
from rpc_runtime.wire.security import Metadata
from rpc_runtime.worker.call_limits import Places
from rpc_runtime.worker.control_service import HeldPrograms

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

        def on_end(error: Exception) -> None:
            if isinstance(error, ProtocolError):
                program.protocol_failed(peer, str(error))
            elif isinstance(error, WorkerUnavailableError):
                program.link_failed(peer, str(error))
            else:
                logger.error("a data stream failed unexpectedly", exc_info=error)
                program.internal_failed(error)

        try:
            yield from LinkAnswer(link, hello, peer, on_end).frames(requests)
        except TvmSplitError:
            raise
        except Exception as error:
            raise WorkerError(f"the worker failed unexpectedly: {error!r}") from error


def _hello(metadata: Metadata) -> pb.Hello:
    for key, value in metadata:
        if key == HELLO_KEY and isinstance(value, bytes):
            try:
                return pb.Hello.FromString(value)
            except DecodeError as error:
                raise ProtocolError("the greeting of a data stream is damaged") from error
    raise ProtocolError("a data stream comes with a greeting")

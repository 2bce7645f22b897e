"""Low-level calls to a worker: any bytes for any method."""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from rpc_runtime.processes import Closing
from rpc_runtime.program.specs import BlobSpec
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import HELLO_KEY, LINK_PATH, WorkerEndpoint, open_channel
from rpc_runtime.wire.framing import PROTOCOL_VERSION
from rpc_runtime.wire.messages import message_of
from rpc_runtime.wire.security import Metadata, Token
from rpc_runtime.wire.server import CONTROL_SERVICE
from tests.helpers.waiting import PATIENCE_SECONDS

UNDER_WAY = 12
_CONTROL = pb.DESCRIPTOR.services_by_name["Control"]


@dataclass(frozen=True)
class Method:
    """A method: its path, and the classes of its messages."""

    declared: MethodDescriptor

    @property
    def name(self) -> str:
        return str(self.declared.name)

    @property
    def path(self) -> str:
        return f"/{CONTROL_SERVICE}/{self.name}"

    @property
    def request(self) -> Any:
        return GetMessageClass(self.declared.input_type)

    @property
    def reply(self) -> Any:
        return GetMessageClass(self.declared.output_type)


METHODS = {method.name: Method(method) for method in _CONTROL.methods}


class RawCaller(Closing):
    """A connection that sends arbitrary requests. ``methods`` are paths."""

    def __init__(self, endpoint: WorkerEndpoint) -> None:
        self._channel = open_channel(endpoint.address, None)
        self._metadata = Token(endpoint.token).metadata if endpoint.token else ()

    def begin(
        self, method: str, requests: Iterable[bytes], timeout: float | None = None, metadata: Metadata = ()
    ) -> Any:
        """Begin a call, which can be iterated over or cancelled; a single request is a stream of one."""
        everything = (*self._metadata, *metadata)
        return self._channel.stream_stream(method)(iter(requests), timeout=timeout, metadata=everything)

    def code(
        self, method: str, requests: Iterable[bytes], timeout: float = PATIENCE_SECONDS, metadata: Metadata = ()
    ) -> grpc.StatusCode:
        return self.answer(method, requests, timeout, metadata)[0]

    def answer(
        self, method: str, requests: Iterable[bytes], timeout: float = PATIENCE_SECONDS, metadata: Metadata = ()
    ) -> tuple[grpc.StatusCode, str]:
        """Return the status and the details with which a call ends."""
        call = self.begin(method, requests, timeout, metadata)
        with contextlib.suppress(grpc.RpcError):
            deque(call, maxlen=0)
        return call.code(), call.details()

    def codes(self, method: str, requests: Sequence[bytes]) -> Counter[str]:
        """Return the number of calls by status, with one request each; many run at the same time."""
        call = self._channel.unary_unary(method)
        counts: Counter[str] = Counter()
        under_way: deque[Any] = deque()
        for request in requests:
            if len(under_way) == UNDER_WAY:
                counts[under_way.popleft().code().name] += 1
            under_way.append(call.future(request, timeout=PATIENCE_SECONDS, metadata=self._metadata))
        counts.update(future.code().name for future in under_way)
        return counts

    def close(self) -> None:
        self._channel.close()


def silence(seconds: float = 60.0) -> Iterator[bytes]:
    """Yield nothing: a silent caller."""
    time.sleep(seconds)
    yield from ()


def speak(endpoint: WorkerEndpoint, greeting: bytes | None, messages: Iterable[bytes] = ()) -> grpc.StatusCode:
    """Return the status with which a worker ends a data stream after this greeting and these messages."""
    with RawCaller(endpoint) as caller:
        return caller.code(LINK_PATH, messages, metadata=() if greeting is None else ((HELLO_KEY, greeting),))


def hello(
    deployment: str, source: str, destination: str, version: int = PROTOCOL_VERSION, secret: bytes = b""
) -> bytes:
    message = pb.Hello(
        protocol_version=version, deployment=deployment, source=source, destination=destination, secret=secret
    )
    return message.SerializeToString()


def begin_upload(deployment: str, blob: BlobSpec) -> bytes:
    """Return the first message of an upload, without content."""
    return pb.PutBlobRequest(deployment=deployment, blob=message_of(pb.Blob, blob)).SerializeToString()

"""The methods of the control service, as ``worker.proto`` declares them. Both sides use it.

gRPC's generated stubs parse requests where one that is none leaves 16 KiB behind for good, before their length can be
looked at, and leave replies as they come. So the methods are taken from the service's descriptor, and parsed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from tvm_split.rpc_runtime.errors import ProtocolError
from tvm_split.rpc_runtime.wire import worker_pb2 as pb
from tvm_split.rpc_runtime.wire.foreign_text import clean_message

_CONTROL = pb.DESCRIPTOR.services_by_name["Control"]
CONTROL_SERVICE = _CONTROL.full_name
DATA_SERVICE = "tvm_split.Data"
LINK_METHOD = "Link"
LINK_PATH = f"/{DATA_SERVICE}/{LINK_METHOD}"
"""Of data streams, whose messages are frames: `framing`."""
HELLO_KEY = "tvm-split-hello-bin"
"""The metadata of a Link call that holds its ``Hello``: who calls is known before anything of the stream is read."""
DEFAULT_REQUEST_BYTES = 64 << 10


@dataclass(frozen=True)
class Method:
    """A method of the service ``Control``."""

    declared: MethodDescriptor

    @property
    def name(self) -> str:
        return str(self.declared.name)

    @property
    def path(self) -> str:
        return f"/{CONTROL_SERVICE}/{self.name}"

    @property
    def request(self) -> Any:
        """The class of its requests."""
        return GetMessageClass(self.declared.input_type)

    @property
    def reply(self) -> Any:
        """The class of its replies."""
        return GetMessageClass(self.declared.output_type)

    @property
    def maximum_request_bytes(self) -> int:
        options: Any = self.declared.GetOptions()
        return options.Extensions[pb.maximum_request_bytes] or DEFAULT_REQUEST_BYTES

    def read_request(self, content: bytes | None) -> Any:
        """A request.

        Raises:
            ProtocolError: there is none, it is too long, or it cannot be parsed.
        """
        if content is None:
            raise ProtocolError(f"{self.name} takes a request, and the caller sent none")
        limit = self.maximum_request_bytes
        if len(content) > limit:
            raise ProtocolError(f"a request of {self.name} has at most {limit} bytes, got {len(content)}")
        try:
            return self.request.FromString(content)
        except DecodeError as error:
            raise ProtocolError(f"a request of {self.name} that is none: {error}") from error

    def call(self, channel: Any) -> Any:
        """What calls it on a channel; replies come with their texts fit to be shown."""
        ends = (self.declared.client_streaming, self.declared.server_streaming)
        kind = "_".join("stream" if streams else "unary" for streams in ends)
        return getattr(channel, kind)(
            self.path,
            request_serializer=self.request.SerializeToString,
            response_deserializer=lambda content: clean_message(self.reply.FromString(content)),
        )


METHODS = {method.name: Method(method) for method in _CONTROL.methods}

"""The methods of the control service, as ``worker.proto`` declares them. Both sides use it.

gRPC's generated stubs parse requests where one that is none leaves 16 KiB behind for good, before their length can be
looked at, and leave replies as they come. So the methods are taken from the service's descriptor, and parsed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from rpc_runtime.errors import ProtocolError
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.foreign_text import clean_message

_CONTROL = pb.DESCRIPTOR.services_by_name["Control"]
CONTROL_SERVICE = _CONTROL.full_name
DATA_SERVICE = "tvm_split.Data"
LINK_METHOD = "Link"
LINK_PATH = f"/{DATA_SERVICE}/{LINK_METHOD}"
"""Of data streams, whose messages are frames: `framing`."""
HELLO_KEY = "tvm-split-hello-bin"
"""The metadata of a Link call that holds its ``Hello``: who calls is known before anything of the stream is read."""
DEFAULT_REQUEST_BYTES = 64 << 10
MAXIMUM_REQUEST_FIELDS = 1 << 18
"""Two bytes may be a message in another one, a hundred bytes when it is parsed; 20,000 weights are 160,000 fields."""


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
            ProtocolError: there is none, it is too long, has too many fields, or cannot be parsed.
        """
        if content is None:
            raise ProtocolError(f"{self.name} takes a request, and the caller sent none")
        limit = self.maximum_request_bytes
        if len(content) > limit:
            raise ProtocolError(f"a request of {self.name} has at most {limit} bytes, got {len(content)}")
        try:
            if len(content) > DEFAULT_REQUEST_BYTES:
                _count_fields(self.declared.input_type, content, 0, len(content), 0)
            return self.request.FromString(content)
        except (DecodeError, IndexError) as error:
            raise ProtocolError(f"a request of {self.name} that is none: {error}") from error

    def deployment(self, content: bytes) -> str:
        """Which deployment a request is for, where that comes first, as clients write it; the rest is not read."""
        return content[2 : 2 + content[1]].decode(errors="replace") if content[:1] == b"\n" else ""

    def call(self, channel: Any) -> Any:
        """What calls it on a channel; replies come with their texts fit to be shown."""
        ends = (self.declared.client_streaming, self.declared.server_streaming)
        kind = "_".join("stream" if streams else "unary" for streams in ends)
        return getattr(channel, kind)(
            self.path,
            request_serializer=self.request.SerializeToString,
            response_deserializer=lambda content: clean_message(self.reply.FromString(content)),
        )


def _count_fields(kind: Descriptor, content: bytes, place: int, end: int, count: int) -> int:
    """How many fields a message between two places has, those of messages in it too, and ``count`` before it.

    Raises:
        ProtocolError: more than `MAXIMUM_REQUEST_FIELDS`, or kinds of fields that no message of ours has.
        IndexError: it has no end.
    """
    nested = _nested(kind)
    while place < end:
        count += 1
        if count > MAXIMUM_REQUEST_FIELDS:
            raise ProtocolError(f"a request has more than {MAXIMUM_REQUEST_FIELDS} fields")
        tag, place = _number(content, place)
        if tag & 7 == 2:
            length, place = _number(content, place)
            if length and tag >> 3 in nested:
                count = _count_fields(nested[tag >> 3], content, place, min(place + length, end), count)
            place += length
        elif tag & 7 == 0:
            _, place = _number(content, place)
        elif tag & 7 == 1:
            place += 8
        else:
            raise ProtocolError(f"a request has a field of kind {tag & 7}")
    return count


@cache
def _nested(kind: Descriptor) -> dict[int, Descriptor]:
    return {number: each.message_type for number, each in kind.fields_by_number.items() if each.message_type}


def _number(content: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, of at most ten bytes, and the place behind it."""
    value = content[place]
    place += 1
    if value < 0x80:
        return value, place
    value &= 0x7F
    for shift in range(7, 70, 7):
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, place


METHODS = {method.name: Method(method) for method in _CONTROL.methods}

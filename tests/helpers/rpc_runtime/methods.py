"""The methods of a worker's control service, for tests that call them with bytes of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from rpc_runtime.wire import worker_pb2 as pb

_CONTROL = pb.DESCRIPTOR.services_by_name["Control"]
CONTROL_SERVICE: str = _CONTROL.full_name


@dataclass(frozen=True)
class Method:
    """One method: its path, and the classes of its messages."""

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

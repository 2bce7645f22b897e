"""Convert between the protobuf messages of ``worker.proto`` and the dataclasses of this package.

Fields have the same names in both, so one function writes all kinds and one function reads them. All messages are
untrusted: invalid values raise :class:`ProtocolError`. Some dataclasses have additional checks.
"""

import enum
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.measurements import KernelTime
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import MachineProgram
from rpc_runtime.program.specs import BlobSpec, TensorSpec
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.framing import PROTOCOL_VERSION
from rpc_runtime.wire.text import AnyMessage

MAXIMUM_TENSOR_BYTES = 1 << 36
LINK_SECRET_BYTES = 16
MAXIMUM_CONNECT_SECONDS = 600.0
"""The longest time that a client may give a worker to connect its links."""
SHORTEST_BEAT_SECONDS, LONGEST_BEAT_SECONDS = 0.05, 10.0
MAXIMUM_ABOUT_BYTES = 64 * 1024
"""The most bytes of what a client says about its deployment."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DTYPE_NAME = re.compile(r"[a-z][a-z0-9_]{1,30}")


Value = TypeVar("Value")


def message_of(kind: type[AnyMessage], value: Any, **more: Any) -> AnyMessage:
    """Return a dataclass as a message of ``kind``: fields are copied by name, also nested ones; ``more`` are added."""
    fields = {
        field.name: _written(field, getattr(value, field.name))
        for field in kind.DESCRIPTOR.fields
        if field.name not in more
    }
    return kind(**fields, **more)


def _written(field: Any, value: Any) -> Any:
    if field.message_type is None:
        return value
    kind = GetMessageClass(field.message_type)
    return [message_of(kind, part) for part in value] if field.is_repeated else message_of(kind, value)


def value_of(kind: type[Value], message: Message, **more: Any) -> Value:
    """Return a message as a dataclass ``kind``: fields are copied by name, also nested ones; ``more`` are added.

    Raises:
        ProtocolError: the dataclass or its check refuses the values.
    """
    fields = dict(more)
    for name, many, nested in _fields(kind):  # type: ignore[arg-type]
        if name not in more:
            content = getattr(message, name)
            if nested is not None:
                content = [_nested(nested, part) for part in content] if many else _nested(nested, content)
            fields[name] = many(content) if many else content
    try:
        value = kind(**fields)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    if kind in _CHECKS:
        _CHECKS[kind](value)
    return value


def _nested(kind: Any, value: Any) -> Any:
    """Return a field's value converted to a dataclass or an enumeration; raise `ProtocolError` if it is invalid."""
    if is_dataclass(kind):
        return value_of(kind, value)  # type: ignore[arg-type]
    try:
        return kind(value)
    except ValueError as error:
        raise ProtocolError(f"{error}: upgrade one side") from None


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any, Any], ...]:
    """Return, for each field: its name, its container type or None, and its dataclass or enumeration or None."""
    fields = []
    for name, hint in get_type_hints(kind).items():
        item_kind = (*get_args(hint), hint)[0]
        is_nested = is_dataclass(item_kind) or isinstance(item_kind, enum.EnumType)
        fields.append((name, get_origin(hint), item_kind if is_nested else None))
    return tuple(fields)


def _check_blob(blob: BlobSpec) -> None:
    if not _SHA256.fullmatch(blob.sha256):
        raise ProtocolError(f"a blob's name is 64 lowercase hexadecimal digits, got {blob.sha256[:80]!r}")


def _check_tensor(tensor: TensorSpec) -> None:
    if not _is_dtype(tensor.dtype):
        raise ProtocolError(f"tensor {tensor.name!r} has the unknown dtype {tensor.dtype[:80]!r}")
    if tensor.size_bytes > MAXIMUM_TENSOR_BYTES:
        size = tensor.size_bytes
        raise ProtocolError(f"tensor {tensor} has {size} bytes, at most {MAXIMUM_TENSOR_BYTES} are allowed")


def _is_dtype(name: str) -> bool:
    """Return whether a name is numpy's name of a numeric dtype; ``np.dtype`` also accepts structures and objects."""
    if not _DTYPE_NAME.fullmatch(name):
        return False
    try:
        dtype = np.dtype(name)
    except TypeError:
        return False
    return dtype.name == name and dtype.kind in "biufcV" and dtype.itemsize > 0


def hello_of(deployment: str, source: str, destination: str, secret: bytes = b"") -> pb.Hello:
    """Return the first message of the caller of a data stream."""
    version = PROTOCOL_VERSION
    return pb.Hello(
        protocol_version=version, deployment=deployment, source=source, destination=destination, secret=secret
    )


def load_request(
    deployment: str, program: Program, machine: str, link_secrets: Mapping[tuple[str, str], bytes]
) -> pb.LoadStagesRequest:
    """Return the request to load a machine's stages of a program; ``link_secrets`` are by (source, destination)."""
    secrets = [pb.LinkSecret(source=ends[0], destination=ends[1], secret=link_secrets[ends]) for ends in link_secrets]
    return pb.LoadStagesRequest(
        deployment=deployment,
        machine=machine,
        program=message_of(pb.Program, program.for_worker(machine)),
        link_secrets=secrets,
    )


def program_of(message: pb.LoadStagesRequest) -> MachineProgram:
    """Return the part of the program in a request for the request's machine.

    Raises:
        ProtocolError: the program is invalid, or has no stage for the machine.
    """
    program = value_of(Program, message.program, output_names=())
    try:
        part = program.on(message.machine)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    if not part.stages:
        raise ProtocolError(f"the program has no stage for machine {message.machine!r}")
    return part


def link_secrets(message: pb.LoadStagesRequest, program: MachineProgram) -> dict[tuple[str, str], bytes]:
    """Return the secret of each link between the program's machine and others, by (source, destination).

    Raises:
        ProtocolError: a secret is missing, or shorter than `LINK_SECRET_BYTES`.
    """
    secrets = {(link.source, link.destination): link.secret for link in message.link_secrets}
    for source, destination in program.links:
        if len(secrets.get((source, destination), b"")) < LINK_SECRET_BYTES:
            raise ProtocolError(
                f"the link from {source!r} to {destination!r} has no secret of {LINK_SECRET_BYTES} bytes"
            )
    return {ends: secrets[ends] for ends in program.links}


def checked_beat(seconds: float) -> float:
    """Return the time between two events of a watch; raise `ProtocolError` unless it is usual."""
    if not SHORTEST_BEAT_SECONDS <= seconds <= LONGEST_BEAT_SECONDS:
        limits = f"{SHORTEST_BEAT_SECONDS:g} to {LONGEST_BEAT_SECONDS:g}"
        raise ProtocolError(f"an event comes each {limits} seconds, not each {seconds}")
    return seconds


def checked_about(text: bytes) -> bytes:
    """Return ``text``, which describes a deployment; raise `ProtocolError` unless it is a short JSON object."""
    if len(text) > MAXIMUM_ABOUT_BYTES:
        raise ProtocolError(f"what is said about a deployment has {len(text)} bytes; limit: {MAXIMUM_ABOUT_BYTES}")
    try:
        is_object = not text or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ProtocolError("what is said about a deployment is no JSON object")
    return text


def _check_time(time: KernelTime) -> None:
    if not time.error and not (math.isfinite(time.seconds) and time.seconds > 0):
        raise ProtocolError(
            f"kernel {time.function[:200]!r} has the time {time.seconds} s; it must be finite and above 0"
        )


_CHECKS: dict[type, Callable[[Any], None]] = {
    BlobSpec: _check_blob,
    TensorSpec: _check_tensor,
    KernelTime: _check_time,
}

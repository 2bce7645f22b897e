"""gRPC connections: channel and server options, and the mapping between gRPC statuses and this project's errors."""

import os
import re
from dataclasses import dataclass, field
from typing import Any

import grpc

from rpc_runtime.errors import (
    AccessError,
    BlobError,
    DeadlineError,
    ProtocolError,
    StageError,
    TvmSplitError,
    WorkerError,
    WorkerUnavailableError,
    out_of_files,
)
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.security import TOKEN_VARIABLE, TlsFiles
from rpc_runtime.wire.text import MAXIMUM_LETTERS, cleaned

DATA_SERVICE, LINK_METHOD = "tvm_split.Data", "Link"
"""The service and method of data streams; their messages are frames (`framing`) and not in ``worker.proto``."""
LINK_PATH = f"/{DATA_SERVICE}/{LINK_METHOD}"
HELLO_KEY = "tvm-split-hello-bin"
"""The metadata key of a Link call's ``Hello``, so that the caller is known before its stream is read."""
MAXIMUM_MESSAGE_BYTES = 32 << 20
"""Maximum gRPC message size: data frames have 1 MiB, a program with some thousand weights or a full trace a few MiB."""
KEEPALIVE_MILLISECONDS = 4_000
PING_TIMEOUT_MILLISECONDS = 16_000
"""Timeout of a ping: its answer may wait behind 4 MiB in a socket's buffer, at 256 KiB/s on the slowest link."""
HANDSHAKE_MILLISECONDS = 10_000
"""Timeout of TLS and the first frames of HTTP/2; a silent connection is closed then."""
IDLE_MILLISECONDS = 5_000
"""A connection without a call is closed after this time; clients and links keep calls open."""

_BOTH_SIDES = [
    ("grpc.max_send_message_length", MAXIMUM_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAXIMUM_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MILLISECONDS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MILLISECONDS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # its pings wait behind tensors, so that a busy slow link would count as dead
    ("grpc.http2.lookahead_bytes", 8 << 20),  # lets a large tensor flow without waiting for window updates
]
SERVER_OPTIONS = [
    *_BOTH_SIDES,
    ("grpc.so_reuseport", 0),  # or two workers could share a port without noticing
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MILLISECONDS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MILLISECONDS),
    ("grpc.max_connection_idle_ms", IDLE_MILLISECONDS),
]
_CHANNEL_OPTIONS = [
    *_BOTH_SIDES,
    ("grpc.use_local_subchannel_pool", 1),  # else all channels to a worker share one TCP connection
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@dataclass(frozen=True)
class WorkerEndpoint:
    """The address (HOST:PORT) and credentials of the worker of ``machine``.

    Without a ``token``, the token of this user's own worker on loopback is found by the address. ``transport`` is the
    transport of the link to this worker.

    Raises:
        InputError: the address is invalid.
    """

    machine: str
    address: str
    token: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    transport: str = "auto"

    def __post_init__(self) -> None:
        Address.parse(self.address)

    def __str__(self) -> str:
        return f"machine {self.machine!r} at {self.address}"


def open_channel(address: str, tls: TlsFiles | None) -> Any:
    """Return a gRPC channel to a worker, with a connection of its own. Without TLS, ``localhost`` is 127.0.0.1."""
    if tls is None:
        return grpc.insecure_channel(str(Address.parse(address).numeric), options=_CHANNEL_OPTIONS)
    return grpc.secure_channel(address, tls.channel_credentials(), options=_CHANNEL_OPTIONS)


_CODES: tuple[tuple[type[TvmSplitError], grpc.StatusCode], ...] = (
    (StageError, grpc.StatusCode.ABORTED),
    (WorkerUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (AccessError, grpc.StatusCode.UNAUTHENTICATED),
    (WorkerError, grpc.StatusCode.FAILED_PRECONDITION),
    (BlobError, grpc.StatusCode.DATA_LOSS),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
)


def status_of(error: TvmSplitError) -> tuple[grpc.StatusCode, str]:
    """Return the gRPC status code and details for an error."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, str(error)[:MAXIMUM_LETTERS]
    return grpc.StatusCode.FAILED_PRECONDITION, str(error)[:MAXIMUM_LETTERS]


_CONNECTION_FAILED = re.compile(
    r"(?:failed to connect to all addresses|errors resolving|DNS resolution failed).*: *"
    r"(?P<reason>[^:]+?)(?: \(\d+\))?[.\]]*"
)
"""What gRPC says of a connection that it cannot open: addresses and internal names, and the reason at the end."""


def details_of(status: Any) -> str:
    """Return the cleaned details of an ``RpcError``, which may be untrusted text; only the reason if gRPC adds more."""
    details = cleaned(str(status.details() or ""))
    failed = _CONNECTION_FAILED.fullmatch(details)
    return failed["reason"] if failed else details


TOKEN_REFUSED = "the token is wrong or missing"  # noqa: S105 (words, no secret)
"""A worker's answer to a call without a token that it knows; the caller knows what it gave, and so what to change."""


def error_of(status: Any, endpoint: WorkerEndpoint) -> TvmSplitError:
    """Return the error for an ``RpcError`` of a call to the worker at ``endpoint``."""
    code, details, where = status.code(), details_of(status), str(endpoint)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        advice = f": {_token_advice(endpoint.token)}" * (details == TOKEN_REFUSED)
        return AccessError(f"{where} refused the call: {details}{advice}")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        text = f"{where} cannot be reached: {details}"
        return WorkerUnavailableError(out_of_files(text) or f"{text}. Is its worker running?")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"{where} is not a worker of this version: {details}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{where} did not answer in time")
    for kind, own_code in _CODES:
        if code is own_code:
            return kind(f"{where}: {details}")
    return WorkerError(f"{where} failed ({code.name}): {details}")


def _token_advice(given: str | None) -> str:
    if given is None:
        return "none was given; name its file as token_file in the cluster file or location (from Python: token)"
    source = TOKEN_VARIABLE if given == os.environ.get(TOKEN_VARIABLE, "").strip() else "its token_file (or token)"
    return f"the one from {source} is none of the worker's: give one that it was started with or has in its --tokens"


def explained(error: WorkerUnavailableError, endpoint: WorkerEndpoint) -> WorkerUnavailableError:
    """Return the error of a failed connection, with the TLS reason if there is one; connects once more to find it."""
    if out_of_files(error):
        return error
    from rpc_runtime.wire.certificates import tls_refusal

    reason = tls_refusal(endpoint.address, endpoint.tls)
    return error if reason is None else WorkerUnavailableError(f"{endpoint} cannot be reached: {reason}")

"""Who may talk to a worker: shared token, TLS, and the rule that an open address needs one of them on purpose."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from rpc_runtime.errors import InputError
from rpc_runtime.refusal import refusal

TOKEN_VARIABLE = "TVM_SPLIT_TOKEN"  # noqa: S105 (a name, no secret)
_METADATA_KEY = "authorization"


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. ``authority`` says whose certificates to trust; ``certificate`` and ``key`` prove who one is oneself.

    A client needs ``authority``, and the other two only if workers ask for them (mutual TLS).
    """

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def channel_credentials(self) -> Any:
        return grpc.ssl_channel_credentials(_content(self.authority), _content(self.key), _content(self.certificate))

    def server_credentials(self) -> Any:
        """With ``authority``, callers must prove who they are as well."""
        if self.certificate is None or self.key is None:
            raise InputError("TLS of a worker needs both a certificate and its key")
        authority = _content(self.authority)
        return grpc.ssl_server_credentials(
            [(_content(self.key), _content(self.certificate))],
            root_certificates=authority,
            require_client_auth=authority is not None,
        )

    def as_caller(self) -> TlsFiles:
        """How a worker with these files calls other workers: without an authority it trusts its own certificate."""
        return TlsFiles(self.authority or self.certificate, self.certificate, self.key)


def _content(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the TLS file {path}: {error.strerror}") from error


@dataclass(frozen=True)
class Token:
    """A shared secret, which its repr does not show."""

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if not self.text or not all(33 <= ord(letter) <= 126 for letter in self.text):
            raise InputError("a token is one or more printable ASCII letters without blanks")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((_METADATA_KEY, f"Bearer {self.text}"),)


def token_from(file: Path | None, environment: Mapping[str, str] = os.environ) -> Token | None:
    """The token in ``file``, else in the environment variable ``TVM_SPLIT_TOKEN``, else None."""
    if file is not None:
        try:
            return Token(file.read_text(encoding="utf-8").strip())
        except OSError as error:
            raise InputError(f"cannot read the token file {file}: {error.strerror}") from error
    text = environment.get(TOKEN_VARIABLE, "").strip()
    return Token(text) if text else None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 host stands in brackets."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InputError(f"an address is HOST:PORT with a port from 0 to 65535, got {address!r}")
    return host, int(port)


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call that does not bring the token."""

    def __init__(self, token: Token) -> None:
        self._expected = token.metadata[0][1].encode()
        self._refusal = refusal(
            grpc.StatusCode.UNAUTHENTICATED,
            f"the token is wrong or missing: give the worker's own one ({TOKEN_VARIABLE} or --token-file)",
        )

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        for key, value in handler_call_details.invocation_metadata:
            given = value.encode(errors="replace") if isinstance(value, str) else bytes(value)
            if key == _METADATA_KEY and hmac.compare_digest(given, self._expected):
                return continuation(handler_call_details)
        return self._refusal

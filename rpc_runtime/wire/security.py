"""Access to a worker: shared tokens and TLS files, and helpers for addresses."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from rpc_runtime.errors import InputError

TOKEN_VARIABLE = "TVM_SPLIT_TOKEN"  # noqa: S105 (a name, no secret)
_METADATA_KEY = "authorization"

Metadata = Iterable[tuple[str, str | bytes]]
"""The metadata of a gRPC call: keys and values."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files for TLS: the trusted ``authority``, and the own ``certificate`` with its ``key``.

    A client needs ``authority``, and the other two only if workers ask for them (mutual TLS).

    Raises:
        InputError: there is a certificate without its key, or a key alone; or, on use, a file is invalid.
    """

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            only = self.certificate or self.key
            raise InputError(f"TLS needs both a certificate and its key, or neither, got only {only}")

    def channel_credentials(self) -> Any:
        key = pem_content(self.key, "private key")
        return grpc.ssl_channel_credentials(pem_content(self.authority), key, pem_content(self.certificate))

    def server_credentials(self) -> Any:
        """Return the credentials of a worker; with ``authority``, callers need a certificate too (mutual TLS).

        Raises:
            InputError: the certificate or the key is missing, or a file is invalid.
        """
        if self.certificate is None or self.key is None:
            raise InputError("TLS of a worker needs both a certificate and its key")
        authority = pem_content(self.authority)
        return grpc.ssl_server_credentials(
            [(pem_content(self.key, "private key"), pem_content(self.certificate))],
            root_certificates=authority,
            require_client_auth=authority is not None,
        )

    def as_caller(self) -> TlsFiles:
        """Return the files with which this worker calls others; without an authority it trusts its own certificate."""
        return TlsFiles(self.authority or self.certificate, self.certificate, self.key)


def pem_content(path: Path | None, what: str = "certificate") -> bytes | None:
    """Return the content of a TLS file, checked to have PEM of kind ``what``; None without a file.

    The check is needed because gRPC ends the process if a file has none.

    Raises:
        InputError: the file cannot be read, or has no such PEM.
    """
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the TLS file {path}: {error.strerror}") from error
    if f"{what.upper()}-----".encode() not in content:
        raise InputError(f"{path} holds no {what} in PEM")
    return content


@dataclass(frozen=True)
class Token:
    """A shared secret, hidden in the repr, and the file from which it was read, if any.

    Raises:
        InputError: the text is empty, or has other characters than printable ASCII without blanks.
    """

    text: str = field(repr=False)
    file: Path | None = None

    def __post_init__(self) -> None:
        if not self.text or not all(33 <= ord(letter) <= 126 for letter in self.text):
            found = "" if self.file is None else f", and {self.file} holds something else"
            raise InputError(f"a token is one or more printable ASCII letters without blanks{found}")

    def shown_in(self, metadata: Metadata) -> bool:
        """Return whether a caller's metadata has the token; compares in constant time."""
        expected = self.metadata[0][1].encode()
        given = (value for key, value in metadata if key == _METADATA_KEY)
        return any(hmac.compare_digest(_as_bytes(value), expected) for value in given)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((_METADATA_KEY, f"Bearer {self.text}"),)


def token_from(file: Path | None, environment: Mapping[str, str] = os.environ) -> Token | None:
    """Return the token in ``file``, else in the environment variable ``TVM_SPLIT_TOKEN``, else None.

    Raises:
        InputError: the file cannot be read, or has no valid token.
    """
    if file is not None:
        try:
            return Token(file.read_text(encoding="utf-8").strip(), file)
        except OSError as error:
            raise InputError(f"cannot read the token file {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"the token file {file} is no text") from error
    text = environment.get(TOKEN_VARIABLE, "").strip()
    return Token(text) if text else None


LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 (a name for it)
"""The addresses for all of a host's addresses, with the one to call on that host."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, with an IPv6 host in brackets; raise `InputError` for other text."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InputError(f"an address is HOST:PORT with a port from 0 to 65535, got {address!r}")
    return host, int(port)


def numeric_address(address: str) -> str:
    """Return ``address`` with 127.0.0.1 for ``localhost``.

    ``localhost`` also means ::1, where another user may have the port.
    """
    host, port = split_address(address)
    return f"{'127.0.0.1' if host.lower() == 'localhost' else host}:{port}"


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode(errors="replace") if isinstance(value, str) else bytes(value)

"""Who may talk to a worker: shared token, TLS, and the rule that an open address needs one of them on purpose."""

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
"""What comes with a call: keys and values."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. ``authority`` says whose certificates to trust; ``certificate`` and ``key`` prove who one is oneself.

    A client needs ``authority``, and the other two only if workers ask for them (mutual TLS).

    Raises:
        InputError: there is a certificate without its key, or a key alone; when used: a file is not what it should be.
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
        """With ``authority``, callers must prove who they are as well."""
        if self.certificate is None or self.key is None:
            raise InputError("TLS of a worker needs both a certificate and its key")
        authority = pem_content(self.authority)
        return grpc.ssl_server_credentials(
            [(pem_content(self.key, "private key"), pem_content(self.certificate))],
            root_certificates=authority,
            require_client_auth=authority is not None,
        )

    def as_caller(self) -> TlsFiles:
        """How a worker with these files calls other workers: without an authority it trusts its own certificate."""
        return TlsFiles(self.authority or self.certificate, self.certificate, self.key)


def pem_content(path: Path | None, what: str = "certificate") -> bytes | None:
    """What is in a TLS file, which holds a certificate or a private key: gRPC ends the process over one without.

    Raises:
        InputError: it cannot be read, or holds none in PEM.
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
    """A shared secret, which its repr does not show, and the file it was read from, if from one."""

    text: str = field(repr=False)
    file: Path | None = None

    def __post_init__(self) -> None:
        if not self.text or not all(33 <= ord(letter) <= 126 for letter in self.text):
            found = "" if self.file is None else f", and {self.file} holds something else"
            raise InputError(f"a token is one or more printable ASCII letters without blanks{found}")

    def shown_in(self, metadata: Metadata) -> bool:
        """Whether a caller with this metadata knows the token; takes as long for a near miss as for a wild guess."""
        expected = self.metadata[0][1].encode()
        given = (value for key, value in metadata if key == _METADATA_KEY)
        return any(hmac.compare_digest(_as_bytes(value), expected) for value in given)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((_METADATA_KEY, f"Bearer {self.text}"),)


def token_from(file: Path | None, environment: Mapping[str, str] = os.environ) -> Token | None:
    """The token in ``file``, else in the environment variable ``TVM_SPLIT_TOKEN``, else None."""
    if file is not None:
        try:
            return Token(file.read_text(encoding="utf-8").strip(), file)
        except OSError as error:
            raise InputError(f"cannot read the token file {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"the token file {file} is no text") from error
    text = environment.get(TOKEN_VARIABLE, "").strip()
    return Token(text) if text else None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 host stands in brackets."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InputError(f"an address is HOST:PORT with a port from 0 to 65535, got {address!r}")
    return host, int(port)


def numeric_address(address: str) -> str:
    """``address`` with 127.0.0.1 for ``localhost``, which means ::1 as well: there, another user may hold the port."""
    host, port = split_address(address)
    return f"{'127.0.0.1' if host.lower() == 'localhost' else host}:{port}"


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode(errors="replace") if isinstance(value, str) else bytes(value)

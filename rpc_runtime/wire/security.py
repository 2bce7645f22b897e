"""Access to a worker: shared tokens and TLS files.

Every user of a host can connect to its loopback addresses. So a worker on loopback without a configured token makes a
random one at each start. It writes the token to a file that only clients of the same user can read, and that they find
by the worker's address. A token is valid for one worker until it ends. Another user may take the port later and receive
the old token from a client, but it opens no worker. The file of a killed worker is removed when a client looks for it,
or when the next worker starts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from rpc_runtime.errors import InputError
from rpc_runtime.files import WRITING, file_bytes, is_kept, keep, reason_of, replacing, state_folder
from rpc_runtime.private_folder import all_can_read, private_folder, require_private
from rpc_runtime.wire.addresses import Address

TOKEN_VARIABLE = "TVM_SPLIT_TOKEN"  # noqa: S105 (a name, no secret)
_METADATA_KEY, _SCHEME = "authorization", "Bearer "

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
        return grpc.ssl_channel_credentials(*self.contents())

    def contents(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return what is in the files: authority, key and certificate. Raises InputError if one is invalid."""
        return pem_content(self.authority), pem_content(self.key, PRIVATE_KEY), pem_content(self.certificate)

    def as_caller(self) -> TlsFiles:
        """Return the files with which this worker calls others; without an authority it trusts its own certificate."""
        return TlsFiles(self.authority or self.certificate, self.certificate, self.key)


PRIVATE_KEY = "private key"
"""Kind of PEM; a file of this kind is refused if every user can read it."""


def access_file(path: Path, what: str, secret: str = "") -> bytes:
    """Return the content of a file that decides who has access.

    Raises:
        InputError: it cannot be read, or every user can read the ``secret`` in it.
    """
    try:
        content = file_bytes(path)
        if secret and all_can_read(path):
            raise InputError(
                f"every user of this host can read the {secret} in {path}: `chmod 600 {path}`, or keep it in a folder "
                "that they cannot enter"
            )
    except OSError as error:
        raise InputError(f"cannot read the {what} {path}: {error.strerror}") from error
    return content


def pem_content(path: Path | None, what: str = "certificate") -> bytes | None:
    """Return the content of a TLS file, checked to have PEM of kind ``what``; None without a file.

    The check is needed because gRPC ends the process if a file has none.

    Raises:
        InputError: the file cannot be read, has no such PEM, or is a private key that every user can read.
    """
    if path is None:
        return None
    content = access_file(path, "TLS file", PRIVATE_KEY * (what == PRIVATE_KEY))
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
            hint = "" if self.file is None else f", and {self.file} holds something else"
            raise InputError(f"a token is one or more printable ASCII letters without blanks{hint}")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((_METADATA_KEY, f"{_SCHEME}{self.text}"),)


def shown_tokens(metadata: Metadata) -> list[str]:
    """Return the tokens that a call's metadata shows, which may be any text."""
    values = [value for key, value in metadata if key == _METADATA_KEY]
    texts = [value if isinstance(value, str) else bytes(value).decode(errors="replace") for value in values]
    return [text.removeprefix(_SCHEME) for text in texts if text.startswith(_SCHEME)]


def token_from(file: Path | None, environment: Mapping[str, str] = os.environ) -> Token | None:
    """Return the token in ``file``, else in the environment variable ``TVM_SPLIT_TOKEN``, else None.

    Raises:
        InputError: the file cannot be read, has no valid token, or every user of this host can read it.
    """
    if file is not None:
        try:
            return Token(access_file(file, "token file", "token").decode().strip(), file)
        except UnicodeDecodeError as error:
            raise InputError(f"the token file {file} is not a text file") from error
    text = environment.get(TOKEN_VARIABLE, "").strip()
    return Token(text) if text else None


def new_token() -> Token:
    return Token(secrets.token_hex(16))


def find_token(address: str) -> Token | None:
    """Return the token of this user's worker at ``address``; None if there is no file, as for other machines.

    Raises:
        InputError: the file exists but cannot be read, or another user may have written it.
    """
    called, folder = Address.parse(address).numeric, _folder()
    if folder is None or not called.is_loopback:
        return None
    path = folder / str(called)
    _remove_if_stale(path)
    try:
        if not path.exists():
            return None
        require_private(folder)
    except OSError as error:
        raise InputError(
            f"cannot trust the token in {path} ({reason_of(error)}): repair owner and mode (chown, chmod go-w), "
            "or name the token's file as token_file in the cluster file or location"
        ) from error
    return token_from(path)


@contextlib.contextmanager
def published(token: Token, address: str) -> Iterator[Path]:
    """Publish a token for this user's clients while the context is open; yield its file.

    ``address`` is the worker's numeric address.

    Raises:
        InputError: the token cannot be written so that no other user can read it.
    """
    folder = _folder()
    if folder is None:
        raise _no_place("the home of this user", "it has none")
    path = folder / address
    with contextlib.ExitStack() as open_files:
        try:
            private_folder(folder)
            for token_file in folder.iterdir():
                _remove_if_stale(token_file)
            with replacing(path) as file:
                file.write(token.text.encode() + b"\n")
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise _no_place(path, "its file system lets others read it")
                lock = open_files.enter_context(os.fdopen(os.dup(file.fileno()), "rb"))  # shares the lock
                keep(lock)
        except OSError as error:
            raise _no_place(path, reason_of(error)) from error
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def _folder() -> Path | None:
    """Return the token folder of this host, since hosts may share homes; None for a user without a home."""
    tokens = state_folder("tokens")
    return None if tokens is None else tokens / socket.gethostname()


def _remove_if_stale(path: Path) -> None:
    """Remove the token file of a worker that has ended, but not a file that is being written."""
    with contextlib.suppress(OSError):
        if path.is_file() and not path.name.startswith(WRITING):
            with path.open("rb") as file:
                if not is_kept(file):
                    path.unlink()


def _no_place(path: Path | str, reason: str) -> InputError:
    return InputError(
        f"cannot keep a token in {path} ({reason}), and without one every user of this host may run code here: "
        "give --token-file, or --insecure if you trust them all"
    )

"""The automatic token of a worker on loopback: a file that only its user can read, found by the worker's address.

Every user of a host can connect to its loopback addresses. So a worker without a configured token makes a random one at
each start. It writes the token to a file that only clients of the same user can read. A token is valid for one worker
until it ends. Another user may take the port later and receive the old token from a client, but it opens no worker. The
file of a killed worker is removed when a client looks for it, or when the next worker starts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from rpc_runtime.errors import InputError
from rpc_runtime.files import WRITING, is_kept, keep, reason_of, replacing, state_folder
from rpc_runtime.private_folder import private_folder, require_private
from rpc_runtime.wire.security import Token, is_loopback, numeric_address, split_address, token_from


def new_token() -> Token:
    return Token(secrets.token_hex(16))


def find_token(address: str) -> Token | None:
    """Return the token of this user's worker at ``address``; None if there is no file, as for other machines.

    Raises:
        InputError: the file exists but cannot be read, or another user may have written it.
    """
    address = numeric_address(address)
    if not is_loopback(split_address(address)[0]):
        return None
    folder = _folder()
    if folder is None:
        return None
    path = folder / address
    _remove_if_stale(path)
    try:
        token = token_from(path)
        require_private(folder)
    except InputError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise
    except OSError as error:
        raise InputError(
            f"cannot trust the token in {path} ({reason_of(error)}): repair owner and mode (chown, chmod go-w), "
            "or give the token by --token-file"
        ) from error
    return token


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
    with contextlib.ExitStack() as kept:
        try:
            private_folder(folder)
            for other in folder.iterdir():
                _remove_if_stale(other)
            with replacing(path) as file:
                file.write(token.text.encode() + b"\n")
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise _no_place(path, "its file system lets others read it")
                held = kept.enter_context(os.fdopen(os.dup(file.fileno()), "rb"))  # shares the lock
                keep(held)
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

"""The token of a worker on loopback that was given none: a file that its user alone can read, found by the address.

Every user of a host reaches its loopback addresses. So a worker there makes a random token each time it starts and
writes it where only its own user's clients look for it. A token is of one worker and ends with it: whoever takes the
port afterwards, and is told what the file still says, has learnt nothing that opens any worker. The file of a worker
that was killed goes when somebody looks at it, or when the next worker starts.
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
    """The token of this user's worker at ``address``; None where there is no such file, as for other machines.

    Raises:
        InputError: the file is there and cannot be read, or another user may have written it.
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
    """Inside, clients of this user find the token of the worker at ``address``, a numeric one; gives its file.

    Raises:
        InputError: it cannot be kept so that nobody else can read it.
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
    """Of this host's workers, beside those of others: homes are shared by hosts. None for a user without a home."""
    tokens = state_folder("tokens")
    return None if tokens is None else tokens / socket.gethostname()


def _remove_if_stale(path: Path) -> None:
    """Removes the file of a worker that is gone. One that is being written is too young."""
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

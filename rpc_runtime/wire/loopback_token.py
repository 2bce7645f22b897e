"""The token of a worker on loopback that was given none: a file that its user alone can read, found by the address.

Every user of a host reaches its loopback addresses. So a worker there makes a random token each time it starts and
writes it where only its own user's clients look for it. A token is of one worker and ends with it: whoever takes the
port afterwards, and is told what the file still says, has learnt nothing that opens any worker.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tvm_split.rpc_runtime.errors import InputError
from tvm_split.rpc_runtime.wire.security import Token, is_loopback, split_address, token_from

STATE_VARIABLE = "XDG_STATE_HOME"
_NAMES_OF_ONE_HOST = ("localhost", "127.0.0.1", "::1")


def new_token() -> Token:
    return Token(secrets.token_hex(16))


def find_token(address: str) -> Token | None:
    """The token of this user's worker at ``address``; None where there is no such file, as for other machines.

    Raises:
        InputError: the file is there and cannot be read.
    """
    if not is_loopback(split_address(address)[0]):
        return None
    try:
        return token_from(_path(address))
    except InputError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError | RuntimeError):
            return None
        raise


@contextlib.contextmanager
def published(token: Token, address: str) -> Iterator[Path]:
    """Inside, clients of this user find the token of the worker at ``address``; gives its file.

    Raises:
        InputError: it cannot be kept so that nobody else can read it.
    """
    path = _path(address)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, written = tempfile.mkstemp(dir=path.parent)  # with mode 0600
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token.text + "\n")
            private = os.fstat(descriptor).st_mode & 0o077 == 0
        if private:
            Path(written).replace(path)
        else:
            Path(written).unlink()
    except OSError as error:
        raise _no_place(path, str(error.strerror)) from error
    if not private:
        raise _no_place(path, "its file system lets others read it")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _path(address: str) -> Path:
    """Beside those of this host's other workers; homes are shared by hosts."""
    try:
        state = Path(os.environ.get(STATE_VARIABLE, "") or Path.home() / ".local" / "state")
    except RuntimeError as error:
        raise _no_place("the home of this user", "it has none") from error
    host, port = split_address(address)
    name = "localhost" if host.strip("[]") in _NAMES_OF_ONE_HOST else host.strip("[]")
    return state / "tvm-split" / "tokens" / socket.gethostname() / f"{name}:{port}"


def _no_place(path: Path | str, reason: str) -> InputError:
    return InputError(
        f"cannot keep a token in {path} ({reason}), and without one every user of this host may run code here: "
        "give --token-file, or --insecure if you trust them all"
    )

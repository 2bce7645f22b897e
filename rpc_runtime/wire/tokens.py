"""The callers that a worker knows by their tokens: a name and a role each; a file holds only SHA-256 of tokens.

Tokens are random, so nobody finds one from its SHA-256, and how long a look-up takes tells nothing about one.
"""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rpc_runtime.errors import AccessError, InputError
from rpc_runtime.files import file_bytes, reason_of
from rpc_runtime.wire.security import Metadata, Token, shown_tokens

logger = logging.getLogger(__name__)

DEPLOY, OBSERVE = "deploy", "observe"
_LINE = re.compile(rf"([\w.@-]{{1,64}})\s+({DEPLOY}|{OBSERVE})\s+([0-9a-f]{{64}})", re.ASCII)


@dataclass(frozen=True)
class Caller:
    """The holder of a token; ``role`` is empty once the token was revoked."""

    name: str
    role: str = DEPLOY

    def require(self, role: str) -> None:
        """Raise an `AccessError` if the caller may not do what needs ``role``; who may deploy may observe as well."""
        if not self.role:
            raise AccessError(f"the token of {self.name!r} was revoked: ask for a new one (`tvm-split token`)")
        if self.role not in (DEPLOY, role):
            raise AccessError(f"the token of {self.name!r} may {self.role} only: ask for one that may {role}")


def token_line(name: str, role: str, token: Token) -> str:
    """Return the line of a token in a worker's file. Raises InputError for a name with other characters."""
    line = f"{name} {role} {_digest(token.text)}"
    if _LINE.fullmatch(line) is None:
        raise InputError(f"a token's name has 1 to 64 letters, digits or any of ._@-, got {name!r}")
    return line


class Tokens:
    """The callers whose tokens are in a ``file``, with a line ``NAME ROLE SHA256`` each, or of the one ``token``.

    The file is read at every call, so a change holds at once. A file that cannot be used changes nothing: an editor may
    have emptied it for a moment.

    Raises:
        InputError: the file cannot be used; the message says why.
    """

    def __init__(self, file: Path | None, token: Token | None = None) -> None:
        self._file = file
        self._fault = ""
        self._callers = {} if token is None else {_digest(token.text): Caller("token")}
        if file is not None:
            self._callers = dict(_lines(file))

    def caller(self, metadata: Metadata) -> Caller | None:
        """Return who shows a known token in a call's metadata; None for a stranger."""
        if self._file is not None:
            self._read_again(self._file)
        callers = [self._callers.get(_digest(token)) for token in shown_tokens(metadata)]
        return next(filter(None, callers), None)

    def _read_again(self, file: Path) -> None:
        fault = ""
        try:
            current = dict(_lines(file))
            self._callers = {digest: Caller(caller.name, "") for digest, caller in self._callers.items()} | current
        except InputError as error:
            fault = str(error)
            if fault != self._fault:
                logger.error("%s; the tokens that were read before stay valid", fault)
        self._fault = fault


def _digest(token: str) -> str:
    return sha256(token.encode(errors="replace")).hexdigest()


def _lines(file: Path) -> Iterator[tuple[str, Caller]]:
    try:
        text = file_bytes(file).decode(errors="replace")
        if file.stat().st_mode & stat.S_IWOTH:
            raise InputError(f"every user of this host can write to the tokens in {file}: `chmod o-w {file}`")
    except OSError as error:
        raise InputError(f"cannot read the tokens in {file}: {reason_of(error)}") from error
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1) if not line.startswith("#")}
    if not any(lines.values()):
        raise InputError(f"{file} holds no token: `tvm-split token NAME --tokens {file}` adds one")
    for number, line in lines.items():
        match = _LINE.fullmatch(line)
        if match is not None:
            yield match[3], Caller(match[1], match[2])
        elif line:
            raise InputError(f"line {number} of {file} is not NAME ROLE SHA256, with the role deploy or observe")

"""The callers that a worker knows by their tokens: a name and a role each; a file holds only SHA-256 of tokens.

Tokens are random, so nobody finds one from its SHA-256, and how long a look-up takes tells nothing about one.
"""

import logging
import re
import stat
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from rpc_runtime.errors import InputError
from rpc_runtime.wire.security import Metadata, Token, access_file, shown_tokens

logger = logging.getLogger(__name__)

DEPLOY, OBSERVE = "deploy", "observe"
_LINE = re.compile(rf"([\w.@-]{{1,64}})\s+({DEPLOY}|{OBSERVE})\s+([0-9a-f]{{64}})", re.ASCII)


class Caller(NamedTuple):
    """The holder of a token, who may observe, or also deploy; ``role`` is empty once the token was revoked."""

    name: str
    role: str = DEPLOY


def token_line(name: str, role: str, token: Token) -> str:
    """Return the line of a token in a worker's file. Raises InputError for a name with other characters."""
    line = f"{name} {role} {_digest(token.text)}"
    if _LINE.fullmatch(line) is None:
        raise InputError(f"a token's name has 1 to 64 letters, digits or any of ._@-, got {name!r}")
    return line


class Tokens:
    """The callers whose tokens are in a file, with a line ``NAME ROLE SHA256`` each, or the holder of one token.

    The file is read at every call, so a change holds at once. One that cannot be used raises an InputError here, and
    changes nothing later: an editor may have emptied it for a moment.
    """

    def __init__(self, source: Path | Token) -> None:
        self._source, self._fault, self._lock = source, "", threading.Lock()
        self._callers = dict(_read(source))

    def caller(self, metadata: Metadata) -> Caller | None:
        """Return who shows a known token in a call's metadata; None for a stranger."""
        with self._lock:  # of two calls at once, one tells a fault
            try:
                current = dict(_read(self._source))
                self._callers = {digest: Caller(caller.name, "") for digest, caller in self._callers.items()} | current
                self._fault = ""
            except (InputError, OSError) as error:
                if self._fault != str(error):
                    logger.error("%s; the tokens that were read before stay valid", error)
                self._fault = str(error)
            callers = self._callers
        return next(filter(None, (callers.get(_digest(token)) for token in shown_tokens(metadata))), None)


def _digest(token: str) -> str:
    return sha256(token.encode(errors="replace")).hexdigest()


def _read(file: Path | Token) -> Iterator[tuple[str, Caller]]:
    if isinstance(file, Token):
        yield _digest(file.text), Caller("token")
        return
    text = access_file(file, "file of tokens").decode(errors="replace")
    if file.stat().st_mode & stat.S_IWOTH:
        raise InputError(f"every user of this host can write to the tokens in {file}: `chmod o-w {file}`")
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1) if not line.startswith("#")}
    if not any(lines.values()):
        raise InputError(f"{file} holds no token: `tvm-split token NAME --tokens {file}` adds one")
    for number, line in lines.items():
        match = _LINE.fullmatch(line)
        if match is not None:
            yield match[3], Caller(match[1], match[2])
        elif line:
            raise InputError(f"line {number} of {file} is not NAME ROLE SHA256, with the role deploy or observe")

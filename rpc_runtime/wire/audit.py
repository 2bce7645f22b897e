"""The audit log of a worker: who called what, and who was refused, as JSON lines."""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpc_runtime.errors import InputError
from rpc_runtime.files import reason_of
from rpc_runtime.program.events import SHOWN_LETTERS
from rpc_runtime.wire.text import cleaned

logger = logging.getLogger(__name__)


class Audit:
    """Appends events to a file, which may be moved or removed meanwhile; without a file, writes nothing. Thread-safe.

    Raises an InputError if the file cannot be written.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._refused: set[tuple[int, str, str]] = set()
        try:
            self._append("")
        except OSError as error:
            raise InputError(f"cannot write the audit log {file}: {reason_of(error)}") from error

    def refused(self, path: str, caller: str, context: Any, reason: str) -> None:
        """Write that a call was refused, once a second for a caller and method: strangers cannot fill the disk."""
        key = (int(time.monotonic()), path, caller)
        with self._lock:
            is_new, self._refused = key not in self._refused, {one for one in self._refused if one[0] == key[0]} | {key}
        if is_new:
            self._write("refused", path, caller, context, reason=reason)

    @contextmanager
    def call(self, path: str, caller: str, context: Any, request: Any) -> Iterator[None]:
        """Write that a call was accepted, and after the body that it ended, with the reason of an error."""
        names = {name: str(getattr(request, name, "")) for name in ("deployment", "model", "draining")}
        names["deployment"] = names["deployment"][:SHOWN_LETTERS]
        self._write("accepted", path, caller, context, **names)
        try:
            yield
        finally:
            self._write("ended", path, caller, context, reason=str(sys.exception() or ""), **names)

    def _write(self, result: str, path: str, caller: str, context: Any, **more: str) -> None:
        fields = {"time": datetime.now(UTC).isoformat(), "result": result, "method": path.rpartition("/")[2]}
        fields |= {"caller": caller, "peer": context.peer()} | {key: text for key, text in more.items() if text}
        try:
            self._append(json.dumps({key: cleaned(text) for key, text in fields.items()}) + "\n")
        except OSError as error:
            logger.error("cannot write the audit log: %s", reason_of(error))

    def _append(self, line: str) -> None:
        if self._file is not None:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(line)

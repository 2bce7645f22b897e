"""The audit log of a worker: who called what, and who was refused, as JSON lines."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpc_runtime.errors import InputError
from rpc_runtime.files import reason_of
from rpc_runtime.program.events import SHOWN_LETTERS
from rpc_runtime.wire.text import cleaned

logger = logging.getLogger(__name__)

REFUSALS_A_SECOND = 10
"""The most lines of refusals of a caller (strangers are one) in a second, so that they cannot fill the disk."""


class Audit:
    """Appends events to a file, which may be moved or removed meanwhile; without a file, writes nothing. Thread-safe.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._second, self._refusals, self._left_out = 0, Counter[str](), 0
        try:
            self._append("")
        except OSError as error:
            raise InputError(f"cannot write the audit log {file}: {reason_of(error)}") from error

    def refused(self, path: str, caller: str, context: Any, reason: str) -> None:
        """Write that a call was refused, unless that caller was refused too often in this second."""
        second = int(time.monotonic())
        with self._lock:
            self._second, self._refusals = second, self._refusals if second == self._second else Counter()
            self._refusals[caller] += 1
            is_left_out = self._refusals[caller] > REFUSALS_A_SECOND
            self._left_out += is_left_out
        if not is_left_out:
            self._write("refused", path, caller, context, reason=reason)

    @contextmanager
    def call(self, path: str, caller: str, context: Any, request: Any) -> Any:
        """Write that a call was accepted, and after the body that it ended, with the reason of an error."""
        names = {"deployment": request.deployment[:SHOWN_LETTERS], "model": getattr(request, "model", ""), "reason": ""}
        self._write("accepted", path, caller, context, **names)
        try:
            yield
        except Exception as error:
            names["reason"] = str(error)
            raise
        finally:
            self._write("ended", path, caller, context, **names)

    def _write(self, result: str, path: str, caller: str, context: Any, **more: str) -> None:
        fields = {"time": datetime.now(UTC).isoformat(), "result": result, "method": path.rpartition("/")[2]}
        fields |= {"caller": caller, "peer": context.peer()} | {key: text for key, text in more.items() if text}
        with self._lock:
            left_out = {"refusals_left_out": self._left_out} if self._left_out else {}
            self._left_out = 0
            try:
                self._append(json.dumps({key: cleaned(text) for key, text in fields.items()} | left_out) + "\n")
            except OSError as error:
                logger.error("cannot write the audit log: %s", reason_of(error))

    def _append(self, line: str) -> None:
        if self._file is not None:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(line)

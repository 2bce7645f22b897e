"""The tuning database: a folder that `compile` reads, that tuning resumes from, and that people can share.

FOLDER/records.jsonl has a line of JSON per record: a measurement, or a decision (the default, or what was faster in a
duel). A record has no code: its choices are scheduled again when they are used. So a wrong record can make a kernel
slower, but not wrong.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tvm_ffi
from pydantic import TypeAdapter, ValidationError
from tvm import tirx
from tvm.target import Target

from schedules import machine_of, templates_of
from schedules.blocks import last_line, without_symbol
from schedules.template import choices_from
from schedules.tuning.errors import DatabaseError

RECORDS = "records.jsonl"
LOCK = ".writer"
MATCHED_IN_A_TARGET = ("kind", "mtriple", "mcpu", "mattr", "num-cores", "arch")
"""The target's properties that must be equal for a tuned kernel to be reused.

The best choices for one thread (``num-cores``) may differ for four. ``arch`` is a GPU's.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """One measurement or decision: a kernel's structural hash, its choices as text, and the seconds of each round.

    ``target`` has the values of `MATCHED_IN_A_TARGET`. Without rounds the kernel failed, for the reason ``error``.
    """

    kernel: str
    target: tuple[str, ...]
    choices: str
    rounds: tuple[float, ...]
    error: str = ""
    is_decision: bool = False

    @property
    def seconds(self) -> float | None:
        """The median of the rounds, or None if the kernel failed."""
        return median(self.rounds) if self.rounds else None


_RECORD = TypeAdapter(Record)


class TuningDatabase:
    """The decisions in a folder, read once; a folder that does not exist is an empty database.

    Raises:
        DatabaseError: a file is damaged; the message names the file and the line.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._decided = [record for record in _records(self.folder) if record.is_decision]

    def __len__(self) -> int:
        return len(self._decided)

    @property
    def digest(self) -> str:
        """The SHA-256 of all decisions."""
        return hashlib.sha256(b"\n".join(map(_RECORD.dump_json, self._decided))).hexdigest()

    def decision(self, function: tirx.PrimFunc, target: Target) -> Record | None:
        """Return the fastest decision for a kernel, which may be the default's own choices; None if there is none."""
        return min(_of(self._decided, function, target), key=lambda record: record.rounds, default=None)

    def kernel(self, function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the kernel scheduled as decided, with its choices as an attribute; None if there is no decision.

        A decision that its template no longer offers (from another version) is logged and ignored.
        """
        record = self.decision(function, target)
        if record is None:
            return None
        machine = machine_of(target)
        try:
            choices = choices_from(record.choices)
            for template in templates_of(target):
                space = template.space(function, machine)
                if space is not None and space.contains(choices):
                    with target:
                        return template.kernel(function, machine, choices)
            reason = "no template offers these choices"
        except Exception as error:
            reason = last_line(error)
        logger.warning(
            "%s: %r no longer fits its kernel, which keeps the default; tune again to replace it: %s",
            self.folder / RECORDS,
            record.choices,
            reason,
        )
        return None


class DatabaseWriter(AbstractContextManager["DatabaseWriter"]):
    """The only writer of a database folder while it is open; a context manager.

    Raises:
        DatabaseError: another process writes to the folder, the folder cannot be written, or a file is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.fchmod(self._lock, 0o600)  # a user who can open it could lock it and block all tuning
        except OSError as error:
            raise DatabaseError(f"cannot write the tuning database {self.folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _finish_last_line(self.folder / RECORDS)
            self._records = list(_records(self.folder))
        except BlockingIOError as error:
            os.close(self._lock)
            raise DatabaseError(
                f"another process writes to the tuning database {self.folder}; wait for it, or give another folder and "
                "merge the two afterwards"
            ) from error
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __exit__(self, *_: object) -> None:
        self.close()

    def history(self, function: tirx.PrimFunc, target: Target) -> dict[str, Record]:
        """Return the measurements of a kernel by choices; the last of each counts."""
        trials = _of(self._records, function, target)
        return {record.choices: record for record in trials if not record.is_decision}

    def add_trial(
        self, function: tirx.PrimFunc, target: Target, choices: str, rounds: Sequence[float], error: str = ""
    ) -> Record:
        """Write one measurement: the seconds of each round, or none and the reason if it failed."""
        return self._add(Record(_hash(function), _key(target), choices, tuple(rounds), error))

    def add_decision(self, function: tirx.PrimFunc, target: Target, choices: str, seconds: float) -> None:
        """Write a decision, a kernel's default choices or faster ones; `compile` uses the fastest decision."""
        self._add(Record(_hash(function), _key(target), choices, (seconds,), is_decision=True))

    def merge(self, other: str | Path) -> int:
        """Copy the records of another folder that this one lacks; return how many there were.

        If both folders have a decision for a kernel, the faster one counts from now on.
        """
        if not (Path(other) / RECORDS).exists():
            raise DatabaseError(f"{other} is not a tuning database: it has no {RECORDS}")
        existing = set(self._records)
        incoming = [record for record in _records(Path(other)) if record not in existing]
        for record in incoming:
            self._add(record)
        return len(incoming)

    def _add(self, record: Record) -> Record:
        path = self.folder / RECORDS
        try:
            with path.open("ab") as file:
                file.write(_RECORD.dump_json(record) + b"\n")
        except OSError as error:
            raise DatabaseError(f"cannot write {path}: {error.strerror}; make room, or name another folder") from error
        self._records.append(record)
        return record


def _of(records: Sequence[Record], function: tirx.PrimFunc, target: Target) -> list[Record]:
    """Return a kernel's records under any name, for targets with the same `MATCHED_IN_A_TARGET`; oldest first."""
    kernel, key = _hash(function), _key(target)
    return [record for record in records if record.kernel == kernel and record.target == key]


def _hash(function: tirx.PrimFunc) -> str:
    return f"{tvm_ffi.structural_hash(without_symbol(function)):016x}"


def _key(target: Target) -> tuple[str, ...]:
    properties = json.loads(str(target))
    values = (properties.get(name, "") for name in MATCHED_IN_A_TARGET)
    return tuple(",".join(sorted(map(str, value))) if isinstance(value, list) else str(value) for value in values)


def _records(folder: Path) -> Iterator[Record]:
    """Yield the records of a folder; skip an unfinished last line."""
    path = folder / RECORDS
    for number, line in enumerate(_content(path).splitlines(keepends=True), start=1):
        if line.endswith(b"\n") and line.strip():
            try:
                yield _RECORD.validate_json(line)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise DatabaseError(
                    f"{path}:{number} is damaged: {reason}; remove the line, or restore the folder from a copy"
                ) from error


def _content(path: Path) -> bytes:
    try:
        if not (path.is_file() or path.is_dir()) and path.exists():
            raise OSError(errno.EINVAL, "it is a pipe, socket or device, not a file")
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        text = f"cannot read {path}: {error.strerror}; make it a file that you can read, or name another folder"
        raise DatabaseError(text) from error


def _finish_last_line(path: Path) -> None:
    """Drop an unfinished last line, whose writer was killed."""
    content = _content(path)
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        logger.warning("%s ended in an unfinished line, which was dropped", path)
        os.truncate(path, complete)

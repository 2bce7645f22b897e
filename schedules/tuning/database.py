"""The tuning database: a folder that `compile` reads, that tuning resumes from, and that people can share.

    FOLDER/database_workload.json, database_tuning_record.json      the decisions: the default and what was faster
    FOLDER/trials/  (the same two files)                            every measurement

MetaSchedule's JSONDatabase writes both, so TVM's own tools can read them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self

from tvm import s_tir, tirx
from tvm.s_tir import meta_schedule
from tvm.target import Target

from schedules import make_instructions_known
from schedules.blocks import last_line, new_schedule
from schedules.template import scheduled_function
from schedules.tuning.errors import DatabaseError
from schedules.tuning.record_file import (
    RECORDS,
    WORKLOADS,
    RecordFolder,
    StoredRecord,
    finish_last_line,
    module_of,
)

TRIALS = "trials"
LOCK = ".writer"
FAILED_ROUNDS = (1e10,)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """A measurement of one kernel: its median seconds (None: it failed) and the number of rounds."""

    seconds: float | None
    rounds: int


@dataclass(frozen=True)
class Decision:
    """The choices that were measured fastest for a kernel, as text, and their seconds."""

    choices: str | None
    seconds: float


class TuningDatabase:
    """The decisions in a folder, read once; a folder that does not exist is an empty database.

    Raises:
        DatabaseError: a file is damaged; the message names the file and the line.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._decided = RecordFolder(self.folder)

    def __len__(self) -> int:
        return len(self._decided.records)

    @property
    def digest(self) -> str:
        """The SHA-256 of all decisions."""
        return self._decided.digest

    def decision(self, function: tirx.PrimFunc, target: Target) -> Decision | None:
        """The decision for a kernel, which may be the default's own choices; None if there is none."""
        record = self._best(function, target)
        return None if record is None else Decision(record.choices, median(record.rounds))

    def kernel(self, function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """The kernel scheduled as decided, with its choices as an attribute; None if there is no decision.

        A record that cannot be replayed (from another version of TVM or of the schedules) is logged and ignored.
        """
        record = self._best(function, target)
        if record is None:
            return None
        try:
            make_instructions_known(target)
            schedule = new_schedule(function)
            trace = self._decided.tuning_record(record).trace
            with target:
                trace.apply_to_schedule(schedule, remove_postproc=False)
            return scheduled_function(schedule)
        except Exception as error:
            logger.warning(
                "%s no longer fits its kernel, which keeps the default; tune again to replace it: %s",
                record.place,
                last_line(error),
            )
            return None

    def _best(self, function: tirx.PrimFunc, target: Target) -> StoredRecord | None:
        # Choose as MetaSchedule does: a decision has at most two records, each with the median of a duel.
        records = [record for record in self._decided.of(function, target) if not record.failed]
        return min(records, key=lambda record: median(record.rounds), default=None)


class DatabaseWriter:
    """The only writer of a database folder while it is open; a context manager.

    Raises:
        DatabaseError: another process writes to the folder, the folder cannot be written, or a file is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            (self.folder / TRIALS).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.fchmod(self._lock, 0o600)  # a user who can open it could lock it and block all tuning
        except OSError as error:
            raise DatabaseError(f"cannot write the tuning database {self.folder}: {error.strerror}") from error
        try:
            self._take_lock()
            for folder in (self.folder, self.folder / TRIALS):
                for name in (WORKLOADS, RECORDS):
                    if finish_last_line(folder / name):
                        logger.warning("%s ended in an unfinished line, which was dropped", folder / name)
            self._decided_before = RecordFolder(self.folder)
            self._trials_before = RecordFolder(self.folder / TRIALS)
            self._decided = meta_schedule.database.JSONDatabase(work_dir=str(self.folder))
            self._trials = meta_schedule.database.JSONDatabase(work_dir=str(self.folder / TRIALS))
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def history(self, function: tirx.PrimFunc, target: Target) -> dict[str, Measured]:
        """The measurements of a kernel from before this writer was opened, by choices; the last of each counts."""
        return {
            record.choices: Measured(None if record.failed else median(record.rounds), len(record.rounds))
            for record in self._trials_before.of(function, target)
            if record.choices is not None
        }

    def add_trial(
        self, function: tirx.PrimFunc, target: Target, trace: s_tir.schedule.Trace, rounds: Sequence[float] | None
    ) -> None:
        """Write one measurement: the seconds of each round, or None if it failed."""
        _commit(self._trials, function, target, trace, list(rounds or FAILED_ROUNDS))

    def add_decision(
        self, function: tirx.PrimFunc, target: Target, trace: s_tir.schedule.Trace, seconds: float
    ) -> None:
        """Write a candidate for `compile`: a kernel's default, or choices that were faster."""
        _commit(self._decided, function, target, trace, [seconds])

    def merge(self, other: str | Path) -> int:
        """Copy the records of another folder that this one lacks; return how many there were.

        If both folders have a decision for a kernel, the faster one counts from now on.
        """
        folder = Path(other)
        if not (folder / RECORDS).exists() and not (folder / TRIALS / RECORDS).exists():
            raise DatabaseError(f"{folder} is no tuning database: it has no {RECORDS}")
        copied = 0
        for existing, database, incoming in (
            (self._decided_before, self._decided, RecordFolder(folder)),
            (self._trials_before, self._trials, RecordFolder(folder / TRIALS)),
        ):
            identities = {_identity(existing, record) for record in existing.records}
            for record in incoming.records:
                if _identity(incoming, record) not in identities:
                    read = incoming.tuning_record(record)
                    function = incoming.workloads[record.workload].mod["main"]
                    _commit(database, function, read.target, read.trace, list(record.rounds))
                    copied += 1
        self._decided_before, self._trials_before = RecordFolder(self.folder), RecordFolder(self.folder / TRIALS)
        return copied

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DatabaseError(
                f"another process writes to the tuning database {self.folder}; wait for it, or give another folder and "
                "merge the two afterwards"
            ) from error


def _commit(
    database: meta_schedule.database.JSONDatabase,
    function: tirx.PrimFunc,
    target: Target,
    trace: s_tir.schedule.Trace,
    rounds: list[float],
) -> None:
    module = module_of(function)
    workload = database.commit_workload(module)
    arguments = meta_schedule.arg_info.ArgInfo.from_prim_func(module["main"])
    database.commit_tuning_record(meta_schedule.database.TuningRecord(trace, workload, rounds, target, arguments))


def _identity(folder: RecordFolder, record: StoredRecord) -> str:
    """An identity that is equal for equal records, wherever their workload is in its file."""
    return json.dumps([folder.workloads[record.workload].as_json(), record.content[1]])

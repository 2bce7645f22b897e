"""Read the two files of a MetaSchedule database, line by line.

MetaSchedule's own reader parses every trace before it answers a query, and names no line when it fails. `compile` only
needs the few records of its own kernels. MetaSchedule writes the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import meta_schedule
from tvm.target import Target
from tvm_ffi.structural import StructuralKey

from schedules.blocks import without_symbol
from schedules.template import CHOICES_ATTRIBUTE
from schedules.tuning.errors import DatabaseError

WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"
FAILED_SECONDS = 1e9
"""Records of at least this many seconds count as failed: MetaSchedule writes 1e10 for a failed measurement."""
NO_REASON = "(not rendered)"
"""The text that TVM gives for steps of a record that cannot be repeated."""
MATCHED_IN_A_TARGET = ("kind", "mtriple", "mcpu", "mattr", "num-cores", "arch")


@dataclass(frozen=True)
class StoredRecord:
    """One line of the records: its workload, the measured rounds (seconds), and the choices as text, or None."""

    place: str
    content: Any
    workload: int
    target: tuple[str, ...]
    rounds: tuple[float, ...]
    choices: str | None

    @property
    def failed(self) -> bool:
        return not self.rounds or self.rounds[0] >= FAILED_SECONDS


class RecordFolder:
    """The records of one folder at the time it was read; empty if the folder has none. ``digest`` identifies them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # A running tuner writes a workload before its records, so reading the records first finds all their workloads.
        recorded = list(_lines(folder / RECORDS))
        workloads = list(_lines(folder / WORKLOADS))
        self.digest = hashlib.sha256(json.dumps([recorded, workloads]).encode()).hexdigest()
        self.workloads = [_workload(place, content) for place, content in workloads]
        self.records = [self._record(place, content) for place, content in recorded]
        self._indices: dict[StructuralKey, set[int]] = {}
        for index, workload in enumerate(self.workloads):
            self._indices.setdefault(_key_of(workload.mod["main"]), set()).add(index)

    def of(self, function: tirx.PrimFunc, target: Target) -> list[StoredRecord]:
        """The records of a kernel, whatever its name, for a target with the same `target_key`; oldest first."""
        same, key = self._indices.get(_key_of(function), set()), target_key(target)
        return [record for record in self.records if record.workload in same and record.target == key]

    def tuning_record(self, record: StoredRecord) -> meta_schedule.database.TuningRecord:
        """The record as a MetaSchedule object with its trace."""
        try:
            return meta_schedule.database.TuningRecord.from_json(record.content[1], self.workloads[record.workload])
        except Exception as error:
            raise DatabaseError(_damaged(record.place, error)) from error

    def _record(self, place: str, content: Any) -> StoredRecord:
        try:
            workload, (trace, rounds, target, _) = content
            if not 0 <= workload < len(self.workloads):
                raise ValueError(f"it is of workload {workload}, and {WORKLOADS} has {len(self.workloads)}")
            seconds = tuple(float(value) for value in rounds or ())
            return StoredRecord(place, content, workload, _key(target), seconds, _choices_in(trace))
        except Exception as error:
            raise DatabaseError(_damaged(place, error)) from error


def target_key(target: Target) -> tuple[str, ...]:
    """The target's properties that must be equal for a tuned kernel to be reused.

    The number of threads (``num-cores``) is one, because the best choices for one thread may differ for four. A GPU's
    architecture (``arch``) is another.
    """
    return _key(json.loads(str(target)))


def module_of(function: tirx.PrimFunc) -> tvm.IRModule:
    """A module with the kernel as its only function, named as MetaSchedule names it."""
    return tvm.IRModule({"main": without_symbol(function).with_attr("global_symbol", "main")})


def finish_last_line(path: Path) -> bool:
    """Drop an unfinished last line, whose writer was killed; return whether there was one."""
    if not path.exists():
        return False
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete == len(content):
        return False
    with path.open("r+b") as file:
        file.truncate(complete)
    return True


def _key(target: Any) -> tuple[str, ...]:
    if isinstance(target, str):
        target = json.loads(str(Target(target)))
    values = (target.get(name, "") for name in MATCHED_IN_A_TARGET)
    return tuple(",".join(sorted(map(str, value))) if isinstance(value, list) else str(value) for value in values)


def _key_of(function: tirx.PrimFunc) -> StructuralKey:
    return StructuralKey(without_symbol(function))


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Pairs of a location (file and line) and its content; skips an unfinished last line."""
    if not path.exists():
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatabaseError(_damaged(str(path), error)) from error
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if line.endswith("\n") and line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DatabaseError(_damaged(f"{path}:{number}", error)) from error


def _workload(place: str, content: Any) -> meta_schedule.database.Workload:
    try:
        return meta_schedule.database.Workload.from_json(content)
    except Exception as error:
        raise DatabaseError(_damaged(place, error)) from error


def _choices_in(trace: Any) -> str | None:
    """The choices that `Template.schedule` recorded in a trace, given as JSON."""
    for name, inputs, attributes, _ in trace[0]:
        if name == "Annotate" and attributes == [CHOICES_ATTRIBUTE]:
            return str(inputs[1]).strip('"')
    return None


def _damaged(place: str, error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if first == NO_REASON:
        first = "its steps cannot be repeated on its kernel"
    return f"{place} is damaged: {first}; remove the line, or restore the folder from a copy"

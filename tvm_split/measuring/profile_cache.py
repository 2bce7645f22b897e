"""What kernels took on machines, kept between runs: one file of JSON per machine.

An entry is known by the kernel's code and shapes, the target, the versions of TVM and of this project, and how the
machine was used (`tvm_split.measuring.machine_timing`), so a second model, or another batch, takes from here what is
equal.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tvm_split.rpc_runtime.files import cache_folder, locked, replacing

FORMAT = "tvm-split profile"
VERSION = 1


@dataclass(frozen=True)
class CachedTime:
    """Seconds of one call, and when (in seconds since 1970) that was measured."""

    seconds: float
    best_seconds: float
    measured_at: float


def default_folder() -> Path:
    """``profiles`` in the folder for what is measured."""
    return cache_folder("profiles")


def entry_key(**parts: Any) -> str:
    """A name for what is described by ``parts``, which JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class ProfileCache:
    """The times of one machine, which ``identity`` describes.

    ``notes`` says what could not be read; it is then measured again.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.path = folder / f"{entry_key(**identity)[:32]}.json"
        self.notes: list[str] = []
        self._identity = dict(identity)
        self._entries = self._read()

    def get(self, key: str) -> CachedTime | None:
        return self._entries.get(key)

    def put(self, entries: Mapping[str, CachedTime]) -> None:
        """Keep entries, beside those that others have written in the meantime.

        Raises:
            OSError: the folder cannot be written to.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.parent):
            self._entries = {**self._read(), **entries}
            self._write()

    def _write(self) -> None:
        content = {
            "format": FORMAT,
            "version": VERSION,
            "machine": self._identity,
            "times": {key: asdict(entry) for key, entry in sorted(self._entries.items())},
        }
        with replacing(self.path) as file:
            file.write(json.dumps(content, indent=1).encode())

    def _read(self) -> dict[str, CachedTime]:
        try:
            content = self.path.read_text()
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            self._note(str(error))
            return {}
        try:
            parsed = _File.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            self._note(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": "))
            return {}
        if (parsed.format, parsed.version) != (FORMAT, VERSION):
            return {}  # another version's: it is measured anew and written over
        now = time.time()
        return {
            key: CachedTime(each.seconds, each.best_seconds, min(each.measured_at, now))
            for key, each in parsed.times.items()
            if math.isfinite(each.seconds) and math.isfinite(each.best_seconds)
        }

    def _note(self, problem: str) -> None:
        note = f"{self.path} is damaged ({problem}): it is measured again"
        if note not in self.notes:
            self.notes.append(note)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    seconds: float = Field(gt=0)
    best_seconds: float = Field(gt=0)
    measured_at: float = Field(ge=0)


class _File(BaseModel):
    format: str
    version: int
    machine: dict[str, Any]
    times: dict[str, _Entry]

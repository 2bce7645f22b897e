"""Keeps measurements between runs: one JSON file for each subject, such as a machine.

The subject is the measured system: host, versions, threads. A key identifies the measured object: a kernel's code and
shapes, or a link's ends. Therefore other models reuse equal measurements.
"""

import contextlib
import hashlib
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rpc_runtime.files import (
    CACHE_VARIABLE,
    LOCK_SECONDS,
    cache_folder,
    locked,
    reason_and_remedy,
    replacing,
    tidy,
)
from rpc_runtime.private_folder import private_folder
from tvm_split.compiler.build_cache import content_in, sealed
from tvm_split.errors import CacheWarning

VERSION = 5
"""Of the form of the files; those of other versions have other names."""

Measurement = TypeVar("Measurement")

LOCKED_SECONDS = 60.0
_locked_until: dict[Path, float] = {}
"""Time (monotonic) at which a locked folder is tried again; otherwise each store would wait for the lock again."""
_warned: set[Path] = set()
"""Files and folders of which a warning was shown: several stores use a folder, and each tries it again."""


def default_folder() -> Path:
    return cache_folder("measurements")


def entry_key(**parts: Any) -> str:
    """Return a key (SHA-256) for ``parts``, which must be JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Store:
    """The measurements of ``subject``, a JSON value, in a file of ``folder``.

    They stay only in memory if ``folder`` is None, cannot be written, is open to other users, or stays locked for
    ``lock_seconds``. A `CacheWarning` reports such a problem, or a damaged file.
    """

    def __init__(self, folder: Path | None, subject: Mapping[str, Any], lock_seconds: float = LOCK_SECONDS) -> None:
        self._lock_seconds = lock_seconds
        self.path = None
        if folder is not None and not _was_locked(folder):
            try:
                private_folder(folder)
                self.path = folder / f"{entry_key(version=VERSION, subject=dict(subject))[:32]}.json"
            except OSError as error:
                self._warn_not_cached(folder, error)
        self._subject = dict(subject)
        self._entries = self._read()

    def get(self, key: str, kind: TypeAdapter[Measurement]) -> Measurement | None:
        """Return a measurement or None. Its ``measured_at``, in seconds since 1970, is at most the current time."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        try:
            return kind.validate_python({**entry, "measured_at": min(entry["measured_at"], time.time())})
        except (LookupError, TypeError, ValidationError) as error:
            self._warn_damaged(f"{type(error).__name__} in an entry")
            return None

    def put(self, entries: Mapping[str, Any]) -> None:
        """Keep dataclasses by key, together with entries that other processes have written in the meantime.

        If the folder cannot be used, the entries stay in memory, and a locked folder is not tried again for
        `LOCKED_SECONDS`.
        """
        added = {key: asdict(entry) for key, entry in entries.items()}
        self._entries = {**self._entries, **added}
        if self.path is None or _was_locked(self.path.parent):
            return
        folder = self.path.parent
        try:
            private_folder(folder)
            tidy(folder)
            with locked(folder / "lock", self._lock_seconds), replacing(self.path) as file:
                kept = {"subject": self._subject, "entries": {**self._read(), **added}}
                file.write(sealed(self.path.name, json.dumps(kept, indent=1, sort_keys=True).encode()))
        except OSError as error:
            if isinstance(error, TimeoutError):
                _locked_until[folder] = time.monotonic() + LOCKED_SECONDS
            self._warn_not_cached(folder, error)
            self.path = None

    def _read(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            return {**json.loads(content_in(self.path))["entries"]}
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn_not_cached(self.path.parent, error)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            self._warn_damaged(str(error))
        return {}

    def _warn_not_cached(self, folder: Path, error: OSError) -> None:
        _warn(folder, f"measurements are not kept in {folder} {reason_and_remedy(error, f'${CACHE_VARIABLE}')}")

    def _warn_damaged(self, problem: str) -> None:
        if self.path is not None:
            _warn(self.path, f"{self.path} is damaged ({problem}): what it holds is measured again")


def _warn(path: Path, text: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(text, CacheWarning, stacklevel=1)


def _was_locked(folder: Path) -> bool:
    return time.monotonic() < _locked_until.get(folder, 0.0)


@dataclass(frozen=True)
class StoreFile:
    """A store's file: its subject and the time of each measurement; both empty if it cannot be read."""

    path: Path
    size_bytes: int
    subject: Mapping[str, Any]
    measured_at: Sequence[float]


def store_files(folder: Path) -> tuple[StoreFile, ...]:
    """Return a description of each store file (``*.json``) in a folder, in the order of their names."""
    return tuple(map(_store_file, sorted(folder.glob("*.json"))))


def _store_file(path: Path) -> StoreFile:
    size_bytes, subject, moments = 0, dict[str, Any](), list[float]()
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        size_bytes = path.stat().st_size
        content = json.loads(content_in(path))
        subject, moments = content["subject"], [float(entry["measured_at"]) for entry in content["entries"].values()]
    return StoreFile(path, size_bytes, subject, moments)

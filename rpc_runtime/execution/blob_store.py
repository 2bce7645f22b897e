"""A content-addressed store: files named by the SHA-256 of their content, shared safely by several processes.

``blobs/ab/abcd…`` are the files; ``temporary/`` holds files being written. ``pins/`` has one file per open store with
the digests it uses; a file lock shows that its store is alive. ``held`` holds an upper bound of the blobs' total bytes,
and ``lock`` serializes the changes of all processes.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from rpc_runtime.errors import BlobError
from rpc_runtime.files import is_kept, keep, locked, reason_and_remedy, replacing, require_file, statuses, tidy
from rpc_runtime.private_folder import private_folder
from rpc_runtime.program.specs import BlobSpec, Bytes

SHARE_OF_FREE_DISK = 0.8
LOCK_SECONDS = 60.0
"""Timeout of the folder's lock: longer than removing all blobs takes on a slow disk."""


class BlobStore:
    """Blobs in ``folder``, of at most ``limit_bytes`` in total. Thread-safe.

    The default limit is four fifths of the disk space that is free now, where existing blobs count as free. If a new
    blob does not fit, the least recently used blobs are removed, but never one that an open store has pinned. A removed
    folder is made again; its blobs are then missing and are sent again.
    ``setting`` names, in errors, the option that sets another folder.

    Every method raises:
        BlobError: the folder cannot be used, another user may write to it, or another process has kept its lock for
            `LOCK_SECONDS`.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None, *, setting: str = "the worker's --cache") -> None:
        self.folder = folder
        self._setting = setting
        self._mutex = threading.Lock()
        self._pins: dict[str, set[str]] = {}
        self._temporary = folder / "temporary"
        self._pin_path = folder / "pins" / uuid.uuid4().hex
        self._pin_file: IO[bytes] | None = None
        self._closed = False
        with self._explained():
            for path in (folder, *self._inner):
                private_folder(path)
        with self._exclusively():
            tidy(self._temporary)
            self._all_pins()
            self._record(self._counted_bytes())
        self._own_limit_bytes = limit_bytes

    @property
    def limit_bytes(self) -> int:
        """The most bytes that all blobs may have together."""
        if self._own_limit_bytes is not None:
            return self._own_limit_bytes
        return int(SHARE_OF_FREE_DISK * (shutil.disk_usage(self.folder).free + self._recorded_bytes()))

    def path(self, blob: BlobSpec) -> Path:
        return self.folder / "blobs" / blob.sha256[:2] / blob.sha256

    def pin(self, owner: str, blobs: Iterable[BlobSpec]) -> tuple[BlobSpec, ...]:
        """Pin blobs, stored or not, until ``unpin(owner)``. Return the missing ones without duplicates."""
        by_sha256 = {blob.sha256: blob for blob in blobs}
        with self._exclusively():
            self._pins.setdefault(owner, set()).update(by_sha256)
            self._write_pins()
            return tuple(blob for blob in by_sha256.values() if not self._present(blob))

    def unpin(self, owner: str) -> None:
        if self.folder.exists():  # a client that was killed may have had it removed: do not make it again
            with self._exclusively():
                if self._pins.pop(owner, None) is not None:
                    self._write_pins()

    def write(self, blob: BlobSpec, chunks: Iterable[bytes]) -> None:
        """Store a blob atomically: it becomes visible only when it is complete and its digest is correct.

        Raises:
            BlobError: the content has another size or digest, or does not fit.
        """
        with self._explained():
            self._make_folders()
            limit = self.limit_bytes  # before the new file takes a part of the free space
            if blob.size_bytes > min(limit, shutil.disk_usage(self.folder).free):
                raise self._full(blob.size_bytes, f"blob {blob.sha256[:12]}", limit)
            digest, size = hashlib.sha256(), 0
            path = self.path(blob)
            with contextlib.ExitStack() as until_it_is_there, replacing(path, self._temporary) as file:
                for chunk in chunks:
                    size += len(chunk)
                    if size > blob.size_bytes:
                        raise BlobError(f"blob {blob.sha256[:12]} is longer than the announced {blob.size_bytes} bytes")
                    digest.update(chunk)
                    file.write(chunk)
                # No fsync for each weight: after a power failure, `read` detects an incomplete file by its digest.
                _check(blob, size, digest.hexdigest())
                until_it_is_there.enter_context(self._exclusively())
                self._evict(blob, limit)
                path.parent.mkdir(mode=0o700, exist_ok=True)

    def read(self, blob: BlobSpec) -> Bytes:
        """Return a blob's content.

        Raises:
            BlobError: the blob is missing, has another size, or its content has changed. Only a changed blob is
                removed, so that it will be sent again.
        """
        path = self.path(blob)
        try:
            content = read_blob(path, blob)
        except ChangedBlobError:
            path.unlink(missing_ok=True)
            raise
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def remove_changed(self, blobs: Iterable[BlobSpec]) -> None:
        """Remove the blobs whose content has changed, so that they are missing."""
        for blob in blobs:
            with contextlib.suppress(BlobError):
                self.read(blob)

    def close(self) -> None:
        """Release all pins; the blobs stay in the folder."""
        with self._mutex, contextlib.suppress(OSError):
            self._closed = True
            self._pin_path.unlink(missing_ok=True)
            if self._pin_file is not None:
                self._pin_file.close()

    @property
    def _inner(self) -> tuple[Path, ...]:
        return self.folder / "blobs", self._temporary, self._pin_path.parent

    def _present(self, blob: BlobSpec) -> bool:
        """Return whether the file exists with this size. A file of another size stays, as either size may be wrong."""
        path = self.path(blob)
        try:
            if path.stat().st_size != blob.size_bytes:
                return False
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _make_folders(self) -> None:
        if not self.folder.exists():
            private_folder(self.folder)
        for path in self._inner:
            path.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Hold the folder's lock while the body runs; first make a removed folder again, with this store's pins."""
        with self._mutex, self._explained():
            self._make_folders()
            with locked(self.folder / "lock", LOCK_SECONDS):
                if not self._closed and not self._pin_path.exists():
                    descriptor = os.open(self._pin_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    self._pin_file = os.fdopen(descriptor, "wb")
                    keep(self._pin_file)
                    self._write_pins()
                yield

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"cannot keep blobs in {self.folder} {reason_and_remedy(error, self._setting)}"
            raise BlobError(text) from error

    def _write_pins(self) -> None:
        if self._pin_file is not None and not self._closed:
            self._pin_file.seek(0)
            self._pin_file.truncate()
            self._pin_file.write("\n".join(sorted(set().union(*self._pins.values()))).encode())
            self._pin_file.flush()

    def _full(self, needed_bytes: int, what: str, limit: int) -> BlobError | OSError:
        """Return the error for content (``what``) that exceeds this store's own limit, or the space on its disk."""
        if self._own_limit_bytes is not None and needed_bytes > self._own_limit_bytes:
            return BlobError(
                f"the cache {self.folder} may hold {self._own_limit_bytes} bytes, and {what} needs {needed_bytes}: "
                "raise its limit (--cache-limit-bytes), or close deployments"
            )
        free = f"{shutil.disk_usage(self.folder).free} are free, and all blobs may take {limit} together"
        text = f"{what} needs {needed_bytes} bytes, and {free}"
        return OSError(errno.ENOSPC, text, str(self.folder))  # which `_explained` converts

    def _evict(self, blob: BlobSpec, limit: int) -> None:
        """Remove unpinned blobs until a new one fits. Requires the lock of all processes."""
        total = self._recorded_bytes() + blob.size_bytes
        if total > limit:
            entries = [entry for entry in self._entries() if entry[0].name != blob.sha256]
            total = sum(status.st_size for _, status in entries) + blob.size_bytes
            pinned = self._all_pins() if total > limit else set()
            for path, status in sorted(entries, key=lambda entry: entry[1].st_mtime_ns):
                if total > limit and path.name not in pinned:
                    path.unlink(missing_ok=True)
                    total -= status.st_size
            if total > limit:
                raise self._full(total, "what is in use", limit)
        self._record(total)

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        return statuses((self.folder / "blobs").glob("*/*"))

    def _counted_bytes(self) -> int:
        return sum(status.st_size for _, status in self._entries())

    def _recorded_bytes(self) -> int:
        """Return an upper bound of the blobs' total bytes (removals are not recorded); listing all takes too long."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "held").read_text(encoding="ascii"))
        return self._counted_bytes()

    def _record(self, size_bytes: int) -> None:
        path = self.folder / "held"
        with contextlib.suppress(OSError):  # on a full disk; without the file, the blobs are counted each time
            path.unlink(missing_ok=True)  # a link would lead to a file elsewhere
            path.write_text(str(size_bytes), encoding="ascii")

    def _all_pins(self) -> set[str]:
        """Return the digests that open stores use; remove the pin files of stores that are gone."""
        pins = set().union(*self._pins.values())
        for path in self._pin_path.parent.iterdir():
            if path == self._pin_path:
                continue
            with path.open("rb") as file:
                if is_kept(file):
                    pins.update(file.read().decode().split())
                else:
                    path.unlink(missing_ok=True)
        return pins


class ChangedBlobError(BlobError):
    """The content of a blob's file does not have the digest of its name."""


def _check(blob: BlobSpec, size: int, sha256: str) -> None:
    if sha256 != blob.sha256:
        raise ChangedBlobError(
            f"the content of blob {blob.sha256[:12]} has {size} bytes of {blob.size_bytes} and the digest "
            f"{sha256[:12]}: it was changed"
        )
    if size != blob.size_bytes:
        raise BlobError(f"blob {blob.sha256[:12]} has {size} bytes, and the caller says that it has {blob.size_bytes}")


def read_blob(path: Path, blob: BlobSpec) -> Bytes:
    """Return the content of a blob's file.

    Raises:
        BlobError: the file is missing, or its content is not the blob's.
    """
    try:
        require_file(path)
        content: Bytes = np.fromfile(path, np.uint8)
    except OSError as error:
        raise BlobError(f"blob {blob.sha256[:12]} cannot be read from {path}: {error.strerror}") from error
    _check(blob, content.size, hashlib.sha256(content.data).hexdigest())
    return content

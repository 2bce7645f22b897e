"""The blobs that a worker keeps for one program: which they are, and those that arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from rpc_runtime.errors import ProtocolError, WorkerError
from rpc_runtime.execution.blob_store import BlobStore
from rpc_runtime.program.interface import Bytes
from rpc_runtime.program.program import BlobSpec

MAXIMUM_UPLOADS = 4
"""Blobs that may arrive at a time; a client sends one."""
MAXIMUM_BLOBS = 20_000


class ProgramBlobs:
    """Blobs of a worker's store that are kept for ``owner``. Thread-safe.

    ``require_open`` raises when its program takes no more.
    """

    def __init__(self, owner: str, store: BlobStore, require_open: Callable[[], None]) -> None:
        self._owner = owner
        self._store = store
        self._require_open = require_open
        self._lock = threading.Lock()
        self._wanted: set[str] = set()
        self._uploads = 0
        self._released = False

    def keep(self, blobs: Iterable[BlobSpec]) -> tuple[BlobSpec, ...]:
        """Keeps blobs, present or to come; the missing ones."""
        blobs = tuple(blobs)
        self._require_open()
        with self._lock:
            wanted = self._wanted.union(blob.sha256 for blob in blobs)
            if len(wanted) > MAXIMUM_BLOBS:
                raise ProtocolError(f"a deployment has at most {MAXIMUM_BLOBS} blobs on a machine, got {len(wanted)}")
            self._wanted = wanted
        missing = self._store.pin(self._owner, blobs)
        if self._released:
            self._store.unpin(self._owner)
        return missing

    def take_in(self, blob: BlobSpec, chunks: Iterable[bytes]) -> None:
        """Takes in a blob that was missing when it was to be kept.

        Raises:
            ProtocolError: it is none that is kept here.
            WorkerError: too many are arriving already.
            BlobError: the content has another size or digest, or there is no room for it.
        """
        self._require_open()
        with self._lock:
            if blob.sha256 not in self._wanted:
                raise ProtocolError(f"blob {blob.sha256[:12]} is none that deployment {self._owner[:8]} keeps")
            if self._uploads >= MAXIMUM_UPLOADS:
                raise WorkerError(
                    f"deployment {self._owner[:8]} sends {self._uploads} blobs to this worker already, "
                    f"and {MAXIMUM_UPLOADS} at a time are allowed"
                )
            self._uploads += 1
        try:
            self._store.write(blob, self._while_open(chunks), self._owner)
        finally:
            with self._lock:
                self._uploads -= 1

    def _while_open(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._require_open()
            yield chunk

    def read(self, blob: BlobSpec) -> Bytes:
        """The content; a `BlobError` if it is missing or damaged."""
        return self._store.read(blob)

    def release(self) -> None:
        """Keeps nothing any more. May be called again."""
        self._released = True
        self._store.unpin(self._owner)

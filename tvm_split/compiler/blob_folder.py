"""Folders of blobs: the libraries and weights of a bundle."""

from __future__ import annotations

import hashlib
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import tvm

from rpc_runtime.files import replacing
from rpc_runtime.program.specs import BlobSpec, Bytes, TensorSpec, WeightSpec
from rpc_runtime.scratch import ScratchFolder
from tvm_split.errors import OutputError


def no_room(folder: str | Path, error: OSError) -> OutputError:
    """Return the error that says that a temporary folder cannot hold more files."""
    return OutputError(
        f"{folder} cannot hold what is compiled: {error.strerror}; make room there, or name another folder for "
        "temporary files in $TMPDIR"
    )


class BlobFolder:
    """A folder of blobs, each in a file named by its digest. A blob that exists is not written again."""

    def __init__(self, folder: Path, owner: object = None) -> None:
        self.folder = folder
        # A reference keeps a temporary folder until its blobs are no longer used.
        self._owner = owner

    @classmethod
    def temporary(cls) -> BlobFolder:
        """Create a temporary folder, which is removed with the last object that uses it."""
        owner = ScratchFolder("bundle")
        return cls(owner.path, owner)

    def path(self, sha256: str) -> Path:
        return self.folder / sha256

    def add(self, content: bytes) -> BlobSpec:
        """Store a blob. Raises `OutputError` if the disk is full."""
        digest = hashlib.sha256(content).hexdigest()
        if not self.path(digest).exists():
            try:
                with replacing(self.path(digest)) as file:  # what was half written must not count as written
                    file.write(content)
            except OSError as error:
                raise no_room(self.folder, error) from error
        return BlobSpec(digest, len(content))

    def add_link(self, blob: BlobSpec, source: Path, content: Bytes) -> None:
        """Store a blob as a hard link to a file that is replaced as a whole; if it cannot be, as `add` does."""
        try:
            self.path(blob.sha256).hardlink_to(source)
        except OSError:  # it exists, it is on another file system, or it was removed
            self.add(bytes(content))

    def add_file(self, source: Path) -> BlobSpec:
        """Store the content of a file. Raises `OutputError` if the disk is full."""
        return self.add(source.read_bytes())

    def add_weight(self, name: str, weight: tvm.runtime.Tensor) -> WeightSpec:
        """Store the bytes of a tensor, so equal weights share one blob."""
        values = weight.numpy()
        return WeightSpec(TensorSpec(name, tuple(values.shape), str(weight.dtype)), self.add(values.tobytes()))

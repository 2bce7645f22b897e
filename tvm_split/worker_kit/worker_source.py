"""The worker's source for another machine, and the versions of the packages that it imports."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import rpc_runtime

NEEDED = (
    "apache-tvm",
    "apache-tvm-ffi",
    "grpcio",
    "grpcio-health-checking",
    "ml_dtypes",
    "numpy",
    "platformdirs",
    "protobuf",
)
IF_HERE = ("lz4", "zstandard")
"""Packages for the codecs of links, included if they are installed here."""


@dataclass(frozen=True)
class WorkerSource:
    """The worker's files as a gzipped tar file, its ``digest``, and the versions of the packages it needs."""

    packed: bytes
    digest: str
    needs: dict[str, str]


def worker_source() -> WorkerSource:
    """Return the source of this installation, since a worker must fit the client that deploys to it."""
    contents = {name: path.read_bytes() for name, path in sorted(own_files().items())}
    digest = hashlib.sha256()
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as packed:
        for name, content in contents.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            packed.addfile(entry, io.BytesIO(content))
    return WorkerSource(written.getvalue(), digest.hexdigest()[:16], needed_versions())


def needed_versions() -> dict[str, str]:
    """Return the packages that a worker imports, with the versions installed here."""
    needs = {name: metadata.version(name) for name in NEEDED}
    for name in IF_HERE:
        try:
            needs[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return needs


def own_files() -> dict[str, Path]:
    """Return the worker's own files by their paths relative to the folder that it is imported from."""
    root = Path(rpc_runtime.__file__).parent.parent
    return {str(path.relative_to(root)): path for path in (root / "rpc_runtime").rglob("*.py")}

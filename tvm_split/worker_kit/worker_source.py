"""The worker as it is sent to a machine: the files it runs from, and the versions of what it imports."""

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
"""For links with codecs."""


@dataclass(frozen=True)
class WorkerSource:
    """A tar file, gzipped, its ``digest``, and the packages with their versions, as they are installed here."""

    packed: bytes
    digest: str
    needs: dict[str, str]


def worker_source() -> WorkerSource:
    """Of this very installation: what is deployed to it has to fit."""
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
    """The packages that a worker imports, in the versions that are installed here."""
    needs = {name: metadata.version(name) for name in NEEDED}
    for name in IF_HERE:
        try:
            needs[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return needs


def own_files() -> dict[str, Path]:
    """The worker's own files, by where they lie in the folder that it is imported from."""
    root = Path(rpc_runtime.__file__).parent.parent
    return {str(path.relative_to(root)): path for path in (root / "rpc_runtime").rglob("*.py")}

"""Cache what is compiled, keyed by a digest of everything that it is compiled from.

The cache has one file per key, in a folder that no other user can write to; it keeps the newest files. A file has a
result and the digests of the result's blobs. The blobs lie in the store that the workers of this user on this host also
use. That store has a size limit, and removes the least recently used blobs first. Content that does not match its
digest counts as missing.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import relay_passes
import rpc_runtime
import schedules
import tvm_split
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.execution.blob_store import BlobStore
from rpc_runtime.files import CACHE_VARIABLE, cache_folder, file_bytes, reason_and_remedy, replacing, statuses, tidy
from rpc_runtime.private_folder import private_folder
from rpc_runtime.program.specs import BlobSpec
from tvm_split.compiler.blob_folder import BlobFolder
from tvm_split.compiler.cuda_code import needs_of
from tvm_split.errors import CacheWarning

logger = logging.getLogger(__name__)

SETTING = f"${CACHE_VARIABLE}"
_warned: set[Path] = set()
"""Caches for which a `CacheWarning` was shown, so that each causes one warning and not one for every result."""
MOST_KEPT = 500
"""The most results in the cache; a result of a large network has some hundred kilobytes."""


def default_folder() -> Path:
    """Return the folder that has one file per key."""
    return cache_folder("compiled")


def key_of(targets: Iterable[Mapping[str, Any]], **parts: Any) -> str:
    """Return a SHA-256 of ``parts`` (JSON values), the versions of the targets' compilers, and this project's code."""
    tools = sorted({str(needs_of(target)) for target in targets})
    compilers = [*tvm_versions().values(), *tools]
    return hashlib.sha256(json.dumps([compilers, _code_digest(), parts], sort_keys=True).encode()).hexdigest()


@functools.cache
def tvm_versions() -> Mapping[str, str]:
    """Return the versions of TVM's packages by name: read once, since each kernel has a key."""
    return MappingProxyType({name: version(name) for name in ("apache-tvm", "apache-tvm-ffi")})


@functools.cache
def _code_digest() -> str:
    """Return the digest of this project's code, since every pass and every schedule may change what is compiled."""
    digest = hashlib.sha256()
    for package in (tvm_split, relay_passes, schedules, rpc_runtime):
        for folder in package.__path__:
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def recall(key: str, blobs: BlobFolder | None = None) -> Any:
    """Return the JSON value kept under a key, and link its blobs in ``blobs``; None if it, or a blob, is missing."""
    content = kept_content(default_folder() / key)
    if content is None:
        return None
    try:
        kept = json.loads(content)
        if blobs is not None:
            with contextlib.closing(_store()) as store:
                for blob in [BlobSpec(**fields) for fields in kept["blobs"]]:
                    blobs.add_link(blob, store.path(blob), store.read(blob))
        return kept["content"]
    except (OSError, TvmSplitError, ValueError, LookupError, TypeError) as error:
        logger.debug("nothing that was compiled under %s can be used: %s", key, error)
        return None


def keep(key: str, content: Any, blobs: Mapping[BlobSpec, Path] = MappingProxyType({})) -> None:
    """Store a JSON value and blobs, with their files, under a key; a `CacheWarning` says why they cannot be stored."""
    text = json.dumps({"content": content, "blobs": [asdict(blob) for blob in blobs]}).encode()
    with _warning(default_folder()):
        if blobs:
            with contextlib.closing(_store()) as store:
                for blob in store.pin(key, tuple(blobs)):
                    store.write(blob, [blobs[blob].read_bytes()])
        keep_contents(default_folder(), {key: text}, MOST_KEPT)


def kept_content(path: Path) -> bytes | None:
    """Return a content of `keep_contents`, and mark it as used; None if it is missing, or another user may write it."""
    try:
        private_folder(path.parent)
        content = content_in(path)
    except (OSError, TvmSplitError, ValueError) as error:
        logger.debug("%s cannot be used: %s", path, error)
        return None
    with contextlib.suppress(OSError):  # in a cache that can only be read
        os.utime(path)
    return content


def content_in(path: Path) -> bytes:
    """Return what was `sealed` in a file; raise an OSError, or a ValueError if the file was changed."""
    whole = file_bytes(path)
    content = whole.partition(b"\n")[2]
    if sealed(path.name, content) != whole:
        raise ValueError("it was changed, or is another file's content")
    return content


def sealed(name: str, content: bytes) -> bytes:
    """Return a file's content behind a digest of it and of the file's name: that of another key is as wrong as any."""
    return hashlib.sha256(name.encode() + content).hexdigest().encode() + b"\n" + content


def keep_contents(folder: Path, contents: Mapping[str, bytes], most: int) -> None:
    """Write one file per content, by name; of all files in ``folder`` the newest ``most`` stay.

    A `CacheWarning` says why they cannot be written.
    """
    with _warning(folder):
        private_folder(folder)
        for name, content in contents.items():
            with replacing(folder / name) as file:
                file.write(sealed(name, content))
        tidy(folder)
        paths = list(folder.glob("[!.]*"))  # others are being written
        if len(paths) > most:
            for path, _ in sorted(statuses(paths), key=lambda entry: entry[1].st_mtime)[:-most]:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _warning(folder: Path) -> Iterator[None]:
    """Turn an error of the body into a `CacheWarning`, one for each cache."""
    try:
        yield
    except (OSError, TvmSplitError, ValueError, LookupError, TypeError) as error:
        if folder.parent not in _warned:
            _warned.add(folder.parent)
            reason = f"{folder} {reason_and_remedy(error, SETTING)}" if isinstance(error, OSError) else str(error)
            warnings.warn(
                f"compiled code is not kept, and will be compiled again: {reason}", CacheWarning, stacklevel=1
            )


def _store() -> BlobStore:
    """Return the store of blobs, which counts its files when it is opened."""
    return BlobStore(cache_folder("blobs"), setting=SETTING)

"""Refuse files that hold no network, whatever their suffix says: placeholders, error pages, checkpoints."""

import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

from tvm_split.errors import ModelImportError

_HEAD_BYTES = 512
_PICKLE_OPCODES = b"}c](\x95\x8a\x8c"
"""The bytes that may follow a pickle's two-byte header. A flatbuffer that starts with the same two has a zero there."""
_COMPRESSED = (b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf\x27\x1c")
"""The starts of files of gzip, bzip2, xz, zstd and 7-Zip."""
_BLANK = b"\xef\xbb\xbf \t\r\n"
_UNPACK = "unpack it, and give the path of the model inside"
_WEIGHTS_ONLY = "it has weights without a graph: load them into the network in their framework, and give the network"


def _is_page(head: bytes) -> bool:
    return head.lstrip(_BLANK).lower().startswith((b"<!doctype html", b"<html"))


def _is_pickle(head: bytes) -> bool:
    return head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and head[2:3] in _PICKLE_OPCODES


_Kinds = tuple[tuple[Callable[[bytes], bool], str], ...]

_PLACEHOLDERS: _Kinds = (
    (lambda head: not head, "empty: download or export it again"),
    (
        lambda head: head.startswith(b"version https://git-lfs.github.com/spec/"),
        "a Git LFS pointer, not the file itself: run git lfs pull in its repository",
    ),
    (_is_page, "a web page: download the file itself, not the page that shows it"),
)
"""Contents that may replace any file: a test of the first bytes, and text on what the file is and what to do."""

_KINDS: _Kinds = (
    *_PLACEHOLDERS,
    (
        lambda head: head.startswith(_COMPRESSED) or head[257:262] == b"ustar",
        f"a compressed file or archive: {_UNPACK}",
    ),
    (
        lambda head: head.lstrip(_BLANK)[:1] in (b"{", b"["),
        "a JSON document, not a network: give the model's own file, which may lie beside it",
    ),
    (lambda head: head[8:10] == b'{"' and head[7] == 0, f"a safetensors checkpoint; {_WEIGHTS_ONLY}"),
    (_is_pickle, f"a Python pickle, such as a checkpoint of torch.save; {_WEIGHTS_ONLY}"),
    (
        lambda head: head.startswith(b"\x89HDF\r\n\x1a\n"),
        "an HDF5 file: load it with keras.saving.load_model, and save the model as a .keras file",
    ),
)
"""Contents of files that hold no network, in the form of `_PLACEHOLDERS`."""


def require_model_file(path: Path) -> None:
    """Raise ModelImportError, which says what ``path`` is, if it is missing or cannot hold a network."""
    mode = path.stat().st_mode if path.exists() else 0
    if not mode:
        raise ModelImportError(f"there is no file {str(path)!r}")
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise ModelImportError(f"{str(path)!r} is {kind}, not a file: give the path of the model's file")
    _require(path, (*_KINDS, (lambda head: head.startswith(b"PK\x03\x04"), _kind_of_archive(path))))


def require_weights(path: Path) -> None:
    """Raise ModelImportError if a file of weights is a placeholder; its bytes may look like any other kind."""
    _require(path, _PLACEHOLDERS)


def _require(path: Path, kinds: _Kinds) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ModelImportError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    kind = next((kind for is_kind, kind in kinds if is_kind(head)), "")
    if kind:
        raise ModelImportError(f"{str(path)!r} is {kind}")


_MARKS = {".pt2": {"archive_format", "serialized_exported_program.json"}, ".keras": {"config.json"}}
"""By the suffix of archives that hold a network, names of files; each such archive has at least one of them."""


def _kind_of_archive(path: Path) -> str:
    """Return what a zip archive is and what to do; "" if it may hold the network that its suffix says."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return "a damaged zip archive: download or export it again"
    files = {name.rpartition("/")[2] for name in names}
    for suffix, marks in _MARKS.items():
        if marks & files:
            return "" if path.suffix.lower() == suffix else f"an archive of the kind {suffix}: give it this suffix"
    if "data.pkl" not in files:
        return f"a zip archive: {_UNPACK}"
    if any("/code/" in name for name in names):
        return "a TorchScript archive, which has no exported graph: load it in torch, and give the network"
    return f"a checkpoint of torch.save; {_WEIGHTS_ONLY}"

"""Refuse files that hold no network, whatever their suffix says: placeholders, error pages, checkpoints."""

import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

from tvm_split.errors import ModelImportError

_HEAD_BYTES = 512
_PICKLE_OPCODES = b"}c](\x95\x8a\x8c"
"""What may follow the header of a pickle. A flatbuffer can start with the same two bytes, and then has a zero."""
_WEIGHTS_ONLY = "it has weights without a graph: load them into the network in their framework, and give the network"


def _is_page(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html"))


def _is_pickle(head: bytes) -> bool:
    return head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and head[2:3] in _PICKLE_OPCODES


_KINDS: tuple[tuple[Callable[[bytes], bool], str], ...] = (
    (lambda head: not head, "empty: download or export it again"),
    (
        lambda head: head.startswith(b"version https://git-lfs.github.com/spec/"),
        "a Git LFS pointer, not the file itself: run git lfs pull in its repository",
    ),
    (_is_page, "a web page: download the file itself, not the page that shows it"),
    (lambda head: head[8:10] == b'{"' and head[7] == 0, f"a safetensors checkpoint; {_WEIGHTS_ONLY}"),
    (_is_pickle, f"a Python pickle, such as a checkpoint of torch.save; {_WEIGHTS_ONLY}"),
    (
        lambda head: head.startswith(b"\x89HDF\r\n\x1a\n"),
        "an HDF5 file: load it with keras.saving.load_model, and save the model as a .keras file",
    ),
)
"""Kinds of files that hold no network: a test of the first bytes, and what the file is with what to do."""


def require_model_file(path: Path) -> None:
    """Raise ModelImportError, which says what ``path`` is, if it is missing or cannot hold a network."""
    mode = path.stat().st_mode if path.exists() else 0
    if not mode:
        raise ModelImportError(f"there is no file {str(path)!r}")
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise ModelImportError(f"{str(path)!r} is {kind}, not a file: give the path of the model's file")
    require_content(path)


def require_content(path: Path) -> None:
    """Raise ModelImportError if a file has content of a known kind that is not what it should be."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ModelImportError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    kind = next((kind for is_kind, kind in _KINDS if is_kind(head)), None)
    if kind is None and head.startswith(b"PK") and _is_checkpoint(path):
        kind = f"a checkpoint of torch.save; {_WEIGHTS_ONLY}"
    if kind is not None:
        raise ModelImportError(f"{str(path)!r} is {kind}")


def _is_checkpoint(path: Path) -> bool:
    """Whether an archive is of torch.save: one pickle, and no code as TorchScript has."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
    parts = [name.split("/")[1:] for name in names]
    return ["data.pkl"] in parts and not any(part[:1] == ["code"] for part in parts)

"""Whether a library is an ELF shared object for this machine, and leaves the memory around it alone when it is loaded.

A loader believes what it reads. One wrong number in a damaged library, and it maps a segment over what lies beside the
library, or writes an address there: whether that crashes depends on what lies there, so trying it out proves nothing.

The layout is that of the System V ABI, chapters 4 and 5 (https://refspecs.linuxfoundation.org/elf/gabi4+/).
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_split.rpc_runtime.errors import WorkerError
from tvm_split.rpc_runtime.program.interface import Bytes

MACHINES = {3: "i686", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64", 258: "loongarch64"}
LARGEST_BYTES = 1 << 36
"""Of address space; weights are no part of libraries."""

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<QQ")
_RELOCATION = np.dtype([("offset", "<u8"), ("info", "<u8"), ("addend", "<i8")])
_SYMBOL_BYTES = 24
_LARGEST_PAGE_BYTES = 1 << 16
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_SHARED_OBJECT = 3
_LOAD, _DYNAMIC, _RELRO = 1, 2, 0x6474E552
_WRITABLE = 2
_STRINGS, _SYMBOLS, _RELOCATIONS, _CALLS = 5, 6, 7, 23
_SIZE_OF = {_RELOCATIONS: 8, _CALLS: 2, _STRINGS: 10, 25: 27, 26: 28}
"""Tags of addresses, and the tags of what lies there in bytes: relocations, strings, functions to begin and to end."""
_POINTERS = (3, 4, _SYMBOLS, 12, 13, 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFE)
"""Tags of other addresses: tables for calls, symbols, their hashes and versions, functions to begin and to end."""


@dataclass(frozen=True)
class _Segment:
    kind: int
    flags: int
    offset: int
    address: int
    physical_address: int
    file_bytes: int
    memory_bytes: int
    alignment: int

    def holds(self, address: int, size_bytes: int) -> bool:
        return self.address <= address and address + size_bytes <= self.address + self.memory_bytes


class _DamagedError(Exception):
    pass


def check_shared_object(content: Bytes, where: str) -> None:
    """A `WorkerError` about ``where`` if a library is none for this machine, or would reach beyond its own memory.

    Formats of systems other than Linux, and ELF of 32 bits, are not looked into.
    """
    head = content[: _HEADER.size].tobytes()
    if len(head) < _HEADER.size or head[:4] != _ELF64_LITTLE[:4]:
        if platform.system() == "Linux":
            raise WorkerError(f"{where}: the library is no ELF shared object, and this machine runs Linux")
        return
    number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    architecture, here = MACHINES.get(number, f"ELF machine {number}"), platform.machine()
    if architecture != here:
        raise WorkerError(
            f"{where}: the library was compiled for {architecture}, and this machine is {here}. Give the machine its "
            "right target in the cluster's description and compile again"
        )
    if not head.startswith(_ELF64_LITTLE):
        return
    try:
        _check(content)
    except _DamagedError as error:
        raise WorkerError(f"{where}: the library is damaged: {error}. Compile again") from None


def _check(content: Bytes) -> None:
    segments = tuple(_segments(content))
    loaded = [segment for segment in segments if segment.kind == _LOAD]
    if not loaded:
        raise _DamagedError("nothing of it would be loaded")
    end = 0
    for segment in loaded:
        _check_loaded(segment, end, content.size)
        end = segment.address + segment.memory_bytes
    for segment in segments:
        if segment.kind == _RELRO and segment.address + segment.memory_bytes > end + _LARGEST_PAGE_BYTES:
            raise _DamagedError("it would write-protect memory that is not its own")
    entries = _dynamic_entries(content, segments)
    for tag in (*_POINTERS, *_SIZE_OF):
        if tag in entries and not _holds(loaded, entries[tag], entries.get(_SIZE_OF.get(tag, -1), 0)):
            raise _DamagedError(f"entry {tag} of its dynamic section points beyond it")
    for tag in (_RELOCATIONS, _CALLS):
        if tag in entries:
            _check_relocations(content, loaded, entries, tag, end)


def _segments(content: Bytes) -> Iterator[_Segment]:
    _, kind, _, _, _, start, _, _, _, entry_bytes, count, *_ = _HEADER.unpack_from(content.data)
    if kind != _SHARED_OBJECT or entry_bytes != _SEGMENT.size or start + count * _SEGMENT.size > content.size:
        raise _DamagedError("its head is none of a shared object")
    for index in range(count):
        yield _Segment(*_SEGMENT.unpack_from(content.data, start + index * _SEGMENT.size))


def _check_loaded(segment: _Segment, end: int, size_bytes: int) -> None:
    if segment.file_bytes > segment.memory_bytes or segment.offset + segment.file_bytes > size_bytes:
        raise _DamagedError(f"a segment of it has {segment.file_bytes} bytes, which it does not have")
    if segment.address < end or segment.address + segment.memory_bytes > LARGEST_BYTES:
        raise _DamagedError(f"a segment of it would be loaded at {segment.address:#x}, which is not its own memory")
    if segment.alignment and (segment.address - segment.offset) % segment.alignment:
        raise _DamagedError(
            f"a segment of it would be loaded at {segment.address:#x}, which does not fit its alignment"
        )


def _dynamic_entries(content: Bytes, segments: Sequence[_Segment]) -> dict[int, int]:
    """The first value of every tag."""
    for segment in segments:
        if segment.kind != _DYNAMIC:
            continue
        loaded = [each for each in segments if each.kind == _LOAD]
        table = _table(content, loaded, segment.address, segment.memory_bytes // _ENTRY.size, np.dtype("<u8,<u8"))
        found: dict[int, int] = {}
        for tag, value in table.tolist():
            if tag == 0:
                return found
            found.setdefault(tag, value)
    raise _DamagedError("its dynamic section has no end")


def _check_relocations(content: Bytes, loaded: Sequence[_Segment], entries: dict[int, int], tag: int, end: int) -> None:
    count = entries.get(_SIZE_OF[tag], 0) // _RELOCATION.itemsize
    relocations = _table(content, loaded, entries[tag], count, _RELOCATION)
    offsets = relocations["offset"]
    inside = np.zeros(count, bool)
    for segment in loaded:
        if segment.flags & _WRITABLE:
            inside |= (offsets >= segment.address) & (offsets <= segment.address + segment.memory_bytes - 8)
    if not inside.all():
        raise _DamagedError(f"the address at {int(offsets[~inside][0]):#x} that a loader would write is not its own")
    symbols = relocations["info"] >> np.uint64(32)
    if (relocations["addend"][symbols == 0] > end).any() or (relocations["addend"][symbols == 0] < 0).any():
        raise _DamagedError("an address that a loader would write points beyond it")
    last = int(symbols.max(initial=0))
    if last and not _holds(loaded, entries.get(_SYMBOLS, 0) + last * _SYMBOL_BYTES, _SYMBOL_BYTES):
        raise _DamagedError(f"it has no symbol {last}, whose address a loader would write")


def _holds(loaded: Sequence[_Segment], address: int, size_bytes: int) -> bool:
    return any(segment.holds(address, size_bytes) for segment in loaded)


def _table(content: Bytes, loaded: Sequence[_Segment], address: int, count: int, row: np.dtype) -> np.ndarray:
    """Rows of a table that would be loaded at an address."""
    start = _place(loaded, address, count * row.itemsize)
    if start is None:
        raise _DamagedError(f"a table at {address:#x} lies beyond it")
    return np.frombuffer(content[start : start + count * row.itemsize].tobytes(), row)


def _place(loaded: Sequence[_Segment], address: int, size_bytes: int) -> int | None:
    """Where in the file lies what would be loaded at an address."""
    for segment in loaded:
        if segment.address <= address and address + size_bytes <= segment.address + segment.file_bytes:
            return segment.offset + address - segment.address
    return None

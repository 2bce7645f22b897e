"""Whether a library is an ELF shared object for this machine, and leaves the memory around it alone when it is loaded.

A loader believes what it reads. One wrong number in a damaged library, and it maps a segment over what lies beside the
library, writes an address there, or follows a table to there: whether that crashes depends on what lies there, so
trying it out proves nothing. So all numbers that a loader follows are followed here first, and what compilers do not
make of a network (entries and relocations of other kinds) is refused. What a library does once it is called is its own
affair.

The layout is that of the System V ABI, chapters 4 and 5 (https://refspecs.linuxfoundation.org/elf/gabi4+/), with the
symbols' hashes and versions of GNU (https://refspecs.linuxfoundation.org/LSB_5.0.0/LSB-Core-generic/; chapter 10).
"""

from __future__ import annotations

import mmap
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rpc_runtime.errors import WorkerError
from rpc_runtime.program.interface import Bytes

MACHINES = {3: "i686", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64", 258: "loongarch64"}
LARGEST_BYTES = 1 << 36
"""Of address space; weights are no part of libraries."""

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_WORD = np.dtype("<u4")
_ENTRY = np.dtype([("tag", "<u8"), ("value", "<u8")])
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_RELOCATION = np.dtype([("offset", "<u8"), ("kind", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
_NEEDED = np.dtype([("version", "<u2"), ("count", "<u2"), ("name", "<u4"), ("parts", "<u4"), ("next", "<u4")])
_NEEDED_PART = np.dtype([("hash", "<u4"), ("flags", "<u2"), ("index", "<u2"), ("name", "<u4"), ("next", "<u4")])
_DEFINED = np.dtype(
    [("of", "<u4"), ("index", "<u2"), ("count", "<u2"), ("hash", "<u4"), ("parts", "<u4"), ("next", "<u4")]
)
_DEFINED_PART = np.dtype([("name", "<u4"), ("next", "<u4")])
_LARGEST_PAGE_BYTES = 1 << 16
_MOST_VERSIONS = 10_000
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_SHARED_OBJECT = 3
_LOAD, _DYNAMIC, _STACK, _RELRO = 1, 2, 0x6474E551, 0x6474E552
_EXECUTABLE, _WRITABLE = 1, 2
_LIBRARY, _CALLS_SIZE, _TARGETS, _HASH, _STRINGS, _SYMBOLS, _RELOCATIONS, _RELOCATIONS_SIZE = 1, 2, 3, 4, 5, 6, 7, 8
_STRINGS_SIZE, _BEGIN, _END, _CALLS, _BEGINS, _ENDS, _BEGINS_SIZE, _ENDS_SIZE, _FLAGS = (
    10,
    12,
    13,
    23,
    25,
    26,
    27,
    28,
    30,
)
_GNU_HASH, _VERSIONS, _RELATIVES, _MORE_FLAGS = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFF9, 0x6FFFFFFB
_VERSIONS_DEFINED, _VERSIONS_NEEDED = 0x6FFFFFFC, 0x6FFFFFFE
_NAMES = (_LIBRARY, 14, 15, 29)
_TAGS = {
    *_NAMES, _CALLS_SIZE, _TARGETS, _HASH, _STRINGS, _SYMBOLS, _RELOCATIONS, _RELOCATIONS_SIZE, 9, _STRINGS_SIZE, 11,
    _BEGIN, _END, 16, 20, _CALLS, 24, _BEGINS, _ENDS, _BEGINS_SIZE, _ENDS_SIZE, _FLAGS, _GNU_HASH, _VERSIONS,
    _RELATIVES, _MORE_FLAGS, _VERSIONS_DEFINED, 0x6FFFFFFD, _VERSIONS_NEEDED, 0x6FFFFFFF, 0x70000001, 0x70000003,
    0x70000005,
}  # fmt: skip
"""Entries of a dynamic section that change nothing but what is checked here."""
_HARMLESS_FLAGS = {_FLAGS: 0x1B, _MORE_FLAGS: 0x81}
"""Bind symbols at once or to the library itself, look beside it for others; not: write to code, stay for ever."""
_KINDS = {"x86_64": (8, (1, 6, 7, 16, 17, 18)), "aarch64": (1027, (257, 1025, 1026, 1028, 1029, 1030, 1031))}
"""By machine, relocations that write one address into 8 bytes: of the library itself, or of a symbol."""


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


@dataclass(frozen=True)
class _Image:
    """What of a library would be loaded."""

    content: Bytes
    loaded: tuple[_Segment, ...]

    def holds(self, address: int, size_bytes: int, flag: int = 0) -> bool:
        """Whether one segment, with this flag if one is given, has it all."""
        return any(each.flags & flag == flag and each.holds(address, size_bytes) for each in self.loaded)

    def table(self, address: int, count: int | None, row: np.dtype, writable: int = 0) -> np.ndarray:
        """Rows that would be loaded at an address from the file, where nothing is written, if not ``writable``.

        ``count`` is None for all there are.
        """
        for each in self.loaded:
            start = address - each.address
            if 0 <= start < each.file_bytes and each.flags & _WRITABLE == writable:
                rows = (each.file_bytes - start) // row.itemsize if count is None else count
                if start + rows * row.itemsize > each.file_bytes:
                    break
                start += each.offset
                return np.frombuffer(self.content[start : start + rows * row.itemsize].tobytes(), row)
        raise _DamagedError(f"a table at {address:#x} lies beyond it")


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
    loaded = tuple(segment for segment in segments if segment.kind == _LOAD)
    if not loaded:
        raise _DamagedError("nothing of it would be loaded")
    end = 0
    for segment in loaded:
        _check_loaded(segment, end, content.size)
        end = segment.address + segment.memory_bytes
    image = _Image(content, loaded)
    for segment in segments:
        if segment.kind == _RELRO and segment.address + segment.memory_bytes > end + _LARGEST_PAGE_BYTES:
            raise _DamagedError("it would write-protect memory that is not its own")
        if segment.kind not in (_STACK, _RELRO) and not image.holds(segment.address, segment.memory_bytes):
            raise _DamagedError(f"its segment of kind {segment.kind:#x} points beyond it")
    dynamic, entries = _dynamic_entries(image, segments)
    for tag, size, flag in (
        (_BEGIN, 1, _EXECUTABLE),
        (_END, 1, _EXECUTABLE),
        (_TARGETS, 24, _WRITABLE),
        (_BEGINS, entries.get(_BEGINS_SIZE, 0), _WRITABLE),
        (_ENDS, entries.get(_ENDS_SIZE, 0), _WRITABLE),
    ):
        if tag in entries and not image.holds(entries[tag], size, flag):
            raise _DamagedError(f"entry {tag:#x} of its dynamic section points beyond it")
    symbols = _symbol_count(image, entries)
    for tag, size_tag, relatives in (
        (_RELOCATIONS, _RELOCATIONS_SIZE, entries.get(_RELATIVES, 0)),
        (_CALLS, _CALLS_SIZE, 0),
    ):
        if tag in entries:
            relocations = image.table(entries[tag], entries.get(size_tag, 0) // _RELOCATION.itemsize, _RELOCATION)
            _check_relocations(image, relocations, relatives, dynamic, end)
            symbols = max(symbols, int(relocations["symbol"].max(initial=0)) + 1)
    _check_symbols(image, entries, symbols, end)


def _segments(content: Bytes) -> Iterator[_Segment]:
    _, kind, _, _, _, start, _, _, _, entry_bytes, count, *_ = _HEADER.unpack_from(content.data)
    if kind != _SHARED_OBJECT or entry_bytes != _SEGMENT.size or start + count * _SEGMENT.size > content.size:
        raise _DamagedError("its head is none of a shared object")
    for index in range(count):
        yield _Segment(*_SEGMENT.unpack_from(content.data, start + index * _SEGMENT.size))


def _check_loaded(segment: _Segment, end: int, size_bytes: int) -> None:
    if segment.file_bytes > segment.memory_bytes or segment.offset + segment.file_bytes > size_bytes:
        raise _DamagedError(f"a segment of it has {segment.file_bytes} bytes, which it does not have")
    # Memory is mapped in pages, the whole of each from the one place in the file.
    if (
        segment.address // mmap.PAGESIZE < -(-end // mmap.PAGESIZE)
        or segment.address + segment.memory_bytes > LARGEST_BYTES
    ):
        raise _DamagedError(f"a segment of it would be loaded at {segment.address:#x}, which is not its own memory")
    if (segment.address - segment.offset) % max(segment.alignment, mmap.PAGESIZE):
        raise _DamagedError(
            f"a segment of it would be loaded at {segment.address:#x}, which does not fit its alignment"
        )


def _dynamic_entries(image: _Image, segments: tuple[_Segment, ...]) -> tuple[_Segment, dict[int, int]]:
    """Where they are, and the value of every tag, of which a library has one, but for the libraries that it needs."""
    sections = [segment for segment in segments if segment.kind == _DYNAMIC]
    if len(sections) != 1:
        raise _DamagedError(f"it has {len(sections)} dynamic sections")
    (section,) = sections
    found: dict[int, int] = {}
    names = []
    for tag, value in image.table(section.address, section.memory_bytes // _ENTRY.itemsize, _ENTRY, _WRITABLE).tolist():
        if tag == 0:
            break
        if tag not in _TAGS or (tag in found and tag != _LIBRARY) or value & ~_HARMLESS_FLAGS.get(tag, value):
            raise _DamagedError(f"entry {tag:#x} of its dynamic section is none that a network needs, or there twice")
        found[tag] = value
        names += [value] if tag in _NAMES else []
    else:
        raise _DamagedError("its dynamic section has no end")
    if max(names, default=-1) >= found.get(_STRINGS_SIZE, 0):
        raise _DamagedError("the name of a library that it needs lies beyond it")
    return section, found


def _check_symbols(image: _Image, entries: dict[int, int], count: int, end: int) -> None:
    """That the names, values and versions of so many symbols lie inside."""
    length = entries.get(_STRINGS_SIZE, 0)
    if not length or image.table(entries.get(_STRINGS, 0), length, np.dtype("u1"))[-1]:
        raise _DamagedError("its names have no end")
    symbols = image.table(entries.get(_SYMBOLS, 0), count, _SYMBOL)
    defined = symbols[symbols["section"] != 0]
    if (symbols["name"] >= length).any() or (defined["value"] > end).any():
        raise _DamagedError("a symbol of it, or its name, lies beyond it")
    names, highest = _versions(image, entries)
    if max(names, default=-1) >= length:
        raise _DamagedError("the name of a version lies beyond it")
    if _VERSIONS in entries:
        versions = image.table(entries[_VERSIONS], count, np.dtype("<u2")) & 0x7FFF
        if int(versions.max(initial=0)) > highest:
            raise _DamagedError(f"a symbol has version {versions.max()}, and it has {highest}")


def _symbol_count(image: _Image, entries: dict[int, int]) -> int:
    """As many as its tables of hashes lead to; relocations may know of more."""
    found = 0
    if _HASH in entries:
        buckets, found = image.table(entries[_HASH], 2, _WORD).tolist()
        if image.table(entries[_HASH] + 8, buckets + found, _WORD).max(initial=0) >= max(found, 1):
            raise _DamagedError("the hash of a symbol leads beyond it")
    if _GNU_HASH in entries:
        place = entries[_GNU_HASH] + 16
        count, first, words, _ = image.table(entries[_GNU_HASH], 4, _WORD).tolist()
        buckets_at = place + 8 * words
        buckets = image.table(buckets_at, count, _WORD)
        used = buckets[buckets != 0]
        found = max(found, first)
        if not words or words & (words - 1) or (used < first).any():
            raise _DamagedError("the hash of a symbol leads beyond it")
        if used.size:  # all chains lie one behind the other, and each ends with an odd word
            last = int(used.max())
            rest = image.table(buckets_at + 4 * count + 4 * (last - first), None, _WORD)
            ends = np.flatnonzero(rest & 1)
            if not ends.size:
                raise _DamagedError("the hash of a symbol leads beyond it")
            found = max(found, last + 1 + int(ends[0]))
    return found


def _versions(image: _Image, entries: dict[int, int]) -> tuple[list[int], int]:
    """Where the names of symbols' versions are, and the highest of their numbers."""
    names, numbers = [], [0]
    for tag, row, part in (
        (_VERSIONS_NEEDED, _NEEDED, _NEEDED_PART),
        (_VERSIONS_DEFINED, _DEFINED, _DEFINED_PART),
    ):
        for place, entry in _chain(image, entries.get(tag), row):
            found = [entry, *(each for _, each in _chain(image, place + int(entry["parts"]), part))]
            names += [int(each["name"]) for each in found if "name" in (each.dtype.names or ())]
            numbers += [int(each["index"]) & 0x7FFF for each in found if "index" in (each.dtype.names or ())]
            if len(names) > _MOST_VERSIONS:
                raise _DamagedError(f"it has more than {_MOST_VERSIONS} versions")
    return names, max(numbers)


def _chain(image: _Image, place: int | None, row: np.dtype) -> Iterator[tuple[int, np.void]]:
    """Rows of which each says how far it is to the next, and where each is. The way leads forwards, so it ends."""
    while place is not None:
        (found,) = image.table(place, 1, row)
        yield place, found
        place = place + int(found["next"]) if found["next"] else None


def _check_relocations(image: _Image, relocations: np.ndarray, relatives: int, dynamic: _Segment, end: int) -> None:
    """``relatives`` of them, in front, are said to be addresses of the library itself, and a loader believes it."""
    offsets = relocations["offset"]
    inside = np.zeros(len(offsets), bool)
    for segment in image.loaded:
        if segment.flags & _WRITABLE and segment.memory_bytes >= 8:
            inside |= (offsets >= segment.address) & (offsets <= segment.address + segment.memory_bytes - 8)
    inside &= (offsets + 8 <= dynamic.address) | (offsets >= dynamic.address + dynamic.memory_bytes)
    if not inside.all():
        raise _DamagedError(f"the address at {int(offsets[~inside][0]):#x} that a loader would write is not its own")
    addends = relocations["addend"][relocations["symbol"] == 0]
    if (addends > end).any() or (addends < 0).any():
        raise _DamagedError("an address that a loader would write points beyond it")
    own, others = _KINDS.get(platform.machine(), (None, ()))
    kinds = relocations["kind"]
    if own is not None and ((kinds[:relatives] != own).any() or not np.isin(kinds, (own, *others)).all()):
        raise _DamagedError("it has addresses to write of a kind that a network does not need")

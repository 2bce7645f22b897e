"""One wrong number in a library, and loading it would change what lies beside it in memory: found before that."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.shared_object import _DYNAMIC, _LOAD, _RELRO, check_shared_object
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, double

ADDRESS, FILE_BYTES, MEMORY_BYTES = 16, 32, 40
"""Where these stand in a program header."""
RELOCATIONS = 7
BEYOND = 1 << 24
needs_a_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    maker = ProgramMaker(tmp_path_factory.mktemp("blobs"))
    maker.stage("one", A, [maker.input("x")], double)
    return maker.blob_path(maker.stages[0].library.sha256).read_bytes()


def headers(library: bytes, kind: int) -> Iterator[int]:
    (start,), (count,) = struct.unpack_from("<Q", library, 32), struct.unpack_from("<H", library, 56)
    for place in range(start, start + 56 * count, 56):
        if struct.unpack_from("<I", library, place)[0] == kind:
            yield place


def changed(library: bytes, place: int, by: int) -> np.ndarray:
    content = bytearray(library)
    struct.pack_into("<Q", content, place, struct.unpack_from("<Q", content, place)[0] + by)
    return np.frombuffer(bytes(content), np.uint8)


def linked(folder: Path, *options: str) -> bytes:
    """A library with all tables that compilers make, whose symbols have versions."""
    source, library = folder / "says.c", folder / "says.so"
    source.write_text('#include <stdio.h>\nint says(void) { return printf("%p", (void *)stdout); }\n')
    subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", library, source], check=True)
    return library.read_bytes()


@needs_a_compiler
@pytest.mark.parametrize("hashes", ["gnu", "sysv", "both"])
@pytest.mark.parametrize("binding", ["now", "lazy"])
def test_what_compilers_make(library: bytes, tmp_path: Path, hashes: str, binding: str) -> None:
    check_shared_object(np.frombuffer(library, np.uint8), "here")
    other = linked(tmp_path, f"-Wl,--hash-style={hashes}", "-Wl,-z", f"-Wl,{binding}")
    check_shared_object(np.frombuffer(other, np.uint8), "here")


def entries(library: bytes) -> dict[int, int]:
    """Where the value of each entry of the dynamic section is."""
    (dynamic,) = headers(library, _DYNAMIC)
    start, _, _, size = struct.unpack_from("<QQQQ", library, dynamic + 8)
    return {struct.unpack_from("<Q", library, place)[0]: place + 8 for place in range(start, start + size, 16)}


@needs_a_compiler
@pytest.mark.parametrize("tag", [3, 6, 7, 12, 13, 23, 25, 26, 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFE], ids=hex)
def test_tables_that_are_elsewhere(tmp_path: Path, tag: int) -> None:
    """At the library's head is no table, and behind its end nothing of its own."""
    library = linked(tmp_path)
    place = entries(library)[tag]
    for by in (BEYOND, -struct.unpack_from("<Q", library, place)[0]):
        with pytest.raises(WorkerError, match=r"here: the library is damaged: .*Compile again"):
            check_shared_object(changed(library, place, by), "here")


@needs_a_compiler
def test_numbers_in_tables_that_lead_elsewhere(tmp_path: Path) -> None:
    library = linked(tmp_path)
    address = {tag: struct.unpack_from("<Q", library, place)[0] for tag, place in entries(library).items()}
    symbol, relocation = (
        address[6] + 24,
        address[7],
    )  # in these libraries read-only tables lie where their addresses say
    versions, needed, hashes = address[0x6FFFFFF0], address[0x6FFFFFFE], address[0x6FFFFEF5]
    for place, by, words in (
        (symbol, 1 << 24, "a symbol of it, or its name"),
        (versions + 2, 0x100, "a symbol has version"),
        (needed + 4, 1 << 24, "the name of a version"),
        (needed + 8, 1 << 24, "a table at"),
        (hashes, 1 << 24, "a table at"),
        (hashes + 4, 1 << 24, "the hash of a symbol"),
        (relocation + 8, 31, "of a kind"),
        (entries(library)[0x6FFFFFF9], 1, "of a kind"),
        (entries(library)[RELOCATIONS] - 8, 29, "none that a network needs"),
        (entries(library)[0x6FFFFFF9] - 8, RELOCATIONS - 0x6FFFFFF9, "or there twice"),
    ):
        with pytest.raises(WorkerError, match=f"the library is damaged: .*{words}"):
            check_shared_object(changed(library, place, by), "here")


@pytest.mark.parametrize("field", [ADDRESS, FILE_BYTES, MEMORY_BYTES])
def test_segments_that_overlap_or_are_not_there(library: bytes, field: int) -> None:
    for place in list(headers(library, _LOAD))[:-1]:
        with pytest.raises(WorkerError, match=r"here: the library is damaged: a segment of it .*Compile again"):
            check_shared_object(changed(library, place + field, BEYOND), "here")


def test_memory_that_would_be_write_protected(library: bytes) -> None:
    (place,) = headers(library, _RELRO)
    with pytest.raises(WorkerError, match="write-protect memory that is not its own"):
        check_shared_object(changed(library, place + MEMORY_BYTES, BEYOND), "here")


def test_addresses_that_would_be_written_elsewhere(library: bytes) -> None:
    (relocations,) = struct.unpack_from("<Q", library, entries(library)[RELOCATIONS])
    with pytest.raises(WorkerError, match="that a loader would write is not its own"):
        check_shared_object(changed(library, relocations, BEYOND), "here")
    with pytest.raises(WorkerError, match="an address that a loader would write points beyond it"):
        check_shared_object(changed(library, relocations + 16, BEYOND), "here")


@pytest.mark.parametrize("length", [0, 3, 63, 64, 100, 500, 5000])
def test_the_beginning_of_a_library(library: bytes, length: int) -> None:
    with pytest.raises(WorkerError, match=r"here: the library is (damaged|no ELF)"):
        check_shared_object(np.frombuffer(library[:length], np.uint8), "here")

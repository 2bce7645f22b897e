"""One wrong number in a library, and loading it would change what lies beside it in memory: found before that."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, double
from tvm_split.rpc_runtime.errors import WorkerError
from tvm_split.rpc_runtime.execution.shared_object import _DYNAMIC, _LOAD, _RELRO, check_shared_object

ADDRESS, FILE_BYTES, MEMORY_BYTES = 16, 32, 40
"""Where these stand in a program header."""
RELOCATIONS = 7
BEYOND = 1 << 24


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


def test_what_compilers_make(library: bytes) -> None:
    check_shared_object(np.frombuffer(library, np.uint8), "here")
    for path in Path(np.__file__).parent.rglob("*.so"):
        check_shared_object(np.fromfile(path, np.uint8), str(path))


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
    (dynamic,) = headers(library, _DYNAMIC)
    start, _, _, size = struct.unpack_from("<QQQQ", library, dynamic + 8)
    entries = {struct.unpack_from("<Q", library, place)[0]: place + 8 for place in range(start, start + size, 16)}
    with pytest.raises(WorkerError, match="entry 7 of its dynamic section points beyond it"):
        check_shared_object(changed(library, entries[RELOCATIONS], BEYOND), "here")
    (relocations,) = struct.unpack_from("<Q", library, entries[RELOCATIONS])
    with pytest.raises(WorkerError, match="that a loader would write is not its own"):
        check_shared_object(changed(library, relocations, BEYOND), "here")
    with pytest.raises(WorkerError, match="an address that a loader would write points beyond it"):
        check_shared_object(changed(library, relocations + 16, BEYOND), "here")


@pytest.mark.parametrize("length", [0, 3, 63, 64, 100, 500, 5000])
def test_the_beginning_of_a_library(library: bytes, length: int) -> None:
    with pytest.raises(WorkerError, match=r"here: the library is (damaged|no ELF)"):
        check_shared_object(np.frombuffer(library[:length], np.uint8), "here")

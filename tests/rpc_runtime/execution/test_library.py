"""Libraries are loaded from memory that cannot be changed after it was verified."""

from __future__ import annotations

import os

import numpy as np
import pytest

from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.loaded_stage import library_file, require_architecture


def test_the_file_of_a_library_cannot_be_changed() -> None:
    with library_file(np.frombuffer(b"verified", np.uint8)) as descriptor:
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.truncate(descriptor, 0)


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF" + b"\1\1" + bytes(12) + b"\x08\0"])
def test_another_file_or_architecture_is_refused(content: bytes) -> None:
    with pytest.raises(WorkerError, match=r"here: the library (is not an ELF|was compiled for ELF machine 8)"):
        require_architecture(np.frombuffer(content, np.uint8), "here")

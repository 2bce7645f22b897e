"""Libraries are loaded from memory that cannot be changed after it was verified."""

from __future__ import annotations

import os

import numpy as np
import pytest

from rpc_runtime.execution.loaded_stage import library_file


def test_the_file_of_a_library_cannot_be_changed() -> None:
    with library_file(np.frombuffer(b"verified", np.uint8)) as descriptor:
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.truncate(descriptor, 0)

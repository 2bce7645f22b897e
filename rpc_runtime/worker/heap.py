"""Settings of glibc's ``malloc``: how much free memory a worker's process keeps."""

from __future__ import annotations

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Constants of glibc's ``malloc.h``."""


def keep_heap() -> None:
    """Make glibc keep the memory of large messages: returning it after each message causes page faults."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        allocator = ctypes.CDLL(None)
        allocator.mallopt(M_MMAP_THRESHOLD, 64 << 20)
        allocator.mallopt(M_TRIM_THRESHOLD, 256 << 20)


def trim_heap() -> None:
    """Return all free memory to the system, also between used blocks: for the weights of an ended program."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)

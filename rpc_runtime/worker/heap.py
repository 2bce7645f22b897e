"""How much memory a worker's process keeps beyond what it uses: glibc's ``malloc``, told by calls to it."""

from __future__ import annotations

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's ``malloc.h``."""


def keep_heap() -> None:
    """Has glibc keep what large messages take: given back after each, it comes as page faults again."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        allocator = ctypes.CDLL(None)
        allocator.mallopt(M_MMAP_THRESHOLD, 64 << 20)
        allocator.mallopt(M_TRIM_THRESHOLD, 256 << 20)


def trim_heap() -> None:
    """Gives back what is free of all that was kept, between what is used as well: the weights of what has ended."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)

"""A disk that is full after some bytes: the limit of a file's size, which fails in the same way (EFBIG)."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(size_bytes: int = 64) -> Iterator[None]:
    """Let no file of this process, and of what it starts, grow beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

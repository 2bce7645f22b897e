"""Importing what has thousands of modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Python looks for garbage whenever objects have grown by a quarter; modules grow and leave none: a quarter of the
    time that TVM and ``torch.export`` take to load."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

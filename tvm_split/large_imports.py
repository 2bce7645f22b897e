"""What Python's search for garbage costs a process that has thousands of modules."""

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
        if gc.get_freeze_count():  # what was loaded is old, too
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def without_old_objects() -> Iterator[None]:
    """Inside, garbage is looked for among newer objects alone: to look through the modules of torch and TVM again and
    again takes a tenth of the time to plan and compile. Nothing changes where somebody has frozen objects himself."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

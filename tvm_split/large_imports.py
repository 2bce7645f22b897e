"""What Python's search for garbage costs a process that has thousands of modules."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
"""How often `without_old_objects` is entered at the moment, by all threads."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Python looks for garbage whenever objects have grown by a quarter; modules grow and leave none: a quarter of the
    time that TVM and ``torch.export`` take to load."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _inside:  # what was loaded is old, too
                gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def without_old_objects() -> Iterator[None]:
    """Inside, garbage is looked for among newer objects alone: to look through the modules of torch and TVM again and
    again takes a tenth of the time to plan and compile. What was garbage before stays until then. Nothing changes where
    somebody else has frozen objects."""
    global _inside
    with _lock:
        is_ours = bool(_inside) or not gc.get_freeze_count()
        if is_ours:
            _inside += 1
            gc.freeze()
    try:
        yield
    finally:
        with _lock:
            if is_ours:
                _inside -= 1
                if not _inside:
                    gc.unfreeze()

"""What a process clears away before it ends, also where a signal ends it while its main thread is busy elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Hashable

_LEFT: dict[Hashable, Callable[[], object]] = {}
os.register_at_fork(after_in_child=_LEFT.clear)  # it is the other process's


def before_end(key: Hashable, clear: Callable[[], object]) -> None:
    """Have ``clear`` called when the process ends, unless ``key`` is `cleared` by then."""
    _LEFT[key] = clear


def cleared(key: Hashable) -> None:
    _LEFT.pop(key, None)


@atexit.register
def clear_away() -> None:
    """Clear all that is left, the latest first; what fails keeps nothing else from being cleared."""
    while _LEFT:
        with contextlib.suppress(Exception):
            _LEFT.popitem()[1]()

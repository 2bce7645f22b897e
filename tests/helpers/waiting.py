"""The one way in which tests wait for something that happens in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def wait_for(look: Callable[[], Value], seconds: float = 10.0) -> Value:
    """What ``look`` gives once that is true, or what it gives last when the time is over."""
    deadline = time.monotonic() + seconds
    while not (value := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value

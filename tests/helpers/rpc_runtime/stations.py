"""Stations without a machine behind them, for links without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rpc_runtime.program.routes import Route


class Idle:
    """A station where nothing is done with what comes, and where nobody waits for room."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.starving = False

    def moved(self) -> None: ...

    def transferred(self, kind: str, route: Route, sequence: int, start: int, end: int, size_bytes: int) -> None: ...

    def deliver(self, route: Route, sequence: int, value: Any, release: Callable[[], None]) -> None: ...

    def room_locked(self) -> None: ...

    def starves_locked(self, route: Route, sequence: int) -> bool:
        return self.starving

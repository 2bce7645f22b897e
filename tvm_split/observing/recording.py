"""Record the trace of a running deployment, however long it runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.clocks import MachineClock
from rpc_runtime.program.events import Observation
from tvm_split.observing.about import About
from tvm_split.observing.trace import Trace, joined, trace_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Time between two readings. A machine keeps 65,536 events: six seconds at a thousand micro-batches a second."""
END_SECONDS = 30.0


class Observed(Protocol):
    """A deployment that can be observed, by its own client or by another process; ``machines`` hold it now."""

    machines: tuple[str, ...]

    def observe(
        self, since: Mapping[str, int] | None = None, *, kernels: int = 0, refused: dict[str, str] | None = None
    ) -> dict[str, Observation]: ...

    def clocks(self) -> Mapping[str, MachineClock]: ...


class Recording:
    """Reads the events of a deployment in the background, from `start` to `stop`; memory grows by 46 bytes an event.

    The trace of a machine that no longer answers ends with the last events that were read. Of each stage's first
    ``kernels`` micro-batches, the kernels are recorded too.
    """

    def __init__(self, model: str, observed: Observed, about: Callable[[], About] = About, kernels: int = 0) -> None:
        self._model = model
        self._about = about
        self._kernels = kernels
        self._observed = observed
        self._parts: dict[str, list[Observation]] = {}
        self._stopped = threading.Event()
        self._reading = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="recording", daemon=True)

    def start(self) -> None:
        """Begin with the events that follow. Raises as `Observed.observe`."""
        self._parts = {machine: [seen] for machine, seen in self._observed.observe(kernels=self._kernels).items()}
        self._thread.start()

    def stop(self) -> None:
        """Read the last events. Idempotent."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(END_SECONDS)
            self._read()

    @property
    def trace(self) -> Trace:
        """The trace of all events that were read so far."""
        with self._reading:
            seen = {machine: joined(parts) for machine, parts in self._parts.items()}
            return trace_of(self._model, seen, self._observed.clocks(), self._about())

    def _follow(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            self._read()

    def _read(self) -> None:
        """Read the new events; ignore that the deployment has ended, since those who run it get that error."""
        with self._reading:
            try:
                known = {machine: parts[-1].newest for machine, parts in self._parts.items()}
                news = self._observed.observe(known, refused={})
            except TvmSplitError as error:
                logger.info("the deployment can no longer be observed: %s", error)
                return
            for machine, seen in news.items():
                parts = self._parts.setdefault(machine, [])
                parts[-1:] = [replace(part, tracks=()) for part in parts[-1:]]  # the newest reading has them all
                parts.append(seen)

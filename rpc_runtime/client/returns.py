"""Waits for machines that failed or drain, until they have answered for long enough to get stages again."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rpc_runtime.client.worker_client import WorkerDescription


@dataclass(frozen=True)
class MoveTimes:
    """How long moves and returns take, in seconds.

    A machine that is away is asked each ``ask_seconds``, and each ``ask_later_seconds`` if it has not answered for
    ``soon_seconds``. It returns when it has answered for ``steady_seconds``, doubled with each of its failures, but at
    most for ``longest_steady_seconds``. A move waits for ``empty_seconds`` for what is in flight, and sends the rest
    again.
    """

    empty_seconds: float = 2.0
    ask_seconds: float = 2.0
    ask_later_seconds: float = 30.0
    soon_seconds: float = 60.0
    steady_seconds: float = 10.0
    longest_steady_seconds: float = 600.0


USUAL_MOVE_TIMES = MoveTimes()


class Returns:
    """The machines that are ``away``, each watched by a thread until it returns, or `close`.

    ``ask`` returns the worker of a machine, or None; ``on_return`` is called with each machine that has returned, if
    it is still in ``away``: one that is used again is taken out.
    """

    def __init__(
        self, ask: Callable[[str], WorkerDescription | None], on_return: Callable[[str], None], times: MoveTimes
    ) -> None:
        self.away: set[str] = set()
        self._ask, self._on_return, self._times = ask, on_return, times
        self._failures: Counter[str] = Counter()
        self._closed = threading.Event()

    def failed(self, machine: str) -> None:
        """Note that a machine has failed, or could not be used when it had returned."""
        self._failures[machine] += 1

    def expect(self, machines: Iterable[str]) -> None:
        """Wait until these machines return."""
        for machine in set(machines) - self.away:
            self.away.add(machine)
            threading.Thread(target=self._wait, args=(machine,), name=f"return-{machine}", daemon=True).start()

    def steady_seconds(self, machine: str) -> float:
        """Return for how long a machine has to answer before it gets stages again."""
        doubled = 2.0 ** max(0, min(self._failures[machine], 30) - 1)
        return min(self._times.steady_seconds * doubled, self._times.longest_steady_seconds)

    def close(self) -> None:
        self._closed.set()

    def _wait(self, machine: str) -> None:
        times, process = self._times, 0
        since = answered = time.monotonic()
        seconds = times.ask_seconds
        while not self._closed.wait(seconds) and machine in self.away:
            worker, now = self._ask(machine), time.monotonic()
            if worker is None or worker.draining:
                process = 0
                seconds = times.ask_seconds if now < answered + times.soon_seconds else times.ask_later_seconds
                continue
            if worker.process_id != process:  # it is back, or was started again
                process, since = worker.process_id, now
            elif now >= since + self.steady_seconds(machine):
                self.away.discard(machine)
                self._on_return(machine)
                return
            answered, seconds = now, times.ask_seconds

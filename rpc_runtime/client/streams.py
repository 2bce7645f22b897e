"""Single calls and streams: the micro-batches that they submit, and their results. They know no links and threads.

Methods named ``*_locked`` require the pipeline's lock. What wakes threads or calls back is left to do in ``due``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.inputs import client_arrays
from rpc_runtime.program.program import Program
from rpc_runtime.program.runner import Outputs
from rpc_runtime.program.specs import Array
from rpc_runtime.sleeper import Due, Sleeper


class Call:
    """A single call, whose result is set in a future."""

    is_held = is_over = False

    def __init__(self, due: Due) -> None:
        self.future: Future[Outputs] = Future()
        self._due = due

    def begin_locked(self) -> bool:
        """Return whether its micro-batch is to be fed, because the future was not cancelled."""
        return self.future.set_running_or_notify_cancel()

    def give_locked(self, result: Outputs | TvmSplitError) -> None:
        self._due.append(partial(self._settle, result))

    fail_locked = give_locked

    def _settle(self, result: Outputs | TvmSplitError) -> None:
        if self.future.cancelled():
            self.future.set_running_or_notify_cancel()  # wakes those that wait for several futures
        with suppress(InvalidStateError):  # it has a result or an error, or was cancelled
            if isinstance(result, TvmSplitError):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)


class Stream:
    """A stream: one thread feeds its micro-batches, and the caller takes the results in order.

    It is held, that is not fed, while ``lead`` results are not taken, or ``limit`` micro-batches were fed and their
    results are not taken, because results use memory of this process. ``feeder`` is the thread that feeds it, and
    ``consumer`` the caller's. ``is_over``: the caller takes no more results.
    """

    def __init__(self, lead: int, limit: int, due: Due) -> None:
        self.feeder, self.consumer = Sleeper(due), Sleeper(due)
        self.lead, self.limit = lead, limit
        self._results: deque[Outputs | BaseException | None] = deque()
        """What the caller takes next: results in order, then the error that ends the stream, or None."""
        self._pending = self._ready = 0
        self._is_fed = False
        self._error: BaseException | None = None
        self.is_over = False

    @property
    def is_held(self) -> bool:
        return self._ready >= self.lead or self._pending >= self.limit

    def begin_locked(self) -> bool:
        """Count a micro-batch that is fed, perhaps by another thread than its feeder."""
        self._pending += 1
        self.feeder.rouse_locked()
        return True

    def give_locked(self, result: Outputs) -> None:
        self._ready += 1
        self._put_locked(result)
        self._end_if_complete_locked()

    def fail_locked(self, error: TvmSplitError) -> None:
        self._put_locked(error)
        self.feeder.rouse_locked()

    def end_feeding_locked(self, error: BaseException | None) -> None:
        """Note that no more micro-batches come, because they have ended, or because of an ``error`` of theirs."""
        self._is_fed, self._error = True, error
        self._end_if_complete_locked()

    def take_locked(self) -> list[Outputs | BaseException | None]:
        """Return the next result, error or None for the end, in a list; an empty list before the caller sleeps."""
        if not self._results:
            self.consumer.rest_locked()
            return []
        result = self._results.popleft()
        if isinstance(result, Outputs):
            self._pending -= 1
            self._ready -= 1
        return [result]

    def _end_if_complete_locked(self) -> None:
        if self._is_fed and self._ready == self._pending:
            self._put_locked(self._error)

    def _put_locked(self, result: Outputs | BaseException | None) -> None:
        self._results.append(result)
        self.consumer.rouse_locked()


@dataclass(eq=False, repr=False, slots=True)
class MicroBatch:
    """A micro-batch of a call or a stream.

    ``since`` is when the wait for the result began, in seconds of the monotonic clock. ``sequence`` is None until it is
    fed. ``is_late``: its caller has got an error.
    """

    source: Call | Stream
    inputs: Sequence[Array]
    since: float = field(default_factory=time.monotonic)
    sequence: int | None = None
    fed_nanoseconds: int = 0
    is_late: bool = False
    _tensors: tuple[Program | None, Sequence[Array]] = field(default=(None, ()), init=False)

    def tensors(self, program: Program) -> Sequence[Array]:
        """Return the values of a program's ``client_tensors``; they are computed once for the same program."""
        if self._tensors[0] is not program:
            self._tensors = program, client_arrays(program, self.inputs)
        return self._tensors[1]

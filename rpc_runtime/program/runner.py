"""The interface of all ways to run a program."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from rpc_runtime.processes import Closing

if TYPE_CHECKING:
    from rpc_runtime.program.measurements import LinkStatistics, StageStatistics, TraceEvent
    from rpc_runtime.program.outputs import Outputs
    from rpc_runtime.program.program import Program

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Runner(Closing):
    """A loaded program that several threads can run at a time. A context manager.

    Inputs, which `rpc_runtime.program.inputs` checks, and outputs are in the program's order.
    """

    program: Program
    """The program that is loaded."""
    blob_bytes_sent: int = 0
    """Bytes of libraries and weights that were sent to load the program."""
    weight_bytes: Mapping[str, int]
    """Bytes of the weights on each machine."""

    def run(self, inputs: Sequence[Any]) -> Outputs:
        """Return the outputs for one micro-batch."""
        return self.submit(inputs).result()

    @abstractmethod
    def submit(self, inputs: Sequence[Any]) -> Future[Outputs]:
        """Queue one micro-batch and return a future of its outputs; its inputs must not change until then."""

    @abstractmethod
    def stream(self, batches: Iterable[Sequence[Any]]) -> Iterator[Outputs]:
        """Yield the outputs for many micro-batches, lazily and in order, while later ones are computed.

        An error of the iterable is raised here after the results before it. Closing the generator early drops the
        micro-batches in flight.
        """

    @abstractmethod
    def statistics(self) -> tuple[StageStatistics, ...]:
        """Return the statistics of each stage and replica whose machine answers, in the program's order.

        Also after a failure; raises a `WorkerError` after `close`.
        """

    @abstractmethod
    def links(self) -> tuple[LinkStatistics, ...]:
        """Return the transport of each link."""

    @abstractmethod
    def trace(self) -> tuple[TraceEvent, ...]:
        """Return the events of each stage for its latest micro-batches, ordered by start."""

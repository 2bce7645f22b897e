"""What every way of running a program can do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from rpc_runtime.processes import Closing

if TYPE_CHECKING:
    from rpc_runtime.program.measurements import LinkStatistics, StageStatistics, TraceEvent
    from rpc_runtime.program.program import Program

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Runner(Closing):
    """A program that is loaded and can be run, by several threads at a time. A context manager.

    Inputs, which `rpc_runtime.program.inputs` checks, and outputs are in the program's order.
    """

    @property
    @abstractmethod
    def program(self) -> Program:
        """The program that is loaded."""

    @property
    @abstractmethod
    def blob_bytes_sent(self) -> int:
        """Bytes of libraries and weights that had to be sent to open it."""

    @property
    @abstractmethod
    def weight_bytes(self) -> Mapping[str, int]:
        """By machine, the bytes of the weights that it holds."""

    @abstractmethod
    def run(self, inputs: Sequence[Any]) -> tuple[Array, ...]:
        """Return the outputs for one micro-batch."""

    @abstractmethod
    def submit(self, inputs: Sequence[Any]) -> Future[tuple[Array, ...]]:
        """Queue one micro-batch, whose inputs stay as they are; return what will have its outputs."""

    @abstractmethod
    def stream(self, batches: Iterable[Sequence[Any]]) -> Iterator[tuple[Array, ...]]:
        """Yield the outputs for many micro-batches, in order, while later ones are under way."""

    @abstractmethod
    def statistics(self) -> tuple[StageStatistics, ...]:
        """Return what each stage has done, in the program's order."""

    @abstractmethod
    def last_statistics(self) -> tuple[StageStatistics, ...]:
        """Return the same after a failure: of the stages whose machines still answer."""

    @abstractmethod
    def links(self) -> tuple[LinkStatistics, ...]:
        """Return what carries each link."""

    @abstractmethod
    def trace(self) -> tuple[TraceEvent, ...]:
        """Return when each stage did what for its latest micro-batches, by the start."""

"""What every way of running a program can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from rpc_runtime.program.measurements import LinkStatistics, StageStatistics, TraceEvent
from rpc_runtime.program.program import Program

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class StagePipeline(Protocol):
    """A program that is loaded and can be run, by several threads at a time.

    Inputs, which `rpc_runtime.program.inputs` checks, and outputs are in the program's order.
    """

    @property
    def program(self) -> Program: ...

    @property
    def blob_bytes_sent(self) -> int:
        """Bytes of libraries and weights that had to be sent to open it."""
        ...

    @property
    def weight_bytes(self) -> Mapping[str, int]:
        """By machine, the bytes of the weights that it holds."""
        ...

    def run(self, inputs: Sequence[Any]) -> tuple[Array, ...]:
        """The outputs for one micro-batch."""
        ...

    def stream(self, batches: Iterable[Sequence[Any]]) -> Iterator[tuple[Array, ...]]:
        """The outputs for many micro-batches, in order, while later ones are under way."""
        ...

    def statistics(self) -> tuple[StageStatistics, ...]: ...

    def last_statistics(self) -> tuple[StageStatistics, ...]: ...

    def links(self) -> tuple[LinkStatistics, ...]: ...

    def trace(self) -> tuple[TraceEvent, ...]: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

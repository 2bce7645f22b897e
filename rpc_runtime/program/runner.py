"""The interface of all ways to run a program, and the result of one micro-batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, SupportsIndex, overload

from rpc_runtime.errors import InputError
from rpc_runtime.processes import Closing
from rpc_runtime.program.clocks import MachineClock
from rpc_runtime.program.events import Observation, StageStatistics, TraceEvent, aligned, events_of, statistics_of
from rpc_runtime.program.measurements import LinkStatistics
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import Array


class Outputs(tuple[Array, ...]):
    """A model's outputs in its order; ``outputs["logits"]`` is the output of that name, ``dict(outputs)`` has all.

    ``names`` are the outputs' names in the source, such as keys of a dict; ``output_0``, … for those without one.
    """

    names: tuple[str, ...]

    def __new__(cls, arrays: Iterable[Array], names: Iterable[str]) -> Outputs:
        outputs = super().__new__(cls, arrays)
        outputs.names = tuple(names)
        return outputs

    @classmethod
    def of(cls, program: Program, arrays: Iterable[Array]) -> Outputs:
        """Return the outputs of one micro-batch with their names."""
        return cls(arrays, program.output_names or (tensor.name for tensor in program.outputs))

    def __getnewargs__(self) -> tuple[tuple[Array, ...], tuple[str, ...]]:
        return tuple(self), self.names

    @overload
    def __getitem__(self, key: str | SupportsIndex) -> Array: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Array, ...]: ...
    def __getitem__(self, key: Any) -> Any:
        """Return the output of a name or position. Raises an InputError if no output has that name."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.names:
            raise InputError(f"no output is named {key!r}; the outputs are {', '.join(self.names)}")
        return super().__getitem__(self.names.index(key))

    def __contains__(self, item: object) -> bool:
        return item in self.names if isinstance(item, str) else super().__contains__(item)

    def keys(self) -> tuple[str, ...]:
        """Return the names, so that ``dict(outputs)`` and ``numpy.savez(path, **outputs)`` work."""
        return self.names

    def __repr__(self) -> str:
        return f"Outputs({', '.join(f'{name}={array!r}' for name, array in zip(self.names, self, strict=True))})"


class Runner(Closing):
    """A loaded program that several threads can run at a time. A context manager.

    Inputs, which `rpc_runtime.program.inputs` checks, and outputs are in the program's order.
    """

    program: Program
    """The program that is loaded."""
    machines: tuple[str, ...]
    """The machines that are observed: those that hold stages now."""
    name: str = ""
    """The letters by which workers show the deployment; empty without workers."""
    blob_bytes_sent: int = 0
    """Bytes of libraries and weights that were sent to load the program."""
    weight_bytes: Mapping[str, int]
    """Bytes of the weights on each machine."""

    def run(self, inputs: Sequence[Any]) -> Outputs:
        """Return the outputs for one micro-batch."""
        return self.submit(inputs).result()

    @abstractmethod
    def submit(self, inputs: Sequence[Any]) -> Future[Outputs]:
        """Queue one micro-batch; return the future of its outputs. Its inputs must not change until that is done."""

    @abstractmethod
    def stream(self, batches: Iterable[Sequence[Any]]) -> Iterator[Outputs]:
        """Yield the outputs for many micro-batches, lazily and in order, while later ones are computed.

        An error of the iterable is raised here after the results before it. Closing the generator early drops the
        micro-batches in flight.
        """

    def require_usable(self) -> None:
        """Raise the error that ended this runner, if there is one."""

    def happened(self, what: str) -> None:
        """Record an event of the deployment among the client's events; do nothing without workers."""

    @abstractmethod
    def observe(
        self,
        since: Mapping[str, int] | None = None,
        timeout_seconds: float | None = None,
        kernels: int = 0,
        refused: dict[str, str] | None = None,
    ) -> dict[str, Observation]:
        """Return what each machine that answers, and the client, has recorded, by machine; also after a failure.

        Args:
            since: the number, by machine, after which rows are returned (0 if missing); None: no rows.
            kernels: the number of each stage's next micro-batches whose kernels are recorded too.
            refused: gets the reason, by machine, why an answer is not used; None: the reason is raised.

        Raises:
            ProtocolError: a machine's answer is malformed.
            WorkerError: after `close`.
        """

    def statistics(self, timeout_seconds: float | None = None) -> tuple[StageStatistics, ...]:
        """Return the statistics of each stage and replica whose machine answers in time, in the program's order."""
        seen, program = self.observe(timeout_seconds=timeout_seconds), self.program
        names = {machine: [stage.name for stage in program.stages_on(machine)] for machine in seen}
        by_machine = {machine: statistics_of(machine, names[machine], seen[machine].tracks) for machine in seen}
        return tuple(by_machine[stage.machine][stage.name] for stage in program.stages if stage.machine in by_machine)

    @abstractmethod
    def links(self) -> tuple[LinkStatistics, ...]:
        """Return the transport of each link."""

    def trace(self) -> tuple[TraceEvent, ...]:
        """Return the latest events of all machines and of the client, by their start, in this process's clock."""
        clocks = self.clocks()
        events: list[TraceEvent] = []
        for machine, seen in self.observe({}).items():
            events += events_of(machine, seen.tracks, aligned(seen.table(), clocks.get(machine, MachineClock())))
        return tuple(sorted(events, key=lambda event: event.start_nanoseconds))

    def clocks(self) -> Mapping[str, MachineClock]:
        """Return, by machine, the clock of each machine that does not share this process's clock."""
        return {}

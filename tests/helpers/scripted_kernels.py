"""Sessions that time no kernel: a kernel's time follows from the size of its arguments, with scripted noise."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rpc_runtime.program.measurements import KernelSet, KernelTime, TimedKernel, TimingEffort


def undisturbed_seconds(kernel: TimedKernel) -> float:
    return 1e-5 + kernel.size_bytes * 1e-9


@dataclass
class Noise:
    """The factors of each machine's successive measurements; the last one is repeated.

    ``measured`` lists the machines in the order in which they were timed.
    """

    script: dict[str, Sequence[float]] = field(default_factory=dict)
    measured: list[str] = field(default_factory=list)
    _left: dict[str, Iterator[float]] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)

    def change(self, script: Sequence[float]) -> None:
        """Use other factors from now on, for a test with one machine."""
        self.script, self._left = {"machine-a": script}, {}

    def factor(self, machine: str) -> float:
        self.measured.append(machine)
        factors = self._left.setdefault(machine, iter(self.script.get(machine, ())))
        self._last[machine] = next(factors, self._last.get(machine, 1.0))
        return self._last[machine]


class ScriptedKernels:
    """A session that times the kernels of one machine."""

    def __init__(
        self, machine: str, noise: Noise, seconds_of: Callable[[TimedKernel], float] = undisturbed_seconds
    ) -> None:
        self._machine = machine
        self._noise = noise
        self._seconds_of = seconds_of
        self._kernels: tuple[TimedKernel, ...] = ()

    def load(self, kernels: KernelSet, blob_path: Callable[[str], Path]) -> int:
        self._kernels = kernels.kernels
        return sum(kernel.size_bytes for kernel in self._kernels)

    def measure(self, effort: TimingEffort) -> tuple[KernelTime, ...]:
        factor = self._noise.factor(self._machine)
        return tuple(
            KernelTime(kernel.function, self._seconds_of(kernel) * factor, effort.minimum_rounds)
            for kernel in self._kernels
        )

    def close(self) -> None:
        pass

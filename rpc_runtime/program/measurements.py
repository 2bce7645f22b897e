"""What carries links, and the times of single kernels."""

from dataclasses import dataclass

from rpc_runtime.program.specs import BlobSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """The transport of a link, such as ``"grpc"`` or ``"shm"``; ``reason`` says why a faster one is not used."""

    source: str
    destination: str
    transport: str
    reason: str = ""


MAXIMUM_LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class TimedKernel:
    """A function of a library, which takes tensors and writes the last ``results`` of them.

    ``weights`` are the positions of the arguments that are weights. Each call gets other memory for them, as in a
    network, which reads all other weights before a kernel reads its own again.
    """

    function: str
    arguments: tuple[TensorSpec, ...]
    weights: frozenset[int]
    results: int

    @property
    def size_bytes(self) -> int:
        return sum(argument.size_bytes for argument in self.arguments)


@dataclass(frozen=True)
class KernelSet:
    """Kernels of one library for ``device`` (``"cpu"`` or ``"cuda"``), timed in turn in this order.

    ``weight_bytes`` is the size of all weights of the model. So many bytes are read before the same weights are used
    again, so that caches are as cold or warm as when the model runs. ``target`` is the library's target, for messages.
    """

    machine: str
    device: str
    library: BlobSpec
    kernels: tuple[TimedKernel, ...]
    weight_bytes: int
    target: str = ""


@dataclass(frozen=True)
class TimingEffort:
    """How long kernels are timed, in rounds of one call per kernel: at least both minima, at most the limit."""

    minimum_rounds: int = 7
    minimum_seconds: float = 0.5
    limit_seconds: float = 60.0


@dataclass(frozen=True)
class KernelTime:
    """Estimated seconds of a call without contention, from ``rounds`` calls; both numbers are 0 after an ``error``."""

    function: str
    seconds: float
    rounds: int
    error: str = ""

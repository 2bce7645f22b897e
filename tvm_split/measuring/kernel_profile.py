"""Where the time of a compiled model goes: every kernel by itself, beside what the machine can do at most."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvm_split.compiler.bundle import Bundle
from tvm_split.compiler.kernels import Kernel
from tvm_split.compiler.targets import runs_here
from tvm_split.compiler.verification import verification_inputs
from tvm_split.errors import ProfileError
from tvm_split.measuring.ceilings import Ceilings, measure_ceilings
from tvm_split.model import Model
from tvm_split.rpc_runtime.execution.in_process import InProcessPipeline
from tvm_split.rpc_runtime.execution.stage_executable import CallTime

ROUNDS = 10
WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class KernelProfile:
    """One call of a kernel: ``seconds`` is the median over the rounds."""

    stage: str
    kernel: Kernel
    seconds: float

    @property
    def operations_per_second(self) -> float:
        return self.kernel.operations / self.seconds


@dataclass(frozen=True)
class ModelProfile:
    """Every kernel of a model on one machine with ``threads`` threads, one input at a time.

    ``seconds`` is the median of whole runs without a look inside; the kernels' sum is larger by the calls back.
    """

    model: str
    threads: int
    seconds: float
    kernels: tuple[KernelProfile, ...]
    ceilings: Ceilings

    @property
    def kernel_seconds(self) -> float:
        return sum(each.seconds for each in self.kernels)

    @property
    def operations(self) -> float:
        return sum(each.kernel.operations for each in self.kernels)

    @property
    def slow_share(self) -> float:
        """The share of the time in kernels that no schedule of this project took."""
        slow = sum(each.seconds for each in self.kernels if each.kernel.is_slow)
        return slow / self.kernel_seconds if slow else 0.0  # a network that only passes values on has no kernel

    def share_of_peak(self, operations: float, seconds: float) -> float:
        """Of the measured multiply-add peak; over 1 where an algorithm needs fewer operations than the definition."""
        return operations / seconds / self.ceilings.operations_per_second


def profile(
    model: Model,
    bundle: Bundle,
    threads: int,
    *,
    rounds: int = ROUNDS,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> ModelProfile:
    """Run a bundle's stages in turn in this process and time each kernel; of a stage with replicas the first's.

    Raises:
        ProfileError: a stage is for another kind of machine than this, or there are no inputs to run the model on.
    """
    for stage in bundle.program.stages:
        target = bundle.plan.machine(stage.machine).target
        if not runs_here(target):
            raise ProfileError(
                f"{stage.name} is compiled for {dict(target)}, which this machine cannot run; profile it on its machine"
            )
    inputs = verification_inputs(model)
    if inputs is None:
        raise ProfileError(
            f"model {model.name!r} takes integers or booleans, for which random values may be out of range; give "
            "example inputs"
        )
    report = on_progress or (lambda what, done, steps: None)
    steps = WARM_UP_ROUNDS + rounds + 1
    report("measuring the machine", 0, steps)
    ceilings = measure_ceilings(threads)
    wholes: list[float] = []
    rounds_of_calls: list[dict[str, list[CallTime]]] = []
    with InProcessPipeline(bundle.program, bundle.blob_path, threads) as pipeline:
        for turn in range(WARM_UP_ROUNDS + rounds):
            report("timing kernels", turn + 1, steps)
            before = _compute_seconds(pipeline)
            pipeline.run(inputs)
            whole = _compute_seconds(pipeline) - before
            calls = pipeline.call_times(inputs)
            if turn >= WARM_UP_ROUNDS:
                wholes.append(whole)
                rounds_of_calls.append(calls)
    report("done", steps, steps)
    kernels = tuple(
        each
        for stage in bundle.program.stages
        if stage.replica == 0
        for each in _stage_profile(stage.name, bundle.kernels[stage.name], rounds_of_calls)
    )
    return ModelProfile(model.name, threads, statistics.median(wholes), kernels, ceilings)


def _compute_seconds(pipeline: InProcessPipeline) -> float:
    return sum(stage.compute_seconds for stage in pipeline.statistics())


def _stage_profile(
    stage: str, kernels: Sequence[Kernel], rounds: Sequence[Mapping[str, Sequence[CallTime]]]
) -> Iterator[KernelProfile]:
    """Median times of a stage's kernels; those that TVM turned into views when it built the library are not called."""
    called = [match_calls(kernels, calls[stage]) for calls in rounds]
    for position, kernel in enumerate(kernels):
        times = [found[position] for found in called if position in found]
        if times:
            yield KernelProfile(stage, kernel, statistics.median(times))


def match_calls(kernels: Sequence[Kernel], calls: Sequence[CallTime]) -> dict[int, float]:
    """Seconds by the kernel's position: calls come in the order of the kernels, other functions between them."""
    known = {kernel.function for kernel in kernels}
    found: dict[int, float] = {}
    position = 0
    for call in calls:
        if call.function not in known:
            continue
        while position < len(kernels) and kernels[position].function != call.function:
            position += 1
        if position < len(kernels):
            found[position] = call.nanoseconds / 1e9
            position += 1
    return found

"""Reports where the time of a compiled model goes: the time of every kernel, compared with the machine's peak."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rpc_runtime.execution.in_process import InProcessRunner
from rpc_runtime.execution.kernel_timer import undisturbed_seconds
from tvm_split.cluster.cluster import Cluster
from tvm_split.compiler.bundle import Bundle
from tvm_split.compiler.kernels import Kernel
from tvm_split.compiler.targets import runs_here
from tvm_split.compiler.tuning_folder import open_database
from tvm_split.compiler.verification import verification_inputs
from tvm_split.errors import ProfileError
from tvm_split.model import Model
from tvm_split.profiling.cluster_timing import CallSeconds, ClusterTiming
from tvm_split.profiling.kernels import target_code
from tvm_split.profiling.peaks import Ceilings
from tvm_split.shown import Shown
from tvm_split.steps import StepProgress, Steps

ROUNDS = 10
WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class KernelProfile:
    """Time of one kernel call."""

    kernel: Kernel
    seconds: float

    @property
    def operations_per_second(self) -> float:
        return self.kernel.operations / self.seconds


@dataclass(frozen=True, repr=False)
class ModelProfile(Shown):
    """Times of every kernel of a model on one machine with ``threads`` threads, one input at a time.

    ``seconds`` is the time of a whole run; ``untimed`` is the number of kernel calls that could not be timed.
    """

    model: str
    threads: int
    seconds: float
    kernels: tuple[KernelProfile, ...]
    untimed: int
    ceilings: Ceilings

    @property
    def kernel_seconds(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def other_seconds(self) -> float:
        """Seconds of a run besides the timed kernels: calls, checks, untimed kernels.

        Negative if the kernels, timed one by one, took longer than the whole.
        """
        return self.seconds - self.kernel_seconds

    def share_of_time(self, seconds: float) -> float:
        """Return the share of a run, or of all kernels if these took longer one by one."""
        return seconds / max(self.seconds, self.kernel_seconds)

    @property
    def operations(self) -> float:
        return sum(kernel.kernel.operations for kernel in self.kernels)

    @property
    def slow_share(self) -> float:
        """Share of the kernel time in kernels that no schedule of this project handles."""
        slow = sum(kernel.seconds for kernel in self.kernels if kernel.kernel.is_slow)
        return self.share_of_time(slow)

    def share_of_peak(self, operations: float, seconds: float) -> float:
        """Return the share of the measured multiply-add peak; over 1 if an algorithm saves operations."""
        return operations / seconds / self.ceilings.operations_per_second


def profile(
    model: Model,
    bundle: Bundle,
    threads: int,
    *,
    database: str | Path | None = None,
    rounds: int = ROUNDS,
    on_progress: StepProgress | None = None,
) -> ModelProfile:
    """Run a bundle of one stage in this process, and time each of the model's kernels, as planning does.

    Kernels that fail, or may not end on made-up values, are counted in ``untimed``.

    Args:
        database: the tuned kernels with which the bundle was compiled.

    Raises:
        ProfileError: the stage is compiled for another kind of machine, or the model has no inputs to run on.
    """
    (stage,) = bundle.program.stages
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
    steps = Steps(on_progress)
    steps.total = WARM_UP_ROUNDS + rounds
    wholes: list[float] = []
    with InProcessRunner(bundle.program, bundle.blob_path, threads) as pipeline:
        for _ in range(WARM_UP_ROUNDS + rounds):
            steps.begin("timing the whole")
            before = pipeline.statistics()[0].compute_seconds
            pipeline.run(inputs)
            wholes.append(pipeline.statistics()[0].compute_seconds - before)
    steps.done()
    timing = ClusterTiming(model.name, lambda _: target_code(model, target, open_database(database)))
    (times,) = timing.measure(Cluster.in_process(1, threads), refresh=True, on_progress=on_progress)
    calls = times.code.calls
    timed = [call for call in calls if call.digest in times.alone]
    return ModelProfile(
        model.name,
        threads,
        undisturbed_seconds([(seconds, seconds) for seconds in wholes[WARM_UP_ROUNDS:]]),
        tuple(KernelProfile(call.kernel, times.alone[call.digest].seconds) for call in timed),
        len(calls) - len(timed),
        CallSeconds(times).ceilings,
    )

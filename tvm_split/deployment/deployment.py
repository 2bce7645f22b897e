"""A bundle that runs: inputs in, outputs out, in order."""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from rpc_runtime.client.session import Session, TransferProgress
from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import TvmSplitError, WorkerError
from rpc_runtime.execution.in_process import InProcessRunner
from rpc_runtime.hardware import cpu_features
from rpc_runtime.processes import Closing
from rpc_runtime.program.codec import NONE, fitting
from rpc_runtime.program.inputs import checked_inputs
from rpc_runtime.program.measurements import LinkStatistics, StageStatistics, TraceEvent, now
from rpc_runtime.program.program import Program, StageSpec, weight_bytes
from rpc_runtime.program.runner import Runner
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import AUTO_CODEC
from tvm_split.compiler.bundle import Bundle, kernels_key
from tvm_split.compiler.cuda_code import CudaNeeds, cuda_misfit
from tvm_split.compiler.instruction_sets import require_executable
from tvm_split.compiler.targets import require_fit
from tvm_split.deployment.deployment_report import DeploymentReport, report_of
from tvm_split.deployment.run_times import RunTimes, StreamEvents
from tvm_split.errors import BundleError, ClusterError
from tvm_split.units import short_list

DEFAULT_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class DeploymentStatistics:
    """What a deployment has done since it was opened, per stage; ``blob_bytes_sent`` is what opening it sent.

    ``links`` says what carries each link: gRPC, or memory that both ends share. ``weight_bytes`` is by machine what its
    worker holds of weights, as it counted them when it had loaded its stages. ``gone`` are the machines that say
    nothing any more, when something has failed: their stages are missing.
    """

    stages: tuple[StageStatistics, ...]
    blob_bytes_sent: int
    links: tuple[LinkStatistics, ...] = ()
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    gone: tuple[str, ...] = ()


class Deployment(Closing):
    """A model that is loaded on its machines and waits for inputs. Made by `deploy`.

    Any number of threads may run and stream at the same time; each has its own results in its own order. Micro-batches
    go in turns: those of a stream that feeds many do not keep others waiting. When something fails, or this is closed,
    everybody who waits for a result gets the error.
    """

    def __init__(self, bundle: Bundle, cluster: Cluster, runner: Runner) -> None:
        self.bundle = bundle
        self._cluster = cluster
        self._runner = runner
        self._times = RunTimes()
        self._last: DeploymentStatistics | None = None
        self._closed = False

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages in topological order: ``.name``, ``.machine``, ``.layers``, ``.inputs``, ``.outputs`` …

        One with replicas has an entry for each, with the same name.
        """
        return self.bundle.program.stages

    @property
    def program(self) -> Program:
        return self.bundle.program

    def run(self, *inputs: Any) -> tuple[np.ndarray, ...]:
        """One micro-batch through the pipeline.

        Args:
            inputs: one array (numpy, torch, or whatever numpy can take without a change of dtype) per model input.

        Returns:
            The model's outputs, in its order.

        Raises:
            InputError: wrong number, shape or dtype of inputs.
            WorkerUnavailableError, StageError, DeadlineError: something failed on the way; names machine and stage.
        """
        with self._times.run():
            return self._runner.run(inputs)

    def submit(self, *inputs: Any) -> Future[tuple[np.ndarray, ...]]:
        """One micro-batch through the pipeline, in the background; the inputs are copied and may be used again.

        Returns:
            What `run` would return, or raise. It can be cancelled until it has begun.

        Raises:
            InputError: as `run`.
            WorkerError: the deployment is closed.
        """
        arrays = [array.copy() for array in checked_inputs(self.program, inputs)]
        return self._times.call(self._runner.submit(arrays))

    async def run_async(self, *inputs: Any) -> tuple[np.ndarray, ...]:
        """What `run` does, for coroutines; raises as it does."""
        return await asyncio.wrap_future(self.submit(*inputs))

    def stream(self, batches: Iterable[Any]) -> Iterator[tuple[np.ndarray, ...]]:
        """Many micro-batches, pipelined; results in the order of the inputs.

        Args:
            batches: any iterable of tuples of inputs (or bare arrays for a model of one input). It is read lazily, on a
                thread of its own, only as far ahead as the pipeline has room, so it may be endless.

        Raises: as `run`, at the result that failed; what ``batches`` raises comes out here too.
        """
        events = StreamEvents(now())
        fed = events.feeding(batch if isinstance(batch, tuple | list) else (batch,) for batch in batches)
        results = self._runner.stream(fed)
        return self._times.stream(cast(Generator[tuple[np.ndarray, ...], None, None], results), events)

    def stats(self) -> DeploymentStatistics:
        """Counts and seconds per stage, and per replica of a stage, since the deployment was opened.

        When something has failed, `run` and `stream` raise what, and these are the figures until then of the machines
        that still answer, beside the names of the others. Once it is closed these are the last figures, which `close`
        asks for.
        """
        if not self._closed:
            stages = self._runner.last_statistics()
            answered = {stage.machine for stage in stages}
            self._last = DeploymentStatistics(
                stages,
                self._runner.blob_bytes_sent,
                self._runner.links(),
                self._runner.weight_bytes,
                tuple(machine for machine in self.program.machines if machine not in answered),
            )
        elif self._last is None:
            raise WorkerError("the workers of this deployment could not be asked for their figures when it was closed")
        return self._last

    def trace(self) -> tuple[TraceEvent, ...]:
        """When each stage received, computed and sent its latest micro-batches, on this process's monotonic clock.

        Raises:
            WorkerUnavailableError, StageError, DeadlineError: something has failed, and this is what.
            WorkerError: the deployment is closed, and its workers have let go of it.
        """
        if self._closed:
            raise WorkerError(
                "this deployment is closed, and its workers keep no trace of what they did: call trace() or report() "
                "before close(), inside of the `with`"
            )
        return self._runner.trace()

    def report(self, since: int = 0) -> DeploymentReport:
        """What the plan predicts beside what was measured, for every machine, link and the whole, and what to do.

        Throughput is measured by `stream` and latency by `run`, as far as they were used. ``since`` leaves out what
        began before it, a moment in nanoseconds of `time.monotonic_ns`. Raises as `trace`.
        """
        trace = self.trace()
        carried = {(link.source, link.destination): link.transport for link in self._runner.links()}
        return report_of(self.bundle.plan, self.program, trace, self._times.measured(since), carried)

    def close(self) -> None:
        """Unload the stages; end the worker processes that were started for this deployment."""
        if not self._closed:
            with contextlib.suppress(TvmSplitError):
                self.stats()
            self._closed = True
            try:
                self._runner.close()
            finally:
                self._cluster.release()


def deploy(
    bundle: Bundle,
    cluster: Cluster,
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    on_transfer: TransferProgress | None = None,
    in_flight: int | None = None,
) -> Deployment:
    """Bring a bundle's stages to the machines of a cluster and connect them.

    Args:
        timeout_seconds: limits every wait: for a worker to answer, and for the next result to come.
        on_transfer: called while libraries and weights are sent, with machine, bytes sent, of bytes.
        in_flight: so many micro-batches of a stream are under way at most: the fewer, the earlier each result comes
            after its input, until machines have to wait. By default as many as the queues between stages hold; for a
            plan for latency that rests on measurements, what it says (``prediction.in_flight``). In one process there
            is never more than one.

    Raises:
        ClusterError: the bundle needs a machine that the cluster does not have, or one that cannot run its stages; or a
            worker is not the one that is meant, or computes with fewer threads than were planned for.
        WorkerUnavailableError: a worker cannot be reached; names machine, address and stages.
    """
    for machine in bundle.program.machines:
        if machine not in cluster.machine_names:
            raise ClusterError(
                f"the bundle has stages for machine {machine!r}; the cluster has {short_list(cluster.machine_names)}"
            )
    if cluster.launcher.in_process:
        _require_runnable_here(bundle)
        threads = max(machine.threads for machine in cluster.machines)
        return Deployment(bundle, cluster, InProcessRunner(bundle.program, bundle.blob_path, threads))
    _check_codecs(bundle.program, cluster)
    with contextlib.ExitStack() as undo:
        undo.callback(cluster.release)
        endpoints = {name: cluster.endpoints()[name] for name in bundle.program.machines}
        _check_workers(bundle, cluster, endpoints, timeout_seconds)
        pipeline = Session.open(
            bundle.program,
            endpoints,
            bundle.blob_path,
            timeout_seconds=timeout_seconds,
            on_transfer=on_transfer,
            links=cluster.link_settings,
            in_flight=bundle.plan.in_flight if in_flight is None else in_flight,
        )
        undo.pop_all()
    return Deployment(bundle, cluster, pipeline)


def _check_codecs(program: Program, cluster: Cluster) -> None:
    """A bundle keeps the codecs that it was planned with; a cluster that names others asks for another plan."""
    for route in program.routes:
        link = cluster.link(route.source, route.destination)
        if link is None or link.codec in (AUTO_CODEC, NONE):
            continue
        wanted = fitting(link.codec, route.tensor)
        if wanted != route.codec:
            raise ClusterError(
                f"the link from {link.source!r} to {link.destination!r} has codec {link.codec!r}, which would write "
                f"tensor {route.tensor.name!r} as {wanted}, and the bundle was planned with {route.codec}: plan and "
                "compile for this cluster, or take the codec out of it"
            )


def _require_runnable_here(bundle: Bundle) -> None:
    for stage in bundle.program.stages:
        target = bundle.plan.machine(stage.machine).target
        if target["kind"] != "llvm":
            raise ClusterError(
                f"{stage.name} is compiled for {dict(target)}; an in-process cluster runs CPU stages only"
            )
        require_executable(stage.name, stage.machine, target, platform.machine(), cpu_features())


def _check_workers(
    bundle: Bundle, cluster: Cluster, endpoints: Mapping[str, WorkerEndpoint], timeout_seconds: float
) -> None:
    """Compare what each worker says of itself with what the bundle needs, before anything is sent."""
    for name, endpoint in endpoints.items():
        worker = describe(endpoint, timeout_seconds=timeout_seconds)
        stages = bundle.program.stages_on(name)
        named = ", ".join(stage.name for stage in stages)
        planned = bundle.plan.machine(name)
        if not cluster.launcher.on_this_host:
            require_fit(cluster.machine(name), worker)
            if planned.threads > worker.threads:
                raise ClusterError(
                    f"the bundle was planned for {planned.threads} threads of {name!r}, and its worker at "
                    f"{endpoint.address} computes with {worker.threads}; start it with --threads {planned.threads}, or "
                    f"plan and compile for threads: {worker.threads}"
                )
        versions = {"apache-tvm": worker.tvm_version, "apache-tvm-ffi": worker.tvm_ffi_version}
        for package, wanted in bundle.versions.items():
            found = versions.get(package, "unknown")
            if found != wanted:
                raise BundleError(
                    f"the bundle was compiled with {package} {wanted}, the worker of {name!r} at {endpoint.address} "
                    f"has {found}; install the same version on both, or compile again"
                )
        require_executable(named, name, planned.target, worker.architecture, worker.cpu_features)
        for stage in (each for each in stages if each.device == "cuda"):
            needs = bundle.cuda.get(kernels_key(stage), CudaNeeds(str(planned.target["arch"]), None))
            problem = cuda_misfit(needs, worker)
            if problem:
                raise ClusterError(
                    f"{stage.name} on {name!r} is compiled for CUDA, and the worker at {endpoint.address} {problem}. "
                    "Or plan the stage for another machine, or give this one an llvm target"
                )
        limit = cluster.machine(name).memory_bytes
        needed = weight_bytes(stages)
        if limit is not None and needed > limit:
            raise ClusterError(
                f"{name!r} needs {needed / 1e9:.3f} GB for the weights of {named}, but has {limit / 1e9:.3f} GB; "
                "move layers to another machine"
            )

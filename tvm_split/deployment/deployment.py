"""Deploy a bundle on a cluster, and run inputs through it in order."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rpc_runtime.client.deployment_event import DeploymentEvent, placement_of
from rpc_runtime.client.opening import TransferProgress
from rpc_runtime.client.session import LAST_WORD_SECONDS, Session
from rpc_runtime.errors import InputError, TvmSplitError, WorkerError
from rpc_runtime.execution.in_process import InProcessRunner
from rpc_runtime.option import takes_options
from rpc_runtime.processes import Closing
from rpc_runtime.program.events import StageStatistics
from rpc_runtime.program.measurements import LinkStatistics
from rpc_runtime.program.program import Program
from rpc_runtime.program.runner import Outputs, Runner
from rpc_runtime.program.specs import StageSpec
from rpc_runtime.wire.addresses import Address
from tvm_split.arguments import BundleLike, ClusterLike, as_bundle, as_cluster, inputs_of_batch, inputs_of_call
from tvm_split.cluster.cluster import Workers
from tvm_split.compiler.bundle import Bundle
from tvm_split.deployment.batch import Batch
from tvm_split.deployment.checks import check_machines, check_runnable_here, check_same_model
from tvm_split.deployment.deployment_report import DeploymentReport, report_of
from tvm_split.deployment.opening import opening_of
from tvm_split.deployment.options import DeployOptions
from tvm_split.deployment.recovery import EventLog
from tvm_split.deployment.run_times import StreamEvents
from tvm_split.observing.about import About, about_of
from tvm_split.observing.recording import Recording
from tvm_split.observing.trace import Trace, trace_of, writer_for
from tvm_split.parameters import Natural, fitting
from tvm_split.units import Shown

if TYPE_CHECKING:
    from rpc_runtime.wire.http_server import HttpServer


@dataclass(frozen=True, repr=False)
class DeploymentStatistics(Shown):
    """Statistics of a deployment since it was opened, per stage; ``blob_bytes_sent`` counts bytes sent by opening it.

    The stages are on these machines since ``placed``; what others computed of them before is not counted. ``links`` has
    the transport of each link: gRPC, or memory that both ends share. ``weight_bytes`` has, by machine, the bytes of
    weights that its worker counted after loading its stages. ``gone`` has the machines that do not answer, each with
    the names of its stages, whose statistics are missing.
    """

    stages: tuple[StageStatistics, ...]
    blob_bytes_sent: int
    links: tuple[LinkStatistics, ...] = ()
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    gone: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    placed: datetime | None = None


class Deployment(Closing, Shown):
    """A model that is loaded on its machines and ready for inputs. `deploy` creates it.

    Any number of threads may run and stream at the same time; each gets its own results in its own order.
    Micro-batches of different callers alternate, so a long stream does not block others. When something fails, or the
    deployment is closed, every caller that waits for a result gets the error.
    """

    def __init__(self, bundle: Bundle, workers: Workers, runner: Runner, log: EventLog, options: DeployOptions) -> None:
        self.bundle = bundle
        self._options = options
        self._log = log
        self._workers = workers
        self._runner = runner
        self._times, self._name = log.times, runner.name
        self._last: DeploymentStatistics | None = None
        self._until_closed = contextlib.ExitStack()
        self._recordings: set[Recording] = set()
        self.is_closed = False

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages in topological order: ``.name``, ``.machine``, ``.layers``, ``.inputs``, ``.outputs`` …

        A stage with replicas has an entry for each of them, with the same name.
        """
        return self.program.stages

    @property
    def program(self) -> Program:
        """The stages as they are placed now."""
        return self._runner.program

    @property
    def placement(self) -> Mapping[str, tuple[str, ...]]:
        """The machines of each stage, as they are now: several for a stage with replicas."""
        return placement_of(self.program)

    @property
    def events(self) -> tuple[DeploymentEvent, ...]:
        """What happened to the deployment, the latest 1,000 events; their ``kind`` says what."""
        return self._log.events

    def _about(self) -> About:
        return about_of(self.bundle, self.program)

    def run(self, *inputs: Any, **named: Any) -> Outputs:
        """Run inputs through the pipeline; another number of rows than was compiled is cut into micro-batches.

        Args:
            inputs: one array per model input: numpy, torch, or anything that numpy converts without changing the dtype;
                or a dict of all inputs by name.
            named: inputs by name.

        Returns:
            The model's outputs, in its order and by name.

        Raises:
            InputError: wrong number, shape or dtype of inputs, or rows that mix.
            WorkerUnavailableError, StageError, DeadlineError: a failure in the pipeline; names machine and stage.
        """
        outputs = self._outputs_of(self._batch(inputs_of_call(self.program.inputs, inputs, named)))
        self._log.warn()
        return outputs

    def _batch(self, inputs: Sequence[Any]) -> Batch:
        return Batch(self.program.inputs, self.bundle.rows, inputs)

    def _outputs_of(self, batch: Batch) -> Outputs:
        if batch.micro_batches > 1:
            (outputs,) = self._joined(iter([batch]))
            return outputs
        with self._times.run():
            return cast(Outputs, batch.join(self._runner.run(next(iter(batch)))))

    def submit(self, *inputs: Any, **named: Any) -> Future[Outputs]:
        """`run` in the background; the inputs are copied, so the caller may reuse them.

        Returns:
            A future with the result, or the error, of `run`. It can be cancelled until the run has begun.

        Raises:
            InputError: as `run`.
            WorkerError: the deployment is closed.
        """
        batch = self._batch(inputs_of_call(self.program.inputs, inputs, named))
        batch.inputs = tuple(array.copy() for array in batch.inputs)
        if batch.is_whole:
            return self._times.call(self._runner.submit(batch.inputs))
        self._runner.require_usable()
        thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
        future = thread.submit(self._outputs_of, batch)
        thread.shutdown(wait=False)
        return future

    async def run_async(self, *inputs: Any, **named: Any) -> Outputs:
        """`run` for coroutines; returns and raises as `run`."""
        outputs = await asyncio.wrap_future(self.submit(*inputs, **named))
        self._log.warn()
        return outputs

    def stream(self, batches: Iterable[Any]) -> Iterator[Outputs]:
        """Run many inputs, pipelined; yields results in the order of the inputs.

        Args:
            batches: any iterable of tuples of inputs, dicts by name, or bare arrays for a model of one input, each with
                as many rows as it likes, as for `run`. It is read lazily, on a thread of its own, only as far ahead as
                the pipeline has room, so it may be endless.

        Raises: as `run`, at the result that failed; errors that ``batches`` raises are raised here too.
        """
        try:
            iterator = iter(batches)
        except TypeError as error:
            raise InputError(f"a stream takes an iterable of micro-batches, such as [(x,), (x,)]: {error}") from error
        return self._warning(self._joined(self._checked(iterator)))

    def _joined(self, batches: Iterator[Batch]) -> Generator[Outputs, None, None]:
        """Yield the results of batches, whose micro-batches are one stream."""
        fed: deque[Batch] = deque()

        def micro_batches() -> Iterator[Sequence[Any]]:
            for batch in batches:
                fed.append(batch)
                yield from batch
                batch.inputs = ()  # results may take long

        events = StreamEvents()
        stream = self._runner.stream(events.feeding(micro_batches()))
        with contextlib.closing(self._times.stream(cast(Generator[Outputs, None, None], stream), events)) as results:
            for result in results:
                if (joined := fed[0].join(result)) is not None:
                    fed.popleft()
                    yield joined

    def _warning(self, results: Generator[Outputs, None, None]) -> Iterator[Outputs]:
        """Yield results; warn of recoveries before the next one."""
        with contextlib.closing(results):
            for result in results:
                self._log.warn()
                yield result

    def _checked(self, batches: Iterator[Any]) -> Iterator[Batch]:
        """Yield the batches of a stream; an `InputError` names the position in the stream."""
        for position, inputs in enumerate(batches):
            try:
                batch = self._batch(inputs_of_batch(self.program.inputs, inputs))
            except InputError as error:
                raise InputError(f"micro-batch {position} of the stream: {error}") from error
            yield batch

    def stats(self) -> DeploymentStatistics:
        """Counts and seconds per stage, and per replica of a stage, since the deployment was opened.

        After a failure (the error itself comes from `run` and `stream`), these are the statistics of the machines that
        still answer, and the names of the others. After `close`, they are the last statistics, which `close` requests.

        Raises:
            WorkerError: the deployment is closed, and the workers did not answer when it was.
        """
        return self._statistics()

    def _statistics(self, timeout_seconds: float | None = None) -> DeploymentStatistics:
        if not self.is_closed:
            runner, program = self._runner, self.program
            stages = runner.statistics(timeout_seconds)
            lost = {*program.machines} - {stage.machine for stage in stages}
            gone = {machine: tuple(stage.name for stage in program.stages_on(machine)) for machine in sorted(lost)}
            sent, links, weights = runner.blob_bytes_sent, runner.links(), runner.weight_bytes
            self._last = DeploymentStatistics(stages, sent, links, weights, gone, self._log.placed)
        elif self._last is None:
            raise WorkerError("the workers of this deployment sent no statistics when it was closed")
        return self._last

    def trace(self, path: str | Path | None = None) -> Trace:
        """Return what machines and client did with the latest micro-batches; write it to ``path`` too.

        Printing the trace shows how long each machine computed, waited and was blocked, and what limits. Iterating
        yields its events, with times in nanoseconds of this process's monotonic clock. After a failure, these are the
        events of the machines that still answer.

        Args:
            path: its suffix says in which form: ``.json``, ``.pftrace`` for Perfetto, ``.xplane`` (a folder) for
                TensorBoard, ``.svg``.

        Raises:
            TraceError: the path has another suffix.
            OutputError: the path cannot be written.
            WorkerError: the deployment is closed, and its workers no longer have the trace.
        """
        if self.is_closed:
            raise WorkerError(
                "this deployment is closed, and its workers keep no trace of what they did: call trace() or report() "
                "before close(), inside of the `with`"
            )
        if path is not None:
            writer_for(path)
        trace = trace_of(self.bundle.model, self._runner.observe({}), self._runner.clocks(), self._about())
        if path is not None:
            trace.save(path)
        return trace

    @contextlib.contextmanager
    def tracing(self, path: str | Path | None = None, *, kernels: Natural = 0) -> Iterator[Recording]:
        """Record all events from here to the end of the ``with``, and write them to ``path``; ``.trace`` has them.

        Of each stage's first ``kernels`` micro-batches, every kernel is an event too; each of these takes a little
        longer, on a GPU much longer. Raises as `trace`.
        """
        if path is not None:
            writer_for(path)
        kernels = fitting(Deployment.tracing, "kernels", kernels)
        recording = Recording(self.bundle.model, self._runner, self._about, kernels)
        recording.start()
        self._recordings.add(recording)
        try:
            yield recording
        finally:
            recording.stop()
            self._recordings.discard(recording)
            if path is not None:
                recording.trace.save(path)

    def serve_metrics(self, listen: str = "127.0.0.1:0") -> "HttpServer":
        """Serve metrics of all machines for Prometheus, until the returned server, or the deployment, is closed.

        The server has ``url`` and ``address`` (port 0: any free one). There is no token: on an address that other
        machines reach, they learn the names of the model and its layers.

        Raises:
            WorkerError: nothing can listen at this address.
        """
        from rpc_runtime.wire.metrics_server import metrics_server  # imported here: few deployments serve metrics
        from tvm_split.observing.metrics import deployment_metrics

        def periods() -> dict[str, float | None]:
            return {"predicted": self._about().period_seconds, "measured": self._times.measured().period_seconds}

        about = self.bundle.model, self._name, self.bundle.program.machines
        server = metrics_server(Address.parse(listen), lambda: deployment_metrics(*about, self._runner, periods))
        self._until_closed.callback(server.close)
        return server

    def dashboard(self, listen: str = "127.0.0.1:0") -> "HttpServer":
        """Serve a page that shows what this deployment does, until the returned server, or the deployment, is closed.

        The server has the ``url`` to open in a browser, on this host: there is no token.

        Raises:
            InputError: other machines can reach this address; look through ssh instead.
            TraceError: plotly, which draws the charts, is missing.
            WorkerError: nothing can listen at this address.
        """
        from tvm_split.dashboard.live import LivePage  # imported here: few deployments are looked at
        from tvm_split.dashboard.page import page_server
        from tvm_split.dashboard.state import FAILED, RECOVERING

        def trouble() -> tuple[str, str]:
            try:
                self._runner.require_usable()
            except TvmSplitError as error:
                return FAILED, str(error)
            events = self.events
            return (RECOVERING, events[-1].text) if events and events[-1].kind == "failure" else ("", "")

        endpoints = {} if self._workers.launcher.in_process else self._workers.endpoints()
        live = LivePage(self.bundle.model, self._runner, self._about, endpoints, trouble)
        server = page_server(listen, live.page)
        self._until_closed.callback(server.close)
        return server

    def report(self, since: int = 0) -> DeploymentReport:
        """Compare prediction and measurement for every machine, every link and the whole deployment, with advice.

        Throughput is measured by `stream` and latency by `run`, if they were used. Runs and streams that began before
        ``since``, in nanoseconds of `time.monotonic_ns`, are left out. After stages were moved, the report counts from
        then on and has no prediction, which was for another placement. Raises as `trace`, and the error of a deployment
        that has failed.
        """
        trace = self.trace()
        self._runner.require_usable()
        carried = {(link.source, link.destination): link.transport for link in self._runner.links()}
        program, moved = self.program, f"since {self._log.placed.astimezone():%H:%M:%S} stages are not where planned"
        moved = "" if program == self.bundle.program else moved
        return report_of(self.bundle.plan, program, trace, self._times.measured(since), carried, moved)

    def move(self, bundle: BundleLike) -> None:
        """Change to another plan of the same model, also while inputs are streamed: each result comes once, in order.

        The new stages are loaded while the old ones compute; inputs wait only for the change itself. After an error,
        the deployment runs on as before.

        Raises:
            BundleError: the bundle is of another model.
            InputError: the stages run in this process.
            ClusterError, WorkerUnavailableError: as `deploy`.
        """
        self._runner.require_usable()
        if not isinstance(self._runner, Session):
            raise InputError("stages in this process cannot be moved: close the deployment, and deploy the bundle")
        bundle = as_bundle(bundle)
        check_same_model(self.bundle, bundle)
        check_machines(bundle.program, self._workers)
        on_transfer = self._runner.opening.on_transfer
        self._runner.move(opening_of(bundle, self._workers, self._options, on_transfer, is_move=True))
        self.bundle = bundle

    def close(self) -> None:
        """Unload the stages; end the worker processes that were started for this deployment."""
        if not self.is_closed:
            with contextlib.suppress(TvmSplitError):
                self._statistics(LAST_WORD_SECONDS)
            self.is_closed = True
            self._runner.happened("closed")
            for recording in tuple(self._recordings):
                recording.stop()
            self._until_closed.close()
            try:
                self._runner.close()
            finally:
                self._workers.close()
                self._log.close()


@takes_options(DeployOptions)
def deploy(
    bundle: BundleLike, cluster: ClusterLike, *, on_transfer: TransferProgress | None = None, **options: Any
) -> Deployment:
    """Load a bundle's stages on the machines of a cluster and connect them.

    Args:
        bundle: what `compile` returned, or the folder in which it was saved.
        cluster: the machines, a session of their workers, or a location as for `Cluster.at`. Workers that a plain
            cluster starts end with the deployment.
        on_transfer: called while libraries and weights are sent, with machine, bytes sent, and total bytes.
        options: fields of `DeployOptions`, which says more about them.

    Raises:
        ClusterError: the bundle needs a machine that the cluster does not have, or one that cannot run its stages; or a
            worker is not the planned one, or computes with fewer threads than were planned for.
        BundleError: a worker has another version of TVM than the one with which the bundle was compiled.
        WorkerUnavailableError: a worker cannot be reached; names machine, address and stages.
    """
    wanted, bundle = DeployOptions(**options), as_bundle(bundle)
    workers = as_cluster(cluster).with_standby(wanted.standby, bundle.program.machines).start()
    return deploy_on(workers, bundle, wanted, on_transfer)


def deploy_on(
    workers: Workers, bundle: Bundle, options: DeployOptions, on_transfer: TransferProgress | None = None
) -> Deployment:
    """`deploy` on a session of workers, which the deployment then owns; the session is closed if this fails."""
    program = bundle.program
    with contextlib.ExitStack() as undo:
        undo.enter_context(workers)
        check_machines(program, workers)
        log = EventLog(options.events)
        undo.callback(log.close)
        runner: Runner
        if workers.launcher.in_process:
            check_runnable_here(bundle)
            runner = InProcessRunner(program, bundle.blob_path, max(machine.threads for machine in workers.machines))
        else:
            runner = Session(opening_of(bundle, workers, options, on_transfer), log.add)
        undo.pop_all()
    return Deployment(bundle, workers, runner, log, options)

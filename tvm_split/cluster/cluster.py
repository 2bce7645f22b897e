"""A cluster: the machines that a model is split over, and the links between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from rpc_runtime.scratch import ScratchFolder
from rpc_runtime.transports.transport import LinkSetting, memory_of
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TlsFiles
from rpc_runtime.wire.tracker import TrackerAddress
from tvm_split.cluster.launcher import Launcher, Started, launcher_at, make_launcher
from tvm_split.cluster.machine import Link, Machine, faults
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.errors import ClusterError
from tvm_split.units import short_list


@dataclass
class Cluster:
    """The machines that a model may be split over.

    Make one with `at`, `local`, `in_process`, `from_yaml`, `from_tracker`, `from_kubernetes` or `from_ray`: each calls
    a launcher's `find`. A local cluster starts its worker processes when they are first needed. As a context manager it
    keeps them between deployments; otherwise the deployment that started them ends them.

    Empty ``links``: all links are measured. Otherwise every pair of machines needs a link. A link counts in both
    directions unless its reverse is listed too; its address counts in its own direction only. ``shared_cores`` states
    which machines compute on the same cores; for the other machines, their workers report it. ``launcher`` starts the
    workers; by default they already run at the machines' addresses. ``left_out`` maps the names of machines that were
    found but are not part of the cluster to the reasons.
    """

    machines: tuple[Machine, ...]
    links: tuple[Link, ...] = ()
    shared_cores: tuple[SharedCores, ...] = ()
    launcher: Launcher = field(default_factory=partial(make_launcher, "at"))
    left_out: Mapping[str, str] = field(default_factory=dict, compare=False)
    is_busy: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether this process needs a core of its own while workers start."""
    _started: Started | None = field(default=None, init=False, repr=False, compare=False)
    _cache: ScratchFolder | None = field(default=None, init=False, repr=False, compare=False)
    _keep_workers: bool = field(default=False, init=False, repr=False, compare=False)
    _by_ends: dict[tuple[str, str], Link] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.machines:
            raise ClusterError("a cluster needs at least one machine")
        for fault in faults(self.machines, self.links or None, self.shared_cores):
            raise ClusterError(fault.text)
        given = {(link.source, link.destination) for link in self.links}
        self.links += tuple(
            replace(link, source=link.destination, destination=link.source, address=None)
            for link in self.links
            if (link.destination, link.source) not in given
        )
        self._by_ends = {(link.source, link.destination): link for link in self.links}

    @classmethod
    def at(cls, location: str | Path) -> Cluster:
        """Return the cluster of a location: a YAML file, or ``NAME[:ARGUMENT][?FIELD=VALUE&…]``, NAME being a launcher.

        ``local:3?threads=2``, ``in-process``, ``tracker:lab:9190?key=box``, ``kubernetes:app=worker?namespace=lab``,
        ``ray:lab:6379?workers=3``, ``at:10.0.0.7:7001``.

        Raises:
            ClusterError: there is no such launcher, a parameter does not fit, or no machine is found.
            WorkerUnavailableError, DeadlineError, ProtocolError: the service that lists the machines does not answer,
                or answers wrongly.
        """
        return launcher_at(str(location)).find()

    @classmethod
    def local(cls, workers: int = 2, threads: int = 1) -> Cluster:
        """Return a cluster of worker processes on this host: ``machine-a``, …, with ``threads`` cores each."""
        return make_launcher("local", workers=workers, threads=threads).find()

    @classmethod
    def in_process(cls, machines: int = 1, threads: int | None = None) -> Cluster:
        """Return a cluster without processes and RPC: the stages are called one after the other in this process.

        ``threads`` is the number of threads that each kernel may use; all usable cores by default.
        """
        return make_launcher("in-process", machines=machines, threads=threads).find()

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """Return the machines in a file, whose workers run already; see `tvm_split.cluster.cluster_file`."""
        return make_launcher("file", path=Path(path)).find()

    @classmethod
    def from_tracker(
        cls,
        host: str,
        port: int,
        key: str | None = None,
        *,
        token: str | None = None,
        tls: TlsFiles | None = None,
        timeout_seconds: float = 5.0,
    ) -> Cluster:
        """Return the workers that a TVM RPC tracker lists now, under one key or all, and that answer.

        Servers that cannot be deployed to are left out, with the reason: machines on which kernels are being tuned,
        TVM's own RPC servers, and workers that do not answer. ``token`` and ``tls`` are the same for all workers; a
        token needs ``tls``. ``timeout_seconds`` applies to the tracker and to each worker.

        Raises:
            ClusterError: no machine is found, or two of them have the same name.
            InputError: a token is given without TLS.
            WorkerUnavailableError, DeadlineError, ProtocolError: the tracker cannot be reached, does not answer, or is
                not a tracker.
        """
        access = {"token": token, "tls": tls, "timeout_seconds": timeout_seconds}
        return make_launcher("tracker", address=str(TrackerAddress(host, port)), key=key, **access).find()

    @classmethod
    def from_kubernetes(
        cls,
        selector: str = "app.kubernetes.io/name=tvm-split",
        *,
        namespace: str | None = None,
        token: str | None = None,
        tls: TlsFiles | None = None,
        timeout_seconds: float = 5.0,
    ) -> Cluster:
        """Return the workers of the pods with these labels that are ready now, as listed by ``kubectl``.

        Machines have the names of their pods. The default namespace is that of kubectl's context. ``token`` and ``tls``
        are the same for all workers. The pods are called directly, so this works only inside the Kubernetes cluster.

        Raises:
            ClusterError: there is no such pod.
            WorkerUnavailableError, DeadlineError, ProtocolError: kubectl is missing or fails, does not answer, or its
                answer is no list of pods.
        """
        access = {"token": token, "tls": tls, "timeout_seconds": timeout_seconds}
        return make_launcher("kubernetes", selector=selector, namespace=namespace, **access).find()

    @classmethod
    def from_ray(
        cls,
        address: str | None = None,
        *,
        workers: int = 2,
        threads: int = 1,
        resources: Mapping[str, float] | None = None,
        strategy: str = "SPREAD",
        timeout_seconds: float = 60.0,
    ) -> Cluster:
        """Return workers that Ray places on its nodes: ``machine-a``, ``machine-b``, …, each with ``threads`` CPUs.

        They end with `close` (the cluster is a context manager) or with this process. Ray restarts a worker that dies.

        Args:
            address: HOST:PORT of Ray's head; by default the Ray that this process is connected to, otherwise one that
                runs on this host.
            resources: further resources of each worker: ``{"GPU": 1, "memory": 1e9}`` (bytes), or custom resources of
                nodes. ``CPU`` overrides ``threads``; ``num_cpus`` and ``num_gpus`` are accepted as well.
            strategy: the placement group's: ``SPREAD``, ``STRICT_SPREAD``, ``PACK`` or ``STRICT_PACK``.

        Raises:
            ClusterError: Ray is not installed in this Python, or a number or resource is invalid.
            WorkerUnavailableError: no Ray runs there, or a worker does not start.
            DeadlineError: Ray's nodes lack the resources for this number of workers.
        """
        cluster = make_launcher(
            "ray",
            address=address,
            workers=workers,
            threads=threads,
            resources={} if resources is None else resources,
            strategy=strategy,
            timeout_seconds=timeout_seconds,
        ).find()
        cluster.endpoints()
        return cluster

    @property
    def machine_names(self) -> tuple[str, ...]:
        return tuple(machine.name for machine in self.machines)

    def machine(self, name: str) -> Machine:
        for machine in self.machines:
            if machine.name == name:
                return machine
        reasons = "".join(f"\n  left out: {other}, {reason}" for other, reason in self.left_out.items())
        raise ClusterError(f"no machine is named {name!r}; the cluster has {short_list(self.machine_names)}{reasons}")

    def link(self, source: str, destination: str) -> Link | None:
        """Return the description of a link; None if the cluster has none."""
        return self._by_ends.get((source, destination))

    def transport_between_gpus(self, source: str, destination: str) -> str:
        """Return the transport requested for a link from GPU to GPU; empty if none was requested."""
        given = self.link(source, destination)
        return given.transport if given is not None and memory_of(given.transport) == "device" else ""

    @property
    def link_settings(self) -> dict[tuple[str, str], LinkSetting]:
        """Map (source, destination) to the setting with which that link is opened."""
        return {(link.source, link.destination): LinkSetting(link.address, link.transport) for link in self.links}

    def endpoints(self) -> dict[str, WorkerEndpoint]:
        """Return the workers' endpoints by machine; start the workers that do not run yet."""
        if self._started is None:
            self._started = self.launcher.start(self)
        return dict(self._started.endpoints())

    @property
    def blob_folder(self) -> Path:
        """A folder for blobs that outlives workers: a later deployment on this cluster sends only new blobs."""
        if self._cache is None:
            self._cache = ScratchFolder("cache")
        return self._cache.path / "blobs"

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Start the workers of a local cluster in the background; on exit, wait for them or raise why they failed.

        An error raised inside the context takes precedence. Other clusters have nothing to start.
        """
        if not self._starts_processes or self._started is not None:
            yield
            return
        self.is_busy = True
        with ThreadPoolExecutor(1, thread_name_prefix="workers") as thread:
            started = thread.submit(self.endpoints)
            try:
                yield
            finally:
                self.is_busy = False
        started.result()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Make `release` do nothing inside this context, so that several steps can use the same local workers.

        The workers still run afterwards, until the next `release`; if an error is raised, they end.
        """
        before = self._keep_workers
        self._keep_workers = True
        try:
            yield
        except BaseException:
            self._keep_workers = before
            self.release()
            raise
        self._keep_workers = before

    def release(self) -> None:
        """End the workers started on this host for a deployment that has ended, unless `kept` is active."""
        if self._starts_processes and not self._keep_workers:
            self._end_workers()

    def close(self) -> None:
        """End this cluster's own workers and remove their caches; workers started elsewhere keep running."""
        self._end_workers()
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    @property
    def _starts_processes(self) -> bool:
        return self.launcher.on_this_host and not self.launcher.in_process

    def _end_workers(self) -> None:
        if self._started is not None:
            self._started.close()
            self._started = None

    def __enter__(self) -> Cluster:
        self._keep_workers = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keep_workers = False
        self.close()

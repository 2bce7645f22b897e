"""Machines and the links between them: what a model is split over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from types import TracebackType
from typing import Literal

from rpc_runtime.client.local_workers import LocalWorkers, beside_this_thread, most_at_once
from rpc_runtime.hardware import own_cores
from rpc_runtime.program.link_setting import LinkSetting, Transport
from rpc_runtime.scratch import ScratchFolder
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TlsFiles
from rpc_runtime.wire.tracker import TrackerAddress
from tvm_split.cluster.asked import planned_machines
from tvm_split.cluster.cluster_file import read_cluster_file
from tvm_split.cluster.machine import Link, Machine, faults
from tvm_split.cluster.pods import pod_machines
from tvm_split.cluster.ray_workers import RayWorkers
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.cluster.tracked import tracked_machines
from tvm_split.errors import ClusterError
from tvm_split.units import short_list

ClusterKind = Literal["local", "remote", "in_process"]
MOST_ON_THIS_HOST = 26 + 26 * 26
"""Machines with one or two letters."""


@dataclass
class Cluster:
    """The machines that a model may be split over.

    Make one with `local`, `in_process`, `from_yaml`, `from_tracker`, `from_kubernetes` or `from_ray`. A local cluster
    starts its worker processes when they are first needed; used as a context manager it keeps them between deployments,
    otherwise the deployment that started them ends them.

    ``links`` is empty where all are to be measured. Else each counts in both directions unless its reverse is given as
    well (an address in its own only), and every pair of machines needs one. ``shared_cores`` says which machines
    compute on the same cores, where that is to be said: of workers it is found out. ``left_out`` says why machines that
    were found are not in it, by their names.
    """

    kind: ClusterKind
    machines: tuple[Machine, ...]
    links: tuple[Link, ...] = ()
    shared_cores: tuple[SharedCores, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict, compare=False)
    _workers: LocalWorkers | None = field(default=None, repr=False)
    # The workers' blobs outlive the workers: a later deployment on the same cluster sends only what is new.
    _cache: ScratchFolder | None = field(default=None, repr=False)
    _keep_workers: bool = field(default=False, repr=False)
    _is_busy: bool = field(default=False, init=False, repr=False, compare=False)
    _ray: RayWorkers | None = field(default=None, repr=False, compare=False)
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
    def local(cls, workers: int = 2, threads: int = 1) -> Cluster:
        """Worker processes on this host: ``machine-a``, ``machine-b``, …, each with ``threads`` cores of its own."""
        return cls("local", _lettered_machines(workers, threads))

    @classmethod
    def in_process(cls, machines: int = 1, threads: int | None = None) -> Cluster:
        """No processes and no RPC: the stages are called in turn, in this process.

        ``threads`` is what each kernel may use; all usable cores by default.
        """
        return cls("in_process", _lettered_machines(machines, threads or own_cores().count))

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """Machines with workers that run already, described in a file; see `tvm_split.cluster.cluster_file`."""
        return cls("remote", *read_cluster_file(Path(path)))

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
        """The workers that a TVM RPC tracker lists at this moment, under one key or all, and that answer.

        What cannot be deployed to is left out, with the reason: machines on which kernels are being tuned, TVM's own
        RPC servers, and workers that do not answer. ``token`` and ``tls`` are the same for all; a token needs ``tls``.
        ``timeout_seconds`` is for the tracker, and for each worker.

        Raises:
            ClusterError: there is no such machine, or two of them have one name.
            InputError: a token without TLS.
            WorkerUnavailableError, DeadlineError, ProtocolError: the tracker cannot be reached, is silent, or is none.
        """
        tracker = TrackerAddress(host, port)
        found = tracked_machines(tracker, key, token, tls, timeout_seconds)
        place = f"the tracker {tracker}" + ("" if key is None else f" under the key {key!r}")
        advice = f"start `tvm-split worker --tracker {tracker} --key {key or 'KEY'}` on each"
        machines, left_out = planned_machines([each.asked for each in found], place, advice)
        return cls("remote", machines, left_out=left_out)

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
        """The workers of the pods with these labels that are ready at this moment, as ``kubectl`` finds them.

        Machines are named as their pods. By default the namespace is that of kubectl's context, and ``token`` and
        ``tls`` are the same for all. The pods are called directly: from inside of the cluster.

        Raises:
            ClusterError: there is no such pod.
            WorkerUnavailableError, DeadlineError, ProtocolError: kubectl is missing, says no, or nothing, or nonsense.
        """
        found = pod_machines(selector, namespace, token, tls, timeout_seconds)
        advice = "`kubectl get pods` says why; deploy/kubernetes is one way to start some"
        machines, left_out = planned_machines(found, f"Kubernetes, with the labels {selector},", advice)
        return cls("remote", machines, left_out=left_out)

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
        """Workers that Ray places on its nodes, ``machine-a``, ``machine-b``, …, each with ``threads`` of its CPUs.

        They end with `close` (the cluster is a context manager), or with this process; Ray starts one that dies again.

        Args:
            address: HOST:PORT of Ray's head; by default the Ray that this process is connected to, else one that runs
                on this host.
            resources: what else each worker takes: ``{"GPU": 1, "memory": 1e9}`` (bytes), or what a node calls its own.
                ``CPU`` takes the place of ``threads`` where it is to be another number; ``num_cpus`` and ``num_gpus``
                are understood as well.
            strategy: of the placement group: ``SPREAD``, ``STRICT_SPREAD``, ``PACK`` or ``STRICT_PACK``.

        Raises:
            ClusterError: there is no Ray in this Python, or a number or resource that makes no sense.
            WorkerUnavailableError: no Ray runs there, or a worker does not come up.
            DeadlineError: its nodes have no room for so many workers.
        """
        machines = _lettered_machines(workers, threads)
        started = RayWorkers([each.name for each in machines], threads, address, resources, strategy, timeout_seconds)
        try:
            placed = started.endpoints()
            machines = tuple(replace(each, endpoint=placed[each.name]) for each in machines)
            return cls("remote", machines, _ray=started)
        except BaseException:
            started.close()
            raise

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
        """What is given of a link; None for one of which nothing is."""
        return self._by_ends.get((source, destination))

    def is_by_nccl(self, source: str, destination: str) -> bool:
        """Whether NCCL is to carry a link, from GPU to GPU."""
        given = self.link(source, destination)
        return given is not None and given.transport == Transport.NCCL

    @property
    def link_settings(self) -> dict[tuple[str, str], LinkSetting]:
        """(source, destination) to how that link is to be opened."""
        return {
            (link.source, link.destination): LinkSetting(link.address, Transport(link.transport)) for link in self.links
        }

    def endpoints(self) -> dict[str, WorkerEndpoint]:
        """Where the workers listen; starts those of a local cluster."""
        if self.kind == "in_process":
            raise ClusterError("an in-process cluster has no workers")
        if self.kind == "local":
            if self._cache is None:
                self._cache = ScratchFolder("cache")
            if self._workers is None:
                self._workers = LocalWorkers(
                    self.machine_names,
                    threads=self.machines[0].threads,
                    cache=self._cache.path / "blobs",
                    at_once=lambda: beside_this_thread() if self._is_busy else most_at_once(),
                )
            for name in self._workers.ended:
                self._workers.restart(name)
            return dict(self._workers.endpoints)
        if self._ray is not None:
            return self._ray.endpoints()
        return {machine.name: _require_endpoint(machine) for machine in self.machines}

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Inside, the workers of a local cluster start; behind it they run, or what kept them from it is raised.

        What is raised inside comes first. Other clusters have nothing to start.
        """
        if self.kind != "local" or self._workers is not None:
            yield
            return
        self._is_busy = True
        with ThreadPoolExecutor(1, thread_name_prefix="workers") as thread:
            started = thread.submit(self.endpoints)
            try:
                yield
            finally:
                self._is_busy = False
        started.result()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, `release` leaves local workers alone, so that one step after the other can use them.

        They stay afterwards, for the next one to release; if something is raised, they end.
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
        """A deployment has ended: end the workers that were started for it, unless they are kept."""
        if not self._keep_workers:
            self._end_workers()

    def close(self) -> None:
        """End this cluster's own worker processes and remove what they cached; workers started elsewhere stay."""
        self._end_workers()
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        if self._ray is not None:
            self._ray.close()

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def __enter__(self) -> Cluster:
        self._keep_workers = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keep_workers = False
        self.close()


def _lettered_machines(count: int, threads: int) -> tuple[Machine, ...]:
    """``machine-a`` to ``machine-z``, then ``machine-aa``, ``machine-ab``, …: the columns of a spreadsheet."""
    if not 1 <= count <= MOST_ON_THIS_HOST:
        raise ClusterError(f"a cluster on this host can have 1 to {MOST_ON_THIS_HOST} machines, not {count}")
    letters = (word for length in (1, 2) for word in product(ascii_lowercase, repeat=length))
    return tuple(Machine(f"machine-{''.join(word)}", threads) for word in islice(letters, count))


def _require_endpoint(machine: Machine) -> WorkerEndpoint:
    if machine.endpoint is None:
        raise ClusterError(f"machine {machine.name!r} has no address; give the HOST:PORT on which its worker listens")
    return machine.endpoint

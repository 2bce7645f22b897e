"""A cluster: the machines that a model is split over, and the links between them; and the session of its workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from rpc_runtime.hardware import HostCores, own_cores, usable_together
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.registry import PluginError
from rpc_runtime.transports.transport import LinkSetting, memory_of
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.launcher import LAUNCHERS, Launcher, Started, launcher_at
from tvm_split.cluster.machine import Link, Machine, SharedCores, faults
from tvm_split.errors import ClusterError, required
from tvm_split.units import Shown, count_text, known_names


@dataclass(frozen=True, repr=False)
class Cluster(Shown):
    """The machines that a model may be split over: a value. `start` returns a session of their workers.

    Make one with `at`, `local`, `in_process` or `from_yaml`: each calls a launcher's `find`. ``with cluster as
    workers:`` starts a session and ends it. Functions such as `plan` and `deploy` share the workers of the session that
    they get, or of the cluster inside the ``with``. Elsewhere, a function that gets a cluster starts workers of its own
    and ends them. Enter a cluster from one thread at a time; other threads use the session.

    Empty ``links``: all links are measured. Otherwise every pair of machines needs a link. A link counts in both
    directions unless its reverse is listed too; its address counts in its own direction only. ``shared_cores`` states
    which machines compute on the same cores; for the other machines, their workers report it. ``launcher`` starts the
    workers; by default they already run at the machines' addresses. ``left_out`` maps the names of machines that were
    found but are not part of the cluster to the reasons.
    """

    machines: tuple[Machine, ...]
    links: tuple[Link, ...] = ()
    shared_cores: tuple[SharedCores, ...] = ()
    launcher: Launcher = field(default_factory=lambda: LAUNCHERS["at"]())
    left_out: Mapping[str, str] = field(default_factory=dict, compare=False)
    _entered: list[Workers] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.machines, list | tuple) or not all(isinstance(one, Machine) for one in self.machines):
            raise ClusterError(
                f"machines are {self.machines!r:.80}; give a tuple of Machine, or use Cluster.at for a file or location"
            )
        if not self.machines:
            raise ClusterError("a cluster needs at least one machine")
        object.__setattr__(self, "machines", tuple(self.machines))
        for fault in faults(self.machines, self.links or None, self.shared_cores):
            raise ClusterError(fault.text)
        listed = {(link.source, link.destination) for link in self.links}
        reversed_links = (
            replace(link, source=link.destination, destination=link.source, address=None)
            for link in self.links
            if (link.destination, link.source) not in listed
        )
        object.__setattr__(self, "links", (*self.links, *reversed_links))

    @classmethod
    def at(cls, location: str | Path, **parameters: Any) -> Cluster:
        """Return the cluster of a location: a YAML file, or ``NAME[:ARGUMENT][?FIELD=VALUE&…]``, NAME being a launcher.

        ``local:3?threads=2``, ``in-process``, ``tracker:lab:9190?key=box``, ``kubernetes:app=worker?namespace=lab``,
        ``ray:lab:6379?workers=3``, ``at:10.0.0.7:7001``. ``parameters`` are fields of the launcher as well, among them
        those that no text can hold: ``token`` and ``tls`` of listed workers, ``resources`` of Ray's.

        Servers of a tracker and pods that cannot be deployed to are left out, with the reason: machines on which
        kernels are being tuned, TVM's own RPC servers, and workers that do not answer.

        Raises:
            ClusterError: there is no such launcher, a parameter does not fit, no machine is found, or two of them have
                the same name.
            InputError: a token is given to a tracker without TLS.
            WorkerUnavailableError, DeadlineError, ProtocolError: the service that lists the machines does not answer,
                or answers wrongly.
        """
        return cluster_of(launcher_at(str(location), **parameters))

    @classmethod
    def local(cls, workers: int = 2, threads: int = 1) -> Cluster:
        """Return a cluster of worker processes on this host: ``machine-a``, …, with ``threads`` cores each."""
        return cls.at("local", workers=workers, threads=threads)

    @classmethod
    def in_process(cls, machines: int = 1, threads: int | None = None) -> Cluster:
        """Return a cluster without processes and RPC: the stages are called one after the other in this process.

        ``threads`` is the number of threads that each kernel may use; all usable cores by default.
        """
        return cls.at("in-process", machines=machines, threads=threads)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """Return the machines in a file, whose workers run already; see `tvm_split.cluster.cluster_file`."""
        return cls.at("file", path=path)

    @property
    def machine_names(self) -> tuple[str, ...]:
        return tuple(machine.name for machine in self.machines)

    def machine(self, name: str) -> Machine:
        for machine in self.machines:
            if machine.name == name:
                return machine
        reasons = "".join(f"\n  left out: {machine_name}, {reason}" for machine_name, reason in self.left_out.items())
        raise ClusterError(
            f"no machine is named {name!r}; the cluster has {known_names(self.machine_names, name)}{reasons}"
        )

    @cached_property
    def _by_ends(self) -> dict[tuple[str, str], Link]:
        return {(link.source, link.destination): link for link in self.links}

    def link(self, source: str, destination: str) -> Link | None:
        """Return the description of a link; None if the cluster has none."""
        return self._by_ends.get((source, destination))

    def transport_between_gpus(self, source: str, destination: str) -> str:
        """Return the transport requested for a link from GPU to GPU; empty if none was requested."""
        link = self.link(source, destination)
        return link.transport if link is not None and memory_of(link.transport) == "device" else ""

    @property
    def link_settings(self) -> dict[tuple[str, str], LinkSetting]:
        """Map (source, destination) to the setting with which that link is opened."""
        return {(link.source, link.destination): LinkSetting(link.address, link.transport) for link in self.links}

    @property
    def planned(self) -> Cluster:
        """The cluster of the machines that a plan may use: those that are not on standby."""
        machines = tuple(machine for machine in self.machines if not machine.standby)
        return self if len(machines) == len(self.machines) else self._with(machines)

    def with_standby(self, count: int, used: Collection[str] = ()) -> Cluster:
        """Return the cluster with ``count`` machines on standby at least, none of which is in ``used``.

        They are those that it has on standby, then what its launcher starts besides, then its last machines.
        """
        free = [machine.name for machine in self.machines if machine.name not in used]
        free.sort(key=lambda name: self.machine(name).standby)
        missing = count - sum(self.machine(name).standby for name in free)
        if missing <= 0:
            return self
        if self.launcher.starts_more and not (self._entered or isinstance(self, Workers)):
            threads, numbers = self.machines[0].threads, range(1, missing + 1)
            more = (Machine(f"standby-{number}", threads, standby=True) for number in numbers)
            return self._with((*self.machines, *more))
        if count > len(free):
            raise ClusterError(
                f"{count_text(count, 'machine')} on standby: besides those that compute, the cluster has "
                f"{', '.join(free) or 'none'}; add some"
            )
        here = (replace(machine, standby=machine.name in free[-count:]) for machine in self.machines)
        return self._with(tuple(here))

    def _with(self, machines: tuple[Machine, ...]) -> Cluster:
        """Return the cluster of these machines, with the links and shared cores between them."""
        if self._entered:
            return self._entered[-1]._with(machines)
        ends = {CLIENT, *(machine.name for machine in machines)}
        links = tuple(link for link in self.links if {link.source, link.destination} <= ends)
        named = [(tuple(name for name in cores.machines if name in ends), cores.cores) for cores in self.shared_cores]
        shared = tuple(SharedCores(names, count) for names, count in named if names)
        return Cluster(machines, links, shared, self.launcher, self.left_out)

    def start(self) -> Workers:
        """Return a session of this cluster's workers, which start when they are first needed. Close it.

        Inside ``with cluster:``, it shares the workers of the innermost one.
        """
        return self._entered[-1].start() if self._entered else Workers(self)

    def __enter__(self) -> Workers:
        self._entered.append(Workers(self))
        return self._entered[-1]

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()


def cluster_of(launcher: Launcher) -> Cluster:
    """Return the cluster that a launcher finds. Raises PluginError if `find` returns something else."""
    return required(Cluster, launcher.find(), PluginError, f"launcher {launcher.name!r} found it; update its package")


class Workers(Cluster):
    """A session of a cluster's workers. It can be used wherever the cluster can; whoever gets it shares the workers.

    They start when they are first needed, and end with this session unless they were started elsewhere. Thread-safe.
    """

    def __init__(self, cluster: Cluster, owner: Workers | None = None) -> None:
        super().__init__(cluster.machines, cluster.links, cluster.shared_cores, cluster.launcher, cluster.left_out)
        self._owner = owner or self
        self._lock = Lock()
        self._started: Started | None = None
        self._is_closed = False

    def start(self) -> Workers:
        """Return a session that shares these workers and does not end them."""
        return Workers(self, self._owner)

    def _with(self, machines: tuple[Machine, ...]) -> Workers:
        return Workers(super()._with(machines), self._owner)

    def endpoints(self) -> dict[str, WorkerEndpoint]:
        """Return the workers' endpoints by machine; start the workers that do not run yet, or no longer.

        Raises:
            ClusterError: this session has ended, or a worker cannot be started.
            WorkerUnavailableError, DeadlineError: a worker does not start.
        """
        owner = self._owner
        with owner._lock:
            if owner._is_closed:
                raise ClusterError("this cluster's workers have ended with its `with`, or by close(): start others")
            if owner._started is None:
                hint = f"launcher {self.launcher.name!r} started it; update its package"
                owner._started = required(Started, self.launcher.start(owner), PluginError, hint)  # type: ignore[type-abstract]
            endpoints = owner._started.endpoints()
            return {name: endpoints[name] for name in self.machine_names if name in endpoints}

    def close(self) -> None:
        """End the workers that this session started. May be called again."""
        if self._owner is self:
            with self._lock:
                self._is_closed, started, self._started = True, self._started, None
            if started is not None:
                started.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def cores_by_address(cluster: Cluster) -> dict[str, HostCores]:
    """Return the cores of machines that are on this host, without asking their workers."""
    if cluster.launcher.on_this_host and not cluster.launcher.in_process:
        local_names = cluster.machine_names
    else:
        addresses = {machine.name: machine.address for machine in cluster.machines}
        local_names = tuple(
            name for name, address in addresses.items() if address and Address.parse(address).is_loopback
        )
    return dict.fromkeys(local_names, own_cores())


def shared_cores(cluster: Cluster, cores_of: Mapping[str, HostCores]) -> tuple[SharedCores, ...]:
    """Return the cores that several machines, or a machine and the client, share.

    Machines that the cluster's description names share the cores stated there. Other machines of one host share all
    cores in their affinity masks, up to their quotas. Machines of an in-process cluster compute in turn already.
    """
    if cluster.launcher.in_process:
        return cluster.shared_cores
    named = {name for shared in cluster.shared_cores for name in shared.machines}
    hosts: dict[str, dict[str, HostCores]] = {}
    for name, cores in {**cores_of, CLIENT: own_cores()}.items():
        if name not in named and cores.host and cores.numbers:
            hosts.setdefault(cores.host, {})[name] = cores
    groups = [
        SharedCores(tuple(members), usable_together(members.values())) for members in hosts.values() if len(members) > 1
    ]
    return (*cluster.shared_cores, *groups)

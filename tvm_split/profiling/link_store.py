"""What probing found of links, which is found again between the same ends, by the same versions, with tensors alike."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.transport import DEFAULT, LinkSettings
from tvm_split.cluster.cluster import Cluster
from tvm_split.profiling.link_samples import ChainSample, LinkSample, StreamSample
from tvm_split.profiling.store import Store, entry_key
from tvm_split.units import seconds_text

CERTAIN = 0.25
"""Rounds of one chain part by less on a quiet machine, least and most."""


@dataclass(frozen=True)
class MachineProbe:
    """A machine and the client: the samples in both directions.

    ``seconds_per_byte`` is the machine's processor time for one more byte of a tensor. ``transports`` by destination,
    the machine or the client, is what carried them.
    ``measured_at`` is in seconds since 1970.
    """

    measured_at: float
    round_trip_seconds: float
    to_machine: tuple[LinkSample, ...]
    from_machine: tuple[LinkSample, ...]
    seconds_per_byte: float
    transports: Mapping[str, str]


@dataclass(frozen=True)
class PairProbe:
    """Two machines, one direction."""

    measured_at: float
    samples: tuple[LinkSample, ...]
    transport: str


@dataclass(frozen=True)
class StreamProbe:
    """A stream through a machine: a sample for every duration of computing."""

    measured_at: float
    samples: tuple[StreamSample, ...]

    @property
    def doubts(self) -> tuple[str, ...]:
        """Which streams contradict their single runs, in words."""
        return tuple(
            f"had a result every {seconds_text(each.period_seconds)}, and one alone took "
            f"{seconds_text(each.single_seconds)}"
            for each in self.samples
            if each.is_contradictory
        )


@dataclass(frozen=True)
class ChainProbe:
    """One machine after the other, of those that keep all cores of a host busy. ``start_seconds`` is what a stage that
    computes takes there longer than by itself, since others had its core and caches before. ``scatter`` is the largest
    by which the rounds of a sample's periods parted, least and most, as a share of the median."""

    measured_at: float
    samples: tuple[ChainSample, ...]
    start_seconds: float
    scatter: float

    @property
    def is_uncertain(self) -> bool:
        return self.scatter > CERTAIN


Probe = TypeVar("Probe", MachineProbe, PairProbe, StreamProbe, ChainProbe)


@dataclass(frozen=True)
class LinkStore:
    """The store of one client; ``ends`` says of each machine what it is, ``settings`` how links are opened."""

    store: Store
    ends: Mapping[str, Any]
    settings: LinkSettings
    sizes: Sequence[int]
    refresh: bool

    def known_or(self, kind: type[Probe], machines: Sequence[str], measure: Callable[[], Probe]) -> Probe:
        """A probe of these machines in this order, measured if it is not known."""
        ends = [[name, self.ends[name]] for name in machines]
        ways = [end for name in machines for end in ((CLIENT, name), (name, CLIENT))]
        ways += [(machines[0], machines[-1])]
        settings = [self.settings.get(way, DEFAULT) for way in ways]
        opened = [[setting.wanted, setting.address] for setting in settings]
        key = entry_key(kind=kind.__name__, ends=ends, opened=opened, sizes=list(self.sizes))
        found = None if self.refresh else self.store.get(key, TypeAdapter(kind))
        if found is None:
            found = measure()
            doubtful = isinstance(found, StreamProbe) and found.doubts
            if not (doubtful or (isinstance(found, ChainProbe) and found.is_uncertain)):
                self.store.put({key: found})
        return found


def link_store(
    folder: Path | None,
    cluster: Cluster,
    workers: Mapping[str, WorkerDescription],
    sizes: Sequence[int],
    refresh: bool,
) -> LinkStore:
    """The store for one cluster. Local workers listen on another port every time, but are alike."""
    ends = {}
    for name, worker in workers.items():
        endpoint = cluster.endpoints()[name]
        is_local = cluster.launcher.on_this_host
        place = len(cluster.machines) if is_local else [endpoint.address, endpoint.tls is not None]
        versions = [worker.protocol_version, worker.tvm_version, worker.numpy_version]
        ends[name] = [place, worker.hostname, worker.cores, worker.core_quota, worker.threads, versions]
    store = Store(folder, {"links from": socket.gethostname()})
    return LinkStore(store, ends, cluster.link_settings, sizes, refresh)

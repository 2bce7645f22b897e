"""Keeps link probes for reuse between the same ends, with the same versions and tensor sizes."""

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
from tvm_split.cluster.cluster import Workers
from tvm_split.profiling.link_samples import ChainSample, LinkSample, StreamSample
from tvm_split.profiling.store import Store, entry_key
from tvm_split.units import seconds_text

CERTAIN = 0.25
"""Largest relative spread of a chain's rounds on a quiet machine, from least to most."""


@dataclass(frozen=True)
class MachineProbe:
    """Probe of the link between a machine and the client, in both directions.

    ``seconds_per_byte`` is the machine's processor time per byte of a tensor. ``transports`` names the transport by
    destination (the machine or the client). ``measured_at`` is in seconds since 1970.
    """

    measured_at: float
    round_trip_seconds: float
    to_machine: tuple[LinkSample, ...]
    from_machine: tuple[LinkSample, ...]
    seconds_per_byte: float
    transports: Mapping[str, str]


@dataclass(frozen=True)
class PairProbe:
    """Probe of the link from one machine to another."""

    measured_at: float
    samples: tuple[LinkSample, ...]
    transport: str


@dataclass(frozen=True)
class StreamProbe:
    """Probe of streams through a machine: one sample per compute duration."""

    measured_at: float
    samples: tuple[StreamSample, ...]

    @property
    def doubts(self) -> tuple[str, ...]:
        """Messages about the streams that contradict their single runs."""
        return tuple(
            f"had a result every {seconds_text(each.period_seconds)}, and one alone took "
            f"{seconds_text(each.single_seconds)}"
            for each in self.samples
            if each.is_contradictory
        )


@dataclass(frozen=True)
class ChainProbe:
    """Probe of a chain over machines that keep all cores of a host busy.

    ``start_seconds`` is the extra time of a stage that computes there, because others used its core and caches before.
    ``scatter`` is the largest spread of a sample's periods over the rounds, relative to the median.
    """

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
    """Store of one client's probes; ``ends`` identifies each machine, ``settings`` says how links are opened."""

    store: Store
    ends: Mapping[str, Any]
    settings: LinkSettings
    sizes: Sequence[int]
    refresh: bool

    def known_or(self, kind: type[Probe], machines: Sequence[str], measure: Callable[[], Probe]) -> Probe:
        """Return the probe of these machines, in this order: from the store, or else measured and kept."""
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
    cluster: Workers,
    workers: Mapping[str, WorkerDescription],
    sizes: Sequence[int],
    refresh: bool,
) -> LinkStore:
    """Return the store for one cluster. Local workers are identified without their port, which changes every time."""
    ends = {}
    for name, worker in workers.items():
        endpoint = cluster.endpoints()[name]
        is_local = cluster.launcher.on_this_host
        place = len(cluster.machines) if is_local else [endpoint.address, endpoint.tls is not None]
        versions = [worker.protocol_version, worker.tvm_version, worker.numpy_version]
        ends[name] = [place, worker.hostname, worker.cores, worker.core_quota, worker.threads, versions]
    store = Store(folder, {"links from": socket.gethostname()})
    return LinkStore(store, ends, cluster.link_settings, sizes, refresh)

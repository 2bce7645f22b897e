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
from tvm_split.profiling.link_model import ChainProbe, MachineProbe, PairProbe, StreamProbe
from tvm_split.profiling.store import Store, entry_key

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
        probe = None if self.refresh else self.store.get(key, TypeAdapter(kind))
        if probe is None:
            probe = measure()
            self.store.put({key: probe})
        return probe


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

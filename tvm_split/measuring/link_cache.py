"""Keeps what was measured of links, so that the next plan need not wait: one small JSON file per link and per machine.

A measurement is found again only between the same ends (address and host, of local workers their cores instead), by the
same versions, with tensors of the same sizes. A file that cannot be read counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tvm_split.cluster.cluster import Cluster
from tvm_split.measuring.cache_folder import cache_folder
from tvm_split.measuring.link_samples import LinkSample, StreamSample
from tvm_split.rpc_runtime.client.client import WorkerDescription
from tvm_split.units import seconds_text

FORMAT = 3


@dataclass(frozen=True)
class MachineProbe:
    """A machine and the client: the samples in both directions.

    ``seconds_per_byte`` is the machine's processor time for one more byte of a tensor.
    ``measured_at`` is in seconds since 1970.
    """

    measured_at: float
    round_trip_seconds: float
    to_machine: tuple[LinkSample, ...]
    from_machine: tuple[LinkSample, ...]
    seconds_per_byte: float


@dataclass(frozen=True)
class PairProbe:
    """Two machines, one direction."""

    measured_at: float
    samples: tuple[LinkSample, ...]


@dataclass(frozen=True)
class StreamProbe:
    """Machines that compute at the same time, each with its own stream: samples for every duration of computing."""

    measured_at: float
    samples: Mapping[str, tuple[StreamSample, ...]]

    @property
    def doubts(self) -> tuple[str, ...]:
        """Which streams contradict their single runs, in words."""
        return tuple(
            f"a stream through {name} had a result every {seconds_text(each.period_seconds)}, and one alone took "
            f"{seconds_text(each.single_seconds)}"
            for name, samples in self.samples.items()
            for each in samples
            if each.is_contradictory
        )


Probe = TypeVar("Probe", MachineProbe, PairProbe, StreamProbe)
_MACHINE, _PAIR, _STREAM = TypeAdapter(MachineProbe), TypeAdapter(PairProbe), TypeAdapter(StreamProbe)


def default_folder() -> Path:
    """``links`` in the folder for what is measured."""
    return cache_folder("links")


@dataclass(frozen=True)
class LinkCache:
    """``folder`` None keeps nothing; ``ends`` says for each machine, and the client (None), what it is."""

    folder: Path | None
    ends: Mapping[str | None, Any]
    addresses: Mapping[tuple[str, str], str]
    sizes: Sequence[int]
    refresh: bool

    def machine(self, name: str, measure: Callable[[str], MachineProbe]) -> MachineProbe:
        """A machine and the client, measured if it is not known."""
        return self._known_or(lambda: measure(name), _MACHINE, ["machine", self.ends[None], self.ends[name]])

    def pair(self, source: str, destination: str, measure: Callable[[str, str], PairProbe]) -> PairProbe:
        """The link from one machine to another, measured if it is not known."""
        ends = [self.ends[source], self.ends[destination], self.addresses.get((source, destination))]
        return self._known_or(lambda: measure(source, destination), _PAIR, ["pair", *ends])

    def stream(self, names: Sequence[str], measure: Callable[[Sequence[str]], StreamProbe]) -> StreamProbe:
        """Machines that compute at the same time, measured if that is not known."""
        key = ["stream", self.ends[None], *(self.ends[name] for name in names), list(names)]
        return self._known_or(lambda: measure(names), _STREAM, key)

    def _known_or(self, measure: Callable[[], Probe], adapter: TypeAdapter[Probe], key: list[Any]) -> Probe:
        if self.folder is None:
            return measure()
        content = json.dumps([FORMAT, *key, list(self.sizes)], sort_keys=True)
        path = self.folder / f"{hashlib.sha256(content.encode()).hexdigest()}.json"
        if not self.refresh:
            with contextlib.suppress(OSError, ValidationError):
                return adapter.validate_json(path.read_bytes())
        measured = measure()
        if isinstance(measured, StreamProbe) and measured.doubts:
            return measured
        with contextlib.suppress(OSError):  # a folder that cannot be written costs time, and nothing else
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.folder)
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(measured), file)
            Path(name).rename(path)
        return measured


def link_cache(
    folder: Path | None,
    cluster: Cluster,
    workers: Mapping[str, WorkerDescription],
    sizes: Sequence[int],
    refresh: bool,
) -> LinkCache:
    """The cache for one cluster. Local workers listen on another port every time, but are alike."""
    ends: dict[str | None, Any] = {None: socket.gethostname()}
    for name, worker in workers.items():
        endpoint = cluster.endpoints()[name]
        place = (
            [name, len(cluster.machines)] if cluster.kind == "local" else [endpoint.address, endpoint.tls is not None]
        )
        versions = [worker.protocol_version, worker.tvm_version, worker.numpy_version]
        ends[name] = [place, worker.hostname, worker.cores, worker.threads, versions]
    return LinkCache(folder, ends, cluster.peer_addresses, sizes, refresh)

"""Measures the links of a cluster over the runtime that models run on: real workers, streams, credits and copies.

A program of pass-through stages sends a small tensor from the client to A, one of the probed size from A to B, and a
small one back. The time of the link is the time of a run minus compute and minus half a round trip to each machine.
Clocks of different machines are never compared. A prediction adds up the same parts that are separated here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import WorkerDescription, describe_all
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.hardware import usable_together
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.errors import CompileError, ProfileError
from tvm_split.planner.profile import LinkProfile, StreamingCost
from tvm_split.profiling import link_model
from tvm_split.profiling.link_model import (
    SMALLEST_BYTES,
    Chain,
    ChainProbe,
    LinkSample,
    MachineProbe,
    PairProbe,
    StreamProbe,
    StreamSample,
    are_alike,
    chain_cost,
    handed_on_bytes,
    link_profiles,
    probe_sizes,
    stream_cost,
    waking_seconds,
    worthwhile_size,
)
from tvm_split.profiling.link_store import link_store
from tvm_split.profiling.link_timing import Passage, measured_passage, probe_chain, probe_stream
from tvm_split.profiling.machines import bus_of
from tvm_split.profiling.probe_programs import ProbePrograms
from tvm_split.profiling.rounds import first_of, rounds_of, spot_checked
from tvm_split.steps import StepProgress, Steps
from tvm_split.units import short_list

SERIES_SECONDS = 0.04
"""Seconds of single runs, and of a stream, per size on a fast link; three times as long for a round trip."""
LONGEST_CHAIN = 16
"""Most machines of a host in one probed chain; more machines hardly change how the caches are shared."""
HANDED_OVER_BYTES_PER_SECOND = 1e12
"""Bandwidth of links in an in-process cluster, where tensors are passed by reference."""


@dataclass(frozen=True)
class LinkProbe:
    """The measured links of a cluster, and the cost of transfers on its machines.

    A pair without a link in ``links`` has no transfers. The time of a link includes serialising at both ends.
    ``streaming`` is the part of it during which a machine cannot compute; it is zero if the host has spare cores.
    """

    links: tuple[LinkProfile, ...]
    streaming: Mapping[str, StreamingCost]


def probe_links(
    cluster: Cluster,
    sizes_bytes: Sequence[int],
    *,
    timeout_seconds: float = 60.0,
    on_progress: StepProgress | None = None,
    cache_folder: Path | None = None,
    refresh: bool = False,
) -> LinkProbe:
    """Measure every link between two machines or a machine and the client, and each machine's cost of transfers.

    Links whose speed is given in the cluster are not measured. A fast link takes some tenths of a second, a slow one a
    few seconds; pairs without a common machine or host are measured at the same time. Of machines of one host with
    equal cores and threads, and of links between such, two are measured; if they disagree, a third one is. The others
    are estimated.

    Args:
        sizes_bytes: sizes of the tensors that may be transferred.
        timeout_seconds: limit of each wait, as in a deployment.
        cache_folder: folder for measurements, such as `store.default_folder()`; None keeps nothing. Ages are in
            ``measured_at``.
        refresh: also measure what the cache has.

    Raises:
        ProfileError: a link cannot be used; names both ends.
        WorkerUnavailableError: a worker does not answer; names its machine and address.
        CompileError: nothing can be compiled here for a machine's architecture.
    """
    if cluster.launcher.in_process:
        return _in_process(cluster)
    with cluster.start() as workers:
        return _Probing(workers, sizes_bytes, timeout_seconds, on_progress, cache_folder, refresh).run()


class _Probing:
    """One measurement of one cluster."""

    def __init__(
        self,
        cluster: Workers,
        sizes_bytes: Sequence[int],
        timeout_seconds: float,
        on_progress: StepProgress | None,
        cache_folder: Path | None,
        refresh: bool,
    ) -> None:
        self._cluster = cluster
        self._sizes = probe_sizes(sizes_bytes)
        self._handed_on = handed_on_bytes(sizes_bytes)
        self._timeout_seconds = timeout_seconds
        self._steps = Steps(on_progress)
        self._endpoints: dict[str, WorkerEndpoint] = cluster.endpoints()
        self._workers = describe_all(self._endpoints)
        targets = {machine.name: machine.target for machine in cluster.machines if machine.has_gpu and machine.target}
        self._programs = ProbePrograms({name: worker.architecture for name, worker in self._workers.items()}, targets)
        self._store = link_store(cache_folder, cluster, self._workers, self._sizes, refresh)
        self._settings = cluster.link_settings
        self._places = {name: self._place(name, worker) for name, worker in self._workers.items()}

    def run(self) -> LinkProbe:
        names = self._cluster.machine_names
        pairs = [(a, b) for a in names for b in names if a != b and self._is_measured(a, b)]
        hosts = self._busy_hosts()
        place_of, kind_of = self._places.__getitem__, self._kind_of_pair
        self._steps.total = len(first_of(names, place_of)) + len(self._rounds(first_of(pairs, kind_of))) + len(hosts)
        machines = spot_checked(
            names, place_of, self._probe_machines, _agree_on_machines, lambda probe: probe.round_trip_seconds
        )
        probe_pairs = partial(self._probe_pairs, machines.values)
        measured = spot_checked(
            pairs,
            kind_of,
            probe_pairs,
            _agree_on_pairs,
            lambda probe: sum(sample.single_seconds for sample in probe.samples),
        )
        costs = dict.fromkeys(names, StreamingCost())
        waking = dict.fromkeys(names, 0.0)
        chains: dict[str, Chain] = {}
        for host in hosts:
            self._steps.begin(f"streams through {short_list(host)}")
            samples = self._alone_streams(host)
            chain = self._chain(host) if len(host) > 1 else None
            for name in host:
                stream = stream_cost(samples[name])
                # Each stage receives one tensor and sends one, so the cost is halved per transfer.
                transfer_seconds = stream.seconds / 2
                per_byte = machines.values[name].seconds_per_byte
                waking[name] = waking_seconds(samples[name], machines.values[name].round_trip_seconds)
                if chain is not None:
                    chains[name] = chain
                    transfer_seconds = chain.cost.transfer_seconds
                    per_byte = max(per_byte, chain.cost.transfer_seconds_per_byte)
                costs[name] = StreamingCost(transfer_seconds, per_byte, stream.ratio)
        self._steps.done()
        return LinkProbe(tuple(link_profiles(self._cluster, machines, measured, waking, chains)), costs)

    def _place(self, name: str, worker: WorkerDescription) -> Hashable:
        """Return a key that is equal for machines with similar links to the client."""
        ends = ((CLIENT, name), (name, CLIENT))
        return worker.hostname, worker.cores, worker.threads, *(self._settings.get(end) for end in ends)

    def _kind_of_pair(self, pair: tuple[str, str]) -> Hashable:
        return self._places[pair[0]], self._places[pair[1]], self._settings.get(pair)

    def _rounds(self, pairs: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
        return list(rounds_of(pairs, {name: worker.host for name, worker in self._workers.items()}))

    def _probe_machines(self, names: Sequence[str]) -> dict[str, MachineProbe]:
        machines: dict[str, MachineProbe] = {}
        for name in names:
            self._steps.begin(f"link between {name} and the client")
            begun = time.time()
            probe_machine = partial(self._probe_machine, name)
            machines[name] = self._store.known_or(MachineProbe, [name], probe_machine)
            if machines[name].measured_at < begun and not self._is_believable(name, machines[name]):
                self._store = replace(self._store, refresh=True)
                machines[name] = self._store.known_or(MachineProbe, [name], probe_machine)
        return machines

    def _probe_pairs(
        self, machines: Mapping[str, MachineProbe], pairs: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], PairProbe]:
        measured: dict[tuple[str, str], PairProbe] = {}

        def probe(pair: tuple[str, str]) -> PairProbe:
            return self._store.known_or(PairProbe, pair, partial(self._probe_pair, *pair, machines))

        for together in self._rounds(pairs):
            self._steps.begin("links " + ", ".join(f"{a} to {b}" for a, b in together))
            with ThreadPoolExecutor(len(together), thread_name_prefix="probe") as threads:
                measured.update(zip(together, threads.map(probe, together), strict=True))
        return measured

    def _is_believable(self, name: str, cached: MachineProbe) -> bool:
        """Whether a round trip now agrees with the cached one, by its best run if slower, by its median if faster."""
        now = self._pass([name], [SMALLEST_BYTES] * 2, SERIES_SECONDS)
        slowest = link_model.DISAGREEMENT * now.single_seconds
        return now.best_seconds / link_model.DISAGREEMENT <= cached.round_trip_seconds <= slowest

    def _busy_hosts(self) -> list[tuple[str, ...]]:
        """Return the machines of every host without spare cores for transfers, grouped by host."""
        busy: dict[str, list[str]] = {}
        for name, worker in self._workers.items():
            if not has_spare_cores(name, self._workers):
                busy.setdefault(worker.host, []).append(name)
        return [tuple(names) for names in busy.values()]

    def _alone_streams(self, host: Sequence[str]) -> dict[str, tuple[StreamSample, ...]]:
        """Probe streams on the first machine of each kind, for all of it; their round trips were similar."""
        first: dict[Hashable, tuple[StreamSample, ...]] = {}
        for name in host:
            if self._places[name] not in first:
                probe = partial(probe_stream, partial(self._open_busy, name))
                first[self._places[name]] = self._store.known_or(StreamProbe, [name], probe).samples
        return {name: first[self._places[name]] for name in host}

    def _open_busy(self, machine: str, products: int) -> Session:
        return self._opened(self._programs.busy(machine, products))

    def _chain(self, host: Sequence[str]) -> Chain:
        """Probe a chain over the machines that keep all cores of a host busy, at most `LONGEST_CHAIN` of them."""
        names = tuple(host[:LONGEST_CHAIN])
        cores = min(usable_together(self._workers[name].host_cores for name in names) or 1, len(names))

        def opened(size_bytes: int) -> Session:
            return self._opened(self._programs.chain(names, [size_bytes] * (len(names) + 1)))

        store = replace(self._store, sizes=(self._handed_on,))
        probe = store.known_or(ChainProbe, names, partial(probe_chain, cores, opened, self._handed_on))
        return Chain(names, chain_cost(probe.samples, len(names)))

    def _is_measured(self, source: str, destination: str) -> bool:
        link = self._cluster.link(source, destination)
        return link is None or link.bytes_per_second is None

    def _probe_machine(self, name: str) -> MachineProbe:
        base = self._pass([name], [SMALLEST_BYTES] * 2, 3 * SERIES_SECONDS)
        half = base.single_seconds / 2
        first = LinkSample(SMALLEST_BYTES, half, None)
        passages: dict[str, list[Passage]] = {"to": [], "from": []}
        samples: dict[str, list[LinkSample]] = {"to": [first], "from": [first]}
        for direction, direction_samples in samples.items():
            for size in self._sizes[1:]:
                worthwhile = worthwhile_size(size, direction_samples)
                if worthwhile is None:
                    break
                ends = [worthwhile, SMALLEST_BYTES] if direction == "to" else [SMALLEST_BYTES, worthwhile]
                passage = self._pass([name], ends, SERIES_SECONDS)
                passages[direction].append(passage)
                single = max(passage.single_seconds - half, 0.0)
                direction_samples.append(LinkSample(worthwhile, single, passage.stream_seconds))
        per_byte = [
            (passages[direction][-1].processor_seconds[name] - base.processor_seconds[name])
            / (samples[direction][-1].size_bytes - SMALLEST_BYTES)
            for direction in passages
        ]
        return MachineProbe(
            measured_at=time.time(),
            round_trip_seconds=base.single_seconds,
            to_machine=tuple(samples["to"]),
            from_machine=tuple(samples["from"]),
            seconds_per_byte=max(statistics.fmean(per_byte), 0.0),
            transports={destination: transport for (_, destination), transport in base.transports.items()},
        )

    def _probe_pair(self, source: str, destination: str, machines: Mapping[str, MachineProbe]) -> PairProbe:
        elsewhere = (machines[source].round_trip_seconds + machines[destination].round_trip_seconds) / 2
        on_gpus = bool(self._cluster.transport_between_gpus(source, destination))
        if on_gpus:
            elsewhere += self._bus_seconds(source, destination)

        samples: list[LinkSample] = []
        transport = ""
        for size in self._sizes:
            worthwhile = worthwhile_size(size, samples)
            if worthwhile is None:
                break
            sizes = [SMALLEST_BYTES, worthwhile, SMALLEST_BYTES]
            passage = self._pass([source, destination], sizes, SERIES_SECONDS, on_gpus=on_gpus)
            transport = passage.transports[source, destination]
            single = max(passage.single_seconds - elsewhere, 0.0)
            samples.append(LinkSample(worthwhile, single, passage.stream_seconds))
        return PairProbe(time.time(), tuple(samples), transport)

    def _bus_seconds(self, source: str, destination: str) -> float:
        """Return the bus seconds of small tensors from the client to one GPU and from the other GPU to the client."""
        buses = [bus_of(device) for name in (source, destination) for device in self._workers[name].cuda_devices[:1]]
        return sum(bus.latency_seconds for bus in buses if bus is not None)

    def _pass(
        self, machines: Sequence[str], sizes: Sequence[int], series_seconds: float, *, on_gpus: bool = False
    ) -> Passage:
        """Run a chain for about twice ``series_seconds``, or a few times if that takes longer."""
        program = self._programs.chain(machines, sizes, on_gpus=on_gpus)
        try:
            with self._opened(program) as pipeline:
                return measured_passage(pipeline, [np.zeros(sizes[0], np.uint8)], series_seconds)
        except CompileError:
            raise
        except TvmSplitError as error:
            describe_all({name: self._endpoints[name] for name in machines})  # a worker that has gone is the cause
            ends = (CLIENT, *machines) if len(machines) == 1 else machines
            raise ProfileError(
                f"the link from {ends[0]!r} to {ends[1]!r} cannot be measured: {error}. If nothing may pass between "
                "the two, say so in the cluster file: bytes_per_second: 0"
            ) from error

    def _opened(self, program: Program) -> Session:
        return Session(
            program,
            self._endpoints,
            self._programs.blob_path,
            timeout_seconds=self._timeout_seconds,
            links=self._settings,
            model="links to measure",
        )


def _agree_on_machines(first: MachineProbe, second: MachineProbe) -> bool:
    return are_alike(first.round_trip_seconds, second.round_trip_seconds)


def _agree_on_pairs(first: PairProbe, second: PairProbe) -> bool:
    return len(first.samples) == len(second.samples) and all(
        are_alike(first_sample.single_seconds, second_sample.single_seconds)
        for first_sample, second_sample in zip(first.samples, second.samples, strict=True)
    )


def has_spare_cores(machine: str, workers: Mapping[str, WorkerDescription]) -> bool:
    """Whether a host has spare cores for transfers: cores on which none of its workers computes."""
    worker = workers[machine]
    return sum(peer.threads for peer in workers.values() if peer.host == worker.host) < (worker.cores or 1)


def _in_process(cluster: Cluster) -> LinkProbe:
    """Return the links of an in-process cluster: stages pass tensors at no cost."""
    ends = (CLIENT, *cluster.machine_names)
    links = tuple(
        LinkProfile(a, b, HANDED_OVER_BYTES_PER_SECOND, 0.0, "given", time.time()) for a in ends for b in ends if a != b
    )
    return LinkProbe(links, dict.fromkeys(cluster.machine_names, StreamingCost()))

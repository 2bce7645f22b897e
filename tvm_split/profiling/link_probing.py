"""Measures the links of a cluster over the runtime that models run on: real workers, streams, credits and copies.

A program of pass-through stages sends a small tensor from the client to A, one of the probed size from A to B, and a
small one back. The time of the link is the time of a run minus compute and minus half a round trip to each machine.
Clocks of different machines are never compared. A prediction adds up the same parts that are separated here.
"""

import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import WorkerDescription, describe_all
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.events import COMPUTE
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.transport import DEFAULT
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.errors import CompileError, ProfileError
from tvm_split.placement.profile import LinkProfile, Origin, StreamingCost
from tvm_split.profiling.link_model import (
    LARGEST_BYTES,
    LEAST_LARGEST_BYTES,
    SMALLEST_BYTES,
    LinkSample,
    ProbedLink,
    ProbePrograms,
    are_close,
    fitted_line,
    probe_sizes,
    transfer_cost,
    worthwhile_size,
)
from tvm_split.profiling.machine_facts import bus_of
from tvm_split.profiling.rounds import first_and_last, rounds_of
from tvm_split.profiling.store import Store, entry_key
from tvm_split.progress import StepProgress, Steps

SERIES_SECONDS = 0.04
"""Seconds of single runs, and of a stream, per size on a fast link."""
FEWEST, MOST = 3, 60
"""Numbers of single runs, and of tensors in a stream."""
GONE_SECONDS = 1.0
"""How long to wait again for a machine whose link failed, which by then had the usual time to answer."""
CHECKS = 3
"""Most transfers with which a kept measurement is checked."""
LONG_RUN_SECONDS = 0.5
"""A run that takes longer, in seconds, is not repeated."""
IN_PROCESS_BYTES_PER_SECOND = 1e12
"""Bandwidth of links in an in-process cluster, where tensors are passed by reference."""
Ends = tuple[str, str]
"""Source and destination of a link: two machines, or a machine and the client."""
_PROBED_LINK = TypeAdapter(ProbedLink)


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
    failed: dict[Ends, TvmSplitError] | None = None,
) -> LinkProbe:
    """Measure every link between two machines or a machine and the client, and each machine's cost of transfers.

    Between machines, links whose speed is given in the cluster are not measured. A fast link takes some tenths of a
    second, a slow one a few seconds; pairs without a common machine or host are measured at the same time. Of links
    between equal machines of the same hosts two are measured. The others get the times of the faster one.

    Args:
        sizes_bytes: sizes of the tensors that may be transferred.
        timeout_seconds: limit of each wait, as in a deployment.
        cache_folder: folder for measurements, such as `store.default_folder()`; None keeps nothing. Ages are in
            ``measured_at``.
        refresh: also measure what the cache has.
        failed: gets the errors of links that cannot be measured, which are left out; without it the first is raised.

    Raises:
        ProfileError: a link cannot be used; names both ends.
        WorkerUnavailableError: a worker does not answer; names its machine and address.
        CompileError: nothing can be compiled here for a machine's architecture.
    """
    if cluster.launcher.in_process:
        ends = permutations((CLIENT, *cluster.machine_names), 2)
        free = tuple(LinkProfile(*pair, IN_PROCESS_BYTES_PER_SECOND, 0.0, "given", time.time()) for pair in ends)
        return LinkProbe(free, dict.fromkeys(cluster.machine_names, StreamingCost()))
    with cluster.start() as workers:
        return _Probing(workers, sizes_bytes, timeout_seconds, Steps(on_progress), cache_folder, refresh, failed).run()


def kept_links(cluster: Cluster, cache_folder: Path) -> dict[Ends, LinkProfile]:
    """Return the newest measurement that is kept of each link, for tensors of any size; measures nothing."""
    with cluster.start() as workers:
        folder = cache_folder if cache_folder.is_dir() else None
        return _Probing(workers, (), 0.0, Steps(None), folder, refresh=False).kept()


@dataclass
class _Probing:
    """Measures the links of one cluster, once."""

    cluster: Workers
    tensor_sizes: Sequence[int]
    timeout_seconds: float
    steps: Steps
    cache_folder: Path | None
    refresh: bool
    failed: dict[Ends, TvmSplitError] | None = None

    def __post_init__(self) -> None:
        self._sizes = probe_sizes(self.tensor_sizes)
        self._endpoints = self.cluster.endpoints()
        self._workers = describe_all(self._endpoints)
        self._hosts = {CLIENT: CLIENT, **{name: worker.host for name, worker in self._workers.items()}}
        targets = {
            machine.name: machine.target for machine in self.cluster.machines if machine.has_gpu and machine.target
        }
        self._programs = ProbePrograms({name: worker.architecture for name, worker in self._workers.items()}, targets)
        self._store = Store(self.cache_folder, {"links from": socket.gethostname()})
        self._settings = self.cluster.link_settings
        self._probes: dict[Ends, ProbedLink] = {}

    def run(self) -> LinkProbe:
        links = list(permutations((CLIENT, *self.cluster.machine_names), 2))
        of_client = [ends for ends in links if CLIENT in ends]
        pairs = [ends for ends in links if CLIENT not in ends and self._is_measured(ends)]
        groups = [(first_and_last(group, self._class), group) for group in (of_client, pairs)]
        self.steps.total = sum(len(list(rounds_of(probed, self._hosts))) for probed, _ in groups)
        estimated: set[Ends] = set()
        for probed, group in groups:  # pairs need the round trips of their machines
            for together in rounds_of(probed, self._hosts):
                self.steps.begin("links " + ", ".join(f"{source} to {end}" for source, end in together))
                with ThreadPoolExecutor(len(together), thread_name_prefix="probe") as threads:
                    tried = zip(together, threads.map(self._tried, together), strict=True)
                    self._probes.update({ends: probe for ends, probe in tried if probe is not None})
            measured = [ends for ends in probed if ends in self._probes]
            slowest_first = sorted(measured, key=lambda ends: -self._probes[ends].samples[0].single_seconds)
            fastest = {self._class(ends): self._probes[ends] for ends in slowest_first}
            unprobed = [ends for ends in group if ends not in probed and self._class(ends) in fastest]
            self._probes.update({ends: fastest[self._class(ends)] for ends in unprobed})
            estimated.update(unprobed)
        self.steps.done()
        streaming = {
            name: StreamingCost()
            if has_spare_cores(name, self._workers) or not {(CLIENT, name), (name, CLIENT)} <= self._probes.keys()
            else transfer_cost(self._probes[CLIENT, name], self._probes[name, CLIENT])
            for name in self.cluster.machine_names
        }
        profiles = (self._profile(ends, ends in estimated) for ends in links)
        return LinkProbe(tuple(profile for profile in profiles if profile is not None), streaming)

    def kept(self) -> dict[Ends, LinkProfile]:
        sizes = range(LEAST_LARGEST_BYTES.bit_length() - 1, LARGEST_BYTES.bit_length())
        for ends in permutations((CLIENT, *self.cluster.machine_names), 2):
            keys = (self._key(ends, probe_sizes((2**size,))) for size in sizes)
            probes = [probe for key in keys if (probe := self._store.get(key, _PROBED_LINK)) is not None]
            if probes:
                self._probes[ends] = max(probes, key=lambda probe: probe.measured_at)
        profiles = {ends: self._profile(ends, is_estimated=False) for ends in self._probes}
        return {ends: profile for ends, profile in profiles.items() if profile is not None}

    def _is_measured(self, ends: Ends) -> bool:
        link = self.cluster.link(*ends)
        return link is None or link.bytes_per_second is None

    def _class(self, ends: Ends) -> Hashable:
        """Return a key that is equal for links between equal machines of the same hosts."""
        return *map(self._place, ends), self._settings.get(ends)

    def _place(self, end: str) -> Hashable:
        if end == CLIENT:
            return CLIENT
        worker = self._workers[end]
        to_client = (self._settings.get((CLIENT, end)), self._settings.get((end, CLIENT)))
        return worker.hostname, worker.cores, worker.threads, to_client

    def _profile(self, ends: Ends, is_estimated: bool) -> LinkProfile | None:
        """Return a link's profile, as described in the cluster or else probed; None if it is closed or not probed."""
        link = self.cluster.link(*ends)
        if link is not None and link.is_closed:
            return None
        if link is not None and link.bytes_per_second is not None:
            transport = self.cluster.transport_between_gpus(*ends)
            return LinkProfile(*ends, link.bytes_per_second, link.latency_seconds, "given", time.time(), transport)
        probe = self._probes.get(ends)
        if probe is None:
            return None
        latency, bytes_per_second = fitted_line(probe.samples)
        origin: Origin = "estimated" if is_estimated else "measured"
        return LinkProfile(*ends, bytes_per_second, latency, origin, probe.measured_at, probe.transport)

    def _tried(self, ends: Ends) -> ProbedLink | None:
        """Return `_known_or_probed`; None if it fails and `failed` collects errors.

        Also None if a link between the client and one of the two machines has failed, since the probe passes it.
        """
        needed = [(CLIENT, ends[0]), (ends[1], CLIENT)] if CLIENT not in ends else []
        try:
            return self._known_or_probed(ends) if self._probes.keys() >= set(needed) else None
        except TvmSplitError as error:
            if self.failed is None:
                raise
            self.failed[ends] = error
            return None

    def _known_or_probed(self, ends: Ends) -> ProbedLink:
        """Return the probe that is kept for the same ends, versions and sizes, or else a new one.

        If new transfers from the client disagree with the kept probe of that link, no kept probe is used any more.
        """
        key = self._key(ends, self._sizes)
        probe = None if self.refresh else self._store.get(key, _PROBED_LINK)
        if probe is not None and ends[0] == CLIENT and not self._holds(ends, probe):
            self.refresh, probe = True, None
        if probe is None:
            probe = self._probe(ends)
            self._store.put({key: probe})
        return probe

    def _holds(self, ends: Ends, probe: ProbedLink) -> bool:
        """Whether one of `CHECKS` new transfers agrees with a kept probe: other programs only make them longer."""
        transfers = (self._pass(ends, SMALLEST_BYTES)[0].single_seconds / 2 for _ in range(CHECKS))
        return any(are_close(seconds, probe.samples[0].single_seconds) for seconds in transfers)

    def _key(self, ends: Ends, sizes: Sequence[int]) -> str:
        machines = [end for end in ends if end != CLIENT]
        ways = dict.fromkeys([ends, *(way for name in machines for way in ((CLIENT, name), (name, CLIENT)))])
        settings = [self._settings.get(way, DEFAULT) for way in ways]
        opened = [[setting.wanted, setting.address] for setting in settings]
        identities = [[name, self._identity(name)] for name in machines]
        return entry_key(link=list(ends), ends=identities, opened=opened, sizes=list(sizes))

    def _identity(self, name: str) -> list[Any]:
        """Return what identifies a machine; for local workers without their port, which changes every time."""
        endpoint, worker = self._endpoints[name], self._workers[name]
        is_local = self.cluster.launcher.on_this_host
        place = len(self.cluster.machines) if is_local else [endpoint.address, endpoint.tls is not None]
        versions = [worker.protocol_version, worker.tvm_version, worker.numpy_version]
        return [place, worker.hostname, worker.cores, worker.core_quota, worker.threads, versions]

    def _probe(self, ends: Ends) -> ProbedLink:
        elsewhere = 0.0
        if CLIENT not in ends:
            elsewhere = self._bus_seconds(ends) + sum(
                self._probes[way].samples[0].single_seconds for way in ((CLIENT, ends[0]), (ends[1], CLIENT))
            )
        samples: list[LinkSample] = []
        transport = ""
        for size in self._sizes:
            worthwhile = worthwhile_size(size, samples)
            if worthwhile is None:
                break
            sample, transport = self._pass(ends, worthwhile)
            if CLIENT in ends and not samples:
                elsewhere = sample.single_seconds / 2
            samples.append(replace(sample, single_seconds=max(sample.single_seconds - elsewhere, 0.0)))
        return ProbedLink(time.time(), tuple(samples), transport)

    def _bus_seconds(self, ends: Ends) -> float:
        """Return the bus seconds of small tensors from the client to one GPU and from the other GPU to the client."""
        if not self.cluster.transport_between_gpus(*ends):
            return 0.0
        buses = [bus_of(device) for name in ends for device in self._workers[name].cuda_devices[:1]]
        return sum(bus.latency_seconds for bus in buses if bus is not None)

    def _pass(self, ends: Ends, size_bytes: int) -> tuple[LinkSample, str]:
        """Return a sample of the link with tensors of this size, passed from the client and back; and its transport."""
        machines = [end for end in ends if end != CLIENT]
        sizes = [SMALLEST_BYTES] * (len(machines) + 1)
        sizes[0 if ends[0] == CLIENT else 1] = size_bytes
        on_gpus = CLIENT not in ends and bool(self.cluster.transport_between_gpus(*ends))
        program = self._programs.chain(machines, sizes, on_gpus=on_gpus)
        try:
            with Session(
                Opening(
                    program,
                    self._endpoints,
                    self._programs.blob_path,
                    timeout_seconds=self.timeout_seconds,
                    links=self._settings,
                    model="links to measure",
                )
            ) as pipeline:
                sample = measured_passage(pipeline, [np.zeros(sizes[0], np.uint8)], size_bytes)
                return sample, {(link.source, link.destination): link.transport for link in pipeline.links()}[ends]
        except CompileError:
            raise
        except TvmSplitError as error:
            # A worker that has gone is the cause. The link has waited for it already, so this asks only shortly.
            describe_all({name: self._endpoints[name] for name in machines}, GONE_SECONDS)
            raise ProfileError(
                f"the link from {ends[0]!r} to {ends[1]!r} cannot be measured: {error}. If nothing may pass between "
                "the two, say so in the cluster file: bytes_per_second: 0"
            ) from error


def _processor_seconds(pipeline: Session) -> float:
    """Return the processor seconds that all workers have used."""
    return sum(seen.processor_seconds for machine, seen in pipeline.observe().items() if machine != CLIENT)


def measured_passage(pipeline: Session, inputs: Sequence[np.ndarray], size_bytes: int) -> LinkSample:
    """Return the times of single runs for about `SERIES_SECONDS` and of a stream for as long, after a warm-up run.

    Times are those of the whole pipeline without its computing. ``single_seconds`` is the lower quartile of single
    runs. ``stream_seconds`` is None if a single run takes `LONG_RUN_SECONDS` or longer.
    """
    pipeline.run(inputs)
    runs = [_seconds_of_run(pipeline, inputs)]
    count = _repetitions(runs[0])
    runs += [_seconds_of_run(pipeline, inputs) for _ in range(count)]
    computed: dict[str, dict[int, float]] = defaultdict(dict)
    for event in pipeline.trace():
        if event.kind == COMPUTE:
            computed[event.stage][event.sequence] = (event.end_nanoseconds - event.start_nanoseconds) / 1e9
    singles = [seconds - sum(stage[number] for stage in computed.values()) for number, seconds in enumerate(runs, 1)]
    compute_seconds = sum(statistics.median(stage.values()) for stage in computed.values())
    stream_seconds, processor_seconds, client_seconds = None, 0.0, 0.0
    if runs[0] < LONG_RUN_SECONDS:
        streamed = 1 + _repetitions(runs[0] / 2)
        before = _processor_seconds(pipeline)
        client_before = time.process_time()
        arrivals = [time.perf_counter() for _ in pipeline.stream([inputs] * streamed)]
        client_seconds = (time.process_time() - client_before) / streamed
        used = _processor_seconds(pipeline) - before
        processor_seconds = max(used / streamed - compute_seconds, 0.0)
        stream_seconds = (arrivals[-1] - arrivals[0]) / (streamed - 1)
    # Other programs only make runs longer, so the lower quartile counts.
    single_seconds = statistics.quantiles(singles, n=4, method="inclusive")[0]
    return LinkSample(size_bytes, max(single_seconds, 0.0), stream_seconds, processor_seconds, client_seconds)


def _repetitions(seconds: float) -> int:
    """Return how many runs to measure if one takes ``seconds``."""
    return 1 if seconds > LONG_RUN_SECONDS else min(max(int(SERIES_SECONDS / max(seconds, 1e-6)), FEWEST), MOST)


def _seconds_of_run(pipeline: Session, inputs: Sequence[np.ndarray]) -> float:
    begin = time.perf_counter()
    pipeline.run(inputs)
    return time.perf_counter() - begin


def has_spare_cores(machine: str, workers: Mapping[str, WorkerDescription]) -> bool:
    """Whether a host has spare cores for transfers: cores on which none of its workers computes."""
    worker = workers[machine]
    return sum(peer.threads for peer in workers.values() if peer.host == worker.host) < (worker.cores or 1)

"""Converts probes of a cluster's links into the link profiles that plans use. Pure functions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from rpc_runtime.program.routes import CLIENT
from tvm_split.cluster.cluster import Cluster
from tvm_split.planner.profile import LinkProfile
from tvm_split.profiling.link_samples import ChainCost, LinkLine, fitted_line, in_chain
from tvm_split.profiling.link_store import MachineProbe, PairProbe
from tvm_split.profiling.spot_checks import SpotChecked


@dataclass(frozen=True)
class Chain:
    """A probed chain over machines of a host: its cost, and the extra seconds of a stage's start."""

    machines: tuple[str, ...]
    cost: ChainCost
    start_seconds: float


def link_profiles(
    cluster: Cluster,
    machines: SpotChecked[str, MachineProbe],
    pairs: SpotChecked[tuple[str, str], PairProbe],
    waking: Mapping[str, float],
    chains: Mapping[str, Chain],
) -> Iterator[LinkProfile]:
    """Yield the profile of every link that is not closed.

    Args:
        waking: extra seconds of a hop to a machine whose threads sleep.
        chains: the probed chain of each machine on a host without spare cores. Links between such machines, and to the
            client, use its cost instead of ``waking``.
    """
    ends = (CLIENT, *cluster.machine_names)
    for source, destination in ((a, b) for a in ends for b in ends if a != b):
        given = cluster.link(source, destination)
        if given is not None and given.is_closed:
            continue
        if given is not None and given.bytes_per_second is not None:
            speed = (given.bytes_per_second, given.latency_seconds)
            transport = cluster.transport_between_gpus(source, destination)
            yield LinkProfile(source, destination, *speed, "given", time.time(), transport)
            continue
        found: MachineProbe | PairProbe
        if CLIENT in (source, destination):
            found = machines.values[source if destination == CLIENT else destination]
            # The probe may come from a similar machine, and then names that machine.
            (transport,) = (how for end, how in found.transports.items() if (end == CLIENT) == (destination == CLIENT))
            is_assumed = not machines.assumed.isdisjoint((source, destination))
        else:
            found = pairs.values[source, destination]
            transport = found.transport
            is_assumed = (source, destination) in pairs.assumed
        line = _line(cluster, (source, destination), machines.values, pairs.values)
        through = {chains.get(end) for end in (source, destination) if end != CLIENT}
        chain = through.pop() if len(through) == 1 else None
        if chain is not None:
            hops = pairwise((CLIENT, *chain.machines, CLIENT))
            along = [_line(cluster, hop, machines.values, pairs.values) for hop in hops]
            line = in_chain(line, along, chain.cost)
        else:
            slept = statistics.fmean(waking[end] for end in (source, destination) if end in waking)
            line = replace(line, latency_seconds=line.latency_seconds + slept)
        yield LinkProfile(
            source,
            destination,
            line.bytes_per_second,
            line.latency_seconds,
            "estimated" if is_assumed else "measured",
            found.measured_at,
            transport,
        )


def _line(
    cluster: Cluster,
    ends: tuple[str, str],
    machines: Mapping[str, MachineProbe],
    pairs: Mapping[tuple[str, str], PairProbe],
) -> LinkLine:
    """Return a link's line as given in the cluster, or as measured without other traffic."""
    source, destination = ends
    given = cluster.link(source, destination)
    if given is not None and given.bytes_per_second is not None:
        return LinkLine(given.latency_seconds, given.bytes_per_second)
    if source == CLIENT:
        return fitted_line(machines[destination].to_machine)
    return fitted_line(machines[source].from_machine if destination == CLIENT else pairs[ends].samples)

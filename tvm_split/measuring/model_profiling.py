"""All that planning has to know of a model on a cluster: its pieces on the machines, and the links between these."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tvm_split.cluster.cluster import Cluster
from tvm_split.measuring.cluster_profiling import MeasuredCluster, ModelProfiler
from tvm_split.measuring.cluster_timing import DEFAULT_TIMEOUT_SECONDS
from tvm_split.measuring.link_probing import probe_links
from tvm_split.measuring.store import default_folder
from tvm_split.model import Model
from tvm_split.planner.graph import piece_edges
from tvm_split.steps import StepProgress


def profile_model(
    model: Model,
    cluster: Cluster,
    *,
    database: str | Path | None = None,
    profiler: ModelProfiler | None = None,
    refresh: bool = False,
    cache_folder: str | Path | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    on_progress: StepProgress | None = None,
) -> MeasuredCluster:
    """The pieces of a model on every machine, then the links for tensors of the sizes that cuts of this model have.

    Arguments and errors are those of `ModelProfiler` and `probe_links`; what was measured is kept in ``cache_folder``,
    by default in the user's cache. A ``profiler`` of this model that measured before need not compile again.
    """
    folder = default_folder() if cache_folder is None else Path(cache_folder)
    try:
        with cluster.kept():
            measured = (profiler or ModelProfiler(model, database)).measure(
                cluster,
                refresh=refresh,
                cache_folder=folder,
                timeout_seconds=timeout_seconds,
                on_progress=on_progress,
            )
            profile = measured.profile
            edges = piece_edges(model.graph, [piece.layers for piece in profile.pieces])
            probe = probe_links(
                cluster,
                sorted({int(edge.bytes) for edge in edges}),
                stage_bytes=profile.even_bytes,
                timeout_seconds=timeout_seconds,
                on_progress=on_progress,
                cache_folder=folder,
                refresh=refresh,
            )
    finally:
        cluster.release()
    machines = tuple(
        dataclasses.replace(machine, streaming=probe.streaming[machine.machine]) for machine in profile.machines
    )
    doubts = profile.doubts + probe.doubts
    return dataclasses.replace(
        measured, profile=dataclasses.replace(profile, machines=machines, links=probe.links, doubts=doubts)
    )

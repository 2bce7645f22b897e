"""Measurements of links are reused between the same ends, and repeated on request or if they cannot be read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rpc_runtime.transports.transport import LinkSetting
from tvm_split.profiling.link_model import LinkSample, PairProbe
from tvm_split.profiling.link_store import LinkStore
from tvm_split.profiling.store import Store

SAMPLES = (LinkSample(64, 1e-3, 5e-4), LinkSample(65536, 2e-3, None))
ENDS = {"left": ["left:1", "host"], "right": ["right:1", "host"]}


@dataclass
class Measuring:
    """Returns another measurement with every call."""

    times: int = 0

    def pair(self) -> PairProbe:
        self.times += 1
        return PairProbe(float(self.times), SAMPLES, "grpc")


def links(folder: Path, refresh: bool = False) -> LinkStore:
    return LinkStore(Store(folder, {"links from": "here"}), ENDS, {}, (64, 65536, 1048576), refresh)


def test_measured_once_unless_it_is_refreshed(tmp_path: Path) -> None:
    pair = Measuring().pair
    probes = [links(tmp_path, refresh).known_or(PairProbe, ["left", "right"], pair) for refresh in (False, False, True)]
    assert [probe.measured_at for probe in probes] == [1.0, 1.0, 2.0]


def test_other_ends_sizes_and_directions_are_measured(tmp_path: Path) -> None:
    store, pair = links(tmp_path), Measuring().pair
    variants = [
        store,
        replace(store, settings={("left", "right"): LinkSetting("relay:1")}),
        replace(store, ends={**ENDS, "right": ["right:2", "host"]}),
        replace(store, sizes=(64, 65536, 2097152)),
    ]
    probes = [variant.known_or(PairProbe, ["left", "right"], pair) for variant in variants]
    probes.append(store.known_or(PairProbe, ["right", "left"], pair))
    assert len({probe.measured_at for probe in probes}) == 5

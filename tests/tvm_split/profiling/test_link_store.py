"""What was measured of links is found again between the same ends, and measured again when asked to or unreadable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from rpc_runtime.transports.transport import LinkSetting
from tvm_split.profiling.link_samples import LinkSample, StreamSample
from tvm_split.profiling.link_store import LinkStore, MachineProbe, PairProbe, StreamProbe
from tvm_split.profiling.store import Store

SAMPLES = (LinkSample(64, 1e-3, 5e-4), LinkSample(65536, 2e-3, None))
ENDS = {"left": ["left:1", "host"], "right": ["right:1", "host"]}


class Measuring:
    """Measures with every call something else."""

    def __init__(self) -> None:
        self.times = 0

    def machine(self) -> MachineProbe:
        return MachineProbe(self._now(), 1e-3, SAMPLES, SAMPLES, 1e-9, {"client": "grpc"})

    def pair(self) -> PairProbe:
        return PairProbe(self._now(), SAMPLES, "grpc")

    def stream(self) -> StreamProbe:
        return StreamProbe(self._now(), (StreamSample(3e-3, 4e-3, 3.5e-3), StreamSample(15e-3, 16e-3, 17e-3)))

    def _now(self) -> float:
        self.times += 1
        return float(self.times)


@pytest.fixture
def measuring() -> Measuring:
    return Measuring()


def links(folder: Path | None, refresh: bool = False) -> LinkStore:
    return LinkStore(Store(folder, {"links from": "here"}), ENDS, {}, (64, 65536, 1048576), refresh)


KINDS: list[Callable[[LinkStore, Measuring], object]] = [
    lambda kept, measuring: kept.known_or(MachineProbe, ["left"], measuring.machine),
    lambda kept, measuring: kept.known_or(PairProbe, ["left", "right"], measuring.pair),
    lambda kept, measuring: kept.known_or(StreamProbe, ["left", "right"], measuring.stream),
]


@pytest.mark.parametrize("probe", KINDS, ids=["machine", "pair", "stream"])
def test_measured_once(probe: Callable[[LinkStore, Measuring], object], measuring: Measuring, tmp_path: Path) -> None:
    first = probe(links(tmp_path), measuring)
    assert probe(links(tmp_path), measuring) == first
    assert measuring.times == 1
    (kept,) = tmp_path.glob("*.json")
    refreshed = probe(links(tmp_path, refresh=True), measuring)
    assert refreshed != first
    assert probe(links(tmp_path), measuring) == refreshed
    kept.write_text("{}")
    assert probe(links(tmp_path), measuring) not in (first, refreshed)
    assert list(tmp_path.glob("*.json")) == [kept]


def test_streams_that_contradict_their_single_runs_are_told_and_not_kept(tmp_path: Path) -> None:
    found = [StreamProbe(float(now), (StreamSample(15e-3, 16e-3, 52e-3),)) for now in (1, 2)]
    measured = [links(tmp_path).known_or(StreamProbe, ["left"], lambda probe=each: probe) for each in found]
    assert measured == found
    assert found[0].doubts == ("had a result every 52 ms, and one alone took 16 ms",)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_kept_without_a_folder(measuring: Measuring) -> None:
    first, second = (links(None).known_or(MachineProbe, ["left"], measuring.machine) for _ in range(2))
    assert first != second


def test_other_ends_sizes_and_directions_are_measured(measuring: Measuring, tmp_path: Path) -> None:
    kept = links(tmp_path)
    others = [
        kept,
        dataclasses.replace(kept, settings={("left", "right"): LinkSetting("relay:1")}),
        dataclasses.replace(kept, ends={**ENDS, "right": ["right:2", "host"]}),
        dataclasses.replace(kept, sizes=(64, 65536, 2097152)),
    ]
    found = [each.known_or(PairProbe, ["left", "right"], measuring.pair) for each in others]
    found.append(kept.known_or(PairProbe, ["right", "left"], measuring.pair))
    assert len({each.measured_at for each in found}) == 5

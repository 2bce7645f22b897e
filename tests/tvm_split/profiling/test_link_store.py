"""What was measured of links is found again between the same ends, and measured again when asked to or unreadable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from rpc_runtime.transports.transport import LinkSetting
from tvm_split.profiling.link_model import LinkSample, MachineProbe, PairProbe
from tvm_split.profiling.link_store import LinkStore
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
]


@pytest.mark.parametrize("probe", KINDS, ids=["machine", "pair"])
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

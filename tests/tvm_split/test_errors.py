from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rpc_runtime.registry import PluginError
from schedules import blocks
from tests.helpers.placement.profiles import A, chain_problem, chain_profile
from tvm_split.arguments import as_cluster
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import Launcher
from tvm_split.cluster.machine import Machine
from tvm_split.errors import last_line
from tvm_split.frontends import Frontend, load_model
from tvm_split.placement.strategy import Strategy, solve_by

FRONTEND = Frontend("idle-files", "files of nothing", f"{__name__}:nothing", suffixes=(".idle",))


def nothing(*arguments: object) -> None:
    return None


class NoPlan(Strategy):
    name = "idle"
    solve = nothing  # type: ignore[assignment]


@dataclass(frozen=True)
class NoMachines(Launcher):
    name = "idle"
    find = nothing  # type: ignore[assignment]


@dataclass(frozen=True)
class NoWorkers(Launcher):
    name = "idle-workers"
    start = nothing  # type: ignore[assignment]

    def find(self) -> Cluster:
        return Cluster((Machine("a"),), launcher=self)


@pytest.fixture
def idle_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package of kinds that return nothing when they are used."""
    package = tmp_path / "idle-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: idle\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        f"[tvm_split.frontends]\nidle-files = {__name__}:FRONTEND\n[tvm_split.strategies]\nidle = {__name__}:NoPlan\n"
        f"[tvm_split.launchers]\nidle = {__name__}:NoMachines\nidle-workers = {__name__}:NoWorkers\n"
    )
    (tmp_path / "model.idle").write_text("idle")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("idle_plugins")
@pytest.mark.parametrize(
    ("use", "kind"),
    [
        (lambda: load_model("model.idle"), "frontend 'idle-files'"),
        (lambda: solve_by("idle", chain_problem(chain_profile({A: [0.01]})), 1.0), "strategy 'idle'"),
        (lambda: Cluster.at("idle"), "launcher 'idle'"),
        (lambda: as_cluster(NoMachines()), "launcher 'idle'"),
        (lambda: Cluster.at("idle-workers").start().endpoints(), "launcher 'idle-workers'"),
    ],
)
def test_a_plugin_that_returns_nothing_is_named(use: Callable[[], object], kind: str) -> None:
    with pytest.raises(PluginError, match=kind):
        use()


@pytest.mark.parametrize("of", [last_line, blocks.last_line])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("trace\nall loops must be bound", "all loops must be bound"),
        ("the loops must be the deepest:\n  T.reads(x[0])\n  ^^^^^^^^^^^^^\n\n", "  T.reads(x[0])"),
        ("", "ValueError"),
        ("^^^^", "ValueError"),
    ],
)
def test_the_last_line_of_an_error_says_something(of, text, line):
    assert of(ValueError(text)) == line

"""A known network is planned once: its plan is used again, as long as all that it was made from is unchanged."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tvm_split
from rpc_runtime import hardware
from tests.helpers.scripted_kernels import Noise, ScriptedKernels
from tvm_split.cluster.machine import Link
from tvm_split.errors import NoPlanError
from tvm_split.profiling import kernel_timing, link_model

pytestmark = pytest.mark.usefixtures("busy_machine")
A, B = "machine-a", "machine-b"
HURRIED = {"time_limit_seconds": 0.1, "objective": "latency", "auto_shards": False}
"""Demands with which each planning times one more kernel."""


def model_of(scale: float = 1.0, example: float = 1.0) -> tvm_split.Model:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(*sizes) for sizes in ((8, 16), (16, 24), (24, 40), (40, 12)))).eval()
    with torch.no_grad():
        network[2].weight.mul_(scale)
    return tvm_split.load_model(network, (torch.full((2, 8), example),))


def planned(
    model: tvm_split.Model,
    cluster: tvm_split.Cluster,
    *,
    reuse: bool = True,
    steps: list[str] | None = None,
    **demands: Any,
) -> tuple[tvm_split.Plan, bool]:
    """Return the plan, and whether it was searched for now; ``steps`` gets what was done."""
    steps = [] if steps is None else steps
    demands = {**HURRIED, **demands}
    plan = tvm_split.plan(model, cluster, reuse=reuse, on_progress=lambda what, *_: steps.append(what), **demands)
    return plan, "searching for the best plan" in steps


class Known(NamedTuple):
    """A network, the workers that it was planned for, and the plan, which has estimates."""

    model: tvm_split.Model
    workers: tvm_split.Workers
    plan: tvm_split.Plan


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, busy_machine: None) -> Iterator[tuple[Known, Path]]:
    """Yield a known network, and the cache folder after it was planned."""
    folder, model = tmp_path_factory.mktemp("cache"), model_of()
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch, tvm_split.Cluster.local(2) as workers:
        patch.setenv("TVM_SPLIT_CACHE", str(folder))
        plan, is_new = planned(model, workers)
        assert is_new
        yield Known(model, workers, plan), folder


@pytest.fixture
def known(first: tuple[Known, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Known:
    """Return a known network, with a cache folder of this test alone."""
    network, folder = first
    shutil.copytree(folder, tmp_path / "cache")
    monkeypatch.setenv("TVM_SPLIT_CACHE", str(tmp_path / "cache"))
    return network


def estimated(plan: tvm_split.Plan) -> float:
    assert plan.prediction is not None
    return sum(machine.estimated_share for machine in plan.prediction.machines)


def test_a_plan_with_estimates_is_used_until_it_is_refined(known: Known) -> None:
    model, workers, first = known
    assert estimated(first) > 0
    again, is_new = planned(model, workers)
    assert not is_new
    (remark,) = again.remarks
    assert "--refresh" in remark
    assert dataclasses.replace(again, remarks=()) == first
    refined, is_new = planned(model, workers, reuse=False)
    assert is_new
    assert estimated(refined) < estimated(first)
    assert dataclasses.replace(planned(model, workers)[0], remarks=()) == refined
    refreshed, is_new = planned(model, workers, refresh=True)
    assert (is_new, refreshed.remarks) == (True, ())


def test_a_plan_without_estimates_has_nothing_to_tell(known: Known) -> None:
    """Other demands are other plans; so is the time in which they may be made."""
    patient = {"time_limit_seconds": 60.0}
    assert planned(known.model, known.workers, **patient)[1]
    whole, is_new = planned(known.model, known.workers, **patient)
    assert not is_new
    assert (estimated(whole), whole.remarks) == (0.0, ())


def test_measurements_for_another_network_do_not_change_a_plan(known: Known) -> None:
    """They may be of kernels that the plan estimates; that is no reason to plan, compile and send all again."""
    wider = nn.Sequential(*(nn.Linear(*sizes) for sizes in ((8, 16), (16, 24), (24, 40)))).eval()
    planned(tvm_split.load_model(wider, (torch.ones(2, 8),)), known.workers, time_limit_seconds=60.0)
    assert not planned(known.model, known.workers)[1]


def described(workers: tvm_split.Workers, **changes: Any) -> tvm_split.Cluster:
    """Return a session of the same workers, of a cluster with other machines or links."""
    fields = {"machines": workers.machines, "launcher": workers.launcher, **changes}
    return tvm_split.Workers(tvm_split.Cluster(**fields), workers)


def with_memory(workers: tvm_split.Workers) -> tvm_split.Cluster:
    first, *others = workers.machines
    return described(workers, machines=(dataclasses.replace(first, memory_bytes=2**30), *others))


CHANGES: dict[str, Callable[[Known], tuple[tvm_split.Model, tvm_split.Cluster]]] = {
    "weights": lambda known: (model_of(2.0), known.workers),
    "memory": lambda known: (known.model, with_memory(known.workers)),
    "link": lambda known: (known.model, described(known.workers, links=(Link(A, B, 1e6, 1e-3),))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_network_or_cluster_is_planned_anew(change: Callable[..., Any], known: Known) -> None:
    assert planned(*change(known))[1]


@pytest.mark.parametrize(("codec", "is_new"), [("int8", True), ("none", False)])
def test_codecs_are_tried_on_the_inputs_of_now(codec: str, is_new: bool, known: Known) -> None:
    """The error that a rounding codec makes, and thus whether it is allowed, is that for the example inputs."""
    cluster = described(known.workers, links=(Link(A, B, 1e6, 1e-3, codec=codec),))
    assert planned(known.model, cluster)[1]
    assert not planned(known.model, cluster)[1]
    assert planned(model_of(example=2.0), cluster)[1] == is_new


@pytest.mark.parametrize("demands", [{"pin": {"0": B}}, {"objective": "throughput"}])
def test_another_request_is_planned_anew(demands: dict[str, Any], known: Known) -> None:
    assert planned(known.model, known.workers, **demands)[1]


def test_a_machine_that_became_slower_is_planned_for_anew(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Noise({A: [3.0], B: [3.0]})
    monkeypatch.setattr(kernel_timing, "open_session", lambda _, __, machine: ScriptedKernels(machine.name, slow))
    plan, is_new = planned(known.model, known.workers)
    assert is_new
    assert plan.prediction is not None
    assert known.plan.prediction is not None
    assert plan.prediction.latency_seconds > known.plan.prediction.latency_seconds
    assert not planned(known.model, known.workers)[1]


def test_links_that_changed_are_planned_for_anew(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_model, "DISAGREEMENT", 0.0)
    monkeypatch.setattr(link_model, "WAKE_UP_SECONDS", -1.0)
    steps: list[str] = []
    assert planned(known.model, known.workers, steps=steps)[1]
    assert not [step for step in steps if step.startswith("timing")]  # the times of kernels hold


def test_cores_that_changed_are_planned_for_anew(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = hardware.own_cores()
    monkeypatch.setattr(hardware, "own_cores", lambda: dataclasses.replace(cores, quota=0.5))
    assert planned(known.model, known.workers)[1]


def test_memory_that_is_gone_is_not_planned_with(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_memory_bytes", lambda: 1)
    with pytest.raises(NoPlanError, match="memory"):
        planned(known.model, known.workers)


def test_a_damaged_plan_is_made_again(known: Known, tmp_path: Path) -> None:
    for path in (tmp_path / "cache" / "compiled").iterdir():
        path.write_bytes(b"{}")
    assert planned(known.model, known.workers)[1]

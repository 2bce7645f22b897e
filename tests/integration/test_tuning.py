"""Tuning with measurements: through a tracker with one and two servers, one of them killed, stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import tvm_split
from schedules.template import text_of
from schedules.traits import traits_of
from schedules.tuning import DatabaseWriter, Effort
from schedules.tuning.database import RECORDS
from tests.helpers.rpc_lab import KEY, RpcLab
from tests.helpers.schedules.schedule_harness import normal
from tvm_split.compiler.targets import tvm_target
from tvm_split.tuning import kernels_to_tune

QUICK = Effort(rounds=1, runs=3, build_timeout_seconds=60.0)
pytestmark = pytest.mark.usefixtures("no_process_stays")


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1),
            torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 10),
        ).eval()  # fmt: skip
    return tvm_split.load_model(network, (torch.randn(1, 3, 6, 6),))


@pytest.fixture(scope="module")
def plan(model: tvm_split.Model) -> tvm_split.Plan:
    return tvm_split.plan(model, tvm_split.Cluster.in_process(machines=2, threads=1))


def tried(folder: Path) -> list[str]:
    """Return a text (kernel and choices) per measured candidate, without duels, which measure candidates again."""
    records = map(json.loads, (folder / RECORDS).read_text().splitlines())
    return [
        f"{record['kernel']} {record['choices']}"
        for record in records
        if not record["is_decision"] and len(record["rounds"]) <= 1
    ]


@pytest.mark.slow
def test_tracker_with_two_servers_one_of_which_is_killed(model, plan, tmp_path):
    with RpcLab(tmp_path, servers=2) as lab:
        devices = []

        def kill_in_the_middle(progress):
            devices.append(progress.devices)
            if progress.doing == "searching" and lab.servers[1].poll() is None:
                lab.kill_server(1)

        report = tvm_split.tune(
            model, plan, database=tmp_path / "tuned", trials=18, tracker=lab.address, key=KEY, effort=QUICK,
            on_progress=kill_in_the_middle,
        )  # fmt: skip
    assert devices[0] == 2
    assert report.trials == 18
    assert all(kernel.default_seconds is not None for kernel in report.kernels)
    assert sum(kernel.failures for kernel in report.kernels) <= 1
    shares = sum(kernel.share for kernel in report.kernels)
    assert shares + report.fixed_seconds / report.default_seconds == pytest.approx(1.0)
    assert len(set(tried(tmp_path / "tuned"))) == 18


@pytest.mark.slow
def test_the_database_changes_what_is_compiled(model, plan, tmp_path, monkeypatch):
    """The default folder's decisions are used without a request, and the results stay those of the source."""
    folder = tmp_path / "tuned"
    report = tvm_split.tune(model, plan, database=folder, trials=0, effort=QUICK)
    assert len(report.kernels) == 3
    assert not any(kernel.kept for kernel in report.kernels)
    target = tvm_target(plan.machines[0].target)
    kernels = kernels_to_tune(model, plan, [machine.name for machine in plan.machines], plan.machines[0].target)[0]
    decided = {}
    with DatabaseWriter(folder) as writer:
        for kernel in kernels:
            decided[kernel.name] = other_choices(kernel, target)
            writer.add_decision(kernel.function, target, decided[kernel.name], 1e-9)
    monkeypatch.setenv("TVM_SPLIT_DATABASE", str(folder))
    bundle = tvm_split.compile(model, plan, dump_folder=tmp_path / "dump")
    assert bundle.verified == "yes"
    scheduled = "\n".join(path.read_text() for path in (tmp_path / "dump").glob("*/*schedule.py"))
    assert scheduled.count("(tuned)") == 3
    assert all(choices in scheduled for choices in decided.values())
    monkeypatch.setenv("TVM_SPLIT_DATABASE", str(tmp_path / "none"))
    tvm_split.compile(model, plan, dump_folder=tmp_path / "other", verify=False)
    assert not any("(tuned)" in path.read_text() for path in (tmp_path / "other").glob("*/*schedule.py"))
    assert tvm_split.tune(model, plan, database=folder, trials=0, effort=QUICK).kernels[0].kept
    x = normal(5, 1, 3, 6, 6)
    with tvm_split.deploy(bundle, tvm_split.Cluster.in_process(machines=2, threads=1)) as deployment:
        (output,) = deployment.run(x)
    assert np.abs(output - model.reference.outputs((x,))[0]).max() < 1e-4


def other_choices(kernel, target):
    space = kernel.template.space(kernel.function, traits_of(target))
    return text_of(next(candidate for candidate in space.all_choices() if candidate != space.default))


@pytest.mark.slow
def test_a_device_with_another_number_of_threads_is_refused(model, plan, tmp_path):
    with (
        RpcLab(tmp_path, servers=1, threads=2) as lab,
        pytest.raises(tvm_split.TuningError, match=r"with 2 threads, and the target says 1.*TVM_NUM_THREADS=1"),
    ):
        tvm_split.tune(model, plan, database=tmp_path / "tuned", trials=3, tracker=lab.address, key=KEY, effort=QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tracker": "127.0.0.1:1", "key": "x", "device_timeout_seconds": 0.1}, "no tracker can be reached"),
        ({"tracker": "127.0.0.1:1"}, "without a key"),
        ({"key": "x"}, "without a tracker"),
        ({"tracker": "here", "key": "x"}, "an address is HOST:PORT"),
        ({"tracker": "127.0.0.1:70000", "key": "x"}, "'127.0.0.1:70000': .* a port from 0 to 65535"),
        ({"tracker": "[::1]:1", "key": "x", "device_timeout_seconds": 0.1}, r"no tracker can be reached at \[::1\]:1 "),
        ({"trials": -1}, "trials=-1"),
    ],
)
def test_wrong_use(model, plan, tmp_path, options, message):
    with pytest.raises(tvm_split.TuningError, match=message):
        tvm_split.tune(model, plan, database=tmp_path, **options)


def test_no_server_of_the_key(model, plan, tmp_path):
    with RpcLab(tmp_path, servers=0) as lab, pytest.raises(tvm_split.TuningError, match="keys there: none"):
        tvm_split.tune(
            model, plan, database=tmp_path, tracker=lab.address, key=KEY, device_timeout_seconds=0.1, effort=QUICK
        )

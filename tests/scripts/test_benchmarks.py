"""The benchmarks' shortest forms: that they run to their end and find something, not how fast anything is."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import check_simulation
from tvm_split.demo.demonstration import MICRO_BATCH
from tvm_split.demo.network import CLASSES, DigitNetwork

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def results(folder: Path, benchmark: str, *arguments: str) -> Any:
    """What a benchmark wrote."""
    output = folder / "results.json"
    command = [sys.executable, "-m", f"scripts.{benchmark}", *arguments, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(output.read_text())


def test_links_are_measured_beside_what_carries_them(tmp_path: Path) -> None:
    """This checkout plays the other one as well."""
    found = results(
        tmp_path, "bench_links", "--sizes", "1000", "800000", "--rounds", "2", "--seconds", "0.1",
        "--idle-seconds", "1", "--also", sys.executable,
    )  # fmt: skip
    for size in ("1000", "800000"):
        medians, rounds = found[size]["medians"], found[size]["rounds"]
        assert {"shm", "grpc", "unix socket", "tcp socket", "memcpy"} < set(medians)
        assert all(len(each) == 2 for each in rounds.values())
        for figures in medians.values():
            assert figures["latency_seconds"] > 0
            assert figures["bytes_per_second"] > 0
            assert math.isfinite(figures["processor_seconds"])
    assert all(0 <= share < 2 for shares in (found["idle"]["shm"], found["idle"]["grpc"]) for share in shares.values())


def test_networks_are_shared_in_all_ways_beside_their_source(tmp_path: Path) -> None:
    found = results(tmp_path, "check_shards", "vgg", "--axis", "channels", "--shares", "0.6", "0.4")["results"]
    assert [(each["axis"], each["exchange"], each["good"]) for each in found] == [
        ("channels", "fused", True),
        ("channels", "each", True),
    ]


def test_a_gpu_is_proven_in_a_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    found = results(
        tmp_path, "prove_gpu", "mobilenet_v2", "--target", "llvm", "--rounds", "1", "--threads", "1",
        "--seconds", "100000",
    )  # fmt: skip
    assert found["rehearsal"]
    assert (found["failed"], found["not_reached"]) == ({}, [])
    assert [network["dtype"] for network in found["networks"]] == ["float32", "float16"]
    for network in found["networks"]:
        assert set(network["seconds"]) == {"ours", "eager", "channels_last"}
        assert network["difference"] < network["largest_difference"]
    near, far, between = found["pipelines"]
    assert [each["far"] for each in found["pipelines"]] == [False, True, False]
    assert "this is a rehearsal" in found["between_gpus"]
    for pipeline, machines in ((near, {"host", "device"}), (far, {"host", "device"}), (between, {"gpu-0", "gpu-1"})):
        assert set(pipeline["layers"]) == machines
        assert pipeline["difference"] < pipeline["largest_difference"]
        assert 0 < pipeline["share_of_limit"] < 2
    assert "grpc" in far["transports"]
    (kernels,) = found["kernels"]
    assert kernels["failed"] == {}
    assert all(kernel["seconds"] > 0 and kernel["share_of_roofline"] > 0 for kernel in kernels["kernels"])


def test_what_there_is_no_time_for_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.prove_gpu", "mobilenet_v2", "--target", "llvm", "--seconds", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    networks = "; ".join(f"mobilenet_v2, {dtype}, batch 1" for dtype in ("float32", "float16"))
    assert f"no time was left for: {networks}; mobilenet_v2 over two machines;" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["lenet"], "'lenet' is none of resnet50, "),
        (["--target", "sm90"], "'sm90' is no architecture of GPUs, such as sm_90, and not llvm"),
        (
            ["--target", "llvm", "--output", "/nowhere/found.json"],
            "/nowhere/found.json cannot be written: No such",
        ),
        (["--target", "llvm", "--output", "/proc/found.json"], "/proc/found.json cannot be written"),
        (["--target", "llvm", "--output", "."], ". cannot be written: Is a directory"),
        (["--target", "llvm", "--batches", "0"], "'0' is no whole number from 1 on"),
        (["--target", "llvm", "--seconds", "nan"], "'nan' is no number of seconds"),
    ],
)
def test_what_is_to_be_proven_is_checked_before_anything_runs(arguments: list[str], expected: str) -> None:
    command = [sys.executable, "-m", "scripts.prove_gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr


def test_a_gpu_that_is_not_there_is_not_proven(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.prove_gpu", "--target", "sm_90", "--output", str(tmp_path / "found.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is nothing to prove: " in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_overlap_is_shown_beside_other_ways_to_use_two_cores(tmp_path: Path) -> None:
    found = results(tmp_path, "bench_overlap", "mobilenet_v2", "--rounds", "1", "--seconds", "0.2")["mobilenet_v2"]
    assert len(found["medians"]) == 7
    assert len(found["ratios"]) == 5
    assert all(value > 0 for value in found["ratios"].values())


@pytest.mark.long
def test_pipelines_of_two_systems_are_measured_in_one_run(tmp_path: Path) -> None:
    found = results(tmp_path, "bench_pipelining", "--rounds", "1", "--seconds", "0.2", "--micro-batches", "2", "4")
    assert len(found["medians"]) == 5
    assert all(value > 0 for value in found["ratios"].values())


def test_plans_for_many_machines_are_never_worse_than_simple_ways(tmp_path: Path) -> None:
    """The benchmark fails where a simple way is better, or fewer machines are."""
    picture = tmp_path / "plans.png"
    found = results(
        tmp_path, "bench_planner", "--machines", "8", "24", "--pieces", "60", "--variants", "0", "1", "10",
        "--time-limit", "2", "--picture", str(picture),
    )["results"]  # fmt: skip
    assert len(found) == 6
    for each in found:
        assert 0 < each["lower_bound_seconds"] <= each["period_seconds"]
        assert each["largest_bytes"] < 2e9
    assert picture.stat().st_size > 10_000


def test_simulations_are_compared_with_deployments(tmp_path: Path) -> None:
    found = results(
        tmp_path, "check_simulation", "--case", "1", "--case", "4", "--blocks", "4", "--rounds", "1",
        "--micro-batches", "20", "--repeats", "2", "--tell",
    )["results"]  # fmt: skip
    assert [each["case"] for each in found] == ["2 workers, convolutions", "2 replicas, convolutions"]
    for each in found:
        written = json.loads(
            (tmp_path / f"{each['case'].replace(', ', '_').replace(' ', '_')}_expected.json").read_text()
        )
        assert {key: each[key] for key in written if key != "load_average"} == {
            key: value for key, value in written.items() if key != "load_average"
        }
        assert each["simulated_period"] > 0
        assert len(each["periods"]) == len(each["latencies"]) == 2
        assert all(value > 0 for value in (*each["periods"], *each["latencies"]))
        assert each["simulated_latency"] == pytest.approx(each["predicted_latency"], rel=0.5)
        assert 0 <= each["others"] <= 1


def test_the_demonstration_s_network_is_among_the_simulated_ones() -> None:
    assert [case.workers for case in check_simulation.CASES if case.network == "demo"] == [3]
    module, images = check_simulation.network("demo")
    assert isinstance(module, DigitNetwork)
    assert module(images).shape == (MICRO_BATCH, CLASSES)


@pytest.mark.parametrize(
    ("expected", "measured", "within", "good"),
    [
        (1.09, [1.0, 1.0, 1.0], True, True),
        (1.11, [1.0, 1.0, 1.0], False, False),
        (1.3, [0.9, 1.0, 1.25], False, True),
        (1.4, [0.9, 1.0, 1.25], False, False),
        (0.8, [0.9, 1.0, 1.25], False, False),
        (0.82, [0.9, 1.0, 1.25], False, True),
    ],
)
def test_what_is_expected_is_judged_by_the_range_of_equal_runs(expected, measured, within, good) -> None:
    assert check_simulation.is_within(expected, measured) == within
    assert check_simulation.is_good(expected, measured) == good
    assert check_simulation.spread(measured) == pytest.approx(max(measured) - min(measured))

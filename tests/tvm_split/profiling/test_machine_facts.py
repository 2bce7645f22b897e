"""Facts about machines before anything is timed, as reported by their workers: here of GPUs, with given figures."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.framing import PROTOCOL_VERSION
from tests.helpers.rpc_runtime.hostile_worker import HostileWorker
from tests.helpers.rpc_runtime.raw_calls import METHODS
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Machine
from tvm_split.placement.profile import Bus
from tvm_split.profiling.machine_facts import MachineFacts, machine_facts

GPU, CPU = {"kind": "cuda", "arch": "sm_90"}, {"kind": "llvm"}
FIGURES = {
    "memory_bytes": 80_000,
    "memory_free_bytes": 60_000,
    "bus_identity": "0000:3b:00.0",
    "bus_bytes_per_second": 2e10,
    "bus_latency_seconds": 1e-5,
}
Facts = Callable[..., dict[str, MachineFacts]]


@pytest.fixture
def facts() -> Iterator[Facts]:
    """Return the facts of machines by name; each has a target, its host's boot and its GPU's figures, if it has one."""
    with ExitStack() as workers:

        def facts_of(machines: dict[str, tuple[dict[str, str], str, dict[str, Any] | None]]) -> dict[str, MachineFacts]:
            described = []
            for name, (target, boot, figures) in machines.items():
                reply = pb.DescribeReply(
                    protocol_version=PROTOCOL_VERSION, machine=name, hostname=boot, boot_id=boot, threads=1,
                    architecture="x86_64", memory_free_bytes=9000, cuda=pb.Cuda(driver=13000, compiler="13.0"),
                    cuda_devices=[] if figures is None else [pb.CudaDevice(arch="sm_90", **figures)],
                )  # fmt: skip
                content = reply.SerializeToString()
                worker = workers.enter_context(
                    HostileWorker(name, {METHODS["Describe"].path: lambda *_, content=content: iter([content])})
                )
                described.append(Machine(name, 1, target, endpoint=worker.endpoint))
            cluster = Cluster(tuple(described))
            targets = {name: target for name, (target, _, _) in machines.items()}
            return {machine_fact.name: machine_fact for machine_fact in machine_facts(cluster.start(), targets)}

        yield facts_of


def test_a_gpus_free_memory_and_bus_are_the_machines(facts: Facts) -> None:
    by_name = facts({"gpu": (GPU, "box", FIGURES), "cpu": (CPU, "box", None), "other": (CPU, "rack", FIGURES)})
    assert (by_name["gpu"].memory_free_bytes, by_name["gpu"].bus) == (60_000, Bus(2e10, 1e-5))
    # A GPU's machine uses memory of its host, too; a machine that computes on the CPU has no bus to a GPU.
    assert [(by_name[name].memory_free_bytes, by_name[name].bus) for name in ("cpu", "other")] == [
        (4500, None),
        (9000, None),
    ]


def test_machines_of_one_gpu_share_its_memory(facts: Facts) -> None:
    beside = {**FIGURES, "bus_identity": "0000:af:00.0"}
    by_name = facts(
        {
            "one": (GPU, "box", FIGURES),
            "two": (GPU, "box", FIGURES),
            "beside": (GPU, "box", beside),
            "elsewhere": (GPU, "rack", FIGURES),
        }
    )
    assert {name: machine.memory_free_bytes for name, machine in by_name.items()} == {
        "one": 30_000,
        "two": 30_000,
        "beside": 60_000,
        "elsewhere": 60_000,
    }


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan, math.inf])
def test_what_a_worker_does_not_know_is_left_out(facts: Facts, speed: float) -> None:
    figures = {"memory_bytes": 80_000, "bus_bytes_per_second": speed}
    by_name = facts({"one": (GPU, "box", figures), "two": (GPU, "box", figures)})
    assert {(machine.memory_free_bytes, machine.bus) for machine in by_name.values()} == {(80_000, None)}

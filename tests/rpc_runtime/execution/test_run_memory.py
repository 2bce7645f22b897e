"""What a run that is recorded may call, and the memory that it gets."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tvm_split.rpc_runtime.execution.run_memory import NotRecordable, RunMemory, require_recordable


class Pool:
    """Gives each storage a number."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self, *request: Any) -> int:
        self.given += 1
        return self.given


def a_run(memory: RunMemory, *sizes: int) -> list[int]:
    memory.begin()
    return [memory.give("machine", (size,), 0, "uint8", "global") for size in sizes]


def test_each_run_gets_what_the_first_one_got() -> None:
    pool = Pool()
    memory = RunMemory(pool)
    assert a_run(memory, 64, 64, 8) == [1, 2, 3]
    assert a_run(memory, 64, 64, 8) == [1, 2, 3]
    assert a_run(memory, 64) == [1]
    assert pool.given == 3
    assert memory.context == "machine"
    assert memory.held == [(((size,), 0, "uint8", "global"), number) for size, number in ((64, 1), (64, 2), (8, 3))]


def test_a_run_that_asks_for_other_memory_cannot_be_recorded() -> None:
    memory = RunMemory(Pool())
    a_run(memory, 64, 8)
    with pytest.raises(NotRecordable, match=r"asks for memory of \(\(16,\), .* where the run before had \(\(8,\)"):
        a_run(memory, 64, 16)


def test_another_thread_gets_memory_of_its_own() -> None:
    pool = Pool()
    memory = RunMemory(pool)
    mine = a_run(memory, 64)
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(memory.give("other", (64,), 0, "uint8", "global")))
    thread.start()
    thread.join(60)
    assert (mine, others) == ([1], [2])
    assert memory.context == "machine"
    assert a_run(memory, 64) == [1]


def test_kernels_and_what_reads_no_tensor_can_be_recorded() -> None:
    require_recordable(["vm.builtin.alloc_storage", "fused_conv", "vm.builtin.reshape"], {"fused_conv"}.__contains__)


@pytest.mark.parametrize("name", ["vm.builtin.read_if_cond", "vm.builtin.to_device", "vm.builtin.tensor_to_shape", "f"])
def test_what_the_host_does_with_tensors_cannot(name: str) -> None:
    with pytest.raises(NotRecordable, match=rf"^it calls {name}, which cannot be recorded$"):
        require_recordable(["vm.builtin.copy", "fused_conv", name, name], {"fused_conv"}.__contains__)

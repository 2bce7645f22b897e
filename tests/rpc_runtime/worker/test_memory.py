"""The memory of host and GPU that stages need, compared with the free memory."""

import pytest

from rpc_runtime.errors import WorkerError
from rpc_runtime.program.routes import MachineProgram, Route
from rpc_runtime.program.specs import BlobSpec, StageSpec, TensorSpec, WeightSpec
from rpc_runtime.worker.memory import require_room

GB = 1_000_000_000


def weight(name: str, size_bytes: int) -> WeightSpec:
    return WeightSpec(TensorSpec(name, (size_bytes,), "uint8"), BlobSpec(name[0] * 64, size_bytes + 100))


X = TensorSpec("x", (GB // 10,), "uint8")
FROM_B = Route(0, X, "B", "A", 3)


def program(*incoming: Route, **weights_of: tuple[str, tuple[WeightSpec, ...]]) -> MachineProgram:
    """Return stages of machine A by name: their devices and weights."""
    library = BlobSpec("0" * 64, 100)
    stages = tuple(
        StageSpec(number, name, "A", (name,), device, library, weights, (X,), (TensorSpec(name, (1,), "float32"),))
        for number, (name, (device, weights)) in enumerate(weights_of.items())
    )
    return MachineProgram.of("A", stages, incoming)


A, B, C = weight("a", 3 * GB), weight("b", 2 * GB), weight("c", GB)


def test_a_gpus_stage_takes_its_weights_of_the_gpu_and_two_at_a_time_of_the_host() -> None:
    on_gpu = program(s=("cuda", (A, B, C)))
    require_room(on_gpu, 5 * GB, 6 * GB)
    with pytest.raises(WorkerError, match=r"machine 'A' needs 5.0 GB .* 1 stages \(s\), 5.0 GB of it on their way to "):
        require_room(on_gpu, 5 * GB - 1, 6 * GB)
    with pytest.raises(WorkerError, match=r"machine 'A''s GPU needs 6.0 GB .* 1 stages \(s\), and has 5.9 GB free"):
        require_room(on_gpu, 5 * GB, 59 * GB // 10)


def test_a_gpu_has_buffers_for_what_comes_from_other_machines() -> None:
    on_gpu = program(FROM_B, s=("cuda", (A,)), t=("cuda", (B,)))
    require_room(on_gpu, 0, 5_300_000_000)
    with pytest.raises(WorkerError, match=r"GPU needs 5.3 GB .*\), 0.3 GB of it for tensors from other machines, "):
        require_room(on_gpu, 0, 5_299_999_999)
    require_room(program(FROM_B, s=("cuda", (A,)), t=("cpu", (B,))), 0, 3 * GB)


def test_each_memory_holds_a_weight_once() -> None:
    both = program(s=("cuda", (A, C)), t=("cuda", (A,)), u=("cpu", (B,)), v=("cpu", (B,)))
    require_room(both, 6 * GB, 4 * GB)
    with pytest.raises(WorkerError, match=r"machine 'A' needs 6.0 GB .* 4 stages \(s, t, u, v\), 4.0 GB of it on"):
        require_room(both, 6 * GB - 1, 4 * GB)
    with pytest.raises(WorkerError, match=r"machine 'A''s GPU needs 4.0 GB .* 2 stages \(s, t\), "):
        require_room(both, 6 * GB, 4 * GB - 1)


def test_memory_that_is_not_known_is_no_limit_and_a_cpu_stage_needs_none_of_the_gpu() -> None:
    require_room(program(s=("cuda", (A,)), t=("cpu", (B,))), 0, 0)
    require_room(program(s=("cpu", (A, B, C))), 6 * GB, 1)

"""Random programs for Hypothesis: stages, replicas and routes."""

from dataclasses import replace

from hypothesis import strategies as st

from rpc_runtime.program.codecs import NONE
from rpc_runtime.program.program import Program, RouteCodec
from rpc_runtime.program.specs import BlobSpec, StageSpec, TensorSpec

LOSSLESS = (NONE, "lz4", "zstd")
BLOB = BlobSpec("0" * 64, 1)


def tensor(name: str) -> TensorSpec:
    return TensorSpec(name, (2,), "int64")


@st.composite
def programs(draw: st.DrawFn, most_replicas: int = 1, machines: str = "ABC", blob: BlobSpec = BLOB) -> Program:
    inputs = [tensor(f"x{i}") for i in range(draw(st.integers(1, 3)))]
    tensors, stages = list(inputs), []
    for index in range(draw(st.integers(1, 6))):
        stage_inputs = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=4, unique=True))
        stage_outputs = [tensor(f"t{index}.{place}") for place in range(draw(st.integers(1, 2)))]
        homes = draw(st.lists(st.sampled_from(machines), min_size=1, max_size=most_replicas, unique=True))
        schedule = [*range(len(homes)), *draw(st.lists(st.integers(0, len(homes) - 1), max_size=5))]
        schedule = draw(st.permutations(schedule)) if len(homes) > 1 else [0]
        for replica, machine in enumerate(homes):
            ends = (tuple(stage_inputs), tuple(stage_outputs))
            stages.append(StageSpec(index, f"s{index}", machine, (), "cpu", blob, (), *ends, replica, tuple(schedule)))
        tensors += stage_outputs
    outputs = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=4))
    program = Program(tuple(inputs), tuple(outputs), tuple(stages))
    codecs = [
        RouteCodec(route.tensor.name, route.source, route.destination, draw(st.sampled_from(LOSSLESS)))
        for route in program.routes
    ]
    return replace(program, codecs=tuple(codecs))

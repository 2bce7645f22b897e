"""Specifications of stages written by hand."""

from dataclasses import replace

from rpc_runtime.program.specs import BlobSpec, StageSpec, TensorSpec

BLOB = BlobSpec("0" * 64, 1)


def tensor(name: str) -> TensorSpec:
    return TensorSpec(name, (2,), "float32")


def stage(index: int, name: str, machine: str, inputs: str, outputs: str) -> StageSpec:
    input_specs, output_specs = tuple(map(tensor, inputs.split())), tuple(map(tensor, outputs.split()))
    return StageSpec(index, name, machine, (), "cpu", BLOB, (), input_specs, output_specs)


def replicas(stage: StageSpec, machines: str, schedule: str) -> tuple[StageSpec, ...]:
    """Return the stage's replicas on these machines, with a schedule such as ``"010"``."""
    return tuple(
        replace(stage, machine=machine, replica=replica, replica_schedule=tuple(map(int, schedule)))
        for replica, machine in enumerate(machines)
    )

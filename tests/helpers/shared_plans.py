"""Plans for graphs on three machines with some shared stages, and the properties of every placed model."""

from collections.abc import Mapping

from tvm import relax

from relay_passes.ir import main_function, operations_of
from tvm_split.compiler.partition import Partition
from tvm_split.placement.plan import Plan, PlannedMachine
from tvm_split.placement.problem import Axis, Exchange, Sharding, Stage

MACHINES = tuple(PlannedMachine(f"machine-{letter}", {"kind": "llvm"}, 1) for letter in "abc")
A, B, C = (machine.name for machine in MACHINES)
HALVES = {A: 0.5, B: 0.5}


def whole(machine: str, *layers: str) -> Stage:
    return Stage((machine,), layers)


def shared(axis: Axis, *layers: str, shares: Mapping[str, float] | None = None, exchange: Exchange = "fused") -> Stage:
    parts = HALVES if shares is None else shares
    return Stage(tuple(parts), layers, tuple(parts.values()), sharding=Sharding(axis, exchange))


def planned(*stages: Stage) -> Plan:
    named = tuple(
        Stage(stage.machines, stage.layers, stage.shares, f"stage_{index}", stage.sharding)
        for index, stage in enumerate(stages)
    )
    return Plan("tiny", "latency", "by hand", MACHINES, named)


def require_consistent(placed: Partition) -> None:
    """Assert that plan, placement and layers are of one graph, and that a stage reads only from earlier stages."""
    operations = operations_of(main_function(placed.model.module))
    stage_of = placed.stage_of
    assert [operation.var.name for operation in operations] == list(placed.model.layers)
    assert set(stage_of) == set(placed.model.layers)
    for binding in operations:
        index = stage_of[binding.var.name]
        assert placed.model.layers[binding.var.name] in placed.plan.stages[index].layers
        for used in relax.analysis.free_vars(binding.value):
            assert stage_of.get(used.name, 0) <= index
    assert all(stage.sharding is None and len(stage.machines) == 1 for stage in placed.plan.stages)

"""Stages of lost machines go to machines that are left."""

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from rpc_runtime.errors import WorkerUnavailableError
from rpc_runtime.program.placing import held, place
from rpc_runtime.program.program import Program, RouteCodec
from rpc_runtime.program.specs import StageSpec
from tests.helpers.rpc_runtime.random_programs import programs
from tests.helpers.rpc_runtime.specs import replicas, stage, tensor

SECONDS = {"A": 1.0, "B": 2.0, "C": 3.0, "S": 9.0}


def anywhere(machine: str, stages: Sequence[StageSpec]) -> str:
    return ""


def alike(stage: StageSpec, machine: str) -> float:
    return 1.0


def chain(machines: str, codecs: Sequence[RouteCodec] = ()) -> Program:
    """Return a chain of stages, one for each machine named."""
    stages = [stage(i, f"s{i}", machine, f"t{i}", f"t{i + 1}") for i, machine in enumerate(machines)]
    return Program((tensor("t0"),), (tensor(f"t{len(machines)}"),), tuple(stages), tuple(codecs))


def placement(program: Program) -> dict[str, str]:
    return {name: "".join(one.machine for one in group) for name, group in program.replicas.items()}


def test_a_machine_without_stages_takes_a_lost_stage() -> None:
    program = place(chain("ABC"), {"B"}, "ACS", anywhere, alike)
    assert placement(program) == {"s0": "A", "s1": "S", "s2": "C"}


def test_the_machine_with_the_least_time_takes_a_lost_stage() -> None:
    program = place(chain("CABB"), {"C"}, "AB", anywhere, lambda stage, machine: SECONDS[machine])
    assert placement(program) == {"s0": "A", "s1": "A", "s2": "B", "s3": "B"}


def test_of_two_alike_a_neighbour_takes_a_lost_stage() -> None:
    assert placement(place(chain("ACB"), {"B"}, "AC", anywhere, alike))["s2"] == "C"


def test_lost_stages_spread() -> None:
    program = place(chain("ABBB"), {"B"}, "AC", anywhere, alike)
    assert sorted(placement(program).values()) == ["A", "A", "C", "C"]


def replicated() -> Program:
    """Return x → a(A) → b(B three times, C twice, D once in six) → c(A)."""
    stages = (
        stage(0, "a", "A", "x", "t"),
        *replicas(stage(1, "b", "B", "t", "u"), "BCD", "010210"),
        stage(2, "c", "A", "u", "y"),
    )
    return Program((tensor("x"),), (tensor("y"),), stages)


def test_a_lost_replica_is_left_out_and_the_others_keep_their_ratio() -> None:
    program = place(replicated(), {"B"}, "ACD", anywhere, alike)
    assert placement(program) == {"a": "A", "b": "CD", "c": "A"}
    assert [one.micro_batches.share for one in program.replicas["b"]] == pytest.approx([2 / 3, 1 / 3])


def test_a_lost_replica_goes_to_a_machine_without_stages() -> None:
    program = place(replicated(), {"C"}, "ABDS", anywhere, alike)
    assert placement(program)["b"] == "BSD"
    assert [one.replica_schedule for one in program.replicas["b"]] == [(0, 1, 0, 2, 1, 0)] * 3


def test_the_last_replica_moves() -> None:
    assert placement(place(replicated(), {"B", "C", "D"}, "A", anywhere, alike)) == {"a": "A", "b": "A", "c": "A"}


def test_a_codec_stays_with_its_tensor() -> None:
    program = chain("ABC", [RouteCodec("t1", "A", "B", "fp16"), RouteCodec("t2", "B", "C", "fp16")])
    moved = place(program, {"B"}, "ACS", anywhere, alike)
    assert {(c.tensor, c.source, c.destination, c.codec) for c in moved.codecs} == {
        ("t1", "A", "S", "fp16"),
        ("t2", "S", "C", "fp16"),
    }
    assert place(program, {"A", "B"}, "C", anywhere, alike).codecs == ()


def test_a_stage_that_fits_nowhere_is_named_with_every_reason() -> None:
    with pytest.raises(WorkerUnavailableError, match=r"'s1'.*'B'.*A: too small.*C: too small"):
        place(chain("ABC"), {"B"}, "AC", lambda machine, stages: "too small" if len(stages) > 1 else "", alike)
    with pytest.raises(WorkerUnavailableError, match=r"'s0'.*none is left"):
        place(chain("A"), {"A"}, "", anywhere, alike)


@given(programs(most_replicas=3, machines="ABCD"), st.sets(st.sampled_from("ABCD"), min_size=1), st.data())
def test_what_is_left_is_a_program_of_the_same_stages(program: Program, lost: set[str], data: st.DataObject) -> None:
    machines = [machine for machine in "ABCDST" if machine not in lost]
    refused = data.draw(
        st.sets(st.tuples(st.sampled_from([s.name for s in program.stages]), st.sampled_from("ABCDST")))
    )

    def unfit(machine: str, stages: Sequence[StageSpec]) -> str:
        return "refused" if (stages[-1].name, machine) in refused else ""

    try:
        after = place(program, lost, machines, unfit, alike)
    except WorkerUnavailableError:
        stranded = {n for n, group in program.replicas.items() if all(one.machine in lost for one in group)}
        assert any(all((name, machine) in refused for machine in machines) for name in stranded)
        return
    assert lost.isdisjoint(after.machines)
    assert list(after.replicas) == list(program.replicas)
    idle = set("ABCDST") - set(program.machines)
    for name, group in program.replicas.items():
        homes = {one.machine for one in after.replicas[name]}
        kept = {one.machine for one in group} - lost
        assert kept <= homes
        assert not kept or homes - kept <= idle
        for one in after.replicas[name]:
            assert (one.inputs, one.outputs, one.library) == (group[0].inputs, group[0].outputs, group[0].library)
            assert one.machine in kept or (name, one.machine) not in refused
    same = {(r.tensor.name, r.source, r.destination) for r in after.routes}
    assert {c for c in program.codecs if (c.tensor, c.source, c.destination) in same} <= set(after.codecs)
    assert after.handovers


@given(programs(most_replicas=3, machines="ABC"), st.sampled_from("ABS"), st.data())
def test_what_a_machine_holds_is_a_program_of_its_own(program: Program, machine: str, data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from(list(program.replicas))))
    room = data.draw(st.integers(0, 4))
    own = {stage.name for stage in program.stages_on(machine)}

    def unfit(machine: str, stages: Sequence[StageSpec]) -> str:
        return "full" if len(stages) > room + len(own) else ""

    after = held(program, machine, names, unfit)
    assert len(after.stages if after else ()) == min(room, len(names - own))
    if after is not None:
        assert after.machines == (machine,)
        assert {stage.name for stage in after.stages} <= names - own
        libraries = {stage.name: {one.library for one in program.replicas[stage.name]} for stage in after.stages}
        assert all(stage.library in libraries[stage.name] for stage in after.stages)
        assert {tensor.name for stage in after.stages for tensor in stage.outputs} == {t.name for t in after.outputs}

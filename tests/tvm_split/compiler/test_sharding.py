"""Plans with shards on small graphs: which stages come of them, on which machines and levels, and what is in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relay_passes.ir import main_function, operations_of
from relay_passes.sharding import emit as emitter
from tests.helpers.relax_graphs import assert_same_values, graph, random_inputs, weights, with_cuts_made
from tests.helpers.shared_plans import A, B, C, planned, require_consistent, shared, whole
from tvm_split.compiler.sharding import computed_shares, partition
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.planner.problem import Stage


def model_of(write: Callable[..., Sequence[relax.Var]], layers: Mapping[str, str] | None = None) -> Model:
    """Return a model of one image; ``layers`` maps variables to layers, others are layers themselves."""
    module = graph({"x": (1, 4, 8, 8)}, write)
    names = [binding.var.name for binding in operations_of(main_function(module))]
    return Model("tiny", "test", module, (), (), {name: (layers or {}).get(name, name) for name in names})


def chain(emit: Callable[..., relax.Var], x: relax.Var) -> list[relax.Var]:
    conv1 = emit(op.nn.conv2d(x, weights(4, 4, 3, 3), padding=1), "conv1")
    relu = emit(op.nn.relu(conv1), "relu")
    conv2 = emit(op.nn.conv2d(relu, weights(4, 4, 3, 3), padding=1), "conv2")
    return [emit(op.nn.relu(conv2), "last")]


def parted(model: Model, *stages: Stage) -> dict[str, tuple[str, list[str]]]:
    """Return each stage's machine and variables by its name, after checking that the graph computes the same values."""
    placed = partition(model, planned(*stages))
    whole = with_cuts_made(placed.model.module, placed.cuts, model.module)
    assert_same_values({"whole": model.module, "parted": whole}, *random_inputs(model.module))
    require_consistent(placed)
    contents: dict[str, tuple[str, list[str]]] = {stage.name: (stage.machine, []) for stage in placed.plan.stages}
    names = list(contents)
    for name, index in placed.stage_of.items():
        contents[names[index]][1].append(name)
    return contents


def test_a_plan_without_shards_stays_as_it_is() -> None:
    model, plan = model_of(chain), planned(whole(A, "conv1", "relu"), whole(B, "conv2", "last"))
    placed = partition(model, plan)
    assert placed.model is model
    assert placed.plan is plan


def test_cuts_are_where_values_are_made_and_joins_where_they_are_used() -> None:
    stages = parted(model_of(chain), whole(C, "conv1"), shared("rows", "relu", "conv2"), whole(C, "last"))
    assert stages == {
        "stage_0": (C, ["conv1", "conv1_machine_a", "conv1_machine_b"]),
        "stage_1_machine_a_0": (A, ["relu_machine_a", "conv2_machine_a"]),
        "stage_1_machine_b_0": (B, ["relu_machine_b", "conv2_machine_b"]),
        "stage_2": (C, ["conv2", "last"]),
    }


def test_a_model_s_input_is_cut_by_who_needs_it_and_its_output_joined_by_the_largest_share() -> None:
    stages = parted(model_of(chain), shared("rows", "conv1", "relu", "conv2", "last", shares={A: 0.375, B: 0.625}))
    assert stages == {
        "stage_0_machine_a_0": (A, ["conv1_machine_a", "relu_machine_a", "conv2_machine_a", "last_machine_a"]),
        "stage_0_machine_b_0": (B, ["conv1_machine_b", "relu_machine_b", "conv2_machine_b", "last_machine_b"]),
        "stage_0_machine_b_1": (B, ["last"]),
    }


def test_each_machine_gets_its_rows_of_the_input_and_those_beside() -> None:
    first = shared("rows", "conv1", "relu", shares={A: 0.375, B: 0.625})
    cut = partition(model_of(chain), planned(first, whole(B, "conv2", "last")))
    assert [
        (input_cut.tensor.shape, input_cut.input, input_cut.axis, input_cut.begin) for input_cut in cut.input_cuts
    ] == [
        ((1, 4, 4, 8), "x", 2, 0),
        ((1, 4, 6, 8), "x", 2, 2),
    ]
    assert [computation.received for computation in cut.computations[:2]] == [("x_machine_a",), ("x_machine_b",)]
    assert [parameter.name for parameter in main_function(cut.annotated()).params] == ["x"]


def test_an_input_that_a_machine_needs_whole_is_not_cut_for_it() -> None:
    def skip(emit: Callable[..., relax.Var], x: relax.Var) -> list[relax.Var]:
        conv = emit(op.nn.conv2d(x, weights(4, 4, 3, 3), padding=1), "conv")
        return [emit(op.add(conv, x), "last")]

    placed = partition(model_of(skip), planned(shared("rows", "conv"), whole(B, "last")))
    assert [input_cut.tensor.name for input_cut in placed.input_cuts] == ["x_machine_a"]
    assert [computation.received for computation in placed.computations] == [
        ("x_machine_a",),
        ("x",),
        ("conv_machine_a", "conv_machine_b", "x"),
    ]


def test_a_level_rises_where_a_halo_comes_from_another_machine() -> None:
    stages = parted(model_of(chain), shared("rows", "conv1", "relu", "conv2", exchange="each"), whole(B, "last"))
    assert stages == {
        "stage_0_machine_a_0": (A, ["conv1_machine_a", "relu_machine_a", "relu_machine_a_halo_for_machine_b"]),
        "stage_0_machine_b_0": (B, ["conv1_machine_b", "relu_machine_b", "relu_machine_b_halo_for_machine_a"]),
        "stage_0_machine_a_1": (A, ["relu_machine_a_with_halo", "conv2_machine_a"]),
        "stage_0_machine_b_1": (B, ["relu_machine_b_with_halo", "conv2_machine_b"]),
        "stage_1": (B, ["conv2", "last"]),
    }


def test_a_part_that_needs_no_halo_is_on_the_level_of_those_that_do() -> None:
    """With a window of stride 2, only the lower half starts with a row of the upper half."""

    def strided(emit: Callable[..., relax.Var], x: relax.Var) -> list[relax.Var]:
        relu = emit(op.nn.relu(x), "relu")
        conv1 = emit(op.nn.conv2d(relu, weights(4, 4, 3, 3), padding=1, strides=2), "conv1")
        conv2 = emit(op.nn.conv2d(conv1, weights(4, 4, 3, 3), padding=1), "conv2")
        return [emit(op.nn.relu(conv2), "last")]

    stages = parted(model_of(strided), shared("rows", "relu", "conv1", "conv2", "last", exchange="each"))
    assert {name: variables for name, (_, variables) in stages.items()} == {
        "stage_0_machine_a_0": ["relu_machine_a", "relu_machine_a_halo_for_machine_b"],
        "stage_0_machine_b_0": ["relu_machine_b"],
        "stage_0_machine_a_1": ["conv1_machine_a", "conv1_machine_a_halo_for_machine_b"],
        "stage_0_machine_b_1": ["relu_machine_b_with_halo", "conv1_machine_b", "conv1_machine_b_halo_for_machine_a"],
        "stage_0_machine_a_2": ["conv1_machine_a_with_halo", "conv2_machine_a", "last_machine_a"],
        "stage_0_machine_b_2": ["conv1_machine_b_with_halo", "conv2_machine_b", "last_machine_b"],
        "stage_0_machine_a_3": ["last"],
    }


def test_a_pair_of_layers_is_one_level_and_its_sum_is_added_up_where_it_is_used() -> None:
    stages = parted(model_of(chain), shared("channels", "conv1", "relu", "conv2"), whole(C, "last"))
    assert stages == {
        "stage_0_machine_a_0": (A, ["conv1_machine_a", "relu_machine_a", "conv2_machine_a"]),
        "stage_0_machine_b_0": (B, ["conv1_machine_b", "relu_machine_b", "conv2_machine_b"]),
        "stage_1": (C, ["conv2", "last"]),
    }


def test_a_returned_sum_of_three_machines_is_added_up_by_the_largest_share() -> None:
    def pair(emit: Callable[..., relax.Var], x: relax.Var) -> list[relax.Var]:
        conv1 = emit(op.nn.conv2d(x, weights(8, 4, 1, 1)), "conv1")
        return [emit(op.nn.conv2d(conv1, weights(4, 8, 1, 1)), "last")]

    stages = parted(model_of(pair), shared("channels", "conv1", "last", shares={A: 0.25, B: 0.5, C: 0.25}))
    assert stages["stage_0_machine_b_1"] == (B, ["last_sum_of_2", "last"])
    assert len(stages) == 3 + 1


def test_a_sum_that_both_machines_need_is_made_by_each_on_one_level() -> None:
    """This holds although the residual is added to the first machine's partial sum alone."""

    def residual(emit: Callable[..., relax.Var], x: relax.Var) -> list[relax.Var]:
        before = emit(op.nn.relu(x), "before")
        conv1 = emit(op.nn.conv2d(before, weights(4, 4, 1, 1)), "conv1")
        relu = emit(op.nn.relu(conv1), "relu")
        conv2 = emit(op.nn.conv2d(relu, weights(4, 4, 1, 1)), "conv2")
        add = emit(op.add(conv2, before), "add")
        conv3 = emit(op.nn.conv2d(add, weights(4, 4, 1, 1)), "conv3")
        return [emit(op.nn.relu(conv3), "last")]

    layers = ("conv1", "relu", "conv2", "add", "conv3", "last")
    stages = parted(model_of(residual), whole(C, "before"), shared("channels", *layers))
    assert {name: variables for name, (_, variables) in stages.items() if name.startswith("stage_1")} == {
        "stage_1_machine_a_0": ["conv1_machine_a", "relu_machine_a", "conv2_machine_a", "add_machine_a"],
        "stage_1_machine_b_0": ["conv1_machine_b", "relu_machine_b", "conv2_machine_b"],
        "stage_1_machine_a_1": ["add_sum_machine_a", "conv3_machine_a", "last_machine_a"],
        "stage_1_machine_b_1": ["add_sum_machine_b", "conv3_machine_b", "last_machine_b"],
        "stage_1_machine_a_2": ["last"],
    }


def test_a_sum_in_parts_is_two_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitter, "LARGE_SUM_BYTES", 1)

    def pair(emit: Callable[..., relax.Var], x: relax.Var) -> list[relax.Var]:
        conv1 = emit(op.nn.conv2d(x, weights(6, 4, 1, 1)), "conv1")
        conv2 = emit(op.nn.conv2d(emit(op.nn.relu(conv1), "relu"), weights(64, 6, 1, 1)), "conv2")
        return [emit(op.nn.conv2d(emit(op.nn.relu(conv2), "relu2"), weights(6, 64, 1, 1)), "last")]

    shares = {A: 0.5, B: 0.25, C: 0.25}
    stages = parted(model_of(pair), shared("channels", "conv1", "relu", "conv2", "relu2", "last", shares=shares))
    ranges = ("0_to_32", "32_to_48", "48_to_64")
    for letter in "abc":
        first, second, third = (stages[f"stage_0_machine_{letter}_{level}"][1] for level in range(3))
        assert first[-3:] == [f"conv2_machine_{letter}_{rows}" for rows in ranges]
        assert second[-1] == f"conv2_part_of_sum_machine_{letter}"
        assert third[:2] == [f"conv2_sum_machine_{letter}", f"relu2_machine_{letter}"]
    assert len(stages) == 3 * 3 + 1


def test_each_machine_of_a_second_shard_joins_what_it_needs_whole() -> None:
    second = shared("channels", "conv2", "last", shares={B: 0.5, C: 0.5})
    stages = parted(model_of(chain), shared("rows", "conv1", "relu"), second)
    assert stages == {
        "stage_0_machine_a_0": (A, ["conv1_machine_a", "relu_machine_a"]),
        "stage_0_machine_b_0": (B, ["conv1_machine_b", "relu_machine_b"]),
        "stage_1_machine_b_0": (B, ["relu", "conv2_machine_b", "last_machine_b"]),
        "stage_1_machine_c_0": (C, ["relu_whole_machine_c", "conv2_machine_c", "last_machine_c"]),
        "stage_1_machine_b_1": (B, ["last"]),
    }


def test_of_a_first_shard_s_rows_a_second_takes_from_each_machine_what_it_lacks() -> None:
    """This is like an exchange within one shard: no machine has the whole value in between."""
    second = shared("rows", "conv2", "last", shares={A: 0.25, B: 0.75})
    plan = planned(shared("rows", "conv1", "relu"), second)
    stages = parted(model_of(chain), *plan.stages)
    assert stages == {
        "stage_0_machine_a_0": (
            A,
            ["conv1_machine_a", "relu_machine_a", "relu_machine_a_0_to_3", "relu_machine_a_1_to_4"],
        ),
        "stage_0_machine_b_0": (B, ["conv1_machine_b", "relu_machine_b"]),
        "stage_1_machine_a_0": (A, ["conv2_machine_a", "last_machine_a"]),
        "stage_1_machine_b_0": (B, ["relu_machine_b_2", "conv2_machine_b", "last_machine_b"]),
        "stage_1_machine_b_1": (B, ["last"]),
    }  # fmt: skip
    assert [computation.received for computation in partition(model_of(chain), plan).computations[2:4]] == [
        ("relu_machine_a_0_to_3",),
        ("relu_machine_a_1_to_4", "relu_machine_b"),
    ]


def test_columns_of_what_has_rows_are_sent_by_each_machine() -> None:
    second = shared("columns", "conv2", "last", shares={A: 0.5, C: 0.5})
    stages = parted(model_of(chain), shared("rows", "conv1", "relu"), second)
    assert stages["stage_0_machine_b_0"] == (
        B,
        ["conv1_machine_b", "relu_machine_b", "relu_machine_b_0_to_5", "relu_machine_b_3_to_8"],
    )
    assert stages["stage_1_machine_c_0"] == (C, ["relu_machine_c", "conv2_machine_c", "last_machine_c"])


def test_a_sum_is_cut_where_it_is_added_up() -> None:
    second = shared("rows", "last", shares={B: 0.5, C: 0.5})
    stages = parted(model_of(chain), shared("channels", "conv1", "relu", "conv2"), second)
    assert stages["stage_1_machine_b_0"] == (B, ["conv2", "conv2_machine_b_2", "last_machine_b"])
    assert stages["stage_1_machine_c_0"] == (C, ["conv2_whole_machine_c", "conv2_machine_c", "last_machine_c"])


def test_what_several_machines_use_is_joined_by_each_and_by_its_stages_once() -> None:
    def fork(emit: Callable[..., relax.Var], x: relax.Var) -> list[relax.Var]:
        before = emit(op.nn.relu(x), "before")
        conv = emit(op.nn.conv2d(before, weights(4, 4, 1, 1)), "conv")
        return [emit(op.tanh(conv), "left"), emit(op.exp(conv), "right")]

    model = model_of(fork)
    stages = parted(model, whole(C, "before"), shared("rows", "conv"), whole(A, "left"), whole(C, "right"))
    assert (stages["stage_2"], stages["stage_3"]) == ((A, ["conv", "left"]), (C, ["conv_whole_machine_c", "right"]))
    # In one stage, it is joined once, however many layers use it; and so on one machine, however many stages.
    stages = parted(model, whole(C, "before"), shared("rows", "conv"), whole(C, "left", "right"))
    assert stages["stage_2"] == (C, ["conv", "left", "right"])
    assert len(stages) == 4
    stages = parted(model, whole(C, "before"), shared("rows", "conv"), whole(C, "right"), whole(C, "left"))
    assert (stages["stage_2"], stages["stage_3"]) == ((C, ["conv", "right"]), (C, ["left"]))


def test_what_is_returned_is_joined_by_the_largest_share_even_if_others_use_it() -> None:
    def skip(emit: Callable[..., relax.Var], x: relax.Var) -> list[relax.Var]:
        conv = emit(op.nn.conv2d(x, weights(4, 4, 1, 1)), "conv")
        return [emit(op.tanh(conv), "last"), conv]

    stages = parted(model_of(skip), shared("rows", "conv", shares={A: 0.25, B: 0.75}), whole(C, "last"))
    assert stages["stage_0_machine_b_1"] == (B, ["conv"])
    assert stages["stage_1"] == (C, ["conv_whole_machine_c", "last"])


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            shared("rows", "conv1", "relu", "conv2", "last", shares={A: 0.99, B: 0.01}),
            "'last' has 8 rows for 2 machines: a share of 0.01 of 8 is nothing; take fewer machines or more even",
        ),
        (
            shared("channels", "conv1", "relu", "conv2", "last", shares={A: 0.9, B: 0.1}),
            "'conv1' .* has 4 output channels, too few for 2 machines with shares 0.9 / 0.1: take fewer",
        ),
        (shared("heads", "conv1", "relu", "conv2", "last"), "no attention's heads to shard: use axis 'channels'"),
        (shared("batch", "conv1", "relu", "conv2", "last"), "'last' can be split along batch: .* choose another axis"),
    ],
)
def test_what_cannot_be_shared_says_what_to_do(stage: Stage, message: str) -> None:
    with pytest.raises(PlanError, match=rf"^stage_0 on machine-a, machine-b cannot be shared: .*{message}"):
        partition(model_of(chain), planned(stage))


def test_what_depends_on_no_input_is_no_stage_of_a_machine_that_computes_later() -> None:
    """machine-b owns none of the 2 rows in the middle, so it computes nothing until it receives some of them."""

    def narrow(emit: Callable[..., relax.Var], x: relax.Var) -> list[relax.Var]:
        few = emit(op.nn.conv2d(x, weights(4, 4, 3, 3), strides=4, padding=1), "few")
        many = emit(op.image.resize2d(few, (8, 8), method="nearest_neighbor"), "many")
        table = emit(op.exp(weights(1, 4, 1, 1)), "table")
        return [emit(op.multiply(many, table), "last")]

    stage = shared("rows", "few", "many", "table", "last", shares={A: 0.34, B: 0.32, C: 0.34}, exchange="each")
    stages = parted(model_of(narrow), stage)
    (of_b,) = [names for machine, names in stages.values() if machine == B]
    assert {"many_machine_b", "table_machine_b", "last_machine_b"} <= set(of_b)
    assert len(partition(model_of(narrow), planned(stage)).computations) == len(stages)


def test_few_rows_of_a_result_are_refused_with_layer_rows_and_share() -> None:
    model = model_of(chain, {"conv1": "features.0", "relu": "features.1", "conv2": "features.2", "last": "features.3"})
    stage = shared("rows", *dict.fromkeys(model.layers.values()), shares={A: 0.03, B: 0.94, C: 0.03})
    with pytest.raises(PlanError, match=r"'features\.3' has 8 rows .* share of 0\.03 of 8"):
        computed_shares(model, replace(stage, name="stage_0"))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (("conv1", "relu", "conv2", "lost"), "layer 'lost', which model 'tiny' does not have; near it are 'last'"),
        (("conv1", "relu", "last"), "places no layer 'conv2', which model 'tiny' has; add it to a stage"),
        (("conv1", "relu", "conv2", "last", "conv2"), "'conv2' is in both stage_0 and stage_0; take it out of one"),
    ],
)
def test_layers_that_a_plan_does_not_place_as_they_are(layers: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        partition(model_of(chain), planned(shared("rows", *layers)))


def test_layers_that_are_executed_in_turns_are_refused_by_name() -> None:
    def turns(emit: Callable[..., relax.Var], x: relax.Var) -> list[relax.Var]:
        first = emit(op.nn.relu(x), "first")
        between = emit(op.tanh(x), "other")
        return [emit(op.exp(first), "second"), between]

    model = model_of(turns, {"first": "block", "second": "block"})
    with pytest.raises(
        PlanError, match=r"layer 'other' is executed between 'block' and 'block'; put it into the shard"
    ):
        partition(model, planned(shared("rows", "block"), whole(C, "other")))
    stages = parted(model, shared("rows", "block", "other"))
    assert stages["stage_0_machine_a_1"] == (A, ["other", "second"])


def test_machines_whose_parts_would_have_the_same_names_are_refused() -> None:
    plan = planned(shared("rows", "conv1", "relu", "conv2", "last", shares={A: 0.5, "machine_a": 0.5}))
    with pytest.raises(PlanError, match=r"stage_0 is shared by 'machine-a' and 'machine_a', .* rename one"):
        partition(model_of(chain), plan)


def test_the_same_stages_every_time() -> None:
    stages = (shared("rows", "conv1", "relu", exchange="each"), shared("channels", "conv2", "last"))
    first, again = (partition(model_of(chain), planned(*stages)) for _ in range(2))
    assert first.plan == again.plan
    assert first.stage_of == again.stage_of
    tvm.ir.assert_structural_equal(first.model.module, again.model.module)

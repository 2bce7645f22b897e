"""Plans with shards on small graphs: which stages come of them, on which machines and levels."""

from collections.abc import Callable, Mapping, Sequence

import pytest
from tvm import relax
from tvm.relax import op

from relay_passes.ir import main_function, operations_of
from tests.helpers.relax_graphs import Emit, assert_same_values, graph, random_inputs, weights, with_cuts_made
from tests.helpers.shared_plans import A, B, C, planned, require_consistent, shared, whole
from tvm_split.compiler.partition import Partition
from tvm_split.compiler.sharding import partition
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.placement.problem import Stage


def model_of(write: Callable[..., Sequence[relax.Var]], layers: Mapping[str, str] | None = None) -> Model:
    """Return a model of one image; ``layers`` maps variables to layers, others are layers themselves."""
    module = graph({"x": (1, 4, 8, 8)}, write)
    names = [binding.var.name for binding in operations_of(main_function(module))]
    return Model("tiny", "test", module, (), (), {name: (layers or {}).get(name, name) for name in names})


def chain(emit: Emit, x: relax.Var) -> list[relax.Var]:
    conv1 = emit(op.nn.conv2d(x, weights(4, 4, 3, 3), padding=1), "conv1")
    relu = emit(op.nn.relu(conv1), "relu")
    conv2 = emit(op.nn.conv2d(relu, weights(4, 4, 3, 3), padding=1), "conv2")
    return [emit(op.nn.relu(conv2), "last")]


def strided(emit: Emit, x: relax.Var) -> list[relax.Var]:
    """With a window of stride 2, only the lower half starts with a row of the upper half."""
    relu = emit(op.nn.relu(x), "relu")
    conv1 = emit(op.nn.conv2d(relu, weights(4, 4, 3, 3), padding=1, strides=2), "conv1")
    conv2 = emit(op.nn.conv2d(conv1, weights(4, 4, 3, 3), padding=1), "conv2")
    return [emit(op.nn.relu(conv2), "last")]


def pair(emit: Emit, x: relax.Var) -> list[relax.Var]:
    conv1 = emit(op.nn.conv2d(x, weights(8, 4, 1, 1)), "conv1")
    return [emit(op.nn.conv2d(conv1, weights(4, 8, 1, 1)), "last")]


def residual(emit: Emit, x: relax.Var) -> list[relax.Var]:
    """The residual is added to the first machine's partial sum alone, but both machines need the sum."""
    before = emit(op.nn.relu(x), "before")
    conv1 = emit(op.nn.conv2d(before, weights(4, 4, 1, 1)), "conv1")
    conv2 = emit(op.nn.conv2d(emit(op.nn.relu(conv1), "relu"), weights(4, 4, 1, 1)), "conv2")
    conv3 = emit(op.nn.conv2d(emit(op.add(conv2, before), "add"), weights(4, 4, 1, 1)), "conv3")
    return [emit(op.nn.relu(conv3), "last")]


def fork(emit: Emit, x: relax.Var) -> list[relax.Var]:
    before = emit(op.nn.relu(x), "before")
    conv = emit(op.nn.conv2d(before, weights(4, 4, 1, 1)), "conv")
    return [emit(op.tanh(conv), "left"), emit(op.exp(conv), "right")]


def returned(emit: Emit, x: relax.Var) -> list[relax.Var]:
    conv = emit(op.nn.conv2d(x, weights(4, 4, 1, 1)), "conv")
    return [emit(op.tanh(conv), "last"), conv]


def parted(model: Model, *stages: Stage) -> Partition:
    """Return the placed model, after checking that its graph computes the same values."""
    placed = partition(model, planned(*stages))
    whole = with_cuts_made(placed.model.module, placed.cuts, model.module)
    assert_same_values({"whole": model.module, "parted": whole}, *random_inputs(model.module))
    require_consistent(placed)
    return placed


AFTER_RELU = ("conv1", "relu", "conv2", "add", "conv3", "last")
ALL = ("conv1", "relu", "conv2", "last")


@pytest.mark.parametrize(
    ("write", "expected", "stages"),
    [
        # slices where values are made
        # an output is gathered by the largest share
        (chain, "00a 00b 01b", [shared("rows", *ALL, shares={A: 0.375, B: 0.625})]),
        # a halo of another machine raises the level
        (chain, "00a 00b 01a 01b 1-b", [shared("rows", *ALL[:3], exchange="each"), whole(B, "last")]),
        # a part without a halo is on the level of those with one
        (strided, "00a 00b 01a 01b 02a 02b 03a", [shared("rows", "relu", "conv1", *ALL[2:], exchange="each")]),
        # a pair of layers is one level
        # a returned sum is added up by the largest share
        (pair, "00a 00b 00c 01b", [shared("channels", "conv1", "last", shares={A: 0.25, B: 0.5, C: 0.25})]),
        # a sum that both machines need is on one level
        (residual, "0-c 10a 10b 11a 11b 12a", [whole(C, "before"), shared("channels", *AFTER_RELU)]),
        # a second region gathers what it needs whole
        # a second region takes the rows that it lacks
        (chain, "00a 00b 10a 10b 11b", [shared("rows", *ALL[:2]), shared("rows", *ALL[2:], shares={A: 0.25, B: 0.75})]),
        # columns of what has rows
        # a sum is sliced where it is added up
        (chain, "00a 00b 10b 10c 11b", [shared("channels", *ALL[:3]), shared("rows", "last", shares={B: 0.5, C: 0.5})]),
        # several machines gather a value
        (
            fork,
            "0-c 10a 10b 2-a 3-c",
            [whole(C, "before"), shared("rows", "conv"), whole(A, "left"), whole(C, "right")],
        ),
        # what is returned and used is gathered twice
        (returned, "00a 00b 01b 1-c", [shared("rows", "conv", shares={A: 0.25, B: 0.75}), whole(C, "last")]),
    ],
)
def test_stages_by_machine_and_level(write: Callable[..., list[relax.Var]], expected: str, stages: list[Stage]) -> None:
    """A stage is its position in the plan, its level (- if it is not sharded) and the last letter of its machine."""
    placed = parted(model_of(write), *stages)
    actual = []
    for origin, stage in zip(placed.origins, placed.plan.stages, strict=True):
        level = stage.name[-1] if stages[origin].sharding else "-"
        actual.append(f"{origin}{level}{stage.machine[-1]}")
    assert sorted(actual) == sorted(expected.split())


def test_each_machine_gets_its_rows_of_the_input_and_those_beside() -> None:
    first = shared("rows", "conv1", "relu", shares={A: 0.375, B: 0.625})
    cut = partition(model_of(chain), planned(first, whole(B, "conv2", "last")))
    assert [(part.tensor.shape, part.input, part.axis, part.begin) for part in cut.input_slices] == [
        ((1, 4, 4, 8), "x", 2, 0),
        ((1, 4, 6, 8), "x", 2, 2),
    ]
    assert [computation.received for computation in cut.computations[:2]] == [("x_machine_a",), ("x_machine_b",)]
    assert [parameter.name for parameter in main_function(cut.annotated()).params] == ["x"]


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
def test_what_cannot_be_sharded_says_what_to_do(stage: Stage, message: str) -> None:
    with pytest.raises(PlanError, match=rf"^stage_0 on machine-a, machine-b cannot be sharded: .*{message}"):
        partition(model_of(chain), planned(stage))


def test_what_depends_on_no_input_is_no_stage_of_a_machine_that_computes_later() -> None:
    """machine-b owns none of the 2 rows in the middle, so it computes nothing until it receives some of them."""

    def narrow(emit: Emit, x: relax.Var) -> list[relax.Var]:
        few = emit(op.nn.conv2d(x, weights(4, 4, 3, 3), strides=4, padding=1), "few")
        many = emit(op.image.resize2d(few, (8, 8), method="nearest_neighbor"), "many")
        table = emit(op.exp(weights(1, 4, 1, 1)), "table")
        return [emit(op.multiply(many, table), "last")]

    stage = shared("rows", "few", "many", "table", "last", shares={A: 0.34, B: 0.32, C: 0.34}, exchange="each")
    placed = parted(model_of(narrow), stage)
    assert [stage.machine for stage in placed.plan.stages].count(B) == 1
    assert len(placed.computations) == len(placed.plan.stages)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            ("conv1", "relu", "conv2", "lost"),
            "places layer 'lost', which the model does not have; near it are 'last'",
        ),
        (("conv1", "relu", "last"), "places no layer 'conv2', which model 'tiny' has; add it to a stage"),
        (("conv1", "relu", "conv2", "last", "conv2"), "'conv2' is in stage_0 twice"),
    ],
)
def test_layers_that_a_plan_does_not_place_as_they_are(layers: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        partition(model_of(chain), planned(shared("rows", *layers)))


def test_layers_that_are_executed_in_turns_are_refused_by_name() -> None:
    def turns(emit: Emit, x: relax.Var) -> list[relax.Var]:
        first = emit(op.nn.relu(x), "first")
        between = emit(op.tanh(x), "other")
        return [emit(op.exp(first), "second"), between]

    model = model_of(turns, {"first": "block", "second": "block"})
    with pytest.raises(PlanError, match=r"layer 'other' is executed between 'block' and 'block'; shard it too"):
        partition(model, planned(shared("rows", "block"), whole(C, "other")))
    parted(model, shared("rows", "block", "other"))


def test_machines_whose_parts_would_have_the_same_names_are_refused() -> None:
    plan = planned(shared("rows", "conv1", "relu", "conv2", "last", shares={A: 0.5, "machine_a": 0.5}))
    with pytest.raises(PlanError, match=r"stage_0 is sharded over 'machine-a' and 'machine_a', .* rename one"):
        partition(model_of(chain), plan)

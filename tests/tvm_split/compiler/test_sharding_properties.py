"""Random networks whose stages are shared in random ways, one after the other, compute what they did."""

from itertools import pairwise

import numpy as np
from hypothesis import assume, given, settings, strategies as st
from tvm import relax
from tvm.relax import op

from relay_passes.ir import main_function, operations_of, shape_of
from tests.helpers.relax_graphs import with_cuts_made
from tests.helpers.relax_values import values_of
from tests.helpers.shard_networks import Network
from tests.helpers.shared_plans import A, B, C, planned, require_consistent, shared, whole
from tvm_split.compiler.sharding import partition
from tvm_split.errors import PlanError
from tvm_split.model import Model
from tvm_split.placement.problem import Stage

IMAGE = (1, 4, 12, 12)
STEPS = ("convolution", "relu", "pool", "residual")
REFUSED = ("too few", "is nothing", "to shard", "no value before it has that axis")


def grown(draw: st.DrawFn, network: Network, size: int) -> list[relax.Var]:
    """A chain with residuals, which may reach over several stages; its values."""
    values = [network.convolution(network.input, 6, 3)]
    for _ in range(size):
        x = values[-1]
        alike = [value for value in values if shape_of(value) == shape_of(x)]
        match draw(st.sampled_from(STEPS)):
            case "convolution":
                x = network.convolution(x, draw(st.sampled_from([6, 8])), 3)
            case "pool" if shape_of(x)[2] > 6:
                x = network.add(op.nn.max_pool2d(x, (2, 2), (2, 2)))
            case "residual":
                x = network.add(op.add(x, draw(st.sampled_from(alike))))
            case _:
                x = network.add(op.nn.relu(x))
        values.append(x)
    return values


@st.composite
def stages(draw: st.DrawFn, layers: list[str]) -> Stage:
    if draw(st.booleans()) and draw(st.booleans()):
        return whole(draw(st.sampled_from((A, B, C))), *layers)
    machines = draw(st.permutations((A, B, C)))[: draw(st.integers(2, 3))]
    parts = [draw(st.integers(2, 4)) for _ in machines]
    shares = {machine: part / sum(parts) for machine, part in zip(machines, parts, strict=True)}
    axis, exchange = draw(st.sampled_from(("rows", "columns", "channels"))), draw(st.sampled_from(("fused", "each")))
    return shared(axis, *layers, shares=shares, exchange=exchange)


@settings(max_examples=40)
@given(st.data(), st.integers(2, 8))
def test_stages_that_are_shared_in_turn(data: st.DataObject, size: int) -> None:
    network = Network(IMAGE)
    values = data.draw(st.composite(grown)(network, size))
    module = network.module(values[-1], data.draw(st.sampled_from(values)))
    names = [binding.var.name for binding in operations_of(main_function(module))]
    # Between a convolution and its bias a stage need not end.
    places = sorted({names.index(value.name) + 1 for value in values[:-1]})
    cuts = data.draw(st.lists(st.sampled_from(places), max_size=3, unique=True)) if places else []
    spans = pairwise([0, *sorted(cuts), len(names)])
    plan = planned(*(data.draw(stages(names[begin:end])) for begin, end in spans))
    try:
        placed = partition(Model("random", "test", module, (), (), {name: name for name in names}), plan)
    except PlanError as error:
        if not any(words in str(error) for words in REFUSED):
            raise
        assume(False)
    require_consistent(placed)
    image = np.random.default_rng(0).standard_normal(IMAGE).astype(np.float32)
    parted = with_cuts_made(placed.model.module, placed.cuts, module)
    for expected, actual in zip(values_of(module, image), values_of(parted, image), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.ptp(expected))

"""Layers that workers compute together: values compared with torch, and runs with their simulation."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import tvm_split
from rpc_runtime.program.events import COMPUTE, RECEIVE, SEND, TraceEvent
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import CLIENT
from tests.models.small_onnx_model import small_model
from tests.models.torch_models import bert, published_models, vgg
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Machine
from tvm_split.launchers.local import InProcess
from tvm_split.placement.problem import Axis, Exchange
from tvm_split.simulation.scenario import scenario_of_plan
from tvm_split.simulation.simulate import simulate

A, B, C = "machine-a", "machine-b", "machine-c"
IMAGE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def small_vgg() -> tvm_split.Model:
    return tvm_split.load_model(vgg().eval(), (IMAGE,))


def require_answers(
    network: nn.Module,
    bundle: tvm_split.Bundle,
    cluster: tvm_split.Cluster,
    batches: Sequence[tuple[torch.Tensor, ...]],
) -> None:
    with tvm_split.deploy(bundle, cluster) as deployment:
        for batch, outputs in zip(batches, deployment.stream(batches), strict=True):
            with torch.no_grad():
                expected = network(*batch)
            expected_outputs = list(expected.values()) if isinstance(expected, dict) else [expected]
            for output, expected_output in zip(outputs, expected_outputs, strict=True):
                np.testing.assert_allclose(output, expected_output.numpy(), rtol=1e-4, atol=1e-5)
        statistics = deployment.stats().stages
        assert {(stage.name, stage.machine) for stage in statistics} == {
            (stage.name, stage.machine) for stage in deployment.stages
        }
        assert {stage.micro_batches for stage in statistics} == {len(batches)}


@pytest.mark.parametrize("exchange", ["fused", "each"])
def test_rows_of_an_image_on_three_workers(
    small_vgg: tvm_split.Model, three_workers: tvm_split.Cluster, exchange: Exchange
) -> None:
    shard = tvm_split.Shard("features.0", "features.7", "rows", {A: 0.5, B: 0.3, C: 0.2}, exchange)
    planned = tvm_split.plan(small_vgg, three_workers, shards=[shard])
    assert planned.stages[0].machines == (A, B, C)
    assert planned.prediction is None
    bundle = tvm_split.compile(small_vgg, planned)
    assert bundle.verified == "yes"
    assert {stage.machine for stage in bundle.program.stages} == {A, B, C}
    images = [(IMAGE + number,) for number in range(4)]
    require_answers(vgg().eval(), bundle, three_workers, images)


def test_heads_of_an_attention_on_two_workers(three_workers: tvm_split.Cluster) -> None:
    network, mask = bert(depth=1).eval(), torch.ones(1, 12, dtype=torch.int64)
    model = tvm_split.load_model(network, (TOKENS, mask))
    shard = tvm_split.Shard("layers", "layers", "heads", {B: 0.5, C: 0.5})
    planned = tvm_split.plan(model, three_workers, shards=[shard], split={A: ["word_embeddings"], C: ["pooler"]})
    assert [stage.machines for stage in planned.stages if stage.sharding] == [(B, C)]
    bundle = tvm_split.compile(model, planned)
    weights = {
        machine: sum(
            {weight.blob.sha256: weight.blob.size_bytes for stage in stages for weight in stage.weights}.values()
        )
        for machine in (B, C)
        for stages in [[stage for stage in bundle.program.stages if stage.machine == machine]]
    }
    whole = sum(parameter.numel() * 4 for parameter in network.layers.parameters())
    assert max(weights.values()) < 0.75 * whole  # the pooler's, too
    shorter = torch.tensor([[1] * 7 + [0] * 5])
    require_answers(network, bundle, three_workers, [(TOKENS, mask), (TOKENS.flip(1), shorter)])


def test_machines_may_have_any_names() -> None:
    model = tvm_split.load_model(small_model())
    machines = ("my box:1", "/dev/ü")
    cluster = Cluster(tuple(Machine(name, 1) for name in machines), launcher=InProcess())
    shard = tvm_split.Shard("conv_1", "conv_2", "rows", dict.fromkeys(machines, 0.5), "each")
    assert tvm_split.compile(model, tvm_split.plan(model, cluster, shards=shard)).verified == "yes"


EVERY_WAY: dict[str, Sequence[Axis]] = {
    **dict.fromkeys(("vgg16", "resnet50", "mobilenet_v2"), ("rows", "columns", "channels")),
    **dict.fromkeys(("bert_base", "gpt2_small"), ("channels", "heads")),
}


@pytest.mark.long
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.6, 0.4), (0.5, 0.3, 0.2)], ids=str)
@pytest.mark.parametrize("exchange", ["fused", "each"])
@pytest.mark.parametrize(("name", "axis"), [(name, axis) for name, axes in EVERY_WAY.items() for axis in axes])
def test_published_networks_in_every_way(
    name: str, axis: Axis, exchange: Exchange, shares: Sequence[float], three_workers: tvm_split.Cluster
) -> None:
    """Compared with torch in float64; halves by channels or heads leave a worker about half of the weights."""
    build, inputs = published_models()[name]
    network, parts = build(), dict(zip((A, B, C), shares, strict=False))
    model = tvm_split.load_model(network, inputs)
    first, last = model.layer_names[0], model.layer_names[-1]
    shards = [tvm_split.Shard(first, last, axis, parts, exchange)]
    if name == "vgg16" and axis in ("rows", "columns"):  # the classifier reads all rows at once
        behind = tvm_split.Shard("flatten", "classifier", "channels", parts, exchange)
        shards = [tvm_split.Shard("features", "features", axis, parts, exchange), behind]
    bundle = tvm_split.compile(model, tvm_split.plan(model, three_workers, shards=shards), verify=False)
    with tvm_split.deploy(bundle, three_workers) as deployment:
        outputs, again = (deployment.run(*inputs) for _ in range(2))
        held = deployment.stats().weight_bytes
    exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    with torch.no_grad():
        expected = tree_leaves(network.double()(*exact))
    for output, second, right in zip(outputs, again, expected, strict=True):
        assert np.array_equal(output, second)
        assert np.abs(output - right.numpy()).max() < 1e-4 * np.ptp(right.numpy())
    if axis in ("channels", "heads") and set(shares) == {0.5} and name not in ("resnet50", "mobilenet_v2"):
        assert max(held.values()) < 0.6 * sum(held.values())


MICRO_BATCHES = 3


@pytest.fixture(scope="module")
def attention_network() -> tvm_split.Model:
    return tvm_split.load_model(bert(depth=1).eval(), (TOKENS, torch.ones(1, 12, dtype=torch.int64)))


def content(program: Program) -> tuple[list[tuple[str, str]], set[tuple[object, ...]]]:
    """Return the stages in order, the transfers, and the depths of their queues."""
    return [(stage.name, stage.machine) for stage in program.stages], {
        (handover.tensor.name, handover.tensor.size_bytes, handover.source, handover.destination, handover.depth)
        for handover in program.handovers
    }


@pytest.mark.parametrize(
    ("network", "split", "shards"),
    [
        (
            "small_vgg",
            None,
            [
                tvm_split.Shard("features.0", "features.2", "rows", {A: 0.5, B: 0.5}),
                tvm_split.Shard("features.3", "features.7", "channels", {A: 0.5, B: 0.5}, "each"),
            ],
        ),
        (
            "attention_network",
            {A: ["word_embeddings"], C: ["pooler"]},
            [tvm_split.Shard("layers", "layers", "heads", {B: 0.5, C: 0.5})],
        ),
    ],
    ids=["rows and channels", "heads"],
)
def test_the_simulated_program_is_the_one_that_is_compiled(
    network: str,
    split: dict[str, list[str]] | None,
    shards: Sequence[tvm_split.Shard],
    three_workers: tvm_split.Cluster,
    request: pytest.FixtureRequest,
) -> None:
    model = request.getfixturevalue(network)
    plan = tvm_split.plan(model, three_workers, shards=shards, split=split, predict=True, estimate=True)
    compiled = tvm_split.compile(model, plan, verify=False).program
    assert content(scenario_of_plan(plan).program) == content(compiled)


def computed(events: Iterable[TraceEvent], machine: str) -> list[tuple[str, int]]:
    """Return the stages and micro-batches in the order in which a machine computed them."""
    computations = [event for event in events if (event.machine, event.kind) == (machine, COMPUTE)]
    return [(event.stage, event.sequence) for event in sorted(computations, key=lambda event: event.start_nanoseconds)]


def crossed(events: Iterable[TraceEvent]) -> list[tuple[str, str, str, int, int]]:
    return sorted(
        (event.machine, event.kind, event.stage, event.sequence, event.size_bytes)
        for event in events
        if event.kind in (SEND, RECEIVE)
    )


def test_workers_do_what_is_simulated_in_the_same_order(
    small_vgg: tvm_split.Model, three_workers: tvm_split.Cluster
) -> None:
    """One input at a time: in a stream, the order depends on times."""
    shard = tvm_split.Shard("features.0", "features.7", "rows", {A: 0.5, B: 0.5}, "each")
    plan = tvm_split.plan(small_vgg, three_workers, shards=[shard], predict=True, estimate=True)
    scenario = scenario_of_plan(plan)
    simulated = [
        event
        for event in simulate(scenario, micro_batches=MICRO_BATCHES, in_flight=1).trace
        if event.sequence < MICRO_BATCHES
    ]
    bundle = tvm_split.compile(small_vgg, plan, verify=False)
    with tvm_split.deploy(bundle, three_workers) as deployment:
        for _ in range(MICRO_BATCHES):
            deployment.run(IMAGE)
        deployment.stats()  # returns after everything is counted and recorded
        events = [event for event in deployment.trace() if event.machine != CLIENT]
    for machine in (A, B):
        order = computed(events, machine)
        assert len(order) == MICRO_BATCHES * len(bundle.program.stages_on(machine)) > 2 * MICRO_BATCHES
        assert order == computed(simulated, machine)
    assert crossed(events) == crossed(simulated)

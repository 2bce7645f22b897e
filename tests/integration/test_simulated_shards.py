"""Simulations of layers that workers compute together, compared with runs: transfers, and the order of events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch

import tvm_split
from rpc_runtime.program.measurements import COMPUTE, RECEIVE, SEND, TraceEvent
from rpc_runtime.program.program import Program
from tests.models.torch_models import bert, vgg
from tvm_split.simulation.scenario import scenario_of_plan
from tvm_split.simulation.simulate import simulate

A, B, C = "machine-a", "machine-b", "machine-c"
IMAGE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(0))
MICRO_BATCHES = 3


@pytest.fixture(scope="module")
def image_network() -> tvm_split.Model:
    return tvm_split.load_model(vgg().eval(), (IMAGE,))


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
            "image_network",
            None,
            [tvm_split.Shard("features.0", "features.7", "rows", {A: 0.5, B: 0.3, C: 0.2}, "each")],
        ),
        (
            "image_network",
            None,
            [
                tvm_split.Shard("features.0", "features.2", "rows", {A: 0.5, B: 0.5}, "each"),
                tvm_split.Shard("features.3", "features.7", "channels", {A: 0.5, B: 0.5}, "each"),
            ],
        ),
        (
            "attention_network",
            {A: ["word_embeddings"], C: ["pooler"]},
            [tvm_split.Shard("layers", "layers", "heads", {B: 0.5, C: 0.5})],
        ),
    ],
    ids=["rows", "rows and channels", "heads"],
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


def followed(events: Sequence[TraceEvent], program: Program) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    """Return the pairs of connected stages and micro-batches where the second began after the first had ended."""
    computations = {(event.stage, event.sequence): event for event in events if event.kind == COMPUTE}
    makers = {tensor: [stage.name for stage in stages] for tensor, stages in program.producers.items()}
    pairs = {
        (before, stage.name) for stage in program.stages for tensor in stage.inputs for before in makers[tensor.name]
    }
    return {
        ((before, number), (after, number))
        for before, after in pairs
        for number in range(MICRO_BATCHES)
        if computations[before, number].end_nanoseconds <= computations[after, number].start_nanoseconds
    }


def test_workers_do_what_is_simulated_in_the_same_order(
    image_network: tvm_split.Model, three_workers: tvm_split.Cluster
) -> None:
    """One input at a time: in a stream, the order depends on times."""
    shard = tvm_split.Shard("features.0", "features.7", "rows", {A: 0.5, B: 0.5}, "each")
    plan = tvm_split.plan(image_network, three_workers, shards=[shard], predict=True, estimate=True)
    scenario = scenario_of_plan(plan)
    simulated = [
        event
        for event in simulate(scenario, micro_batches=MICRO_BATCHES, in_flight=1).events
        if event.sequence < MICRO_BATCHES
    ]
    bundle = tvm_split.compile(image_network, plan, verify=False)
    with tvm_split.deploy(bundle, three_workers) as deployment:
        for _ in range(MICRO_BATCHES):
            deployment.run(IMAGE)
        deployment.stats()  # returns after everything is counted and recorded
        events = deployment.trace()
    for machine in (A, B):
        order = computed(events, machine)
        assert len(order) == MICRO_BATCHES * len(bundle.program.stages_on(machine)) > 2 * MICRO_BATCHES
        assert order == computed(simulated, machine)
    assert crossed(events) == crossed(simulated)
    assert followed(events, bundle.program) == followed(simulated, scenario.program)

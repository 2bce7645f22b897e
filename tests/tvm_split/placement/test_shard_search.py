"""Blocks of small graphs, the cheapest stages compared with exhaustive search, and balanced shares."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from tests.helpers.placement.layer_graphs import chain_graph
from tests.helpers.placement.profiles import A as MACHINE, B as OTHER, chain_profile, graph_of
from tests.helpers.placement.steps import step
from tvm_split.placement.graph import LayerGraph, Value
from tvm_split.placement.problem import Evaluation, MachineLoad, ProblemLink, Sharding, Stage
from tvm_split.placement.profile import ModelPiece
from tvm_split.placement.shard_search import (
    MOST_BLOCKS,
    Block,
    Layout,
    ShardOption,
    blocks_of,
    cheapest,
    lightened,
    rebalanced,
    relayout_seconds,
    rounded,
    stage_of,
    whole_on,
)
from tvm_split.placement.solution import STAGE_SECONDS
from tvm_split.placement.step_graph import StepGraph

A, B, CLIENT = "a", "b", "client"
FUSED = Sharding("rows", "fused")


def links(bytes_per_second: float, latency_seconds: float = 0.0) -> dict[tuple[str, str], ProblemLink]:
    pairs = itertools.permutations((A, B, CLIENT), 2)
    return {pair: ProblemLink(*pair, bytes_per_second, latency_seconds) for pair in pairs}


def blocks(*seconds: float, size: float = 100.0) -> list[Block]:
    return [Block((f"layer_{n}",), {A: duration, B: duration}, size) for n, duration in enumerate(seconds)]


def halves(count: int, seconds: float, begin: int = 0) -> ShardOption:
    """An option that shards ``count`` blocks in halves; each block takes ``seconds``, for every end."""
    ends = range(begin + 1, begin + count + 1)
    return ShardOption(FUSED, (A, B), (0.5, 0.5), begin, {end: [seconds] * (end - begin) for end in ends})


def test_what_comes_from_the_client_is_cut_along_pixels_only() -> None:
    """Sharded by rows, a machine computes longer but receives only half of the input."""
    by_rows, by_channels = halves(1, 7.0), replace(halves(1, 5.1), sharding=Sharding("channels", "fused"))
    stages = cheapest(blocks(10.0), [by_rows, by_channels], links(20.0), 100.0, 0.0)
    assert [stage.sharding for stage in stages] == [by_rows.sharding]


def test_between_shared_stages_each_gets_what_it_lacks_from_who_has_it() -> None:
    """Transfers of 100 bytes: only halos, the difference of the shares, a quarter for other columns, or all parts."""
    network = links(10.0, 1.0)
    held = Layout("rows", (A, B), (0.5, 0.5))
    expected = {
        Layout("rows", (A, B), (0.5, 0.5)): 1.0,
        Layout("rows", (A, B), (0.8, 0.2)): 1.0 + 3.0,
        Layout("columns", (A, B), (0.5, 0.5)): 1.0 + 2.5,
        Layout("channels", (A, B), (0.5, 0.5)): 1.0 + 5.0,
        Layout("batch", (A, B), (0.8, 0.2)): 1.0 + 4.0,
        whole_on(A): 1.0 + 5.0,
        whole_on(CLIENT): 1.0 + 5.0,
    }
    assert {layout: relayout_seconds(network, held, layout, 100.0) for layout in expected} == {
        layout: pytest.approx(seconds) for layout, seconds in expected.items()
    }
    samples = Layout("batch", (A, B), (0.5, 0.5))
    assert relayout_seconds(network, samples, samples, 100.0) == 0.0
    assert relayout_seconds({}, held, held, 100.0) == math.inf


def test_blocks_that_no_machine_may_have() -> None:
    assert cheapest([Block(("x",), {}, 0.0)], [], links(1.0), 1.0, 1.0) == ()
    assert cheapest([*blocks(1.0), Block(("x",), {}, 0.0)], [], links(1.0), 1.0, 1.0) == ()


UNITS = 10


def owners(stage: Stage | None) -> str | list[str]:
    """The machine that has each tenth of a value; one name if one machine has all of it."""
    if stage is None:
        return CLIENT
    if stage.sharding is None:
        return stage.machine
    tenths = zip(stage.machines, stage.shares, strict=True)
    return [machine for machine, share in tenths for _ in range(round(UNITS * share))]


def cost(
    stages: Sequence[Stage],
    chain: list[Block],
    shared: list[ShardOption],
    network: dict[tuple[str, str], ProblemLink],
    size: float,
    out: float,
) -> float:
    """The seconds of consecutive stages, sharded by rows, in an independent implementation."""

    def wire(before: str | list[str], after: str | list[str], alive: float) -> float:
        has = [before] * UNITS if isinstance(before, str) else before
        moved: dict[tuple[str, str], int] = {}
        for unit, source in enumerate(has):
            beside = range(max(0, unit - 1), min(UNITS, unit + 2)) if isinstance(before, list) else (unit,)
            ends = (
                {after: 1}
                if isinstance(after, str)
                else {after[neighbour]: int(neighbour == unit) for neighbour in beside}
            )
            if not isinstance(after, str):
                ends[after[unit]] = 1
            for end, units in ends.items():
                if end != source:
                    moved[source, end] = moved.get((source, end), 0) + units
        return max(
            (
                network[ends].latency_seconds + alive * n / UNITS / network[ends].bytes_per_second
                for ends, n in moved.items()
            ),
            default=0.0,
        )

    total, last = 0.0, None
    first = 0
    for stage in stages:
        end = first + len(stage.layers)
        alive = chain[first - 1].bytes_after if last else size
        total += STAGE_SECONDS if stage.sharding is not None or owners(stage) != owners(last) else 0.0
        total += wire(owners(last), owners(stage), alive)
        if stage.sharding is None:
            total += math.fsum(block.seconds[stage.machine] for block in chain[first:end])
        else:
            fitting = [one for one in shared if one.begin <= first and one.shares == stage.shares]
            total += min(math.fsum(option.seconds[end][first - option.begin :]) for option in fitting)
        first, last = end, stage
    holder = last.machines[last.shares.index(max(last.shares))] if last else CLIENT
    return total + wire(owners(last), holder, out) + wire(holder, CLIENT, out)


@given(st.integers(0, 10**6))
def test_no_other_way_is_cheaper(seed: int) -> None:
    generator = random.Random(seed)
    count = generator.randint(1, 4)
    scale = generator.choice((1.0, STAGE_SECONDS))  # of times, some so short that a stage's own cost counts
    chain = []
    for n in range(count):
        machines = generator.choice([(A, B), (A, B), (A,), (B,)])
        seconds = {machine: scale * generator.uniform(1, 9) for machine in machines}
        chain.append(Block((f"layer_{n}",), seconds, generator.uniform(1, 300)))
    shares = generator.choice(((0.5, 0.5), (0.7, 0.3))), generator.choice(((0.5, 0.5), (0.8, 0.2)))
    shared = []
    for pair in shares:
        begin = generator.randrange(count)
        ends = range(begin + 1, count + 1)
        seconds = {end: [scale * generator.uniform(0.5, 5) for _ in range(begin, end)] for end in ends}
        shared.append(ShardOption(FUSED, (A, B), pair, begin, seconds))
    network = links(generator.choice((50.0, 1000.0)) / scale, scale * generator.choice((0.0, 0.5)))
    stages = cheapest(chain, shared, network, 100.0, 50.0)
    least = math.inf
    for cuts in itertools.product((False, True), repeat=count - 1):
        bounds = [0, *(n + 1 for n, cut in enumerate(cuts) if cut), count]
        options = [
            [
                *(
                    stage_of(chain, *span, whole_on(machine))
                    for machine in (A, B)
                    if all(machine in b.seconds for b in chain[slice(*span)])
                ),
                *(stage_of(chain, *span, option.layout, FUSED) for option in shared if option.begin <= span[0]),
            ]
            for span in itertools.pairwise(bounds)
        ]
        for chosen in itertools.product(*options):
            if any(stage.sharding for stage in chosen):
                least = min(least, cost(chosen, chain, shared, network, 100.0, 50.0))
    assert cost(stages, chain, shared, network, 100.0, 50.0) == pytest.approx(least)


def graph_with(edges: list[tuple[int, int]], count: int) -> LayerGraph:
    """A graph of ``layer_0``, …; the tensor of layer ``n`` has ``10 * (n + 1)`` bytes."""
    names = [f"layer_{number}" for number in range(count)]
    users = {layer: frozenset(names[end] for start, end in edges if start == layer) for layer in range(count)}
    values = tuple(Value(10 * (layer + 1), names[layer], after, f"t{layer}") for layer, after in users.items())
    before = {names[end]: frozenset(names[start] for start, stop in edges if stop == end) for end in range(count)}
    return LayerGraph(tuple(names), before, frozenset(), values)


def test_a_chain_may_be_divided_behind_each_piece() -> None:
    profile = chain_profile({MACHINE: [1.0, 2.0, 3.0], OTHER: [2.0, 4.0, 6.0]})
    blocks = blocks_of(graph_of(profile), profile, {"layer_1": frozenset({OTHER})})
    assert [block.layers for block in blocks] == [("layer_0",), ("layer_1",), ("layer_2",)]
    assert [dict(block.seconds) for block in blocks] == [
        {MACHINE: 1.0, OTHER: 2.0},
        {MACHINE: 2.0},
        {MACHINE: 3.0, OTHER: 6.0},
    ]
    assert [block.bytes_after for block in blocks] == [1000.0, 1000.0, 0.0]


def test_a_residual_network_may_be_divided_between_its_blocks() -> None:
    profile = chain_profile({MACHINE: [1.0] * 7})
    graph = graph_with([*itertools.pairwise(range(7)), (0, 3), (3, 6)], 7)
    blocks = blocks_of(graph, profile, {})
    assert [len(block.layers) for block in blocks] == [1, 3, 3]
    assert [block.bytes_after for block in blocks] == [10.0, 40.0, 0.0]


def test_a_tensor_that_all_need_divides_nothing_more_or_less() -> None:
    """A mask that every block reads is alive everywhere, so two tensors pass between blocks."""
    edges = [*itertools.pairwise(range(8)), (1, 4), (4, 7), *((0, end) for end in (2, 5, 7))]
    profile = chain_profile({MACHINE: [1.0] * 8})
    blocks = blocks_of(graph_with(edges, 8), profile, {})
    assert [len(block.layers) for block in blocks] == [1, 4, 3]


def test_pieces_stay_whole() -> None:
    profile = chain_profile({MACHINE: [1.0, 2.0]})
    pieces = (ModelPiece("layer_0", ("layer_0", "layer_1"), 0, 0), ModelPiece("layer_1", ("layer_2",), 0, 0))
    graph = chain_graph(["layer_0", "layer_1", "layer_2"])
    blocks = blocks_of(graph, replace(profile, pieces=pieces), {})
    assert [block.layers for block in blocks] == [("layer_0", "layer_1"), ("layer_2",)]


def test_so_many_at_most() -> None:
    profile = chain_profile({MACHINE: [1.0] * 60 + [100.0]})
    blocks = blocks_of(graph_of(profile), profile, {})
    assert len(blocks) == MOST_BLOCKS
    assert blocks[-1].layers == ("layer_60",)
    assert sum(block.seconds[MACHINE] for block in blocks) == pytest.approx(160.0)


def sharded(**shares: float) -> Stage:
    machines = tuple(f"machine-{letter}" for letter in shares)
    return Stage(machines, ("conv",), tuple(shares.values()), "stage_0", Sharding("channels"))


def load(machine: str, weight_bytes: float) -> MachineLoad:
    return MachineLoad(machine, 0, 0, 0, weight_bytes, 0, 0, 0, 0, 1)


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=100))
def test_rounded_shares_make_a_whole_and_are_near(parts: list[float]) -> None:
    exact = [part / sum(parts) for part in parts]
    shares = rounded(exact)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) > 0
    assert len(parts) > 20 or all(share * 100 == pytest.approx(round(share * 100)) for share in shares)
    assert all(share == pytest.approx(wanted, abs=0.011) for share, wanted in zip(shares, exact, strict=True)) or (
        min(exact) < 0.01  # those that get more than they should take it from the largest
    )


@pytest.mark.parametrize("count", [7, 15, 18, 40, 64])
def test_equal_machines_have_nearly_equal_shares(count: int) -> None:
    shares = rounded([1 / count] * count)
    assert max(shares) - min(shares) <= 0.01 + 1e-9
    assert sum(shares) == pytest.approx(1)


def test_a_closed_link_leaves_other_ways() -> None:
    """Nothing arrives at b, whose only use would be to share the work of a."""
    network = {ends: link for ends, link in links(1000.0).items() if ends[1] != B}
    assert cheapest(blocks(10.0), [halves(1, 6.0)], network, 100.0, 0.0) == ()
    unreachable = replace(halves(1, 6.0), seconds={1: [math.inf]})
    assert cheapest(blocks(10.0, 10.0), [unreachable], links(1000.0), 100.0, 0.0) == ()


def test_who_took_longer_gets_less() -> None:
    steps = [replace(step(name, name, 0.0, took), stage="stage_0") for name, took in ((MACHINE, 3.0), (OTHER, 1.0))]
    graph = StepGraph((*steps, step("other", OTHER, 9.0)), ())
    assert rebalanced(sharded(a=0.5, b=0.5), graph).shares == (0.25, 0.75)


def test_whose_memory_is_too_small_gets_what_fits_and_others_the_rest() -> None:
    evaluation = Evaluation(0, 0, (load(MACHINE, 200), load(OTHER, 100)), "")
    assert lightened(sharded(a=0.5, b=0.5), evaluation, {MACHINE: 100, OTHER: 1000}).shares == (0.24, 0.76)
    nothing = Evaluation(0, 0, (load(MACHINE, 200),), "")  # the other machine computes nothing
    assert lightened(sharded(a=0.5, b=0.5), nothing, {MACHINE: 100, OTHER: 1000}).shares == (0.24, 0.76)
    crowded = sharded(a=0.5, b=0.5)
    assert lightened(crowded, evaluation, {MACHINE: 100, OTHER: 50}) == crowded

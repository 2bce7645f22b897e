"""What a problem says of groups is what it would say of each of their machines."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.helpers.planner.many_machines import LinkKinds, MachineKinds, many_machines_problem
from tests.helpers.planner.problems import random_problem
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.errors import PlanError
from tvm_split.planner.problem import Piece, Problem, ProblemLink, ProblemMachine
from tvm_split.planner.problem_groups import with_groups
from tvm_split.planner.search import (
    evaluate,
    faults as faults_module,
    groups as groups_module,
    instance as instance_module,
    solve,
)
from tvm_split.planner.search.faults import faults
from tvm_split.planner.search.groups import entries_of_pairs
from tvm_split.planner.search.instance import instance_of
from tvm_split.simulation.of_plans import scenario_of_problem

NAMES = [f"machine-{index}" for index in range(6)]
GROUPS = {
    "pair": ("machine-0", "machine-1"),
    "three": ("machine-1", "machine-2", "machine-3"),
    "all": (*NAMES, "client"),
    "nested": ("three", "machine-4"),
}
MEMBERS = {**GROUPS, "nested": (*GROUPS["three"], "machine-4")}


def six_machines(seed: int = 0) -> Problem:
    problem = random_problem(seed, pieces=5, machines=6, chain=False, plain=True, objective="throughput")
    return dataclasses.replace(problem, groups=GROUPS)


def ends_of(link: ProblemLink) -> list[tuple[str, str]]:
    sources, ends = (MEMBERS.get(name, (name,)) for name in (link.source, link.destination))
    return [pair for pair in itertools.product(sources, ends) if pair[0] != pair[1]]


def rank(link: ProblemLink) -> int:
    """How far from a pair of machines a link is: 0 for its own, else how many pairs it is for."""
    return len(ends_of(link)) if {link.source, link.destination} & MEMBERS.keys() else 0


@given(st.integers(0, 2**32))
def test_of_links_that_fit_a_pair_its_own_counts_then_the_one_of_fewest_pairs(seed: int) -> None:
    """Two of as many pairs are refused where both would count, and only there."""
    generator = random.Random(seed)
    every = list(itertools.product([*NAMES, *GROUPS, "client"], repeat=2))
    links: list[ProblemLink] = []
    for source, end in generator.sample(every, 12):
        link = ProblemLink(source, end, generator.uniform(1, 2), generator.uniform(0, 1))
        if source != end or source in GROUPS:
            links.append(link)
    if generator.random() < 0.5:  # all pairs are settled by links of their own
        links += [ProblemLink(*pair, 1.0) for pair in itertools.permutations([*NAMES, "client"], 2)]
        links = list({(link.source, link.destination): link for link in links}.values())
    problem = dataclasses.replace(six_machines(), links=tuple(links), edges=())
    fitting = {
        pair: sorted((link for link in links if pair in ends_of(link)), key=rank)
        for pair in itertools.permutations([*NAMES, "client"], 2)
    }
    contested = {pair for pair, own in fitting.items() if len(own) > 1 and rank(own[0]) == rank(own[1])}
    found = list(faults(problem))
    assert bool(found) == bool(contested)
    for fault in found:
        assert any(f"for {one!r} to {other!r} another link" in fault.text for one, other in contested)
    if contested:
        return
    instance = instance_of(problem)
    number = instance.machine_number | {"client": instance.client}
    for pair, own in fitting.items():
        ends = number[pair[0]], number[pair[1]]
        assert instance.linked[ends] == bool(own)
        if own:
            assert instance.seconds_per_byte[ends] == 1 / own[0].bytes_per_second
            assert instance.latency[ends] == own[0].latency_seconds
    assert not instance.linked.diagonal().any()


def test_a_link_of_a_pair_counts_before_one_of_a_group_that_has_one_machine() -> None:
    lone = dataclasses.replace(six_machines(), edges=(), groups={"one": ("machine-0",)})
    slow, fast = ProblemLink("one", "machine-1", 1.0), ProblemLink("machine-0", "machine-1", 8.0)
    assert instance_of(dataclasses.replace(lone, links=(slow, fast))).seconds_per_byte[0, 1] == 1 / 8


def test_a_machine_has_the_seconds_of_its_smallest_group_unless_it_has_its_own() -> None:
    pieces = (
        Piece("a", {"all": 7.0, "nested": 4.0, "three": 3.0, "machine-3": 1.0}),
        Piece("b", {"machine-5": 5.0, "pair": 2.0}),
    )
    instance = instance_of(dataclasses.replace(six_machines(), pieces=pieces, edges=()))
    assert instance.times.tolist() == [[7.0, 3.0, 3.0, 1.0, 4.0, 7.0], [2.0, 2.0, *([math.inf] * 3), 5.0]]


def test_which_links_count_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a million of them."""
    problem, read = six_machines(), []
    for module in (groups_module, faults_module, instance_module):
        if hasattr(module, "entries_of_pairs"):
            monkeypatch.setattr(module, "entries_of_pairs", lambda *said: read.append(1) or entries_of_pairs(*said))
    assert instance_of(problem).linked.any()
    assert len(read) == 1


def test_of_two_groups_as_large_a_smaller_one_or_the_machine_itself_decides() -> None:
    own = {"left": ("machine-0", "machine-1", "client"), "right": ("machine-1", "machine-2"), "one": ("machine-1",)}
    problem = dataclasses.replace(six_machines(), groups=own, edges=())
    both = {"left": 1.0, "right": 2.0}
    said = ("machine-1", 3.0), ("one", 4.0)
    for name, seconds in said:
        settled = dataclasses.replace(problem, pieces=(Piece("a", {**both, name: seconds}),))
        assert instance_of(settled).times[0, :3].tolist() == [1.0, seconds, 2.0]
    with pytest.raises(PlanError, match="'left' and 'right' have 'machine-1' and as many machines; give it seconds of"):
        instance_of(dataclasses.replace(problem, pieces=(Piece("a", both),)))


def test_groups_share_cores_in_plans_and_simulations() -> None:
    problem = six_machines(3)
    named = (SharedCores(("pair", "nested", "client"), 2),)
    listed = (SharedCores((*NAMES[:5], "client"), 2),)
    by_group, by_name = (dataclasses.replace(problem, shared_cores=each) for each in (named, listed))
    found = solve(by_group, time_limit_seconds=2.0)
    assert found.evaluation == evaluate(by_name, found.stages)
    assert found.evaluation.shared_cores
    assert scenario_of_problem(by_group, found.stages) == scenario_of_problem(by_name, found.stages)


def test_a_problem_by_groups_is_solved_like_one_of_pairs() -> None:
    """Three kinds in two sites, which the search for many machines takes apart, and one that no site has."""
    problem = random_problem(5, pieces=40, machines=18, plain=True, objective="throughput", replicas=False)
    names = [machine.name for machine in problem.machines]
    kinds, sites = ({f"{word} {one}": tuple(names[one::of]) for one in range(of)} for word, of in (("k", 3), ("s", 2)))
    links = (
        ProblemLink("all", "all", 2e4, 0.01),
        *(ProblemLink(site, site, 1e6) for site in sites),
        ProblemLink("client", "all", 1e5),
        ProblemLink("all", "client", 1e5),
    )
    seconds = {name: 0.01 * (1 + place) for place, name in enumerate(kinds)}
    pieces = tuple(dataclasses.replace(piece, seconds=seconds) for piece in problem.pieces)
    grouped = dataclasses.replace(
        problem, groups={**kinds, **sites, "all": (*sites,)}, links=links, pieces=pieces, maximum_machines=15
    )
    instance = instance_of(grouped)
    ends = [*names, "client"]
    listed = dataclasses.replace(
        problem,
        links=tuple(
            ProblemLink(ends[one], ends[other], 1 / instance.seconds_per_byte[one, other], instance.latency[one, other])
            for one, other in np.argwhere(instance.linked)
        ),
        pieces=tuple(
            dataclasses.replace(piece, seconds=dict(zip(names, row, strict=True)))
            for piece, row in zip(pieces, instance.times.tolist(), strict=True)
        ),
        maximum_machines=15,
    )
    found = [solve(each, time_limit_seconds=math.inf) for each in (grouped, listed)]
    assert found[0].stages == found[1].stages
    assert found[0].evaluation == found[1].evaluation


def said_of_machines(problem: Problem) -> list[object]:
    instance = instance_of(problem)
    arrays = (instance.times, instance.linked, instance.seconds_per_byte, instance.latency)
    return [*(each.tolist() for each in arrays), instance.machines, instance.pieces]


@pytest.mark.parametrize(
    ("kinds", "links", "groups", "entries"),
    [
        ("three kinds", "four sites", 3 + 4, 4 * 4 + 2 * 4),
        ("equal", "alike", 1 + 1, 1 + 2),
        ("unlike", "two racks", 2, 2 * 2 + 2 * 2),
        ("three kinds", "a third slow", 3, 40 * 41),
    ],
)
def test_a_problem_is_written_with_groups_where_machines_are_alike(
    kinds: MachineKinds, links: LinkKinds, groups: int, entries: int
) -> None:
    problem = many_machines_problem(40, 12, kinds=kinds, links=links)
    written = with_groups(problem)
    assert (len(written.groups), len(written.links)) == (groups, entries)
    assert said_of_machines(written) == said_of_machines(problem)
    assert with_groups(written) is written
    few = many_machines_problem(16, 12, kinds=kinds, links=links)
    assert with_groups(few) is few


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_what_is_written_with_groups_is_the_same_problem(seed: int) -> None:
    """Also where links and seconds are missing."""
    problem = random_problem(seed, pieces=4, machines=17, objective="throughput")
    assert said_of_machines(with_groups(problem)) == said_of_machines(problem)


def test_groups_that_are_written_have_names_of_their_own() -> None:
    problem = many_machines_problem(20, 4, kinds="equal", links="two racks")
    machines = tuple(ProblemMachine(name) for name in ("kind-0", "place-0", "place-1-"))
    problem = dataclasses.replace(
        problem,
        machines=(*problem.machines, *machines),
        links=(*problem.links, ProblemLink("kind-0", "place-0", 1.0)),
        pieces=tuple(
            dataclasses.replace(piece, seconds={**piece.seconds, "kind-0": 5.0, "place-1-": 1.0})
            for piece in problem.pieces
        ),
    )
    written = with_groups(problem)
    assert not written.groups.keys() & {machine.name for machine in written.machines}
    assert said_of_machines(written) == said_of_machines(problem)


def test_what_no_machine_of_a_group_can_do_is_said_by_machine() -> None:
    """A pin, a link and seconds that are missing: the reasons name machines."""
    problem = dataclasses.replace(six_machines(), pieces=(Piece("a", {"pair": 1.0}),), edges=(), links=())
    with pytest.raises(PlanError, match="only 2 machines have seconds"):
        solve(
            dataclasses.replace(problem, pieces=tuple(Piece(name, {"pair": 1.0}) for name in "abc"), stages=3),
            time_limit_seconds=1.0,
        )
    with pytest.raises(PlanError, match="piece 'a' can run on no machine: not on machine-0, for which it has no sec"):
        solve(dataclasses.replace(problem, pieces=(Piece("a", {}),)), time_limit_seconds=1.0)

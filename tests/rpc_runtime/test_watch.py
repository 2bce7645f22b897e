"""Which of several reports is the root cause."""

from __future__ import annotations

import itertools

from rpc_runtime.watch import Report, ReportKind, root_cause

LINK = Report(ReportKind.LINK, "a", "broken", "b")
GONE = Report(ReportKind.GONE, "b", "gone")
STAGE = Report(ReportKind.STAGE, "c", "raised")


def test_a_broken_link_waits_for_a_better_reason() -> None:
    assert root_cause([], all_alive=True) is None
    assert root_cause([LINK], all_alive=False) is None
    assert root_cause([LINK, GONE], all_alive=False) is GONE
    assert root_cause([LINK, GONE, STAGE], all_alive=False) is STAGE
    assert root_cause([LINK], all_alive=True) is LINK


def link(machine: str, peer: str) -> Report:
    return Report(ReportKind.LINK, machine, "broken", peer)


def test_the_link_that_broke_the_others_is_blamed() -> None:
    # The one between b and c broke; both closed their other links, which the client and a noticed first.
    reports = [link("client", "c"), link("a", "b"), link("c", "b"), link("b", "c")]
    for order in itertools.permutations(reports):
        cause = root_cause(order, all_alive=True)
        assert cause is not None
        assert {cause.machine, cause.peer} == {"b", "c"}


def test_links_in_a_circle_have_some_cause() -> None:
    assert root_cause([link("a", "b"), link("b", "c"), link("c", "a")], all_alive=True) is not None

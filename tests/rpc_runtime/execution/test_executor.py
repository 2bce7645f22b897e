"""Executors of several machines, joined by links without a network, give the results of running stages in order."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from rpc_runtime.program.program import Program
from tests.helpers.rpc_runtime.joined_executors import check
from tests.helpers.rpc_runtime.random_programs import programs


@settings(max_examples=30)
@given(programs(), st.sampled_from([1, 2, 25]))
def test_any_program_on_any_machines(program: Program, count: int) -> None:
    check(program, count)


@settings(max_examples=40)
@given(programs(most_replicas=3), st.sampled_from([1, 2, 25, 60]))
def test_any_program_with_any_replicas(program: Program, count: int) -> None:
    check(program, count)

"""Benchmark the planner alone: `tvm-split solve` on 77 synthetic problems of 8 to 1,024 machines.

Measured are quality, gap to the bound, time and memory. ``--set seconds=10``: the time limit of each search.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from scripts.harness import Case, Limit, Ratio, Setup, Side
from scripts.processes import Checkout, Figures
from tests.helpers.placement.many_machines import dealt_to_all, first_fit, many_machines_problem
from tvm_split.placement.evaluate import evaluate
from tvm_split.placement.problem import Problem
from tvm_split.placement.read_problem import problem_to_dict
from tvm_split.placement.step_graph import lower

PLANNED, SIMPLE = "tvm-split", "the best simple way"
MACHINES = (8, 16, 32, 64, 128, 256, 1024)
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "common": {},
    "replicas": {"replicas": True},
    "equal machines": {"kinds": "equal"},
    "three kinds": {"kinds": "three kinds"},
    "two racks": {"links": "two racks"},
    "four sites, three kinds": {"links": "four sites", "kinds": "three kinds"},
    "four sites, replicas": {"links": "four sites", "replicas": True},
    "a third of the links slow": {"links": "a third slow"},
    "residual": {"network": "residual"},
    "unet, replicas": {"network": "unet", "replicas": True},
    "branches": {"network": "branches"},
}
"""The variants, as differences from unequal machines, equal links and a chain of layers."""
MANY = 64
"""The most machines for which a search is limited to `SECONDS`; above, to `LONG_SECONDS`."""
SECONDS, LONG_SECONDS = 10.0, 60.0
ALLOWED_SECONDS = 5.0
"""The allowed time besides the search: Python's start, and reading the problem."""


def solved(checkout: Checkout, problem: Path, seconds: float) -> Figures:
    """Run ``tvm-split solve``; the seconds and the peak memory are those of the whole process."""
    command = [checkout.python, "-P", "-m", "tvm_split", "solve", str(problem), "--time-limit", str(seconds), "--json"]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, cwd=problem.parent, env=checkout.environment())
        _, status, usage = os.wait4(process.pid, 0)
        passed = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")
        output.seek(0)
        solution = json.load(output)
    return {
        "period_seconds": solution["predicted"]["period_seconds"],
        "gap": solution["gap"],
        "solve_seconds": min(passed, usage.ru_utime + usage.ru_stime),
        "memory_bytes": usage.ru_maxrss * 1024,
    }


def simple_way(problem: Problem) -> Figures:
    """Return the best period of simple plans: one machine, first fit and, with replicas, a replica per machine."""
    plans = [first_fit(problem), *([dealt_to_all(problem)] if problem.replicas else [])]
    return {"period_seconds": min(evaluate(problem, lower(problem, plan)).period_seconds for plan in plans if plan)}


@contextmanager
def problem_file(problem: Problem) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.json"
        path.write_text(json.dumps(problem_to_dict(problem)))
        yield path


def sides(machines: int, variant: str, setup: Setup) -> Sequence[Side]:
    problem = many_machines_problem(machines, min(max(60, 10 * machines), 1000), **VARIANTS[variant])
    path = setup.until_end.enter_context(problem_file(problem))
    limit = float(setup.options.values.get("seconds", SECONDS if machines <= MANY else LONG_SECONDS))
    planned_sides = [
        Side(PLANNED, partial(solved, checkout, path, limit), checkout=checkout.label) for checkout in setup.checkouts
    ]
    simple = simple_way(problem)
    return [*planned_sides, Side(SIMPLE, lambda: simple)]


CASE = Case(
    subjects={
        f"{variant}, {machines} machines": partial(sides, machines, variant)
        for variant in VARIANTS
        for machines in MACHINES
    },
    ratios=(Ratio("period_seconds", SIMPLE, PLANNED),),
    limits=(
        Limit("period_seconds", 1 + 1e-9, PLANNED, SIMPLE),
        Limit("memory_bytes", 2e9, PLANNED),
        Limit("solve_seconds", 1.1 * LONG_SECONDS + ALLOWED_SECONDS, PLANNED),
    ),
    rounds=1,
)

"""Plans for 8 to 1,024 machines against the simple ways to make them, and against the bound.

Machines, links and networks are made up (`tests.helpers.planner.many_machines`), so the figures are of the planner
alone: how many times longer the period of the best simple way is, the gap that is proven, the time and the memory it
took. Each problem is planned in a process of its own. Writes JSON and, with --picture, quality, gap and time against
machines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.rounds import written
from tests.helpers.planner.many_machines import best_single, dealt_to_all, first_fit, many_machines_problem
from tvm_split.planner.evaluate import evaluate
from tvm_split.planner.problem import Problem
from tvm_split.planner.problem_file import problem_to_dict
from tvm_split.planner.search import solve
from tvm_split.planner.step_graph import lower

COMMON: dict[str, Any] = {"kinds": "unlike", "links": "alike", "network": "chain"}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"replicas": True},
    {"kinds": "equal"},
    {"kinds": "three kinds"},
    {"links": "two racks"},
    {"links": "four sites", "kinds": "three kinds"},
    {"links": "four sites", "replicas": True},
    {"links": "a third slow"},
    {"network": "residual"},
    {"network": "unet", "replicas": True},
    {"network": "branches"},
)
"""What differs from `COMMON`."""
LARGEST_GAP = 0.05
PIECES_A_MACHINE = 10
"""From so many on, where links are alike, no gap is larger."""
LARGEST_BYTES = 2e9
LONGER = 1.1
"""Times the limit that planning may take."""
COLOURS = 10
"""Of a picture's lines, until they begin anew."""


@dataclass(frozen=True)
class Planned:
    """A problem, and what came of it: periods in seconds, the gap as a share, and what planning took."""

    machines: int
    pieces: int
    kinds: str
    links: str
    network: str
    replicas: bool
    period_seconds: float
    lower_bound_seconds: float
    gap: float
    simple_ways_seconds: dict[str, float]
    machines_used: int
    stages: int
    method: str
    time_limit_seconds: float
    seconds: float
    processor_seconds: float
    largest_bytes: int

    @property
    def best_simple_seconds(self) -> float:
        return min(self.simple_ways_seconds.values())

    @property
    def variant(self) -> str:
        parts = [self.kinds, self.links, self.network, *(["replicas"] if self.replicas else [])]
        return ", ".join(part for part in parts if part not in COMMON.values()) or "common"


def made_up(machines: int, pieces: int, settings: dict[str, Any]) -> Problem:
    return many_machines_problem(machines, pieces, **{**COMMON, **settings})


def planned(machines: int, pieces: int, settings: dict[str, Any], time_limit_seconds: float) -> Planned:
    chosen = {"replicas": False, **COMMON, **settings}
    problem = made_up(machines, pieces, chosen)
    simple = {"one machine": best_single(problem), "first fit": first_fit(problem)}
    if problem.replicas:
        simple["dealt to all"] = dealt_to_all(problem)
    ways = {name: evaluate(problem, lower(problem, stages)).period_seconds for name, stages in simple.items() if stages}
    start, used = time.monotonic(), time.process_time()
    found = solve(problem, time_limit_seconds=time_limit_seconds)
    return Planned(
        machines=machines,
        pieces=pieces,
        **chosen,
        period_seconds=found.evaluation.period_seconds,
        lower_bound_seconds=found.lower_bound_seconds,
        gap=found.gap,
        simple_ways_seconds=ways,
        machines_used=sum(len(stage.machines) for stage in found.stages),
        stages=len(found.stages),
        method=found.method,
        time_limit_seconds=time_limit_seconds,
        seconds=time.monotonic() - start,
        processor_seconds=time.process_time() - used,
        largest_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def print_table(console: Console, results: Sequence[Planned]) -> None:
    table = Table(title="plans for many machines")
    table.add_column("problem", overflow="fold")
    for heading in ("machines", "pieces", "used", "ms", "simple way / plan", "gap", "s", "processor s", "MB"):
        table.add_column(heading, justify="right")
    for each in results:
        table.add_row(
            each.variant,
            str(each.machines),
            str(each.pieces),
            str(each.machines_used),
            f"{each.period_seconds * 1e3:.2f}",
            f"{each.best_simple_seconds / each.period_seconds:.3f}",
            f"{each.gap:.2%}",
            f"{each.seconds:.1f}",
            f"{each.processor_seconds:.1f}",
            f"{each.largest_bytes / 1e6:.0f}",
        )
    console.print(table)


def draw(path: Path, results: Sequence[Planned]) -> None:
    """The best simple way by the plan, the gap, and the time, against machines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    values = (
        ("period of the best simple way / the plan's", lambda each: each.best_simple_seconds / each.period_seconds),
        ("gap to the bound, %", lambda each: 100 * each.gap),
        ("seconds", lambda each: each.seconds),
    )
    for axes, (title, value) in zip(figure.subplots(1, 3), values, strict=True):
        by_variant = groupby(sorted(results, key=lambda each: each.variant), lambda each: each.variant)
        for number, (variant, group) in enumerate(by_variant):
            line = sorted(group, key=lambda each: each.machines)
            style = "o-" if number < COLOURS else "s:"
            axes.plot([each.machines for each in line], [value(each) for each in line], style, label=variant)
        axes.set(title=title, xlabel="machines", xscale="log")
    axes.legend(fontsize="small")
    figure.savefig(path)


def faults(results: Sequence[Planned]) -> Iterator[str]:
    """Where a simple way would have been better, or fewer machines; and where a gap, memory or time is too large.

    On a busy machine the processor's seconds are fewer than the clock's, and count.
    """
    for each in results:
        what = f"{each.variant}, {each.machines} machines, {each.pieces} pieces"
        if each.period_seconds > each.best_simple_seconds * (1 + 1e-9):
            yield f"a simple way is better: {what}"
        if each.links == "alike" and each.pieces >= PIECES_A_MACHINE * each.machines and each.gap > LARGEST_GAP:
            yield f"a gap of {each.gap:.1%}, over {LARGEST_GAP:.0%}: {what}"
        if each.largest_bytes > LARGEST_BYTES:
            yield f"{each.largest_bytes / 1e9:.1f} GB, over {LARGEST_BYTES / 1e9:g}: {what}"
        took = min(each.seconds, each.processor_seconds)
        if took > LONGER * each.time_limit_seconds:
            yield f"{took:.1f} s instead of {each.time_limit_seconds:g}: {what}"
        for other in results:
            alike = (other.variant, other.pieces) == (each.variant, each.pieces)
            if alike and other.machines < each.machines and other.period_seconds < each.period_seconds * (1 - 1e-9):
                yield f"{other.machines} machines are better: {what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, nargs="*", default=[8, 16, 32, 64, 128, 256, 1024])
    parser.add_argument("--pieces", type=int, help="by default ten a machine, from 60 to 1,000")
    parser.add_argument("--variants", type=int, nargs="*", default=range(len(VARIANTS)), help="numbers, from 0")
    parser.add_argument("--time-limit", type=float, help="by default 10 s, and 60 s for more than 64 machines")
    parser.add_argument("--problems", type=Path, help="write each problem into this folder, for `tvm-split solve`")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--picture", type=Path, help="draw the results")
    arguments = parser.parse_args()
    console = Console(width=max(120, Console().width))
    results: list[Planned] = []
    # A process that forks may inherit threads of the solver; and each has its own largest memory.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for number in arguments.variants:
            for machines in arguments.machines:
                pieces = arguments.pieces or min(max(60, 10 * machines), 1000)
                if arguments.problems:
                    arguments.problems.mkdir(parents=True, exist_ok=True)
                    problem = problem_to_dict(made_up(machines, pieces, VARIANTS[number]))
                    (arguments.problems / f"{machines}-machines-{number}.json").write_text(json.dumps(problem))
                limit = arguments.time_limit or (10.0 if machines <= 64 else 60.0)
                results.append(pool.submit(planned, machines, pieces, VARIANTS[number], limit).result())
                each = results[-1]
                console.print(
                    f"{each.variant}, {machines} machines, {pieces} pieces: {each.period_seconds * 1e3:.2f} ms, "
                    f"gap {each.gap:.2%}, {each.seconds:.1f} s"
                )
    print_table(console, results)
    written(arguments.output, {"results": [asdict(each) for each in results]})
    if arguments.picture:
        draw(arguments.picture, results)
    found = list(faults(results))
    for fault in found:
        console.print(f"[red]{fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

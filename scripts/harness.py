"""Measure the sides of a benchmark in turn, in rounds; compute medians, ratios and limits; report as table and JSON.

A disturbance of the machine affects all sides of a round in the same way. So ratios are computed within a round, and
the median over rounds counts. Each round starts with another side.
"""

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.processes import Checkout, Facts, Figures, SideFactory, SideProcess, checkouts

PAUSE_SECONDS = 0.1
"""The pause before each measurement, since threads of some libraries spin for a while after their work."""
BEST = "the best"
"""A value of ``Limit.over``: the side with the smallest median."""

Rounds = Mapping[str, Sequence[Figures]]
"""The figures of each side, one entry per round."""


@dataclass(frozen=True)
class Options:
    """The command-line options. No subject starts after ``time_limit_seconds``. ``values`` are options of one case."""

    rounds: int | None = None
    only: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    time_limit_seconds: float = math.inf
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """One of the ways that a benchmark compares; ``checkout`` labels another checkout, ``facts`` go into the report."""

    name: str
    measure: Callable[..., Figures]
    facts: Facts = field(default_factory=dict)
    checkout: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.name}, {self.checkout}" if self.checkout else self.name


@dataclass(frozen=True)
class Ratio:
    """A ratio between the same figure of two sides. It is left out for subjects that lack one of the sides."""

    key: str
    side: str
    over: str


@dataclass(frozen=True)
class Limit:
    """The largest allowed figure, or ratio if ``over`` is given. Without ``side`` it applies to every side."""

    key: str
    most: float
    side: str = ""
    over: str = ""


class Setup:
    """Makes the sides of a subject, from the checkouts, in processes that end with the subject."""

    def __init__(self, options: Options, all_checkouts: Sequence[Checkout], until_end: ExitStack, end: float) -> None:
        self.options, self.checkouts, self.until_end, self._end = options, all_checkouts, until_end, end

    def begin(
        self,
        make: SideFactory,
        checkout: Checkout | None = None,
        environment: Mapping[str, str] | None = None,
        /,
        **arguments: Any,
    ) -> SideProcess:
        """Start a side's process without waiting for it; see `SideProcess.ready`."""
        process = SideProcess(checkout or self.checkouts[0], make, arguments, environment or {}, self._seconds_left)
        self.until_end.callback(process.close)
        return process

    def side(
        self,
        title: str,
        make: SideFactory,
        checkout: Checkout | None = None,
        /,
        **arguments: Any,
    ) -> Side:
        """Return a side with a process of its own, which is ready."""
        process = self.begin(make, checkout, **arguments)
        return Side(title, process.measure, process.ready(), "" if checkout is None else checkout.label)

    def sides(self, make: SideFactory, /, **arguments: Any) -> list[Side]:
        """Return the sides of one process per checkout: the facts have its ways, which a request names as ``way``."""
        return [
            Side(way, partial(process.measure, way=way), facts, checkout.label)
            for checkout in self.checkouts
            for process in [self.begin(make, checkout, **arguments)]
            for way, facts in process.ready().items()
        ]

    def _seconds_left(self) -> float | None:
        return None if math.isinf(self._end) else self._end - time.monotonic()


MakeSides = Callable[[Setup], Sequence[Side]]


@dataclass(frozen=True)
class Case:
    """A benchmark: subjects by name, each with its own sides, or none where it does not apply.

    ``needs`` is "root", or the modules it imports.
    """

    subjects: Mapping[str, MakeSides]
    ratios: tuple[Ratio, ...] = ()
    limits: tuple[Limit, ...] = ()
    rounds: int = 5
    needs: tuple[str, ...] = ()


@dataclass
class Report:
    """The results of a case: ``subjects`` has measurements, ``failed`` errors, ``not_reached`` those without time."""

    case: str
    subjects: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    not_reached: list[str] = field(default_factory=list)
    over_limit: list[str] = field(default_factory=list)


def interleaved(sides: Sequence[Side], rounds: int) -> dict[str, list[Figures]]:
    """Measure every side once per round, and return the figures of each side."""
    measured: dict[str, list[Figures]] = {side.full_name: [] for side in sides}
    for number in range(rounds):
        first = number % max(len(sides), 1)
        for side in (*sides[first:], *sides[:first]):
            time.sleep(PAUSE_SECONDS)
            measured[side.full_name].append(side.measure())
    return measured


def medians(rounds: Rounds) -> dict[str, dict[str, float]]:
    return {
        side: {key: statistics.median(figures[key] for figures in all_) for key in all_[0]}
        for side, all_ in rounds.items()
    }


def _ratios(rounds: Rounds, key: str, side: str, over: str) -> list[float]:
    """Return the ratio within each round; a ratio to zero counts as NaN."""
    pairs = zip(rounds[side], rounds[over], strict=True)
    return [figures[key] / reference[key] if reference[key] else math.nan for figures, reference in pairs]


def ratio(rounds: Rounds, key: str, side: str, over: str) -> float:
    """Return the median of the ratios within rounds."""
    return statistics.median(_ratios(rounds, key, side, over))


def interval(rounds: Rounds, key: str, side: str, over: str) -> tuple[float, float]:
    """Return the ratios of two rounds between which the median of all possible rounds is, in 95 of 100 cases.

    With fewer than six rounds these are the extremes, and that is less sure.
    """
    ordered = sorted(_ratios(rounds, key, side, over))
    count = len(ordered)
    tails = itertools.accumulate(2 * math.comb(count, below) / 2**count for below in range(count))
    skipped = max(sum(tail <= 0.05 for tail in tails) - 1, 0)
    return ordered[skipped], ordered[-1 - skipped]


def median_seconds(run: Callable[[], object], runs: int) -> float:
    """Return the median seconds of ``runs`` calls, after one call that does not count."""
    run()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def run(
    name: str, case: Case, options: Options, console: Console, keep: Callable[[Report], None] = lambda report: None
) -> Report:
    """Measure the subjects one after the other and ``keep`` the report after each; a failure does not stop the rest."""
    report, begin = Report(name), time.monotonic()
    all_checkouts = checkouts(options.also)
    for subject, make in case.subjects.items():
        if options.only and not any(text in subject for text in options.only):
            continue
        if time.monotonic() - begin >= options.time_limit_seconds:
            report.not_reached.append(subject)
            continue
        console.print(f"{time.monotonic() - begin:5.0f} s  {subject}", markup=False, highlight=False)
        try:
            with ExitStack() as until_end:
                sides = make(Setup(options, all_checkouts, until_end, begin + options.time_limit_seconds))
                rounds = interleaved(sides, options.rounds or case.rounds)
        except Exception as error:
            report.failed[subject] = f"{type(error).__name__}: {error}"
            console.print(f"         failed: {report.failed[subject]}", markup=False, highlight=False)
            continue
        if not sides:
            continue
        report.subjects[subject] = described(case, sides, rounds)
        report.over_limit += [f"{subject}: {text}" for text in over_limit(case.limits, rounds)]
        keep(report)
        print_subject(console, subject, report.subjects[subject])
    return report


def described(case: Case, sides: Sequence[Side], rounds: Rounds) -> dict[str, Any]:
    """Return one subject's part of the report."""
    entries = [entry for entry in case.ratios if entry.side in rounds and entry.over in rounds]
    entries += [
        Ratio(key, side.name, side.full_name) for side in sides if side.checkout for key in rounds[side.full_name][0]
    ]
    compared = {
        f"{entry.key}: {entry.side} / {entry.over}": (rounds, entry.key, entry.side, entry.over)
        for entry in entries
        if entry.key in rounds[entry.side][0] and entry.key in rounds[entry.over][0]
    }
    return {
        "medians": medians(rounds),
        "ratios": {text: ratio(*what) for text, what in compared.items()},
        "intervals": {text: interval(*what) for text, what in compared.items()},
        "facts": {side.full_name: dict(side.facts) for side in sides if side.facts},
        "rounds": rounds,
        "load_average": os.getloadavg(),
    }


def over_limit(limits: Sequence[Limit], rounds: Rounds) -> Iterator[str]:
    middle = medians(rounds)
    for limit in limits:
        having = [side for side in rounds if limit.key in middle[side]]
        for side in having if not limit.side else [side for side in having if side == limit.side]:
            base = min(having, key=lambda name: middle[name][limit.key]) if limit.over == BEST else limit.over
            if base and base not in having:
                continue
            value = ratio(rounds, limit.key, side, base) if base else middle[side][limit.key]
            if not value <= limit.most:
                yield f"{limit.key} of {side}{f' / {base}' if base else ''} is {value:.4g}, over {limit.most:g}"


def print_subject(console: Console, subject: str, content: Mapping[str, Any]) -> None:
    keys = dict.fromkeys(key for figures in content["medians"].values() for key in figures)
    table = Table("", *keys, title=subject)
    for side, figures in content["medians"].items():
        table.add_row(side, *(f"{figures[key]:.4g}" if key in figures else "" for key in keys))
    console.print(table)
    for side, facts in content["facts"].items():
        for key, value in facts.items():
            console.print(f"{side}: {key}: {value}", markup=False, highlight=False)
    for text, value in content["ratios"].items():
        least, most = content["intervals"][text]
        console.print(f"{text}: {value:.3f} ({least:.3f} to {most:.3f})", markup=False, highlight=False)

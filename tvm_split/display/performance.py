"""The table of what a plan predicts, and of what was simulated or measured of it, in all commands."""

from collections.abc import Collection, Mapping

from rich.text import Text

from tvm_split.display.view import Row, Table
from tvm_split.units import number_text

NOTHING = "–"
PERIOD, LATENCY, RATE = "period, ms", "latency, ms", "micro-batches/s"


def performance(
    title: str, columns: Mapping[str, tuple[float | None, float | None]], red: Collection[str] = ()
) -> Table:
    """Return a table of period, latency and throughput, with the ratio of the second column to the first.

    ``columns`` maps headings to (period, latency) in seconds; None or 0 means unknown. Ratios of ``red`` rows are
    highlighted.
    """
    periods, latencies = zip(*columns.values(), strict=True)
    rates = [1 / period if period else None for period in periods]
    rows = [_row(PERIOD, periods, 1e3, red), _row(LATENCY, latencies, 1e3, red), _row(RATE, rates, 1.0, red)]
    return Table(title, ("",), (*columns, *["ratio"] * (len(columns) > 1)), rows)


def _row(name: str, values: Collection[float | None], scale: float, red: Collection[str]) -> Row:
    first, *others = values
    ratios = [
        Text(f"{last / first:.2f}" if first and last else NOTHING, "red" if name in red else "") for last in others
    ]
    return name, *(number_text(value * scale) if value else NOTHING for value in values), *ratios[-1:]

"""Text for people: quantities, lists, and the base classes of values that are shown by `tvm_split.display.view`."""

import dataclasses
import difflib
import io
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import islice
from typing import Any

from rpc_runtime.option import default_of

MOST_AMOUNT = 1e18
"""Largest valid number of seconds, bytes or bytes per second; sums and products of such numbers stay finite."""
LEAST_AMOUNT = 1e-30
"""Smallest valid divisor, such as seconds, other than 0."""
SLOWEST = 1e-9
"""Smallest valid bandwidth of a link that is not closed, in bytes per second."""
MOST_LINES = 12
BYTES_PER_UNIT = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SECONDS_PER_UNIT = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SECONDS_PER_AGE = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def number_text(number: float, digits: int = 4) -> str:
    """Format a number in plain notation, rounded to so many significant digits."""
    return format(Decimal(f"{number:.{digits}g}"), "f")


def count_text(count: int, noun: str) -> str:
    """Format a count with its noun, in the singular for 1, such as ``2 stages``."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


def bytes_text(count: float) -> str:
    """Format a number of bytes with a fitting unit, such as ``1.5 MB``."""
    number, unit = _in_unit(count, BYTES_PER_UNIT, "B")
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def precise_bytes_text(count: float) -> str:
    """Format a number of bytes with four digits, so that two different numbers look different."""
    number, unit = _in_unit(count, BYTES_PER_UNIT, "B")
    return f"{number_text(number)} {unit}"


def seconds_text(seconds: float) -> str:
    """Format a duration in seconds with a fitting unit, such as ``1.5 ms``, and at least three digits of precision."""
    number, unit = _in_unit(seconds, SECONDS_PER_UNIT, "s")
    return f"{number_text(number, 3)} {unit}"


def gap_text(gap: float) -> str:
    """Format an optimality gap as a percentage; only a gap of exactly 0, a proved optimum, is shown as 0."""
    return f"{max(gap, 1e-4) if gap > 0 else 0.0:.2%}"


def age_text(seconds: float) -> str:
    """Format an age in whole days, hours or minutes, whichever is the largest unit that fits."""
    number, unit = _in_unit(seconds, SECONDS_PER_AGE, "")
    if not unit:
        return "less than a minute"
    return count_text(int(number), unit)


def short_list(names: Sequence[str], most: int = 6) -> str:
    """Join names with commas; the middle of a long list is replaced by the number of omitted names."""
    if len(names) <= most:
        return ", ".join(names)
    head, tail = names[: most // 2], names[-(most // 2) :]
    return f"{', '.join(head)}, … {len(names) - len(head) - len(tail)} more …, {', '.join(tail)}"


NAME_LETTERS = 20
"""The most characters of a machine's name that tables show; a worker may report a name of any length."""


def clipped(text: str, most: int) -> str:
    """Return ``text``; if it is longer than ``most`` characters, shorten it and end it with "…"."""
    return text if len(text) <= most else text[: most - 1] + "…"


def meant_name(name: object, known: Sequence[str]) -> str:
    """Return the known name that is closest to a misspelled one; empty if none is close, or two are equally close."""
    near = difflib.get_close_matches(str(name), known, n=2)
    ratios = [difflib.SequenceMatcher(None, candidate, str(name)).ratio() for candidate in near]
    return near[0] if near and ratios[0] > max(ratios[1:], default=0.0) else ""


def known_names(known: Sequence[str], name: str) -> str:
    """Return the end of an error message on an unknown name: the known ones, and which of them is meant."""
    meant = meant_name(name, known)
    return short_list(known) + (f" (did you mean {meant!r}?)" if meant else "")


def names_of(names: Sequence[str]) -> str:
    """Join names as ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def few_lines(lines: Iterable[str], count: int) -> str:
    """Join the first `MOST_LINES` of ``count`` lines, and say how many are omitted."""
    shown = "\n".join(islice(lines, MOST_LINES))
    return shown if count <= MOST_LINES else f"{shown}\n… and {count - MOST_LINES} more like these"


def _in_unit(value: float, units: Sequence[tuple[float, str]], smallest: str) -> tuple[float, str]:
    """Return the value in the first unit that is not larger than it, else the value in the ``smallest`` unit."""
    for size, unit in units:
        if value >= size:
            return value / size, unit
    return value, smallest


COLUMNS = 80


class Shown:
    """A value with a view: its title as repr, text of 80 columns for print(), HTML for a notebook."""

    def __repr__(self) -> str:
        from tvm_split.display.view import title_of  # imported here to avoid a cycle: views import the values

        return f"<{type(self).__name__} {title_of(self)}>"

    def __str__(self) -> str:
        return str(self._console().export_text().rstrip())

    def _repr_html_(self) -> str:
        return str(self._console().export_html(inline_styles=True, code_format="<pre>{code}</pre>"))

    def _console(self) -> Any:
        from rich.console import Console

        from tvm_split.display.view import show

        console = Console(file=io.StringIO(), width=COLUMNS, record=True)
        show(self, console)
        return console


class ShownFields(Shown):
    """A dataclass that shows the fields that differ from their defaults."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that differ from their defaults, without those that are not part of the repr."""
        shown = (field for field in dataclasses.fields(self) if field.repr)  # type: ignore[arg-type]
        pairs = ((field.name, getattr(self, field.name), default_of(field)) for field in shown)
        return {name: value for name, value, default in pairs if value != default}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

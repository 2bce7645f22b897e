"""Show values as tables and sentences, the same on a terminal, in print() and in a notebook.

``view(value)`` returns the tables and sentences of a value, ``show`` prints them, and ``as_json`` returns the value
that ``--json`` writes. `MODULES` lists the modules that register the views of each package's values.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from tvm_split.display.console import STDOUT, print_json

MODULES = {
    "tvm_split.cluster": "cluster",
    "tvm_split.placement": "plan",
    "tvm_split.compiler": "bundle",
    "tvm_split.deployment": "report",
    "tvm_split.profiling": "profile",
    "tvm_split.model": "bundle",
    "tvm_split.observing": "trace",
    "tvm_split.simulation": "simulate",
    "tvm_split.tuning": "tuning",
    "tvm_split.units": "cluster",
    "tvm_split.worker_kit": "worker_kit",
}
"""The package of a value's class, with the module of this package that registers its view."""
Row = Sequence[str | Text]


@dataclass(frozen=True)
class Table:
    """A table that fits 80 columns if its numbers do: texts are folded, numbers are not, and markup is ignored.

    An empty row ends a section. ``min_widths`` are those of text columns; ``left`` names left-aligned number columns.
    """

    title: str
    texts: Sequence[str]
    numbers: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""
    min_widths: Mapping[str, int] = field(default_factory=dict)
    left: Sequence[str] = ()


View = Iterable[Table | str | Text]


@singledispatch
def view(value: Any, *, details: bool = False) -> View:
    """Return the tables and sentences that show a value; ``details`` requests all of them.

    Raises:
        TypeError: no view is registered for the value's class.
    """
    _load_views(type(value))
    if view.dispatch(type(value)) is view.dispatch(object):
        raise TypeError(f"nothing shows a {type(value).__qualname__}; register a view for it with `view.register`")
    return view(value, details=details)


@singledispatch
def as_json(value: Any) -> Any:
    """Return a value as ``--json`` writes it: its fields, by pydantic, unless its class has a registered form."""
    _load_views(type(value))
    if as_json.dispatch(type(value)) is as_json.dispatch(object):
        return TypeAdapter(type(value)).dump_python(value, mode="json")
    return as_json(value)


def title_of(value: Any) -> str:
    """Return the title of a value's first table, or its first sentence."""
    first = next(iter(view(value)))
    return first.title if isinstance(first, Table) else str(first)


def show(value: Any, console: Console = STDOUT, *, details: bool = False) -> None:
    print_parts(view(value, details=details), console)


def print_parts(parts: View, console: Console = STDOUT) -> None:
    for part in parts:
        # A sentence in a file or pipe is one line, to be searched for.
        is_line = console is STDOUT and not console.is_terminal and not isinstance(part, Table)
        console.print(_rendered(part), soft_wrap=is_line)


def write(value: Any, *, json: bool, details: bool = False) -> None:
    """Write a command's result to standard output, as JSON or as tables and sentences."""
    if json:
        print_json(as_json(value))
    else:
        show(value, details=details)


def _rendered(part: Table | str | Text) -> RichTable | Text:
    if isinstance(part, str):
        return Text(part)
    if isinstance(part, Text):
        return part
    table = RichTable(
        title=Text(part.title),
        title_style="bold",
        caption=part.caption or None,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in part.texts:
        table.add_column(heading, overflow="fold", min_width=part.min_widths.get(heading))
    for heading in part.numbers:
        table.add_column(heading, justify="left" if heading in part.left else "right", no_wrap=True)
    for row in part.rows:
        if row:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        else:
            table.add_section()
    return table


def _load_views(kind: type) -> None:
    """Import the module that registers the view of a class, if there is one."""
    for base in kind.__mro__:
        for package, module in MODULES.items():
            if f"{base.__module__}.".startswith(f"{package}."):
                import_module(f"tvm_split.display.{module}")

"""Base class of values that print() and notebooks show like the command line, by `tvm_split.display.view`."""

from __future__ import annotations

import io

from rich.console import Console

COLUMNS = 80


class Shown:
    """A value with a view: text of 80 columns for print(), HTML for a notebook."""

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=COLUMNS, record=True)
        self._show(console)
        return console.export_text().rstrip()

    def _repr_html_(self) -> str:
        console = Console(file=io.StringIO(), width=COLUMNS, record=True)
        self._show(console)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def _show(self, console: Console) -> None:
        from tvm_split.display.view import show  # imported here to avoid a cycle: views import the values

        show(self, console)

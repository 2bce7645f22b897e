"""Base classes of values that print() and notebooks show like the command line, by `tvm_split.display.view`."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

from rpc_runtime.option import default_of

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
    """A dataclass that shows the fields that are given."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that differ from their defaults, without those that are not part of the repr."""
        shown = (field for field in dataclasses.fields(self) if field.repr)  # type: ignore[arg-type]
        pairs = ((field.name, getattr(self, field.name), default_of(field)) for field in shown)
        return {name: value for name, value, default in pairs if value != default}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

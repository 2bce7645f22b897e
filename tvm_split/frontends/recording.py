"""A block builder that notes which layer each variable was emitted for."""

from __future__ import annotations

from typing import Any

from tvm import relax

from tvm_split.errors import ModelImportError


class RecordingBuilder(relax.BlockBuilder):  # type: ignore[misc]
    """Set ``layer`` before emitting; ``layers`` then maps the emitted variables' names to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, str] = {}
        self.layer = ""

    def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Var:
        """Bind ``expr``; a variable is returned as it is, not bound to a second name."""
        if isinstance(expr, relax.Var):
            return expr
        variable = super().emit(expr, name_hint)
        self.layers[variable.name] = self.layer
        return variable

    def emit_te(self, *arguments: Any, **keywords: Any) -> relax.Var:
        """Refused: it would make a kernel of an operator, which can be neither planned nor split."""
        raise ModelImportError("TVM imports it as a kernel of its own; a split network is made of Relax operators")

    def call_te(self, *arguments: Any, **keywords: Any) -> relax.Call:
        """Refused like ``emit_te``."""
        raise ModelImportError("TVM imports it as a kernel of its own; a split network is made of Relax operators")

"""A block builder that notes which layer each variable was emitted for."""

from __future__ import annotations

from tvm import relax


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

"""Static shapes of Relax expressions."""

from __future__ import annotations

from tvm import relax, tirx


def static_shape(expression: relax.Expr) -> tuple[int, ...] | None:
    """The shape where every extent is a known integer; None for symbolic extents and for what is no tensor."""
    values = getattr(getattr(expression.ty, "shape", None), "values", None)
    if values is None or not all(isinstance(value, tirx.IntImm) for value in values):
        return None
    return tuple(int(value) for value in values)

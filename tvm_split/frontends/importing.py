"""What both of TVM's importers need around them: remembered layers, refusals and errors with names, checked results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import relax

from relay_passes.fold_constants import folded
from tvm_split.errors import ModelImportError, last_line
from tvm_split.frontends.operators import constant
from tvm_split.units import short_list

RANDOM = "its result is random; a split network gives the same answer to the same input"
DYNAMIC = "the shape of its result depends on the values of its input"
BRANCH = "it chooses what to compute while it runs"
LOOP = "it loops while it runs"


@dataclass(frozen=True)
class Imported:
    """``function`` computes a graph's outputs from its inputs; weights are constants in it.

    By the names of its variables: the ``layers`` of those that were emitted, and ``held``, what of the source each
    holds (an fx node, the name of an ONNX tensor), in the order of execution and the first of several.
    """

    function: relax.Function
    layers: dict[str, str]
    held: dict[str, Any]


class RecordingBuilder(relax.BlockBuilder):  # type: ignore[misc]
    """Set ``layer`` before emitting; ``layers`` then maps the emitted variables' names to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, str] = {}
        self.layer = ""

    def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Expr:
        """Bind ``expr``; a variable is returned as it is, and what can be computed of constants is a constant."""
        if isinstance(expr, relax.Var):
            return expr
        expr = self.normalize(expr)
        value = folded(expr)
        if value is not None:
            return constant(value, str(value.dtype))
        variable = super().emit(expr, name_hint)
        self.layers[variable.name] = self.layer
        return variable

    def emit_te(self, *arguments: Any, **keywords: Any) -> relax.Var:
        """Refused: it would make a kernel of an operator, which can be neither planned nor split."""
        raise ModelImportError("TVM imports it as a kernel of its own; a split network is made of Relax operators")

    call_te = emit_te

    def imported(self, values: Mapping[Any, Any]) -> Imported:
        """What was built; ``values`` are the expressions of the source's values."""
        held: dict[str, Any] = {}
        for source, value in values.items():
            if isinstance(value, relax.Var) and isinstance(value.ty, relax.TensorType):
                held.setdefault(value.name, source)
        return Imported(self.get()["main"], self.layers, held)


def refuse(problems: Iterable[tuple[str, str]]) -> None:
    """Raise ModelImportError if there are operators that cannot be imported, each given with a layer that it is in."""
    layers: dict[str, list[str]] = {}
    for operator, layer in problems:
        layers.setdefault(operator, []).append(layer)
    if layers:
        found = "; ".join(f"{operator} in {short_list(list(dict.fromkeys(at)))}" for operator, at in layers.items())
        raise ModelImportError(
            f"the model has operators that cannot be imported: {found}. Write these layers with other operators, or "
            "give the part of the model before or after them and compute them yourself"
        )


@contextmanager
def named(operator: str) -> Iterator[None]:
    """Turns whatever is raised into one line that says which ``operator`` (of which layer) cannot be imported."""
    try:
        yield
    except Exception as error:
        reason = error if isinstance(error, ModelImportError) else last_line(error)
        raise ModelImportError(f"{operator} cannot be imported: {reason}") from error


def check_type(found: relax.Type, dtype: str, shape: Sequence[int] | None, operator: str, framework: str) -> None:
    """Raise if an importer's type is not the ``dtype`` ("": unknown) and ``shape`` (None) of the same result there."""
    try:
        sizes = [int(size) for size in found.shape]
    except (TypeError, AttributeError) as error:
        raise ModelImportError(
            f"{operator} gives a shape that depends on the values of its inputs; "
            "a split network needs shapes that are known beforehand"
        ) from error
    wanted = sizes if shape is None else list(shape)
    if str(found.dtype) != (dtype or str(found.dtype)) or sizes != wanted:
        raise ModelImportError(
            f"{operator} gives {dtype}{wanted} in {framework}, imported it gives {found.dtype}{sizes}"
        )

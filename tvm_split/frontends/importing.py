"""Helpers shared by the importers: a builder that records layers, errors that name operators, and type checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import relax

from relay_passes.fold_constants import folded
from relay_passes.ir import constant
from tvm_split.errors import ModelImportError, last_line
from tvm_split.units import short_list

RANDOM = "its result is random; a split network gives the same answer to the same input"
DYNAMIC = "the shape of its result depends on the values of its input"
BRANCH = "it chooses what to compute while it runs"
LOOP = "it loops while it runs"


@dataclass(frozen=True)
class Imported:
    """An imported graph: ``function`` computes its outputs from its inputs, with weights as constants.

    ``layers`` maps the names of emitted variables to layers. ``held`` maps variable names to the value of the source
    (an fx node, the name of an ONNX tensor) that each holds, in execution order; the first of several values.
    """

    function: relax.Function
    layers: dict[str, str]
    held: dict[str, Any]


class RecordingBuilder(relax.BlockBuilder):  # type: ignore[misc]
    """A block builder that records in ``layers`` the current ``layer`` of each emitted variable, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, str] = {}
        self.layer = ""
        self._folded: dict[tuple[object, ...], tuple[relax.Expr, relax.Expr]] = {}
        """Folded expressions and their constants: a weight that two layers share is stored once."""

    def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Expr:
        """Bind ``expr`` to a variable; return a variable unchanged, and an expression of constants as a constant."""
        if isinstance(expr, relax.Var):
            return expr
        expr = self.normalize(expr)
        value = self._constant(expr)
        if value is not None:
            return value
        variable = super().emit(expr, name_hint)
        self.layers[variable.name] = self.layer
        return variable

    def _constant(self, expr: relax.Expr) -> relax.Expr | None:
        if not isinstance(expr, relax.Call):
            return None
        # TVM objects compare by identity; the expression is kept, so that no other object gets its operands' addresses.
        key = (expr.op, str(expr.attrs), str(expr.ty), *expr.args)
        if key not in self._folded:
            value = folded(expr)
            if value is None:
                return None
            self._folded[key] = expr, constant(value)
        return self._folded[key][1]

    def emit_te(self, *arguments: Any, **keywords: Any) -> relax.Var:
        """Raise ModelImportError: an operator emitted as a kernel can be neither planned nor split."""
        raise ModelImportError("TVM imports it as a kernel of its own; a split network is made of Relax operators")

    call_te = emit_te

    def imported(self, values: Mapping[Any, Any]) -> Imported:
        """Return the built function; ``values`` maps the source's values to their expressions."""
        held: dict[str, Any] = {}
        for source, value in values.items():
            if isinstance(value, relax.Var) and isinstance(value.ty, relax.TensorType):
                held.setdefault(value.name, source)
        return Imported(self.get()["main"], self.layers, held)


def refuse(problems: Iterable[tuple[str, str]]) -> None:
    """Raise ModelImportError if there are ``problems``: pairs of an operator that cannot be imported and its layer."""
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
    """Turn any error inside the block into a ModelImportError of one line that names ``operator`` and its layer."""
    try:
        yield
    except Exception as error:
        reason = error if isinstance(error, ModelImportError) else last_line(error)
        raise ModelImportError(f"{operator} cannot be imported: {reason}") from error


def check_type(found: relax.Type, dtype: str, shape: Sequence[int] | None, operator: str, framework: str) -> None:
    """Raise if an imported type differs from the source's ``dtype`` ("": unknown) or ``shape`` (None: unknown)."""
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

"""Files of lines like ``scale multiply 3`` or ``shift add 1``: layers of four numbers, one after the other."""

from __future__ import annotations

from pathlib import Path

from tvm import relax

from tvm_split.errors import ModelImportError
from tvm_split.frontends import Frontend, ImportRequest
from tvm_split.frontends.importing import RecordingBuilder
from tvm_split.frontends.normal_form import normal_form
from tvm_split.frontends.operators import Operators
from tvm_split.model import Model

FRONTEND = Frontend(
    "toy", "files of the toy language", f"{__name__}:load_toy", suffixes=(".toy",), install="toy-plugin"
)


def load_toy(source: Path, request: ImportRequest) -> Model:
    """A Model of a ``.toy`` file. Raises ModelImportError for a line that is no layer."""
    builder = RecordingBuilder()
    op = Operators(builder)
    value = x = relax.Var("x", relax.TensorType([request.batch or 1, 4], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            for line in Path(source).read_text().splitlines():
                layer, operator, number = line.split()
                if operator not in ("add", "multiply"):
                    raise ModelImportError(f"layer {layer!r} is of the unknown operator {operator!r}")
                builder.layer = layer
                value = getattr(op, operator)(value, float(number))
            result = builder.emit_output(relax.Tuple([value]))
        builder.emit_func_output(result)
    form = normal_form(builder.get()["main"], builder.layers, ["x"])
    return Model(request.name or "toy", "toy", form.module, form.inputs, form.outputs(), form.layers)

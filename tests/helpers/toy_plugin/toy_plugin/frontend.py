"""Files of lines like ``scale multiply 3`` or ``shift add 1``: layers of four numbers, one after the other."""

from pathlib import Path

from rpc_runtime.program.specs import TensorSpec
from tvm_split.errors import ModelImportError
from tvm_split.frontends import Frontend, ImportRequest
from tvm_split.frontends.building import ModelBuilder
from tvm_split.frontends.operators import Operators
from tvm_split.model import Model

FRONTEND = Frontend(
    "toy", "files of the toy language", f"{__name__}:load_toy", suffixes=(".toy",), install="toy-plugin"
)


def load_toy(source: Path, request: ImportRequest) -> Model:
    """A Model of a ``.toy`` file. Raises ModelImportError for a line that is no layer."""
    builder = ModelBuilder()
    op = Operators(builder)
    with builder.main([TensorSpec("x", (request.batch or 1, 4), "float32")]) as (value,):
        for line in Path(source).read_text().splitlines():
            layer, operator, number = line.split()
            if operator not in ("add", "multiply"):
                raise ModelImportError(f"layer {layer!r} is of the unknown operator {operator!r}")
            builder.layer = layer
            value = getattr(op, operator)(value, float(number))
        builder.outputs = [value]
    return builder.built({}).model(request.name or "toy", "toy")

"""The argument of ONNX's conversions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvm_split.frontends.convert import Call


class OnnxCall(Call):
    """A call with attributes as ONNX names them; operands beyond the last are None."""

    @property
    def opset(self) -> int:
        """The version of the model's operators."""
        return int(self.importer.opset)

    def by_tvm(self, operands: Sequence[Any] | None = None, attributes: Mapping[str, Any] | None = None) -> relax.Expr:
        """Return what TVM's importer makes of this call, or of it with other operands or attributes."""
        inputs = onnx_frontend.onnx_input()
        inputs.extend(self.operands if operands is None else operands)
        convert = onnx_frontend._get_convert_map()[self.source.op_type]
        custom = {"name": self.operation.layer, "num_outputs": len(self.operation.outputs)}
        attributes = {**(self.attributes if attributes is None else attributes), "tvm_custom": custom}
        return convert.get_converter(self.opset)(self.importer.builder, inputs, attributes, [{}, {}])

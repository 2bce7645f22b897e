"""TFLite files written operator by operator, with LiteRT's schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

TYPES = {
    "float32": schema.TensorType.FLOAT32,
    "float16": schema.TensorType.FLOAT16,
    "int8": schema.TensorType.INT8,
    "uint8": schema.TensorType.UINT8,
    "int16": schema.TensorType.INT16,
    "int32": schema.TensorType.INT32,
    "int64": schema.TensorType.INT64,
    "bool": schema.TensorType.BOOL,
}


VERSIONS = {"BROADCAST_TO": 2}
"""Versions of the operators that have no version 1."""


@dataclass
class Writer:
    """Collects tensors and operators; tensors are named by number."""

    tensors: list[Any] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=lambda: [schema.BufferT()])
    operators: list[Any] = field(default_factory=list)
    codes: list[Any] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)

    def tensor(self, shape: Sequence[int], dtype: str = "float32", name: str = "", **quantisation: Any) -> int:
        tensor = schema.TensorT(shape=list(shape), type=TYPES[dtype], name=name or f"tensor_{len(self.tensors)}")
        if quantisation:
            scales = np.atleast_1d(np.asarray(quantisation["scale"], "float32"))
            points = np.broadcast_to(np.asarray(quantisation.get("zero_point", 0), "int64"), scales.shape)
            tensor.quantization = schema.QuantizationParametersT(
                scale=scales, zeroPoint=np.ascontiguousarray(points), quantizedDimension=quantisation.get("axis", 0)
            )
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def input(self, shape: Sequence[int], dtype: str = "float32", name: str = "", **quantisation: Any) -> int:
        """An input whose negative sizes are open."""
        number = self.tensor([abs(size) for size in shape], dtype, name, **quantisation)
        if min(shape, default=0) < 0:
            self.tensors[number].shapeSignature = [max(size, -1) for size in shape]
        self.inputs.append(number)
        return number

    def constant(self, array: Any, name: str = "", **quantisation: Any) -> int:
        array = np.array(array, order="C")
        number = self.tensor(array.shape, str(array.dtype), name, **quantisation)
        self.tensors[number].buffer = len(self.buffers)
        self.buffers.append(schema.BufferT(data=array.reshape(-1).view("uint8")))
        return number

    def add(
        self,
        kind: str,
        inputs: Sequence[int],
        table: str = "",
        options: Mapping[str, Any] | None = None,
        *,
        dtype: str = "float32",
        name: str = "",
        **quantisation: Any,
    ) -> int:
        """An operator with one result, whose number is returned; LiteRT knows its shape. ``table`` has the options."""
        return self.add_several(kind, inputs, [self.tensor((), dtype, name, **quantisation)], table, options)[0]

    def add_several(
        self,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        table: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> Sequence[int]:
        number = getattr(schema.BuiltinOperator, kind)
        self.codes.append(
            schema.OperatorCodeT(
                deprecatedBuiltinCode=min(number, 127), builtinCode=number, version=VERSIONS.get(kind, 1)
            )
        )
        operator = schema.OperatorT(opcodeIndex=len(self.codes) - 1, inputs=list(inputs), outputs=list(outputs))
        if table:
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, f"{table}Options")
            operator.builtinOptions = getattr(schema, f"{table}OptionsT")(**(options or {}))
        self.operators.append(operator)
        return outputs

    def file(self, *outputs: int) -> bytes:
        """The bytes of the file with these outputs."""
        graph = schema.SubGraphT(
            tensors=self.tensors, inputs=self.inputs, outputs=list(outputs), operators=self.operators, name="main"
        )
        model = schema.ModelT(
            version=3, operatorCodes=self.codes, subgraphs=[graph], buffers=self.buffers, description="made for a test"
        )
        builder = flatbuffers.Builder(1 << 12)
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

"""Compute reference values for an ONNX model with onnxruntime, or ONNX's own evaluator."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from rpc_runtime.program.specs import Array
from tvm_split.frontends.onnx.nodes import array_of

_TENSORS_AT_A_TIME = 64
"""The most intermediate values in one run, so that those of a large network need not fit in memory."""
_IN_INTEGERS = ("QLinear", "QGemm", "ConvInteger", "MatMulInteger")
"""Beginnings of the names of operators that onnxruntime computes in integers."""


@dataclass(frozen=True)
class OnnxReference:
    """Run the original ``model`` (sizes bound); ``variables`` maps tensor names to variables, in execution order.

    ``weights`` are those that `take_weights` moved out of the model.
    """

    model: onnx.ModelProto
    input_names: Sequence[str]
    variables: Mapping[str, str]
    weights: Mapping[str, Array] = field(default_factory=dict)

    def outputs(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The model's outputs in the model's order; only onnxruntime computes them for inputs of other sizes."""
        feed = dict(zip(self.input_names, inputs, strict=True))
        if all(axis.dim_value == size for axis, size in _sizes(self.model, feed)):
            return tuple(self._run(self.model, inputs))
        resized = onnx.ModelProto()
        resized.CopyFrom(self.model)
        for axis, size in _sizes(resized, feed):
            axis.dim_value = size
        return tuple(map(np.asarray, _run_by_onnxruntime(resized, self.weights, feed)))

    def values(self, inputs: Sequence[Array]) -> Iterator[tuple[str, Array]]:
        """Yield the variable name and the value of every tensor that a node computes, in execution order."""
        computed = {name for node in self.model.graph.node for name in node.output}
        tensors = [name for name in self.variables if name in computed]
        for start in range(0, len(tensors), _TENSORS_AT_A_TIME):
            names = tensors[start : start + _TENSORS_AT_A_TIME]
            for name, value in zip(names, self._run(_with_outputs(self.model, names), inputs), strict=True):
                yield self.variables[name], value

    def precise(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The outputs with float64 instead of float32, by ONNX's evaluator. Raises if an operator does not take it."""
        model, feed = _with_weights(self.model, self.weights), dict(zip(self.input_names, inputs, strict=True))
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                tensor.CopyFrom(numpy_helper.from_array(_doubled(array_of(tensor)), tensor.name))
        for node in model.graph.node:
            for attribute in node.attribute:
                if node.op_type == "Cast" and attribute.i == onnx.TensorProto.FLOAT:
                    attribute.i = onnx.TensorProto.DOUBLE
                elif attribute.HasField("t") and attribute.t.data_type == onnx.TensorProto.FLOAT:
                    attribute.t.CopyFrom(numpy_helper.from_array(_doubled(array_of(attribute.t))))
        feed = {name: _doubled(array) for name, array in feed.items()}
        return tuple(map(np.asarray, ReferenceEvaluator(model).run(None, feed)))

    def _run(self, model: onnx.ModelProto, inputs: Sequence[Array]) -> list[Array]:
        names = [value.name for value in model.graph.output]
        feed = dict(zip(self.input_names, inputs, strict=True))
        try:
            values = _run_by_onnxruntime(model, self.weights, feed)
        except Exception:  # it is not installed, or lacks an operator or dtype, which it may notice only at run time
            values = ReferenceEvaluator(_with_weights(model, self.weights)).run(names, feed)
        return [np.asarray(value) for value in values]


def _sizes(model: onnx.ModelProto, feed: Mapping[str, Array]) -> Iterator[tuple[Any, int]]:
    """Yield the axes of the inputs, as far as the model says their shapes, with the sizes that they are fed with."""
    for value in model.graph.input:
        yield from zip(value.type.tensor_type.shape.dim, np.shape(feed.get(value.name, ())), strict=False)


def _doubled(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == np.float32 else array


def _with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return copy


def _with_weights(model: onnx.ModelProto, weights: Mapping[str, Array]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return copy


def _run_by_onnxruntime(model: onnx.ModelProto, weights: Mapping[str, Array], feed: Mapping[str, Array]) -> list[Any]:
    import onnxruntime

    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    held = {  # without copies, so that they have to live as long as the session
        name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kinds[name])
        for name, array in weights.items()
    }

    def run(level: Any) -> list[Any]:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = level
        options.add_session_config_entry("session.x64quantprecision", "1")
        options.add_external_initializers(list(held), list(held.values()))
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run([value.name for value in model.graph.output], feed))

    levels = onnxruntime.GraphOptimizationLevel
    if any(node.op_type.startswith(_IN_INTEGERS) for node in model.graph.node):
        # Without VNNI, sums of products of uint8 and int8 saturate, unless an optimisation makes both uint8. That fails
        # on models where both are int8; their sums do not saturate, so they run without it.
        with suppress(Exception):
            return run(levels.ORT_ENABLE_EXTENDED)
    return run(levels.ORT_DISABLE_ALL)

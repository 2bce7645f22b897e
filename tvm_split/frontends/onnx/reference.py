"""Compute reference values for an ONNX model with onnxruntime if possible, else with ONNX's own evaluator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

Array = np.ndarray[Any, Any]

_TENSORS_AT_A_TIME = 64
"""The most intermediate values in one run, so that those of a large network need not fit in memory."""


@dataclass(frozen=True)
class OnnxReference:
    """Run the original ``model`` (sizes bound); ``variables`` maps tensor names to variables, in execution order."""

    model: onnx.ModelProto
    input_names: Sequence[str]
    variables: Mapping[str, str]

    def outputs(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The model's outputs in the model's order."""
        return tuple(self._run(self.model, inputs))

    def values(self, inputs: Sequence[Array]) -> Iterator[tuple[str, Array]]:
        """Yield the variable name and the value of every tensor that a node computes, in execution order."""
        computed = {name for node in self.model.graph.node for name in node.output}
        tensors = [name for name in self.variables if name in computed]
        for start in range(0, len(tensors), _TENSORS_AT_A_TIME):
            names = tensors[start : start + _TENSORS_AT_A_TIME]
            for name, value in zip(names, self._run(_with_outputs(self.model, names), inputs), strict=True):
                yield self.variables[name], value

    def _run(self, model: onnx.ModelProto, inputs: Sequence[Array]) -> list[Array]:
        names = [value.name for value in model.graph.output]
        feed = dict(zip(self.input_names, inputs, strict=True))
        try:
            values = _onnxruntime_session(model).run(names, feed)
        except Exception:  # it is not installed, or lacks an operator or dtype, which it may notice only at run time
            values = ReferenceEvaluator(model).run(names, feed)
        return [np.asarray(value) for value in values]


def _with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return copy


def _onnxruntime_session(model: onnx.ModelProto) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

"""Compute reference values for an ONNX model with onnxruntime if possible, else with ONNX's own evaluator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from tvm_split.errors import ModelImportError, VerificationError, last_line

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
        return tuple(self._run([value.name for value in self.model.graph.output], inputs))

    def values(self, inputs: Sequence[Array]) -> Iterator[tuple[str, Array]]:
        """Yield the variable name and the value of every tensor that a node computes, in execution order."""
        computed = {name for node in self.model.graph.node for name in node.output}
        tensors = [name for name in self.variables if name in computed]
        for start in range(0, len(tensors), _TENSORS_AT_A_TIME):
            names = tensors[start : start + _TENSORS_AT_A_TIME]
            for name, value in zip(names, self._run(names, inputs), strict=True):
                yield self.variables[name], value

    def _run(self, names: Sequence[str], inputs: Sequence[Array]) -> list[Array]:
        if len(inputs) != len(self.input_names):
            raise ModelImportError(f"the model takes {len(self.input_names)} inputs, given are {len(inputs)}")
        feed = dict(zip(self.input_names, inputs, strict=True))
        has_them = names == [value.name for value in self.model.graph.output]
        model = self.model if has_them else _with_outputs(self.model, names)
        session = _onnxruntime_session(model)
        if session is not None and all(
            value.dtype.kind != "V" and value.dtype.isbuiltin != 2 for value in feed.values()
        ):
            try:
                return [np.asarray(value) for value in session.run(list(names), feed)]
            except Exception as error:  # onnxruntime refuses some forms of operators only at run time
                reason = last_line(error)
        else:
            reason = "onnxruntime does not take it"
        try:
            return [np.asarray(value) for value in ReferenceEvaluator(model).run(list(names), feed)]
        except Exception as error:
            raise VerificationError(
                "neither onnxruntime nor ONNX's own evaluator can run this model, so there is nothing to compare with "
                f"({reason}; {type(error).__name__}: {last_line(error)}); verify=False, or "
                "--no-verify, compiles it unchecked"
            ) from error


def _with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return copy


def _onnxruntime_session(model: onnx.ModelProto) -> Any | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return None  # onnxruntime lacks some operators and dtypes that ONNX's evaluator has

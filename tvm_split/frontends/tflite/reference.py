"""Compute reference values for a TFLite file with LiteRT's own kernels, without its default delegates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from rpc_runtime.program.specs import Array
from tvm_split.errors import ModelImportError, last_line


@dataclass(frozen=True)
class TfliteReference:
    """Run the original file ``source`` with inputs of these ``shapes``, by the numbers of their tensors.

    ``variables`` maps the numbers of tensors to the variables that hold them, in execution order.
    """

    source: bytes
    shapes: Mapping[int, Sequence[int]]
    results: Sequence[int]
    variables: Mapping[int, str]

    def outputs(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The model's outputs in the file's order."""
        interpreter = self._run(inputs)
        return tuple(np.array(interpreter.get_tensor(number)) for number in self.results)

    def values(self, inputs: Sequence[Array]) -> Iterator[tuple[str, Array]]:
        """Yield the variable name and the value of every computed tensor, in execution order."""
        interpreter = self._run(inputs)
        for number, variable in self.variables.items():
            if number not in self.shapes:
                yield variable, np.array(interpreter.get_tensor(number))

    def _run(self, inputs: Sequence[Array]) -> Interpreter:
        interpreter = interpreter_of(self.source, list(self.shapes), list(self.shapes.values()))
        for number, array in zip(self.shapes, inputs, strict=True):
            interpreter.set_tensor(number, np.ascontiguousarray(array))
        interpreter.invoke()
        return interpreter


def interpreter_of(content: bytes, inputs: Sequence[int], shapes: Sequence[Sequence[int]]) -> Any:
    """Return LiteRT's interpreter, which keeps all tensors' values. Raises ModelImportError if it rejects the file."""
    try:
        interpreter = Interpreter(
            model_content=content,
            experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            experimental_preserve_all_tensors=True,
        )
        for number, shape in zip(inputs, shapes, strict=True):
            interpreter.resize_tensor_input(number, list(shape))
        interpreter.allocate_tensors()
    except Exception as error:
        raise ModelImportError(
            f"LiteRT does not take this file with inputs of {list(shapes)}: {last_line(error)}"
        ) from error
    return interpreter

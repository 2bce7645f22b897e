"""Assembles results at the client: outputs arrive tensor by tensor, results are returned complete and in order."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rpc_runtime.program.program import Program
from rpc_runtime.program.runner import Outputs
from rpc_runtime.program.specs import Array, Bytes, TensorSpec
from rpc_runtime.transports.carrier import Slot


def array_slot(tensor: TensorSpec, memory: Bytes | None = None) -> Slot:
    """Return a slot over a numpy array for one output, by default in new memory, which the user may keep."""
    data = np.empty(tensor.size_bytes, np.uint8) if memory is None else memory
    return Slot(data, data.view(np.dtype(tensor.dtype)).reshape(tensor.shape))


class ResultQueue:
    """The submitted micro-batches whose results are not taken. All methods require the pipeline's lock.

    A model output that is also a model input is kept here and never leaves the client. The caller limits the number of
    micro-batches in flight.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        inputs = [tensor.name for tensor in program.inputs]
        self._names = [tensor.name for tensor in program.outputs]
        # Each output with whether it is an earlier one again, whose array the user gets as a copy.
        self._outputs = [(name, name in self._names[:position]) for position, name in enumerate(self._names)]
        self._kept_inputs = {name: inputs.index(name) for name in self._names if name in inputs}
        # By sequence number, because one replica that makes an output may be ahead of another.
        self._arrived: dict[str, dict[int, tuple[Any, Callable[[], None] | None]]] = {n: {} for n in self._names}
        self.submitted = 0
        self.taken = 0

    def submit(self, inputs: Sequence[Array]) -> int:
        """Register a micro-batch; return its sequence number."""
        sequence = self.submitted
        self.submitted += 1
        for name, position in self._kept_inputs.items():
            self._arrived[name][sequence] = (inputs[position].copy(), None)
        return sequence

    def arrive(self, tensor: str, sequence: int, value: Array, release: Callable[[], None]) -> None:
        self._arrived[tensor][sequence] = (value, release)

    def clear(self) -> None:
        """Drop the outputs of incomplete results: they may keep memory that is shared with workers."""
        for waiting in self._arrived.values():
            waiting.clear()

    def take(self) -> Outputs | None:
        """Return the next result if it is complete, else None."""
        sequence = self.taken
        if sequence >= self.submitted or not all(sequence in waiting for waiting in self._arrived.values()):
            return None
        values: dict[str, Array] = {}
        for name, waiting in self._arrived.items():
            values[name], release = waiting.pop(sequence)
            if release is not None:
                release()
        self.taken += 1
        arrays = [values[name].copy() if is_again else values[name] for name, is_again in self._outputs]
        return Outputs.of(self._program, arrays)

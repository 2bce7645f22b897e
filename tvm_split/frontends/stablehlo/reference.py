"""Compute reference values for a StableHLO program with XLA on the CPU."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.backend import get_backend
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir

from rpc_runtime.program.specs import Array
from tvm_split.frontends.stablehlo.modules import block_of, bytecode, in_context, main_of, result_kind

_BYTES_AT_A_TIME = 1 << 28
"""The limit for intermediate values of one run, so that those of a large network need not fit in memory."""


@dataclass(frozen=True)
class StableHloReference:
    """Run the original module ``source`` (sizes bound), and its flattened form ``flat``; both are bytecode.

    ``weights`` are arguments by position, ``inputs`` the positions of the others. ``variables`` maps (position of the
    step, position of the result) to the variable that holds the result, in execution order.
    """

    source: bytes
    flat: bytes
    weights: Mapping[int, Array]
    inputs: Sequence[int]
    variables: Mapping[tuple[int, int], str]

    def outputs(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The model's outputs in the model's order."""
        return tuple(self._run(self.source, inputs))

    def values(self, inputs: Sequence[Array]) -> Iterator[tuple[str, Array]]:
        """Yield the variable name and the value of every result that a variable holds, in execution order."""
        keys = list(self.variables)
        while keys:
            with in_context():
                module, count = _returning(self.flat, keys)
                code = bytecode(module)
            for key, value in zip(keys[:count], self._run(code, inputs), strict=True):
                yield self.variables[key], value
            keys = keys[count:]

    def _run(self, code: bytes, inputs: Sequence[Array]) -> list[Array]:
        values = {**self.weights, **dict(zip(self.inputs, inputs, strict=True))}
        client = get_backend("cpu")
        device = client.local_devices()[0]
        options = xla_client.CompileOptions()
        # Without this option, XLA may keep excess precision between operations on half precision.
        options.env_option_overrides = [("xla_allow_excess_precision", False)]
        executable = client.compile_and_load(code, _jax.DeviceList((device,)), options)
        with jax.enable_x64(True):
            arrays = [jax.device_put(np.asarray(values[place], order="C"), device) for place in range(len(values))]
            results = executable.execute_sharded(arrays).disassemble_into_single_device_arrays()
            return [np.asarray(parts[0]) for parts in results]


def _returning(flat: bytes, keys: Sequence[tuple[int, int]]) -> tuple[Any, int]:
    """Return the program that returns the first results of ``keys``, up to `_BYTES_AT_A_TIME`, and their number."""
    module = ir.Module.parse(flat)
    main = main_of(module)
    *steps, end = [op_view.operation for op_view in block_of(main).operations]
    returned: list[ir.Value] = []
    size = 0
    for step, place in keys:
        shape, dtype = result_kind(steps[step], place)
        size += math.prod(shape) * dtype.itemsize
        if returned and size > _BYTES_AT_A_TIME:
            break
        returned.append(steps[step].results[place])
    ir.Operation.create("func.return", [], returned, ip=ir.InsertionPoint(end))
    end.erase()
    arguments = [argument.type for argument in block_of(main).arguments]
    kind = ir.FunctionType.get(arguments, [value.type for value in returned])
    main.attributes["function_type"] = ir.TypeAttr.get(kind)
    return module, len(returned)

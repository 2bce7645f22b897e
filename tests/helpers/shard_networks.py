"""Graphs that are split inside their layers, written operation by operation in the form of the frontends."""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from relay_passes.ir import is_tensor_constant, main_function, operations_of, operator_name, shape_of
from relay_passes.sharding.region import Sharded
from tests.helpers.relax_values import values_of


class Network:
    """A graph of one float32 input that grows by one operation at a time; weights are seeded."""

    def __init__(self, shape: Sequence[int], seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._builder = relax.BlockBuilder()
        self.input = relax.Var("x", relax.TensorType(tuple(shape), "float32"))
        self._scopes = ExitStack()
        self._scopes.enter_context(self._builder.function("main", [self.input]))
        self._block = self._scopes.enter_context(ExitStack())
        self._block.enter_context(self._builder.dataflow())

    def add(self, expression: relax.Expr) -> relax.Var:
        return self._builder.emit(expression, name_hint="layer")

    def weight(self, *shape: int, fan_in: int = 1) -> relax.Expr:
        return relax.const((self._random.standard_normal(shape) * fan_in**-0.5).astype(np.float32))

    def positive(self, *shape: int) -> relax.Expr:
        return relax.const(self._random.uniform(0.5, 1.5, shape).astype(np.float32))

    def convolution(self, x: relax.Expr, channels: int, kernel: int, groups: int = 1) -> relax.Var:
        """With a bias, as torch's importer writes it."""
        inputs = shape_of(x)[1] // groups
        weight = self.weight(channels, inputs, kernel, kernel, fan_in=inputs * kernel * kernel)
        product = self.add(op.nn.conv2d(x, weight, padding=kernel // 2, groups=groups))
        return self.add(op.add(product, self.add(op.reshape(self.weight(channels), (1, channels, 1, 1)))))

    def linear(self, x: relax.Expr, columns: int) -> relax.Var:
        rows = shape_of(x)[-1]
        weight = self.add(op.permute_dims(self.weight(columns, rows, fan_in=rows)))
        return self.add(op.add(self.add(op.matmul(x, weight)), self.weight(columns)))

    def batch_norm(self, x: relax.Expr) -> relax.Var:
        count = shape_of(x)[1]
        parameters = (self.positive(count), self.weight(count), self.weight(count), self.positive(count))
        return self.add(relax.TupleGetItem(self.add(op.nn.batch_norm(x, *parameters, axis=1, training=False)), 0))

    def layer_norm(self, x: relax.Expr) -> relax.Var:
        width = shape_of(x)[-1]
        return self.add(op.nn.layer_norm(x, self.positive(width), self.weight(width), axes=[-1]))

    def module(self, *outputs: relax.Var) -> tvm.IRModule:
        result = self._builder.emit_output(relax.Tuple(list(outputs)))
        self._block.close()
        self._builder.emit_func_output(result)
        self._scopes.close()
        return self._builder.get()


def require_same(module: tvm.IRModule, sharded: Sharded, *inputs: np.ndarray, tolerance: float = 1e-9) -> None:
    """Assert that the graph computes the same values, and that only slices and gathers have no machine."""
    relax.analysis.well_formed(sharded.module)
    for actual, expected in zip(values_of(sharded.module, *inputs), values_of(module, *inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(abs(expected).max(), 1e-3))
    operations = {binding.var.name: binding.value for binding in operations_of(main_function(sharded.module))}
    assert set(sharded.machine_of) == set(sharded.source_of) <= set(operations)
    for name, machine in sharded.machine_of.items():
        if machine is None:
            kind = operator_name(operations[name]).removeprefix("relax.")
            assert kind in ("strided_slice", "concat", "add", "reshape")


def product_bytes(module: tvm.IRModule, names: Sequence[str]) -> int:
    """The bytes of the constant weights of the convolutions and matrix products among these variables."""
    values = {binding.var.name: binding.value for binding in operations_of(main_function(module))}
    total = 0
    for name in names:
        if operator_name(values[name]) in ("relax.nn.conv2d", "relax.matmul"):
            weight = values[name].args[1]
            origin = values.get(weight.name) if isinstance(weight, relax.Var) else None
            if origin is None or is_tensor_constant(origin.args[0]):
                total += 4 * int(np.prod(shape_of(weight)))
    return total

"""Small Relax graphs, and runs of rewritten graphs beside them: for tests of rewrites that keep the values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relay_passes.ir import (
    constant,
    emit_operations,
    main_function,
    new_function,
    operations_of,
    returned_fields,
    substitute,
)
from tests.helpers.placements import QUICKLY
from tvm_split.compiler.stage import code_of

Array = np.ndarray[Any, Any]
Emit = Callable[..., relax.Var]


def graph(inputs: Mapping[str, Sequence[int]], write: Callable[..., Sequence[relax.Var]]) -> tvm.IRModule:
    """Return a graph in the frontends' form; ``write(emit, *inputs)`` returns the outputs."""
    parameters = [relax.Var(name, relax.TensorType(list(shape), "float32")) for name, shape in inputs.items()]
    return module_of(parameters, lambda builder: write(builder.emit, *parameters))


def module_of(
    parameters: Sequence[relax.Var], emit: Callable[[relax.BlockBuilder], Iterable[relax.Expr]]
) -> tvm.IRModule:
    """Return a module whose ``main`` binds what ``emit`` emits, and returns its results."""
    return tvm.IRModule({"main": new_function("main", parameters, emit)})


def weights(*shape: int, seed: int = 0) -> relax.Expr:
    return constant(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def run_together(modules: Mapping[str, tvm.IRModule], *inputs: Array) -> dict[str, list[Array]]:
    """Return the outputs of several modules' ``main`` for the same inputs, from one build without our passes."""
    functions = {name: main_function(module).with_attr("global_symbol", name) for name, module in modules.items()}
    machine = relax.VirtualMachine(code_of(tvm.IRModule(functions), QUICKLY), tvm.cpu())
    arguments = [tvm.runtime.tensor(array) for array in inputs]
    return {name: [value.numpy() for value in machine[name](*arguments)] for name in modules}


def random_inputs(module: tvm.IRModule, seed: int = 0) -> list[Array]:
    generator = np.random.default_rng(seed)
    arrays = []
    for parameter in main_function(module).params:
        shape = [int(length) for length in parameter.ty.shape.values]
        dtype = str(parameter.ty.dtype.dtype)
        is_float = dtype.startswith("float")
        arrays.append((generator.standard_normal(shape) if is_float else generator.integers(0, 9, shape)).astype(dtype))
    return arrays


def with_cuts_made(module: tvm.IRModule, cuts: Iterable[relax.VarBinding], original: tvm.IRModule) -> tvm.IRModule:
    """Return the module as a function of the original's parameters, which computes the cuts itself."""
    function, parameters = main_function(module), list(main_function(original).params)
    values: dict[str, relax.Expr] = {parameter.name: parameter for parameter in parameters}

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        emit_operations(builder, [*cuts, *operations_of(function)], values)
        return [substitute(field, values) for field in returned_fields(function)]

    return module_of(parameters, emit)


def assert_same_values(modules: Mapping[str, tvm.IRModule], *inputs: Array, tolerance: float = 1e-5) -> None:
    """Assert that all modules return what the first does, within ``tolerance`` of the range of each output."""
    results = run_together(modules, *inputs)
    _, *other_names = results
    for expected, *outputs in zip(*results.values(), strict=True):
        for name, output in zip(other_names, outputs, strict=True):
            assert output.shape == expected.shape, name
            np.testing.assert_allclose(
                output, expected, rtol=0, atol=tolerance * (np.ptp(expected) + 1e-3), err_msg=name
            )

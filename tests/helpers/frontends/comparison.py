"""Compiles an imported model, with TVM's default pipeline or as a stage, and compares it with its source."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tvm_split
from tests.helpers import placements
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.targets import host_target
from tvm_split.launchers.local import InProcess
from tvm_split.model import Model

TOLERANCES = {"float64": 1e-5, "float32": 2e-5, "float16": 4e-3, "bfloat16": 4e-2}
"""Largest difference, relative to the largest right value of the output."""


def run(model: Model, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of the model as TVM computes them on the CPU."""
    return placements.run(model.module, *inputs)


def run_as_stage(model: Model, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of the model as one machine computes them, through this project's own passes and kernels.

    LLVM makes of them what is compiled fastest, and computes the same.
    """
    machine = Machine("machine-a", target={**host_target(1), "opt-level": 0})
    cluster = tvm_split.Cluster((machine,), launcher=InProcess())
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster), verify=False)
    with tvm_split.deploy(bundle, cluster) as deployment:
        return list(deployment.run(*inputs))


def run_split(
    source: Any, inputs: Sequence[np.ndarray], layers: tuple[str, str], cluster: tvm_split.Cluster
) -> list[np.ndarray]:
    """The outputs of a source whose layers from ``layers[0]`` are on machine-a, and from ``layers[1]`` on machine-b."""
    split = {machine: [layer] for machine, layer in zip(("machine-a", "machine-b"), layers, strict=True)}
    examples = None if isinstance(source, Model) else tuple(inputs)
    with tvm_split.compile_and_deploy(source, examples, cluster, split) as deployment:
        assert {stage.machine for stage in deployment.stages} == set(split)
        return list(deployment.run(*inputs))


def assert_split_like(
    network: Callable[..., Any],
    inputs: Sequence[np.ndarray],
    layers: tuple[str, str],
    cluster: tvm_split.Cluster,
    limit: float = 1e-4,
) -> list[np.ndarray]:
    """A network of JAX has JAX's outputs when it is split; returns them. ``limit`` is relative to the largest value."""
    import jax

    outputs = run_split(network, inputs, layers, cluster)
    expected = jax.tree.leaves(network(*map(jax.numpy.asarray, inputs)))
    for actual, right in zip(outputs, map(np.asarray, expected), strict=True):
        assert (actual.dtype, actual.shape) == (right.dtype, right.shape)
        exact = right.astype("float64")
        assert np.abs(actual.astype("float64") - exact).max() <= limit * np.abs(exact).max(initial=np.ptp(exact))
    return outputs


def assert_equal_to_source(
    model: Model,
    inputs: Sequence[np.ndarray] | None = None,
    tolerance: float | None = None,
    computed: Callable[[Model, Sequence[np.ndarray]], list[np.ndarray]] = run,
) -> None:
    """The compiled module has the source's outputs: same number, shapes, dtypes, and values within the tolerance.

    ``inputs`` are the model's example inputs if they are left out.
    """
    inputs = model.example_inputs if inputs is None else inputs
    assert inputs is not None
    assert model.reference is not None
    right = model.reference.outputs(inputs)
    assert len(right) == len(model.outputs)
    for position, (output, expected, spec) in enumerate(
        zip(computed(model, inputs), right, model.outputs, strict=True)
    ):
        assert (str(output.dtype), output.shape) == (str(expected.dtype), expected.shape), f"output {position}"
        assert (spec.dtype, spec.shape) == (str(expected.dtype), expected.shape), f"output {position}"
        assert_close(output, expected, tolerance)


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float | None = None) -> None:
    """Equal for integers and booleans; for floats within a tolerance for the dtype, NaN and infinities in place."""
    if str(expected.dtype) not in TOLERANCES:
        np.testing.assert_array_equal(actual, expected)
        return
    allowed = TOLERANCES[str(expected.dtype)] if tolerance is None else tolerance
    exact, approximate = expected.astype("float64"), actual.astype("float64")
    finite = np.isfinite(exact)
    scale = max(1.0, float(np.abs(exact[finite]).max(initial=0.0)))
    np.testing.assert_allclose(approximate, exact, rtol=allowed, atol=allowed * scale, equal_nan=True)

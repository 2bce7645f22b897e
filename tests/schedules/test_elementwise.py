"""Element maps and moves, in the dtypes of models; exp, erf, tanh and what is made of them in all of float32."""

import platform
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional
from tvm import relax
from tvm.target import Target

from tests.helpers.schedules.emulated_gpu import on_cpu_and_gpu
from tests.helpers.schedules.properties import exact
from tests.helpers.schedules.schedule_harness import (
    HOST,
    assert_close,
    evaluate,
    graph_of,
    lower,
    nodes,
    normal,
    rules,
    run,
)
from tvm_split.compiler.targets import cpu_target

extents = st.lists(st.sampled_from([1, 3, 13, 17, 130]), min_size=1, max_size=3)


@settings(max_examples=10)
@given(shape=extents, dtype=st.sampled_from(["float32", "float16", "int64", "int32"]))
def test_arithmetic_is_fused(shape, dtype):
    left, right = ((8 * normal(seed, *shape)).astype(dtype) for seed in (0, 1))

    def graph(builder, a, b):
        return builder.emit(relax.op.maximum(builder.emit(relax.op.add(a, b)), builder.emit(relax.op.subtract(a, b))))

    actual, chosen = evaluate(graph, [left, right])
    assert actual.dtype == np.dtype(dtype)
    assert_close(actual, np.maximum(left + right, left - right).astype("float64"), tolerance=1e-3)
    assert chosen == {"elementwise"}


@on_cpu_and_gpu
@settings(max_examples=6)
@given(shape=st.lists(st.sampled_from([1, 3, 17, 130]), min_size=3, max_size=3), axes=st.permutations([0, 1, 2]))
def test_transpose_and_concatenate(evaluate, shape, axes):
    x = normal(0, *shape)

    def graph(builder, data):
        moved = builder.emit(relax.op.permute_dims(data, list(axes)))
        return builder.emit(relax.op.concat([moved, moved], axis=1))

    actual, chosen = evaluate(graph, [x])
    moved = x.transpose(axes)
    assert np.array_equal(actual, np.concatenate([moved, moved], axis=1))
    assert chosen == {"elementwise"}


@pytest.mark.parametrize(("shape", "axis"), [((50, 17), 0), ((3, 50), 1), ((3, 50), -1), ((50,), None)])
def test_gather(capfd: pytest.CaptureFixture[str], shape: tuple[int, ...], axis: int | None) -> None:
    table = normal(0, *shape)
    for indices in (np.array([[3, 0, 49], [7, 7, 1]], "int64"), np.array(5, "int32")):
        actual, _ = evaluate(lambda builder, a, b: builder.emit(relax.op.take(a, b, axis)), [table, indices])
        assert np.array_equal(actual, np.take(table, indices, axis))
    assert capfd.readouterr().err == ""  # TVM's own lowering warns


def test_gates_grow_with_their_number_not_with_its_power():
    """Each gate reads the state three times: as one expression, ten of them would have 60 000 terms and more."""

    def graph(steps):
        def build(builder, x, y):
            for _ in range(steps):
                gate = builder.emit(relax.op.sigmoid(builder.emit(relax.op.add(x, y))))
                x = builder.emit(relax.op.add(x, builder.emit(relax.op.multiply(gate, builder.emit(relax.op.tanh(x))))))
            return x

        return build

    inputs = [normal(0, 4, 33), normal(1, 4, 33)]
    few, many = (lower(graph_of(graph(steps), inputs), HOST) for steps in (5, 10))
    assert rules(many) == {"elementwise"}
    assert len(nodes(many)) < 3 * len(nodes(few))
    expected, addend = (torch.tensor(array).double() for array in inputs)
    for _ in range(10):
        expected = expected + torch.sigmoid(expected + addend) * torch.tanh(expected)
    assert_close(run(many, inputs), expected.numpy())


@pytest.mark.parametrize("bounds", ["relu", "relu6", "clip", "maximum", "minimum"])
def test_bounds_keep_nan(bounds):
    """They keep it behind a convolution too, where they are computed in its tile."""
    operators = {
        "clip": lambda x: relax.op.clip(x, -1, 2),
        "maximum": lambda x: relax.op.maximum(x, relax.const(-1.0, "float32")),
        "minimum": lambda x: relax.op.minimum(relax.const(2.0, "float32"), x),
    }
    operator = operators.get(bounds) or getattr(relax.op.nn, bounds)
    low, high = {
        "relu": (0, np.inf),
        "relu6": (0, 6),
        "clip": (-1, 2),
        "maximum": (-1, np.inf),
        "minimum": (-np.inf, 2),
    }[bounds]
    x = np.array([np.nan, np.inf, -np.inf, -3, 0.5, 9], "float32").reshape(1, 1, 2, 3)
    right = np.clip(x, low, high)
    actual, _ = evaluate(lambda builder, data: builder.emit(operator(data)), [x])
    assert np.array_equal(actual, right, equal_nan=True)
    weight = relax.const(np.ones((16, 1, 1, 1), "float32"))
    actual, chosen = evaluate(
        lambda builder, data: builder.emit(operator(builder.emit(relax.op.nn.conv2d(data, weight)))), [x]
    )
    assert chosen >= {"conv2d"}
    assert np.array_equal(actual, np.repeat(right, 16, axis=1), equal_nan=True)


@pytest.mark.parametrize(("operator", "right"), [(relax.op.maximum, np.maximum), (relax.op.minimum, np.minimum)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_nan_of_either_tensor_stays(operator, right, dtype):
    special = np.array([np.nan, np.inf, -np.inf, -3, 0, 9], dtype)
    first, second = special.reshape(6, 1), np.stack([special, special[::-1]]).reshape(2, 1, 6)
    actual, _ = evaluate(lambda builder, x, y: builder.emit(operator(x, y)), [first, second])
    assert np.array_equal(actual, right(first, second), equal_nan=True)


SMALLEST_NORMAL = float(np.finfo("float32").tiny)
# Reference, largest relative error, and largest absolute error where a relative one is not promised: results below the
# smallest normal number may be zero, and the tails of gelu are polynomials.
FUNCTIONS = {
    "exp": (torch.exp, 3e-7, SMALLEST_NORMAL),
    "erf": (torch.erf, 5e-7, SMALLEST_NORMAL),
    "tanh": (torch.tanh, 5e-7, SMALLEST_NORMAL),
    "sigmoid": (torch.sigmoid, 4e-7, SMALLEST_NORMAL),
    "nn.silu": (functional.silu, 5e-7, 100 * SMALLEST_NORMAL),
    "nn.gelu": (functional.gelu, 5e-7, 1e-7),
    "nn.gelu_tanh": (lambda x: functional.gelu(x, approximate="tanh"), 5e-7, 5e-7),
}


def every_exponent():
    """40 numbers of each sign and exponent, the ends of exp's range, and what is no ordinary number."""
    random = np.random.default_rng(0)
    exponents = np.repeat(np.arange(255, dtype="uint32"), 40) << np.uint32(23)
    positive = (exponents | random.integers(0, 1 << 23, exponents.size, dtype="uint32")).view("float32")
    ends = np.concatenate([np.linspace(low, low + 1, 200) for low in (-88, -87.5, 3.5, 7.5, 88, 88.4)])
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 88.72283, 88.72284, -87.33654, 1e-45, -1e-45, 3.4e38, -3.4e38]
    return np.concatenate([positive, -positive, ends, np.array(special)]).astype("float32")


# The oldest processor of this architecture, on x86 without fused multiply-adds.
OLDEST = Target(cpu_target(platform.machine(), frozenset(), threads=2))


@pytest.mark.parametrize("target", [HOST, OLDEST], ids=["host", "oldest"])
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_all_of_float32(name, target):
    reference, relative, absolute = FUNCTIONS[name]
    x = every_exponent()
    operator = relax.op
    for part in name.split("."):
        operator = getattr(operator, part)
    actual, _ = evaluate(lambda builder, data: builder.emit(operator(data)), [x], target)
    with warnings.catch_warnings(action="ignore"):
        expected = reference(exact(x)).numpy()
        rounded = expected.astype("float32")
        assert np.array_equal(np.isnan(actual), np.isnan(rounded)), x[np.isnan(actual) != np.isnan(rounded)]
        assert np.array_equal(np.isinf(actual), np.isinf(rounded)), x[np.isinf(actual) != np.isinf(rounded)]
        finite = np.isfinite(rounded)
        error = np.abs(actual.astype("float64") - expected)[finite]
        excess = error / (relative * np.abs(expected[finite]) + absolute)
    worst = int(excess.argmax())
    assert excess[worst] <= 1, f"at {x[finite][worst]}: {actual[finite][worst]} for {expected[finite][worst]}"

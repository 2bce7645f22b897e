"""What the property tests share: references in float64, chains of element-wise layers, and how near results must be."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn import functional
from tvm import relax

from tests.helpers.schedules.schedule_harness import normal

# Far below the 1e-4 that is promised: a result that is only just within it is looked at.
TOLERANCE = 1e-5

channels = st.sampled_from([1, 3, 8, 16, 17, 24, 130])
lengths = st.sampled_from([1, 2, 7, 13])
windows = st.sampled_from([1, 2, 3, 5, 7])


def exact(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array.astype("float64"))


ACTIVATIONS = {
    "none": ((lambda builder, y: y), (lambda y: y)),
    "relu": ((lambda builder, y: builder.emit(relax.op.nn.relu(y))), torch.relu),
    "clip": ((lambda builder, y: builder.emit(relax.op.clip(y, 0, 6))), lambda y: y.clip(0, 6)),
    "gelu": ((lambda builder, y: builder.emit(relax.op.nn.gelu(y))), functional.gelu),
    "sigmoid": ((lambda builder, y: builder.emit(relax.op.sigmoid(y))), torch.sigmoid),
    "hardswish": ((lambda builder, y: hardswish(builder, y)), functional.hardswish),
    "silu, tanh": (
        (lambda builder, y: builder.emit(relax.op.tanh(builder.emit(relax.op.nn.silu(y))))),
        lambda y: torch.tanh(functional.silu(y)),
    ),
}
activations = st.sampled_from(sorted(ACTIVATIONS))


def hardswish(builder: relax.BlockBuilder, y: relax.Expr) -> relax.Expr:
    shifted = builder.emit(relax.op.add(y, relax.const(np.float32(3))))
    gate = builder.emit(relax.op.divide(builder.emit(relax.op.clip(shifted, 0, 6)), relax.const(np.float32(6))))
    return builder.emit(relax.op.multiply(y, gate))


# Behind products whose columns no vector divides, the longer ones take LLVM ten seconds each to compile.
cheap_activations = st.sampled_from(["none", "relu", "clip", "hardswish"])


@st.composite
def epilogues(draw, activation=activations):
    """Whether a bias and a residual are added (before or after the activation), and which activation."""
    return draw(st.booleans()), draw(st.sampled_from(["none", "before", "after"])), draw(activation)


def apply_epilogue(builder, y, bias, residual, epilogue):
    has_bias, residual_at, activation = epilogue
    if has_bias:
        y = builder.emit(relax.op.add(y, relax.const(bias)))
    if residual_at == "before":
        y = builder.emit(relax.op.add(residual, y))
    y = ACTIVATIONS[activation][0](builder, y)
    return builder.emit(relax.op.add(y, residual)) if residual_at == "after" else y


def expected_epilogue(y, bias, residual, epilogue):
    has_bias, residual_at, activation = epilogue
    if has_bias:
        y = y + exact(bias)
    if residual_at == "before":
        y = y + exact(residual)
    y = ACTIVATIONS[activation][1](y)
    return (y + exact(residual) if residual_at == "after" else y).numpy()


def weights(seed: int, *shape: int) -> np.ndarray:
    """Scaled such that sums have a deviation of one, and activations see both of their ends."""
    return normal(seed, *shape) / np.float32(np.sqrt(np.prod(shape[1:])))

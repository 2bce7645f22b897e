"""Graphs of a convolution with bias, residual and ReLU, with torch's result in float64, and of a product in halves."""

import numpy as np
import torch
from tvm import relax


def convolution(weight, bias, **attributes):
    def graph(builder, x, *residual):
        y = builder.emit(relax.op.nn.conv2d(x, relax.const(weight), **attributes))
        y = builder.emit(relax.op.add(y, relax.const(bias.reshape(1, -1, 1, 1))))
        if residual:
            y = builder.emit(relax.op.add(y, residual[0]))
        return builder.emit(relax.op.nn.relu(y))

    return graph


def product(dtype):
    """The ReLU of a product of matrices that are converted to ``dtype``, added up in float32."""

    def graph(builder, left, right):
        operands = [builder.emit(relax.op.astype(operand, dtype)) for operand in (left, right)]
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(*operands, out_dtype="float32"))))

    return graph


def expected(x, weight, bias, residual=0.0, **attributes):
    result = torch.nn.functional.conv2d(
        *(torch.tensor(array.astype("float64")) for array in (x, weight, bias)),
        stride=attributes.get("strides", 1),
        dilation=attributes.get("dilation", 1),
        groups=attributes.get("groups", 1),
        padding=attributes.get("padding", 0),
    )
    return np.maximum(result.numpy() + residual, 0.0)

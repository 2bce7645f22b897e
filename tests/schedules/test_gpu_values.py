"""Kernels scheduled for CUDA, run with their threads one after another, against torch and numpy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from tests.schedules.schedule_harness import assert_close, graph_of, lower, normal, rules, run
from tests.schedules.serial_threads import without_threads
from tests.schedules.test_conv2d import convolution, expected
from tests.schedules.test_targets import cuda

SM_90 = cuda("sm_90")


def evaluate_serially(graph, inputs):
    lowered = lower(graph_of(graph, inputs), SM_90)
    return run(without_threads(lowered), inputs), rules(lowered)


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    inputs=st.sampled_from([1, 3, 16, 17, 130]),
    outputs=st.sampled_from([1, 3, 8, 17, 130]),
    size=st.tuples(st.sampled_from([1, 7, 13]), st.sampled_from([1, 7, 12, 13])),
    kernel=st.sampled_from([1, 2, 3]),
    stride=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1]),
    dilation=st.sampled_from([1, 2]),
    batch=st.sampled_from([1, 3]),
)
def test_convolution(inputs, outputs, size, kernel, stride, padding, dilation, batch):
    kernel = kernel if dilation * (kernel - 1) < min(size) + 2 * padding else 1
    x, weight, bias = normal(0, batch, inputs, *size), normal(1, outputs, inputs, kernel, kernel), normal(2, outputs)
    attributes = {"strides": (stride, stride), "padding": (padding, padding), "dilation": (dilation, dilation)}
    actual, chosen = evaluate_serially(convolution(weight, bias, **attributes), [x])
    assert_close(actual, expected(x, weight, bias, **attributes))
    assert chosen <= {"conv2d", "few_rows", "depthwise_conv2d"}

"""Attention as one kernel for CUDA: which graphs it is made of, and its values, from its source, against float64."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from tvm import relax

from tests.helpers.schedules.emulated_gpu import emulated, run_emulated
from tests.helpers.schedules.gpu_kernels import nvcc
from tests.helpers.schedules.schedule_harness import assert_close, graph_of, lower, normal, rules
from tvm_split import schedules
from tvm_split.schedules.gpu import attention_tile
from tvm_split.schedules.gpu.attention_tile import Attention, choose_attention_tile

SM_90 = emulated("sm_90")
needs_headers = pytest.mark.skipif(nvcc() is None, reason="needs the headers of CUDA")


def attention_of(scale=0.5, masks=(), half=None, weights_too=False):
    """Queries, keys and values, as the frontends have attention; ``half`` as plans have it in half precision."""

    def graph(builder, query, key, value):
        def rounded(operand):
            return operand if half is None else builder.emit(relax.op.astype(operand, half))

        rank = len(key.ty.shape)
        turned = builder.emit(relax.op.permute_dims(key, [*range(rank - 2), rank - 1, rank - 2]))
        scores = builder.emit(relax.op.matmul(rounded(query), rounded(turned), out_dtype="float32"))
        scores = builder.emit(relax.op.multiply(scores, relax.const(scale, "float32")))
        for mask in masks:
            scores = builder.emit(relax.op.add(scores, relax.const(mask)))
        weights = builder.emit(relax.op.nn.softmax(scores, -1))
        product = builder.emit(relax.op.matmul(rounded(weights), rounded(value), out_dtype="float32"))
        if weights_too:
            product = builder.emit(relax.op.add(product, builder.emit(relax.op.sum(weights, -1, keepdims=True))))
        return product

    return graph


def exact_attention(query, key, value, scale=0.5, masks=()):
    query, key, value = (torch.tensor(each.astype("float64")) for each in (query, key, value))
    scores = query @ key.transpose(-1, -2) * scale + sum(torch.tensor(each.astype("float64")) for each in masks)
    return (torch.softmax(scores, -1) @ value).numpy()


def evaluate(graph, inputs):
    lowered = lower(graph_of(graph, inputs), SM_90)
    return run_emulated(lowered, inputs, SM_90), rules(lowered)


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    """One kernel also where three are estimated to take less, which is so for what runs on a CPU in a second."""
    monkeypatch.setattr(attention_tile, "_cycles_of_three", lambda *_: float("inf"))


@needs_headers
@settings(max_examples=6, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    outer=st.sampled_from([(), (3,), (2, 2)]),
    rows=st.sampled_from([16, 17, 67]),
    keys=st.sampled_from([1, 20, 70]),
    width=st.sampled_from([8, 20, 64]),
    value_width=st.sampled_from([8, 33, 64]),
)
def test_attention(outer, rows, keys, width, value_width):
    inputs = [normal(0, *outer, rows, width), normal(1, *outer, keys, width), normal(2, *outer, keys, value_width)]
    actual, chosen = evaluate(attention_of(), inputs)
    assert_close(actual, exact_attention(*inputs), 1e-5)
    assert chosen == {"attention"}


@needs_headers
@pytest.mark.parametrize("tile", [tile for tile in attention_tile.TILES if tile.keys != 16], ids=str)
def test_every_tile(tile, monkeypatch):
    monkeypatch.setattr(attention_tile, "TILES", (tile,))
    inputs = [normal(0, 2, 50, 24), normal(1, 2, 70, 24), normal(2, 2, 70, 40)]
    actual, chosen = evaluate(attention_of(), inputs)
    assert_close(actual, exact_attention(*inputs), 1e-5)
    assert chosen == {"attention"}


@needs_headers
@pytest.mark.parametrize("shapes", [[(1, 1, 1, 40)], [(40, 40), (2, 1, 1, 40)]])
def test_masks(shapes):
    masks = [np.where(normal(5, *shape) < 0, -np.inf, normal(6, *shape)).astype("float32") for shape in shapes]
    for mask in masks:
        mask[..., 33] = 0
    inputs = [normal(number, 2, 3, 40, 16) for number in range(3)]
    actual, chosen = evaluate(attention_of(0.25, masks), inputs)
    assert_close(actual, exact_attention(*inputs, 0.25, masks), 1e-5)
    assert chosen <= {"attention", "elementwise"}


@needs_headers
def test_scores_that_are_hidden_at_first_and_large_ones_later():
    mask = np.zeros((40, 100), "float32")
    mask[:, :70] = -np.inf
    query, key, value = 20 * normal(0, 40, 16), 20 * normal(1, 100, 16), normal(2, 100, 16)
    actual, _ = evaluate(attention_of(0.25, [mask]), [query, key, value])
    assert_close(actual, exact_attention(query, key, value, 0.25, [mask]), 1e-4)


@needs_headers
@pytest.mark.parametrize("half", [None, "float16", "bfloat16"])
def test_heads_are_read_where_they_lie(half):
    joined = normal(0, 1, 37, 3 * 2 * 16)

    def graph(builder, x):
        split = builder.emit(relax.op.reshape(x, (1, 37, 3, 2, 16)))
        turned = builder.emit(relax.op.permute_dims(split, [2, 0, 3, 1, 4]))
        parts = [
            builder.emit(relax.op.squeeze(builder.emit(relax.op.strided_slice(turned, [0], [i], [i + 1])), [0]))
            for i in range(3)
        ]
        return attention_of(half=half)(builder, *parts)

    actual, _ = evaluate(graph, [joined])
    parts = joined.reshape(1, 37, 3, 2, 16).transpose(2, 0, 3, 1, 4)
    assert_close(actual, exact_attention(*parts), 1e-5)
    # The reshaped tensor is the same memory: TVM makes no kernel of that in the end.
    lowered = lower(graph_of(graph, [joined]), SM_90)
    assert schedules.chosen_rules(lowered) == {"attention": "attention", "reshape": "elementwise"}


@needs_headers
def test_networks_in_half_precision():
    inputs = [normal(number, 2, 20, 16, dtype="float16") for number in range(3)]

    def graph(builder, query, key, value):
        turned = builder.emit(relax.op.permute_dims(key, [0, 2, 1]))
        scores = builder.emit(relax.op.astype(builder.emit(relax.op.matmul(query, turned)), "float32"))
        scores = builder.emit(relax.op.divide(scores, relax.const(2.0, "float32")))
        weights = builder.emit(relax.op.astype(builder.emit(relax.op.nn.softmax(scores, 2)), "float16"))
        return builder.emit(relax.op.matmul(weights, value))

    actual, chosen = evaluate(graph, inputs)
    assert actual.dtype == np.float16
    assert_close(actual, exact_attention(*inputs), 1e-3)
    assert chosen == {"attention"}


def fused(graph, inputs):
    return "attention" in rules(lower(graph_of(graph, inputs), SM_90))


def test_what_is_needed_elsewhere_is_computed_as_it_is_written():
    inputs = [normal(number, 2, 20, 16) for number in range(3)]
    assert fused(attention_of(), inputs)
    assert not fused(attention_of(weights_too=True), inputs)


def test_few_queries_are_products_of_few_rows():
    assert not fused(attention_of(), [normal(0, 2, 3, 16), normal(1, 2, 20, 16), normal(2, 2, 20, 16)])


def test_batches_that_differ_are_two_products():
    assert not fused(attention_of(), [normal(0, 2, 20, 16), normal(1, 1, 20, 16), normal(2, 1, 20, 16)])


def test_values_that_fill_the_registers_are_two_products():
    inputs = [normal(0, 20, 16), normal(1, 20, 16), normal(2, 20, 300)]
    assert not fused(attention_of(), inputs)


def test_one_kernel_where_it_is_estimated_to_take_less(monkeypatch):
    monkeypatch.undo()
    sizes = Attention((1, 12), 128, 128, 64, 64)
    assert choose_attention_tile(sizes, 132, in_half=False, copies=3) is not None
    long = Attention((1, 16), 2048, 2048, 64, 64)
    assert choose_attention_tile(long, 132, in_half=True, copies=0) is None

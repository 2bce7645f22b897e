"""Attention as one kernel on tensor cores: which graphs it is made of, and its values, from its source."""

import numpy as np
import pytest
import torch
import tvm
from hypothesis import HealthCheck, given, settings, strategies as st
from tvm import relax

import schedules
from schedules.gpu import attention_tile
from schedules.gpu.attention_tile import Attention, choose_attention_tile
from tests.helpers.schedules.emulated_gpu import SM_90, evaluate, run_kernels
from tests.helpers.schedules.gpu_kernels import (
    HALVES,
    MOST_STATIC_SHARED_BYTES,
    compile_with_nvcc,
    cuda,
    cuda_source,
    halves,
    kernels_of,
    module_of_kernels,
    needs_headers,
    slow,
)
from tests.helpers.schedules.schedule_harness import assert_close, graph_of, lower, normal, rules


def attention_of(scale=0.5, masks=(), half="float16", weights_too=False):
    """Queries, keys and values, as plans have attention in half precision; float32 with ``half=None``."""

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
    query, key, value = (torch.tensor(array.astype("float64")) for array in (query, key, value))
    scores = query @ key.transpose(-1, -2) * scale + sum(torch.tensor(mask.astype("float64")) for mask in masks)
    return (torch.softmax(scores, -1) @ value).numpy()


def check(inputs, scale=0.5, masks=(), half="float16"):
    """Compare attention with float64, of these inputs as ``half`` has them; it must be one kernel."""
    actual, chosen = evaluate(attention_of(scale, masks, half), inputs)
    # What rounding the inputs changes can be more than the tolerance, and is no error of the kernel.
    exact = exact_attention(*(array.astype(half) for array in inputs), scale, masks)
    assert_close(actual, exact, HALVES[half])
    assert "attention" in chosen
    assert chosen <= {"attention", "elementwise"}


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    """One kernel also where three are estimated to take less, which is so for what runs on a CPU in a second."""
    monkeypatch.setattr(attention_tile, "_cycles_of_three", lambda *_: float("inf"))


@pytest.mark.slow
@needs_headers
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    outer=st.sampled_from([(), (3,), (2, 2)]),
    rows=st.sampled_from([16, 17, 67]),
    keys=st.sampled_from([1, 20, 70]),
    width=st.sampled_from([8, 20, 23, 64]),
    value_width=st.sampled_from([8, 33, 64, 100]),
    half=halves,
)
def test_attention(outer, rows, keys, width, value_width, half):
    shapes = (rows, width), (keys, width), (keys, value_width)
    check([normal(seed, *outer, *shape) for seed, shape in enumerate(shapes)], half=half)


@pytest.mark.slow
@needs_headers
@pytest.mark.parametrize("tile", attention_tile.TILES, ids=str)
def test_every_tile(tile, monkeypatch):
    monkeypatch.setattr(attention_tile, "TILES", (tile,))
    check([normal(0, 2, 50, 24), normal(1, 2, 70, 24), normal(2, 2, 70, 40)])


LOWEST = np.finfo("float32").min


def causal(rows, keys, hidden=-np.inf, reach=0):
    return np.triu(np.full((rows, keys), hidden, "float32"), 1 + reach)


def random_mask(*shape):
    mask = np.where(normal(5, *shape) < 0, -np.inf, normal(6, *shape)).astype("float32")
    mask[..., 33] = 0
    return mask


# Scores that are hidden at first, and large ones later.
LATE = np.where(np.arange(100) < 70, -np.inf, np.zeros((40, 1))).astype("float32")


@needs_headers
@pytest.mark.parametrize(
    ("outer", "masks", "half", "scale"),
    [
        ((2, 3), [random_mask(40, 40), random_mask(2, 1, 1, 40)], "float16", 1),
        ((), [LATE], "float16", 18),
        ((3,), [causal(70, 150, reach=80)], "bfloat16", 1),
        *slow(
            ((2, 3), [random_mask(40, 40), random_mask(1, 1, 1, 40)], "float16", 1),
            ((3,), [causal(150, 70, LOWEST)], "float16", 1), ((3,), [causal(150, 70)], "bfloat16", 1),
            ((3,), [causal(150, 150, LOWEST)], "bfloat16", 1), ((3,), [causal(70, 150, LOWEST, 80)], "float16", 1),
        ),
    ],
)  # fmt: skip
def test_masks(outer, masks, half, scale):
    rows, keys = masks[0].shape
    check([scale * normal(seed, *outer, size, 16) for seed, size in enumerate((rows, keys, keys))], 0.25, masks, half)


def replaced(condition, number, swapped=False):
    """Causal attention as scores that a condition replaces, ``masked_fill`` of torch."""

    def graph(builder, *inputs):
        query, key, value = (builder.emit(relax.op.astype(operand, "float16")) for operand in inputs)
        turned = builder.emit(relax.op.permute_dims(key, [0, 2, 1]))
        scores = builder.emit(relax.op.matmul(query, turned, out_dtype="float32"))
        choice = scores, relax.const(np.float32(number))
        scores = builder.emit(relax.op.where(relax.const(condition), *(choice if swapped else reversed(choice))))
        weights = builder.emit(relax.op.astype(builder.emit(relax.op.nn.softmax(scores, -1)), "float16"))
        return builder.emit(relax.op.matmul(weights, value, out_dtype="float32"))

    return graph


@pytest.mark.slow
@needs_headers
@pytest.mark.parametrize("swapped", [False, True])
def test_scores_that_a_condition_replaces(swapped):
    inputs = [normal(number, 2, 40, 16) for number in range(3)]
    hidden = np.triu(np.ones((40, 40), bool), 1)
    actual, chosen = evaluate(replaced(~hidden if swapped else hidden, -np.inf, swapped), inputs)
    assert_close(actual, exact_attention(*inputs, 1.0, [causal(40, 40)]), HALVES["float16"])
    assert "attention" in chosen


def test_scores_that_become_a_number_which_others_may_have_are_no_mask():
    inputs = [normal(number, 2, 40, 16) for number in range(3)]
    hidden = np.triu(np.ones((40, 40), bool), 1)
    assert fused(replaced(hidden, -np.inf), inputs)
    assert not fused(replaced(hidden, -1e4), inputs)


NOTHING = causal(200, 200, LOWEST)
NOTHING[5] = LOWEST  # a row that sees nothing: all of its keys have the same weight
ZEROS = np.zeros((1, 200), "float32")


@pytest.mark.slow
@needs_headers
@pytest.mark.parametrize(
    ("masks", "is_read"),
    [
        ([causal(200, 200)], False),
        ([causal(200, 200, LOWEST)], False),
        ([causal(200, 200), ZEROS], False),
        # Beside another mask, what both hide has less weight than what one does: not none.
        ([causal(200, 200, LOWEST), ZEROS], True),
        ([NOTHING], True),
        ([np.zeros((200, 200), "float32")], True),
    ],
)
def test_tiles_are_computed_unless_a_causal_mask_hides_them(masks, is_read):
    """The first rows of one tile have NaN of keys that are hidden from all of the tile, if these are computed."""
    inputs = [normal(number, 200, 16) for number in range(3)]
    for array in inputs[1:]:
        array[128:] = np.nan
    actual, chosen = evaluate(attention_of(0.25, masks), inputs)
    assert chosen <= {"attention", "elementwise"}
    assert np.isnan(actual[:64]).any() == is_read


def expanded(builder, heads):
    wide = builder.emit(relax.op.broadcast_to(builder.emit(relax.op.expand_dims(heads, [2])), (1, 2, 3, 37, 16)))
    return builder.emit(relax.op.reshape(wide, (1, 6, 37, 16)))


@needs_headers
@pytest.mark.parametrize(
    "of_each_query", [expanded, *slow((lambda builder, heads: builder.emit(relax.op.repeat(heads, 3, 1)),))]
)
def test_heads_of_several_queries_are_read_where_they_lie(of_each_query):
    def graph(builder, query, key, value):
        return attention_of()(builder, query, of_each_query(builder, key), of_each_query(builder, value))

    inputs = [normal(0, 1, 6, 37, 16), normal(1, 1, 2, 37, 16), normal(2, 1, 2, 37, 16)]
    lowered = lower(graph_of(graph, inputs), SM_90)
    exact = exact_attention(inputs[0], *(array.repeat(3, 1) for array in inputs[1:]))
    assert_close(run_kernels(lowered, inputs, SM_90), exact, HALVES["float16"])
    # The expanded tensor is the same memory, too.
    assert set(schedules.chosen_rules(lowered)) <= {"attention", "expand_dims"}


@needs_headers
@pytest.mark.parametrize("half", ["float16", *slow("bfloat16")])
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

    lowered = lower(graph_of(graph, [joined]), SM_90)
    parts = joined.reshape(1, 37, 3, 2, 16).transpose(2, 0, 3, 1, 4)
    assert_close(run_kernels(lowered, [joined], SM_90), exact_attention(*parts), HALVES[half])
    # The reshaped tensor is the same memory: TVM makes no kernel of that in the end.
    assert schedules.chosen_rules(lowered) == {"attention": "attention", "reshape": "elementwise"}


@needs_headers
@pytest.mark.parametrize(
    ("half", "replaced"), [("bfloat16", True), *slow(("float16", False), ("float16", True), ("bfloat16", False))]
)
def test_networks_in_half_precision(half, replaced):
    inputs = [normal(number, 2, 20, 16).astype(half) for number in range(3)]
    mask = np.where(normal(3, 20, 20) > 1, -1e4, normal(4, 20, 20)).astype(half)
    hidden = np.triu(np.ones((20, 20), bool), 1)

    def graph(builder, query, key, value, added):
        turned = builder.emit(relax.op.permute_dims(key, [0, 2, 1]))
        scores = builder.emit(relax.op.matmul(query, turned))
        scores = builder.emit(relax.op.divide(scores, relax.const(np.asarray(4, half))))
        if replaced:
            lowest = relax.const(np.asarray(-np.inf, half))
            scores = builder.emit(relax.op.where(relax.const(hidden), lowest, scores))
        scores = builder.emit(relax.op.astype(builder.emit(relax.op.add(scores, added)), "float32"))
        weights = builder.emit(relax.op.astype(builder.emit(relax.op.nn.softmax(scores, 2)), half))
        return builder.emit(relax.op.matmul(weights, value))

    actual, chosen = evaluate(graph, [*inputs, mask])
    masks = (mask, np.where(hidden, -np.inf, 0)) if replaced else (mask,)
    assert actual.dtype == half
    assert_close(actual, exact_attention(*inputs, 0.25, masks), 2 * HALVES[half])
    assert "attention" in chosen
    assert chosen <= {"attention", "elementwise"}


def fused(graph, inputs):
    return "attention" in rules(lower(graph_of(graph, inputs), SM_90))


def test_what_is_needed_elsewhere_is_computed_as_it_is_written():
    inputs = [normal(number, 2, 20, 16) for number in range(3)]
    assert fused(attention_of(), inputs)
    assert not fused(attention_of(weights_too=True), inputs)
    assert not fused(attention_of(half=None), inputs)


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 3, 16), (2, 20, 16), (2, 20, 16)],  # few queries are products of few rows
        [(2, 20, 16), (1, 20, 16), (1, 20, 16)],  # batches that differ
        [(20, 16), (20, 16), (20, 130)],  # values that fill the registers
    ],
)
def test_two_products_where_one_kernel_does_not_fit(shapes):
    assert not fused(attention_of(), [normal(number, *shape) for number, shape in enumerate(shapes)])


def test_one_kernel_where_it_is_estimated_to_take_less(monkeypatch):
    monkeypatch.undo()
    assert choose_attention_tile(Attention((1, 12), 128, 128, 64, 64), 132, "float16", copies=3) is not None
    assert choose_attention_tile(Attention((1, 16), 2048, 2048, 64, 64), 132, "bfloat16", copies=0) is not None
    assert choose_attention_tile(Attention((1, 16), 2048, 2048, 256, 256), 132, "float16", copies=0) is None


@needs_headers
@pytest.mark.parametrize(
    ("rows", "width", "half", "arch"),
    [
        (300, 128, "float16", "sm_90"),
        *slow(
            *(
                (*sizes, half, arch)
                for sizes in ((512, 64), (197, 80))
                for half in HALVES
                for arch in ("sm_80", "sm_90")
            )
        ),
    ],
)
def test_machine_code_without_spills(rows, width, half, arch, tmp_path):
    inputs = [np.zeros((12, rows, width), "float32")] * 3
    lowered = lower(graph_of(attention_of(masks=[causal(rows, rows)], half=half), inputs), cuda(arch))
    with cuda(arch):
        source = cuda_source(tvm.compile(module_of_kernels(lowered), target=cuda(arch)))
    assert "nvcuda::wmma::mma_sync" in source
    counted = {kernel.name: kernel.shared_bytes for kernel in kernels_of(source)}
    for assembled in compile_with_nvcc(source, arch, tmp_path):
        assert assembled.spilled_bytes == 0, assembled
        assert assembled.shared_bytes == counted[assembled.name] <= MOST_STATIC_SHARED_BYTES, assembled

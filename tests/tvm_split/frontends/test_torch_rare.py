"""Torch at the edges: statistics of the batch, rows masked altogether, infinities, tensors without elements.

Each is compiled both with TVM's default pipeline and as a stage, since either can be wrong alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.helpers.frontends.comparison import assert_equal_to_source, run, run_as_stage  # noqa: E402
from tests.helpers.frontends.torch_cases import Function  # noqa: E402
from tvm_split.frontends import load_model  # noqa: E402


def check(source: nn.Module | Callable[..., Any], *inputs: Any) -> None:
    module = source if isinstance(source, nn.Module) else Function(source)
    model = load_model(module.eval(), inputs)
    assert model.example_inputs is not None
    for computed in (run, run_as_stage):
        assert_equal_to_source(model, model.example_inputs, computed=computed)


class NormOfBatch(nn.Module):
    """Normalizes by the batch, whatever the statistics are that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("variance", torch.tensor([2.0, 3.0, 4.0]))
        self.weight, self.bias = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Any) -> Any:
        return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, training=True)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (2, 3, 4, 4)])
def test_batch_norm_that_trains_uses_the_statistics_of_the_batch(shape: Sequence[int]) -> None:
    check(NormOfBatch(), torch.randn(shape) * 2 + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_that_trains_gives_the_statistics_it_was_given_back_changed(dtype: Any) -> None:
    def norm(x: Any, mean: Any, variance: Any) -> Any:
        return F.batch_norm(x, mean, variance, training=True, momentum=0.3), mean * 1, variance * 1

    check(norm, torch.randn(4, 3, 5).to(dtype) * 2 + 1, torch.tensor([1.0, 2, 3]), torch.tensor([2.0, 3, 4]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_nothing_is_left_of_a_shift_beyond_the_width(dtype: Any) -> None:
    width = torch.iinfo(dtype).bits
    x = torch.tensor([1, 127, 7, 100, 1, 100]).to(dtype)
    x[3] = x[3] if dtype is torch.uint8 else -x[3]
    bits = torch.tensor([width, width + 1, width - 1, 100, 64, 1], dtype=dtype)
    check(lambda x, bits: (x << bits, x >> bits, x << width, x >> width, x << 1, x >> 1), x, bits)
    if dtype is not torch.uint8:
        check(lambda x, bits: (x << bits, x >> bits), x, torch.tensor([-1, -width, 0, -2, 1, 2], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_remainders_of_infinities_and_zeros(dtype: Any) -> None:
    infinity, nan = math.inf, math.nan
    x = torch.tensor([5, -5, 5, -5, infinity, 0, 3, nan, 1, 5.5, -5.5, 5.5, -5.5, 0, 6], dtype=dtype)
    y = torch.tensor(
        [infinity, infinity, -infinity, -infinity, 2, 3, 0, 1, nan, 2, 2, -2, -2, infinity, -3], dtype=dtype
    )
    check(lambda x, y: (torch.remainder(x, y), torch.fmod(x, y), torch.remainder(x, 2.5), torch.remainder(7, y)), x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["boolean", "infinite", "constant"])
def test_attention_to_nothing_is_zero(dtype: Any, kind: str) -> None:
    allowed = torch.ones(4, 4, dtype=torch.bool)
    allowed[1], allowed[2, 1] = False, False
    mask = torch.zeros(4, 4, dtype=dtype).masked_fill(~allowed, -math.inf) if kind == "infinite" else allowed
    query, key, value = (torch.randn(1, 2, 4, 8).to(dtype) for _ in range(3))
    if kind == "constant":
        check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), query, key, value)
    else:
        check(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), query, key, value, mask)


@pytest.mark.parametrize("needs_weights", [False, True])
def test_a_sequence_of_nothing_but_padding(needs_weights: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    padding = torch.tensor([[False] * 4, [True] * 4])

    def attend(x: Any, padding: Any) -> Any:
        return attention(x, x, x, key_padding_mask=padding, need_weights=needs_weights)[0]

    check(attend, torch.randn(2, 4, 8), padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [3, 64])
def test_softmax_of_rows_of_infinities_and_nan(dtype: Any, length: int) -> None:
    x = torch.randn(7, length).to(dtype)
    x[1], x[2, 1:], x[3, 0], x[4, 1] = -math.inf, -math.inf, math.inf, math.nan
    x[5], x[6, 1:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    check(lambda x: (torch.softmax(x, -1), torch.softmax(x, 0), torch.log_softmax(x, -1), torch.log_softmax(x, 0)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_extremes_of_infinities(dtype: Any) -> None:
    x = torch.tensor([[1, 2, 3], [-math.inf] * 3, [math.inf] * 3], dtype=dtype)

    def extremes(x: Any) -> Any:
        return x.amax(-1), x.amin(-1), x.amax(0, keepdim=True), x.amin(0), x.max(), x[1].max(), x[2].min()

    model = load_model(Function(extremes).eval(), (x,))
    assert model.example_inputs is not None
    assert_equal_to_source(model, model.example_inputs, computed=run_as_stage)


def test_tensors_without_elements() -> None:
    def joined(x: Any) -> Any:
        corner = torch.block_diag(x, torch.zeros(0, 3), torch.ones(2, 0), torch.ones(1, 0))
        return corner, torch.cat([x, torch.zeros(0, 2)]), x[:0].sum(0), x[:, :0] @ torch.zeros(0, 3)

    check(joined, torch.randn(2, 2))


@pytest.mark.parametrize("sizes", [[0, 2], [2, 0], [1, 0, 0, 1]])
def test_parts_without_elements(sizes: list[int]) -> None:
    check(lambda x: x.split(sizes), torch.randn(2, 3))

"""Torch at the edges: statistics of the batch, rows masked altogether, infinities, tensors without elements.

Each is compiled both with TVM's default pipeline and as a stage, since either can be wrong alone.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.frontends.comparison import assert_equal_to_source, run, run_as_stage
from tests.helpers.frontends.torch_case import Function, Group
from tvm_split.frontends import load_model

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check(source: nn.Module | Callable[..., Any], *inputs: Any) -> None:
    model = load_model(as_module(source), inputs)
    assert model.example_inputs is not None
    for computed in (run, run_as_stage):
        assert_equal_to_source(model, model.example_inputs, computed=computed)


def as_module(source: nn.Module | Callable[..., Any]) -> nn.Module:
    return (source if isinstance(source, nn.Module) else Function(source)).eval()


@contextmanager
def together() -> Iterator[Callable[..., None]]:
    """Compile all cases that are checked inside as one network; each alone if that fails, to name the failing one."""
    cases: list[tuple[nn.Module, tuple[Any, ...]]] = []
    yield lambda source, *inputs: cases.append((as_module(source), inputs))
    modules, inputs = zip(*cases, strict=True)
    try:
        check(Group(modules), *inputs)
    except Exception:
        for module, alone in cases:
            check(module, *alone)
        raise


class NormOfBatch(nn.Module):
    """A batch norm that always normalizes by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("variance", torch.tensor([2.0, 3.0, 4.0]))
        self.weight, self.bias = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Any) -> Any:
        return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, training=True)


def test_batch_norm_that_trains_uses_the_statistics_of_the_batch() -> None:
    with together() as check:
        for shape in ((4, 3), (4, 3, 5), (2, 3, 4, 4)):
            check(NormOfBatch(), torch.randn(shape) * 2 + 1)


def test_batch_norm_that_trains_gives_the_statistics_it_was_given_back_changed() -> None:
    def norm(x: Any, mean: Any, variance: Any) -> Any:
        return F.batch_norm(x, mean, variance, training=True, momentum=0.3), mean * 1, variance * 1

    with together() as check:
        for dtype in (torch.float32, torch.bfloat16):
            mean, variance = torch.tensor([1.0, 2, 3]), torch.tensor([2.0, 3, 4])
            check(norm, torch.randn(4, 3, 5).to(dtype) * 2 + 1, mean, variance)


def test_nothing_is_left_of_a_shift_beyond_the_width() -> None:
    with together() as check:
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
            width = torch.iinfo(dtype).bits
            x = torch.tensor([1, 127, 7, 100, 1, 100]).to(dtype)
            x[3] = x[3] if dtype is torch.uint8 else -x[3]
            bits = torch.tensor([width, width + 1, width - 1, 100, 64, 1], dtype=dtype)
            check(lambda x, bits, w=width: (x << bits, x >> bits, x << w, x >> w, x << 1, x >> 1), x, bits)
            if dtype is not torch.uint8:
                bits = torch.tensor([-1, -width, 0, -2, 1, 2], dtype=dtype)
                check(lambda x, bits: (x << bits, x >> bits), x, bits)


def test_remainders_of_infinities_and_zeros() -> None:
    infinity, nan = math.inf, math.nan
    x = torch.tensor([5, -5, 5, -5, infinity, 0, 3, nan, 1, 5.5, -5.5, 5.5, -5.5, 0, 6])
    y = torch.tensor([infinity, infinity, -infinity, -infinity, 2, 3, 0, 1, nan, 2, 2, -2, -2, infinity, -3])

    def remainders(x: Any, y: Any) -> Any:
        return torch.remainder(x, y), torch.fmod(x, y), torch.remainder(x, 2.5), torch.remainder(7, y)

    with together() as check:
        for dtype in (torch.float16, torch.float32, torch.float64):
            check(remainders, x.to(dtype), y.to(dtype))


@pytest.mark.parametrize("kind", ["boolean", "infinite", "constant"])
def test_attention_to_nothing_is_zero(kind: str) -> None:
    allowed = torch.ones(4, 4, dtype=torch.bool)
    allowed[1], allowed[2, 1] = False, False

    def attend(q: Any, k: Any, v: Any, mask: Any = allowed) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    with together() as check:
        for dtype in FLOATS:
            mask = torch.zeros(4, 4, dtype=dtype).masked_fill(~allowed, -math.inf) if kind == "infinite" else allowed
            tensors = [torch.randn(1, 2, 4, 8).to(dtype) for _ in range(3)]
            check(attend, *tensors, *([] if kind == "constant" else [mask]))


def test_a_sequence_of_nothing_but_padding() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    padding = torch.tensor([[False] * 4, [True] * 4])

    def attend(x: Any, padding: Any, needs_weights: bool) -> Any:
        return attention(x, x, x, key_padding_mask=padding, need_weights=needs_weights)[0]

    with together() as check:
        for needs_weights in (False, True):
            check(partial(attend, needs_weights=needs_weights), torch.randn(2, 4, 8), padding)


def test_softmax_of_rows_of_infinities_and_nan() -> None:
    def softmaxes(x: Any) -> Any:
        return torch.softmax(x, -1), torch.softmax(x, 0), torch.log_softmax(x, -1), torch.log_softmax(x, 0)

    with together() as check:
        for dtype, length in itertools.product(FLOATS, (3, 64)):
            x = torch.randn(7, length).to(dtype)
            x[1], x[2, 1:], x[3, 0], x[4, 1] = -math.inf, -math.inf, math.inf, math.nan
            x[5], x[6, 1:] = torch.finfo(dtype).min, torch.finfo(dtype).min
            check(softmaxes, x)


def test_nan_stays_where_torch_keeps_it() -> None:
    """The operators that lose NaN are listed in docs/models.md."""

    def operations(x: Any) -> Any:
        return (
            *(torch.maximum(x, x.flip(-1)), torch.minimum(x, x[0]), x.clamp(-1, 1), F.relu(x)),
            *(torch.where(x > 0, x, -x), x.masked_fill(x > 0, 5.0), torch.where(x.isnan(), torch.zeros(()), x)),
            *(F.avg_pool2d(x, 2), x.mean(-1), x.cumsum(-1), torch.logsumexp(x, -1), torch.sign(x), torch.tanh(x)),
        )

    x = torch.randn(2, 3, 6, 6)
    x[0, 0, 0, 0] = x[0, 1, 2, 5] = x[1, 2, 5, 5] = math.nan
    x[1, 0, 3, 3], x[1, 0, 4, 4] = math.inf, -math.inf
    for dtype in (torch.float32, torch.float64):
        model = load_model(as_module(operations).eval(), (x.to(dtype),))
        assert_equal_to_source(model, [x.to(dtype).numpy()], computed=run_as_stage)


def test_sorting_nan_and_small_dtypes() -> None:
    """NaN is greater than infinity, and infinity greater than the greatest finite number."""

    def sorts(x: Any) -> Any:
        down = x.sort(dim=0, descending=True, stable=True)
        return *x.sort(dim=-1, stable=True), *down, x.sort(0).values, x.argsort(dim=-1, stable=True)

    def selections(x: Any) -> Any:
        best, least, even = x.topk(3), x.topk(2, 0, largest=False), x[:, 1:].median(-1, keepdim=True)
        return best.values, least.values, x.median(), *x.median(1), *even

    numbers = torch.stack([torch.randperm(7) * 16 - 48 for _ in range(4)])
    special = numbers.float()
    special[0, 1], special[1, 0], special[2, 3] = math.nan, math.inf, -math.inf
    special[1, 3], special[1, 5], special[3, 0], special[3, 2] = math.nan, math.nan, math.inf, 3.4e38
    with together() as check:
        for dtype in (torch.bool, torch.int8, torch.float32, torch.bfloat16):
            check(sorts, (special if dtype.is_floating_point else numbers).to(dtype))
        for dtype in (torch.uint8, torch.float64, torch.bfloat16):
            check(selections, (special if dtype.is_floating_point else numbers).to(dtype))


def test_sorting_one_number() -> None:
    check(lambda x: (*x.sort(), *x.topk(1), x.median(), *x.median(0)), torch.tensor(3.0))


def test_extremes_of_infinities() -> None:
    x = torch.tensor([[1, 2, 3], [-math.inf] * 3, [math.inf] * 3])

    def extremes(x: Any) -> Any:
        return x.amax(-1), x.amin(-1), x.amax(0, keepdim=True), x.amin(0), x.max(), x[1].max(), x[2].min()

    inputs = tuple((x.to(dtype),) for dtype in FLOATS)
    model = load_model(Group([Function(extremes) for _ in FLOATS]).eval(), inputs)
    assert_equal_to_source(model, computed=run_as_stage)


def test_tensors_without_elements() -> None:
    def joined(x: Any) -> Any:
        corner = torch.block_diag(x, torch.zeros(0, 3), torch.ones(2, 0), torch.ones(1, 0))
        return corner, torch.cat([x, torch.zeros(0, 2)]), x[:0].sum(0), x[:, :0] @ torch.zeros(0, 3)

    check(joined, torch.randn(2, 2))


def test_reductions_of_no_elements() -> None:
    def reduced(x: Any) -> Any:
        nothing = x[:, :0]
        return nothing.mean(1), nothing.mean(), nothing.var(1), x[:, :1].var(1), x / nothing.sum()

    with together() as check:
        for dtype in FLOATS:
            check(reduced, torch.randn(2, 3).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_division_by_the_number_0(dtype: torch.dtype) -> None:
    def divided(x: Any) -> Any:
        zero = torch.tensor(0.0, dtype=dtype)
        rounded = [torch.div(x, 0, rounding_mode=mode) for mode in ("floor", "trunc")]
        return x / 0, x / -0.0, x / zero, x.sum() / 0, *rounded, x % 0, x % zero, torch.fmod(x, 0), x % 2

    check(divided, torch.tensor([1.5, -2, 0, -0.0, math.nan, math.inf, -math.inf]).to(dtype))


def test_parts_without_elements() -> None:
    with together() as check:
        for sizes in ([0, 2], [2, 0], [1, 0, 0, 1]):
            check(lambda x, sizes=sizes: x.split(sizes), torch.randn(2, 3))

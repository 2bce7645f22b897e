"""Calls are lowered one by one: writes in place, through views, and operators that torch would decompose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.frontends.comparison import assert_equal_to_source
from tests.helpers.frontends.torch_case import Function, Group
from tvm_split.frontends import load_model

SIDE = 3
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1) if x.dim() == 2 else x,
    "flat": lambda x: x.reshape(-1),
    "row": lambda x: x[0] if x.dim() == 2 else x,
    "rest": lambda x: x[1:],
    "chunk": lambda x: x.chunk(2)[0],
    "detached": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "new": lambda x: x * 2 + 1,
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda x, y: x.add_(y + 1),
    "add_ a number": lambda x, y: x.add_(1),
    "relu_": lambda x, y: x.relu_(),
    "hardtanh_": lambda x, y: functional.hardtanh_(x),
    "copy_": lambda x, y: x.copy_(y + 1),
    "fill_": lambda x, y: x.fill_(3),
    "set item": lambda x, y: x.__setitem__(0, 5),
    "masked_fill_": lambda x, y: x.masked_fill_(x > 0, 7),
}


def program(steps: list[tuple[str, int, int]]) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that applies the steps to the tensors that it has made so far, and returns all of them."""

    def run(x: Tensor) -> list[Tensor]:
        values = [x * 2, x - 1]
        for name, first, second in steps:
            value, other = values[first % len(values)], values[second % len(values)]
            if name in VIEWS:
                values.append(VIEWS[name](value))
            elif value.numel() and (value.shape == other.shape or name not in ("add_", "copy_")):
                written = WRITES[name](value, other)
                values.append(value if written is None else written)
        return values

    return run


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*VIEWS, *WRITES]), st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_writes_are_seen_through_all_names_of_a_memory(steps: list[tuple[str, int, int]]) -> None:
    x = torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE) - 4
    assert_equal_to_source(load_model(program(steps), (x,)))


def written_after_a_view(x: Tensor) -> list[Tensor]:
    y = x * 2
    flat = y.reshape(-1)
    y.add_(1)
    return [flat, y, flat.mul_(3)]


def written_through_an_alias(x: Tensor) -> list[Tensor]:
    y = x * 2
    alias = functional.dropout(y.detach(), training=False).contiguous()
    alias.relu_()
    return [y, y.neg_(), alias]


def written_on_both_sides_of_a_dropout(x: Tensor) -> list[Tensor]:
    y = x * 2
    alias = functional.dropout(y, training=False)
    alias.mul_(3)
    y[0] = x[1]  # torch decomposes the whole
    return [alias]


def written_in_another_dtype(x: Tensor) -> list[Tensor]:
    y = (x * 2).int()
    y.add_(torch.ones(3, dtype=torch.int64)).mul_(y)
    return [y, y.bitwise_not_()]


def transposed_in_place(x: Tensor) -> list[Tensor]:
    y = x * 2
    alias = y.detach()
    y.t_()
    return [y, alias, y + alias.unsqueeze_(0)]


def filled_from_a_constant(x: Tensor) -> list[Tensor]:
    y = torch.zeros(3, 3)
    y[1:] = x[1:]
    z = torch.tensor([1.0, 2.0, 3.0])
    z += x[0]
    return [y, z]


@pytest.mark.parametrize(
    "function",
    [
        written_after_a_view, written_through_an_alias, written_on_both_sides_of_a_dropout, written_in_another_dtype,
        transposed_in_place, filled_from_a_constant,
    ],
)  # fmt: skip
def test_a_write_through_another_name(function: Callable[[Tensor], list[Tensor]]) -> None:
    assert_equal_to_source(load_model(function, (torch.arange(9, dtype=torch.float32).reshape(3, 3) - 4,)))


def seeded_norm(kind: type[nn.Module], *arguments: Any, **options: Any) -> nn.Module:
    """A norm in evaluation mode that has seen a batch."""
    norm = kind(*arguments, **options)
    norm(torch.randn(4, arguments[0], *[3] * int(kind.__name__[-2])) * 2 + 1)
    return norm.eval()


def test_layers_that_torch_would_decompose() -> None:
    """Convolutions and norms are converted directly, with and without a batch axis; those beside them are not."""
    torch.default_generator.manual_seed(0)
    kinds = ((1, nn.Conv1d, nn.BatchNorm1d), (2, nn.Conv2d, nn.BatchNorm2d), (3, nn.Conv3d, nn.BatchNorm3d))
    cases: list[tuple[nn.Module, tuple[Tensor, ...]]] = []
    for axes, convolution, norm in kinds:
        x = torch.randn(2, 4, *range(5, 5 + axes))
        cases += [
            (convolution(4, 6, 3, stride=2, padding=1, groups=2), (x,)),
            (convolution(4, 6, 3, dilation=2, padding="same", bias=False), (x,)),
            (convolution(4, 2, 2), (x[0],)),
            (seeded_norm(norm, 4), (x,)),
            (seeded_norm(norm, 4, affine=False), (x,)),
            (norm(4, track_running_stats=False), (x,)),
        ]
    cases += [
        (nn.BatchNorm1d(4), (torch.randn(3, 4),)),
        (seeded_norm(nn.BatchNorm1d, 4).bfloat16(), (torch.randn(2, 4, 5).bfloat16(),)),
        (nn.Sequential(nn.GELU(), nn.Dropout(), nn.Hardtanh(inplace=True), nn.Flatten()), (torch.randn(2, 3, 2),)),
    ]
    modules, inputs = zip(*cases, strict=True)
    assert_equal_to_source(load_model(Group(modules).eval(), inputs))


def test_saved_programs_with_open_sizes_know_their_aliases(tmp_path: Path) -> None:
    """The file holds no aliases, and sizes are bound when it is loaded."""

    def run(x: Tensor) -> list[Tensor]:
        y = x * 2
        alias = y.detach()
        y.relu_()
        return [alias, y.reshape(x.shape[0] * 3), torch.zeros(x.shape[0], 2) + y[:, :2]]

    dynamic = ({0: torch.export.Dim("rows", min=2, max=9)},)
    path = tmp_path / "written.pt2"
    torch.export.save(torch.export.export(Function(run), (torch.randn(4, 3),), dynamic_shapes=(dynamic,)), path)
    model = load_model(path, (torch.arange(15, dtype=torch.float32).reshape(5, 3) - 7,))
    assert [output.shape for output in model.outputs] == [(5, 3), (15,), (5, 2)]
    assert_equal_to_source(model)

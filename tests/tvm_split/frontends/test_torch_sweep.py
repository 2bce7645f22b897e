"""Every common torch operator, imported, compiled and compared with torch: TVM's importers have silent faults.

Cases are exported and compiled in groups, because torch needs 0.1 s for an export of whatever size. A case whose group
fails is tried alone, so that the failure names it.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.helpers.frontends import torch_arithmetic, torch_layers, torch_views
from tests.helpers.frontends.comparison import assert_close, assert_equal_to_source, run
from tests.helpers.frontends.torch_case import Function, Group
from tvm_split.frontends import load_model
from tvm_split.frontends.torch.tensors import to_numpy

GROUP = 24
CASES = [*torch_layers.CASES, *torch_arithmetic.CASES, *torch_views.CASES]


def built(case: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.default_generator.manual_seed(0)  # torch.manual_seed remembers where it was called, for each kind of GPU
    module = case.build()
    module = module if isinstance(module, nn.Module) else Function(module)
    return module.eval(), case.inputs()


@cache
def outputs_of_group(number: int) -> list[list[np.ndarray]] | None:
    """Return TVM's outputs of each case of the group; None if the group cannot be loaded or run."""
    modules, inputs = zip(*[built(case) for case in CASES[number * GROUP : (number + 1) * GROUP]], strict=True)
    with torch.no_grad():
        counts = [
            len(pytree.tree_leaves(part(*pytree.tree_map(torch.clone, arguments))))
            for part, arguments in zip(modules, inputs, strict=True)
        ]
    try:
        model = load_model(Group(modules).eval(), inputs)
        assert model.example_inputs is not None
        outputs = iter(run(model, model.example_inputs))
    except Exception:
        return None
    return [[next(outputs) for _ in range(count)] for count in counts]


@pytest.mark.parametrize("position", range(len(CASES)), ids=[case.name for case in CASES])
def test_operator_has_torch_s_answer(position: int) -> None:
    case = CASES[position]
    module, inputs = built(case)
    group = outputs_of_group(position // GROUP)
    if group is None:
        model = load_model(module, inputs)
        assert_equal_to_source(model, tolerance=case.tolerance)
        return
    alone = answers(module, inputs)
    assert len(group[position % GROUP]) == len(alone)
    for actual, expected in zip(group[position % GROUP], alone, strict=True):
        assert (str(actual.dtype), actual.shape) == (str(expected.dtype), expected.shape)
        assert_close(actual, expected, case.tolerance)


def answers(module: nn.Module, inputs: tuple[Any, ...]) -> list[np.ndarray]:
    """The module's own outputs, as arrays."""
    with torch.no_grad():
        return [to_numpy(leaf) for leaf in pytree.tree_leaves(module(*inputs))]

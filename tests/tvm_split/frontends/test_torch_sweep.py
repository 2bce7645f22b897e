"""Every common torch operator, imported, compiled and compared with torch: TVM's importers have silent faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.tvm_split.frontends.comparison import assert_equal_to_source  # noqa: E402
from tests.tvm_split.frontends.torch_cases import CASES  # noqa: E402
from tvm_split.frontends import load_model  # noqa: E402


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_operator_has_torch_s_answer(case: Any) -> None:
    torch.manual_seed(0)
    module = case.build()
    module = module if isinstance(module, nn.Module) else Function(module)
    model = load_model(module.eval(), case.inputs())
    assert model.example_inputs is not None
    assert_equal_to_source(model, model.example_inputs, case.tolerance)

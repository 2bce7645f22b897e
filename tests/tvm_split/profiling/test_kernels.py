import torch
import tvm
from torch import nn
from tvm import te, tirx

import tvm_split
from tvm_split.compiler.targets import host_target
from tvm_split.profiling.kernels import (
    is_safe_to_time,
    shared_weight_bytes,
    target_code,
)


def elementwise(body, dtype: str = "int32") -> tirx.PrimFunc:
    x, y = te.placeholder((4,), dtype, name="x"), te.placeholder((4,), dtype, name="y")
    return te.create_prim_func([x, y, te.compute((4,), lambda i: body(x[i], y[i]))])


def test_division_by_what_is_read_is_not_tried() -> None:
    assert not is_safe_to_time(elementwise(tvm.tirx.floordiv))
    assert not is_safe_to_time(elementwise(lambda x, y: tvm.tirx.truncmod(x, y + 1)))
    assert is_safe_to_time(elementwise(lambda x, y: tvm.tirx.floordiv(x + y, 3)))
    assert is_safe_to_time(elementwise(lambda x, y: x / y, "float32"))


def test_calls_know_their_operands_weights_and_consumers() -> None:
    shared = nn.Linear(16, 16)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = shared, nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(torch.relu(self.one(torch.relu(self.one(x)))))

    model = tvm_split.load_model(Network().eval(), (torch.zeros(2, 16),))
    code = target_code(model, host_target(1), None)
    first, second, third = (call for call in code.calls if call.weights)
    assert first.digest == second.digest != third.digest
    assert first.weights == second.weights
    assert shared_weight_bytes([first, second]) == 4 * 16 * 16
    # As they are prepacked: the last layer's eight columns are padded to whole vectors.
    assert shared_weight_bytes(code.calls) == code.weight_bytes >= 4 * (16 * 16 + 16 * 8)
    assert first.activation_bytes == 2 * 4 * 2 * 16
    assert first.timed.arguments[-1].shape == (2, 16)
    assert [after for call in code.calls for after in call.consumers] == list(range(1, len(code.calls)))

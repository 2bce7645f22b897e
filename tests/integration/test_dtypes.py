"""Half precision and integers keep their dtype in weights, on the wire and in results."""

import numpy as np
import pytest
import torch
from torch import nn

import tvm_split


class Mixed(nn.Module):
    """Takes words and numbers; returns numbers of a given dtype and an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.conv = nn.Conv2d(2, 16, 3, padding=1)
        self.last = nn.Linear(16 * 32, 6)

    def forward(self, words: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.words(words)
        features = torch.relu(self.conv(image))
        scores = self.last((features.flatten(2) * embedded.mean(1, keepdim=True)).flatten(1))
        return scores, scores.argmax(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), (torch.bfloat16, 1e-1), (torch.float64, 1e-9)])
def test_types_stay(dtype: torch.dtype, tolerance: float, three_workers: tvm_split.Cluster) -> None:
    torch.manual_seed(0)
    module = Mixed().eval().to(dtype)
    inputs = (torch.tensor([[1, 7, 49]]), torch.randn(1, 2, 4, 8).to(dtype))
    split = {"machine-a": ["words"], "machine-b": ["conv"], "machine-c": ["last"]}
    with tvm_split.compile_and_deploy(module, inputs, three_workers, split=split) as deployment:
        assert [stage.machine for stage in deployment.stages] == ["machine-a", "machine-b", "machine-c"]
        scores, best = deployment.run(*inputs)
    with torch.no_grad():
        expected, expected_best = module(*inputs)
    assert str(dtype) == f"torch.{scores.dtype}"
    assert best.dtype == np.int64
    right = expected.double().numpy()
    assert np.abs(scores.astype(np.float64) - right).max() <= tolerance * np.abs(right).max()
    # In half precision, the larger of two nearly equal numbers may differ.
    np.testing.assert_allclose(
        right[0, best[0]], right[0, int(expected_best)], atol=2 * tolerance * np.abs(right).max()
    )

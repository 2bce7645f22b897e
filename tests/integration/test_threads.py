"""Several networks in threads of one process: TVM and the frameworks have process-wide state."""

import numpy as np
import torch
from torch import nn

from tests.helpers.frontends.onnx_cases import node_model, random
from tests.helpers.frontends.threads import assert_same_in_threads


def test_networks_are_loaded_and_compiled_at_the_same_time() -> None:
    image, row = random(1, 3, 8, 8), random(2, 6)
    sources = [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)).eval(), (image,)),
        (nn.Sequential(nn.Linear(6, 5), nn.Softmax(-1), nn.Linear(5, 2)).eval(), (row,)),
        (node_model("Conv", [image], [random(4, 3, 3, 3)]), (image,)),
        (node_model("Resize", [image], [None, np.float32([1, 1, 1.3, 2])], mode="linear"), (image,)),
    ]
    assert_same_in_threads(sources)


def test_networks_are_traced_while_others_run() -> None:
    """A torch network is a reference in its own process: it runs while another thread exports one."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)).eval()
    assert_same_in_threads([(network, (random(rows, 6),)) for rows in (1, 2)])

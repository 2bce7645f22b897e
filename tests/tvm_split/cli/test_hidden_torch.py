"""Commands import TVM without torch, and models of torch all the same."""

import subprocess
import sys

CODE = """
import sys
from tvm_split.cli.hidden_torch import hide_torch_from_tvm
hide_torch_from_tvm()
import tvm.relax
assert "torch" not in sys.modules

import torch, tvm_split
network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
x = torch.randn(2, 4)
with tvm_split.compile_and_deploy(network, (x,), tvm_split.Cluster.in_process(1)) as deployment:
    assert torch.allclose(torch.from_numpy(deployment.run(x)[0]), network(x), atol=1e-5)
print("right")
"""


def test_tvm_finds_no_torch_and_everybody_else_does():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr

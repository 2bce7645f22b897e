"""A small graph for partitions: a skip connection, a second consumer, a mask, two inputs, several outputs."""

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I, relax as R

from relay_passes import partition as passes
from relay_passes.communication import Parts
from tvm_split.compiler.stage import code_of
from tvm_split.placement.problem import Stage

LLVM = tvm.target.Target({"kind": "llvm"})
QUICKLY = tvm.target.Target({"kind": "llvm", "opt-level": 0})
"""A target for tests in which compiling takes longer than computing."""


@I.ir_module
class Whole:
    @R.function
    def main(x: R.Tensor((1, 16), "float32"), y: R.Tensor((1, 8), "float32")):
        with R.dataflow():
            mask = R.ones(R.shape([1, 8]), "float32")
            conv1 = R.nn.relu(x)
            halves = R.split(conv1, 2, 1)
            left = halves[0]
            right = halves[1]
            conv2 = R.add(left, mask)
            conv3 = R.multiply(left, y)
            joined = R.concat((conv2, conv3), axis=1)
            skip = R.add(joined, conv1)
            other = R.multiply(right, mask)
            result = (skip, x, other, y, other)
            R.output(result)
        return result


STAGE_OF = {
    **dict.fromkeys(("mask", "conv1", "halves", "left", "right"), 0),
    **dict.fromkeys(("conv2", "conv3", "joined", "other"), 1),
    "skip": 2,
}


def partition(module: tvm.IRModule, stage_of: Mapping[str, int] = STAGE_OF, machines: str = "aba") -> Parts:
    """Return the stages of a module, one per letter on the machine that it names, each with its computation."""
    stages = [Stage((f"machine-{letter}",), (), name=f"stage_{index}") for index, letter in enumerate(machines)]
    computations = passes.partition(module, stage_of, [stage.name for stage in stages])
    return list(zip(stages, computations, strict=True))


def run(module: tvm.IRModule, *inputs: np.ndarray, weights: tuple = ()) -> list[np.ndarray]:
    """Compile a module without optimisations of ours, and run its function ``main``."""
    machine = relax.VirtualMachine(code_of(module, QUICKLY), tvm.cpu())
    return [value.numpy() for value in machine["main"](*[tvm.runtime.tensor(array) for array in inputs], *weights)]

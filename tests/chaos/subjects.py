"""What is run while machines fail: programs with inputs, and the outputs that they must have to the bit."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from tvm.relax import op

from rpc_runtime.program.program import Program
from tests.chaos.task import MACHINES, Arrays
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import batches_for
from tests.helpers.rpc_runtime.random_programs import programs

BATCHES = 61
"""Different micro-batches of a subject: two that follow each other differ, so that none can pass for the next."""
DRAWN = 24
"""Random programs for each number of machines."""


@dataclass(frozen=True)
class Subject:
    """A program with its blobs in a folder, micro-batches, and the outputs of each."""

    name: str
    program: Program
    blobs: Path
    batches: Sequence[Arrays]
    expected: Sequence[Arrays]


class Subjects:
    """Makes subjects, and keeps them; blobs and bundles are in ``folder``. ``number`` seeds all random programs."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number
        self._drawn = cache(self._drawn_programs)
        self.random_one = cache(self._random_one)
        self.network = cache(self._network)

    def chosen(self, source: random.Random, machines: int) -> Subject:
        """Return a random program, or, for three machines, now and then a small network."""
        if machines == 3 and source.random() < 0.4:
            return self.network(source.choice(tuple(NETWORKS)))
        return self.random_one(machines, source.randrange(DRAWN))

    def _drawn_programs(self, machines: int) -> list[Program]:
        drawn: list[Program] = []

        @seed(self._number)
        @settings(
            max_examples=DRAWN,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(programs(most_replicas=2, machines=MACHINES[:machines]))
        def draw(program: Program) -> None:
            drawn.append(program)

        draw()
        return drawn

    def _random_one(self, machines: int, index: int) -> Subject:
        drawn = self._drawn(machines)
        index %= len(drawn)
        maker = ProgramMaker(self._folder / "blobs")
        program, compute = compiled(drawn[index], maker)
        batches = batches_for(program, BATCHES)
        name = f"random program {index} for {machines} machines"
        return Subject(name, program, maker.folder, batches, [compute(batch) for batch in batches])

    def _network(self, kind: str) -> Subject:
        import torch

        import tvm_split

        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, padding=1)]
        network = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 256, 10))
        images = torch.randn(BATCHES, 1, 3, 16, 16)
        cluster = tvm_split.Cluster.in_process(3, threads=1)
        model = tvm_split.load_model(network.eval(), (images[0],))
        bundle = tvm_split.compile(model, NETWORKS[kind](tvm_split, model, cluster), verify=False)
        bundle.save(self._folder / kind)
        with tvm_split.deploy(bundle, cluster) as deployment:
            expected = [tuple(deployment.run(image)) for image in images]
        blobs, batches = self._folder / kind / "blobs", [[image.numpy()] for image in images]
        return Subject(f"network in {kind}", bundle.program, blobs, batches, expected)


def _in_stages(tvm_split: Any, model: Any, cluster: Any) -> Any:
    split = {"machine-a": ["0"], "machine-b": ["2"], "machine-c": ["4"]}
    return tvm_split.plan(model, cluster, split=split)


def _in_replicas(tvm_split: Any, model: Any, cluster: Any) -> Any:
    plan = _in_stages(tvm_split, model, cluster)
    first, _, last = plan.stages
    middle = replace(plan.stages[1], machines=("machine-b", "machine-c"), shares=(0.6, 0.4))
    return replace(plan, stages=(first, middle, last))


def _in_shards(tvm_split: Any, model: Any, cluster: Any) -> Any:
    shares = {"machine-a": 0.4, "machine-b": 0.3, "machine-c": 0.3}
    shard = tvm_split.Shard("0", "3", "rows", shares, "each")
    return tvm_split.plan(model, cluster, shards=[shard])


NETWORKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "stages": _in_stages,
    "replicas": _in_replicas,
    "shards": _in_shards,
}
"""How a small network is split."""


def compiled(drawn: Program, maker: ProgramMaker) -> tuple[Program, Callable[[Arrays], Arrays]]:
    """Return a drawn program whose stages compute with weights of their own, and the same computation in numpy."""
    maker.inputs += drawn.inputs
    weights = {}
    for name, replicas in drawn.replicas.items():
        first = replicas[0]
        weights[name] = np.arange(2, dtype=np.int64) + 3 * first.index + 2
        outputs = [tensor.name for tensor in first.outputs]
        body = _body(len(first.inputs), len(outputs))
        maker.stage(name, first.machine, first.inputs, body, outputs, {"w": weights[name]})
        if len(replicas) > 1:
            maker.replicate([stage.machine for stage in replicas], first.replica_schedule)
    program = replace(maker.program(drawn.outputs), codecs=drawn.codecs)

    def compute(batch: Arrays) -> Arrays:
        values = {tensor.name: array for tensor, array in zip(drawn.inputs, batch, strict=True)}
        for name, (first, *_) in drawn.replicas.items():
            total = values[first.inputs[0].name]
            for tensor in first.inputs[1:]:
                total = total + total + values[tensor.name]
            for tensor in first.outputs:
                total = total * weights[name]
                values[tensor.name] = total
        return tuple(values[tensor.name] for tensor in drawn.outputs)

    return program, compute


def _body(inputs: int, outputs: int) -> Callable[..., Sequence[Any]]:
    def body(*variables: Any) -> Sequence[Any]:
        total, weight = variables[0], variables[inputs]
        for variable in variables[1:inputs]:
            total = op.add(op.add(total, total), variable)
        results = []
        for _ in range(outputs):
            total = op.multiply(total, weight)
            results.append(total)
        return results

    return body

"""Compare simulated and measured throughput and latency of deployments on 2 to 16 local workers.

The networks are a chain of equal convolutions, linear layers so small that transfers take longer than computing,
ResNet-50, and the demonstration's network. A plan is simulated before it is measured. If there are fewer cores than
workers, the workers share them, in the simulation too. ``--set blocks=24 micro-batches=200``.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

import tvm_split
from scripts.harness import Case, Limit, Setup, Side
from scripts.processes import Figures
from scripts.sides import deployed, network
from tvm_split.demo.demonstration import MICRO_BATCH
from tvm_split.demo.network import CHANNELS as IMAGE_CHANNELS, IMAGE_SIZE, DigitNetwork

MOST_OFF = 0.10
BLOCKS, CHANNELS, PIXELS = 24, 64, 28
LAYERS, FEATURES = 64, 64
CONVOLUTIONS, LINEAR, RESNET, DEMO = "convolutions", "linear layers", "resnet50", "demo"
CASES = (
    *((workers, CONVOLUTIONS, False) for workers in (2, 4, 8, 16)),
    (2, CONVOLUTIONS, True),
    (2, LINEAR, False),
    (8, LINEAR, False),
    (2, RESNET, False),
    (3, DEMO, False),
)
"""The cases: the number of workers, the network, and whether the workers are replicas of one stage."""


def module_of(name: str, blocks: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name == LINEAR:
        return nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS)]).eval(), torch.randn(1, FEATURES)
    if name == RESNET:
        module, (x,) = network(name)
        return module, x
    if name == DEMO:
        return DigitNetwork().eval(), torch.randn(MICRO_BATCH, IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    layers = [nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(*layers).eval(), torch.randn(1, CHANNELS, PIXELS, PIXELS)


def measure(
    deployment: tvm_split.Deployment, x: torch.Tensor, micro_batches: int, period: float, latency: float
) -> Figures:
    report = tvm_split.bench(deployment, [(x,)], rounds=3, micro_batches=micro_batches)
    measured_period, measured_latency = report.period.measured or 0.0, report.latency.measured or 0.0
    return {
        "period_seconds": measured_period,
        "period_off": abs(period / measured_period - 1),
        "latency_seconds": measured_latency,
        "latency_off": abs(latency / measured_latency - 1),
    }


def sides(workers: int, name: str, are_replicas: bool, setup: Setup) -> Sequence[Side]:
    module, x = module_of(name, int(setup.options.values.get("blocks", BLOCKS)))
    model = tvm_split.load_model(module, (x,))
    cluster = setup.until_end.enter_context(tvm_split.Cluster.local(workers))
    stages = 1 if are_replicas else workers
    plan = tvm_split.plan(model, cluster, stages=stages, replicas=are_replicas, refresh=True)
    simulated = tvm_split.simulate(plan)
    assert simulated.period_seconds is not None
    assert simulated.single is not None
    period, latency = simulated.period_seconds, simulated.single.percentiles_seconds[50]
    deployment = deployed(model, plan, cluster, setup.until_end)
    count = int(setup.options.values.get("micro-batches", 200))
    facts = {"simulated_period_seconds": period, "simulated_latency_seconds": latency}
    return [Side("measured", partial(measure, deployment, x, count, period, latency), facts)]


CASE = Case(
    subjects={
        f"{workers} {'replicas' if are_replicas else 'workers'}, {name}": partial(sides, workers, name, are_replicas)
        for workers, name, are_replicas in CASES
    },
    limits=(Limit("period_off", MOST_OFF), Limit("latency_off", MOST_OFF)),
    rounds=3,
)

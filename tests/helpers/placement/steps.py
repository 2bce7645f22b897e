"""Steps of plans, written by hand."""

import random

from rpc_runtime.program.routes import CLIENT
from tests.helpers.placement.profiles import A, B, C
from tvm_split.placement.evaluate import evaluate
from tvm_split.placement.problem import Evaluation, Problem, Stage
from tvm_split.placement.step_graph import Step, StepGraph, Transfer, lower


def step(name: str, machine: str, seconds: float, contended: float | None = None, **more: float) -> Step:
    """A step on one machine; all its seconds are estimates."""
    together = seconds if contended is None else contended
    return Step(name, "stage", (machine,), (1.0,), (seconds,), (together,), (1.0,), **more)


def evaluate_stages(problem: Problem, stages: tuple[Stage, ...] | list[Stage]) -> Evaluation:
    """The evaluation of stages of pieces."""
    return evaluate(problem, lower(problem, stages))


def random_graph(seed: int) -> StepGraph:
    """Random steps that read tensors of earlier steps or of the client; tensors without a reader are outputs."""
    generator = random.Random(seed)
    names = [f"p{number}" for number in range(generator.randint(1, 9))]
    home = {name: generator.choice((A, B, C)) for name in names}
    seconds = {name: generator.choice((0.0, generator.uniform(0.01, 1.0))) for name in names}
    steps = tuple(step(name, home[name], seconds[name], seconds[name] * generator.uniform(1, 2)) for name in names)
    readers: dict[tuple[str, str], list[str]] = {}
    for number, name in enumerate(names):
        for source in generator.sample([CLIENT, *names[:number]], generator.randint(1, min(number + 1, 3))):
            readers.setdefault((source, home[name]), []).append(name)
    size = {name: generator.choice((0.0, generator.uniform(1.0, 100.0))) for name in (CLIENT, *names)}
    unread = [name for name in names if name not in {source for source, _ in readers}]
    return StepGraph(
        steps,
        (
            *(Transfer(f"of_{source}", source, tuple(ends), size[source]) for (source, _), ends in readers.items()),
            *(Transfer(f"of_{name}", name, (), size[name]) for name in unread),
        ),
    )

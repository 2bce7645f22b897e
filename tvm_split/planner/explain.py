"""Tell the user, with both numbers, when no split is worth it compared with one machine alone."""

from __future__ import annotations

from functools import partial

from tvm_split.planner.baselines import ONE_MACHINE
from tvm_split.planner.fewest_machines import MORE_MACHINES
from tvm_split.planner.plan import Plan
from tvm_split.planner.problem import objective_seconds


def one_machine_advice(plan: Plan, machines: int) -> str | None:
    """A message if no split over a cluster of ``machines`` machines is worth it, compared with one alone; else None."""
    prediction = plan.prediction
    if prediction is None or machines < 2:
        return None
    value = partial(objective_seconds, plan.objective)
    text = _rate_text if plan.objective == "throughput" else _latency_text
    alone = [each for each in prediction.baselines if each.name.startswith(ONE_MACHINE)]
    if not alone:
        return None
    best = min(alone, key=value)
    if len(prediction.machines) > 1:
        if value(best) >= value(prediction):
            return None
        return (
            f"one machine alone would be faster: {best.stages[0][0]} does {text(value(best))}, this split over "
            f"{len(prediction.machines)} machines {text(value(prediction))}; leave out what forces the split, such as "
            "a number of stages, to let the planner choose"
        )
    given_up = next((each for each in prediction.alternatives if each.name == MORE_MACHINES), None)
    if given_up is not None:
        return (
            f"more machines gain too little: {prediction.machines[0].machine} alone does {text(value(prediction))}, "
            f"the best plan over several machines {text(value(given_up))}; {prediction.why_no_more_machines}"
        )
    single = {each.stages[0][0] for each in alone}
    splits = [
        each
        for each in (*prediction.alternatives, *prediction.baselines)
        if not {name for name, _ in each.stages} <= single or len(each.stages) > 1
    ]
    if not splits or min(map(value, splits)) < value(prediction):
        return None  # a demand, not speed, is why the plan uses one machine
    return (
        f"no split is faster than one machine alone: {prediction.machines[0].machine} does {text(value(prediction))}, "
        f"the best split over several machines {text(min(map(value, splits)))}; the other machines stay idle"
    )


def _rate_text(period_seconds: float) -> str:
    return f"{1.0 / period_seconds:.4g} micro-batches a second"


def _latency_text(latency_seconds: float) -> str:
    return f"{latency_seconds * 1e3:.4g} ms"

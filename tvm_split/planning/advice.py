"""Advice to use one machine, if no split is worth it."""

from functools import partial

from tvm_split.placement.baselines import ONE_MACHINE
from tvm_split.placement.plan import Plan
from tvm_split.placement.problem import Timed, objective_seconds
from tvm_split.planning.choose import MORE_MACHINES
from tvm_split.units import number_text


def one_machine_advice(plan: Plan, machines: int) -> str | None:
    """A message if no split over a cluster of ``machines`` machines is worth it, compared with one alone; else None."""
    prediction = plan.prediction
    if prediction is None or machines < 2:
        return None
    value = partial(objective_seconds, plan.objective)

    def text(timed: Timed) -> str:
        seconds = value(timed)
        is_rate = plan.objective == "throughput"
        return f"{number_text(1 / seconds)} micro-batches/s" if is_rate else f"{number_text(seconds * 1e3)} ms"

    alone = [baseline for baseline in prediction.baselines if baseline.name.startswith(ONE_MACHINE)]
    if not alone:
        return None
    if len(prediction.machines) > 1:
        best = min(alone, key=value)
        if value(best) >= value(prediction):
            return None
        return (
            f"one machine alone would be faster: {best.stages[0][0]} does {text(best)}, this split over "
            f"{len(prediction.machines)} machines {text(prediction)}; leave out what forces the split, such as a "
            "number of stages, to let the planner choose"
        )
    single = {baseline.stages for baseline in alone}
    splits = [split for split in (*prediction.alternatives, *prediction.baselines) if split.stages not in single]
    nearest = min(splits, key=value, default=None)
    if nearest is None:
        return None
    gains, reason = "no split is faster than one machine alone", "the other machines stay idle"
    if nearest.name == MORE_MACHINES:
        gains, reason = "more machines gain too little", prediction.why_no_more_machines
    elif value(nearest) < value(prediction):
        return None  # a demand, not speed, is why the plan uses one machine
    return (
        f"{gains}: {prediction.machines[0].machine} alone does {text(prediction)}, the best split over several "
        f"machines {text(nearest)}; {reason}"
    )

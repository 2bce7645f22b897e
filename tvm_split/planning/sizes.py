"""Plans for micro-batches of several sizes, compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_split.errors import NoPlanError, PlanError
from tvm_split.model import Model
from tvm_split.placement.plan import Plan
from tvm_split.placement.prediction import Prediction


@dataclass(frozen=True)
class SizedPlan:
    """A model loaded for ``size`` samples in a micro-batch, and its plan."""

    size: int
    model: Model
    plan: Plan
    prediction: Prediction

    @property
    def samples_per_second(self) -> float:
        return self.size / self.prediction.period_seconds


def plan_sizes(
    sizes: Sequence[int], load: Callable[[int], Model], make_plan: Callable[[Model], Plan]
) -> tuple[SizedPlan, ...]:
    """Plans for micro-batches of several sizes, the best first.

    For throughput the best plan has the most samples a second, for latency it has the least latency. ``load`` loads the
    model for a size, ``make_plan`` plans it; sizes without a plan are left out.

    Raises:
        NoPlanError: no size has a plan.
        PlanError: a size is not positive or given twice.
    """
    if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise PlanError(
            f"micro-batch sizes are different whole numbers of at least 1, not {', '.join(map(str, sizes))}"
        )
    sized_plans = []
    refused = []
    for size in sizes:
        model = load(size)
        try:
            plan = make_plan(model)
        except NoPlanError as error:
            refused.append(f"of size {size}: {error}")
            continue
        if plan.prediction is None:
            raise PlanError(
                "micro-batch sizes are compared by what is predicted, and a split by hand has no prediction"
            )
        sized_plans.append(SizedPlan(size, model, plan, plan.prediction))
    if not sized_plans:
        raise NoPlanError("no micro-batch size has a plan; " + "; ".join(refused))
    if sized_plans[0].plan.objective == "latency":
        return tuple(sorted(sized_plans, key=lambda sized_plan: sized_plan.prediction.latency_seconds))
    return tuple(sorted(sized_plans, key=lambda sized_plan: -sized_plan.samples_per_second))

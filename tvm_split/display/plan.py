"""Show a plan in at most 80 columns: its stages, its prediction, the optimality gap, and the rejected plans."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from rpc_runtime.program.codecs import CODECS
from tvm_split.display.links import transport_lines
from tvm_split.display.view import Table, View, as_json, view
from tvm_split.model import Model
from tvm_split.planner.estimate import estimated_seconds
from tvm_split.planner.fewest_machines import one_machine_advice
from tvm_split.planner.micro_batches import SizedPlan
from tvm_split.planner.plan import Plan
from tvm_split.planner.prediction import ComparedPlan, MachinePrediction, Prediction
from tvm_split.planner.problem import objective_seconds
from tvm_split.planner.shard import sharding_words
from tvm_split.units import age_text, bytes_text, short_list

NOTHING = "–"
PREDICTED_HEADINGS = ("compute", "receive", "send", "memory", "est.")
PREDICTED_CAPTION = "milliseconds per micro-batch; est.: the share of computing that was not measured"
NAMES_SHOWN, MOST_NAMES = 2, 6
LONGEST_NAME = 24
MACHINES_SHOWN = 4
MOST_ROWS = 12
"""The most rows and sentences about stages; a longer plan has one row per machine, unless details are requested."""


@dataclass(frozen=True)
class PlanResult:
    """A plan, its model and its cluster's number of machines; ``sizes`` are the plans for other micro-batch sizes."""

    model: Model
    plan: Plan
    machines: int
    sizes: Sequence[SizedPlan] = ()

    @property
    def shares(self) -> list[float]:
        """Each stage's share of the model's estimated time on one core, between 0 and 1."""
        seconds = estimated_seconds(self.model.description)
        whole = sum(seconds.values()) or 1.0
        return [sum(seconds[layer] for layer in stage.layers) / whole for stage in self.plan.stages]


@view.register
def view_of_result(result: PlanResult, *, details: bool = False) -> View:
    """Return the plan, the predictions for other micro-batch sizes, and whether one machine alone is better."""
    advice = one_machine_advice(result.plan, result.machines)
    sizes = [_sizes_table(result.sizes)] if result.sizes else []
    return [*plan_parts(result.plan, result.shares, details=details), *sizes, *filter(None, [advice])]


@view.register
def view_of_plan(plan: Plan, *, details: bool = False) -> View:
    """Return the stages, their prediction, and the other plans that were considered."""
    return plan_parts(plan, [math.nan] * len(plan.stages), details=details)


@as_json.register
def result_as_json(result: PlanResult) -> dict[str, Any]:
    """Return the plan's file content, the model's inputs, the stages' shares and the prediction as JSON values."""
    model, plan = result.model, result.plan
    return {
        "model": model.name,
        "framework": model.framework,
        "inputs": [dataclasses.asdict(spec) for spec in model.inputs],
        "outputs": [dataclasses.asdict(output) for output in model.outputs],
        "stages": [
            {**dataclasses.asdict(stage), "machine": stage.machine, "estimated_share": share}
            for stage, share in zip(plan.stages, result.shares, strict=True)
        ],
        "prediction": prediction_as_json(plan),
        "sizes": [
            {
                "size": size.size,
                "samples_per_second": size.samples_per_second,
                "latency_seconds": size.prediction.latency_seconds,
                "stages": len(size.plan.stages),
            }
            for size in result.sizes
        ],
        "plan": plan.to_dict(),
    }


def plan_parts(plan: Plan, shares: Sequence[float], *, details: bool = False) -> Iterator[Table | str | Text]:
    """Yield the tables and sentences of a plan; without a prediction, only its stages.

    ``shares`` are the stages' estimated shares of the model's work. ``details`` adds the lower bound, all compared
    plans, and a row for every stage of a long plan.
    """
    prediction = plan.prediction
    is_short = not details and sum(len(stage.machines) for stage in plan.stages) > MOST_ROWS
    yield _stages_table(plan, shares, by_machine=is_short)
    lines = [*shard_lines(plan), *codec_lines(plan), *plan.remarks]
    if plan.precision != "float32":
        lines.append(f"Convolutions and products multiply in {plan.precision}, and add in float32")
    yield from lines if details else lines[:MOST_ROWS]
    if is_short or (not details and len(lines) > MOST_ROWS):
        yield Text("Every stage, and how each is shared and sends: --details", "dim")
    if prediction is None:
        return
    yield from predicted_lines(prediction, plan.objective)
    if not details:
        yield from _best_others(plan, prediction)
        yield Text("What else was considered, and how sure this is: --details", "dim")
        return
    yield ""
    yield from certificate_lines(prediction, plan.objective)
    for title, plans in (("Without a planner", prediction.baselines), ("Plans that lost", prediction.alternatives)):
        if plans:
            yield _comparison_table(title, plan, prediction, plans)
            yield from (f"• {compared.name}: {compared.why}" for compared in plans if compared.why)


def shard_lines(plan: Plan) -> list[str]:
    """Return a line for each sharded stage: each machine's shard, and what the machines exchange."""
    return [f"{stage.name} together: {sharding_words(stage)}" for stage in plan.stages if stage.sharding]


def codec_lines(plan: Plan) -> list[str]:
    """Return a line for each encoded tensor: its codec, its compression ratio, and its effect on the outputs."""
    lines = []
    for codec in plan.codecs:
        size = "" if codec.ratio is None else f", {codec.ratio:.2f} times smaller"
        error = "" if not CODECS[codec.codec].is_lossy else ", changes the outputs by an unknown share"
        if CODECS[codec.codec].is_lossy and codec.output_error is not None:
            error = f", changes the outputs by {codec.output_error:.2g} of their range"
        lines.append(f"{codec.source} → {codec.destination}: {codec.tensor} as {codec.codec}{size}{error}")
    return lines


def prediction_as_json(plan: Plan) -> dict[str, Any] | None:
    """Return the prediction with rates and each compared plan's ratio to this one, as JSON values; None without one."""
    prediction = plan.prediction
    if prediction is None:
        return None
    content = dataclasses.asdict(prediction)
    content["samples_per_second"] = prediction.samples_per_second
    for machine, row in zip(prediction.machines, content["machines"], strict=True):
        row["memory_bytes"] = machine.memory_bytes
    for name, plans in (("baselines", prediction.baselines), ("alternatives", prediction.alternatives)):
        for compared, row in zip(plans, content[name], strict=True):
            row["ratio"] = ratio_to_plan(compared, prediction, plan.objective)
    return content


def _sizes_table(sizes: Sequence[SizedPlan]) -> Table:
    """Return a table of the predictions for every micro-batch size, the chosen one first."""
    rows = [
        (
            str(size.size),
            str(len(size.plan.stages)),
            f"{size.samples_per_second:.4g}",
            _ms(size.prediction.latency_seconds),
        )
        for size in sizes
    ]
    return Table("micro-batch sizes", (), ("size", "stages", "samples a second", "latency ms"), rows)


def ratio_to_plan(compared: ComparedPlan, prediction: Prediction, objective: str) -> float:
    """Return how many times as good as the predicted plan another plan is, by the objective; below 1 is worse."""
    value = objective_seconds(objective, compared)
    return objective_seconds(objective, prediction) / value if value > 0 else 1.0


def predicted_lines(prediction: Prediction, objective: str) -> list[str]:
    """Return lines with throughput and latency (the objective first), what limits them, and the measurements' age."""
    throughput = (
        f"{prediction.samples_per_second:.4g} micro-batches a second (one every {_ms(prediction.period_seconds)} ms)"
    )
    latency = f"{_ms(prediction.latency_seconds)} ms for one alone"
    first, second = (latency, throughput) if objective == "latency" else (throughput, latency)
    proven = f"at most {prediction.gap:.2%} from the best" if prediction.gap > 0 else "proven the best"
    profiled_at = prediction.profiled_at
    age = f"measured {age_text(time.time() - profiled_at)} ago" if profiled_at > 0 else "estimated"
    return [
        f"Predicted: {first}; {second}",
        f"Limited by {prediction.limiting}; {proven}; {age}",
        *cores_lines(prediction),
        *transport_lines((link.source, link.destination, link.transport) for link in prediction.links),
        *(f"Doubtful: {doubt}" for doubt in prediction.doubts),
    ]


def cores_lines(prediction: Prediction) -> list[str]:
    """Return a line for each set of oversubscribed cores: its machines, its busy time and the resulting rate limit."""
    return [
        f"{short_list(load.machines)} share {'one core' if load.cores == 1 else f'{load.cores} cores'}: a result takes "
        f"{_ms(load.busy_seconds)} ms of one, so no more than {1 / load.least_period_seconds:.4g} come a second"
        for load in prediction.shared_cores
        if load.oversubscription > 1 and load.busy_seconds > 0
    ]


def certificate_lines(prediction: Prediction, objective: str) -> list[str]:
    """Return lines with the lower bound, the optimality gap and the search method."""
    value = "latency" if objective == "latency" else "period"
    bound = f"Lower bound: no plan has a {value} below {_ms(prediction.lower_bound_seconds)} ms; "
    bound += f"this one's gap to it is {prediction.gap:.2%}" if prediction.gap > 0 else "this one reaches it"
    lines = [
        bound,
        f"Method: {prediction.method}",
        f"Bubble: machines wait {prediction.bubble:.1%} of the time. In flight: {prediction.in_flight} micro-batches",
    ]
    if prediction.why_no_more_machines:
        lines.append(f"Why no more machines: {prediction.why_no_more_machines}")
    return lines


def _best_others(plan: Plan, prediction: Prediction) -> list[str]:
    """Return a line each for the best baseline and the best alternative plan."""
    return [
        f"{title}: {plans[0].name}, {ratio_to_plan(plans[0], prediction, plan.objective):.2f} times as good"
        for title, plans in (("Best without a planner", prediction.baselines), ("Next", prediction.alternatives))
        if plans
    ]


def memory_text(used: float, limit: float | None) -> str:
    """Return the used memory as text, with its share of the limit if there is one."""
    if not limit:
        return bytes_text(used) if limit is None else f"{bytes_text(used)} of 0 B"
    return f"{bytes_text(used)} {used / limit:.0%}"


def _stages_table(plan: Plan, shares: Sequence[float], *, by_machine: bool) -> Table:
    """Return a table with a row per stage and machine, or per machine.

    Each machine's times and memory are in its first row only. Without a prediction, rows have the stages' estimated
    shares; for a sharded stage, each machine's part.
    """
    predicted = {machine.machine: machine for machine in plan.prediction.machines} if plan.prediction else None
    rows = []
    for stage, name, layers, share in (_machine_rows if by_machine else _stage_rows)(plan, shares):
        machine = predicted.pop(name, None) if predicted is not None else None
        cells = [_share_text(share)] if predicted is None else [""] * 5 if machine is None else _cells(machine)
        rows.append((stage, name, layers, *cells))
    headings = ("estimated share",) if predicted is None else PREDICTED_HEADINGS
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    title = f"{plan.model}: {stages} for {plan.objective}, {plan.origin}"
    texts = ("stage", "machine", "layers")
    caption = "" if predicted is None else PREDICTED_CAPTION
    return Table(title, texts, headings, rows, caption, min_widths={"layers": 14}, left=("memory",))


def _stage_rows(plan: Plan, shares: Sequence[float]) -> Iterator[tuple[str, str, str, float]]:
    """Yield the stage, the machine, the stage's layers, and the machine's share of the model's work in it."""
    most = MOST_NAMES if plan.prediction is None else NAMES_SHOWN
    for stage, share in zip(plan.stages, shares, strict=True):
        beside = f"shares the {stage.sharding.axis}" if stage.sharding else "takes turns"
        for name, part in zip(stage.machines, stage.shares, strict=True):
            layers = _layers_text(stage.layers, most) if name == stage.machine else beside
            yield stage.name, name, layers, share * part if stage.sharding else share


def _machine_rows(plan: Plan, shares: Sequence[float]) -> Iterator[tuple[str, str, str, float]]:
    """Yield the number of stages, the machine, their number of layers, and the machine's share of the model's work."""
    rows = list(_stage_rows(plan, shares))
    for name in dict.fromkeys(machine for _, machine, _, _ in rows):
        stages = [stage for stage in plan.stages if name in stage.machines]
        layers = f"{sum(len(stage.layers) for stage in stages)} layers"
        yield f"{len(stages)} stages", name, layers, sum(share for _, machine, _, share in rows if machine == name)


def _cells(machine: MachinePrediction) -> list[str]:
    times = [_ms(seconds) for seconds in (machine.compute_seconds, machine.receive_seconds, machine.send_seconds)]
    return [*times, memory_text(machine.memory_bytes, machine.memory_limit_bytes), f"{machine.estimated_share:.0%}"]


def _layers_text(layers: Sequence[str], most: int) -> str:
    count = f"({len(layers)} layers)" if len(layers) > 1 else "(1 layer)"
    # Keep the end of a long name, since its beginning is often the same as its neighbours'.
    names = [name if len(name) <= LONGEST_NAME else f"…{name[-LONGEST_NAME + 1 :]}" for name in layers]
    return f"{', '.join(names) if len(names) <= most else f'{names[0]} … {names[-1]}'} {count}"


def _comparison_table(title: str, plan: Plan, prediction: Prediction, plans: Sequence[ComparedPlan]) -> Table:
    stages = tuple(("+".join(stage.machines), len(stage.layers)) for stage in plan.stages)
    this_plan = ComparedPlan("this plan", stages, prediction.period_seconds, prediction.latency_seconds)
    rows = [
        (
            compared.name,
            short_list([f"{machine}: {count}" for machine, count in compared.stages], MACHINES_SHOWN),
            f"{1 / compared.period_seconds if compared.period_seconds > 0 else math.inf:.4g}",
            _ms(compared.latency_seconds),
            f"{ratio_to_plan(compared, prediction, plan.objective):.2f}",
        )
        for compared in (this_plan, *plans)
    ]
    caption = "× plan: by the plan's objective; 0.50 is half as good"
    return Table(title, ("", "layers on machines"), ("a second", "latency ms", "× plan"), rows, caption)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _share_text(share: float) -> str:
    """Return a share of the model's work as text; a dash if it is unknown (NaN)."""
    return NOTHING if math.isnan(share) else f"{share:.1%}"

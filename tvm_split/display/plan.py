"""Show a plan in at most 80 columns: its stages, its prediction, the optimality gap, and the rejected plans."""

import dataclasses
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from rpc_runtime.program.codecs import CODECS
from tvm_split.display.cluster import transport_lines
from tvm_split.display.performance import LATENCY, NOTHING, RATE, performance
from tvm_split.display.view import Table, View, as_json, view
from tvm_split.model import Model
from tvm_split.placement.by_hand import sharding_words
from tvm_split.placement.estimate import estimated_seconds
from tvm_split.placement.plan import Plan
from tvm_split.placement.prediction import ComparedPlan, MachinePrediction, Prediction
from tvm_split.placement.problem import objective_seconds
from tvm_split.planning.advice import one_machine_advice
from tvm_split.planning.sizes import SizedPlan
from tvm_split.units import age_text, bytes_text, count_text, gap_text, number_text, short_list

PREDICTED_CAPTION = "milliseconds per micro-batch; est.: the share of computing that was not measured"
NAMES_SHOWN, MOST_NAMES = 2, 6
LONGEST_NAME = 19
MACHINES_SHOWN = 4
MOST_ROWS = 12
"""The most rows, and the most sentences about stages, that are shown without details."""


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
    plans, and the other stages of a long plan.
    """
    prediction = plan.prediction
    rows, lines = list(_stage_rows(plan, shares)), list(_stage_lines(plan))
    most = max(len(rows), len(lines)) if details else MOST_ROWS
    title = f"{plan.model}: {count_text(len(plan.stages), 'stage')} for {plan.objective}, {plan.origin}"
    numbers: Sequence[str] = ("estimated share",)
    caption = ""
    if prediction is not None:
        numbers, caption = ("compute", "receive", "send", "memory", "est."), PREDICTED_CAPTION
    texts = ("stage", "machine", "layers")
    yield Table(title, texts, numbers, rows[:most], caption, min_widths={"layers": 14}, left=("memory",))
    yield from lines[:most]
    if max(len(rows), len(lines)) > most:
        yield Text("Every stage, and how each is shared and sends: --details", "dim")
    if prediction is None:
        return
    yield performance("", {"predicted": (prediction.period_seconds, prediction.latency_seconds)})
    yield from _predicted_lines(prediction)
    compared = {"Without a planner": prediction.baselines, "Other plans": prediction.alternatives}
    if not details:
        for name, plans in compared.items():
            if plans:
                yield f"{name}: {plans[0].name}, {_ratio(plans[0], prediction, plan.objective):.2f} times as good"
        yield Text("What else was considered, and how sure this is: --details", "dim")
        return
    yield from ("", *_certificate_lines(prediction, plan.objective))
    for name, plans in compared.items():
        if plans:
            yield _comparison_table(name, plan, prediction, plans)
            yield from (f"• {rejected.name}: {rejected.why}" for rejected in plans if rejected.why)


def _stage_rows(plan: Plan, shares: Sequence[float]) -> Iterator[Sequence[str]]:
    """Yield a row for each machine of each stage; each machine's times and memory are in its first row only.

    Without a prediction, rows have the stage's estimated share of the work; for a sharded stage, the machine's part.
    """
    prediction = plan.prediction
    predicted = {machine.machine: _cells(machine) for machine in prediction.machines} if prediction else {}
    for stage, share in zip(plan.stages, shares, strict=True):
        layers = _layers_text(stage.layers, NAMES_SHOWN if prediction else MOST_NAMES)
        for name, part in zip(stage.machines, stage.shares, strict=True):
            work = share * part if stage.sharding else share
            estimated = [NOTHING if math.isnan(work) else f"{work:.1%}"]
            yield stage.name, name, layers, *(predicted.pop(name, [""] * 5) if prediction else estimated)
            layers = f"shares the {stage.sharding.axis}" if stage.sharding else "replica of the stage"


def _cells(machine: MachinePrediction) -> list[str]:
    times = [_ms(seconds) for seconds in (machine.compute_seconds, machine.receive_seconds, machine.send_seconds)]
    memory, limit = bytes_text(machine.memory_bytes), machine.memory_limit_bytes
    if limit is not None:
        memory += f" {machine.memory_bytes / limit:.0%}" if limit else " of 0 B"
    return [*times, memory, f"{machine.estimated_share:.0%}"]


def _layers_text(layers: Sequence[str], most: int) -> str:
    names = list(map(_end_of_name, layers if len(layers) <= most else (layers[0], layers[-1])))
    shown = ", ".join(names) if len(layers) <= most else " … ".join(names)
    return f"{shown} ({count_text(len(layers), 'layer')})"


def _end_of_name(name: str) -> str:
    """Return the last parts of a long name's path, since the first are often the same as its neighbours'."""
    if len(name) <= LONGEST_NAME:
        return name
    end = name[-LONGEST_NAME + 1 :]
    separator = re.search(r"[/.](?=[^/.])", end)
    return f"…{end[separator.start() :] if separator else end}"


def _stage_lines(plan: Plan) -> Iterator[str]:
    """Yield a line for each sharded stage and each encoded tensor, the plan's remarks, and its precision."""
    for stage in plan.stages:
        if stage.sharding:
            yield f"{stage.name} together: {sharding_words(stage)}"
    for codec in plan.codecs:
        size = "" if codec.ratio is None else f", {codec.ratio:.2f} times smaller"
        share = "an unknown share" if codec.output_error is None else f"{codec.output_error:.2g} of their range"
        error = f", changes the outputs by {share}" if CODECS[codec.codec].is_lossy else ""
        yield f"{codec.source} → {codec.destination}: {codec.tensor} as {codec.codec}{size}{error}"
    yield from plan.remarks
    if plan.precision != "float32":
        yield f"Convolutions and products multiply in {plan.precision}, and add in float32"


def prediction_as_json(plan: Plan) -> dict[str, Any] | None:
    """Return the prediction with rates and each compared plan's ratio to this one, as JSON values; None without one."""
    prediction = plan.prediction
    if prediction is None:
        return None
    content = dataclasses.asdict(prediction)
    content["micro_batches_per_second"] = prediction.micro_batches_per_second
    for machine, row in zip(prediction.machines, content["machines"], strict=True):
        row["memory_bytes"] = machine.memory_bytes
    for name, plans in (("baselines", prediction.baselines), ("alternatives", prediction.alternatives)):
        for compared, row in zip(plans, content[name], strict=True):
            row["ratio"] = _ratio(compared, prediction, plan.objective)
    return content


def _sizes_table(sizes: Sequence[SizedPlan]) -> Table:
    """Return a table of the predictions for every micro-batch size, the chosen one first."""
    rows = [
        (
            str(size.size),
            str(len(size.plan.stages)),
            number_text(size.samples_per_second),
            _ms(size.prediction.latency_seconds),
        )
        for size in sizes
    ]
    return Table("micro-batch sizes", (), ("size", "stages", "samples/s", LATENCY), rows)


def _ratio(compared: ComparedPlan, prediction: Prediction, objective: str) -> float:
    """Return how many times as good as the predicted plan another plan is, by the objective; below 1 is worse."""
    value = objective_seconds(objective, compared)
    return objective_seconds(objective, prediction) / value if value > 0 else 1.0


def _predicted_lines(prediction: Prediction) -> Iterator[str]:
    """Yield lines with what limits the plan, and the measurements' age."""
    proven = f"at most {gap_text(prediction.gap)} from the best" if prediction.gap > 0 else "proven the best"
    moments = filter(None, (prediction.profiled_until, prediction.profiled_at))
    ages = dict.fromkeys(age_text(time.time() - moment) for moment in moments)
    age = f"measured {' to '.join(ages)} ago" if ages else "estimated"
    yield f"Limited by {prediction.limiting}; {proven}; {age}"
    for fallback in prediction.fallbacks:
        stages = short_list([step.name for step in prediction.steps if fallback.machine in step.machines])
        rates = f"{prediction.micro_batches_per_second:.4g} → {1 / (fallback.period_seconds or math.inf):.4g} a second"
        moves = f"→ {fallback.destination}, {rates}" if fallback.destination else "fit on no other machine"
        yield f"Without {fallback.machine}: {stages} {moves}"
    for load in prediction.shared_cores:
        if load.oversubscription > 1 and load.busy_seconds > 0:
            most = number_text(1 / load.least_period_seconds)
            yield (
                f"{short_list(load.machines)} share {count_text(load.cores, 'core')}: a result takes "
                f"{_ms(load.busy_seconds)} ms of one, so no more than {most} come a second"
            )
    yield from transport_lines((link.source, link.destination, link.transport) for link in prediction.links)
    yield from (f"Doubtful: {doubt}" for doubt in prediction.doubts)


def _certificate_lines(prediction: Prediction, objective: str) -> Iterator[str]:
    """Yield lines with the lower bound, the optimality gap and the search method."""
    value = "latency" if objective == "latency" else "period"
    gap = f"this one's gap to it is {gap_text(prediction.gap)}" if prediction.gap > 0 else "this one reaches it"
    yield f"Lower bound: no plan has a {value} below {_ms(prediction.lower_bound_seconds)} ms; {gap}"
    yield f"Method: {prediction.method}"
    in_flight = count_text(prediction.in_flight, "micro-batch")
    yield f"Bubble: machines wait {prediction.bubble:.1%} of the time. In flight: {in_flight}"
    if prediction.why_no_more_machines:
        yield f"Why no more machines: {prediction.why_no_more_machines}"


def _comparison_table(title: str, plan: Plan, prediction: Prediction, plans: Sequence[ComparedPlan]) -> Table:
    this_plan = ComparedPlan.of("this plan", plan.stages, prediction)
    rows = [
        (
            compared.name,
            short_list([f"{machine}: {count}" for machine, count in compared.stages], MACHINES_SHOWN),
            number_text(1 / compared.period_seconds if compared.period_seconds > 0 else math.inf),
            _ms(compared.latency_seconds),
            f"{_ratio(compared, prediction, plan.objective):.2f}",
        )
        for compared in (this_plan, *plans)
    ]
    caption = "ratio: by the plan's objective; 0.50 is half as good as the plan"
    return Table(title, ("", "layers on machines"), (RATE, LATENCY, "ratio"), rows, caption)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 1 else f"{seconds * 1e3:.0f}"

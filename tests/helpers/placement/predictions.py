"""Predictions written by hand, for tests of displays and comparisons."""

from tvm_split.placement.prediction import ComparedPlan, LinkPrediction, MachinePrediction, Prediction


def machine_prediction(machine: str, compute: float = 0.010, **changes: float | None) -> MachinePrediction:
    values: dict[str, float | None] = {
        "compute_seconds": compute,
        "alone_seconds": compute * 0.9,
        "receive_seconds": 0.001,
        "send_seconds": 0.002,
        "weight_bytes": 3e6,
        "activation_bytes": 2e6,
        "buffer_bytes": 1e6,
        "memory_limit_bytes": None,
        "estimated_share": 0.0,
        **changes,
    }
    return MachinePrediction(machine, **values)  # type: ignore[arg-type]


def prediction(machines: tuple[MachinePrediction, ...], links: tuple[LinkPrediction, ...] = ()) -> Prediction:
    """A prediction for these machines, limited by the slowest, with two baselines and one alternative."""
    period = max(machine.compute_seconds for machine in machines)
    latency = sum(machine.alone_seconds for machine in machines)
    return Prediction(
        period_seconds=period,
        latency_seconds=latency,
        bubble=0.125,
        in_flight=3,
        lower_bound_seconds=period * 0.98,
        gap=0.02,
        limiting=f"{machines[0].machine} (compute)",
        method="dynamic programming, exact for this chain",
        why_no_more_machines="machine-z stays idle: its link is too slow",
        profiled_at=1_000_000.0,
        machines=machines,
        links=links,
        baselines=(
            ComparedPlan("one machine", ((machines[0].machine, 9),), period * 2, latency * 0.9),
            ComparedPlan(
                "equal layers", tuple((machine.machine, 3) for machine in machines), period * 1.5, latency * 1.1
            ),
        ),
        alternatives=(
            ComparedPlan("cut after [b]relu_2[/b]", ((machines[0].machine, 9),), period * 1.1, latency, "sends more"),
        ),
    )

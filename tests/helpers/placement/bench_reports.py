"""Reports as ``tvm-split bench --json`` writes them, without a measurement."""

from collections.abc import Mapping
from typing import Any

from tvm_split.deployment.deployment_report import DeploymentReport
from tvm_split.deployment.report_values import Comparison, MachineReport


def report_of(content: Mapping[str, Any], slow: Mapping[str, float]) -> dict[str, Any]:
    """A report of bench on a plan's content: machines take ``slow`` times as long as predicted."""

    def compared(values: Mapping[str, Any], name: str, times: float) -> Comparison:
        return Comparison(values[name], values[name] * times)

    prediction, nothing = content["prediction"], Comparison(0.0, 0.0)
    machines = []
    for machine in prediction["machines"]:
        name = machine["machine"]
        stages = tuple(stage["name"] for stage in content["stages"] if name in stage["machines"])
        computed = compared(machine, "compute_seconds", slow.get(name, 1.0))
        machines.append(MachineReport(name, stages, (1.0,), 100, computed, nothing, nothing))
    whole = [compared(prediction, name, max(slow.values())) for name in ("period_seconds", "latency_seconds")]
    origin, profiled_at = (content["model"], content["origin"], prediction["limiting"]), prediction["profiled_at"]
    return DeploymentReport(*origin, *whole, tuple(machines), (), 10, 100, (), profiled_at).to_dict()

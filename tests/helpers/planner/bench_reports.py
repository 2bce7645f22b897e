"""Reports as ``tvm-split bench --json`` writes them, without a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def report_of(content: Mapping[str, Any], slow: Mapping[str, float]) -> dict[str, Any]:
    """A report of bench: machines take ``slow`` times as long as predicted, links as long as predicted."""
    prediction = content["prediction"]

    def compared(seconds: float, times: float = 1.0) -> dict[str, float]:
        return {"predicted": seconds, "measured": seconds * times, "ratio": times}

    return {
        "model": content["model"],
        "origin": content["origin"],
        "limiting": prediction["limiting"],
        "period_seconds": compared(prediction["period_seconds"], max(slow.values())),
        "latency_seconds": compared(prediction["latency_seconds"], max(slow.values())),
        "machines": [
            {
                "machine": machine["machine"],
                "stages": [stage["name"] for stage in content["stages"] if machine["machine"] in stage["machines"]],
                "shares": [1.0],
                "micro_batches": 100,
                "compute_seconds": compared(machine["compute_seconds"], slow.get(machine["machine"], 1.0)),
                "receive_seconds": compared(0.0),
                "send_seconds": compared(0.0),
            }
            for machine in prediction["machines"]
        ],
        "links": [],
        "runs": 10,
        "streamed": 100,
        "advice": [],
        "profiled_at": prediction["profiled_at"],
        "corrections": prediction.get("corrections", {}),
    }

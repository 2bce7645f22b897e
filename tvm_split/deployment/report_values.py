"""The values of a deployment report: predicted and measured numbers of machines and links, and advice to the user."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, computed_field

from tvm_split.placement.problem import Amount
from tvm_split.units import names_of, seconds_text

RELEVANT_DIFFERENCE = 0.15
"""Relative difference that needs advice; predictions are accurate to 10 % for throughput and 15 % for latency."""
NEGLIGIBLE = 0.02
"""Share of the period below which a user would not notice a difference, whatever its ratio."""
LEAST_WIRE_SECONDS = 1e-3
"""Least seconds of a transfer that say something about the link; shorter ones measure how fast threads wake up."""
SMALLEST_SHARE_OF_PERIOD = 0.25
"""Least share of the period of a transfer that says something about the link, for the same reason."""
PLAN_ANEW = "plan with new measurements: `tvm-split plan MODEL --cluster FILE --refresh`"
IMPROVE = "or by what was measured here: `tvm-split replan MODEL --cluster FILE --plan PLAN --measured REPORT`"
OUTSIDE = "the inputs, what takes the results, the waking of threads, or other programs"
WIDEST_RANGE = 3.0
"""Largest ratio of the ends of a predicted range for which a measurement within the range confirms it."""


@dataclass(frozen=True)
class Comparison:
    """A predicted and a measured value; None if it was not predicted, or not measured.

    With ``predicted_least`` the prediction is a range from there to ``predicted``; ``ratio`` and ``difference`` are
    then relative to the nearest value in the range.
    """

    predicted: Amount | None
    measured: Amount | None
    predicted_least: Amount | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ratio(self) -> float | None:
        """Measured by predicted; None if one of them is missing, 0 was predicted, or the range is `inconclusive`."""
        if self.measured is None or not self._nearest or self.inconclusive:
            return None
        return self.measured / self._nearest

    @property
    def difference(self) -> float:
        """Measured minus predicted; 0 if one of them is missing."""
        if self.measured is None or self._nearest is None:
            return 0.0
        return self.measured - self._nearest

    @property
    def inconclusive(self) -> bool:
        """Whether the prediction is a range wider than `WIDEST_RANGE` that contains the measurement."""
        if self.predicted is None or self.predicted_least is None or self.difference != 0:
            return False
        return self.predicted > WIDEST_RANGE * self.predicted_least

    @property
    def spread(self) -> float:
        """The width of the predicted range; 0 if the prediction is a single value."""
        return (self.predicted or 0.0) - self.predicted_least if self.predicted_least is not None else 0.0

    @property
    def _nearest(self) -> float | None:
        if self.measured is None or self.predicted is None or self.predicted_least is None:
            return self.predicted
        return min(max(self.measured, self.predicted_least), self.predicted)


@dataclass(frozen=True)
class MachineReport:
    """Seconds per micro-batch, summed over a machine's stages: medians over the ``micro_batches`` that it computed.

    ``shares`` has, for each of the ``stages``, the share of the micro-batches that this machine computes; below 1 for
    replicas. Seconds are averages per micro-batch of the whole stream: half of the time of one micro-batch on this
    machine, if it computes every second one. ``compute`` is predicted as a range. Its upper end includes waiting for
    oversubscribed cores, and serialising, which delays computing unless the machine is idle.
    """

    machine: str
    stages: tuple[str, ...]
    shares: tuple[float, ...]
    micro_batches: int
    compute: Annotated[Comparison, Field(alias="compute_seconds")]
    receive: Annotated[Comparison, Field(alias="receive_seconds")]
    send: Annotated[Comparison, Field(alias="send_seconds")]


@dataclass(frozen=True)
class LinkReport:
    """A one-way link between machines, or between a machine and the client: bytes and wire seconds per micro-batch.

    With replicas, both are averages over the micro-batches of the whole stream. The measured seconds are those of the
    slower end. ``codecs`` are those of the tensors on the link. ``transport`` is ``"grpc"``, ``"shm"``, ``"mpi"`` or
    ``"nccl"``; empty if it is not known.
    """

    source: str
    destination: str
    bytes: Comparison
    seconds: Comparison
    transport: str = ""
    codecs: tuple[str, ...] = ()


def advice_for(
    period: Comparison,
    latency: Comparison,
    machines: Sequence[MachineReport],
    links: Sequence[LinkReport],
    estimated_shares: Mapping[str, float],
) -> tuple[str, ...]:
    """Return messages for the user, the most specific first; empty if everything is as predicted.

    ``estimated_shares`` has, by machine, the share of its predicted time that was estimated and not measured.
    """
    scale, changed = scale_of(period, latency), changed_links(period, latency, links)
    parts = [
        *(
            _of_machine(machine, estimated_shares.get(machine.machine, 0.0))
            for machine in machines
            if differs(machine.compute, scale)
        ),
        *(_of_wire(f"the link {link.source} → {link.destination}", link.seconds) for link in changed),
    ]
    if not changed:  # several links together may be long where each of them is too short to tell
        parts += (
            _of_wire(f"{activity} {names_of(peers)}", seconds)
            for activity, peers, seconds in _sums_of_links(machines, links)
            if _is_changed(seconds, period, latency)
        )
    whole = _of_the_whole(period, latency, machines, links)
    return (*parts, *whole, f"{PLAN_ANEW}, {IMPROVE}") if parts else tuple(whole)


def limit_of(period: Comparison, machines: Sequence[MachineReport], links: Sequence[LinkReport]) -> str:
    """Return what the measured stream waits for: a machine or link, and its seconds; empty without a stream."""
    busy = [(machine.compute.measured or 0.0, f"compute of {machine.machine}") for machine in machines]
    busy += (
        (seconds.measured or 0.0, f"{activity} {names_of(peers)}")
        for activity, peers, seconds in _sums_of_links(machines, links)
        if is_long_enough(seconds, period.measured or 0.0)
    )
    longest, what = max(busy, default=(0.0, ""), key=lambda part: part[0])
    if not longest or not period.measured:
        return ""
    share = f"{seconds_text(longest)} of the {seconds_text(period.measured)} between two results"
    if longest >= (1 - RELEVANT_DIFFERENCE) * period.measured:
        return f"{what}, which takes {share}"
    return f"no single part: {what}, the longest, takes {share}; the rest goes to {OUTSIDE}"


def changed_links(period: Comparison, latency: Comparison, links: Sequence[LinkReport]) -> list[LinkReport]:
    """Return the links whose measured time differs from the prediction enough to matter.

    A longer time matters only if the whole deployment is slower than predicted; otherwise the ends had time to wait.
    """
    return [link for link in links if _is_changed(link.seconds, period, latency)]


def _is_changed(seconds: Comparison, period: Comparison, latency: Comparison) -> bool:
    whole, scale = latency if period.measured is None else period, scale_of(period, latency)
    is_slower = differs(whole, 0.0) and whole.difference > 0
    return (is_slower or seconds.difference <= 0) and is_long_enough(seconds, scale) and differs(seconds, scale)


def _sums_of_links(
    machines: Sequence[MachineReport], links: Sequence[LinkReport]
) -> Iterator[tuple[str, list[str], Comparison]]:
    """Yield what each machine receives over all its links, and what it sends: the activity, the peers, the seconds."""
    for machine in machines:
        name = machine.machine
        yield f"receiving on {name} from", [ends.source for ends in links if ends.destination == name], machine.receive
        yield f"sending on {name} to", [ends.destination for ends in links if ends.source == name], machine.send


def scale_of(period: Comparison, latency: Comparison) -> float:
    """Return the longer of predicted and measured period (seconds), else the latency: the scale for differences."""
    return max(period.measured or 0.0, period.predicted or 0.0) or latency.measured or 0.0


def differs(comparison: Comparison, scale_seconds: float) -> bool:
    """Whether measurement and prediction differ by more than `RELEVANT_DIFFERENCE` and more than `NEGLIGIBLE`."""
    ratio = comparison.ratio
    if ratio is None or 1 - RELEVANT_DIFFERENCE <= ratio <= 1 + RELEVANT_DIFFERENCE:
        return False
    return abs(comparison.difference) > NEGLIGIBLE * scale_seconds


def is_long_enough(seconds: Comparison, scale_seconds: float) -> bool:
    """Whether receiving or sending takes long enough, by prediction or measurement, to say something of the link."""
    longest = max(seconds.predicted or 0.0, seconds.measured or 0.0)
    return longest >= max(LEAST_WIRE_SECONDS, SMALLEST_SHARE_OF_PERIOD * scale_seconds)


def _of_machine(report: MachineReport, estimated_share: float) -> str:
    why = "something else may run there, or the machine has changed"
    if report.compute.difference < 0:
        why = "it can take more layers than the plan gives it"
    if estimated_share > 0:
        why += f"; {estimated_share:.0%} of its prediction was estimated, not measured"
    return f"{report.machine} computes {_both(report.compute)}: {why}. Profile {report.machine} again"


def _of_wire(what: str, seconds: Comparison) -> str:
    slower = seconds.difference > 0
    why = "other traffic may pass there, or it has changed" if slower else "it can carry more than the plan gives it"
    return f"{what} takes {_both(seconds)}: {why}. Probe it again"


def _of_the_whole(
    period: Comparison, latency: Comparison, machines: Sequence[MachineReport], links: Sequence[LinkReport]
) -> list[str]:
    sentences = []
    if differs(period, 0.0):
        limit, why = limit_of(period, machines, links), f"the plan's measurements are old; {PLAN_ANEW}"
        if period.difference > 0:
            why = f"it is limited by {limit or OUTSIDE}"
        sentences.append(f"a result came every {_both(period)}: {why}")
    if differs(latency, 0.0):
        sentences.append(f"a single run takes {_both(latency)}: {_why_alone(latency, machines, links)}")
    return sentences


def _why_alone(latency: Comparison, machines: Sequence[MachineReport], links: Sequence[LinkReport]) -> str:
    """Return the likely reason why a single run's time differs from the prediction, from all machines and links."""
    in_stream = sum(machine.compute.measured or 0.0 for machine in machines)
    if (latency.measured or 0.0) < in_stream <= (latency.predicted or 0.0):
        return (
            f"alone, the machines compute faster than in a stream, where they take {seconds_text(in_stream)} together"
        )
    sign = math.copysign(1.0, latency.difference)
    changes = [
        (sign * sum(machine.compute.difference for machine in machines), "computing takes"),
        # The prediction for a single transfer, with its latency, is the upper end of the range.
        (sign * sum(replace(link.seconds, predicted_least=None).difference for link in links), "the links take"),
    ]
    change, what = max(changes)
    if change > NEGLIGIBLE * (latency.measured or 0.0):
        return f"{what} {seconds_text(change)} {'longer' if sign > 0 else 'less'} than predicted"
    return f"no machine is known to differ from its prediction, so the links' latency may have changed; {PLAN_ANEW}"


def _both(comparison: Comparison) -> str:
    measured, least = comparison.measured or 0.0, comparison.predicted_least
    predicted, times = seconds_text(comparison.predicted or 0.0), "times as long"
    if least is not None:
        predicted, times = f"{seconds_text(least)} to {predicted}", "times the nearer end"
    return f"{seconds_text(measured)} and not {predicted} ({comparison.ratio:.2f} {times})"

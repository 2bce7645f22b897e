"""Show the measurements of a run or a benchmark in tables and sentences of at most 80 columns."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from rpc_runtime.program.events import StageStatistics
from rpc_runtime.program.specs import weight_bytes
from tvm_split.deployment.deployment import Deployment, DeploymentStatistics
from tvm_split.deployment.deployment_report import DeploymentReport
from tvm_split.deployment.report_values import WIDEST_RANGE, Comparison, differs, is_long_enough, scale_of
from tvm_split.display.cluster import transport_lines
from tvm_split.display.performance import LATENCY, NOTHING, PERIOD, RATE, performance
from tvm_split.display.view import Row, Table, View, view
from tvm_split.units import bytes_text, count_text, seconds_text, short_list


@view.register
def view_of_deployment(deployment: Deployment, *, details: bool = False) -> View:
    """Return the machines with their stages and weights; no worker is asked."""
    program = deployment.program
    rows = []
    for machine in program.machines:
        stages = program.stages_on(machine)
        names = short_list([stage.name for stage in stages])
        rows.append((machine, names, bytes_text(weight_bytes(stages))))
    state = "closed, " if deployment.is_closed else ""
    count = count_text(len(program.replicas), "stage")
    title = f"{deployment.bundle.model}: {state}{count} on {short_list(program.machines)}"
    return [Table(title, ("machine", "stages"), ("weights",), rows)]


@view.register
def view_of_statistics(statistics: DeploymentStatistics, *, details: bool = False) -> View:
    """Return the times of each stage, and what carries the links."""
    links = ((link.source, link.destination, link.transport) for link in statistics.links)
    since = f", placed at {statistics.placed.astimezone():%H:%M:%S}" if statistics.placed else ""
    gone = [f"{machine} does not answer; missing: {short_list(names)}" for machine, names in statistics.gone.items()]
    return [
        statistics_table(statistics.stages, count_text(len(statistics.stages), "stage") + since),
        *transport_lines(links),
        *gone,
    ]


UNSURE = "unsure"


@view.register
def view_of_report(report: DeploymentReport, *, details: bool = False) -> View:
    """Return prediction, measurement and their ratio for the deployment, every machine and every link, with advice."""
    period, latency, scale = report.period, report.latency, scale_of(report.period, report.latency)
    columns = {"predicted": (period.predicted, latency.predicted), "measured": (period.measured, latency.measured)}
    red = [PERIOD, RATE] * differs(period, scale) + [LATENCY] * differs(latency, scale)
    headings = ("predicted", "measured", "ratio")
    parts = Table("milliseconds per micro-batch", ("", " "), headings, list(_rows(report, scale))[1:])
    return [performance(report.model, columns, red), parts, *summary(report)]


def _rows(report: DeploymentReport, scale: float) -> Iterator[Row]:
    for machine in report.machines:
        yield ()
        name = f"{machine.machine} ({short_list(list(map(_stage, machine.stages, machine.shares)))})"
        yield _row(name, "compute", machine.compute, scale)
        yield _row("", "receive", machine.receive, scale, wire=True)
        yield _row("", "send", machine.send, scale, wire=True)
    if report.links:
        yield ()
    for link in report.links:
        size = link.bytes.measured if link.bytes.measured is not None else link.bytes.predicted
        name = f"{link.source} → {link.destination}" + (f" ({link.transport})" if link.transport else "")
        what = " ".join([NOTHING if size is None else bytes_text(size), *link.codecs])
        yield _row(name, what, link.seconds, scale, wire=True)


def summary(report: DeploymentReport) -> list[str]:
    """Return the sentences below the table: rates, the number of measurements, and advice."""
    lines = []
    if any(machine.compute.predicted is not None for machine in report.machines):
        lines.append("From … to: without and with the cost of serialising or latency; ratios are to the nearer end.")
        times = [time for part in report.machines for time in (part.compute, part.receive, part.send)]
        if any(time.inconclusive for time in (*times, *(link.seconds for link in report.links))):
            lines.append(f"{UNSURE.capitalize()}: in its range, which is not known better than {WIDEST_RANGE:g} to 1.")
    if report.period.measured is not None:
        predicted_limit = f"; predicted: {report.limiting}" if report.limiting else ""
        lines.append(f"Limited by {report.measured_limiting}{predicted_limit}")
    lines.append(f"Medians over {report.streamed} streamed micro-batches, and over single runs: {report.runs}")
    if report.moved:
        lines.append(f"{report.moved.capitalize()}. The plan's prediction is not for these places.")
    elif report.period.predicted is None:
        lines.append("The plan has no prediction to compare with.")
    elif not report.advice:
        lines.append("Nothing that matters differs from its prediction by more than 15 %.")
    return [*lines, *(f"• {text}" for text in report.advice)]


def statistics_table(stages: Sequence[StageStatistics], title: str) -> Table:
    """Return a table of each stage's times for computing, waiting, receiving and sending, and of the bytes it sent."""
    times = ("median_compute_seconds", "compute_seconds", "wait_seconds", "receive_seconds", "send_seconds")
    rows = [
        (
            # The name of a stage's shard without its machine, which the next column shows.
            stage.name.replace(f"_{stage.machine.replace('-', '_')}_", "_…_"),
            stage.machine,
            *(seconds_text(getattr(stage, time)) for time in times),
            bytes_text(stage.bytes_sent),
        )
        for stage in stages
    ]
    caption = "median of one micro-batch, the rest in all; receiving and sending overlap computing"
    return Table(title, ("stage", "machine"), ("median", "compute", "wait", "receive", "send", "sent"), rows, caption)


def _row(name: str, what: str, compared: Comparison, scale_seconds: float, *, wire: bool = False) -> Row:
    ratio, style = NOTHING, ""
    if not wire or is_long_enough(compared, scale_seconds):
        if compared.ratio is not None:
            ratio, style = f"{compared.ratio:.2f}", "red" if differs(compared, scale_seconds) else ""
        elif compared.inconclusive:
            ratio = UNSURE
    predicted = _milliseconds(compared.predicted)
    if compared.predicted_least is not None:
        predicted = f"{_milliseconds(compared.predicted_least)} to {predicted}"
    return name, what, predicted, _milliseconds(compared.measured), Text(ratio, style)


def _stage(name: str, share: float) -> str:
    """Return a stage's name, with the share of its micro-batches that this machine computes if it is not all."""
    return name if share == 1 else f"{share:.0%} of {name}"


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds * 1e3:.3f}"

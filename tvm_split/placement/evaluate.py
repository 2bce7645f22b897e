"""Evaluate a plan: period, latency and loads of any graph of steps. Every search here optimises this cost model.

The model is described in docs/planner.md, for machines that have one stage. With several steps of a machine, each of
its times is summed over all of them: with enough micro-batches in flight, one is computed while another waits for an
exchange. If several of its steps take a tensor, the first of them has the cost of receiving it. The latency is that of
the `timetable`, where each step takes its ``contended_seconds``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

from rpc_runtime.program.routes import CLIENT
from tvm_split.errors import PlanError
from tvm_split.placement.problem import TOLERANCE, CoresLoad, Evaluation, MachineLoad, Problem, Stage, Timed
from tvm_split.placement.step_graph import CLIENT_NUMBER, MachineSet, NumberedTransfer, StepGraph, Timetable, timetable
from tvm_split.units import bytes_text, count_text, known_names, names_of, seconds_text

CLIENT_SET = (CLIENT_NUMBER,)


class NumberedStep(NamedTuple):
    """A `Step` with indices of machines instead of names; ``contended_seconds`` are those of the slowest replica."""

    machines: MachineSet
    shares: Sequence[float]
    seconds: Sequence[float]
    contended_seconds: float
    weight_bytes: float
    activation_bytes: float


Links = Callable[[MachineSet, MachineSet], tuple[float, float]]
"""Function that returns the longest latency (s) and the most seconds per byte of any link from one set to another.

It raises a `PlanError` if a source and a target have no link.
"""


def evaluate(problem: Problem, graph: StepGraph) -> Evaluation:
    """The period, latency and loads of a plan.

    Pins, limits and memory are not checked; see `violations`.

    Raises:
        PlanError: a machine or link does not exist, or steps wait for each other in a cycle.
    """
    return flow_of(problem, graph).evaluation


def flow_of(problem: Problem, graph: StepGraph) -> Flow:
    """Return the `Flow` of a graph, with numbers instead of names; raises as `evaluate`."""
    numbers = {machine.name: number for number, machine in enumerate(problem.machines)}
    position = {step.name: place for place, step in enumerate(graph.steps)} | {CLIENT: CLIENT_NUMBER}
    unknown = next((name for step in graph.steps for name in step.machines if name not in numbers), None)
    if unknown is not None:
        raise PlanError(f"the plan names machine {unknown!r}; there are {known_names(list(numbers), unknown)}")
    steps = [
        NumberedStep(
            tuple(numbers[machine] for machine in step.machines),
            step.shares,
            step.seconds,
            max(step.contended_seconds),
            step.weight_bytes,
            step.activation_bytes,
        )
        for step in graph.steps
    ]
    transfers = [
        NumberedTransfer(
            position[transfer.source], tuple(position[target] for target in transfer.targets), transfer.bytes
        )
        for transfer in graph.transfers
    ]
    return Flow(problem, partial(_slowest_link, problem, (*numbers, CLIENT)), steps, transfers)


def _slowest_link(
    problem: Problem, names: Sequence[str], sources: MachineSet, targets: MachineSet
) -> tuple[float, float]:
    latency = seconds_per_byte = 0.0
    for source, target in itertools.product(sources, targets):
        if source != target:
            link = problem.link_of.get((names[source], names[target]))
            if link is None:
                raise missing_link(names[source], names[target])
            latency = max(latency, link.latency_seconds)
            seconds_per_byte = max(seconds_per_byte, 1.0 / link.bytes_per_second)
    return latency, seconds_per_byte


def missing_link(source: str, target: str) -> PlanError:
    """The error of a plan that sends over a link that does not exist."""
    return PlanError(
        f"there is no link from {_end_name(source)} to {_end_name(target)}, over which this plan sends; add the link, "
        "or place the stages otherwise"
    )


class _Use:
    """Seconds and bytes of a machine for one micro-batch, while they are summed over its ``steps``."""

    __slots__ = ("compute", "receive", "received", "send", "sent", "share", "steps")

    def __init__(self) -> None:
        self.steps: list[NumberedStep] = []
        self.compute = self.receive = self.send = self.received = self.sent = self.share = 0.0


class Flow:
    """The evaluation of numbered steps in topological order; each value is computed on first access.

    Raises:
        PlanError: there is no link for a transfer.
    """

    def __init__(
        self, problem: Problem, links: Links, steps: Sequence[NumberedStep], transfers: Sequence[NumberedTransfer]
    ) -> None:
        self.problem = problem
        self.steps = steps
        self._transfers = transfers
        self._placements = [*(step.machines for step in steps), CLIENT_SET]
        self.counts = [0] * len(self._placements)
        """Number of tensors that pass links, for each step and, last, for the client."""
        self.sizes = [0.0] * len(self._placements)
        """The bytes of these tensors."""
        self.sent_bytes: dict[tuple[MachineSet, MachineSet], float] = {}
        """The bytes that pass from one set of machines to another."""
        for source, targets, size in transfers:
            target = targets[0] if targets else CLIENT_NUMBER
            ends = self._placements[source], self._placements[target]
            if ends[0] != ends[1]:
                self.sent_bytes[ends] = self.sent_bytes.get(ends, 0.0) + size
                for end in (source, target):
                    self.counts[end] += 1
                    self.sizes[end] += size
        self._speeds = {ends: links(*ends) for ends in self.sent_bytes}

    @cached_property
    def machines(self) -> tuple[int, ...]:
        """The machines of the plan, each once, in the order of the steps."""
        return tuple(dict.fromkeys(machine for step in self.steps for machine in step.machines))

    @cached_property
    def shares(self) -> list[Sequence[float]]:
        """For each step, the shares of micro-batches of its machines."""
        return [
            step.shares or shares_by_speed(seconds) for step, seconds in zip(self.steps, self.full_seconds, strict=True)
        ]

    def transfer_seconds(self, step: int, machine: int) -> float:
        """Compute seconds that receiving and sending a step's tensors cost a machine, per micro-batch."""
        problem_machine = self.problem.machines[machine]
        return (
            self.counts[step] * problem_machine.transfer_seconds
            + self.sizes[step] * problem_machine.transfer_seconds_per_byte
        )

    @cached_property
    def full_seconds(self) -> list[list[float]]:
        """For each step, the seconds of each machine if it computed every micro-batch, transfers included."""
        machines, is_alone = self.problem.machines, len(self.machines) == 1
        return [
            [
                seconds * (1.0 if is_alone else machines[machine].contention) + self.transfer_seconds(place, machine)
                for machine, seconds in zip(step.machines, step.seconds, strict=True)
            ]
            for place, step in enumerate(self.steps)
        ]

    @cached_property
    def _uses(self) -> dict[int, _Use]:
        uses = {machine: _Use() for machine in self.machines}
        for step, shares, seconds in zip(self.steps, self.shares, self.full_seconds, strict=True):
            for machine, share, duration in zip(step.machines, shares, seconds, strict=True):
                uses[machine].steps.append(step)
                uses[machine].compute += share * duration
                uses[machine].share = max(uses[machine].share, share)
        for (sources, targets), size in self.sent_bytes.items():
            stream = size * self._speeds[sources, targets][1]
            for machine in sources:
                if machine != CLIENT_NUMBER:
                    uses[machine].send += stream
                    uses[machine].sent += size
            for machine in targets:
                if machine != CLIENT_NUMBER:
                    uses[machine].receive += stream
                    uses[machine].received += size
        return uses

    @cached_property
    def shared_cores(self) -> tuple[CoresLoad, ...]:
        """The load of each set of shared cores that the plan uses."""
        problem, machines = self.problem, self.problem.machines
        if not problem.shared_cores:
            return ()
        cores = {machines[number].name: machines[number].cores for number in self._uses}
        busy = {machines[number].name: use.compute * machines[number].cores for number, use in self._uses.items()}
        per_tensor, per_byte = problem.client_transfer_seconds, problem.client_transfer_seconds_per_byte
        busy[CLIENT] = self.counts[CLIENT_NUMBER] * per_tensor + self.sizes[CLIENT_NUMBER] * per_byte
        core_sets = (
            (tuple(name for name in shared.machines if name in busy), shared.cores) for shared in problem.shared_cores
        )
        return tuple(
            CoresLoad(names, count, math.fsum(map(busy.__getitem__, names)), sum(cores.get(name, 0) for name in names))
            for names, count in core_sets
            if names
        )

    @cached_property
    def period_seconds(self) -> float:
        """Seconds between two results of a stream."""
        longest = max(max(use.compute, use.receive, use.send) for use in self._uses.values())
        return max([longest, *(shared.least_period_seconds for shared in self.shared_cores)])

    @cached_property
    def timetable(self) -> Timetable:
        """When each step starts if one input passes an empty pipeline.

        Raises:
            PlanError: steps wait for each other in a cycle.
        """
        seconds = [step.contended_seconds for step in self.steps]
        result = timetable(self._placements[:-1], seconds, self._transfers, lambda *ends: self._speeds[ends])
        if None in result.starts:
            stuck = self._names(self._placements[result.starts.index(None)])
            raise PlanError(f"a step on {stuck} waits for itself: what it needs is made from its own results")
        return result

    @property
    def latency_seconds(self) -> float:
        """Seconds from one input to its result."""
        return self.timetable.latency_seconds

    @cached_property
    def loads(self) -> tuple[MachineLoad, ...]:
        return tuple(
            MachineLoad(
                machine=self.problem.machines[machine].name,
                compute_seconds=use.compute,
                receive_seconds=use.receive,
                send_seconds=use.send,
                weight_bytes=math.fsum(step.weight_bytes for step in use.steps),
                activation_bytes=max(step.activation_bytes for step in use.steps),
                buffer_bytes=self.problem.buffers * (use.received + use.sent),
                bytes_received=use.received,
                bytes_sent=use.sent,
                share=use.share,
            )
            for machine, use in self._uses.items()
        )

    @property
    def limiting(self) -> str:
        """A description of the bottleneck: the machine, link or cores that set the period, and their activity."""
        least = self.period_seconds * (1 - TOLERANCE)
        return next(text for value, text in self._limits() if value >= least)

    def _limits(self) -> Iterator[tuple[float, str]]:
        for placement in dict.fromkeys(step.machines for step in self.steps):
            names, uses = self._names(placement), [self._uses[machine] for machine in placement]
            together = " together (replicas)" if len(placement) > 1 else ""
            senders = [source for source, target in self.sent_bytes if target == placement]
            receivers = [target for source, target in self.sent_bytes if source == placement]
            yield max(use.compute for use in uses), f"compute of {names}{together}"
            yield max(use.receive for use in uses), f"receiving on {names}{self._over(senders, 'from')}"
            yield max(use.send for use in uses), f"sending on {names}{self._over(receivers, 'to')}"
        for shared in self.shared_cores:
            cores = "one core" if shared.cores == 1 else f"{shared.cores} cores"
            sharing = (
                f"{names_of(list(map(_end_name, shared.machines)))} {'has' if len(shared.machines) == 1 else 'share'}"
            )
            yield shared.least_period_seconds, f"computing on the {cores} that {sharing}"

    def _over(self, ends: Sequence[MachineSet], word: str) -> str:
        links = "links" if len(ends) > 1 else "link"
        return f" over the {links} {word} {names_of([self._names(end) for end in ends])}" if ends else ""

    def _names(self, placement: MachineSet) -> str:
        if placement == CLIENT_SET:
            return _end_name(CLIENT)
        return names_of([self.problem.machines[machine].name for machine in placement])

    @cached_property
    def evaluation(self) -> Evaluation:
        return Evaluation(self.period_seconds, self.latency_seconds, self.loads, self.limiting, self.shared_cores)


def shares_by_speed(seconds: Sequence[float]) -> tuple[float, ...]:
    """Shares with which replicas that take ``seconds`` each for a micro-batch finish at the same time."""
    idle = sum(duration == 0 for duration in seconds)
    if idle:
        return tuple((duration == 0) / idle for duration in seconds)
    whole = math.fsum(1.0 / duration for duration in seconds)
    return tuple(1.0 / duration / whole for duration in seconds)


def violations(problem: Problem, stages: Sequence[Stage], evaluation: Evaluation) -> tuple[str, ...]:
    """Messages for the problem's demands that a plan of pieces breaks: memory, pins, counts and limits."""
    limits = ((load, problem.memory_limits.get(load.machine, math.inf)) for load in evaluation.loads)
    short = (
        f"{load.machine} needs {bytes_text(load.memory_bytes)} of memory and has {bytes_text(limit)}"
        for load, limit in limits
        if load.memory_bytes > limit * (1 + TOLERANCE)
    )
    return (*short, *pin_violations(problem, stages), *limit_violations(problem, stages, evaluation))


def keeps_demands(problem: Problem, stages: Sequence[Stage], evaluation: Timed) -> bool:
    """Whether a plan keeps to pins, counts and limits; memory is not checked."""
    return not any((*pin_violations(problem, stages), *limit_violations(problem, stages, evaluation)))


def memory_shortage(problem: Problem, evaluation: Evaluation | Flow) -> float:
    """Bytes by which a plan exceeds the memory of its machines, summed over them."""
    limits = problem.memory_limits
    if not limits:  # the loads take time to compute
        return 0.0
    return math.fsum(max(0.0, load.memory_bytes - limits.get(load.machine, math.inf)) for load in evaluation.loads)


def pin_violations(problem: Problem, stages: Sequence[Stage]) -> Iterator[str]:
    """Messages for pieces that are on a machine that a pin forbids."""
    machines_of = {piece: stage.machines for stage in stages for piece in stage.layers}
    for pin in problem.pins:
        machines = machines_of[pin.piece]
        if pin.forbidden and pin.machine in machines:
            yield f"{pin.piece} is on {pin.machine}, where it must not be"
        if not pin.forbidden and machines != (pin.machine,):
            yield f"{pin.piece} is on {names_of(machines)}, and must be on {pin.machine}"


def limit_violations(problem: Problem, stages: Sequence[Stage], evaluation: Timed) -> Iterator[str]:
    """Messages for too many machines, a wrong number of stages, and times over a limit."""
    if problem.stages not in (None, len(stages)):
        yield f"it has {count_text(len(stages), 'stage')}, and {problem.stages} were asked for"
    machines = len({machine for stage in stages for machine in stage.machines})
    if problem.maximum_machines is not None and machines > problem.maximum_machines:
        yield f"it uses {count_text(machines, 'machine')}, and {problem.maximum_machines} are allowed"
    for kind, value, limit in (
        ("period", evaluation.period_seconds, problem.maximum_period_seconds),
        ("latency", evaluation.latency_seconds, problem.maximum_latency_seconds),
    ):
        if value > limit * (1 + TOLERANCE):
            yield f"its {kind} is {seconds_text(value)}, and {seconds_text(limit)} are allowed"


def _end_name(name: str) -> str:
    return "the client" if name == CLIENT else name

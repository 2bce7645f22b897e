"""Traces and plans, written by hand."""

from rpc_runtime.program.events import COMPUTE, RECEIVE, SEND, TraceEvent
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import BlobSpec, StageSpec, TensorSpec
from tvm_split.deployment.run_times import MeasuredRuns, Window
from tvm_split.placement.plan import Plan, PlannedMachine
from tvm_split.placement.prediction import LinkPrediction
from tvm_split.placement.problem import Stage

MILLISECOND = 1_000_000
A, B, C = "machine-a", "machine-b", "machine-c"


def tensor(name: str, elements: int = 250) -> TensorSpec:
    return TensorSpec(name, (elements,), "float32")


def stage(index: int, machine: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> StageSpec:
    library = BlobSpec("0" * 64, 1)
    return StageSpec(
        index,
        f"stage_{index}",
        machine,
        (),
        "cpu",
        library,
        (),
        tuple(map(tensor, inputs)),
        tuple(map(tensor, outputs)),
    )


CHAIN = Program((tensor("x"),), (tensor("z"),), (stage(0, A, ("x",), ("y",)), stage(1, B, ("y",), ("z",))))
LINKS = (LinkPrediction(A, B, 1000.0, 0.003, 0.002),)


def plan_for(program: Program, predicted=None) -> Plan:
    machines = tuple(PlannedMachine(name, {"kind": "llvm"}, 1) for name in program.machines)
    stages = tuple(Stage((replicas[0].machine,), (), name=name) for name, replicas in program.replicas.items())
    return Plan("net", "throughput", "dynamic programming", machines, stages, predicted)


def events_of(program: Program, compute=(10, 6), wire: float = 2, count: int = 20) -> list[TraceEvent]:
    """Return events, with a micro-batch every 10 ms: a stage receives and sends each tensor for ``wire`` ms."""
    events = []
    for spec, milliseconds in zip(program.stages, compute, strict=True):
        part = program.on(spec.machine)
        arriving = [(RECEIVE, route, route.source) for route in part.incoming if route.tensor in spec.inputs]
        leaving = [(SEND, route, route.destination) for route in part.outgoing if route.tensor in spec.outputs]
        for sequence in range(count):
            start = sequence * 10 * MILLISECOND
            times = (start, start + int(wire * MILLISECOND))
            events.append(
                TraceEvent(spec.machine, spec.name, sequence, COMPUTE, start, start + int(milliseconds * MILLISECOND))
            )
            events += [
                TraceEvent(spec.machine, spec.name, sequence, kind, *times, route.tensor.size_bytes, peer)
                for kind, route, peer in (*arriving, *leaving)
                if sequence in route.when
            ]
    return events


def streamed(count: int = 20) -> MeasuredRuns:
    window = Window(0, count * 10 * MILLISECOND, count)
    return MeasuredRuns((Window(0, 16 * MILLISECOND, 1),), (window,), count)

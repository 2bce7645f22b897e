"""Between the protobuf messages of ``worker.proto`` and the dataclasses that the room works with."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from tvm_split.rpc_runtime.errors import ProtocolError
from tvm_split.rpc_runtime.program.kernel_times import (
    MAXIMUM_LIMIT_SECONDS,
    KernelSet,
    KernelTime,
    TimedKernel,
    TimingEffort,
)
from tvm_split.rpc_runtime.program.machine_plan import MachinePlan, PlannedRoute, plan_of_routes
from tvm_split.rpc_runtime.program.measurements import StageStatistics, TraceEvent
from tvm_split.rpc_runtime.program.program import BlobSpec, StageSpec, TensorSpec, WeightSpec
from tvm_split.rpc_runtime.program.turns import Recurrence
from tvm_split.rpc_runtime.wire import worker_pb2 as pb

MAXIMUM_TENSOR_BYTES = 1 << 36
LINK_SECRET_BYTES = 16
MAXIMUM_STAGES = 256
"""Each is a library that is loaded, of which a process can hold some thousands."""
MAXIMUM_ROUTES = 4096
MAXIMUM_NEIGHBOURS = 64
"""Each is a data stream, or two."""
MAXIMUM_WEIGHTS = 20_000
MAXIMUM_TENSOR_TURNS = 1 << 19
"""Where each micro-batch goes is looked up in tables of one period for every tensor."""
MAXIMUM_KERNELS = 10_000
MAXIMUM_ARGUMENTS = 1000
MAXIMUM_ROUNDS = 1000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DTYPE_NAME = re.compile(r"[a-z][a-z0-9_]{1,30}")


def blob_message(blob: BlobSpec) -> pb.Blob:
    return pb.Blob(sha256=blob.sha256, size_bytes=blob.size_bytes)


def blob_spec(message: pb.Blob) -> BlobSpec:
    if not _SHA256.fullmatch(message.sha256):
        raise ProtocolError(f"a blob's name is 64 lowercase hexadecimal digits, got {message.sha256[:80]!r}")
    return BlobSpec(message.sha256, message.size_bytes)


def tensor_message(tensor: TensorSpec) -> pb.Tensor:
    return pb.Tensor(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype)


def tensor_spec(message: pb.Tensor) -> TensorSpec:
    spec = TensorSpec(message.name, tuple(message.shape), message.dtype)
    if not _is_dtype(spec.dtype):
        raise ProtocolError(f"tensor {spec.name!r} has the unknown dtype {spec.dtype[:80]!r}")
    if spec.size_bytes > MAXIMUM_TENSOR_BYTES:
        raise ProtocolError(f"tensor {spec} has {spec.size_bytes} bytes, at most {MAXIMUM_TENSOR_BYTES} are allowed")
    return spec


def _is_dtype(name: str) -> bool:
    """Whether it is numpy's name of a dtype of numbers; ``np.dtype`` reads whole grammars, and knows objects, too."""
    if not _DTYPE_NAME.fullmatch(name):
        return False
    try:
        dtype = np.dtype(name)
    except TypeError:
        return False
    return dtype.name == name and dtype.kind in "biufcV" and dtype.itemsize > 0


def stage_message(stage: StageSpec) -> pb.Stage:
    return pb.Stage(
        index=stage.index,
        name=stage.name,
        machine=stage.machine,
        layers=stage.layers,
        device=stage.device,
        library=blob_message(stage.library),
        weights=[pb.Weight(tensor=tensor_message(w.tensor), blob=blob_message(w.blob)) for w in stage.weights],
        inputs=[tensor_message(t) for t in stage.inputs],
        outputs=[tensor_message(t) for t in stage.outputs],
        replica=stage.replica,
        turns=stage.turns,
    )


def stage_spec(message: pb.Stage) -> StageSpec:
    spec = StageSpec(
        index=message.index,
        name=message.name,
        machine=message.machine,
        layers=tuple(message.layers),
        device=message.device,
        library=blob_spec(message.library),
        weights=tuple(WeightSpec(tensor_spec(w.tensor), blob_spec(w.blob)) for w in message.weights),
        inputs=tuple(tensor_spec(t) for t in message.inputs),
        outputs=tuple(tensor_spec(t) for t in message.outputs),
        replica=message.replica,
        turns=tuple(message.turns),
    )
    try:
        spec.own_turns  # noqa: B018  (refuses turns of a wrong length, and a replica without any)
    except ValueError as error:
        raise ProtocolError(f"stage {spec.name!r}, replica {spec.replica}: {error}") from None
    return spec


def load_request(
    deployment: str, plan: MachinePlan, link_secrets: Mapping[tuple[str, str], bytes]
) -> pb.LoadStagesRequest:
    return pb.LoadStagesRequest(
        deployment=deployment,
        machine=plan.machine,
        stages=[stage_message(stage) for stage in plan.stages],
        routes=[
            pb.Route(
                tensor_index=route.tensor_index,
                tensor=tensor_message(route.tensor),
                source=route.source,
                destination=route.destination,
                queue_depth=route.queue_depth,
                period=route.when.period,
                remainders=route.when.remainders,
            )
            for route in plan.routes
        ],
        link_secrets=[
            pb.LinkSecret(source=source, destination=destination, secret=secret)
            for (source, destination), secret in link_secrets.items()
        ],
    )


def link_secrets(message: pb.LoadStagesRequest, plan: MachinePlan) -> dict[tuple[str, str], bytes]:
    """The secret of each link between the plan's machine and others, by (source, destination).

    Raises:
        ProtocolError: one is missing, or too short to be one.
    """
    found = {(each.source, each.destination): each.secret for each in message.link_secrets}
    for source, destination in plan.links:
        if len(found.get((source, destination), b"")) < LINK_SECRET_BYTES:
            raise ProtocolError(
                f"the link from {source!r} to {destination!r} has no secret of {LINK_SECRET_BYTES} bytes"
            )
    return {ends: found[ends] for ends in plan.links}


def plan_from_request(message: pb.LoadStagesRequest) -> MachinePlan:
    """The plan in a request.

    Raises:
        ProtocolError: a stage lacks an input, a route touches another machine, or numbers do not fit.
    """
    machine = message.machine
    _check_sizes(message)
    stages = tuple(stage_spec(stage) for stage in message.stages)
    routes = tuple(_planned_route(route) for route in message.routes)
    for route in routes:
        if machine not in (route.source, route.destination):
            raise ProtocolError(f"route of tensor {route.tensor.name!r} does not touch machine {machine!r}")
    plan = plan_of_routes(machine, stages, routes)
    for stage in stages:
        if stage.machine != machine:
            raise ProtocolError(f"stage {stage.name!r} is for machine {stage.machine!r}, not {machine!r}")
    # Of each tensor, what every turn of the period has; checks by route and stage would take the product of both.
    tensors = len(routes) + sum(len(stage.inputs) + len(stage.outputs) for stage in stages)
    if tensors * plan.period > MAXIMUM_TENSOR_TURNS:
        raise ProtocolError(
            f"machine {machine!r} has {tensors} tensors and routes in {plan.period} turns, and their product may be "
            f"{MAXIMUM_TENSOR_TURNS}: give the stages shorter lists of turns"
        )
    _check_supplies(plan)
    made = {tensor: stage.own_turns for stage in stages for tensor in stage.outputs}
    for route in (*plan.outgoing, *plan.local):
        own = made.get(route.tensor)
        if own is None or not all(place in own for place in _places(route.when, plan)):
            raise ProtocolError(f"a route takes {route.tensor}, and no stage of machine {machine!r} makes it")
    taken: dict[str, set[int]] = {}
    for stage in stages:
        for tensor in stage.inputs:
            taken.setdefault(tensor.name, set()).update(_places(stage.own_turns, plan))
    for route in (*plan.incoming, *plan.local):
        if not taken.get(route.tensor.name, set()).issuperset(_places(route.when, plan)):
            raise ProtocolError(f"a route brings {route.tensor} to {machine!r}, where no stage takes it in that turn")
    return plan


def _check_sizes(message: pb.LoadStagesRequest) -> None:
    """Before any work is done with them."""
    neighbours = {end for route in message.routes for end in (route.source, route.destination)}
    tensors = sum(len(stage.inputs) + len(stage.outputs) for stage in message.stages)
    for what, count, limit in (
        ("stages", len(message.stages), MAXIMUM_STAGES),
        ("routes", len(message.routes), MAXIMUM_ROUTES),
        ("neighbours", len(neighbours), MAXIMUM_NEIGHBOURS),
        ("inputs and outputs of stages", tensors, MAXIMUM_ROUTES),
        ("weights", sum(len(stage.weights) for stage in message.stages), MAXIMUM_WEIGHTS),
    ):
        if count > limit:
            raise ProtocolError(f"machine {message.machine!r} has {count} {what}, at most {limit} are allowed")


def _planned_route(message: pb.Route) -> PlannedRoute:
    tensor = tensor_spec(message.tensor)
    if not 1 <= message.queue_depth <= 100_000:
        raise ProtocolError(f"route of tensor {tensor.name!r} has the queue depth {message.queue_depth}")
    try:
        when = Recurrence(message.period, tuple(message.remainders))
    except ValueError as error:
        raise ProtocolError(f"route of tensor {tensor.name!r}: {error}") from None
    return PlannedRoute(message.tensor_index, tensor, message.source, message.destination, message.queue_depth, when)


def _check_supplies(plan: MachinePlan) -> None:
    """Each micro-batch of a stage gets each input, and from one source only."""
    sources: dict[TensorSpec, dict[int, list[str]]] = {}
    for route in (*plan.incoming, *plan.local):
        supplied = sources.setdefault(route.tensor, {})
        for place in _places(route.when, plan):
            supplied.setdefault(place, []).append(route.source)
    for stage in plan.stages:
        for tensor in stage.inputs:
            supplied = sources.get(tensor, {})
            for place in _places(stage.own_turns, plan):
                found = supplied.get(place, [])
                if not found:
                    raise ProtocolError(f"stage {stage.name!r} takes {tensor}, and no route supplies it")
                if len(found) > 1:
                    raise ProtocolError(
                        f"stage {stage.name!r} takes {tensor}, and several routes supply it: from {found}"
                    )


def _places(when: Recurrence, plan: MachinePlan) -> list[int]:
    """The micro-batches of ``when`` within the plan's period."""
    return [place for place in range(plan.period) if place in when]


def statistics_message(statistics: StageStatistics) -> pb.StageStatistics:
    return pb.StageStatistics(
        stage=statistics.name,
        micro_batches=statistics.micro_batches,
        compute_seconds=statistics.compute_seconds,
        median_compute_seconds=statistics.median_compute_seconds,
        wait_seconds=statistics.wait_seconds,
        receive_seconds=statistics.receive_seconds,
        send_seconds=statistics.send_seconds,
        bytes_received=statistics.bytes_received,
        bytes_sent=statistics.bytes_sent,
    )


def stage_statistics(message: pb.StageStatistics, machine: str) -> StageStatistics:
    return StageStatistics(
        name=message.stage,
        machine=machine,
        micro_batches=message.micro_batches,
        compute_seconds=message.compute_seconds,
        median_compute_seconds=message.median_compute_seconds,
        wait_seconds=message.wait_seconds,
        receive_seconds=message.receive_seconds,
        send_seconds=message.send_seconds,
        bytes_received=message.bytes_received,
        bytes_sent=message.bytes_sent,
    )


def trace_message(event: TraceEvent) -> pb.TraceEvent:
    return pb.TraceEvent(
        stage=event.stage,
        sequence=event.sequence,
        kind=event.kind,
        start_nanoseconds=event.start_nanoseconds,
        end_nanoseconds=event.end_nanoseconds,
    )


def trace_event(message: pb.TraceEvent, machine: str) -> TraceEvent:
    return TraceEvent(
        machine, message.stage, message.sequence, message.kind, message.start_nanoseconds, message.end_nanoseconds
    )


def kernel_set_request(deployment: str, kernels: KernelSet) -> pb.LoadKernelsRequest:
    return pb.LoadKernelsRequest(
        deployment=deployment,
        machine=kernels.machine,
        device=kernels.device,
        library=blob_message(kernels.library),
        weight_bytes=kernels.weight_bytes,
        kernels=[
            pb.TimedKernel(
                function=kernel.function,
                arguments=[tensor_message(argument) for argument in kernel.arguments],
                weights=sorted(kernel.weights),
                results=kernel.results,
            )
            for kernel in kernels.kernels
        ],
    )


def kernel_set(message: pb.LoadKernelsRequest) -> KernelSet:
    """The kernels in a request.

    Raises:
        ProtocolError: none or too many, two of one name, or arguments that cannot be what is said of them.
    """
    if not 1 <= len(message.kernels) <= MAXIMUM_KERNELS:
        raise ProtocolError(f"1 to {MAXIMUM_KERNELS} kernels can be timed together, got {len(message.kernels)}")
    if message.weight_bytes > MAXIMUM_TENSOR_BYTES:
        raise ProtocolError(f"weights of {message.weight_bytes} bytes, at most {MAXIMUM_TENSOR_BYTES} are allowed")
    kernels = tuple(_timed_kernel(kernel) for kernel in message.kernels)
    names = {kernel.function for kernel in kernels}
    if len(names) != len(kernels):
        raise ProtocolError(f"{len(kernels)} kernels have {len(names)} different names; each is timed once")
    return KernelSet(message.machine, message.device, blob_spec(message.library), kernels, message.weight_bytes)


def _timed_kernel(message: pb.TimedKernel) -> TimedKernel:
    count, weights = len(message.arguments), frozenset(message.weights)
    where = f"kernel {message.function[:200]!r}"
    if not message.function or not 1 <= count <= MAXIMUM_ARGUMENTS:
        raise ProtocolError(f"{where} has {count} arguments; it needs a name and 1 to {MAXIMUM_ARGUMENTS}")
    if not 1 <= message.results <= count:
        raise ProtocolError(f"{where} writes {message.results} of {count} arguments")
    if any(position >= count - message.results for position in weights):
        raise ProtocolError(f"{where} has weights at {sorted(weights)}, and {count - message.results} operands")
    arguments = tuple(tensor_spec(argument) for argument in message.arguments)
    return TimedKernel(message.function, arguments, weights, message.results)


def timing_request(deployment: str, effort: TimingEffort) -> pb.TimeKernelsRequest:
    return pb.TimeKernelsRequest(
        deployment=deployment,
        minimum_rounds=effort.minimum_rounds,
        minimum_seconds=effort.minimum_seconds,
        limit_seconds=effort.limit_seconds,
    )


def timing_effort(message: pb.TimeKernelsRequest) -> TimingEffort:
    if not 1 <= message.minimum_rounds <= MAXIMUM_ROUNDS:
        raise ProtocolError(f"kernels are timed in 1 to {MAXIMUM_ROUNDS} rounds, got {message.minimum_rounds}")
    if not 0 < message.limit_seconds <= MAXIMUM_LIMIT_SECONDS:
        raise ProtocolError(f"a time limit lies in (0, {MAXIMUM_LIMIT_SECONDS:g}] s, got {message.limit_seconds}")
    if not 0 <= message.minimum_seconds <= message.limit_seconds:
        raise ProtocolError(f"{message.minimum_seconds} s at least do not fit {message.limit_seconds} s at most")
    return TimingEffort(message.minimum_rounds, message.minimum_seconds, message.limit_seconds)


def kernel_time_message(time: KernelTime) -> pb.KernelTime:
    return pb.KernelTime(
        function=time.function,
        seconds=time.seconds,
        best_seconds=time.best_seconds,
        rounds=time.rounds,
        error=time.error,
    )


def kernel_time(message: pb.KernelTime) -> KernelTime:
    times = (message.seconds, message.best_seconds)
    if not message.error and not all(math.isfinite(each) and each > 0 for each in times):
        raise ProtocolError(f"kernel {message.function[:200]!r} is said to have taken {times} seconds")
    return KernelTime(message.function, *times, message.rounds, message.error)

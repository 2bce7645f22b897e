"""Between the protobuf messages of ``worker.proto`` and the dataclasses that the room works with.

Both have the same names for the same things, so one function writes any of them, and one reads them. Nothing that is
read is trusted: what does not fit raises :class:`ProtocolError`, and values of some kinds have checks of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.codec import Codec, fits
from rpc_runtime.program.kernel_times import (
    MAXIMUM_LIMIT_SECONDS,
    NETWORK,
    KernelSet,
    KernelTime,
    TimedKernel,
    TimingEffort,
)
from rpc_runtime.program.machine_plan import MachinePlan, PlannedRoute, plan_of_routes
from rpc_runtime.program.program import BlobSpec, StageSpec, TensorSpec
from rpc_runtime.program.turns import LONGEST_CYCLE, Recurrence
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.foreign_text import AnyMessage
from rpc_runtime.wire.framing import PROTOCOL_VERSION

MAXIMUM_TENSOR_BYTES = 1 << 36
LINK_SECRET_BYTES = 16
MAXIMUM_STAGES = 256
"""Each is a library that is loaded, of which a process can hold some thousands."""
MAXIMUM_ROUTES = 4096
MAXIMUM_NEIGHBOURS = 64
"""Each is a data stream, or two."""
MAXIMUM_WEIGHTS = 20_000
MAXIMUM_TENSOR_TURNS = 1 << 19
"""Where each micro-batch goes is looked up in tables that have the turns of one period for every tensor."""
MAXIMUM_KERNELS = 10_000
MAXIMUM_ARGUMENTS = 1000
MAXIMUM_ROUNDS = 1000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DTYPE_NAME = re.compile(r"[a-z][a-z0-9_]{1,30}")


Value = TypeVar("Value")


def message_of(kind: type[AnyMessage], value: Any, **others: Any) -> AnyMessage:
    """The message of a dataclass: its fields of the same names, nested ones likewise, and ``others``."""
    given = {
        field.name: _written(field, getattr(value, field.name))
        for field in kind.DESCRIPTOR.fields
        if field.name not in others
    }
    return kind(**given, **others)


def _written(field: Any, value: Any) -> Any:
    if field.message_type is None:
        return value
    kind = GetMessageClass(field.message_type)
    return [message_of(kind, each) for each in value] if field.is_repeated else message_of(kind, value)


def value_of(kind: type[Value], message: Message, **others: Any) -> Value:
    """The dataclass of a message: its fields of the same names, nested ones likewise, and ``others``.

    Raises:
        ProtocolError: a value of a kind that has a check does not pass it.
    """
    given = dict(others)
    for name, many, nested in _fields(kind):  # type: ignore[arg-type]
        if name not in others:
            found = getattr(message, name)
            if nested is not None:
                found = [value_of(nested, each) for each in found] if many else value_of(nested, found)
            given[name] = many(found) if many else found
    value = kind(**given)
    if kind in _CHECKS:
        _CHECKS[kind](value)
    return value


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any, Any], ...]:
    """Of each field: its name, what holds several values if it has several, and their kind if they are dataclasses."""
    found = []
    for name, hint in get_type_hints(kind).items():
        one = (*get_args(hint), hint)[0]
        found.append((name, get_origin(hint), one if is_dataclass(one) else None))
    return tuple(found)


def _check_blob(blob: BlobSpec) -> None:
    if not _SHA256.fullmatch(blob.sha256):
        raise ProtocolError(f"a blob's name is 64 lowercase hexadecimal digits, got {blob.sha256[:80]!r}")


def _check_tensor(tensor: TensorSpec) -> None:
    if not _is_dtype(tensor.dtype):
        raise ProtocolError(f"tensor {tensor.name!r} has the unknown dtype {tensor.dtype[:80]!r}")
    if tensor.size_bytes > MAXIMUM_TENSOR_BYTES:
        size = tensor.size_bytes
        raise ProtocolError(f"tensor {tensor} has {size} bytes, at most {MAXIMUM_TENSOR_BYTES} are allowed")


def _is_dtype(name: str) -> bool:
    """Whether it is numpy's name of a dtype of numbers; ``np.dtype`` reads whole grammars, and knows objects, too."""
    if not _DTYPE_NAME.fullmatch(name):
        return False
    try:
        dtype = np.dtype(name)
    except TypeError:
        return False
    return dtype.name == name and dtype.kind in "biufcV" and dtype.itemsize > 0


def _check_stage(stage: StageSpec) -> None:
    try:
        stage.own_turns  # noqa: B018  (refuses turns of a wrong length, and a replica without any)
    except ValueError as error:
        raise ProtocolError(f"stage {stage.name!r}, replica {stage.replica}: {error}") from None


def hello_of(deployment: str, source: str, destination: str, secret: bytes = b"") -> pb.Hello:
    """What the caller of a data stream says first."""
    version = PROTOCOL_VERSION
    return pb.Hello(
        protocol_version=version, deployment=deployment, source=source, destination=destination, secret=secret
    )


def load_request(
    deployment: str, plan: MachinePlan, link_secrets: Mapping[tuple[str, str], bytes]
) -> pb.LoadStagesRequest:
    return pb.LoadStagesRequest(
        deployment=deployment,
        machine=plan.machine,
        stages=[message_of(pb.Stage, stage) for stage in plan.stages],
        routes=[
            message_of(pb.Route, route, period=route.when.period, remainders=route.when.remainders)
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
    stages = tuple(value_of(StageSpec, stage) for stage in message.stages)
    routes = tuple(_planned_route(route) for route in message.routes)
    for route in routes:
        if machine not in (route.source, route.destination):
            raise ProtocolError(f"route of tensor {route.tensor.name!r} does not touch machine {machine!r}")
    plan = plan_of_routes(machine, stages, routes)
    for stage in stages:
        if stage.machine != machine:
            raise ProtocolError(f"stage {stage.name!r} is for machine {stage.machine!r}, not {machine!r}")
    _check_turns(plan)
    _check_supplies(plan)
    made = {tensor: {*stage.own_turns.within(plan.period)} for stage in stages for tensor in stage.outputs}
    for route in (*plan.outgoing, *plan.local):
        if not made.get(route.tensor, set()).issuperset(route.when.within(plan.period)):
            raise ProtocolError(f"a route takes {route.tensor}, and no stage of machine {machine!r} makes it")
    taken: dict[str, set[int]] = {}
    for stage in stages:
        for tensor in stage.inputs:
            taken.setdefault(tensor.name, set()).update(stage.own_turns.within(plan.period))
    for route in (*plan.incoming, *plan.local):
        if not taken.get(route.tensor.name, set()).issuperset(route.when.within(plan.period)):
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
        ("turns of routes", sum(len(route.remainders) for route in message.routes), MAXIMUM_TENSOR_TURNS),
        ("turns of a stage", max((len(stage.turns) for stage in message.stages), default=0), LONGEST_CYCLE),
    ):
        if count > limit:
            raise ProtocolError(f"machine {message.machine!r} has {count} {what}, at most {limit} are allowed")


def _check_turns(plan: MachinePlan) -> None:
    """That tables of all turns of each tensor and route stay small: those of one period."""
    try:
        period = plan.period
    except ValueError as error:
        raise ProtocolError(f"machine {plan.machine!r}: {error}") from None
    whole = sum(period // route.when.period * len(route.when.remainders) for route in plan.routes)
    for stage in plan.stages:
        own = period // stage.own_turns.period * len(stage.own_turns.remainders)
        whole += own * (len(stage.inputs) + len(stage.outputs))
    if whole > MAXIMUM_TENSOR_TURNS:
        raise ProtocolError(
            f"the tensors and routes of machine {plan.machine!r} have {whole} turns together, of {period} "
            f"micro-batches, and may have {MAXIMUM_TENSOR_TURNS}: give the stages shorter lists of turns"
        )


def _planned_route(message: pb.Route) -> PlannedRoute:
    where = f"route of tensor {message.tensor.name!r}"
    try:
        when = Recurrence(message.period, tuple(message.remainders))
    except ValueError as error:
        raise ProtocolError(f"{where}: {error}") from None
    if not 1 <= message.queue_depth <= 100_000:
        raise ProtocolError(f"{where} has the queue depth {message.queue_depth}")
    if message.codec not in tuple(Codec):
        raise ProtocolError(f"{where} has the unknown codec {message.codec[:80]!r}: upgrade one side")
    route = value_of(PlannedRoute, message, when=when, codec=Codec(message.codec))
    if not fits(route.codec, route.tensor) or (route.source == route.destination and route.codec is not Codec.NONE):
        raise ProtocolError(
            f"{where}, {route.tensor}, from {route.source!r} to {route.destination!r} has the codec {route.codec}, "
            "which does not fit it"
        )
    return route


def _check_supplies(plan: MachinePlan) -> None:
    """Each micro-batch of a stage gets each input, and from one source only."""
    sources: dict[TensorSpec, dict[int, list[str]]] = {}
    for route in (*plan.incoming, *plan.local):
        supplied = sources.setdefault(route.tensor, {})
        for place in route.when.within(plan.period):
            supplied.setdefault(place, []).append(route.source)
    for stage in plan.stages:
        for tensor in stage.inputs:
            supplied = sources.get(tensor, {})
            for place in stage.own_turns.within(plan.period):
                found = supplied.get(place, [])
                if not found:
                    raise ProtocolError(f"stage {stage.name!r} takes {tensor}, and no route supplies it")
                if len(found) > 1:
                    raise ProtocolError(
                        f"stage {stage.name!r} takes {tensor}, and several routes supply it: from {found}"
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
    kernels = value_of(KernelSet, message)
    names = {kernel.function for kernel in kernels.kernels}
    if len(names) != len(kernels.kernels):
        raise ProtocolError(f"{len(kernels.kernels)} kernels have {len(names)} different names; each is timed once")
    return kernels


def _check_kernel(kernel: TimedKernel) -> None:
    count = len(kernel.arguments)
    where = f"kernel {kernel.function[:200]!r}"
    if not kernel.function or not 1 <= count <= MAXIMUM_ARGUMENTS:
        raise ProtocolError(f"{where} has {count} arguments; it needs a name and 1 to {MAXIMUM_ARGUMENTS}")
    if not (kernel.function != NETWORK) <= kernel.results <= count:
        raise ProtocolError(f"{where} writes {kernel.results} of {count} arguments")
    if any(position >= count - kernel.results for position in kernel.weights):
        raise ProtocolError(f"{where} has weights at {sorted(kernel.weights)}, and {count - kernel.results} operands")


def _check_effort(effort: TimingEffort) -> None:
    if not 1 <= effort.minimum_rounds <= MAXIMUM_ROUNDS:
        raise ProtocolError(f"kernels are timed in 1 to {MAXIMUM_ROUNDS} rounds, got {effort.minimum_rounds}")
    if not 0 < effort.limit_seconds <= MAXIMUM_LIMIT_SECONDS:
        raise ProtocolError(f"a time limit lies in (0, {MAXIMUM_LIMIT_SECONDS:g}] s, got {effort.limit_seconds}")
    if not 0 <= effort.minimum_seconds <= effort.limit_seconds:
        raise ProtocolError(f"{effort.minimum_seconds} s at least do not fit {effort.limit_seconds} s at most")


def _check_time(time: KernelTime) -> None:
    if not time.error and not (math.isfinite(time.seconds) and time.seconds > 0):
        raise ProtocolError(
            f"kernel {time.function[:200]!r} has the time {time.seconds} s; it must be finite and above 0"
        )


_CHECKS: dict[type, Callable[[Any], None]] = {
    BlobSpec: _check_blob,
    TensorSpec: _check_tensor,
    StageSpec: _check_stage,
    TimedKernel: _check_kernel,
    TimingEffort: _check_effort,
    KernelTime: _check_time,
}

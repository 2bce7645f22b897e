"""Reading any message gives a value or a ProtocolError; and written messages are read back equal."""

import contextlib
import random
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings

from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.events import Observation, Track
from rpc_runtime.program.measurements import KernelSet, KernelTime, TimedKernel, TimingEffort
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import BlobSpec, StageSpec, TensorSpec, WeightSpec
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.messages import LINK_SECRET_BYTES, link_secrets, load_request, message_of, program_of, value_of
from tests.helpers.mutations import random_message
from tests.helpers.rpc_runtime.random_programs import programs
from tests.helpers.rpc_runtime.specs import stage, tensor

KINDS: dict[type, Any] = {
    BlobSpec: pb.Blob,
    TensorSpec: pb.Tensor,
    WeightSpec: pb.Weight,
    StageSpec: pb.Stage,
    Track: pb.Track,
    Observation: pb.ObserveReply,
    TimedKernel: pb.TimedKernel,
    TimingEffort: pb.TimeKernelsRequest,
    KernelTime: pb.KernelTime,
    KernelSet: pb.LoadKernelsRequest,
    WorkerDescription: pb.DescribeReply,
}
OWN = {"machine": "box", "round_trip_seconds": 0.5, "clock_offset_nanoseconds": 7, "wall_clock_offset_nanoseconds": 8}
"""Fields that the reader sets itself, or that are not in the message."""
ONLY_IN_MESSAGES = ("deployment", "clock_nanoseconds", "wall_clock_nanoseconds", "about")
TEXTS = ("a", "box", "float32", "float8_e4m3fn", "object", "0" * 64, "cpu")
"""Texts that are valid in some fields."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_message_is_a_protocol_error_or_a_value_that_is_read_back_equal(kind: type) -> None:
    more = {name: value for name, value in OWN.items() if name in get_type_hints(kind)}
    for seed in range(60):
        message = random_message(KINDS[kind], random.Random(seed), TEXTS)
        with contextlib.suppress(ProtocolError):
            value = value_of(kind, message, **more)
            assert isinstance(value, kind)
            hash(value)
            only_in_message = {
                name: getattr(message, name)
                for name in ONLY_IN_MESSAGES
                if name in KINDS[kind].DESCRIPTOR.fields_by_name
            }
            again = KINDS[kind].FromString(message_of(KINDS[kind], value, **only_in_message).SerializeToString())
            read = value_of(kind, again, **more)
            assert read == value or repr(read) == repr(value)  # also equal with NaN


def test_any_request_to_load_stages() -> None:
    for seed in range(200):
        message = random_message(pb.LoadStagesRequest, random.Random(seed), TEXTS)
        with contextlib.suppress(ProtocolError):
            part = program_of(message)
            assert part.machine == message.machine
            link_secrets(message, part)


@settings(max_examples=30)
@given(programs(most_replicas=3))
def test_programs_are_read_back_equal(program: Program) -> None:
    for machine in program.machines:
        part = program.on(machine)
        secrets = {link: bytes([number] * LINK_SECRET_BYTES) for number, link in enumerate(part.links)}
        request = load_request("d", program, machine, secrets)
        request = pb.LoadStagesRequest.FromString(request.SerializeToString())
        assert program_of(request) == part
        assert link_secrets(request, part) == secrets
        for link in part.links:
            wrong = load_request("d", program, machine, {**secrets, link: secrets[link][1:]})
            with pytest.raises(ProtocolError, match=f"the link from '{link[0]}' to '{link[1]}' has no secret"):
                link_secrets(wrong, part)


def change_stage(name: str, value: Any) -> Callable[[pb.LoadStagesRequest], None]:
    return lambda request: setattr(request.program.stages[0], name, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda request: request.ClearField("program"), "no stage for machine 'A'"),
        (lambda request: setattr(request, "machine", "B"), "no stage for machine 'B'"),
        (lambda request: request.program.ClearField("inputs"), "'x' is used on 'A', and no input or earlier stage"),
        (lambda request: setattr(request.program.stages[0].library, "sha256", "../../etc/passwd"), "64 lowercase"),
        (lambda request: request.program.stages[0].inputs[0].shape.append(2**50), "at most"),
        (change_stage("replica", 7), r"stage 's' on 'A': the replicas are numbered \[7\]"),
        (lambda request: request.program.stages[0].ClearField("replica_schedule"), "stage 's' on 'A'"),
        (lambda request: request.program.codecs.add(tensor="x", codec="none"), "this tensor does not take that route"),
        (lambda request: request.program.codecs.add(tensor="x", codec="zip"), "no codec 'zip'"),
        (lambda request: request.program.input_slices.add(input="gone"), "unknown dtype|which is not another input"),
    ],
)
def test_a_program_that_does_not_fit_is_refused(change: Callable[[pb.LoadStagesRequest], None], words: str) -> None:
    request = load_request("d", Program((tensor("x"),), (tensor("y"),), (stage(0, "s", "A", "x", "y"),)), "A", {})
    change(request)
    with pytest.raises(ProtocolError, match=words):
        program_of(request)


@pytest.mark.parametrize(
    "dtype", ["02ded11b", "O", "object", "f4", "float", "float32,float32", "str", "void", "(2,)f4", ""]
)
def test_a_dtype_that_is_none_is_refused(dtype: str) -> None:
    with pytest.raises(ProtocolError, match="unknown dtype"):
        value_of(TensorSpec, pb.Tensor(name="x", dtype=dtype))

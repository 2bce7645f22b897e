"""Invalid programs are rejected; the message names the stage or the tensor."""

from dataclasses import replace

import pytest

from rpc_runtime.program.program import InputSlice, Program
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.program.specs import StageSpec, TensorSpec
from tests.helpers.rpc_runtime.specs import replicas, stage, tensor


def test_replicas_that_do_not_fit_together() -> None:
    both = replicas(stage(0, "a", "A", "x", "y"), "AB", "01")

    def refused(stages: tuple[StageSpec, ...], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            Program((tensor("x"),), (tensor("y"),), stages)

    refused((both[0], replace(both[1], machine="A")), "stage 'a' on 'A', 'A': .*different machines")
    refused((both[0], replace(both[1], outputs=())), "the same outputs, but these are .* on 'A' and .* on 'B'")
    refused(
        (both[0], replace(both[1], replica_schedule=(0, 1, 1))),
        r"the same replica_schedule, but these are \(0, 1\) on 'A'",
    )
    refused((both[0], replace(both[1], replica=0)), r"numbered \[0, 0\]")
    refused(both[:1], r"numbered \[0\] and have the schedule \[0, 1\]")
    refused(replicas(both[0], "AB", "00"), "name each in the schedule")
    refused(replicas(both[0], "AB", "01" * 8_193), "a period of 1 to 16384, not 16386")
    second_stage = stage(1, "b", "C", "y", "z")
    late = (*replicas(both[0], "AB", "0" * 126 + "1"), *replicas(second_stage, "CD", "0" * 130 + "1"))
    refused(late, "repeat together after more than 16384 micro-batches")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (InputSlice(TensorSpec("part", (1, 3), "uint8"), "gone", 0, 0), "'gone', which is not another input"),
        (InputSlice(TensorSpec("image", (1, 3), "uint8"), "image", 0, 0), "'image', which is not another input"),
        (
            InputSlice(TensorSpec("part", (1, 3), "uint8"), "image", 0, 2),
            r"from 2 of axis 0, does not lie in .*\[2, 3\]",
        ),
        (InputSlice(TensorSpec("part", (1, 3), "uint8"), "image", 0, -1), "from -1 of axis 0, does not lie"),
        (InputSlice(TensorSpec("part", (1, 3), "uint8"), "image", 2, 0), "from 0 of axis 2, does not lie"),
        (InputSlice(TensorSpec("part", (1, 3), "uint8"), "image", -2, 0), "from 0 of axis -2, does not lie"),
        (InputSlice(TensorSpec("part", (1, 2), "uint8"), "image", 0, 0), "does not lie"),
        (InputSlice(TensorSpec("part", (1, 3), "int8"), "image", 0, 0), "does not lie"),
    ],
)
def test_slices_lie_in_their_inputs(part: InputSlice, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Program((TensorSpec("image", (2, 3), "uint8"),), (), (), input_slices=(part,))


@pytest.mark.parametrize(
    ("stages", "output", "words"),
    [
        ((stage(0, "a", "A", "x", "t"), stage(1, "b", "B", "x", "t")), "x", "'t' is made twice; .* by stage 'b'"),
        ((stage(0, "a", "A", "x", "x"),), "x", "tensor 'x' is made twice; the second time by stage 'a'"),
        ((stage(0, "a", "A", "gone", "y"),), "y", "'gone' is used on 'A', and no input or earlier stage makes it"),
        ((stage(0, "a", "A", "x", "y"),), "gone", f"'gone' is used on '{CLIENT}', and no input or earlier stage"),
        ((stage(0, "a", "A", "t", "y"), stage(1, "b", "B", "x", "t")), "y", "'t' is used on 'A', and no input or earl"),
    ],
)
def test_a_tensor_is_made_once_and_before_it_is_used(stages: tuple[StageSpec, ...], output: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Program((tensor("x"),), (tensor(output),), stages)


def test_a_tensor_is_the_same_for_all() -> None:
    consumer = replace(stage(0, "a", "A", "x", "y"), inputs=(TensorSpec("x", (3,), "float32"),))
    with pytest.raises(ValueError, match=r"'A' takes x: float32\[3\], and what is made is x: float32\[2\]"):
        Program((tensor("x"),), (tensor("y"),), (consumer,))

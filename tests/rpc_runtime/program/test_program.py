"""What is no program is refused, with the stage or the tensor that does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rpc_runtime.program.program import CLIENT, InputCut, Program, StageSpec, TensorSpec
from tests.helpers.rpc_runtime.specs import replicas, stage, tensor


def test_replicas_that_do_not_fit_together() -> None:
    both = replicas(stage(0, "a", "A", "x", "y"), "AB", "01")

    def refused(stages: tuple[StageSpec, ...], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            Program((tensor("x"),), (tensor("y"),), stages)

    refused((both[0], replace(both[1], machine="A")), "stage 'a' on 'A', 'A': .*different machines")
    refused((both[0], replace(both[1], outputs=())), "the same outputs, but these are .* on 'A' and .* on 'B'")
    refused((both[0], replace(both[1], turns=(0, 1, 1))), r"the same turns, but these are \(0, 1\) on 'A'")
    refused((both[0], replace(both[1], replica=0)), r"numbered \[0, 0\]")
    refused(both[:1], r"numbered \[0\] and have the turns \[0, 1\]")
    refused(replicas(both[0], "AB", "00"), "give each a turn")
    refused(replicas(both[0], "AB", "01" * 8_193), "a period of 1 to 16384, not 16386")
    others = stage(1, "b", "C", "y", "z")
    late = (*replicas(both[0], "AB", "0" * 126 + "1"), *replicas(others, "CD", "0" * 130 + "1"))
    refused(late, "repeat together after more than 16384 micro-batches")


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (InputCut(TensorSpec("part", (1, 3), "uint8"), "gone", 0, 0), "input 'gone', which is no other input"),
        (InputCut(TensorSpec("image", (1, 3), "uint8"), "image", 0, 0), "input 'image', which is no other input"),
        (InputCut(TensorSpec("part", (1, 3), "uint8"), "image", 0, 2), r"from 2 of axis 0, does not lie in .*\[2, 3\]"),
        (InputCut(TensorSpec("part", (1, 3), "uint8"), "image", 0, -1), "from -1 of axis 0, does not lie"),
        (InputCut(TensorSpec("part", (1, 3), "uint8"), "image", 2, 0), "from 0 of axis 2, does not lie"),
        (InputCut(TensorSpec("part", (1, 3), "uint8"), "image", -2, 0), "from 0 of axis -2, does not lie"),
        (InputCut(TensorSpec("part", (1, 2), "uint8"), "image", 0, 0), "does not lie"),
        (InputCut(TensorSpec("part", (1, 3), "int8"), "image", 0, 0), "does not lie"),
    ],
)
def test_cuts_lie_in_their_inputs(cut: InputCut, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Program((TensorSpec("image", (2, 3), "uint8"),), (), (), cuts=(cut,))


def test_a_tensor_is_made_once() -> None:
    program = Program((tensor("x"),), (), (stage(0, "a", "A", "x", "t"), stage(1, "b", "B", "x", "t")))
    with pytest.raises(ValueError, match="tensor 't' is made twice; the second time by stage 'b'"):
        program.handovers  # noqa: B018
    again = Program((tensor("x"),), (), (stage(0, "a", "A", "x", "x"),))
    with pytest.raises(ValueError, match="tensor 'x' is made twice; the second time by stage 'a'"):
        again.handovers  # noqa: B018


@pytest.mark.parametrize(("inputs", "output", "user"), [("gone", "y", "A"), ("x", "gone", CLIENT)])
def test_a_tensor_that_is_used_is_made(inputs: str, output: str, user: str) -> None:
    program = Program((tensor("x"),), (tensor(output),), (stage(0, "a", "A", inputs, "y"),))
    with pytest.raises(ValueError, match=f"tensor 'gone' is used on '{user}', and no stage or input makes it"):
        program.handovers  # noqa: B018

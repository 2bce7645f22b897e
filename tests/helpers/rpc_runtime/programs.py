"""Programs of many shapes for three machines, and micro-batches for them."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from tvm.relax import op

from rpc_runtime.program.program import Program
from tests.helpers.rpc_runtime.program_maker import ProgramMaker

A, B, C = "machine-a", "machine-b", "machine-c"


def double(x: Any) -> list[Any]:
    return [op.add(x, x)]


def add(x: Any, y: Any) -> list[Any]:
    return [op.add(x, y)]


def subtract(x: Any, y: Any) -> list[Any]:
    return [op.subtract(x, y)]


def chain(maker: ProgramMaker) -> Program:
    value = maker.input("x")
    weights = {"w": np.full((2, 8), 3, np.float32)}
    value = maker.stage("one", A, [value], add, weights=weights)
    value = maker.stage("two", B, [value], double)
    value = maker.stage("three", C, [value], add, weights=weights)
    return maker.program([value])


def skips(maker: ProgramMaker) -> Program:
    """A skip connection over two machines, two consumers on different machines, an output from the middle."""
    x = maker.input("x")
    first = maker.stage("one", A, [x], double)
    second = maker.stage("two", B, [first], double)
    third = maker.stage("three", C, [second, first], subtract)
    fourth = maker.stage("four", A, [third, second, first], lambda a, b, c: [op.add(op.add(a, b), c)])
    return maker.program([fourth, second, x, second])


def diamond_on_two_machines(maker: ProgramMaker) -> Program:
    """Both machines have two stages; tensors go in both directions, and one machine uses a tensor twice."""
    x = maker.input("x")
    doubled = maker.stage("one", A, [x], double)
    left = maker.stage("left", B, [doubled], double)
    right = maker.stage("right", A, [doubled], lambda v: [op.negative(v)])
    both = maker.stage("both", B, [doubled, left, right], lambda a, b, c: [op.add(a, op.subtract(b, c))])
    return maker.program([both])


def inputs_at_different_stages(maker: ProgramMaker) -> Program:
    x, y, z = maker.input("x"), maker.input("y"), maker.input("z")
    first = maker.stage("one", A, [x], double)
    second = maker.stage("two", B, [first, y], subtract)
    third = maker.stage("three", C, [second, z, x], lambda a, b, c: [op.add(op.subtract(a, b), c), op.negative(a)])
    return maker.program([third[1], first, third[0], y])


def one_machine(maker: ProgramMaker) -> Program:
    value = maker.input("x")
    for name in ("one", "two", "three"):
        value = maker.stage(name, A, [value], double)
    return maker.program([value])


def an_output_that_is_a_view_of_an_input(maker: ProgramMaker) -> Program:
    x = maker.input("x")
    first = maker.stage("one", A, [x], lambda v: [op.reshape(v, (16,)), op.add(v, v)])
    second = maker.stage("two", B, [first[0]], lambda v: [op.reshape(v, (4, 4))])
    return maker.program([second, first[0], first[1]])


def a_stage_without_inputs_and_one_without_consumers(maker: ProgramMaker) -> Program:
    x = maker.input("x")
    constant = maker.stage("constant", B, [], lambda w: [op.add(w, w)], weights={"w": np.ones((2, 8), np.float32)})
    result = maker.stage("one", A, [x, constant], add)
    maker.stage("unused", B, [result], double)
    return maker.program([result])


SHAPES = [
    chain,
    skips,
    diamond_on_two_machines,
    inputs_at_different_stages,
    one_machine,
    an_output_that_is_a_view_of_an_input,
    a_stage_without_inputs_and_one_without_consumers,
]


def batches_for(program: Program, count: int) -> list[list[np.ndarray]]:
    random = np.random.default_rng(count)
    return [
        [random.integers(-9, 9, tensor.shape).astype(tensor.dtype) for tensor in program.inputs] for _ in range(count)
    ]


def one_stage(maker: ProgramMaker, name: str = "one") -> Program:
    return maker.program([maker.stage(name, A, [maker.input("x")], double)])


def endless(program: Program) -> Iterator[list[np.ndarray]]:
    return itertools.cycle(batches_for(program, 2))


def numbered(count: int, start: int) -> list[list[np.ndarray]]:
    return [[np.full((2, 8), start + number, np.float32)] for number in range(count)]

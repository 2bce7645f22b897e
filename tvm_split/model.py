"""A trained network as every later step sees it, whatever framework it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import tvm

from rpc_runtime.program.program import TensorSpec
from tvm_split.compiler.describe import describe, layer_graph
from tvm_split.errors import PlanError
from tvm_split.planner.graph import LayerGraph, ModelDescription
from tvm_split.shown import Shown


class Reference(Protocol):
    """The source framework, at hand to say what the right answer is."""

    def outputs(self, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """The model's outputs for these inputs, computed by the source framework."""

    def values(self, inputs: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """Pairs of a variable's name in ``Model.module`` and its value in the source framework, in execution order.

        Only variables that stand for one tensor of the source are in it.
        """


AnnotatedSplit = Callable[[str | None, Sequence[str]], Mapping[str, Sequence[str]]]
"""Layers by machine, for the name of a configuration (None: the only one) and the machines of the cluster."""


@dataclass(frozen=True)
class Model(Shown):
    """A network as one Relax module.

    ``module`` has one function, ``main``: a single dataflow block over static shapes, whose parameters are the
    model's inputs (weights are bound as constants) and which returns a tuple with one tensor per model output.

    ``layers`` gives, for every variable that ``main`` binds, the name of the layer it came from, in the source's own
    words (torch module path, ONNX node name, scopes of JAX, layers of Keras). Its keys are the variables' name hints,
    which are unique.

    ``tolerance`` is how far from the reference it may be, as a share of the largest magnitude, where the source leaves
    more open than its dtypes do: quantised networks are rounded after each operator.

    ``annotated_split`` reads a split from annotations of the source, where its format can have any.
    """

    name: str
    framework: str
    module: tvm.IRModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layers: Mapping[str, str]
    reference: Reference | None = field(default=None, compare=False)
    example_inputs: tuple[np.ndarray, ...] | None = field(default=None, compare=False)
    tolerance: float | None = field(default=None, compare=False)
    annotated_split: AnnotatedSplit | None = field(default=None, compare=False)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Every layer once, in the order of execution."""
        return tuple(dict.fromkeys(self.layers.values()))

    def split_of_source(self, wanted: str, machines: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """The layers by machine that the source says; ``wanted`` is ``source`` or ``source:CONFIGURATION``.

        Raises:
            PlanError: the source has no annotations, or they make no split of these machines.
        """
        if self.annotated_split is None:
            raise PlanError(f"split is {wanted!r}, and only ONNX models have annotations of devices; name the layers")
        split = self.annotated_split(wanted.partition(":")[2] or None, machines)
        return {machine: tuple(layers) for machine, layers in split.items()}

    @cached_property
    def graph(self) -> LayerGraph:
        """What depends on what."""
        return layer_graph(self)

    @cached_property
    def description(self) -> ModelDescription:
        """What a planner needs to know of it."""
        return describe(self)

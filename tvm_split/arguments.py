"""Convert arguments of users: a path to a model, cluster, plan or bundle, and inputs by position or by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rpc_runtime.errors import InputError
from rpc_runtime.program.specs import TensorSpec
from tvm_split.cluster.cluster import Cluster, cluster_of
from tvm_split.cluster.launcher import Launcher
from tvm_split.compiler.bundle import Bundle
from tvm_split.errors import BundleError, ClusterError, ModelImportError, OpenAxesError, PlanError, required
from tvm_split.frontends import is_network, load_model
from tvm_split.frontends.names import identifier
from tvm_split.model import Model
from tvm_split.placement.plan import Plan

ModelLike = Model | str | Path
ClusterLike = Cluster | Launcher | str | Path
PlanLike = Plan | str | Path
BundleLike = Bundle | str | Path


def as_model(value: Any, inputs: Sequence[TensorSpec] = ()) -> Model:
    """Return ``value`` if it is a Model, else the Model that `load_model` imports from it.

    ``inputs`` give the sizes of axes that the source leaves open. Raises ModelImportError.
    """
    try:
        return load_model(value)
    except OpenAxesError:
        if not inputs:
            raise
        sizes = {f"{spec.name}[{axis}]": size for spec in inputs for axis, size in enumerate(spec.shape)}
        return load_model(value, dimensions=sizes)
    except ModelImportError as error:
        if not is_network(value):
            raise
        hint = "load it first, model = tvm_split.load_model(network, example_inputs), and give the model"
        raise ModelImportError(f"{error}; {hint}") from error


def as_cluster(value: Any) -> Cluster:
    """Return ``value`` if it is a Cluster, else the cluster of a launcher or at a location. Raises ClusterError."""
    if isinstance(value, Launcher):
        return cluster_of(value)
    if isinstance(value, str | Path):
        return Cluster.at(value)
    return required(Cluster, value, ClusterError, "give a Cluster, a cluster file, or a location such as 'local:2'")


def as_plan(value: Any) -> Plan:
    """Return ``value`` if it is a Plan, else the plan in the file at this path. Raises PlanError."""
    if isinstance(value, str | Path):
        return Plan.load(value)
    return required(Plan, value, PlanError, "give what tvm_split.plan(model, cluster) returns, or a plan file")


def as_bundle(value: Any) -> Bundle:
    """Return ``value`` if it is a Bundle, else the bundle in the folder at this path. Raises BundleError."""
    if isinstance(value, str | Path):
        return Bundle.load(value)
    return required(Bundle, value, BundleError, "give what tvm_split.compile(model, plan) returns, or its folder")


def inputs_of_call(
    expected: Sequence[TensorSpec], positional: Sequence[Any], named: Mapping[str, Any]
) -> Sequence[Any]:
    """Return the inputs of a call in the model's order; names are the model's own, or those of its source.

    A single dict, or a single tuple of arrays, stands for all inputs, as in a stream.

    Raises:
        InputError: a name is unknown, is missing, or is that of an input that has its value by position.
    """
    if len(positional) == 1 and not named and (isinstance(positional[0], Mapping) or _has_all(expected, positional[0])):
        return inputs_of_batch(expected, positional[0])
    if not named:
        return positional
    rest = [spec.name for spec in expected[len(positional) :]]
    by_name = {identifier(str(name)): value for name, value in named.items()}
    if set(rest) != set(by_name) or len(by_name) < len(named):
        by_position = f"{len(positional)} by position and " if positional else ""
        raise InputError(
            f"the model's inputs are {', '.join(map(str, expected))}; {by_position}those with the "
            f"names {', '.join(map(str, named))} were given"
        )
    return [*positional, *(by_name[name] for name in rest)]


def inputs_of_batch(expected: Sequence[TensorSpec], batch: Any) -> Sequence[Any]:
    """Return the inputs of one micro-batch of a stream: a dict by name, a tuple or list of all, or a bare array."""
    if isinstance(batch, Mapping):
        return inputs_of_call(expected, (), batch)
    return batch if isinstance(batch, tuple | list) else (batch,)


def _has_all(expected: Sequence[TensorSpec], value: Any) -> bool:
    """Whether ``value`` is a tuple of one array per input, and not a single input written as a tuple of numbers."""
    return (
        isinstance(value, tuple)
        and len(value) == len(expected)
        and all(getattr(array, "ndim", None) == len(spec.shape) for array, spec in zip(value, expected, strict=True))
    )

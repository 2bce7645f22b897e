"""What users may give instead of a model, a cluster, a plan or a bundle: mostly the path of its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.program import TensorSpec
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import Launcher
from tvm_split.compiler.bundle import Bundle
from tvm_split.errors import BundleError, ClusterError, ModelImportError, OpenAxesError, PlanError
from tvm_split.frontends import is_network, load_model
from tvm_split.model import Model
from tvm_split.planner.plan import Plan

ModelLike = Model | str | Path
ClusterLike = Cluster | Launcher | str | Path
PlanLike = Plan | str | Path
BundleLike = Bundle | str | Path

Value = TypeVar("Value")


def as_model(value: Any, inputs: Sequence[TensorSpec] = ()) -> Model:
    """Return a Model, or the one that `load_model` makes of another source; ``inputs`` have sizes for open axes.

    Raises ModelImportError.
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
    """Return a cluster, what a launcher finds, or the cluster at a location. Raises ClusterError."""
    if isinstance(value, Launcher):
        return value.find()
    if isinstance(value, str | Path):
        return Cluster.at(value)
    return required(Cluster, value, ClusterError, "give a Cluster, a cluster file, or a location such as 'local:2'")


def as_plan(value: Any) -> Plan:
    """Return a plan, or the one in a file. Raises PlanError."""
    if isinstance(value, str | Path):
        return Plan.load(value)
    return required(Plan, value, PlanError, "give what tvm_split.plan(model, cluster) returns, or a plan file")


def as_bundle(value: Any) -> Bundle:
    """Return a bundle, or the one in a folder. Raises BundleError."""
    if isinstance(value, str | Path):
        return Bundle.load(value)
    return required(Bundle, value, BundleError, "give what tvm_split.compile(model, plan) returns, or its folder")


def required(kind: type[Value], value: Any, error: type[TvmSplitError], hint: str) -> Value:
    """Return a value of a class; raise an error that says what to give instead of a value of another class."""
    if not isinstance(value, kind):
        raise error(f"got a value of class {type(value).__name__} instead of {kind.__name__}: {hint}")
    return value

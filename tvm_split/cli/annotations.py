"""ONNX's multi-device annotations on the command line: a split read from a model, a plan written into one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_split.cli.wrong_use import WrongUseError

if TYPE_CHECKING:
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.model import Model
    from tvm_split.planner.plan import Plan

SplitFromModelOption = Annotated[
    bool,
    typer.Option(
        "--split-from-model", help="Split as the ONNX file's own multi-device annotations say; devices are machines."
    ),
]
ConfigurationOption = Annotated[
    str | None,
    typer.Option(
        "--configuration", metavar="NAME", help="Which device configuration of the ONNX file, if it has several."
    ),
]
WriteAnnotationsOption = Annotated[
    Path | None,
    typer.Option(
        "--write-annotations", metavar="FILE.onnx", help="Write the model with the plan as multi-device annotations."
    ),
]


@dataclass(frozen=True)
class AnnotatedModel:
    """An ONNX file whose annotations decide the split."""

    path: str
    configuration: str | None = None

    def split(self, model: Model, cluster: Cluster) -> dict[str, list[str]]:
        """Layers by machine; devices without names are the cluster's machines, in order.

        Raises:
            PlanError: the file has no annotations, or some that make no split.
        """
        from tvm_split.frontends.onnx_annotations import read_model, split_from_annotations

        return split_from_annotations(
            read_model(self.path), model.layer_names, configuration=self.configuration, machines=cluster.machine_names
        )


def annotated_model(source: str, wanted: bool, configuration: str | None) -> AnnotatedModel | None:
    """What ``--split-from-model`` and ``--configuration`` ask for."""
    if not wanted:
        if configuration is not None:
            raise WrongUseError("belongs to --split-from-model", "--configuration")
        return None
    require_onnx(source, "--split-from-model")
    return AnnotatedModel(source, configuration)


def write_annotated(source: str, plan: Plan, path: Path) -> None:
    """Write the ONNX file ``source`` to ``path``, annotated by a plan."""
    from tvm_split.frontends.onnx_annotations import read_model, save_model, write_annotations

    save_model(write_annotations(read_model(source), plan), source, path)


def require_onnx(source: str, option: str) -> None:
    """Raise a `WrongUseError` for a model that cannot be annotated."""
    if Path(source).suffix.lower() != ".onnx":
        raise WrongUseError(f"only ONNX files have annotations of devices; {source!r} is none", option)

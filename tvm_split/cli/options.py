"""Options that several commands have, each with one spelling and one help text; and the error for wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rpc_runtime.errors import TvmSplitError

MODEL_HELP = (
    "A file (.onnx, .pt2 as torch.export.save writes it, .keras, .mlir, or .jax as jax.export serialises it), the "
    "folder of a SavedModel, or MODULE:NAME, a Python function that returns a network and its example inputs, or an "
    "nn.Module (then with --input-shape)."
)


class WrongUseError(TvmSplitError, ValueError):
    """What is wrong with an option or argument, in one line; ends a command with exit code 2."""

    def __init__(self, text: str, option: str) -> None:
        super().__init__(f"{option}: {text}")


def require_folder(path: Path | None, option: str) -> None:
    """Before work starts whose result is to be written to a file, if one is given: that its folder is there."""
    if path is not None and not path.absolute().parent.is_dir():
        raise WrongUseError(f"there is no folder {str(path.parent)!r} to write {path.name} into; make it first", option)


Objective = Literal["throughput", "latency"]
Precision = Literal["float32", "float16", "bfloat16"]
"""As the planner has them, in a module that commands which do not plan need not load."""

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="A folder of `tvm-split compile`.", exists=True, file_okay=False)
]
BatchOption = Annotated[
    int | None, typer.Option("--batch", min=1, help="The size of an open first axis of the inputs.")
]
DimensionOption = Annotated[
    list[str] | None,
    typer.Option("--dimension", metavar="NAME=SIZE", help="The size of an open axis, by its name. Repeatable."),
]
InputShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input-shape",
        metavar="1,3,224,224[:float32]",
        help="Shape and dtype of an input of an nn.Module that comes without example inputs. One per input, in order.",
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="A cluster file (YAML) that names machines with running workers."),
]
TrackerOption = Annotated[
    str | None,
    typer.Option(
        "--tracker",
        metavar="HOST:PORT",
        help="Instead of a cluster file: the workers that a TVM RPC tracker lists now.",
    ),
]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="With --tracker: those of this key (default: of every key).")
]
KubernetesOption = Annotated[
    str | None,
    typer.Option("--kubernetes", metavar="LABELS", help="Instead of a file: the ready pods that have these labels."),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", help="With --kubernetes: their namespace (default: kubectl's own).")
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="Of workers not in a file: their secret (default: $TVM_SPLIT_TOKEN)."),
]
TlsAuthorityOption = Annotated[
    Path | None,
    typer.Option("--tls-ca", metavar="PEM", help="Of workers not in a file: use TLS, trust this authority."),
]
TlsCertificateOption = Annotated[
    Path | None, typer.Option("--tls-certificate", metavar="PEM", help="With --tls-ca: prove who you are, too.")
]
TlsKeyOption = Annotated[Path | None, typer.Option("--tls-key", metavar="PEM", help="The key of --tls-certificate.")]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Instead of a cluster: so many worker processes on this host."),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads of each worker process on this host (default: 1).")
]
InProcessOption = Annotated[
    bool, typer.Option("--in-process", help="No workers: call the stages in turn in this process.")
]
InFlightOption = Annotated[
    int | None,
    typer.Option(
        "--in-flight",
        min=1,
        help="So many micro-batches under way at most (default: as many as queues hold; for latency, as planned).",
    ),
]
DatabaseOption = Annotated[
    Path | None,
    typer.Option(
        "--database",
        metavar="FOLDER",
        help="The folder of tuned kernels (default: $TVM_SPLIT_DATABASE, else tvm-split/tuning in the user's cache).",
        file_okay=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write the result as JSON, and nothing else, to stdout.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="The longest wait for a worker or a result.")
]

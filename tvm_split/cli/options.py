"""Command-line options: those made from dataclass fields by `rpc_runtime.option`, and those of several commands."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.option import default_of, options

HIDDEN = "hidden"
"""The annotation of an option group that a command accepts, but does not show in its help."""


SIMPLE = {int, float, bool, str, Path, type(None)}
"""Types of options with a single value; an option of another type can be repeated."""


class WrongUseError(TvmSplitError, ValueError):
    """An error in the use of an option or argument; it ends a command with exit code 2."""

    def __init__(self, text: str, option: str) -> None:
        super().__init__(f"{option}: {text}")


def options_of(group: type, *, hidden: bool = False) -> list[inspect.Parameter]:
    """Return a dataclass's options as parameters for typer, one for each field."""
    hints = get_type_hints(group)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, **_default_and_type(group, field, hints[field.name], hidden)
        )
        for field in options(group)
    ]


def flag_of(group: type, name: str) -> str:
    """Return the command-line flag of a field."""
    shown: dict[str, Any] = next(
        (field.metadata["json_schema_extra"] for field in options(group) if field.name == name), {}
    )
    return shown.get("flag") or "--" + name.replace("_", "-")


def _default_and_type(group: type, field: dataclasses.Field[Any], hint: Any, hidden: bool) -> dict[str, Any]:
    """Return an option's default and annotation; types other than `SIMPLE` and choices become repeatable text."""
    default, text = default_of(field), field.metadata["description"]
    flags = flag_of(group, field.name).split()
    if default is True:
        flags, text = [f" /{flags[0]}"], f"Leave out {text[0].lower()}{text[1:]}"
    if not (get_origin(hint) is Literal or set(get_args(hint) or (hint,)) <= SIMPLE):
        default, hint, text = None, list[str] | None, f"{text} Repeatable."
    shown: Any = typer.Option(
        *flags,
        help=text,
        min=field.metadata.get("ge"),
        metavar=field.metadata["json_schema_extra"]["metavar"],
        hidden=hidden,
        rich_help_panel=getattr(group, "PANEL", None),
    )
    return {"default": default, "annotation": Annotated[hint, shown]}


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer in which each dataclass parameter is replaced by one option per field."""
    hints = get_type_hints(command, include_extras=True)
    groups = _groups_of(hints)
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += options_of(groups[name], hidden=HIDDEN in get_args(hints[name]))
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = _instance(group, {field.name: values.pop(field.name) for field in options(group)})
        command(**values)

    del with_options.__wrapped__  # so that typer sees the options instead
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def has_hidden(command: Callable[..., None]) -> bool:
    """Whether a command accepts options that its help does not show."""
    return any(HIDDEN in get_args(hint) for hint in get_type_hints(command, include_extras=True).values())


def _groups_of(hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a command whose types are dataclasses."""
    kinds = {name: get_args(hint)[0] if get_origin(hint) is Annotated else hint for name, hint in hints.items()}
    return {name: kind for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}


def _instance(group: type, values: Mapping[str, Any]) -> Any:
    """Make a group from its options; errors name the command-line flags instead of the fields."""
    try:
        return group(**{name: value for name, value in values.items() if value not in (None, [])})
    except TvmSplitError as error:
        raise wrong_use(group, error) from error


def wrong_use(group: type, error: TvmSplitError) -> TvmSplitError:
    """Return the error with command-line flags in place of the fields that it names, if it names any."""
    fields = getattr(error, "fields", ())
    if not fields:
        return error
    return WrongUseError(error.problem, ", ".join(flag_of(group, name) for name in fields))  # type: ignore[attr-defined]


def require_folder(path: Path | None, option: str) -> None:
    """Raise a `WrongUseError` if the folder of an output file does not exist, before any work starts."""
    if path is not None and not path.absolute().parent.is_dir():
        raise WrongUseError(f"there is no folder {str(path.parent)!r} to write {path.name} into; make it first", option)


MODEL_HELP = (
    "A file (.onnx, .pt2 as torch.export.save writes it, .keras, .mlir, or .jax as jax.export serialises it), the "
    "folder of a SavedModel, or MODULE:NAME, a Python function that returns a network and its example inputs, or an "
    "nn.Module (then with --input-shape)."
)
SOURCE_HELP = "A folder of `tvm-split compile`, or a MODEL as for `tvm-split plan`, planned and compiled first."

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
SourceArgument = Annotated[str, typer.Argument(metavar="BUNDLE|MODEL", help=SOURCE_HELP, show_default=False)]
BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="A folder of `tvm-split compile`.", exists=True, file_okay=False)
]
InFlightOption = Annotated[
    int | None,
    typer.Option(
        "--in-flight",
        min=1,
        help="So many micro-batches under way at most (default: as many as queues hold; for latency, as planned).",
    ),
]
RenameOption = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="OLD=NEW", help="Of a bundle: its machine OLD is NEW of the cluster. Repeatable."),
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

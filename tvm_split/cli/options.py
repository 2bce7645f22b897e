"""Options: those of dataclasses whose fields `rpc_runtime.option` makes, and those that several commands have."""

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
"""Annotates a group of options that a command accepts, and that its help does not show."""


SIMPLE = {int, float, bool, str, Path, type(None)}
"""Types of which an option has one value."""


class WrongUseError(TvmSplitError, ValueError):
    """What is wrong with an option or argument, in one line; ends a command with exit code 2."""

    def __init__(self, text: str, option: str) -> None:
        super().__init__(f"{option}: {text}")


def options_of(group: type, *, hidden: bool = False) -> list[inspect.Parameter]:
    """The parameters, for typer, of a dataclass with options: one for each field."""
    hints = get_type_hints(group)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, **_default_and_type(group, field, hints[field.name], hidden)
        )
        for field in options(group)
    ]


def flag_of(group: type, name: str) -> str:
    """How the command line calls a field."""
    shown: dict[str, Any] = next(
        (field.metadata["json_schema_extra"] for field in options(group) if field.name == name), {}
    )
    return shown.get("flag") or "--" + name.replace("_", "-")


def _default_and_type(group: type, field: dataclasses.Field[Any], hint: Any, hidden: bool) -> dict[str, Any]:
    """Default and annotation of an option; what is neither a number, a path, a choice nor a flag is repeated text."""
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
    """A command for typer whose parameters that are dataclasses become one option for each of their fields."""
    hints = get_type_hints(command, include_extras=True)
    groups = _groups_of(hints)
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += options_of(groups[name], hidden=HIDDEN in get_args(hints[name]))
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = _instance(group, {field.name: given.pop(field.name) for field in options(group)})
        command(**given)

    del with_options.__wrapped__  # typer is to see the options
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options


def has_hidden(command: Callable[..., None]) -> bool:
    """Whether a command accepts options that its help does not show."""
    return any(HIDDEN in get_args(hint) for hint in get_type_hints(command, include_extras=True).values())


def _groups_of(hints: Mapping[str, Any]) -> dict[str, Any]:
    """The dataclasses among the types of a command's parameters."""
    kinds = {name: get_args(hint)[0] if get_origin(hint) is Annotated else hint for name, hint in hints.items()}
    return {name: kind for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}


def _instance(group: type, given: Mapping[str, Any]) -> Any:
    """The group of these options; its errors name the options as the command line does."""
    try:
        return group(**{name: value for name, value in given.items() if value not in (None, [])})
    except TvmSplitError as error:
        raise wrong_use(group, error) from error


def wrong_use(group: type, error: TvmSplitError) -> TvmSplitError:
    """The same error with options in place of the fields that it names, if it names any."""
    fields = getattr(error, "fields", ())
    if not fields:
        return error
    return WrongUseError(error.problem, ", ".join(flag_of(group, name) for name in fields))  # type: ignore[attr-defined]


def require_folder(path: Path | None, option: str) -> None:
    """Before work starts whose result is to be written to a file, if one is given: that its folder is there."""
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

"""Command-line options: those made from dataclass fields by `rpc_runtime.option`, and those of several commands."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.option import default_of, option, options
from tvm_split.errors import TraceError

USUAL = frozenset(("cluster", "workers", "batch", "objective", "split", "estimate", "output", "details", "json"))
"""The options that a command's help shows before the groups of the others."""
HIDDEN = "hidden"
"""The annotation of an option group that a command accepts, but does not show in its help."""
SIMPLE = {int, float, bool, str, Path, type(None)}
"""Types of options with a single value; an option of another type can be repeated."""


MOST = 1e9
"""The largest number that an option takes, as `parameters.Seconds`."""


class WrongUseError(TvmSplitError, ValueError):
    """An error in the use of an option or argument; it ends a command with exit code 2."""

    def __init__(self, text: str, option: str) -> None:
        super().__init__(f"{option}: {text}")


def output(default: Any, help: str, *, file: str | None = None, **how: Any) -> Any:
    """Return an `option` for a file to write, with the placeholder ``file``, or a folder; its parent must exist."""
    kind: dict[str, Any] = {"metavar": file or "FOLDER", "file_okay": file is not None, "dir_okay": file is None}
    return option(default, help, callback=require_parent, **kind, **how)


def require_parent(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Raise a `WrongUseError` before any work starts if there is no folder to write ``path`` into."""
    if path is not None and not path.absolute().parent.is_dir():
        name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.opts[0].upper()
        raise WrongUseError(f"there is no folder {str(path.parent)!r} to write {path.name} into; make it first", name)
    return path


def _require_number(parameter: typer.CallbackParam, number: float | None) -> float | None:
    """Raise a `WrongUseError` for an infinity or NaN, which typer takes for numbers, and for what is too large."""
    if number is not None and not abs(number) <= MOST:
        raise WrongUseError(f"{number:g} is not a number of at most {MOST:g}", parameter.opts[0])
    return number


def _require_trace(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Raise a `WrongUseError` before any work starts if no trace can be written to ``path``."""
    if path is not None:
        from tvm_split.observing.trace import writer_for  # imported here, since it loads numpy

        try:
            writer_for(path)
        except TraceError as error:
            raise WrongUseError(str(error), parameter.opts[0]) from error
    return require_parent(parameter, path)


def _flags(name: str, field: dataclasses.Field[Any] | None) -> list[str]:
    flag = field and field.metadata["json_schema_extra"]["flag"]
    return (flag or "--" + name.replace("_", "-")).split()


def _parameter(name: str, field: dataclasses.Field[Any], hint: Any, **how: Any) -> inspect.Parameter:
    """Return an option as a parameter for typer; types other than `SIMPLE` and choices become repeatable text."""
    default, text = default_of(field), field.metadata["description"]
    flags = _flags(name, field)
    if default is True:
        default, text = False, f"Leave out {text[0].lower()}{text[1:]}"
    parts = (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
    if not all(part in SIMPLE or get_origin(part) is Literal for part in parts):
        default, hint, text = None, list[str] | None, f"{text} Repeatable."
    shown = {key: value for key, value in field.metadata["json_schema_extra"].items() if key != "flag"}
    shown |= {"callback": _require_number} if float in parts else {}
    annotation = Annotated[hint, typer.Option(*flags, help=text, min=field.metadata.get("ge"), **shown, **how)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` as a function for typer, with one option for each field of its dataclass parameters.

    A parameter whose default is an `option` becomes one option too.
    """
    hints = get_type_hints(command, include_extras=True)
    kinds = {name: get_args(hint)[0] if get_origin(hint) is Annotated else hint for name, hint in hints.items()}
    groups: dict[str, Any] = {name: kind for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            group, fields = groups[name], get_type_hints(groups[name])
            hidden, panel = HIDDEN in get_args(hints[name]), getattr(group, "PANEL", None)
            for field in options(group):
                how = {"hidden": hidden, "rich_help_panel": None if field.name in USUAL else panel}
                parameters.append(_parameter(field.name, field, fields[field.name], **how))
        elif isinstance(parameter.default, dataclasses.Field):
            parameters.append(_parameter(name, parameter.default, hints[name]))
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        for name, group in groups.items():
            given = {field.name: values.pop(field.name) for field in options(group)}
            # The option of a field that is true by default sets it to false.
            given |= {field.name: not given[field.name] for field in options(group) if default_of(field) is True}
            with flags_named(group):
                values[name] = group(**{field: value for field, value in given.items() if value not in (None, [])})
        command(**values)

    del with_options.__wrapped__  # so that typer sees the options instead
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def has_hidden(command: Callable[..., None]) -> bool:
    """Whether a command accepts options that its help does not show."""
    return any(HIDDEN in get_args(hint) for hint in get_type_hints(command, include_extras=True).values())


@contextmanager
def flags_named(group: type) -> Iterator[None]:
    """Replace errors about fields of ``group`` by a `WrongUseError` that names their command-line flags."""
    try:
        yield
    except TvmSplitError as error:
        fields = getattr(error, "fields", ())
        if not fields:
            raise
        by_name = {field.name: field for field in options(group)}
        flags = ", ".join(_flags(name, by_name.get(name))[0] for name in fields)
        raise WrongUseError(error.problem, flags) from error  # type: ignore[attr-defined]


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
IN_FLIGHT = option(
    None,
    "The most micro-batches in flight (default: as many as queues hold; for latency, as planned).",
    minimum=1,
)
TRACE = option(
    None,
    "Write a trace: .pftrace for Perfetto, .xplane (a folder) for TensorBoard, .html, .svg, or .json.",
    metavar="FILE",
    callback=_require_trace,
)
KERNELS = option(0, "Trace single kernels too, of each stage's next N micro-batches.", metavar="N", minimum=0)
DEPLOYMENT = option(
    None, "Its letters as `tvm-split status` shows them, or its model (default: the only one).", metavar="NAME"
)
JSON = option(False, "Write the result as JSON, and nothing else, to stdout.")
TIMEOUT = option(60.0, "The longest wait for a worker or a result.", metavar="SECONDS", minimum=0.1)

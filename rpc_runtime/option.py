"""Dataclass fields that are also options of a command line, of a Python call and of a file."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def option(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    minimum: float | None = None,
    flag: str | None = None,
    **further: Any,
) -> Any:
    """Return a dataclass field with the metadata of a command-line option.

    Args:
        default: the default value; a dictionary or list is copied for each instance.
        help: one or two sentences for users.
        metavar: placeholder for the value in the help text.
        minimum: the smallest allowed number.
        flag: the option's name if it differs from the field's; for a flag that is on by default, the name that turns it
            off.
        further: checks of the command line's library, such as ``exists`` of a path.
    """
    metadata: dict[str, Any] = {"description": help, "json_schema_extra": {"metavar": metavar, "flag": flag, **further}}
    if minimum is not None:
        metadata["ge"] = minimum
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options(group: type) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a dataclass that `option` made."""
    return tuple(field for field in dataclasses.fields(group) if "description" in field.metadata)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default value of a field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def takes_options(group: type) -> Callable[[Function], Function]:
    """Return a decorator that adds a group's options to the signature and docstring of a function with ``**fields``."""

    def shown(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        named = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(field), annotation=field.type
            )
            for field in options(group)
            if field.name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*parameters, *named])  # type: ignore[attr-defined]
        listed = [f"    {field.name}: {field.metadata['description']}" for field in options(group)]
        function.__doc__ = "\n".join(
            [inspect.cleandoc(function.__doc__ or ""), "", f"Fields of `{group.__name__}`:", *listed]
        )
        return function

    return shown

"""A field of a dataclass that is an option as well: of a command, of a Python call and of a file."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def option(
    default: Any, help: str, *, metavar: str | None = None, minimum: float | None = None, flag: str | None = None
) -> Any:
    """A dataclass field with what a command line needs to know of it.

    Args:
        default: the value where nothing is given; a dictionary or list is copied for each instance.
        help: one or two sentences for users.
        metavar: what help shows in place of the value.
        minimum: the least number that is allowed.
        flag: the option's name where it differs from the field's; of a flag that is on by default, what turns it off.
    """
    metadata: dict[str, Any] = {"description": help, "json_schema_extra": {"metavar": metavar, "flag": flag}}
    if minimum is not None:
        metadata["ge"] = minimum
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options(group: type) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a dataclass that `option` made."""
    return tuple(field for field in dataclasses.fields(group) if "description" in field.metadata)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The value of a field that is not given."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def takes_options(group: type) -> Callable[[Function], Function]:
    """For a function with ``**fields``: show the group's options in its signature and docstring."""

    def shown(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        named = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(field), annotation=field.type
            )
            for field in options(group)
        ]
        function.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
        listed = [f"    {field.name}: {field.metadata['description']}" for field in options(group)]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Fields of the request:", *listed])
        return function

    return shown

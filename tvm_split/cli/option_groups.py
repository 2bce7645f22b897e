"""Options that belong together, as one frozen dataclass that every command which has them takes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer whose parameters that are dataclasses become one option for each of their fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += [
                inspect.Parameter(field, parameter.KEYWORD_ONLY, default=each.default, annotation=each.annotation)
                for field, each in inspect.signature(groups[name], eval_str=True).parameters.items()
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    del with_options.__wrapped__  # typer is to see the options
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options

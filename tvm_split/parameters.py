"""Types of numbers that users give, and the validation of arguments by the types of a function's parameters."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Field, ValidationError

from rpc_runtime.errors import InputError, TvmSplitError
from tvm_split.values import adapter_of, text_of


def _number(value: object) -> object:
    """Return ``value``, a string as a float; raise a ValueError for booleans and strings that are not numbers.

    YAML 1.1 reads 16e9 as a string, since its exponent has no sign.
    """
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("must be a number, without a unit") from None


Number = BeforeValidator(_number)
Whole = Annotated[int, Number]
Natural = Annotated[int, Number, Field(ge=0)]
Count = Annotated[int, Number, Field(ge=1)]
Share = Annotated[float, Number, Field(ge=0, le=1)]
Size = Annotated[int, Number, Field(ge=1, le=2**31 - 1)]
"""The size of an axis: some importers and frameworks use 32-bit sizes."""
OnFailure = Annotated[Literal["raise", "recover"], Field()]
"""What a deployment does when one of its machines fails. A bare literal would not be validated."""
Seconds = Annotated[float, Number, Field(gt=0, le=1e9)]
"""A duration; its sum with the seconds since 1970 must fit into gRPC's 64 bits of nanoseconds."""


@cache
def _checked_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters that `fitting` validates: bool, str, Path and ``Annotated`` types."""
    inner = inspect.unwrap(function)
    # Without the type of the result, which a module may import later.
    parameters = {name: kind for name, kind in inner.__annotations__.items() if name != "return"}
    kinds = get_type_hints(SimpleNamespace(__annotations__=parameters), inner.__globals__, include_extras=True)
    return {name: kind for name, kind in kinds.items() if _is_checked(kind)}


def _is_checked(kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType, Mapping):
        return all(map(_is_checked, get_args(kind)))
    if get_origin(kind) is Annotated:
        return not any(getattr(part, "alias", None) for part in kind.__metadata__)  # Pydantic warns of an alias here.
    return kind in (bool, str, Path, NoneType)


def fitting(function: Callable[..., Any], name: str, value: Any, error: type[TvmSplitError] = InputError) -> Any:
    """Return an argument of a function, converted to the type of its parameter.

    Raises:
        TvmSplitError: of the class ``error``: the value does not fit; names the parameter and what is allowed.
    """
    try:
        return adapter_of(_checked_types(function).get(name, Any)).validate_python(value)
    except ValidationError as failure:
        raise error(f"{name} is {value!r:.80}: {text_of(failure.errors(include_url=False)[0])}") from None


def fit_fields(instance: Any, error: type[TvmSplitError]) -> None:
    """Convert the fields of a new instance of a dataclass to their types; raises as `fitting`."""
    for name, value in vars(instance).items():
        object.__setattr__(instance, name, fitting(type(instance).__init__, name, value, error))

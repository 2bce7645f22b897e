"""The lock around code with process-wide state: TVM's Python functions, and the tracing of frameworks.

TVM keeps its current builder and its current tag in class variables, and torch.export and the frontends replace
methods of classes while they trace. Such code fails in several threads at once, or loses layer names without an error.
"""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

ONE_AT_A_TIME = threading.RLock()
"""Held by the only thread that may import, rewrite or compile a network."""


def one_at_a_time(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function, wrapped so that it holds `ONE_AT_A_TIME` while it runs."""

    @functools.wraps(function)
    def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        with ONE_AT_A_TIME:
            return function(*arguments, **named)

    return call
